//! The router's own view of load, and the guard that keeps one request in it.

mod reported;
mod shared;
mod span;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kv_hashing::BlockSize;
use kv_index::{Overlaps, WorkerId, WorkerRank};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use routing::{
    ActiveLoad, BookingId, Decision, DecisionLog, Explanation, NewBooking, RankView, Record, Refusal, ReplicaChange,
    Request, RequestNames, RouterId, Selector, Ticket, WorkerSet,
};

use super::queue::Lanes;
use crate::config::Selection;
use crate::replicas::Outbox;

/// Rows of recorded decisions for each decision that is kept, on average: one a worker. With more workers fewer are kept.
const ROWS: usize = 64;

/// Decisions and the load they are based on, under one lock: a decision takes a few microseconds.
pub(crate) struct Placement {
    pub(super) state: Mutex<State>,
    in_flight: Gauge,
    /// Where its time begins.
    origin: Instant,
    /// What is booked here goes there, if there are other routers. Filled under the lock of the state, in its order.
    others: OnceLock<Outbox>,
}

pub(super) struct State {
    selector: Selector,
    load: ActiveLoad,
    /// Bookings so far.
    booked: u64,
    log: DecisionLog,
    pub(super) lanes: Lanes,
}

/// What a booking is called, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named<'a> {
    /// The request, as decisions about it are found again.
    pub(crate) request: &'a RequestNames,
    /// How long the answer is expected to be.
    pub(crate) expected_output_tokens: Option<usize>,
    /// Its place among those that wait.
    pub(crate) ticket: Option<Ticket>,
    /// The KV of its full blocks is fetched, and not computed.
    pub(crate) fetches: bool,
}

impl Placement {
    /// Nothing runs. `own`: this router among its peers.
    pub(crate) fn new(selection: &Selection, own: RouterId, in_flight: Gauge) -> Self {
        let state = State {
            selector: Selector::new(selection.selector),
            load: ActiveLoad::new(own, selection.load),
            booked: 0,
            log: DecisionLog::new(selection.decisions, selection.decisions.saturating_mul(ROWS)),
            lanes: Lanes::new(selection.queue),
        };
        Self { state: Mutex::new(state), in_flight, origin: Instant::now(), others: OnceLock::new() }
    }

    /// From now on, tells other routers what is booked here.
    pub(crate) fn share(&self, others: Outbox) {
        // There is one exchange between routers, and it is set up once.
        let _ = self.others.set(others);
    }

    /// Whether the requests of other routers are counted, as far as they can be.
    pub(crate) fn counts_others(&self) -> bool {
        self.others.get().is_none_or(Outbox::joined)
    }

    fn tell(&self, name: &Arc<str>, change: impl FnOnce() -> Option<ReplicaChange>) {
        if let Some(others) = self.others.get() {
            others.tell(name, change);
        }
    }

    /// Time as the load and the records count it.
    pub(crate) fn elapsed(&self) -> Duration {
        self.origin.elapsed()
    }

    /// Decides, and books what was decided. A request that others wait in front of finds no room.
    pub(crate) fn decide(
        self: &Arc<Self>,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
        named: Named<'_>,
    ) -> Result<(Decision, Booking), Refusal> {
        let mut state = self.state.lock();
        let State { selector, load, booked, log, lanes } = &mut *state;
        let mut rng = rand::rng();
        let span = span::open(named.request.id(), request, selector.mode(request)).entered();
        if lanes.is_blocked(request, named.ticket) {
            // What can never be placed need not wait to hear so.
            let outcome = selector.peek(workers, request, overlaps, load, &mut rng);
            let refusal = outcome.err().unwrap_or(Refusal::Saturated);
            span::refuse(&span, refusal);
            return Err(refusal);
        }
        let outcome = selector.decide(workers, request, overlaps, load, &mut rng);
        span::close(&span, selector, &outcome);
        drop(span);
        // Who waits tries again and again; only what comes of it is of interest.
        if named.ticket.is_none() || outcome != Err(Refusal::Saturated) {
            log.push(named.request.clone(), self.elapsed(), selector, request, outcome);
        }
        let decision = outcome?;
        let size = request.prompt.block_size;
        let cached = match named.fetches {
            true => size.full_blocks(request.prompt.tokens) * size.get(),
            false => decision.terms.overlap.total() as usize * size.get(),
        };
        // A client may use an id again, and a request may be tried again: to other routers each is another one.
        *booked += 1;
        let name: Arc<str> = format!("{}/{booked}", named.request).into();
        let id = load.book(NewBooking {
            request: name.clone(),
            rank: decision.rank,
            prompt: request.prompt.clone(),
            prefill_tokens: request.prompt.tokens.saturating_sub(cached),
            expected_output_tokens: named.expected_output_tokens,
        });
        self.tell(&name, || load.state(id).cloned().map(ReplicaChange::Add));
        drop(state);
        self.in_flight.inc();
        // The first output token that opens a new block.
        let room = size.blocks_for(request.prompt.tokens) * size.get() - request.prompt.tokens;
        Ok((decision, Booking { placement: self.clone(), id, name, size, unbooked: 0, room, prefilling: true }))
    }

