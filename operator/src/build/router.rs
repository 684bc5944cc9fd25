//! The routers of a deployment: their Deployment, the clients' Service, the one by which they find each other, and what they
//! may read.

use crds::label;
use crds::model_deployment::Router;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{
    Lifecycle, LifecycleHandler, PodTemplateSpec, Service, ServicePort, ServiceSpec, SleepAction,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::pod::{self, Access, rule};
use super::{Part, name, revision, rolling, router_flags};
use crate::config::Settings;
use crate::validate::ValidDeployment;

/// Port of the OpenAI API, in pods and on the Service.
pub const HTTP_PORT: i32 = 8000;
/// Port on which a router tells the others what it books.
pub const SYNC_PORT: i32 = 9002;
/// Seconds a router keeps serving after its end was asked for, so that no proxy sends new connections to a closed port.
const PRE_STOP_S: i64 = 3;
/// Seconds a router gets to finish its streams once it has stopped accepting requests.
const DRAIN_S: i64 = 300;
/// Seconds until it is killed: the two above, and time to exit.
const GRACE_S: i64 = PRE_STOP_S + DRAIN_S + 10;
/// Seconds without progress after which a rollout counts as stalled.
const PROGRESS_DEADLINE_S: i32 = 300;

fn part<'a>(deployment: &'a ValidDeployment<'_>) -> Part<'a> {
    Part { deployment: &deployment.name, component: "router", pool: None }
}

/// Routers read workers' pods, endpoints and registrations in their own namespace, and write nothing.
pub(super) fn access(deployment: &ValidDeployment<'_>, owner: &OwnerReference) -> Access {
    let read = ["get", "list", "watch"];
    let rules = vec![
        rule("", &["pods"], &read),
        rule("discovery.k8s.io", &["endpointslices"], &read),
        rule("nvidia.com", &["dynamoworkermetadatas"], &read),
    ];
    pod::access(deployment, &part(deployment), &name::routers(&deployment.name), rules, owner)
}

/// Where clients send requests; named like the deployment.
pub(super) fn service(deployment: &ValidDeployment<'_>, owner: &OwnerReference) -> Service {
    let part = part(deployment);
    Service {
        metadata: part.meta(deployment.name.clone(), &deployment.namespace, owner),
        spec: Some(ServiceSpec {
            selector: Some(part.selector()),
            ports: Some(vec![ServicePort {
                name: Some("http".into()),
                port: HTTP_PORT,
                target_port: Some(IntOrString::String("http".into())),
                protocol: Some("TCP".into()),
                ..Default::default()
            }]),
            ..Default::default()
        }),
        status: None,
    }
}

/// Headless, so that routers find each other by its EndpointSlices: those that are not ready, too, since a router is ready only
/// once it has heard of the others' requests.
pub(super) fn peers(deployment: &ValidDeployment<'_>, owner: &OwnerReference) -> Service {
    let part = part(deployment);
    Service {
        metadata: part.meta(name::routers(&deployment.name), &deployment.namespace, owner),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".into()),
            publish_not_ready_addresses: Some(true),
            selector: Some(part.selector()),
            ports: Some(vec![ServicePort {
                name: Some("sync".into()),
                port: SYNC_PORT,
                target_port: Some(IntOrString::String("sync".into())),
                protocol: Some("TCP".into()),
                ..Default::default()
            }]),
            ..Default::default()
        }),
        status: None,
    }
}

/// The router pods.
pub(super) fn deployment(deployment: &ValidDeployment<'_>, settings: &Settings, owner: &OwnerReference) -> Deployment {
    let part = part(deployment);
    let spec = &deployment.object.spec;
    let router = spec.router.clone().unwrap_or_default();
    let image = spec.image.as_deref().unwrap_or(&settings.image);
    let pull_policy = spec.image_pull_policy.map_or(settings.image_pull_policy.as_str(), |policy| policy.as_str());
    let mut container = pod::container(
        "router",
        image,
        pull_policy,
        args(deployment, &router),
        &router.extra_env,
        &[("http", HTTP_PORT), ("sync", SYNC_PORT)],
    );
    container.resources = router.resources.as_ref().and_then(|resources| resources.requirements());
    container.lifecycle = Some(Lifecycle {
        pre_stop: Some(LifecycleHandler { sleep: Some(SleepAction { seconds: PRE_STOP_S }), ..Default::default() }),
        ..Default::default()
    });
    pod::probes(&mut container, "http");
    let mut labels = part.labels();
    let mut template = PodTemplateSpec {
        metadata: Some(ObjectMeta { labels: Some(labels.clone()), ..Default::default() }),
        spec: Some(pod::pod(&part, settings, name::routers(&deployment.name), container, GRACE_S)),
    };
    labels.insert(label::REVISION.into(), revision(&template));
    template.metadata = Some(ObjectMeta { labels: Some(labels), ..Default::default() });
    let meta = part.meta(name::routers(&deployment.name), &deployment.namespace, owner);
    rolling(meta, &part, router.replicas.unwrap_or(1), template, PROGRESS_DEADLINE_S)
}

/// `armature router` and its flags: only those that the author set, so that the router's own defaults hold.
fn args(deployment: &ValidDeployment<'_>, router: &Router) -> Vec<String> {
    let mut args = vec![
        "router".to_string(),
        format!("--http-port={HTTP_PORT}"),
        "--discovery-backend=kubernetes".into(),
        format!("--namespace={}", deployment.namespace),
        format!("--deployment={}", deployment.name),
        format!("--drain-timeout-s={DRAIN_S}"),
        format!("--router-service={}", name::routers(&deployment.name)),
        format!("--sync-port={SYNC_PORT}"),
    ];
    args.extend(router_flags(router));
    args
}
