//! What SGLang answers: an event of a stream, a whole answer, or an error.
//!
//! An event has all tokens so far, or those since the last one, as the server was started: how many there are tells which.

use protocol::request_plane::{TokenLogprobs, TopLogprob};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::super::dialect::{End, Piece, Refusal};

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    output_ids: Option<Vec<u32>>,
    #[serde(default)]
    meta_info: Option<Meta>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Meta {
    #[serde(default)]
    finish_reason: Option<Reason>,
    #[serde(default)]
    completion_tokens: Option<usize>,
    #[serde(default)]
    cached_tokens: Option<usize>,
    #[serde(default)]
    output_token_logprobs: Option<Vec<Logprob>>,
    #[serde(default)]
    output_top_logprobs: Option<Vec<Option<Vec<Logprob>>>>,
    #[serde(default)]
    input_token_logprobs: Option<Vec<Logprob>>,
    #[serde(default)]
    input_top_logprobs: Option<Vec<Option<Vec<Logprob>>>>,
}

/// The log-probability, the token, and its text.
type Logprob = (Option<f32>, u32, IgnoredAny);

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Reason {
    Length,
    Stop {
        #[serde(default)]
        matched: Option<Value>,
    },
    Abort {
        #[serde(default)]
        message: Option<String>,
        #[serde(default)]
        status_code: Option<u16>,
    },
    #[serde(other)]
    Other,
}

/// Reads an answer.
pub(super) fn read(text: &[u8]) -> Result<Piece, Refusal> {
    let answer: Answer =
        serde_json::from_slice(text).map_err(|error| Refusal::Failed(format!("no answer: {error}")))?;
    if let Some(error) = answer.error {
        return Err(refused(500, &error));
    }
    let meta = answer.meta_info.ok_or_else(|| Refusal::Failed("an answer without meta_info".into()))?;
    let end = match meta.finish_reason {
        Some(Reason::Abort { message, status_code: Some(status) }) => {
            return Err(Refusal::of_status(status, &message.unwrap_or_else(|| "aborted".into())));
        }
        reason => reason.map(end),
    };
    let tokens = match answer.output_ids {
        Some(tokens) => tokens,
        None if end.is_some() && meta.completion_tokens == Some(0) => Vec::new(),
        None => return Err(Refusal::Failed("an answer without output_ids; SGLang is too old".into())),
    };
    let outputs = logprobs(meta.output_token_logprobs, meta.output_top_logprobs);
    let mut inputs = logprobs(meta.input_token_logprobs, meta.input_top_logprobs).into_iter();
    // The first token of a prompt follows none.
    let _ = inputs.next();
    Ok(Piece {
        so_far: meta.completion_tokens,
        reused_tokens: meta.cached_tokens,
        logprobs: outputs.into_iter().flatten().collect(),
        prompt_logprobs: inputs.flatten().collect(),
        end,
        tokens,
        ..Piece::default()
    })
}

fn logprobs(tokens: Option<Vec<Logprob>>, tops: Option<Vec<Option<Vec<Logprob>>>>) -> Vec<Option<TokenLogprobs>> {
    let mut tops = tops.unwrap_or_default().into_iter();
    let top = |(logprob, token_id, _): Logprob| Some(TopLogprob { token_id, logprob: logprob? });
    let mut read = |(logprob, token_id, _): Logprob| {
        let alternatives = tops.next().flatten().unwrap_or_default();
        let top = alternatives.into_iter().filter_map(top).collect();
        Some(TokenLogprobs { token_id, logprob: logprob?, top })
    };
    tokens.unwrap_or_default().into_iter().map(&mut read).collect()
}

fn end(reason: Reason) -> End {
    match reason {
        Reason::Length => End::Length,
        Reason::Stop { matched: Some(Value::String(string)) } => End::String(string),
        Reason::Stop { matched } => {
            let token = matched.and_then(|token| token.as_u64()?.try_into().ok());
            token.map_or(End::LastToken, End::Token)
        }
        Reason::Abort { message, .. } => End::GivenUp(message.unwrap_or_else(|| "aborted".into())),
        Reason::Other => End::GivenUp("an end that nobody knows".into()),
    }
}

