//! An OpenAI server without a model: every token is there the moment a request arrives, and each goes out on its own.
//!
//! It stands behind every router that is measured, so its own cost matters: no JSON is built that could be written down.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpListener;

/// Flags of the server.
#[derive(clap::Args)]
pub struct Options {
    /// Where it listens.
    #[arg(long)]
    address: SocketAddr,
    /// The one model that it has.
    #[arg(long)]
    model_name: String,
}

/// Tokens of an answer where the request says nothing.
const TOKENS: usize = 16;
/// Said again and again.
const WORDS: [&str; 8] = [" one", " small", " step", " at", " a", " time", " and", " on"];

/// Serves until the process is killed.
pub async fn serve(options: Options) -> anyhow::Result<()> {
    accept(TcpListener::bind(options.address).await?, options.model_name.into()).await
}

/// Answers every connection.
pub async fn accept(listener: TcpListener, model: Arc<str>) -> anyhow::Result<()> {
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        let model = model.clone();
        let service = service_fn(move |request| answer(model.clone(), request));
        tokio::spawn(async move {
            // A client that goes away is nothing to report.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(socket), service).await;
        });
    }
}

type Answer = Response<Either<Full<Bytes>, Events>>;

async fn answer(model: Arc<str>, request: Request<Incoming>) -> Result<Answer, hyper::Error> {
    Ok(match (request.method(), request.uri().path()) {
        (&Method::POST, "/v1/chat/completions") => generate(&model, &request.into_body().collect().await?.to_bytes()),
        (&Method::GET, "/health") => whole(StatusCode::OK, "{}".to_owned()),
        (&Method::GET, "/v1/models") => {
            let entry =
                json!({"id": &*model, "object": "model", "created": 0, "owned_by": "bench", "max_model_len": 131_072});
            whole(StatusCode::OK, json!({"object": "list", "data": [entry]}).to_string())
        }
        // What sglang-router asks its workers.
        (&Method::GET, "/model_info" | "/get_model_info" | "/server_info" | "/get_server_info") => {
            let info = json!({"model_path": &*model, "served_model_name": &*model, "is_generation": true});
            whole(StatusCode::OK, info.to_string())
        }
        _ => failed(StatusCode::NOT_FOUND, "no such path"),
    })
}

