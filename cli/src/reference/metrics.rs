//! docs/reference/metrics.md, from what the components really register.
//!
//! A family without a series is not in an exposition, so each is given one first, as the first request would.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use router::http::metrics::{FrontendMetrics, RequestGuard};
use router::metrics::{CoreMetrics, DecisionLabels, ReasonLabels};
use router::openai::Endpoint;
use worker_agent::engine::{EngineInfo, EngineLoad};
use worker_agent::metrics::Ending;

/// The page, in Markdown.
pub(super) fn page() -> String {
    let mut page = String::from(
        "# Metrics\n\n<!-- Written by `cargo xtask generate`. -->\n\nCounters end in `_total` when they are scraped.\n",
    );
    for (component, exposition) in [("router", router()), ("worker", worker()), ("operator", operator())] {
        let _ = write!(
            page,
            "\n## armature {component}\n\n| metric | type | meaning |\n|---|---|---|\n{}",
            rows(&exposition)
        );
    }
    page
}

fn router() -> String {
    let mut registry = Registry::default();
    let frontend = Arc::new(FrontendMetrics::default());
    frontend.register(&mut registry);
    RequestGuard::new(frontend, Endpoint::Chat).admitted("model", 1);
    let core = CoreMetrics::register(&mut registry);
    drop(core.decisions.get_or_create(&DecisionLabels { mode: "kv" }));
    for family in [&core.retries, &core.events_refused, &core.recoveries] {
        drop(family.get_or_create(&ReasonLabels { reason: "" }));
    }
    let mut text = String::new();
    // Writing into a String cannot fail.
    encode(&mut text, &registry).expect("a String takes everything");
    text
}

fn worker() -> String {
    let block_size = kv_hashing::BlockSize::new(16).expect("not zero");
    let engine =
        EngineInfo { block_size, total_blocks: 1, max_num_seqs: 1, max_num_batched_tokens: 1, context_length: 16 };
    let metrics = worker_agent::metrics::Metrics::new(&engine);
    metrics.request_ended(Ending::eos);
    metrics.encode(EngineLoad::default())
}

fn operator() -> String {
    let metrics = operator::metrics::Metrics::default();
    metrics
        .reconciled(operator::metrics::Reconcile { controller: String::new(), result: String::new() }, Duration::ZERO);
    metrics.text()
}

/// From the `# HELP` and `# TYPE` lines, by name.
fn rows(exposition: &str) -> String {
    let described = |keyword: &'static str| {
        let lines = exposition
            .lines()
            .filter_map(move |line| line.strip_prefix("# ")?.strip_prefix(keyword)?.strip_prefix(' '));
        lines.filter_map(|line| line.split_once(' '))
    };
    let types: BTreeMap<_, _> = described("TYPE").collect();
    let helps: BTreeMap<_, _> = described("HELP").collect();
    let row = |(name, help): (&&str, &&str)| {
        format!("| `{name}` | {} | {} |\n", types.get(name).unwrap_or(&"-"), help.trim_end_matches('.'))
    };
    helps.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_component_has_rows_with_type_and_meaning() {
        let page = page();
        for part in [
            "| `armature_frontend_requests` | counter | ",
            "| `armature_worker_requests` | counter | ",
            "| `armature_operator_leader` | gauge | ",
        ] {
            assert!(page.contains(part), "{part} in {page}");
        }
        assert!(!page.contains("| - |"), "{page}");
    }
}
