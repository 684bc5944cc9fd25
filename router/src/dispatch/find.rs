//! A worker for a request, from a set that the caller keeps; after a wait if none of them has room.

use std::sync::Arc;

use kv_hashing::BlockHash;
use kv_index::Overlaps;
use routing::{Decision, Refusal, WorkerSet};

use super::ask::Ask;
use super::booking::{Booking, Named, Placement};
use super::{queue, refused};
use crate::backend::DispatchError;
use crate::workers::Cluster;

impl Placement {
    /// Decides and books in one step, so that requests that come together see each other. `workers` and `held` are asked anew
    /// after each wait. `None`: nobody is there.
    pub(crate) async fn find(
        self: &Arc<Self>,
        cluster: &Cluster,
        ask: &Ask,
        workers: impl Fn() -> Option<Arc<WorkerSet>>,
        held: impl Fn(&[BlockHash]) -> Overlaps,
    ) -> Result<Option<(Decision, Booking)>, DispatchError> {
        let mut place: Option<queue::Place> = None;
        loop {
            let published = cluster.published.notified();
            let Some(workers) = workers() else { return Ok(None) };
            let held = held(&ask.blocks);
            let named = Named {
                request: &ask.id,
                expected_output_tokens: ask.hints.expected_output_tokens.map(|tokens| tokens as usize),
                ticket: place.as_ref().map(queue::Place::ticket),
            };
            match self.decide(&workers, &ask.request(), &held, named) {
                Ok(placed) => {
                    if let Some(place) = &mut place {
                        place.served();
                    }
                    return Ok(Some(placed));
                }
                Err(Refusal::Saturated) => {}
                Err(refusal) => return refused(refusal, &ask.model).map_or(Ok(None), Err),
            }
            match &mut place {
                Some(place) => place.turn(published).await?,
                None => place = Some(self.queue(&ask.model, ask.rank(&held), &cluster.metrics)?),
            }
        }
    }
}
