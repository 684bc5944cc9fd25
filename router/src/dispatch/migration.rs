//! A running request that goes on at another worker when its own is lost.
//!
//! The tokens so far are kept, 4 bytes each, behind those of the prompt. The next worker is sent all of them, and told how many
//! were generated: it computes what it does not hold, and continues as if it had generated them itself. So the client sees one
//! answer, with a pause in it. How often that may happen is bounded, and how long it may take: it counts as silence between two
//! tokens.

use std::sync::Arc;

use kv_index::WorkerId;
use protocol::request_plane::{ErrorCode, FinishReason, Finished, Output};
use routing::KvFormat;
use tokio::time::Instant;

use super::attempts::{Attempts, Job, Leg};
use super::booking::Booking;
use crate::backend::DispatchError;
use crate::metrics::ReasonLabels;
use crate::request_plane::Kept;

/// Whether others might do what these workers did not.
pub(super) fn is_of_workers(error: &DispatchError) -> bool {
    use DispatchError::{NoWorker, Overloaded, ShuttingDown, Worker};
    matches!(error, NoWorker { .. } | Overloaded(_) | ShuttingDown(_) | Worker { .. })
}

/// Why a request has to leave its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The connection was lost.
    Lost,
    /// The worker ends before the request does.
    Draining,
    /// The engine gave the request up. It may have been the request's own fault: one more engine is tried, no third one.
    Failed,
}

impl Cause {
    /// Whether another worker may do after a failure of this kind.
    pub(super) fn of(code: ErrorCode) -> Option<Self> {
        match code {
            ErrorCode::Draining => Some(Self::Draining),
            ErrorCode::Engine => Some(Self::Failed),
            _ => None,
        }
    }

    fn label(self) -> ReasonLabels {
        let reason = match self {
            Self::Lost => "lost",
            Self::Draining => "draining",
            Self::Failed => "failed",
        };
        ReasonLabels { reason }
    }
}

/// What is left of a first half that has ended.
pub(super) struct FirstHalf {
    /// Who computed the prompt, or still computes it.
    pub(super) worker: WorkerId,
    /// How the KV of the prompt is fetched; empty: it was not kept.
    pub(super) params: String,
    /// Of which kind that is.
    pub(super) kv: KvFormat,
    pub(super) kept: Kept,
    /// What the worker goes on to compute.
    pub(super) booking: Option<Booking>,
}

/// What a running request needs to go on elsewhere.
pub(super) struct Migration {
    attempts: Arc<Attempts>,
    /// Grows with what is generated; absent where nothing may move.
    job: Option<Box<Job>>,
    /// Moves left.
    left: u32,
    /// An engine has failed the request already.
    engine_failed: bool,
    /// It has moved.
    moved: bool,
    /// Its first half was for nothing, and there was another one.
    anew: bool,
    /// Prompt tokens whose KV the first worker reused.
    reused_tokens: u32,
}

impl Migration {
    /// For a request that may move `limit` times.
    pub(super) fn new(attempts: Arc<Attempts>, job: Job, limit: u32) -> Self {
        // A first half always moves: to the second.
        let job = (limit > 0 || job.request.prefill_only).then(|| Box::new(job));
        Self { attempts, job, left: limit, engine_failed: false, moved: false, anew: false, reused_tokens: 0 }
    }

    /// Takes note of tokens on their way to the client, and makes them look as if all came from one worker.
    pub(super) fn delivered(&mut self, output: &mut Output) {
        let Some(job) = &mut self.job else { return };
        // A first half may leave all tokens to the second.
        if self.moved && job.request.generated > 0 {
            *output = Output {
                token_ids: std::mem::take(&mut output.token_ids),
                logprobs: std::mem::take(&mut output.logprobs),
                ..Output::default()
            };
        } else if output.first {
            let (blocks, size) = (output.reused_blocks as usize, job.ask.block_size().get());
            self.reused_tokens = blocks.saturating_mul(size).min(job.request.token_ids.len()) as u32;
        }
        job.request.token_ids.extend_from_slice(&output.token_ids);
        job.request.generated += output.token_ids.len() as u32;
    }

    /// Makes the end look as if all tokens came from one worker.
    pub(super) fn finished(&self, finished: &mut Finished) {
        if self.moved {
            finished.reused_tokens = self.reused_tokens;
        }
    }

