//! How tokens are to be drawn, as all these servers call it.
//!
//! Every setting is said: what is not said, they take from the model's own `generation_config.json`.

use std::borrow::Cow;
use std::collections::HashMap;

use protocol::request_plane::{Generate, Sampling};
use serde::Serialize;

/// The settings that have one name everywhere; part of a request's body.
#[derive(Debug, Serialize)]
pub(super) struct Settings<'a> {
    ignore_eos: bool,
    stop: &'a [String],
    stop_token_ids: &'a [u32],
    temperature: f32,
    top_p: f32,
    top_k: i64,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) logit_bias: Option<Cow<'a, HashMap<u32, f32>>>,
}

impl<'a> Settings<'a> {
    /// Those of a request.
    pub(super) fn of(request: &'a Generate) -> Self {
        let sampling = request.sampling.as_ref();
        let set = |value: fn(&Sampling) -> f32| sampling.map_or(0.0, value);
        let or_one = |value: f32| if value == 0.0 { 1.0 } else { value };
        let stop = request.stop.as_ref();
        Self {
            ignore_eos: stop.is_some_and(|stop| stop.ignore_eos),
            stop: stop.map_or(&[], |stop| &stop.strings),
            stop_token_ids: stop.map_or(&[], |stop| &stop.token_ids),
            temperature: set(|s| s.temperature),
            top_p: or_one(set(|s| s.top_p)),
            top_k: sampling.map_or(0, |s| s.top_k.into()),
            min_p: set(|s| s.min_p),
            repetition_penalty: or_one(set(|s| s.repetition_penalty)),
            presence_penalty: set(|s| s.presence_penalty),
            frequency_penalty: set(|s| s.frequency_penalty),
            seed: sampling.and_then(|s| s.seed).map(|seed| seed_of(seed, request.generated)),
            logit_bias: sampling.map(|s| Cow::Borrowed(&s.logit_bias)).filter(|bias| !bias.is_empty()),
        }
    }

    /// Where −1 stands for all tokens, and not 0.
    pub(super) fn with_all_tokens_as_minus_one(self) -> Self {
        Self { top_k: if self.top_k == 0 { -1 } else { self.top_k }, ..self }
    }

    /// Where a seed is refused.
    pub(super) fn without_seed(self) -> Self {
        Self { seed: None, ..self }
    }
}

/// A request that goes on must not draw the numbers that its beginning has drawn. Signed: servers take no more.
fn seed_of(seed: u64, generated: u32) -> i64 {
    (seed.wrapping_add(u64::from(generated)) & i64::MAX as u64) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_does_not_say_is_said_all_the_same() {
        let bare = serde_json::to_value(Settings::of(&Generate::default())).expect("JSON");
        assert_eq!(
            (&bare["temperature"], &bare["top_p"], &bare["repetition_penalty"]),
            (&0.0.into(), &1.0.into(), &1.0.into())
        );
        assert_eq!((&bare["top_k"], &bare["ignore_eos"]), (&0.into(), &false.into()));
        assert!(bare.get("seed").is_none() && bare.get("logit_bias").is_none());
        let sglang = Generate::default();
        let sglang = serde_json::to_value(Settings::of(&sglang).with_all_tokens_as_minus_one()).expect("JSON");
        assert_eq!(sglang["top_k"], -1);
    }

    #[test]
    fn a_request_that_goes_on_draws_other_numbers() {
        assert_eq!((seed_of(7, 0), seed_of(7, 3), seed_of(u64::MAX, 1)), (7, 10, 0));
        let seeded =
            Generate { sampling: Some(Sampling { seed: Some(7), ..Sampling::default() }), ..Generate::default() };
        assert_eq!(serde_json::to_value(Settings::of(&seeded)).expect("JSON")["seed"], 7);
        assert!(serde_json::to_value(Settings::of(&seeded).without_seed()).expect("JSON").get("seed").is_none());
    }
}
