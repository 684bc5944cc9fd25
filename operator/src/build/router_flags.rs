//! The router section of an object as flags of `armature router`.

use std::fmt::Display;

use crds::model_deployment::{ConditionalDisagg, Deadlines, Frontend, KvIndex, Router};
use crds::quantity::Bytes;

/// Flags for what the author set, and nothing else, so that the router's own defaults hold. `extraArgs` come last.
pub fn router_flags(router: &Router) -> Vec<String> {
    let mut flags = Flags(Vec::new());
    flags.value("router-mode", router.mode.map(|mode| mode.as_str()));
    flags.switch("load-aware", router.load_aware.filter(|on| *on));
    flags.value("router-kv-overlap-score-credit", router.overlap_score_credit);
    flags.value("router-host-cache-hit-weight", router.host_cache_hit_weight);
    flags.value("router-disk-cache-hit-weight", router.disk_cache_hit_weight);
    flags.value("shared-cache-multiplier", router.shared_cache_multiplier);
    flags.value("router-prefill-load-scale", router.prefill_load_scale);
    flags.value("router-temperature", router.temperature);
    flags.switch("router-kv-events", router.kv_events);
    flags.switch("router-track-active-blocks", router.track_active_blocks);
    flags.switch("router-track-output-blocks", router.track_output_blocks);
    flags.switch("router-assume-kv-reuse", router.assume_kv_reuse);
    flags.switch("router-track-prefill-tokens", router.track_prefill_tokens);
    // Routers of a deployment share their load unless told otherwise.
    flags.switch("router-replica-sync", router.replica_sync.filter(|on| !on));
    flags.value("active-decode-blocks-threshold", router.active_decode_blocks_threshold);
    flags.value("active-prefill-tokens-threshold", router.active_prefill_tokens_threshold);
    flags.value("active-prefill-tokens-threshold-frac", router.active_prefill_tokens_threshold_frac);
    flags.value("router-queue-threshold", router.queue_threshold);
    flags.value("router-queue-policy", router.queue_policy.map(|policy| policy.as_str()));
    flags.value("router-queue-limit", router.queue_limit);
    flags.value("router-queue-timeout-secs", router.queue_timeout_seconds);
    flags.value("migration-limit", router.migration_limit);
    flags.value("router-prefill-mode", router.prefill_mode.map(|mode| mode.as_str()));
    if let Some(thresholds) = &router.conditional_disagg {
        flags.switch("router-conditional-disagg", Some(true));
        flags.value("router-conditional-disagg-config", Some(conditional_disagg(thresholds)));
    }
    if let Some(index) = &router.index {
        flags.index(index);
    }
    if let Some(deadlines) = &router.deadlines {
        flags.deadlines(deadlines);
    }
    flags.value("active-request-expiry-secs", router.active_request_expiry_seconds);
    if let Some(frontend) = &router.frontend {
        flags.frontend(frontend);
    }
    flags.value("router-decisions", router.decisions);
    flags.0.extend(router.extra_args.iter().cloned());
    flags.0
}

/// What is set of it, as the flag's JSON.
fn conditional_disagg(thresholds: &ConditionalDisagg) -> String {
    let ConditionalDisagg { eff_isl_threshold, eff_isl_ratio_threshold, prefill_busy_threshold } = thresholds;
    let parts = [
        eff_isl_threshold.map(|tokens| format!(r#""eff_isl_threshold":{tokens}"#)),
        eff_isl_ratio_threshold.map(|share| format!(r#""eff_isl_ratio_threshold":{share}"#)),
        prefill_busy_threshold.map(|tokens| format!(r#""prefill_busy_threshold":{tokens}"#)),
    ];
    format!("{{{}}}", parts.into_iter().flatten().collect::<Vec<_>>().join(","))
}

struct Flags(Vec<String>);

impl Flags {
    fn index(&mut self, index: &KvIndex) {
        self.value("router-event-threads", index.event_threads);
        self.bytes("router-index-bytes", &index.bytes);
        self.value("router-index-check-secs", index.check_seconds);
        self.value("router-predicted-ttl-secs", index.predicted_ttl_seconds);
        self.value("router-ttl-secs", index.ttl_seconds);
        let policy = index.approximate_cache_policy.map(|policy| policy.as_str());
        self.value("router-approximate-cache-policy", policy);
    }

    fn deadlines(&mut self, deadlines: &Deadlines) {
        self.value("connect-timeout-secs", deadlines.connect_seconds);
        self.value("first-token-timeout-secs", deadlines.first_token_seconds);
        self.value("token-timeout-secs", deadlines.token_seconds);
    }

    fn frontend(&mut self, frontend: &Frontend) {
        self.bytes("body-limit-bytes", &frontend.body_bytes);
        self.value("max-json-values", frontend.json_values);
        self.value("max-choices", frontend.choices);
        self.value("keep-alive-ms", frontend.keep_alive_milliseconds);
        self.value("header-timeout-s", frontend.header_seconds);
        self.value("body-timeout-s", frontend.body_seconds);
        self.value("write-timeout-s", frontend.write_seconds);
        self.bytes("preprocess-bytes", &frontend.preprocess_bytes);
        self.value("preprocess-jobs", frontend.preprocess_jobs);
        self.value("max-connections", frontend.connections);
    }

    fn value(&mut self, flag: &str, value: Option<impl Display>) {
        self.0.extend(value.map(|value| format!("--{flag}={value}")));
    }

    /// Kubernetes' way of writing bytes, as a number.
    fn bytes(&mut self, flag: &str, bytes: &Option<Bytes>) {
        self.value(flag, bytes.as_ref().and_then(Bytes::get));
    }

    /// A flag that has a `--no-` form.
    fn switch(&mut self, flag: &str, on: Option<bool>) {
        self.0.extend(on.map(|on| format!("--{}{flag}", if on { "" } else { "no-" })));
    }
}
