//! The router's own view of load, and the guard that keeps one request in it.

use std::sync::Arc;

use kv_hashing::BlockSize;
use kv_index::Overlaps;
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use routing::{ActiveLoad, BookingId, CostConfig, Decision, Mode, Refusal, Request, Selector, WorkerSet};

/// Decisions and the load they are based on, under one lock: a decision takes a few microseconds.
pub(super) struct Placement {
    state: Mutex<State>,
    in_flight: Gauge,
}

struct State {
    selector: Selector,
    load: ActiveLoad,
}

impl Placement {
    pub(super) fn new(mode: Mode, cost: CostConfig, in_flight: Gauge) -> Self {
        Self { state: Mutex::new(State { selector: Selector::new(mode, cost), load: ActiveLoad::new() }), in_flight }
    }

    /// Decides, and books what was decided.
    pub(super) fn decide(
        self: &Arc<Self>,
        workers: &WorkerSet,
        request: &Request<'_>,
        overlaps: &Overlaps,
    ) -> Result<(Decision, Booking), Refusal> {
        let mut state = self.state.lock();
        let State { selector, load } = &mut *state;
        let decision = selector.decide(workers, request, overlaps, load, &mut rand::rng())?;
        let size = request.prompt.block_size;
        let cached = decision.terms.overlap.total() as usize * size.get();
        let id = load.book(decision.rank, request.prompt.clone(), request.prompt.tokens.saturating_sub(cached));
        drop(state);
        self.in_flight.inc();
        // The first output token that opens a new block.
        let room = size.blocks_for(request.prompt.tokens) * size.get() - request.prompt.tokens;
        Ok((decision, Booking { placement: self.clone(), id, size, unbooked: 0, room, prefilling: true }))
    }
}

/// One attempt of a request in the load; dropping it frees what it held.
pub(super) struct Booking {
    placement: Arc<Placement>,
    id: BookingId,
    size: BlockSize,
    /// Tokens generated that the load does not know of yet.
    unbooked: usize,
    /// Tokens that fit into the open block.
    room: usize,
    prefilling: bool,
}

impl Booking {
    /// The request generated `tokens` more. The load is told when a block is full, not for each token.
    pub(super) fn generated(&mut self, tokens: usize) {
        self.unbooked += tokens;
        let first = std::mem::take(&mut self.prefilling);
        if !first && self.unbooked <= self.room {
            return;
        }
        let mut state = self.placement.state.lock();
        if first {
            state.load.prefill_completed(self.id);
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
        self.placement.state.lock().load.free(self.id);
        self.placement.in_flight.dec();
    }
}

#[cfg(test)]
mod tests {
    use kv_index::{WorkerId, WorkerRank};
    use routing::{Prompt, Worker};

    use super::*;

    const RANK: WorkerRank = WorkerRank { worker: WorkerId(1), dp_rank: 0 };

    fn placed(tokens: usize) -> (Arc<Placement>, Booking) {
        let placement = Arc::new(Placement::new(Mode::Kv, CostConfig::default(), Gauge::default()));
        let worker = Worker { rank: RANK, name: "w".into(), model: "m".into(), draining: false };
        let block_size = BlockSize::new(4).expect("not zero");
        let prompt = Prompt { blocks: [].into(), tokens, block_size };
        let request = Request { model: "m", prompt: &prompt, pinned: None, excluded: &[] };
        let set: WorkerSet = [worker].into_iter().collect();
        let (_, booking) = placement.decide(&set, &request, &Overlaps::default()).expect("one worker");
        (placement, booking)
    }

    #[test]
    fn blocks_are_booked_as_the_output_opens_them() {
        for tokens in 1..9 {
            let (placement, mut booking) = placed(tokens);
            for generated in 1..20_usize {
                booking.generated(1);
                let active = placement.state.lock().load.active_blocks(RANK);
                assert_eq!(active, (tokens + generated).div_ceil(4), "{tokens} + {generated}");
            }
            drop(booking);
            assert_eq!((placement.state.lock().load.total_requests(), placement.in_flight.get()), (0, 0));
        }
    }

    #[test]
    fn prefill_ends_with_the_first_token() {
        let (placement, mut booking) = placed(8);
        assert_eq!(placement.state.lock().load.prefill_tokens(RANK), 8);
        booking.generated(1);
        assert_eq!(placement.state.lock().load.prefill_tokens(RANK), 0);
    }
}
