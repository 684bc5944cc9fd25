//! Reads and writes the Lease, and tells the rest of the operator whether it leads.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Election, Observed, Step};

/// Why the Lease was not written.
#[derive(Debug, thiserror::Error)]
enum LeaseError {
    /// The release owns the Lease: an operator that could make one would leave it behind.
    #[error("Lease {0} is missing and this operator may not create it; run helm upgrade, which restores it")]
    Missing(String),
    #[error(transparent)]
    Api(#[from] kube::Error),
}

/// What the operator knows of its Lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// It may act.
    pub leads: bool,
    /// The API server has answered within the last lease duration.
    pub in_touch: bool,
    /// There is no Lease, and the operator may not make one: until somebody does, nobody leads.
    pub lease_missing: bool,
}

/// Takes part in the election until `shutdown`, then releases the Lease if it holds it.
pub async fn take_part(
    client: Client,
    namespace: String,
    name: String,
    mut election: Election,
    standing: watch::Sender<Standing>,
    shutdown: CancellationToken,
) {
    let leases = Leases { api: Api::namespaced(client, &namespace), name };
    let mut answers = Answers::default();
    loop {
        let started = Instant::now();
        match tokio::time::timeout(election.period(), leases.tick(&mut election, started)).await {
            Ok(Ok(())) => answers = Answers { last: Some(Instant::now()), lease_missing: false },
            Ok(Err(error @ LeaseError::Missing(_))) => {
                answers = Answers { last: Some(Instant::now()), lease_missing: true };
                tracing::error!(%error, "cannot lead");
            }
            Ok(Err(error)) => tracing::warn!(lease = leases.name, %error, "cannot read or write the Lease"),
            Err(_) => tracing::warn!(lease = leases.name, "no answer about the Lease within {:?}", election.period()),
        }
        publish(&standing, &election, answers);
        // A leader's term may end before the next tick; whoever watches must hear of it in time.
        let next = tokio::time::sleep(election.period().saturating_sub(started.elapsed()));
        tokio::pin!(next);
        loop {
            let term = election.leads_until().filter(|_| standing.borrow().leads);
            tokio::select! {
                () = &mut next => break,
                () = ends(term) => publish(&standing, &election, answers),
                () = shutdown.cancelled() => {
                    leases.release(&election).await;
                    return;
                }
            }
        }
    }
}

/// What the API server has said.
#[derive(Clone, Copy, Default)]
struct Answers {
    last: Option<Instant>,
    /// It was the last thing it said.
    lease_missing: bool,
}

fn publish(standing: &watch::Sender<Standing>, election: &Election, answers: Answers) {
    let now = Instant::now();
    let next = Standing {
        leads: election.leads(now),
        in_touch: answers.last.is_some_and(|at| now.duration_since(at) < election.duration()),
        lease_missing: answers.lease_missing,
    };
    standing.send_if_modified(|known| std::mem::replace(known, next) != next);
}

/// Waits for the end of a term; for ever where there is none.
async fn ends(term: Option<Instant>) {
    match term {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

struct Leases {
    api: Api<Lease>,
    name: String,
}

impl Leases {
    /// Reads the Lease once and does what the election asks for. A lost race is no error: the next tick sees who won.
    async fn tick(&self, election: &mut Election, started: Instant) -> Result<(), LeaseError> {
        let lease = self.api.get_opt(&self.name).await?;
        let step = election.step(Instant::now(), lease.as_ref().map(observe).as_ref());
        let written = match step {
            Step::Wait => return Ok(()),
            Step::Create => {
                let new = Lease {
                    metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                    spec: Some(held(None, election, true)),
                };
                self.api.create(&PostParams::default(), &new).await
            }
            Step::Take | Step::Renew => {
                let mut lease = lease.unwrap_or_default();
                lease.spec = Some(held(lease.spec.take(), election, step == Step::Take));
                // The object carries the resourceVersion it was read at, so a concurrent write makes this one fail.
                self.api.replace(&self.name, &PostParams::default(), &lease).await
            }
        };
        match written {
            Ok(_) => election.renewed(started),
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(failed(step, &self.name, error)),
        }
        Ok(())
    }

    /// Frees the Lease for the next operator. Failing is harmless: it expires.
    async fn release(&self, election: &Election) {
        if !election.leads(Instant::now()) {
            return;
        }
        let release = async {
            let Some(mut lease) = self.api.get_opt(&self.name).await? else { return Ok(()) };
            if observe(&lease).holder.as_deref() == Some(election.identity()) {
                lease.spec.get_or_insert_default().holder_identity = Some(String::new());
                self.api.replace(&self.name, &PostParams::default(), &lease).await?;
            }
            Ok::<(), kube::Error>(())
        };
        if !matches!(tokio::time::timeout(election.period(), release).await, Ok(Ok(()))) {
            tracing::warn!(lease = self.name, "the Lease was not released; it expires by itself");
        }
    }
}

fn failed(step: Step, name: &str, error: kube::Error) -> LeaseError {
    match error {
        kube::Error::Api(status) if step == Step::Create && status.code == 403 => LeaseError::Missing(name.into()),
        error => LeaseError::Api(error),
    }
}

fn observe(lease: &Lease) -> Observed {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok()).unwrap_or(0);
    Observed {
        resource_version: lease.resource_version().unwrap_or_default(),
        holder: spec.holder_identity,
        duration: Duration::from_secs(seconds),
    }
}

/// The spec of a Lease held by this candidate from now on.
fn held(before: Option<LeaseSpec>, election: &Election, taken: bool) -> LeaseSpec {
    let before = before.unwrap_or_default();
    let now = MicroTime(Timestamp::now());
    LeaseSpec {
        holder_identity: Some(election.identity().into()),
        lease_duration_seconds: i32::try_from(election.duration().as_secs()).ok(),
        acquire_time: if taken { Some(now.clone()) } else { before.acquire_time.clone() },
        renew_time: Some(now),
        lease_transitions: Some(before.lease_transitions.unwrap_or(0) + i32::from(taken)),
        ..before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_is_missing_and_may_not_be_made_is_named() {
        let refused = |code| kube::Error::Api(kube::core::Status::failure("no", "Reason").with_code(code).boxed());
        let missing = failed(Step::Create, "armature", refused(403)).to_string();
        assert_eq!(
            missing,
            "Lease armature is missing and this operator may not create it; run helm upgrade, which restores it"
        );
        for (step, code) in [(Step::Create, 500), (Step::Renew, 403), (Step::Take, 403)] {
            assert!(matches!(failed(step, "armature", refused(code)), LeaseError::Api(_)), "{step:?} {code}");
        }
    }
}
