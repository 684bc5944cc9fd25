//! From what the cluster says to conditions and counts. Pure: the caller brings the time.

use crds::{ModelDeploymentStatus, WorkerPool, WorkerPoolStatus, condition};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::build::HTTP_PORT;

/// One condition, before its history is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Its type.
    pub kind: &'static str,
    /// Whether it holds.
    pub holds: bool,
    /// CamelCase reason.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

impl Observation {
    fn new(kind: &'static str, holds: bool, reason: &'static str, message: impl Into<String>) -> Self {
        Self { kind, holds, reason, message: message.into() }
    }
}

/// Turns observations into conditions: the time of the last transition stays while the status does, and conditions that
/// are not observed are dropped.
pub fn conditions(
    previous: &[Condition],
    now: &[Observation],
    generation: Option<i64>,
    time: Timestamp,
) -> Vec<Condition> {
    now.iter()
        .map(|observed| {
            let status = if observed.holds { "True" } else { "False" };
            let since = previous
                .iter()
                .find(|known| known.type_ == observed.kind && known.status == status)
                .map_or(Time(time), |known| known.last_transition_time.clone());
            Condition {
                type_: observed.kind.into(),
                status: status.into(),
                reason: observed.reason.into(),
                message: observed.message.clone(),
                observed_generation: generation,
                last_transition_time: since,
            }
        })
        .collect()
}

/// How far a Deployment is with its current template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rollout {
    /// Wanted pods.
    pub desired: i32,
    /// Pods of any revision.
    pub total: i32,
    /// Ready pods of the current revision, at least; exact once no older pod is left.
    pub ready: i32,
    /// The current template runs everywhere and nothing else does.
    pub complete: bool,
    /// Why it does not get on, where Kubernetes says so.
    pub stalled: Option<String>,
}

impl Rollout {
    /// Reads a Deployment. One whose controller has not seen the newest spec counts nothing as ready.
    pub fn of(deployment: &Deployment) -> Self {
        let desired = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
        let unknown = DeploymentStatus::default();
        let status = deployment.status.as_ref().unwrap_or(&unknown);
        let total = status.replicas.unwrap_or(0);
        if status.observed_generation < deployment.metadata.generation {
            return Self { desired, total, ..Self::default() };
        }
        let updated = status.updated_replicas.unwrap_or(0);
        // All older pods may be among the ready ones.
        let ready = (status.ready_replicas.unwrap_or(0) - (total - updated)).max(0);
        let complete = updated == desired && total == desired && ready == desired;
        Self { desired, total, ready, complete, stalled: stalled(status) }
    }
}

fn stalled(status: &DeploymentStatus) -> Option<String> {
    let conditions = status.conditions.as_deref().unwrap_or_default();
    let failure = conditions.iter().find(|c| c.type_ == "ReplicaFailure" && c.status == "True");
    let late = conditions.iter().find(|c| c.type_ == "Progressing" && c.status == "False");
    failure.or(late).map(|c| c.message.clone().unwrap_or_else(|| c.reason.clone().unwrap_or_default()))
}