/// What of a request the answer depends on.
#[derive(Default, Deserialize)]
struct Ask {
    stream: Option<bool>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    stream_options: Option<StreamOptions>,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

impl Ask {
    fn tokens(&self) -> usize {
        self.max_completion_tokens.or(self.max_tokens).unwrap_or(TOKENS).max(1)
    }
}

fn generate(model: &str, body: &[u8]) -> Answer {
    let Ok(ask) = serde_json::from_slice::<Ask>(body) else { return failed(StatusCode::BAD_REQUEST, "no JSON") };
    // About four bytes a token, as in English.
    let usage = usage(body.len() / 4, ask.tokens());
    if ask.stream != Some(true) {
        return whole(StatusCode::OK, completion(model, &ask, &usage));
    }
    let events = Events::new(events(model, &ask, &usage));
    typed("text/event-stream", Response::new(Either::Right(events)))
}

fn usage(prompt: usize, answer: usize) -> String {
    let total = prompt + answer;
    format!(r#"{{"prompt_tokens":{prompt},"completion_tokens":{answer},"total_tokens":{total}}}"#)
}

fn completion(model: &str, ask: &Ask, usage: &str) -> String {
    let text: String = (0..ask.tokens()).map(|number| WORDS[number % WORDS.len()]).collect();
    let choice =
        format!(r#"{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"length"}}"#);
    format!(
        r#"{{"id":"chatcmpl-0","object":"chat.completion","created":0,"model":"{model}","choices":[{choice}],"usage":{usage}}}"#
    )
}

/// One for each token: the first begins with the role's event, the last ends the stream.
fn events(model: &str, ask: &Ask, usage: &str) -> Vec<Bytes> {
    let event = |choices: &str, end: &str| {
        format!(
            "data: {{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":\"{model}\",\
             \"choices\":[{choices}]{end}}}\n\n"
        )
    };
    let choice = |delta: &str, reason: &str| {
        event(&format!(r#"{{"index":0,"delta":{{{delta}}},"finish_reason":{reason}}}"#), "")
    };
    let last = ask.tokens() - 1;
    let of_token = |number: usize| {
        let reason = if number == last { "\"length\"" } else { "null" };
        let mut text = choice(&format!(r#""content":"{}""#, WORDS[number % WORDS.len()]), reason);
        if number == 0 {
            text.insert_str(0, &choice(r#""role":"assistant","content":"""#, "null"));
        }
        if number == last {
            if ask.stream_options.as_ref().is_some_and(|options| options.include_usage == Some(true)) {
                text += &event("", &format!(",\"usage\":{usage}"));
            }
            text += "data: [DONE]\n\n";
        }
        Bytes::from(text)
    };
    (0..=last).map(of_token).collect()
}

fn failed(status: StatusCode, message: &str) -> Answer {
    whole(status, json!({"error": {"message": message}}).to_string())
}

fn whole(status: StatusCode, text: String) -> Answer {
    let mut response = typed("application/json", Response::new(Either::Left(Full::from(text))));
    *response.status_mut() = status;
    response
}

fn typed(kind: &'static str, mut response: Answer) -> Answer {
    response.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static(kind));
    response
}

/// Writes one event at a time, as an engine does: hyper writes out what it has whenever its body has to wait.
struct Events {
    left: std::vec::IntoIter<Bytes>,
    wait: bool,
}

impl Events {
    fn new(events: Vec<Bytes>) -> Self {
        Self { left: events.into_iter(), wait: false }
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if std::mem::replace(&mut self.wait, true) {
            self.wait = false;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(self.left.next().map(|event| Ok(Frame::data(event))))
    }

    fn is_end_stream(&self) -> bool {
        self.left.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_stream_has_an_event_for_each_token_and_ends_once() {
        let ask: Ask =
            serde_json::from_str(r#"{"messages":[],"max_tokens":3,"stream_options":{"include_usage":true}}"#)
                .expect("a request");
        let writes = events("tiny", &ask, &usage(9, 3));
        assert_eq!(writes.len(), 3);
        let text = String::from_utf8(writes.concat()).expect("UTF-8");
        let data: Vec<_> = text.split_terminator("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(data.last(), Some(&"[DONE]"));
        let events: Vec<Value> = data[..5].iter().map(|event| serde_json::from_str(event).expect("JSON")).collect();
        let content: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(content, " one small step");
        assert_eq!(
            (&events[3]["choices"][0]["finish_reason"], &events[4]["usage"]["total_tokens"]),
            (&json!("length"), &json!(12))
        );
    }

    #[test]
    fn a_whole_answer_has_as_many_words_as_were_asked_for() {
        let ask = |text| serde_json::from_str::<Ask>(text).expect("a request");
        let answer: Value = serde_json::from_str(&completion(
            "tiny",
            &ask(r#"{"max_completion_tokens":2,"max_tokens":9}"#),
            &usage(1, 2),
        ))
        .expect("JSON");
        assert_eq!(answer["choices"][0]["message"]["content"], " one small");
        assert_eq!(ask("{}").tokens(), TOKENS);
        assert_eq!(ask(r#"{"max_tokens":0}"#).tokens(), 1);
    }

    #[tokio::test]
    async fn each_event_is_a_frame_with_a_wait_before_the_next() {
        let mut body = Events::new(vec![Bytes::from_static(b"a"), Bytes::from_static(b"b")]);
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut poll = || Pin::new(&mut body).poll_frame(&mut context);
        assert!(matches!(poll(), Poll::Ready(Some(Ok(_)))));
        assert!(poll().is_pending());
        assert!(matches!(poll(), Poll::Ready(Some(Ok(_)))));
        assert!(body.is_end_stream());
    }
}
