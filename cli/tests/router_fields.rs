//! Every setting of the router's selection is a field of ModelDeployment, and becomes the flag of that setting.

use std::collections::BTreeSet;

use clap::{Args, Parser};
use crds::model_deployment::Router;
use operator::build::router_flags;
use router::config::{Config, DisaggregationOptions, SelectionOptions};
use serde_json::{Value, json};

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    config: Config,
}

/// All fields; the preset apart, which contradicts most of them.
fn fields() -> Value {
    json!({
        "mode": "power-of-two", "overlapScoreCredit": 0.5, "hostCacheHitWeight": 0.5, "diskCacheHitWeight": 0.1,
        "sharedCacheMultiplier": 0.2, "prefillLoadScale": 2, "temperature": 0.25, "kvEvents": true,
        "trackActiveBlocks": true, "trackOutputBlocks": false, "assumeKvReuse": true, "trackPrefillTokens": true,
        "activeDecodeBlocksThreshold": 0.9, "activePrefillTokensThreshold": 8192, "activePrefillTokensThresholdFrac": 2,
        "queueThreshold": 1.5, "queuePolicy": "lcfs", "queueLimit": 10, "queueTimeoutSeconds": 5, "decisions": 100,
        "migrationLimit": 2, "prefillMode": "least-loaded",
        "conditionalDisagg": {"effIslThreshold": 100, "effIslRatioThreshold": 0.5, "prefillBusyThreshold": 9},
    })
}

fn flags(fields: Value) -> Vec<String> {
    let router: Router = serde_json::from_value(fields).expect("fields of the router section");
    router_flags(&router)
}

/// Names of flags, those of `--no-` forms without it.
fn names(flags: &[String]) -> BTreeSet<String> {
    let name = |flag: &String| {
        let name = flag.trim_start_matches("--").split('=').next().unwrap_or_default();
        name.strip_prefix("no-").unwrap_or(name).to_owned()
    };
    flags.iter().map(name).collect()
}

#[test]
fn every_setting_of_selection_has_a_field() {
    let mut all = fields();
    all["loadAware"] = true.into();
    let rendered = names(&flags(all));
    let command = SelectionOptions::augment_args(clap::Command::new("router"));
    let command = DisaggregationOptions::augment_args(command);
    let known: Vec<String> = command.get_arguments().filter_map(|arg| Some(format!("--{}", arg.get_long()?))).collect();
    let missing: Vec<String> = names(&known).difference(&rendered).cloned().collect();
    assert!(missing.is_empty(), "without a field in ModelDeployment: {missing:?}");
}

#[test]
fn the_router_accepts_what_the_operator_renders() {
    let preset = json!({"loadAware": true, "replicaSync": true});
    let off = json!({"kvEvents": false, "trackActiveBlocks": false, "loadAware": false});
    for (fields, mode) in [(fields(), "power-of-two"), (preset, "kv"), (off, "kv"), (json!({}), "kv")] {
        let flags = flags(fields);
        let command = Command::try_parse_from(std::iter::once("router".to_owned()).chain(flags));
        let settings = command.unwrap_or_else(|error| panic!("{error}")).config.validate().expect("valid");
        assert_eq!(settings.selection.selector.mode.as_str(), mode);
    }
}
