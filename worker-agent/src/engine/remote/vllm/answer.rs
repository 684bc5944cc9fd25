//! What vLLM answers: an event of a stream, a whole completion, or an error.

use std::collections::HashMap;

use protocol::request_plane::{TokenLogprobs, TopLogprob};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::super::dialect::{Piece, Refusal};
use super::super::elsewhere;
use super::super::openai::{self, StopReason, Usage};
use super::{BACKEND, Params};

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    kv_transfer_params: Option<Box<RawValue>>,
    #[serde(default)]
    error: Option<ErrorBody>,
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
}

/// Lists of one entry for each token: of the prompt's, if they were asked for, and then of the answer's.
#[derive(Deserialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    #[serde(default)]
    top_logprobs: Option<Vec<Option<HashMap<String, f32>>>>,
}

#[derive(Deserialize)]
struct ErrorBody {
    #[serde(default)]
    message: String,
    #[serde(default)]
    code: Option<u16>,
}

/// Reads an answer.
pub(super) fn read(text: &[u8]) -> Result<Piece, Refusal> {
    let answer: Answer =
        serde_json::from_slice(text).map_err(|error| Refusal::Failed(format!("no completion: {error}")))?;
    if let Some(error) = answer.error {
        return Err(Refusal::of_status(error.code.unwrap_or(500), &error.message));
    }
    let mut piece = Piece {
        reused_tokens: answer.usage.and_then(Usage::reused_tokens),
        disaggregated_params: answer
            .kv_transfer_params
            .as_deref()
            .map(|kv_transfer_params| elsewhere::write(BACKEND, Params { kv_transfer_params })),
        ..Piece::default()
    };
    let Some(choice) = answer.choices.into_iter().next() else { return Ok(piece) };
    piece.end = choice.finish_reason.as_deref().map(|reason| openai::end(reason, choice.stop_reason));
    let Some(tokens) = choice.token_ids else {
        return Err(Refusal::Failed("a completion without token_ids; vLLM is too old".into()));
    };
    if let Some(logprobs) = choice.logprobs {
        let mut all = read_logprobs(&logprobs).ok_or_else(|| Refusal::Failed("unreadable logprobs".into()))?;
        let own = all.len().checked_sub(tokens.len());
        piece.logprobs = all
            .split_off(own.ok_or_else(|| Refusal::Failed("too few logprobs".into()))?)
            .into_iter()
            .flatten()
            .collect();
        piece.prompt_logprobs = all.into_iter().flatten().collect();
    }
    piece.tokens = tokens;
    Ok(piece)
}

/// The entry of a token without a log-probability, which is the prompt's first, is `None`.
fn read_logprobs(logprobs: &Logprobs) -> Option<Vec<Option<TokenLogprobs>>> {
    if logprobs.tokens.len() != logprobs.token_logprobs.len() {
        return None;
    }
    let entries = logprobs.tokens.iter().zip(&logprobs.token_logprobs).enumerate();
    let entry = |(at, (token, logprob)): (usize, (&String, &Option<f32>))| {
        let Some(logprob) = *logprob else { return Some(None) };
        let top = logprobs.top_logprobs.as_ref().and_then(|top| top.get(at)?.as_ref());
        Some(Some(TokenLogprobs { token_id: token_id(token)?, logprob, top: top.map_or(Some(Vec::new()), best)? }))
    };
    entries.map(entry).collect()
}

/// Best first. The token itself is among them, whether or not it is one of the best: the caller takes as many as it asked for.
fn best(top: &HashMap<String, f32>) -> Option<Vec<TopLogprob>> {
    let read = |(token, logprob): (&String, &f32)| Some(TopLogprob { token_id: token_id(token)?, logprob: *logprob });
    let mut top: Vec<TopLogprob> = top.iter().map(read).collect::<Option<_>>()?;
    top.sort_by(|a, b| b.logprob.total_cmp(&a.logprob).then(a.token_id.cmp(&b.token_id)));
    Some(top)
}

fn token_id(text: &str) -> Option<u32> {
    text.strip_prefix("token_id:")?.parse().ok()
}

/// What an answer of another status means.
pub(super) fn refusal(status: u16, body: &[u8]) -> Refusal {
    /// Older versions have no object around it.
    #[derive(Deserialize)]
    struct Said {
        error: Option<ErrorBody>,
        message: Option<String>,
    }
    let said: Option<Said> = serde_json::from_slice(body).ok();
    let message = said.and_then(|said| said.error.map(|error| error.message).or(said.message));
    openai::refusal(status, message, body)
}

