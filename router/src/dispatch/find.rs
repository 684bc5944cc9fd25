//! A worker for a request, from a view that the caller keeps; after a wait if none of its workers has room.

use std::sync::Arc;

use kv_hashing::BlockHash;
use kv_index::Overlaps;
use routing::{Decision, Refusal, WorkerSet};

use super::ask::Ask;
use super::booking::{Booking, Named, Placement};
use super::{queue, refused};
use crate::backend::DispatchError;
use crate::workers::Cluster;

/// Where an attempt goes.
pub(crate) struct Found<V> {
    /// What was decided by.
    pub(crate) view: V,
    /// What each worker held of the prompt.
    pub(crate) held: Overlaps,
    pub(crate) decision: Decision,
    pub(crate) booking: Booking,
}

impl Placement {
    /// Decides and books in one step, so that requests that come together see each other. `view`, whose `workers` are chosen among,
    /// and `held` are asked anew after each wait: a failure, or time, may have changed them. `None`: nobody is there.
    pub(crate) async fn find<V>(
        self: &Arc<Self>,
        cluster: &Cluster,
        ask: &Ask,
        view: impl Fn() -> Option<V>,
        workers: impl Fn(&V) -> &WorkerSet,
        held: impl Fn(&[BlockHash]) -> Overlaps,
    ) -> Result<Option<Found<V>>, DispatchError> {
        let mut place: Option<queue::Place> = None;
        loop {
            let published = cluster.published.notified();
            let Some(view) = view() else { return Ok(None) };
            let held = held(&ask.blocks);
            let named = Named {
                request: &ask.id,
                expected_output_tokens: ask.hints.expected_output_tokens.map(|tokens| tokens as usize),
                ticket: place.as_ref().map(queue::Place::ticket),
                fetches: ask.fetches,
            };
            match self.decide(workers(&view), &ask.request(), &held, named) {
                Ok((decision, booking)) => {
                    if let Some(place) = &mut place {
                        place.served();
                    }
                    return Ok(Some(Found { view, held, decision, booking }));
                }
                Err(Refusal::Saturated) => {}
                Err(refusal) => return refused(refusal, ask).map_or(Ok(None), Err),
            }
            match &mut place {
                Some(place) => place.turn(published).await?,
                None => place = Some(self.queue(&ask.request(), ask.rank(&held), &cluster.metrics)?),
            }
        }
    }
}
