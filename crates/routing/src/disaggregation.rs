//! Which requests run in two parts, on a prefill and on a decode worker, and which stay whole although they could.

use crate::setting::{self, SettingError};

/// When a prompt is computed by the worker that generates the answer, although prefill workers are there. The names and
/// defaults of the first two are those of Dynamo's policy `isl_bounding`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConditionalDisagg {
    /// A request may stay whole with fewer uncached prompt tokens than this,
    pub eff_isl_threshold: u32,
    /// and when these are a smaller share of its prompt than this, 0 to 1.
    pub eff_isl_ratio_threshold: f64,
    /// A request stays whole when more prompt tokens than this wait on the prefill worker that would get it, and fewer on the
    /// decode worker.
    pub prefill_busy_threshold: Option<u32>,
}

impl Default for ConditionalDisagg {
    fn default() -> Self {
        Self { eff_isl_threshold: 2048, eff_isl_ratio_threshold: 0.7, prefill_busy_threshold: None }
    }
}

/// Why a request stays whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Whole {
    /// Little of its prompt has to be computed.
    FewUncached,
    /// The decode worker gets to it sooner.
    PrefillBusy,
}

impl Whole {
    /// In words.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FewUncached => "few uncached tokens",
            Self::PrefillBusy => "prefill workers busy",
        }
    }
}

/// What is known of a request that could run in two parts; all in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Splittable {
    /// Its prompt.
    pub prompt: usize,
    /// What of it the decode worker that it would go to has cached.
    pub cached: usize,
    /// Prompt tokens not computed yet on that worker.
    pub waiting: u32,
}

impl ConditionalDisagg {
    /// Refuses thresholds outside their ranges.
    pub fn validate(&self) -> Result<(), SettingError> {
        setting::share("eff_isl_ratio_threshold", self.eff_isl_ratio_threshold)
    }

    /// Why a request stays whole; `None`: it is split. `prefill_waiting`: the prompt tokens not computed yet on the prefill worker that
    /// it would go to, `None` where it could go to none; asked for only if it matters, since to know it takes a decision.
    pub fn whole(&self, request: Splittable, prefill_waiting: impl FnOnce() -> Option<u32>) -> Option<Whole> {
        let uncached = request.prompt.saturating_sub(request.cached);
        let few = uncached < self.eff_isl_threshold as usize
            && (uncached as f64) < self.eff_isl_ratio_threshold * request.prompt as f64;
        if few {
            return Some(Whole::FewUncached);
        }
        let most = self.prefill_busy_threshold?;
        let waiting = prefill_waiting()?;
        (waiting > most && request.waiting < waiting).then_some(Whole::PrefillBusy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_stays_whole_only_under_both_thresholds() {
        let policy = ConditionalDisagg::default();
        let unasked = || panic!("nothing depends on it");
        let whole = |prompt, cached| policy.whole(Splittable { prompt, cached, waiting: 0 }, unasked);
        assert_eq!(whole(1000, 0), None, "short, but nothing of it is cached");
        assert_eq!(whole(1000, 400), Some(Whole::FewUncached));
        assert_eq!(whole(1000, 300), None, "exactly the share");
        assert_eq!(whole(100_000, 97_953), Some(Whole::FewUncached));
        assert_eq!(whole(100_000, 97_952), None, "2048 are not fewer than 2048");
        let all = ConditionalDisagg { eff_isl_ratio_threshold: 1.0, ..policy };
        let uncached = Splittable { prompt: 10, ..Splittable::default() };
        assert_eq!(all.whole(uncached, unasked), None, "the share is all of it");
        assert_eq!(whole(0, 0), None);
    }

    #[test]
    fn a_long_queue_for_prefill_is_avoided_where_decode_has_less_to_do() {
        let policy = ConditionalDisagg { prefill_busy_threshold: Some(8192), ..ConditionalDisagg::default() };
        let whole = |prefill, waiting| policy.whole(Splittable { prompt: 10_000, cached: 0, waiting }, || prefill);
        assert_eq!((whole(Some(8192), 0), whole(Some(8193), 0)), (None, Some(Whole::PrefillBusy)));
        assert_eq!(whole(Some(9000), 9000), None, "it would be no sooner");
        assert_eq!(whole(None, 0), None, "that is what it is to fail of");
    }

    #[test]
    fn a_share_above_one_is_refused() {
        let error = ConditionalDisagg { eff_isl_ratio_threshold: 1.5, ..Default::default() }.validate();
        assert_eq!(error.unwrap_err().to_string(), "eff_isl_ratio_threshold must be from 0 to 1, not 1.5");
    }
}
