//! The prefill router: a request's prompt on a prefill worker, its answer on a decode worker.
//!
//! Where a model has prefill workers, a request goes to one of them first. That one answers with the first token, which the
//! client gets at once, and says how the KV of the prompt is fetched. Then the request goes on at a decode worker, in the way of
//! one whose worker was lost (`migration`), which fetches the blocks it lacks. Where no prefill worker can, the decode worker
//! computes the prompt: the client sees a later first token, and nothing else.

use routing::{ConditionalDisagg, Halves, Role, Roles, Whole};

use super::attempts::{Attempts, Job, Leg};
use crate::backend::DispatchError;
use crate::metrics::ReasonLabels;
use crate::workers::ClusterView;

/// What there is of prefill workers of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefillPool {
    /// None but those that leave, or nobody to go on after them: no request is split.
    None,
    /// Some, and none of them could be reached yet.
    Starting,
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
        if pool == PrefillPool::Starting {
            return Err(DispatchError::NoWorker { model: job.ask.model.clone() });
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
            // It would be no better elsewhere.
            Err(error @ (DispatchError::Invalid(_) | DispatchError::Deadline { .. })) => Err(error),
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
            self.placement.explain(&view.set, &request, &held).outcome.ok()
        };
        // Where nobody could decode, that is what the request is to fail of.
        let decode = decide(Roles::WHOLE)?;
        let prefill = decide(Roles::only(Role::Prefill))?;
        policy.whole(Halves {
            prompt: job.request.token_ids.len(),
            cached: decode.terms.overlap.total() as usize * job.ask.block_size().get(),
            waiting_prefill: prefill.load.prefill_tokens,
            waiting_decode: decode.load.prefill_tokens,
        })
    }

    /// Counts what became of a prompt that could be computed by a prefill worker.
    pub(super) fn count(&self, reason: &'static str) {
        self.cluster.metrics.prefills.get_or_create(&ReasonLabels { reason }).inc();
    }
}
