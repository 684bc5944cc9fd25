//! What SGLang says of itself: its settings and sizes, and how busy it is.

use serde::Deserialize;
use serde_json::Value;

use super::super::dialect::Busy;

/// The answer of `/get_server_info`, as far as it is read here.
#[derive(Debug, Deserialize)]
pub(super) struct ServerInfo {
    #[serde(default)]
    model_path: String,
    #[serde(default)]
    served_model_name: Option<String>,
    #[serde(default)]
    pub(super) page_size: Option<usize>,
    #[serde(default)]
    pub(super) context_length: Option<usize>,
    #[serde(default)]
    pub(super) max_total_num_tokens: Option<usize>,
    #[serde(default = "one")]
    pub(super) dp_size: u32,
    #[serde(default)]
    disaggregation_mode: Option<String>,
    #[serde(default = "bootstrap_port")]
    pub(super) disaggregation_bootstrap_port: u16,
}

/// What a server does of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    /// All of it.
    Both,
    /// Computes prompts, for others.
    Prefill,
    /// Generates, from what others computed.
    Decode,
}

fn one() -> u32 {
    1
}

/// Its own default.
fn bootstrap_port() -> u16 {
    8998
}

impl ServerInfo {
    /// The name under which it serves its model.
    pub(super) fn name(&self) -> &str {
        self.served_model_name.as_deref().unwrap_or(&self.model_path)
    }

    pub(super) fn half(&self) -> Half {
        match self.disaggregation_mode.as_deref() {
            Some("prefill") => Half::Prefill,
            Some("decode") => Half::Decode,
            _ => Half::Both,
        }
    }
}

/// The context length that `/v1/models` tells.
pub(super) fn context_length(models: &[u8]) -> Option<usize> {
    let models: Value = serde_json::from_slice(models).ok()?;
    models["data"][0]["max_model_len"].as_u64()?.try_into().ok()
}

/// One rank of `/v1/loads`, or of `/get_load`, which counts those that wait twice.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Rank {
    dp_rank: u32,
    num_running_reqs: Option<usize>,
    num_reqs: usize,
    num_waiting_reqs: usize,
    token_usage: Option<f64>,
    num_tokens: f64,
}

/// How busy it is, with a cache of `kv_tokens`: the sum over its ranks, or one of them.
pub(super) fn load(page: &str, rank: Option<u32>, kv_tokens: usize) -> Busy {
    let mut page: Value = serde_json::from_str(page).unwrap_or_default();
    let ranks = match page.get_mut("loads").map(Value::take) {
        Some(loads) => loads,
        None if page.is_object() => Value::Array(vec![page]),
        None => page,
    };
    let ranks: Vec<Rank> = serde_json::from_value(ranks).unwrap_or_default();
    let mut busy = Busy::default();
    let (mut tokens, mut usage) = (0.0, 0.0);
    for of in ranks.iter().filter(|of| rank.is_none_or(|rank| rank == of.dp_rank)) {
        busy.running += of.num_running_reqs.unwrap_or(of.num_reqs.saturating_sub(of.num_waiting_reqs));
        busy.waiting += of.num_waiting_reqs;
        busy.kv_usage = busy.kv_usage.max(of.token_usage.unwrap_or(of.num_tokens / kv_tokens.max(1) as f64));
        (tokens, usage) = (tokens + of.num_tokens, usage + of.token_usage.unwrap_or(0.0));
        // Tokens in its cache: each step adds some, or a request ends.
        busy.moves = Some(f64::to_bits(tokens) ^ f64::to_bits(usage).rotate_left(32));
    }
    busy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_from_what_it_says_of_itself() {
        let info: ServerInfo = serde_json::from_str(
            r#"{"model_path":"org/m","served_model_name":"m","page_size":16,"context_length":null,"dp_size":2,
            "max_total_num_tokens":1600,"disaggregation_mode":"prefill","version":"0.5"}"#,
        )
        .expect("readable");
        assert_eq!((info.name(), info.page_size, info.context_length), ("m", Some(16), None));
        assert_eq!((info.half(), info.disaggregation_bootstrap_port, info.dp_size), (Half::Prefill, 8998, 2));
        assert_eq!(context_length(br#"{"data":[{"id":"m","max_model_len":2048}]}"#), Some(2048));
        assert_eq!(context_length(b"{}"), None);
        let bare: ServerInfo = serde_json::from_str("{}").expect("readable");
        assert_eq!((bare.half(), bare.dp_size), (Half::Both, 1));
    }

    #[test]
    fn each_form_of_its_load_is_read() {
        let new = r#"{"loads":[{"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":2,"token_usage":0.25},
            {"dp_rank":1,"num_running_reqs":1,"num_waiting_reqs":0,"token_usage":0.5}]}"#;
        let figures = |page: &str, rank| {
            let Busy { running, waiting, kv_usage, moves } = load(page, rank, 100);
            assert!(moves.is_some());
            (running, waiting, kv_usage)
        };
        assert_eq!(figures(new, None), (4, 2, 0.5));
        assert_eq!(figures(new, Some(0)), (3, 2, 0.25));
        let old = r#"[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2,"num_tokens":50}]"#;
        assert_eq!(figures(old, None), (3, 2, 0.5));
        let more = r#"[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2,"num_tokens":51}]"#;
        assert_ne!(load(more, None, 100).moves, load(old, None, 100).moves);
        assert_eq!(load(r#"{"num_reqs":1,"num_tokens":10}"#, None, 100).running, 1);
        for nothing in ["", "[]", "{\"loads\":[]}", "x", "[1]"] {
            assert_eq!(load(nothing, None, 100), Busy::default(), "{nothing}");
        }
    }
}