    /// How the request ended, if all that its worker had left to say is that it is as long as it may be.
    pub(super) fn complete(&self) -> Option<Finished> {
        let request = &self.job.as_ref()?.request;
        let limit = request.stop.as_ref()?.max_tokens;
        (request.generated >= limit).then(|| Finished {
            reason: FinishReason::Length.into(),
            prompt_tokens: request.token_ids.len() as u32 - request.generated,
            completion_tokens: request.generated,
            reused_tokens: self.reused_tokens,
            ..Finished::default()
        })
    }

    /// Whether the request may leave its worker once more; counts it if so, and counts it as refused if not.
    pub(super) fn may_move(&mut self, cause: Cause) -> bool {
        let again = cause == Cause::Failed && std::mem::replace(&mut self.engine_failed, true);
        let ends = again || cause == Cause::Lost && self.job.as_mut().is_some_and(|job| !job.losses.outlives_another());
        // Leaving a first half is what it is for.
        if self.is_first_half() && !ends {
            return true;
        }
        if self.job.is_none() || self.left == 0 || ends {
            self.attempts.cluster.metrics.migrations_refused.get_or_create(&cause.label()).inc();
            return false;
        }
        self.left -= 1;
        true
    }

    /// Whether its worker computes the prompt only.
    pub(super) fn is_first_half(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.request.prefill_only)
    }

    /// Whether tokens of it have been delivered.
    pub(super) fn has_begun(&self) -> bool {
        self.job.as_ref().is_none_or(|job| job.request.generated > 0)
    }

    /// Finds the worker of the second half, whose first token is due then. If nobody that could fetch the KV of the prompt is left,
    /// the prompt is computed; if it was lost before anything was delivered, there is another first half, once. Where nobody
    /// fetches it, or the client leaves meanwhile, the KV is given up.
    pub(super) async fn hand_over(mut self, half: FirstHalf, due: Instant) -> (Self, Result<Leg, DispatchError>) {
        let FirstHalf { worker, params, kv, kept, booking } = half;
        let job = self.job.as_mut().expect("the job of a first half is kept");
        let fetchable = !params.is_empty();
        if fetchable {
            job.join_from(params, &kv);
        } else {
            job.join();
        }
        job.ask.resume(&job.request);
        job.due = Some(due);
        let mut outcome = if fetchable { "remote" } else { "not kept" };
        let mut leg = self.attempts.run(job).await;
        let given_up = fetchable && !job.ask.fetches;
        let others = || fetchable && self.attempts.cluster.view.load().set.mixes_kv();
        leg = match leg {
            Err(error) if !job.losses.is_over() && is_of_workers(&error) => {
                if given_up && job.request.generated == 0 && !self.anew && self.attempts.may_decode(&job.ask) {
                    (outcome, self.anew) = ("once more", true);
                    drop((kept, booking));
                    self.attempts.run_halves_anew(job, worker, error).await
                } else if !given_up && others() {
                    outcome = "kv differs";
                    job.join();
                    self.attempts.run(job).await
                } else {
                    Err(error)
                }
            }
            leg if given_up => {
                outcome = "not fetched";
                leg
            }
            leg => {
                if leg.is_ok() {
                    // The worker that answers has fetched it, or ended the lease itself.
                    kept.taken();
                }
                leg
            }
        };
        self.attempts.count(if leg.is_ok() { outcome } else { "no decode worker" });
        self.moved = true;
        (self, leg)
    }

    /// Finds another worker, which answers with what follows, and the first of it when it is due. What the last one held of the
    /// request has been released. With the error the request ends as it would have ended without a move.
    pub(super) async fn go(
        mut self,
        cause: Cause,
        error: DispatchError,
        due: Instant,
    ) -> (Self, Result<Leg, DispatchError>) {
        let leg = match &mut self.job {
            Some(job) => {
                job.due = Some(due);
                // What a prefill worker had kept was for the worker that is lost.
                job.join();
                job.ask.resume(&job.request);
                self.attempts.run(job).await
            }
            None => Err(error.clone()),
        };
        let metrics = &self.attempts.cluster.metrics;
        match leg {
            Ok(leg) => {
                self.moved = true;
                metrics.migrations.get_or_create(&cause.label()).inc();
                tracing::info!(%error, worker = %leg.life.spec().name, "a stream goes on at another worker");
                (self, Ok(leg))
            }
            Err(reason) => {
                metrics.migrations_refused.get_or_create(&cause.label()).inc();
                tracing::info!(%error, %reason, "a stream could not go on at another worker");
                (self, Err(error))
            }
        }
    }
}
