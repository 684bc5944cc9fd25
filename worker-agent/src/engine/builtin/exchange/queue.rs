//! Fetches that wait for room, first come, first served. Belongs to the engine's thread, which looks at it between two steps.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kv_hashing::{BlockHash, SequenceHash};
use tokio::sync::oneshot;

use super::{Exchange, NoRoom, Reservation};
use crate::engine::builtin::scheduler::Scheduler;

/// Somebody wants to fetch blocks.
pub(in crate::engine::builtin) struct Ask {
    /// A sequence's leading blocks: those that are here are held, and there has to be room for the others.
    pub(in crate::engine::builtin) blocks: Vec<(BlockHash, SequenceHash)>,
    /// How long it waits for room, from the first look.
    pub(in crate::engine::builtin) patience: Duration,
    /// Who asks. Nobody listening: what was reserved is released at once.
    pub(in crate::engine::builtin) reply: oneshot::Sender<Result<Reservation, NoRoom>>,
}

/// Those that wait. As many as there are requests with a place and not entered, which are bounded.
#[derive(Default)]
pub(in crate::engine::builtin) struct Queue {
    waiting: VecDeque<(Instant, Ask)>,
    /// Room that was found, and who gets it.
    granted: Vec<(oneshot::Sender<Result<Reservation, NoRoom>>, Reservation)>,
}

impl Queue {
    pub(in crate::engine::builtin) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Hands out what was reserved. Comes after the moves that made the room.
    pub(in crate::engine::builtin) fn answer(&mut self) {
        for (reply, reservation) in self.granted.drain(..) {
            // If nobody takes it, the reservation gives itself back.
            let _ = reply.send(Ok(reservation));
        }
    }

    /// Reserves at once if nobody was there before. Who needs no room, since all blocks are here, waits for nobody.
    pub(in crate::engine::builtin) fn ask(
        &mut self,
        mut ask: Ask,
        exchange: &Exchange,
        scheduler: &mut Scheduler,
        now: Instant,
    ) {
        ask.blocks.truncate(scheduler.worth_fetching(&ask.blocks));
        // What can never be reserved is computed; what comes before it is still worth fetching.
        let missing = scheduler.missing(&ask.blocks);
        let kept = ask.blocks.len() - missing.saturating_sub(exchange.max_reserved());
        ask.blocks.truncate(kept);
        if let Some(ask) = self.reserve(ask, self.is_empty(), exchange, scheduler) {
            self.waiting.push_back((now + ask.patience, ask));
        }
    }

    /// Looks again at those that wait. Cost: one look at the first of them, if it has to go on waiting.
    pub(in crate::engine::builtin) fn serve(&mut self, exchange: &Exchange, scheduler: &mut Scheduler, now: Instant) {
        while let Some((until, ask)) = self.waiting.pop_front() {
            if let Some(ask) = self.reserve(ask, true, exchange, scheduler) {
                self.waiting.push_front((until, ask));
                break;
            }
        }
        if self.waiting.iter().any(|(until, _)| *until <= now) {
            let (late, waiting) =
                std::mem::take(&mut self.waiting).into_iter().partition::<VecDeque<_>, _>(|(until, _)| *until <= now);
            self.waiting = waiting;
            for (_, Ask { patience, reply, .. }) in late {
                // A receiver that is gone needs no answer.
                let _ = reply.send(Err(NoRoom::Blocks(patience)));
            }
        }
    }

    /// Gives `ask` back when it has to wait.
    fn reserve(&mut self, ask: Ask, first: bool, exchange: &Exchange, scheduler: &mut Scheduler) -> Option<Ask> {
        if ask.reply.is_closed() {
            return None;
        }
        let limit = if first { exchange.reservable() } else { 0 };
        let Some((table, cached, here)) = scheduler.reserve(&ask.blocks, limit) else { return Some(ask) };
        self.granted.push((ask.reply, exchange.reservation(ask.blocks, table, cached, here)));
        None
    }
}