/// Status of a pool.
pub fn pool(pool: &WorkerPool, deployment: &Deployment, revision: &str, time: Timestamp) -> WorkerPoolStatus {
    let rollout = Rollout::of(deployment);
    let previous = pool.status.clone().unwrap_or_default();
    let selector = deployment.spec.as_ref().and_then(|spec| spec.selector.match_labels.as_ref());
    let observed = [readiness(condition::READY, &rollout, "worker"), progress(&[("workers", &rollout)])];
    WorkerPoolStatus {
        observed_generation: pool.metadata.generation,
        replicas: rollout.total,
        ready_replicas: rollout.ready,
        selector: selector
            .map(|labels| labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")),
        revision: Some(revision.into()),
        conditions: conditions(&previous.conditions, &observed, pool.metadata.generation, time),
    }
}

/// Status of a deployment from its routers and pools as they are stored.
pub fn deployment(
    object: &crds::ModelDeployment,
    model_name: &str,
    routers: &Deployment,
    pools: &[WorkerPool],
    time: Timestamp,
) -> ModelDeploymentStatus {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
    let (routers, workers) = (Rollout::of(routers), workers(pools));
    let routers_ready = readiness(condition::ROUTERS_READY, &routers, "router");
    let workers_ready = readiness(condition::WORKERS_READY, &workers, "worker");
    let ready = match (&routers_ready, &workers_ready) {
        (a, b) if a.holds && b.holds => {
            Observation::new(condition::READY, true, "Serving", format!("{}; {}", a.message, b.message))
        }
        (first, _) if !first.holds => Observation { kind: condition::READY, ..first.clone() },
        (_, second) => Observation { kind: condition::READY, ..second.clone() },
    };
    let observed = [ready, routers_ready, workers_ready, progress(&[("routers", &routers), ("workers", &workers)])];
    let previous = object.status.clone().unwrap_or_default();
    ModelDeploymentStatus {
        observed_generation: object.metadata.generation,
        model: Some(model_name.into()),
        url: Some(format!("http://{name}.{namespace}.svc:{HTTP_PORT}/v1")),
        routers: Some(format!("{}/{}", routers.ready, routers.desired)),
        workers: Some(format!("{}/{}", workers.ready, workers.desired)),
        conditions: conditions(&previous.conditions, &observed, object.metadata.generation, time),
    }
}

/// Status of a deployment that cannot be carried out. Counts and address stay as they were: its pods still run.
pub fn failed(
    object: &crds::ModelDeployment,
    reason: &'static str,
    message: String,
    time: Timestamp,
) -> ModelDeploymentStatus {
    let previous = object.status.clone().unwrap_or_default();
    let observed = [Observation::new(condition::READY, false, reason, message)];
    let mut next = conditions(&previous.conditions, &observed, object.metadata.generation, time);
    next.extend(previous.conditions.iter().filter(|known| known.type_ != condition::READY).cloned());
    ModelDeploymentStatus { observed_generation: object.metadata.generation, conditions: next, ..previous }
}

/// Status of a pool that cannot be carried out.
pub fn pool_failed(object: &WorkerPool, reason: &'static str, message: String, time: Timestamp) -> WorkerPoolStatus {
    let previous = object.status.clone().unwrap_or_default();
    let observed = [Observation::new(condition::READY, false, reason, message)];
    let mut next = conditions(&previous.conditions, &observed, object.metadata.generation, time);
    next.extend(previous.conditions.iter().filter(|known| known.type_ != condition::READY).cloned());
    WorkerPoolStatus { observed_generation: object.metadata.generation, conditions: next, ..previous }
}

/// All pools together. A pool whose status is older than its spec counts nothing as ready.
fn workers(pools: &[WorkerPool]) -> Rollout {
    let unknown = WorkerPoolStatus::default();
    let mut all = Rollout { complete: true, ..Rollout::default() };
    for pool in pools {
        let status = pool.status.as_ref().unwrap_or(&unknown);
        let current = status.observed_generation >= pool.metadata.generation;
        let progressing = status.conditions.iter().find(|c| c.type_ == condition::PROGRESSING);
        let ready = status.conditions.iter().find(|c| c.type_ == condition::READY);
        let failed = ready.filter(|c| c.status == "False" && !ROLLOUT_REASONS.contains(&c.reason.as_str()));
        all.desired += pool.spec.replicas;
        all.total += status.replicas;
        all.ready += if current { status.ready_replicas } else { 0 };
        all.complete &= current && progressing.is_some_and(|c| c.reason == COMPLETE);
        let stalled = progressing.filter(|c| c.reason == STALLED).or(failed);
        all.stalled = all.stalled.or(stalled.map(|c| format!("pool {}: {}", pool.spec.pool, c.message)));
    }
    all
}

const COMPLETE: &str = "Complete";
const ROLLING_OUT: &str = "RollingOut";
const STALLED: &str = "Stalled";
const READY: &str = "PodsReady";
const NOT_READY: &str = "PodsNotReady";
const SCALED_TO_ZERO: &str = "ScaledToZero";
/// Reasons of `Ready` that pods alone explain.
const ROLLOUT_REASONS: [&str; 5] = [READY, NOT_READY, SCALED_TO_ZERO, ROLLING_OUT, STALLED];

/// Ready: all wanted pods are ready and of the current revision, and nothing else runs.
fn readiness(kind: &'static str, rollout: &Rollout, noun: &str) -> Observation {
    let Rollout { desired, ready, .. } = rollout;
    if let Some(why) = &rollout.stalled {
        return Observation::new(kind, false, STALLED, why.clone());
    }
    let counts = format!("{ready} of {desired} {noun}s ready");
    match rollout {
        _ if *desired == 0 => Observation::new(kind, false, SCALED_TO_ZERO, format!("no {noun} is wanted")),
        _ if rollout.complete => Observation::new(kind, true, READY, counts),
        _ if rollout.total > *ready && *ready == *desired => {
            Observation::new(kind, false, ROLLING_OUT, format!("{counts}; older pods are being removed"))
        }
        _ => Observation::new(kind, false, NOT_READY, counts),
    }
}

/// Progressing: pods are being started or replaced.
fn progress(parts: &[(&str, &Rollout)]) -> Observation {
    let kind = condition::PROGRESSING;
    if let Some((what, why)) = parts.iter().find_map(|(what, part)| part.stalled.as_ref().map(|why| (what, why))) {
        return Observation::new(kind, false, STALLED, format!("{what}: {why}"));
    }
    let moving: Vec<&str> = parts.iter().filter(|(_, part)| !part.complete).map(|(what, _)| *what).collect();
    match moving.as_slice() {
        [] => Observation::new(kind, false, COMPLETE, "every pod runs the current revision"),
        moving => Observation::new(kind, true, ROLLING_OUT, format!("starting or replacing {}", moving.join(" and "))),
    }
}

#[cfg(test)]
mod tests;
