//! How much of a prompt each server holds: what its engine's events say, and for servers without events a guess. Whatever was
//! sent to a server is taken to be in its cache for a while.

use kv_hashing::BlockHash;
use kv_index::{Overlaps, PooledRun, TierBlocks, WorkerRank};
use routing::{Decision, Mode, Prompt};

use super::Proxy;
use super::server::Server;
use crate::dispatch::ask::Ask;
use crate::metrics::DecisionLabels;

impl Proxy {
    /// Whether decisions look at what servers hold.
    pub(super) fn matches_prefixes(&self) -> bool {
        self.mode == Mode::Kv
    }

    /// Blocks of a prompt on each server.
    pub(super) fn overlaps(&self, blocks: &[BlockHash]) -> Overlaps {
        if !self.matches_prefixes() {
            return Overlaps::default();
        }
        by_server(self.cluster.index.overlaps(blocks))
    }

    /// A request goes to a server, of whose cache `held` was known: counts it, and takes its prompt to be there from now on.
    pub(super) fn routed(&self, ask: &Ask, decision: &Decision, held: &Overlaps) {
        let (metrics, rank) = (&self.cluster.metrics, decision.rank);
        metrics.decisions.get_or_create(&DecisionLabels { mode: self.mode.as_str() }).inc();
        if !self.matches_prefixes() {
            return;
        }
        metrics.overlap_blocks.observe(f64::from(decision.terms.overlap.total()));
        let tells = self.servers.get(&rank.worker).is_some_and(|server| server.events.is_some());
        if tells {
            self.cluster.index.matched(&ask.blocks, held);
        }
        // Of those that tell, guesses count only until their events come: where every server does.
        if !tells || self.all_tell {
            self.cluster.index.routed(rank, &ask.blocks);
        }
    }

    /// A server has answered: where it computed blocks, an event should tell of them.
    pub(super) fn answered(&self, server: &Server, prompt: &Prompt, decision: &Decision) {
        let Some(source) = server.events.as_ref().filter(|_| self.matches_prefixes()) else { return };
        if server.watch.answered(&prompt.blocks, decision.terms.overlap.total()) {
            tracing::warn!(
                worker = %server.name, events = %source.address,
                "the server is to publish KV events and computes prompts, but no event comes: see --kv-events-endpoints"
            );
        }
    }
}

/// A server with several data-parallel ranks chooses among them itself: what the best of them holds counts.
fn by_server(overlaps: Overlaps) -> Overlaps {
    if overlaps.iter().all(|(rank, _)| rank.dp_rank == 0) {
        return overlaps;
    }
    let mut best: Vec<(WorkerRank, TierBlocks)> = Vec::new();
    for (WorkerRank { worker, .. }, blocks) in overlaps.iter() {
        match best.last_mut().filter(|(rank, _)| rank.worker == worker) {
            Some((_, most)) if most.total() >= blocks.total() => {}
            Some((_, most)) => *most = blocks,
            None => best.push((WorkerRank { worker, dp_rank: 0 }, blocks)),
        }
    }
    let pooled = overlaps.pooled().iter().map(|run| PooledRun { rank: WorkerRank { dp_rank: 0, ..run.rank }, ..*run });
    Overlaps::new(best, pooled.collect())
}

#[cfg(test)]
mod tests {
    use kv_index::WorkerId;

    use super::*;

    #[test]
    fn the_best_rank_of_a_server_counts() {
        let entry = |worker, dp_rank, device| {
            (WorkerRank { worker: WorkerId(worker), dp_rank }, TierBlocks { device, ..TierBlocks::default() })
        };
        let overlaps = [entry(1, 0, 2), entry(1, 3, 5), entry(1, 4, 1), entry(2, 7, 4), entry(3, 0, 1)];
        let expected: Overlaps = [entry(1, 0, 5), entry(2, 0, 4), entry(3, 0, 1)].into_iter().collect();
        assert_eq!(by_server(overlaps.into_iter().collect()), expected);
    }
}
