//! docs/reference/metrics.md, from what the components really register.
//!
//! A family without a series is not in an exposition, so each is given one first, as the first request would.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use router::http::metrics::{FrontendMetrics, RequestGuard};
use router::metrics::{CoreMetrics, DecisionLabels, ReasonLabels};
use router::openai::Endpoint;
use router::replicas::metrics::ReplicaMetrics;
use worker_agent::engine::builtin::tiers::catalog::{Sizes, TierUsage};
use worker_agent::engine::builtin::tiers::metrics::{DiskFault, TierMetrics};
use worker_agent::engine::remote::metrics::RemoteMetrics;
use worker_agent::engine::{EngineInfo, EngineLoad};
use worker_agent::metrics::Ending;
use worker_agent::transfer::metrics::Failure;

/// The page, in Markdown.
pub(super) fn page() -> String {
    let mut page = String::from(
        "# Metrics\n\n<!-- Written by `cargo xtask generate`. -->\n\nCounters end in `_total` when they are scraped. \
         Histograms have `_bucket`, `_sum` and `_count`, and `+Inf` after the upper bounds listed here. \
         [Names in Dynamo](../dynamo-metrics.md).\n",
    );
    let worker = worker().encode(EngineLoad::default());
    for (component, exposition) in [("router", text(&router())), ("worker", worker), ("operator", operator())] {
        let _ = write!(
            page,
            "\n## armature {component}\n\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n{}",
            rows(&exposition)
        );
        let _ = write!(page, "\n| histogram | upper bounds |\n|---|---|\n{}", bounds(&exposition));
    }
    page
}

fn router() -> Registry {
    let mut registry = Registry::default();
    let frontend = Arc::new(FrontendMetrics::default());
    frontend.register(&mut registry);
    RequestGuard::new(frontend, Endpoint::Chat).admitted("model", 1);
    let core = CoreMetrics::register(&mut registry);
    drop(core.decisions.get_or_create(&DecisionLabels { mode: "kv" }));
    // Only in the exposition of routers that tell each other of their load.
    let replicas = ReplicaMetrics::register(&mut registry);
    let of_core = [
        &core.retries,
        &core.migrations,
        &core.migrations_refused,
        &core.prefills,
        &core.events_refused,
        &core.recoveries,
        &core.index_checked,
        &core.index_wrong,
        &core.index_checks,
        &core.queue_left,
    ];
    let of_replicas = [&replicas.refused, &replicas.snapshots, &replicas.dropped];
    for family in of_core.into_iter().chain(of_replicas) {
        drop(family.get_or_create(&ReasonLabels { reason: "" }));
    }
    drop(core.workers_event_trouble.get_or_create(&ReasonLabels { reason: "" }));
    registry
}

fn text(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    encode(&mut text, registry).expect("a String takes everything");
    text
}

fn worker() -> worker_agent::metrics::Metrics {
    let block_size = kv_hashing::BlockSize::new(16).expect("not zero");
    let engine =
        EngineInfo { block_size, total_blocks: 1, max_num_seqs: 1, max_num_batched_tokens: 1, context_length: 16 };
    let mut metrics = worker_agent::metrics::Metrics::new(&engine);
    // Only of workers beside a server.
    let remote = RemoteMetrics::default();
    remote.refused("");
    remote.register(metrics.registry_mut());
    // Only of workers with tiers below the arena.
    let tiers = TierMetrics::default();
    tiers.set_limits(Sizes::default(), 0);
    tiers.update(&TierUsage::default(), &TierUsage::default(), 0);
    tiers.faults(DiskFault::full);
    tiers.register(metrics.registry_mut());
    metrics.request_ended(Ending::eos);
    metrics.transfer.failures(Failure::lost);
    metrics.transfer.sent_bytes("");
    metrics.transfer.received_bytes("");
    metrics
}

fn operator() -> String {
    let metrics = operator::metrics::Metrics::default();
    metrics
        .reconciled(operator::metrics::Reconcile { controller: String::new(), result: String::new() }, Duration::ZERO);
    metrics.text()
}

/// A sample's name and its labels.
fn sample(line: &str) -> Option<(&str, Vec<(&str, &str)>)> {
    let (name, rest) = line.split_once(['{', ' '])?;
    let labels = rest.split_once('}').map_or("", |(labels, _)| labels);
    // No label here has a comma in its value.
    let pairs = labels.split(',').filter_map(|pair| pair.split_once('='));
    Some((name, pairs.map(|(label, value)| (label, value.trim_matches('"'))).collect()))
}

