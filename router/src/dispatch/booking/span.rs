//! A decision as a tracing span, at level debug: with every term of the cost, as an explanation has them.
//!
//! Where nobody listens a span is one look at an atomic, and nothing is formatted.

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
        eligible = Empty,
        ties = Empty,
        cost = Empty,
        prefill_blocks = Empty,
        adjusted_prefill_blocks = Empty,
        decode_blocks = Empty,
        overlap_device = Empty,
        overlap_host = Empty,
        overlap_disk = Empty,
        shared_beyond = Empty,
    )
}

/// Says how it came out; `selector` has just decided.
pub(super) fn close(span: &Span, selector: &Selector, outcome: &Result<Decision, Refusal>) {
    if span.is_disabled() {
        return;
    }
    span.record("candidates", selector.candidates().len());
    let Decision { rank, terms, eligible, pick, .. } = match outcome {
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
        .record("shared_beyond", terms.shared_beyond);
}

/// Says why nobody was chosen.
pub(super) fn refuse(span: &Span, refusal: Refusal) {
    span.record("outcome", display(refusal));
}

#[cfg(test)]
mod tests;
