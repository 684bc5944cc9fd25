//! A decision as a tracing span, at level debug: with every term of the cost and what it was computed from, as an explanation
//! has them, and with why workers were left out. A span is not seen by whoever prints events alone, so one event is in each.
//!
//! Where nobody listens a span is one look at an atomic, and nothing is formatted.

use std::collections::BTreeMap;

use routing::{Decision, Mode, Pick, Refusal, Request, Selector};
use tracing::field::{Empty, display};
use tracing::{Span, debug_span};

/// Opens the span of a decision about a request.
pub(super) fn open(id: &str, request: &Request<'_>, mode: Mode) -> Span {
    debug_span!(
        "route",
        request = id,
        model = request.model,
        mode = mode.as_str(),
        prompt_tokens = request.prompt.tokens,
        outcome = Empty,
        worker = Empty,
        dp_rank = Empty,
        candidates = Empty,
        excluded = Empty,
        eligible = Empty,
        ties = Empty,
        cost = Empty,
        prefill_blocks = Empty,
        adjusted_prefill_blocks = Empty,
        decode_blocks = Empty,
        overlap_device = Empty,
        overlap_host = Empty,
        overlap_disk = Empty,
        overlap_shared = Empty,
        shared_beyond = Empty,
        credit_device = Empty,
        credit_host = Empty,
        credit_disk = Empty,
        credit_shared = Empty,
        active_blocks = Empty,
        prefill_tokens = Empty,
        requests = Empty,
    )
}

/// Says how it came out; `selector` has just decided.
pub(super) fn close(span: &Span, selector: &Selector, outcome: &Result<Decision, Refusal>) {
    if span.is_disabled() {
        return;
    }
    span.record("candidates", selector.candidates().len());
    if let Some(excluded) = excluded(selector) {
        span.record("excluded", excluded);
    }
    let Decision { rank, terms, load, eligible, pick } = match outcome {
        Ok(decision) => decision,
        Err(refusal) => return refuse(span, *refusal),
    };
    span.record("outcome", "chosen").record("worker", rank.worker.0).record("dp_rank", rank.dp_rank);
    span.record("eligible", eligible);
    if let Pick::Lowest { ties } | Pick::FewestRequests { ties } = pick {
        span.record("ties", ties);
    }
    span.record("cost", terms.cost)
        .record("prefill_blocks", terms.prefill_blocks)
        .record("adjusted_prefill_blocks", terms.adjusted_prefill_blocks)
        .record("decode_blocks", terms.decode_blocks)
        .record("overlap_device", terms.overlap.device)
        .record("overlap_host", terms.overlap.host)
        .record("overlap_disk", terms.overlap.disk)
        .record("overlap_shared", terms.overlap.shared)
        .record("shared_beyond", terms.shared_beyond)
        .record("credit_device", terms.credits.device)
        .record("credit_host", terms.credits.host)
        .record("credit_disk", terms.credits.disk)
        .record("credit_shared", terms.credits.shared);
    span.record("active_blocks", load.active_blocks)
        .record("prefill_tokens", load.prefill_tokens)
        .record("requests", load.requests);
    span.in_scope(|| tracing::debug!("routed"));
}

/// Says why nobody was chosen.
pub(super) fn refuse(span: &Span, refusal: Refusal) {
    if span.is_disabled() {
        return;
    }
    span.record("outcome", display(refusal));
    span.in_scope(|| tracing::debug!("not routed"));
}

/// Why workers were left out, and how many for each reason, if any was.
fn excluded(selector: &Selector) -> Option<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in selector.candidates().iter().filter_map(|candidate| candidate.exclusion) {
        *counts.entry(reason.as_str()).or_default() += 1;
    }
    let counts: Vec<String> = counts.into_iter().map(|(reason, workers)| format!("{workers} {reason}")).collect();
    (!counts.is_empty()).then(|| counts.join(", "))
}

#[cfg(test)]
mod tests;