fn samples(exposition: &str) -> impl Iterator<Item = (&str, Vec<(&str, &str)>)> {
    exposition.lines().filter(|line| !line.starts_with('#')).filter_map(sample)
}

/// The rest of the `# KEYWORD name rest` lines, by name.
fn described<'a>(exposition: &'a str, keyword: &'static str) -> BTreeMap<&'a str, &'a str> {
    let lines = exposition.lines().filter_map(move |line| line.strip_prefix("# ")?.strip_prefix(keyword));
    lines.filter_map(|line| line.strip_prefix(' ')?.split_once(' ')).collect()
}

/// A row for each metric, by name.
fn rows(exposition: &str) -> String {
    let (types, units) = (described(exposition, "TYPE"), described(exposition, "UNIT"));
    let mut labels: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, pairs) in samples(exposition) {
        let of_metric = pairs.iter().map(|(label, _)| *label).filter(|label| *label != "le");
        labels.entry(family(name, &types)).or_default().extend(of_metric);
    }
    let row = |(name, help): (&&str, &&str)| {
        let labels = labels.get(name).into_iter().flatten().map(|label| format!("`{label}`"));
        format!(
            "| `{name}` | {} | {} | {} | {} |\n",
            types.get(name).unwrap_or(&"-"),
            units.get(name).copied().or_else(|| unit(name)).unwrap_or_default(),
            labels.collect::<Vec<_>>().join(", "),
            help.trim_end_matches('.')
        )
    };
    described(exposition, "HELP").iter().map(row).collect()
}

/// The unit, as names have it last or just before `_total` and the like.
fn unit(name: &str) -> Option<&'static str> {
    let words: Vec<_> = name.split('_').collect();
    ["seconds", "bytes", "tokens", "blocks"].into_iter().find(|unit| words[2..].contains(unit))
}

/// The metric that a sample belongs to; a gauge may end in `_total` of its own accord.
fn family<'a>(sample: &'a str, types: &BTreeMap<&str, &str>) -> &'a str {
    let suffixes = ["", "_total", "_bucket", "_sum", "_count"];
    let metrics = suffixes.iter().filter_map(|suffix| sample.strip_suffix(suffix));
    metrics.into_iter().find(|name| types.contains_key(name)).unwrap_or(sample)
}

/// A row for each histogram: the bounds of one series.
fn bounds(exposition: &str) -> String {
    let mut bounds: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, pairs) in samples(exposition) {
        let upper = pairs.iter().find(|(label, _)| *label == "le").map(|(_, value)| *value);
        let (Some(histogram), Some(upper)) = (name.strip_suffix("_bucket"), upper) else { continue };
        let known = bounds.entry(histogram).or_default();
        if upper != "+Inf" && !known.contains(&upper) {
            known.push(upper);
        }
    }
    let row = |(name, bounds): (&&str, &Vec<&str>)| format!("| `{name}` | {} |\n", bounds.join(", "));
    bounds.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_component_has_rows_with_type_unit_labels_and_meaning() {
        let page = page();
        for part in [
            "| `armature_frontend_requests` | counter |  | `endpoint`, `model`, `status` | ",
            "| `armature_frontend_time_to_first_token_seconds` | histogram | seconds | `model` | ",
            "| `armature_router_replica_snapshots` | counter |  | `reason` | ",
            "| `armature_worker_requests` | counter |  | `reason` | ",
            "| `armature_worker_kv_blocks_total` | gauge | blocks |  | ",
            "| `armature_operator_leader` | gauge | ",
            "| `armature_operator_reconcile_seconds` | 0.001, 0.002, 0.004, ",
        ] {
            assert!(page.contains(part), "{part} in {page}");
        }
        assert!(!page.contains("| - |"), "{page}");
    }

    /// A family that was given no series is registered and not in the exposition.
    #[test]
    fn nothing_that_is_registered_lacks_a_row() {
        let registered = |registry: &Registry| format!("{registry:?}").matches("Descriptor {").count();
        let router = router();
        assert_eq!(described(&text(&router), "HELP").len(), registered(&router));
        let mut worker = worker();
        let exposition = worker.encode(EngineLoad::default());
        assert_eq!(described(&exposition, "HELP").len(), registered(worker.registry_mut()));
    }
}
