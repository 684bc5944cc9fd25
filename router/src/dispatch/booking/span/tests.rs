//! What a subscriber sees of decisions.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use kv_hashing::BlockSize;
use kv_index::{Overlaps, PooledRun, TierBlocks, WorkerId, WorkerRank};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use routing::{CostConfig, Prompt, RouterId, Target, Worker, WorkerSet};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::super::{Named, Placement};
use super::*;
use crate::config::Selection;

type Fields = BTreeMap<&'static str, String>;

/// Keeps the fields of every span of at most a level, and for each event the span that it was in.
struct Capture {
    level: Level,
    spans: Arc<Mutex<Vec<Fields>>>,
    entered: Mutex<Vec<usize>>,
}

struct Into<'a>(&'a mut Fields);

impl Visit for Into<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl Subscriber for Capture {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = Fields::from([("name", attributes.metadata().name().to_owned())]);
        attributes.record(&mut Into(&mut fields));
        let mut spans = self.spans.lock();
        spans.push(fields);
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        values.record(&mut Into(&mut self.spans.lock()[span.into_u64() as usize - 1]));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::new();
        event.record(&mut Into(&mut fields));
        if let Some(&span) = self.entered.lock().last() {
            self.spans.lock()[span].insert("said", fields.remove("message").unwrap_or_default());
        }
    }

    fn enter(&self, span: &Id) {
        self.entered.lock().push(span.into_u64() as usize - 1);
    }

    fn exit(&self, _: &Id) {
        self.entered.lock().pop();
    }
}

/// The spans of what `with` does, for somebody who listens at a level.
fn seen(level: Level, with: impl FnOnce()) -> Vec<Fields> {
    let spans = Arc::<Mutex<Vec<Fields>>>::default();
    let capture = Capture { level, spans: spans.clone(), entered: Mutex::default() };
    tracing::subscriber::with_default(capture, with);
    let seen = spans.lock();
    seen.iter().filter(|fields| fields["name"] == "route").cloned().collect()
}

fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), dp_rank: 0 }
}

/// A request of ten blocks to three workers, of which two hold some of it; `pinned` to a worker or not.
fn decide(placement: &Arc<Placement>, pinned: Option<u64>) -> Result<WorkerRank, Refusal> {
    let prompt = Prompt { blocks: [].into(), tokens: 40, block_size: BlockSize::new(4).expect("not zero") };
    let request = Request { pinned: pinned.map(|id| Target::worker(WorkerId(id))), ..Request::new("m", &prompt) };
    let set: WorkerSet = (1..4).map(|id| Worker::new(rank(id), "w", "m")).collect();
    let held = TierBlocks { device: 4, host: 2, disk: 1, shared: 1 };
    let pool = PooledRun { rank: rank(3), start: 0, len: 9 };
    let overlaps = Overlaps::new([(rank(1), held), (rank(2), held)], vec![pool]);
    let id = "r".into();
    let named = Named { request: &id, expected_output_tokens: None, ticket: None, fetches: false };
    placement.decide(&set, &request, &overlaps, named).map(|(decision, _booking)| decision.rank)
}

fn placement() -> Arc<Placement> {
    let mut selection = Selection::default();
    selection.selector.cost = CostConfig { shared_cache_multiplier: 0.5, ..CostConfig::default() };
    Arc::new(Placement::new(&selection, RouterId(1), Gauge::default()))
}

#[test]
fn the_terms_of_a_decision_are_attributes_of_its_span() {
    let placement = placement();
    let mut chosen = None;
    let spans = seen(Level::DEBUG, || chosen = decide(&placement, None).ok());
    let [span] = &spans[..] else { panic!("one decision: {spans:?}") };
    let worker = chosen.expect("somebody").worker.0.to_string();
    let expected = [
        ("request", "\"r\""),
        ("model", "\"m\""),
        ("mode", "\"kv\""),
        ("outcome", "\"chosen\""),
        ("worker", &worker),
        ("dp_rank", "0"),
        ("prompt_tokens", "40"),
        ("candidates", "3"),
        ("eligible", "3"),
        ("ties", "2"),
        ("prefill_blocks", "10.0"),
        // 10 - 4 - 0.75 * 2 - 0.25 * 1 - 0.5 * 2, and the ten that it would use.
        ("adjusted_prefill_blocks", "3.25"),
        ("decode_blocks", "10.0"),
        ("cost", "13.25"),
        ("overlap_device", "4"),
        ("overlap_host", "2"),
        ("overlap_disk", "1"),
        ("overlap_shared", "1"),
        ("shared_beyond", "2"),
        ("credit_device", "4.0"),
        ("credit_host", "1.5"),
        ("credit_disk", "0.25"),
        ("credit_shared", "1.0"),
        ("active_blocks", "0"),
        ("prefill_tokens", "0"),
        ("requests", "0"),
        ("said", "routed"),
    ];
    for (name, value) in expected {
        assert_eq!(span.get(name).map(String::as_str), Some(value), "{name}");
    }
}

#[test]
fn a_refusal_is_told_too() {
    let placement = placement();
    let spans = seen(Level::DEBUG, || assert!(decide(&placement, Some(9)).is_err()));
    assert_eq!((spans.len(), &*spans[0]["outcome"]), (1, "worker 9 does not serve the model"));
    assert_eq!((&*spans[0]["excluded"], &*spans[0]["said"]), ("\"3 not pinned\"", "not routed"));
    assert!(!spans[0].contains_key("worker"));
}

#[test]
fn nothing_is_recorded_for_whoever_listens_at_a_higher_level() {
    let placement = placement();
    assert_eq!(seen(Level::INFO, || assert!(decide(&placement, None).is_ok())), Vec::<Fields>::new());
}
