//! What `trtllm-serve` answers: an event of a stream, a whole completion, or an error.

use protocol::request_plane::TokenLogprobs;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::super::dialect::{End, Piece, Refusal};
use super::super::elsewhere;
use super::super::openai::{self, StopReason, Usage};
use super::{BACKEND, Params};

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(flatten)]
    error: Said,
}

/// What an error says; validation has a text of its own.
#[derive(Default, Deserialize)]
struct Said {
    #[serde(default)]
    error: Option<serde_json::Value>,
    #[serde(default)]
    message: Option<String>,
    #[serde(default)]
    code: Option<u16>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
    #[serde(default)]
    logprobs: Option<Logprobs>,
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    stop_reason: Option<StopReason>,
    #[serde(default)]
    disaggregated_params: Option<Box<RawValue>>,
}

/// Of the answer's tokens. Alternatives come as text, which does not say which tokens they are.
#[derive(Deserialize)]
struct Logprobs {
    token_logprobs: Vec<Option<f32>>,
}

impl Said {
    fn text(&self) -> Option<String> {
        let error = self.error.as_ref().map(|error| match error {
            serde_json::Value::String(text) => text.clone(),
            other => other.get("message").and_then(|text| text.as_str()).map_or(other.to_string(), str::to_owned),
        });
        error.or(self.message.clone())
    }
}

/// Reads an answer.
pub(super) fn read(text: &[u8]) -> Result<Piece, Refusal> {
    let answer: Answer =
        serde_json::from_slice(text).map_err(|error| Refusal::Failed(format!("no completion: {error}")))?;
    if let Some(message) = answer.error.text() {
        return Err(Refusal::of_status(answer.error.code.unwrap_or(500), &message));
    }
    let mut piece = Piece { reused_tokens: answer.usage.and_then(Usage::reused_tokens), ..Piece::default() };
    let Some(choice) = answer.choices.into_iter().next() else { return Ok(piece) };
    let handed_over = choice.disaggregated_params.is_some();
    piece.end = choice.finish_reason.as_deref().map(|reason| end(reason, choice.stop_reason, handed_over));
    piece.disaggregated_params = choice
        .disaggregated_params
        .as_deref()
        .map(|disaggregated_params| elsewhere::write(BACKEND, Params { disaggregated_params }));
    // The last event of a stream may have none.
    piece.tokens = match choice.token_ids {
        Some(tokens) => tokens,
        None if piece.end.is_some() => Vec::new(),
        None => return Err(Refusal::Failed("a completion without token_ids; TensorRT-LLM is too old".into())),
    };
    if let Some(logprobs) = choice.logprobs {
        let zipped = piece.tokens.iter().zip(&logprobs.token_logprobs);
        let read = |(&token_id, logprob): (&u32, &Option<f32>)| {
            Some(TokenLogprobs { token_id, logprob: (*logprob)?, top: Vec::new() })
        };
        let read: Option<Vec<_>> = zipped.map(read).collect();
        piece.logprobs = read.ok_or_else(|| Refusal::Failed("unreadable logprobs".into()))?;
    }
    Ok(piece)
}

fn end(reason: &str, stop: Option<StopReason>, handed_over: bool) -> End {
    match reason {
        // What is left of it is another server's.
        "not_finished" if handed_over => End::Length,
        _ => openai::end(reason, stop),
    }
}

/// What an answer of another status means.
pub(super) fn refusal(status: u16, body: &[u8]) -> Refusal {
    let said: Said = serde_json::from_slice(body).unwrap_or_default();
    openai::refusal(status, said.text(), body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Piece {
        read(text.as_bytes()).expect("a completion")
    }

    #[test]
    fn events_have_tokens_and_the_log_probability_of_each() {
        let piece = of(
            r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"",
            "token_ids":[504,7],"logprobs":{"text_offset":[0,4],"token_logprobs":[-2.5,-0.5],"tokens":[" The","x"],
            "top_logprobs":[]},"finish_reason":null,"stop_reason":null,"avg_decoded_tokens_per_iter":1.0}],"usage":null}"#,
        );
        assert_eq!((&piece.tokens[..], piece.end), (&[504, 7][..], None));
        assert_eq!((piece.logprobs[1].token_id, piece.logprobs[1].logprob), (7, -0.5));
    }

    #[test]
    fn each_end_is_told_from_the_others() {
        let end = |reason: &str, stop: &str| {
            let choice = format!(r#"{{"token_ids":[9],"finish_reason":{reason},"stop_reason":{stop}}}"#);
            of(&format!(r#"{{"choices":[{choice}]}}"#)).end
        };
        assert_eq!(end("null", "null"), None);
        assert_eq!(end(r#""length""#, "null"), Some(End::Length));
        assert_eq!(end(r#""stop""#, "null"), Some(End::LastToken));
        assert_eq!(end(r#""stop""#, "9"), Some(End::Token(9)));
        assert_eq!(end(r#""stop""#, r#""END""#), Some(End::String("END".into())));
        for reason in ["cancelled", "timeout", "not_finished"] {
            assert_eq!(end(&format!("{reason:?}"), "null"), Some(End::GivenUp(reason.into())));
        }
        assert!(of(r#"{"choices":[{"text":"","finish_reason":"stop"}]}"#).tokens.is_empty());
    }

    #[test]
    fn a_prefill_tells_where_its_kv_is_and_numbers_stay_as_they_are() {
        let piece = of(r#"{"choices":[{"token_ids":[5],"finish_reason":"not_finished","disaggregated_params":
            {"request_type":"context_only","ctx_request_id":18446744073709551615}}],
            "usage":{"prompt_tokens":16,"prompt_tokens_details":{"cached_tokens":12}}}"#);
        assert_eq!((piece.end, piece.reused_tokens), (Some(End::Length), Some(12)));
        let params = piece.disaggregated_params.expect("kept");
        assert!(params.contains("18446744073709551615"), "{params}");
        assert!(params.starts_with(r#"{"backend":"tensorrt-llm","#), "{params}");
    }

    #[test]
    fn errors_are_typed_wherever_they_come() {
        let said = r#"{"object":"error","message":"no","type":"BadRequestError","param":null,"code":400}"#;
        assert_eq!(read(said.as_bytes()).expect_err("an error"), Refusal::Invalid("no".into()));
        assert_eq!(refusal(400, br#"{"error":"1 validation error"}"#), Refusal::Invalid("1 validation error".into()));
        assert_eq!(refusal(503, b"LLM is unavailable."), Refusal::Overloaded("503 LLM is unavailable.".into()));
        assert_eq!(refusal(500, b""), Refusal::Failed("500 ".into()));
        for broken in ["", "[1]", r#"{"choices":[{"text":"no ids"}]}"#, r#"{"choices":[{"token_ids":["x"]}]}"#] {
            assert!(matches!(read(broken.as_bytes()), Err(Refusal::Failed(_))), "{broken}");
        }
    }
}
