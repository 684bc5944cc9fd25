//! Flags of disaggregated serving. Whether requests are split depends on which workers there are; these say which requests stay
//! whole all the same.

use clap::Args;
use clap::builder::BoolishValueParser;
use routing::{ConditionalDisagg, Mode};
use serde::Deserialize;

use super::{ConfigError, RouterMode};

/// Flags.
#[derive(Clone, Debug, Default, Args)]
pub struct DisaggregationOptions {
    /// How a prefill worker is picked [default: as --router-mode says]
    #[arg(long, env = "ARMATURE_ROUTER_PREFILL_MODE", value_enum)]
    pub router_prefill_mode: Option<RouterMode>,
    /// Let the decode worker compute short and well-cached prompts, although there are prefill workers
    #[arg(
        long, env = "DYN_ROUTER_CONDITIONAL_DISAGG", default_value = "false", default_missing_value = "true",
        num_args = 0..=1, require_equals = true, value_parser = BoolishValueParser::new()
    )]
    pub router_conditional_disagg: bool,
    /// Which prompts, as JSON: {"eff_isl_threshold": 2048, "eff_isl_ratio_threshold": 0.7} are fewer uncached tokens, and a smaller
    /// share of the prompt; "prefill_busy_threshold": 16384 are tokens that wait on a prefill worker [default: the first two]
    #[arg(long, env = "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG", value_name = "JSON", value_parser = thresholds)]
    pub router_conditional_disagg_config: Option<ConditionalDisagg>,
}

impl DisaggregationOptions {
    /// How prefill workers are picked, if otherwise than all.
    pub(super) fn prefill_mode(&self) -> Result<Option<Mode>, ConfigError> {
        match self.router_prefill_mode {
            Some(RouterMode::Direct) => Err(ConfigError::new(
                "--router-prefill-mode direct is none: a request that names a worker runs there from prompt to end",
            )),
            mode => Ok(mode.map(Mode::from)),
        }
    }

    /// Checks them together. `None`: every request that can be split is.
    pub(super) fn validate(&self) -> Result<Option<ConditionalDisagg>, ConfigError> {
        if self.router_conditional_disagg_config.is_some() && !self.router_conditional_disagg {
            return Err(ConfigError::new("--router-conditional-disagg-config needs --router-conditional-disagg"));
        }
        Ok(self.router_conditional_disagg.then(|| self.router_conditional_disagg_config.unwrap_or_default()))
    }
}

/// The JSON of the flag.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Thresholds {
    eff_isl_threshold: Option<u32>,
    eff_isl_ratio_threshold: Option<f64>,
    prefill_busy_threshold: Option<u32>,
}

fn thresholds(text: &str) -> Result<ConditionalDisagg, String> {
    let given: Thresholds = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let defaults = ConditionalDisagg::default();
    let policy = ConditionalDisagg {
        eff_isl_threshold: given.eff_isl_threshold.unwrap_or(defaults.eff_isl_threshold),
        eff_isl_ratio_threshold: given.eff_isl_ratio_threshold.unwrap_or(defaults.eff_isl_ratio_threshold),
        prefill_busy_threshold: given.prefill_busy_threshold,
    };
    policy.validate().map_err(|error| error.to_string())?;
    Ok(policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_read_from_json_and_checked() {
        let given = thresholds(r#"{"eff_isl_threshold": 100, "prefill_busy_threshold": 5}"#).expect("valid");
        let expected =
            ConditionalDisagg { eff_isl_threshold: 100, prefill_busy_threshold: Some(5), ..Default::default() };
        assert_eq!(given, expected);
        assert!(thresholds(r#"{"policy": "isl_bounding"}"#).unwrap_err().contains("unknown field `policy`"));
        assert!(thresholds(r#"{"eff_isl_ratio_threshold": 2}"#).unwrap_err().contains("must be from 0 to 1"));
    }

    #[test]
    fn prefill_workers_are_picked_as_all_are_or_in_a_way_of_their_own() {
        let mode = |router_prefill_mode| {
            let options = DisaggregationOptions { router_prefill_mode, ..Default::default() };
            options.prefill_mode()
        };
        assert_eq!(mode(None), Ok(None));
        assert_eq!(mode(Some(RouterMode::LeastLoaded)), Ok(Some(Mode::LeastLoaded)));
        assert!(mode(Some(RouterMode::Direct)).unwrap_err().to_string().contains("--router-prefill-mode direct"));
    }

    #[test]
    fn thresholds_alone_are_a_contradiction() {
        let config = Some(ConditionalDisagg::default());
        let alone = DisaggregationOptions { router_conditional_disagg_config: config, ..Default::default() };
        assert!(alone.validate().unwrap_err().to_string().contains("needs --router-conditional-disagg"));
        let on = DisaggregationOptions { router_conditional_disagg: true, ..Default::default() };
        assert_eq!((on.validate(), DisaggregationOptions::default().validate()), (Ok(config), Ok(None)));
    }
}
