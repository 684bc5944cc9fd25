//! Every flag of the router's is a field of ModelDeployment, unless the operator sets it itself, and the field becomes that flag.

use std::collections::BTreeSet;

use clap::{Args, Parser};
use crds::model_deployment::Router;
use operator::build::router_flags;
use router::config::Config;
use router::proxy::config::ProxyConfig;
use serde_json::{Value, json};

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    config: Config,
}

/// Flags that the operator sets itself, and those of other ways to find workers and routers than Kubernetes.
const WITHOUT_FIELD: [&str; 12] = [
    "http-host",
    "http-port",
    "discovery-backend",
    "namespace",
    "deployment",
    "drain-timeout-s",
    "router-service",
    "sync-port",
    "sync-host",
    "discovery-dir",
    "dyn-namespace",
    "router-peers",
];

/// All fields; those apart that contradict some of them.
fn fields() -> Value {
    json!({
        "mode": "power-of-two", "overlapScoreCredit": 0.5, "hostCacheHitWeight": 0.5, "diskCacheHitWeight": 0.1,
        "sharedCacheMultiplier": 0.2, "prefillLoadScale": 2, "temperature": 0.25, "kvEvents": true,
        "trackActiveBlocks": true, "trackOutputBlocks": false, "assumeKvReuse": true, "trackPrefillTokens": true,
        "activeDecodeBlocksThreshold": 0.9, "activePrefillTokensThreshold": 8192, "activePrefillTokensThresholdFrac": 2,
        "queueThreshold": 1.5, "queuePolicy": "lcfs", "queueLimit": 10, "queueTimeoutSeconds": 5, "decisions": 100,
        "migrationLimit": 2, "prefillMode": "least-loaded",
        "conditionalDisagg": {"effIslThreshold": 100, "effIslRatioThreshold": 0.5, "prefillBusyThreshold": 9},
        "index": {"eventThreads": 2, "bytes": "64Mi", "checkSeconds": 5, "predictedTtlSeconds": 2},
        "deadlines": {"connectSeconds": 1, "firstTokenSeconds": 60, "tokenSeconds": 30},
        "activeRequestExpirySeconds": 60,
        "frontend": {
            "bodyBytes": "1Mi", "jsonValues": 1000, "choices": 4, "keepAliveMilliseconds": 500, "headerSeconds": 5,
            "bodySeconds": 6, "writeSeconds": 7, "preprocessBytes": "8Mi", "preprocessJobs": 3, "connections": 100,
        },
    })
}

/// Guesses in place of KV events.
fn guesses() -> Value {
    json!({"kvEvents": false, "index": {"ttlSeconds": 9, "approximateCachePolicy": "ttl"}})
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

fn known_flags<A: Args>() -> BTreeSet<String> {
    let command = A::augment_args(clap::Command::new("router"));
    let flags = command.get_arguments().filter_map(|arg| Some(format!("--{}", arg.get_long()?)));
    names(&flags.collect::<Vec<_>>())
}

#[test]
fn every_flag_has_a_field() {
    let mut all = fields();
    all["loadAware"] = true.into();
    all["replicaSync"] = false.into();
    let mut rendered = names(&flags(all));
    rendered.extend(names(&flags(guesses())));
    let known = known_flags::<Config>();
    // Workers of a deployment are pods with an agent, not OpenAI servers in a list.
    let mut without = known_flags::<ProxyConfig>();
    without.extend(WITHOUT_FIELD.map(str::to_owned));
    let missing: Vec<_> = known.iter().filter(|flag| !rendered.contains(*flag) && !without.contains(*flag)).collect();
    assert!(missing.is_empty(), "without a field in ModelDeployment: {missing:?}");
    let stale: Vec<_> = without.iter().filter(|flag| !known.contains(*flag) || rendered.contains(*flag)).collect();
    assert!(stale.is_empty(), "no flag of the router's, or one with a field: {stale:?}");
}

#[test]
fn the_router_accepts_what_the_operator_renders() {
    let preset = json!({"loadAware": true, "replicaSync": true});
    let off = json!({"kvEvents": false, "trackActiveBlocks": false, "loadAware": false});
    let cases = [(fields(), "power-of-two"), (preset, "kv"), (off, "kv"), (guesses(), "kv"), (json!({}), "kv")];
    for (fields, mode) in cases {
        let flags = flags(fields);
        let command = Command::try_parse_from(std::iter::once("router".to_owned()).chain(flags));
        let settings = command.unwrap_or_else(|error| panic!("{error}")).config.validate().expect("valid");
        assert_eq!(settings.selection.selector.mode.as_str(), mode);
    }
}