    /// Where a request would go now. Books nothing, and takes as long as a decision.
    pub(crate) fn peek(
        &self,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
    ) -> Result<Decision, Refusal> {
        let mut state = self.state.lock();
        let State { selector, load, .. } = &mut *state;
        selector.peek(workers, request, overlaps, load, &mut rand::rng())
    }

    /// Where a request would go now, and why. Changes nothing.
    pub(crate) fn explain(&self, workers: &WorkerSet, request: &Request<'_>, overlaps: &Overlaps) -> Explanation {
        let state = self.state.lock();
        state.selector.explain(workers, request, overlaps, &state.load, &mut rand::rng())
    }

    /// The decisions about a request that are still known, oldest first.
    pub(crate) fn decisions(&self, request: &str) -> Vec<Record> {
        self.state.lock().log.get(request)
    }

    /// What runs on a rank, as decisions see it.
    pub(crate) fn load(&self, rank: WorkerRank) -> RankView {
        self.state.lock().load.rank(rank)
    }

    /// A worker is gone, and what ran there.
    pub(crate) fn remove_worker(&self, worker: WorkerId) {
        self.state.lock().load.remove_worker(worker);
    }
}

/// One attempt of a request in the load; dropping it frees what it held.
pub(crate) struct Booking {
    placement: Arc<Placement>,
    id: BookingId,
    /// As other routers know it.
    name: Arc<str>,
    size: BlockSize,
    /// Tokens generated that the load does not know of yet.
    unbooked: usize,
    /// Tokens that fit into the open block.
    room: usize,
    prefilling: bool,
}

impl Booking {
    /// The request generated `tokens` more. The load is told when a block is full, not for each token.
    pub(crate) fn generated(&mut self, tokens: usize) {
        self.unbooked += tokens;
        let first = std::mem::take(&mut self.prefilling);
        if !first && self.unbooked <= self.room {
            return;
        }
        let mut state = self.placement.state.lock();
        if first {
            state.load.prefill_completed(self.id);
            self.placement.tell(&self.name, || Some(ReplicaChange::MarkPrefillCompleted));
            state.lanes.wake();
        }
        if self.unbooked > self.room {
            state.load.add_output(self.id, self.unbooked);
            let over = self.unbooked - self.room;
            self.room = self.size.blocks_for(over) * self.size.get() - over;
            self.unbooked = 0;
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        let mut state = self.placement.state.lock();
        state.load.free(self.id);
        self.placement.tell(&self.name, || Some(ReplicaChange::Free));
        state.lanes.wake();
        drop(state);
        self.placement.in_flight.dec();
    }
}

#[cfg(test)]
mod tests {
    use kv_index::WorkerRank;
    use routing::{Prompt, Worker};

    use super::*;

    const RANK: WorkerRank = WorkerRank { worker: WorkerId(1), dp_rank: 0 };

    fn placed(tokens: usize) -> (Arc<Placement>, Booking) {
        placed_where(tokens, false)
    }

    fn placed_where(tokens: usize, fetches: bool) -> (Arc<Placement>, Booking) {
        let placement = Arc::new(Placement::new(&Selection::default(), RouterId(1), Gauge::default()));
        let block_size = BlockSize::new(4).expect("not zero");
        let prompt = Prompt { blocks: [].into(), tokens, block_size };
        let request = Request::new("m", &prompt);
        let set: WorkerSet = [Worker::new(RANK, "w", "m")].into_iter().collect();
        let id = "r".into();
        let named = Named { request: &id, expected_output_tokens: None, ticket: None, fetches };
        let (_, booking) = placement.decide(&set, &request, &Overlaps::default(), named).expect("one worker");
        (placement, booking)
    }

    #[test]
    fn blocks_are_booked_as_the_output_opens_them() {
        for tokens in 1..9 {
            let (placement, mut booking) = placed(tokens);
            for generated in 1..20_usize {
                booking.generated(1);
                let active = placement.state.lock().load.rank(RANK).active_blocks as usize;
                assert_eq!(active, (tokens + generated).div_ceil(4), "{tokens} + {generated}");
            }
            drop(booking);
            assert_eq!((placement.state.lock().load.total_requests(), placement.in_flight.get()), (0, 0));
        }
    }

    #[test]
    fn kv_that_is_fetched_is_no_prompt_to_compute() {
        let (placement, _booking) = placed_where(11, true);
        assert_eq!(placement.state.lock().load.rank(RANK).prefill_tokens, 3, "what is over full blocks");
    }

    #[test]
    fn prefill_ends_with_the_first_token() {
        let (placement, mut booking) = placed(8);
        assert_eq!(placement.state.lock().load.rank(RANK).prefill_tokens, 8);
        booking.generated(1);
        assert_eq!(placement.state.lock().load.rank(RANK).prefill_tokens, 0);
    }

    #[test]
    fn a_decision_can_be_explained_afterwards() {
        let (placement, booking) = placed(8);
        drop(booking);
        let records = placement.decisions("r");
        let chosen = records[0].explanation.outcome.expect("one worker").rank;
        assert_eq!((records.len(), chosen, records[0].explanation.candidates.len()), (1, RANK, 1));
        assert!(placement.decisions("another").is_empty());
    }
}
