//! Wires the three reconcilers to what they watch.

use std::sync::Arc;
use std::time::Duration;

use crds::{DynamoWorkerMetadata, ModelDeployment, WorkerPool, label};
use futures::{Stream, StreamExt};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::runtime::controller::{self, Action, Controller};
use kube::runtime::reflector::{self, ObjectRef};
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use crate::build::MANAGED_SELECTOR;
use crate::context::Context;
use crate::error::Error;
use crate::registration::{self, Registrations};
use crate::{deployment, pool};

/// Seconds after which a watch is renewed; a dead connection is noticed by then.
const WATCH_S: u32 = 60;
/// Objects of one kind that are reconciled at once.
const CONCURRENCY: u16 = 16;

/// Runs all controllers until `shutdown`, then lets running reconciles end.
pub(crate) async fn run(context: Arc<Context>, namespace: Option<&str>, shutdown: CancellationToken) {
    let scope = Scope { client: context.client.clone(), namespace };
    tokio::join!(
        deployments(&scope, context.clone(), shutdown.clone()),
        pools(&scope, context.clone(), shutdown.clone()),
        registrations(&scope, context, shutdown),
    );
}

struct Scope<'a> {
    client: Client,
    namespace: Option<&'a str>,
}

impl Scope<'_> {
    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        match self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }
}

async fn deployments(scope: &Scope<'_>, context: Arc<Context>, shutdown: CancellationToken) {
    let controller = Controller::new(scope.api::<ModelDeployment>(), everything())
        .owns(scope.api::<Deployment>(), made_by_us())
        .owns(scope.api::<Service>(), made_by_us())
        .owns(scope.api::<ServiceAccount>(), made_by_us())
        .owns(scope.api::<Role>(), made_by_us())
        .owns(scope.api::<RoleBinding>(), made_by_us())
        .owns(scope.api::<WorkerPool>(), made_by_us())
        .with_config(controller::Config::default().concurrency(CONCURRENCY))
        .trigger_backoff(Steady)
        .graceful_shutdown_on(shutdown.cancelled_owned());
    drain(controller.run(deployment::reconcile, retry, context)).await;
}

async fn pools(scope: &Scope<'_>, context: Arc<Context>, shutdown: CancellationToken) {
    let controller = Controller::new(scope.api::<WorkerPool>(), everything())
        .owns(scope.api::<Deployment>(), made_by_us())
        .with_config(controller::Config::default().concurrency(CONCURRENCY))
        .trigger_backoff(Steady)
        .graceful_shutdown_on(shutdown.cancelled_owned());
    drain(controller.run(pool::reconcile, retry, context)).await;
}

async fn registrations(scope: &Scope<'_>, context: Arc<Context>, shutdown: CancellationToken) {
    let of_discovery = || everything().labels(&format!("{}=true", label::DISCOVERY_ENABLED));
    let (slices, writer) = reflector::store();
    // One stream fills the store and then triggers, so that a reconcile never sees an older store than its trigger. What has
    // gathered meanwhile triggers once; a reconcile that finds nothing new makes no call.
    let changed = watcher(scope.api::<EndpointSlice>(), of_discovery())
        .backoff(Steady)
        .reflect(writer)
        .touched_objects()
        .filter_map(async |slice| slice.ok())
        .ready_chunks(GATHERED)
        .map(|_| ());
    let controller = Controller::new(scope.api::<DynamoWorkerMetadata>(), everything())
        .with_config(controller::Config::default().concurrency(CONCURRENCY))
        .trigger_backoff(Steady)
        .reconcile_all_on(changed)
        .graceful_shutdown_on(shutdown.cancelled_owned());
    let state = Arc::new(Registrations { context, slices });
    drain(controller.run(registration::reconcile, retry_registration, state)).await;
}

/// Pause after the error of a watch. A controller waits it out with all its watches together, and when the API server stops for a
/// moment each of them fails: pauses that grow, as kube gives them by default, would add up to minutes without a reconcile.
const WATCH_PAUSE: Duration = Duration::from_millis(500);

/// Pauses of one length.
struct Steady;

impl Iterator for Steady {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(WATCH_PAUSE)
    }
}

impl Backoff for Steady {
    fn reset(&mut self) {}
}

/// Most changes of EndpointSlices that trigger together.
const GATHERED: usize = 256;

fn everything() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_S)
}

fn made_by_us() -> watcher::Config {
    everything().labels(MANAGED_SELECTOR)
}

fn retry<K>(_: Arc<K>, error: &Error, _: Arc<Context>) -> Action {
    error.retry()
}

fn retry_registration(_: Arc<DynamoWorkerMetadata>, error: &Error, _: Arc<Registrations>) -> Action {
    error.retry()
}

/// Runs a controller to its end. Reconcile errors are logged where they happen; what is left concerns watches.
async fn drain<K>(
    outcomes: impl Stream<Item = Result<(ObjectRef<K>, Action), controller::Error<Error, watcher::Error>>>,
) where
    K: Resource<DynamicType = ()> + DeserializeOwned,
{
    outcomes
        .for_each(async |outcome| {
            if let Err(controller::Error::QueueError(error)) = outcome {
                tracing::warn!(kind = %K::kind(&()), %error, "watch failed; trying again");
            }
        })
        .await;
}
