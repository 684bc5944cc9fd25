//! Discovery through the Kubernetes API: `DynamoWorkerMetadata` objects joined with what says that their pods are ready.
//!
//! A worker is visible when its object exists and the very pod that owns it (by UID) is ready: its containers are ready
//! (our own workers, whose endpoint may wait for this router to admit them) or its EndpointSlice entry is (foreign ones).
//! Three watches, each restarted for ever; the first view waits for all three lists, and each list replaces what was known.

mod join;
pub(crate) mod store;

use std::time::Duration;

use crds::{DynamoWorkerMetadata, label};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::{Client, Config};
use tokio::time::{Instant, sleep};

use super::{Announced, DiscoveryError, Sink};
use join::{ready_endpoints, ready_pod, registration};
use store::watch;

/// Deadline of connecting to the API server.
const CONNECT: Duration = Duration::from_secs(5);

/// Longest silence on a connection to the API server; above the 60 s of a watch.
const READ: Duration = Duration::from_secs(70);

/// Changes within this time make one view: a rollout of hundreds of pods must not make hundreds of each.
const QUIET: Duration = Duration::from_millis(20);

/// A client from the pod's service account or the kubeconfig.
pub(crate) async fn client() -> Result<Client, DiscoveryError> {
    // Its source is the kubeconfig's error; its own text adds only that the variables of a pod are missing.
    let mut config = Config::infer().await.map_err(|error| {
        DiscoveryError::NoCluster(
            std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string),
        )
    })?;
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(READ);
    Client::try_from(config).map_err(|e| DiscoveryError::Kubernetes(e.to_string()))
}

/// Publishes views for ever.
pub(super) async fn run(client: Client, namespace: Option<String>, deployment: Option<String>, mut sink: Sink) {
    let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
    let (pod_selector, slice_selector) = selectors(deployment.as_deref());
    // Untyped, so that one malformed object hides itself and not all the others.
    let resource = ApiResource::erase::<DynamoWorkerMetadata>(&());
    let objects: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &resource);
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), &namespace);
    let pods: Api<Pod> = Api::namespaced(client, &namespace);

    let mut objects = watch("DynamoWorkerMetadata", objects, None, registration);
    let mut slices = watch("EndpointSlice", slices, Some(slice_selector), ready_endpoints);
    let mut pods = watch("Pod", pods, Some(pod_selector), ready_pod);
    let mut quiet = Box::pin(sleep(QUIET));
    loop {
        let mut changed = false;
        loop {
            tokio::select! {
                () = objects.changed() => {}
                () = slices.changed() => {}
                () = pods.changed() => {}
                () = &mut quiet, if changed => break,
            }
            if !changed {
                changed = true;
                quiet.as_mut().reset(Instant::now() + QUIET);
            }
        }
        if let (Some(objects), Some(slices), Some(pods)) = (objects.list(), slices.list(), pods.list()) {
            let visible = join::visible(objects.values(), slices.values(), pods.values());
            sink.publish(visible.map(|worker| Announced {
                name: &worker.name,
                metadata: &worker.metadata,
                since: worker.since,
                lapsed: false,
            }));
        }
    }
}

/// Which pods, and which slices. Registrations need no label, which foreign ones would lack: what limits them to a deployment
/// are the pods and slices they are joined with.
fn selectors(deployment: Option<&str>) -> (String, String) {
    let discoverable = format!("{}=true", label::DISCOVERY_ENABLED);
    match deployment {
        Some(name) => {
            let ours = format!("{}={name}", label::DEPLOYMENT);
            (ours.clone(), format!("{discoverable},{ours}"))
        }
        None => (label::DEPLOYMENT.to_owned(), discoverable),
    }
}

#[cfg(test)]
mod tests {
    use super::selectors;

    #[test]
    fn a_deployment_limits_both_sides_of_the_join() {
        let (pods, slices) = selectors(Some("chat"));
        assert_eq!(pods, "armature.dev/deployment=chat");
        assert_eq!(slices, "nvidia.com/dynamo-discovery-enabled=true,armature.dev/deployment=chat");
        assert_eq!(selectors(None).0, "armature.dev/deployment");
    }
}
