//! The prefill router: a request's prompt on a prefill worker, its answer on a decode worker.
//!
//! Where a model has prefill workers, a request goes to one of them first. That one answers with the first token, which the
//! client gets at once, and says how the KV of the prompt is fetched. Then the request goes on at a decode worker, in the way of
//! one whose worker was lost (`migration`), which fetches the blocks it lacks. Where no prefill worker can, the decode worker
//! computes the prompt: the client sees a later first token, and nothing else.

use routing::{ConditionalDisagg, Halves, Refusal, Role, Roles, Whole};
use tokio::time::Instant;

use super::attempts::{Attempts, Job, Leg};
use super::stage;
use crate::backend::DispatchError;
use crate::metrics::ReasonLabels;
use crate::workers::ClusterView;

/// What there is of prefill workers of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefillPool {
    /// None but those that leave, or nobody to go on after them: no request is split.
    None,
    /// Some, and none of them could be reached yet: until then it counts as one that starts, and not as one that is broken.
    Starting(Instant),
    /// One at least that was reached. If it is lost now, prompts are computed elsewhere until another comes.
    Open,
}

impl Job {
    /// Makes it a request for its prompt alone.
    fn split(&mut self) {
        self.ask.roles = Roles::only(Role::Prefill);
        self.request.prefill_only = true;
    }

    /// Makes it a request for what is left of it, with what says how the KV of its prompt is fetched; empty where it is not.
    pub(super) fn join(&mut self, disaggregated_params: String) {
        self.ask.roles = Roles::WHOLE;
        self.request.prefill_only = false;
        self.ask.fetches = !disaggregated_params.is_empty();
        self.request.disaggregated_params = disaggregated_params;
    }
}

impl Attempts {
    /// Whether a request is to be split.
    pub(super) fn splits(
        &self,
        job: &Job,
        view: &ClusterView,
        conditional: Option<&ConditionalDisagg>,
    ) -> Result<bool, DispatchError> {
        let pool = view.models.get(&job.ask.model).map_or(PrefillPool::None, |model| model.prefill);
        // Who names a worker means the one that answers.
        if pool == PrefillPool::None || job.ask.is_pinned() {
            return Ok(false);
        }
        if let PrefillPool::Starting(until) = pool {
            let starts = Instant::now() < until;
            return if starts { Err(DispatchError::NoWorker { model: job.ask.model.clone() }) } else { Ok(false) };
        }
        let whole = conditional.and_then(|policy| self.whole(job, view, policy));
        whole.inspect(|whole| self.count(whole.as_str()));
        Ok(whole.is_none())
    }

    /// Sends a request to a prefill worker; if none answers, as a whole to another.
    pub(super) async fn run_halves(&self, job: &mut Job) -> Result<Leg, DispatchError> {
        job.split();
        match self.run(job).await {
            Ok(leg) => Ok(leg),
            // The client has waited long enough; in the queue of the decode workers it may be another matter.
            Err(error @ DispatchError::Deadline { stage: stage::FIRST_TOKEN, .. }) => Err(error),
            Err(error) => {
                tracing::debug!(request = %job.ask.id, %error, "no prefill worker: the decode worker computes the prompt");
                self.count("failed");
                job.join(String::new());
                self.run(job).await
            }
        }
    }

    /// Why a request stays whole although it could be split. Cost: two decisions that are not booked.
    fn whole(&self, job: &Job, view: &ClusterView, policy: &ConditionalDisagg) -> Option<Whole> {
        let held = self.held(&job.ask.blocks);
        let decide = |roles| {
            let request = routing::Request { roles, ..job.ask.request() };
            self.placement.explain(&view.set, &request, &held).outcome
        };
        // Where nobody could decode, that is what the request is to fail of.
        let decode = decide(Roles::WHOLE).ok()?;
        let waiting_prefill = match decide(Roles::only(Role::Prefill)) {
            Ok(prefill) => prefill.load.prefill_tokens,
            Err(Refusal::Saturated | Refusal::Busy) => u32::MAX,
            Err(_) => return None,
        };
        policy.whole(Halves {
            prompt: job.request.token_ids.len(),
            cached: decode.terms.overlap.total() as usize * job.ask.block_size().get(),
            waiting_prefill,
            waiting_decode: decode.load.prefill_tokens,
        })
    }

    /// Counts what became of a prompt that could be computed by a prefill worker.
    pub(super) fn count(&self, reason: &'static str) {
        self.cluster.metrics.prefills.get_or_create(&ReasonLabels { reason }).inc();
    }
}