/// What an answer of another status means.
pub(super) fn refusal(status: u16, body: &[u8]) -> Refusal {
    match serde_json::from_slice::<Value>(body) {
        Ok(said) => refused(status, said.get("error").unwrap_or(&said)),
        Err(_) => Refusal::of_status(status, &format!("{status} {}", String::from_utf8_lossy(body))),
    }
}

fn refused(status: u16, error: &Value) -> Refusal {
    let code = error.get("code").and_then(Value::as_u64).and_then(|code| u16::try_from(code).ok());
    let message = error.get("message").and_then(Value::as_str).or(error.as_str());
    Refusal::of_status(code.unwrap_or(status), message.unwrap_or(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Piece {
        read(text.as_bytes()).expect("an answer")
    }

    #[test]
    fn events_say_how_many_tokens_there_are_so_far() {
        let piece =
            of(r#"{"text":"a b","output_ids":[5,6],"meta_info":{"id":"r","finish_reason":null,"prompt_tokens":4,
            "completion_tokens":2,"cached_tokens":3,"output_token_logprobs":[[-2.0,5,null],[-0.5,6,null]],
            "output_top_logprobs":[[[-0.1,9,null],[-2.0,5,null]],null],
            "input_token_logprobs":[[null,1,null],[-3.0,2,null]],"weight_version":"default"}}"#);
        assert_eq!((&piece.tokens[..], piece.so_far, piece.reused_tokens), (&[5, 6][..], Some(2), Some(3)));
        assert_eq!((piece.logprobs.len(), piece.logprobs[0].top[0].token_id), (2, 9));
        assert_eq!((piece.prompt_logprobs.len(), piece.prompt_logprobs[0].token_id), (1, 2));
    }

    #[test]
    fn each_end_is_told_from_the_others() {
        let end = |reason: &str| {
            let meta = format!(r#"{{"finish_reason":{reason},"completion_tokens":1}}"#);
            read(format!(r#"{{"output_ids":[9],"meta_info":{meta}}}"#).as_bytes()).map(|piece| piece.end)
        };
        assert_eq!(end("null"), Ok(None));
        assert_eq!(end(r#"{"type":"length","length":1}"#), Ok(Some(End::Length)));
        assert_eq!(end(r#"{"type":"stop","matched":9}"#), Ok(Some(End::Token(9))));
        assert_eq!(end(r#"{"type":"stop","matched":"END"}"#), Ok(Some(End::String("END".into()))));
        assert_eq!(end(r#"{"type":"stop","matched":null}"#), Ok(Some(End::LastToken)));
        assert_eq!(end(r#"{"type":"stop","matched":[1]}"#), Ok(Some(End::LastToken)));
        assert_eq!(end(r#"{"type":"abort","message":"gone"}"#), Ok(Some(End::GivenUp("gone".into()))));
        let full = r#"{"type":"abort","message":"full","status_code":503,"err_type":"x"}"#;
        assert_eq!(end(full), Err(Refusal::Overloaded("full".into())));
        assert!(matches!(end(r#"{"type":"new"}"#), Ok(Some(End::GivenUp(_)))));
    }

    #[test]
    fn errors_are_typed_wherever_they_come() {
        let event = |error: &str| read(format!(r#"{{"error":{error}}}"#).as_bytes()).expect_err("an error");
        assert_eq!(event(r#"{"message":"no","code":400}"#), Refusal::Invalid("no".into()));
        assert_eq!(event(r#"{"message":"no"}"#), Refusal::Failed("no".into()));
        assert_eq!(refusal(400, br#"{"error":{"message":"too long"}}"#), Refusal::Invalid("too long".into()));
        assert_eq!(refusal(503, b"busy\nmore"), Refusal::Overloaded("503 busy".into()));
        for broken in ["", "[1]", "{}", r#"{"meta_info":{}}"#, r#"{"output_ids":["x"],"meta_info":{}}"#] {
            assert!(matches!(read(broken.as_bytes()), Err(Refusal::Failed(_))), "{broken}");
        }
    }
}
