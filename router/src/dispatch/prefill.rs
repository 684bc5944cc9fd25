//! The prefill router: a request's prompt on a prefill worker, its answer on a decode worker.
//!
//! Where a model has prefill workers, a request goes to one of them first. That one answers with the first token, which the
//! client gets at once, and says how the KV of the prompt is fetched. Then the request goes on at a decode worker whose KV is of
//! the same kind, in the way of one whose worker was lost (`migration`), which fetches the blocks it lacks. Where no prefill
//! worker can, the decode worker computes the prompt: the client sees a later first token, and nothing else.

use kv_index::WorkerId;
use routing::{ConditionalDisagg, KvFormat, Mode, Refusal, Role, Roles, Splittable, Whole, Worker};
use tokio::time::Instant;

use super::ask::Ask;
use super::attempts::{Attempts, Job, Leg};
use super::migration::is_of_workers;
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

/// Where a request is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// All of it on one worker; why, where there are prefill workers.
    Whole(Option<&'static str>),
    /// Its prompt on a prefill worker whose KV fits one of these kinds, as far as kinds are told apart.
    Split(Option<Vec<KvFormat>>),
}

impl Job {
    /// Makes it a request for its prompt alone.
    fn split(&mut self, mode: Option<Mode>, partners: Option<Vec<KvFormat>>) {
        self.ask.split(mode, partners);
        self.request.prefill_only = true;
    }

    /// Makes it a request for what is left of it. The KV of its prompt is computed where it is not cached.
    pub(super) fn join(&mut self) {
        self.ask.join(None);
        self.request.prefill_only = false;
        self.request.disaggregated_params = String::new();
    }

    /// The same; `disaggregated_params` say how the KV of its prompt is fetched, which is of the kind `kv`.
    pub(super) fn join_from(&mut self, disaggregated_params: String, kv: &KvFormat) {
        self.ask.join(Some(kv));
        self.request.prefill_only = false;
        self.request.disaggregated_params = disaggregated_params;
    }
}

impl Attempts {
    /// Where a request that has just come is to run.
    pub(super) fn plan(
        &self,
        ask: &Ask,
        view: &ClusterView,
        conditional: Option<&ConditionalDisagg>,
    ) -> Result<Plan, DispatchError> {
        let pool = view.models.get(&ask.model).map_or(PrefillPool::None, |model| model.prefill);
        match pool {
            PrefillPool::None => return Ok(Plan::Whole(None)),
            // Who names a worker means the one that answers.
            _ if ask.is_pinned() => return Ok(Plan::Whole(None)),
            PrefillPool::Starting(until) if Instant::now() < until => {
                return Err(DispatchError::NoWorker { model: ask.model.clone() });
            }
            PrefillPool::Starting(_) => return Ok(Plan::Whole(Some("unreachable"))),
            PrefillPool::Open => {}
        }
        let partners = view.set.kv_formats(&ask.request());
        if partners.as_ref().is_some_and(|partners| !prefills_for(view, &ask.model, partners)) {
            return Ok(Plan::Whole(Some("kv differs")));
        }
        let whole = conditional.and_then(|policy| self.whole(ask, view, policy));
        Ok(whole.map_or(Plan::Split(partners), |whole| Plan::Whole(Some(whole.as_str()))))
    }

    /// Sends a request to a prefill worker; if none answers, as a whole to another.
    pub(super) async fn run_halves(
        &self,
        job: &mut Job,
        partners: Option<Vec<KvFormat>>,
    ) -> Result<Leg, DispatchError> {
        job.split(self.prefill_mode, partners);
        match self.run(job).await {
            Ok(leg) => Ok(leg),
            // The client has waited long enough; in the queue of the decode workers it may be another matter.
            Err(error @ DispatchError::Deadline { stage: stage::FIRST_TOKEN, .. }) => Err(error),
            Err(error) if job.losses.is_over() => Err(error),
            Err(error) => {
                tracing::debug!(request = %job.ask.id, %error, "no prefill worker: the decode worker computes the prompt");
                self.count("failed");
                job.join();
                self.run(job).await
            }
        }
    }

    /// Splits a request anew that lost what its first half had kept, at the worker `first`, before anything was delivered of it.
    /// Which of the two halves failed is not known: so `first` is asked again only if there is no other. If nobody is there any
    /// more, it fails with `error`, which says more.
    pub(super) async fn run_halves_anew(
        &self,
        job: &mut Job,
        first: WorkerId,
        error: DispatchError,
    ) -> Result<Leg, DispatchError> {
        let plan = self.plan(&job.ask, &self.cluster.view.load_full(), None)?;
        let leg = match plan {
            Plan::Whole(_) => self.run(job).await,
            Plan::Split(partners) => {
                job.split(self.prefill_mode, partners.clone());
                match self.run(job).await {
                    Err(error) if !job.losses.is_over() && is_of_workers(&error) => {
                        job.ask.forgive(first);
                        self.run_halves(job, partners).await
                    }
                    leg => leg,
                }
            }
        };
        leg.map_err(|later| if matches!(later, DispatchError::NoWorker { .. }) { error } else { later })
    }

    /// Whether there is a worker for the answer of this request, now or after a wait.
    pub(super) fn may_decode(&self, ask: &Ask) -> bool {
        let outcome = self.placement.peek(&self.cluster.view.load().set, &ask.request(), &self.held(ask));
        matches!(outcome, Ok(_) | Err(Refusal::Saturated))
    }

    /// Why a request stays whole although it could be split. Cost: a decision that is not booked, and another one where it is to be
    /// known how long prefill workers take.
    fn whole(&self, ask: &Ask, view: &ClusterView, policy: &ConditionalDisagg) -> Option<Whole> {
        let held = self.held(ask);
        // Where nobody could decode, that is what the request is to fail of.
        let decode = self.placement.peek(&view.set, &ask.request(), &held).ok()?;
        let request = Splittable {
            prompt: ask.prompt.tokens,
            cached: decode.terms.overlap.total() as usize * ask.block_size().get(),
            waiting: decode.load.prefill_tokens,
        };
        policy.whole(request, || {
            let roles = Roles::only(Role::Prefill);
            let request = routing::Request { roles, mode: self.prefill_mode, ..ask.request() };
            match self.placement.peek(&view.set, &request, &held) {
                Ok(prefill) => Some(prefill.load.prefill_tokens),
                Err(Refusal::Saturated | Refusal::Busy) => Some(u32::MAX),
                Err(_) => None,
            }
        })
    }

    /// Counts what became of a prompt that could be computed by a prefill worker.
    pub(super) fn count(&self, reason: &'static str) {
        self.cluster.metrics.prefills.get_or_create(&ReasonLabels { reason }).inc();
    }
}

/// Whether a prefill worker of the model makes KV that one of `partners` can use. They are not asked how they are: one that
/// is away may be back when the request comes to it.
fn prefills_for(view: &ClusterView, model: &str, partners: &[KvFormat]) -> bool {
    let prefills = |worker: &&Worker| worker.role == Role::Prefill && *worker.model == *model;
    let mut workers = view.set.iter().filter(prefills);
    workers.any(|worker| partners.iter().any(|kv| kv.fits(&worker.kv)))
}