#[cfg(test)]
mod tests {
    use super::super::super::dialect::End;
    use super::*;

    fn of(text: &str) -> Piece {
        read(text.as_bytes()).expect("a completion")
    }

    #[test]
    fn events_have_tokens_and_log_probabilities_best_first() {
        let piece = of(
            r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"The",
            "logprobs":{"text_offset":[0],"token_logprobs":[-2.5],"tokens":["token_id:504"],"top_logprobs":[
            {"token_id:504":-2.5,"token_id:60":-0.25,"token_id:7":-1.0}]},"finish_reason":null,"stop_reason":null,
            "prompt_token_ids":[1,4093],"token_ids":[504]}]}"#,
        );
        assert_eq!((&piece.tokens[..], piece.end), (&[504][..], None));
        let token = &piece.logprobs[0];
        assert_eq!((token.token_id, token.logprob), (504, -2.5));
        assert_eq!(token.top.iter().map(|top| top.token_id).collect::<Vec<_>>(), [60, 7, 504]);
    }

    #[test]
    fn the_prompt_s_log_probabilities_come_before_the_first_token_s() {
        let piece = of(
            r#"{"choices":[{"index":0,"text":" is","logprobs":{"token_logprobs":[null,-13.5,-0.5],"tokens":["token_id:1",
            "token_id:4093","token_id:314"],"top_logprobs":[null,{"token_id:4093":-13.5},{"token_id:314":-0.5}]},
            "finish_reason":null,"token_ids":[314]}]}"#,
        );
        assert_eq!((piece.prompt_logprobs.len(), piece.prompt_logprobs[0].token_id), (1, 4093));
        assert_eq!((piece.logprobs.len(), piece.logprobs[0].token_id), (1, 314));
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
        for reason in ["abort", "error", "something new"] {
            assert_eq!(end(&format!("{reason:?}"), "null"), Some(End::GivenUp(reason.into())));
        }
    }

    #[test]
    fn the_end_of_a_stream_counts_reused_tokens_and_a_prefill_tells_where_its_kv_is() {
        let usage = of(r#"{"choices":[],"usage":{"prompt_tokens":16,"prompt_tokens_details":{"cached_tokens":12}}}"#);
        assert_eq!((usage.reused_tokens, usage.tokens.is_empty()), (Some(12), true));
        let without = of(r#"{"choices":[],"usage":{"prompt_tokens":16,"prompt_tokens_details":null}}"#);
        assert_eq!(without.reused_tokens, None);
        let prefill =
            of(r#"{"choices":[{"token_ids":[5],"finish_reason":"length"}],"kv_transfer_params":{"a": [[1]]}}"#);
        let params = prefill.disaggregated_params.expect("kept");
        assert_eq!(params, r#"{"backend":"vllm","kv_transfer_params":{"a": [[1]]}}"#);
        let none = of(r#"{"choices":[{"token_ids":[5],"finish_reason":"length"}],"kv_transfer_params":null}"#);
        assert_eq!(none.disaggregated_params, None);
    }

    #[test]
    fn errors_are_typed_wherever_they_come() {
        let event = |code: &str| read(format!(r#"{{"error":{{"message":"no","code":{code}}}}}"#).as_bytes());
        assert_eq!(event("400").expect_err("an error"), Refusal::Invalid("no".into()));
        assert_eq!(event("null").expect_err("an error"), Refusal::Failed("no".into()));
        assert_eq!(refusal(404, br#"{"error":{"message":"no model"}}"#), Refusal::Failed("no model".into()));
        assert_eq!(refusal(400, br#"{"object":"error","message":"old"}"#), Refusal::Invalid("old".into()));
        assert_eq!(refusal(503, b"busy\nmore"), Refusal::Overloaded("503 busy".into()));
        for broken in ["", "{}x", "[1]", r#"{"choices":[{"text":"no ids"}]}"#, r#"{"choices":[{"token_ids":["x"]}]}"#] {
            assert!(matches!(read(broken.as_bytes()), Err(Refusal::Failed(_))), "{broken}");
        }
        let few = r#"{"choices":[{"token_ids":[1,2],"logprobs":{"tokens":["token_id:1"],"token_logprobs":[-1]}}]}"#;
        assert!(read(few.as_bytes()).is_err());
        let odd = r#"{"choices":[{"token_ids":[1],"logprobs":{"tokens":[" a"],"token_logprobs":[-1]}}]}"#;
        assert!(read(odd.as_bytes()).is_err(), "names of tokens instead of ids");
    }
}
