//! The workers of a deployment: a `WorkerPool` for each pool, its Deployment, the Service they are discovered through, and
//! what they may write.

use std::collections::BTreeMap;

use crds::model_deployment::{Model, Pool};
use crds::source::Source;
use crds::worker_pool::{BuiltIn, WorkerPoolSpec};
use crds::{WorkerPool, label};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{
    EmptyDirVolumeSource, EnvVar, HostPathVolumeSource, PersistentVolumeClaimVolumeSource, PodSpec, PodTemplateSpec,
    Service, ServicePort, ServiceSpec, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::pod::{self, Access, non_empty, rule};
use super::{Part, name, revision, rolling};
use crate::config::Settings;
use crate::validate::{self, Invalid, ValidDeployment};
use server::{Beside, Kind};

mod kv_cache;
pub(crate) mod server;

/// Port for requests.
pub const REQUEST_PORT: i32 = 9000;
/// Port on which KV events are published.
pub const EVENT_PORT: i32 = 9001;
/// Port that other workers fetch KV blocks from.
pub const TRANSFER_PORT: i32 = 9002;
/// Port of /live, /ready and /metrics.
pub const ADMIN_PORT: i32 = 9090;
/// Seconds a worker gets to finish its requests where the author does not say.
const GRACE_S: i64 = 600;
/// Seconds without progress after which a rollout counts as stalled. A worker may have to download its model first.
const PROGRESS_DEADLINE_S: i32 = 1800;
/// Where a mounted model appears.
const MODEL_DIRECTORY: &str = "/model";
/// Where a downloaded model is kept.
const CACHE_DIRECTORY: &str = "/cache";
/// Seconds between the end of a worker's own drain and the moment it would be killed: time to deregister and exit.
const EXIT_S: i64 = 10;

/// Workers register themselves in their own namespace. A Role cannot know the names of pods to come, so it covers all
/// registrations there.
pub(super) fn access(deployment: &ValidDeployment<'_>, owner: &OwnerReference) -> Access {
    let part = Part { deployment: &deployment.name, component: "worker", pool: None };
    let rules = vec![rule("nvidia.com", &["dynamoworkermetadatas"], &["get", "create", "patch", "delete"])];
    pod::access(deployment, &part, &name::workers(&deployment.name), rules, owner)
}

/// Headless, so that EndpointSlices say which workers are ready. Slices carry the Service's labels.
pub(super) fn service(deployment: &ValidDeployment<'_>, owner: &OwnerReference) -> Service {
    let part = Part { deployment: &deployment.name, component: "worker", pool: None };
    let mut meta = part.meta(name::workers(&deployment.name), &deployment.namespace, owner);
    let labels = meta.labels.get_or_insert_default();
    labels.insert(label::DISCOVERY_ENABLED.into(), "true".into());
    labels.insert(label::DISCOVERY_BACKEND.into(), "kubernetes".into());
    Service {
        metadata: meta,
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".into()),
            selector: Some(part.selector()),
            ports: Some(vec![ServicePort {
                name: Some("request".into()),
                port: REQUEST_PORT,
                target_port: Some(IntOrString::String("request".into())),
                protocol: Some("TCP".into()),
                ..Default::default()
            }]),
            ..Default::default()
        }),
        status: None,
    }
}

/// The pool object of one pool.
pub(super) fn pool(deployment: &ValidDeployment<'_>, pool: &Pool, owner: &OwnerReference) -> WorkerPool {
    let part = Part { deployment: &deployment.name, component: "worker", pool: Some((&pool.name, pool.role)) };
    let spec = &deployment.object.spec;
    WorkerPool {
        metadata: part.meta(name::pool(&deployment.name, &pool.name), &deployment.namespace, owner),
        spec: WorkerPoolSpec {
            deployment: deployment.name.clone(),
            pool: pool.name.clone(),
            role: pool.role,
            replicas: pool.replicas.unwrap_or(1),
            model: Model { name: Some(deployment.model_name.clone()), source: spec.model.source.clone() },
            image: spec.image.clone(),
            image_pull_policy: spec.image_pull_policy,
            worker: pool.worker.clone(),
        },
        status: None,
    }
}

/// The pods of a pool, and the revision of their template.
pub fn pool_deployment(
    pool: &WorkerPool,
    settings: &Settings,
    owner: &OwnerReference,
) -> Result<(Deployment, String), Invalid> {
    let namespace = pool.metadata.namespace.as_deref().ok_or(Invalid::Incomplete("namespace"))?;
    let pool_name = pool.metadata.name.as_deref().ok_or(Invalid::Incomplete("name"))?;
    let spec = &pool.spec;
    let part = Part { deployment: &spec.deployment, component: "worker", pool: Some((&spec.pool, spec.role)) };
    let source = validate::source(&spec.model.source, settings)?;

    let mut labels = part.labels();
    let (pod, annotations) = pod_spec(spec, &part, settings, &source)?;
    let metadata = ObjectMeta { labels: Some(labels.clone()), annotations, ..Default::default() };
    let mut template = PodTemplateSpec { metadata: Some(metadata), spec: Some(pod) };
    let revision = revision(&template);
    labels.insert(label::REVISION.into(), revision.clone());
    template.metadata.get_or_insert_default().labels = Some(labels);
    if let Some(args) = template.spec.as_mut().and_then(|pod| pod.containers[0].args.as_mut()) {
        args.insert(1, format!("--revision={revision}"));
    }

    let meta = part.meta(pool_name.into(), namespace, owner);
    Ok((rolling(meta, &part, spec.replicas, template, PROGRESS_DEADLINE_S), revision))
}

/// The pod, and its annotations.
fn pod_spec(
    spec: &WorkerPoolSpec,
    part: &Part<'_>,
    settings: &Settings,
    source: &Source,
) -> Result<(PodSpec, Option<BTreeMap<String, String>>), Invalid> {
    let worker = &spec.worker;
    let (model_path, volume, mount) = model_volume(source);
    let (mut volumes, mut mounts) = (vec![volume], vec![mount]);
    let kv_cache = worker.kv_cache.clone().unwrap_or_default();
    if let Some((volume, mount)) = kv_cache::volume(&kv_cache) {
        volumes.push(volume);
        mounts.push(mount);
    }
    let image = spec.image.as_deref().unwrap_or(&settings.image);
    let pull_policy = spec.image_pull_policy.map_or(settings.image_pull_policy.as_str(), |policy| policy.as_str());
    let cache = EnvVar { name: "XDG_CACHE_HOME".into(), value: Some(CACHE_DIRECTORY.into()), ..Default::default() };
    let env: Vec<EnvVar> = std::iter::once(cache).chain(worker.env.iter().cloned()).collect();
    let grace_s = worker.termination_grace_period_seconds.unwrap_or(GRACE_S);
    let ports = [("request", REQUEST_PORT), ("events", EVENT_PORT), ("transfer", TRANSFER_PORT), ("admin", ADMIN_PORT)];
    let engine = worker.engine.clone().unwrap_or_default();
    let server = Kind::of(&engine).map(|kind| Beside::new(kind, spec, source)).transpose()?;
    let (computes, engine_args) = match &server {
        None => {
            let mut args = built_in_args(&model_path, &engine.built_in.clone().unwrap_or_default());
            args.extend(kv_cache::args(&kv_cache));
            (vec![image.to_owned()], args)
        }
        Some(server) => (server.kv_kind(), server.worker_args()),
    };
    let args = args(spec, &computes, grace_s, engine_args);
    let mut container = pod::container("worker", image, pull_policy, args, &env, &ports);
    let resources = kv_cache::resources(worker.resources.clone().unwrap_or_default(), &kv_cache);
    container.resources = resources.requirements();
    container.volume_mounts = Some(mounts);
    pod::probes(&mut container, "admin");
    let mut pod = PodSpec {
        volumes: Some(volumes),
        node_selector: non_empty(&worker.node_selector),
        tolerations: (!worker.tolerations.is_empty()).then(|| worker.tolerations.clone()),
        ..pod::pod(part, settings, name::workers(&spec.deployment), container, grace_s)
    };
    let annotations = server.as_ref().and_then(Beside::annotations);
    if let Some(server) = server {
        server.add_to(&mut pod, spec);
    }
    Ok((pod, annotations))
}

/// `armature worker` and its flags. Pools whose engines come from the same image and compute the same model exchange KV,
/// whatever else differs between their pods.
fn args(spec: &WorkerPoolSpec, computes: &[String], grace_s: i64, engine: Vec<String>) -> Vec<String> {
    let model_name = spec.model.name.as_deref().unwrap_or(&spec.deployment);
    let mut args = vec![
        "worker".to_string(),
        "--discovery-backend=kubernetes".into(),
        format!("--role={}", spec.role.as_str()),
        format!("--model-name={model_name}"),
        format!("--port={REQUEST_PORT}"),
        format!("--event-port={EVENT_PORT}"),
        format!("--transfer-port={TRANSFER_PORT}"),
        format!("--kv-revision={}", revision(&(computes, &spec.model.source))),
        format!("--admin-port={ADMIN_PORT}"),
        format!("--drain-s-max={}", grace_s - EXIT_S),
    ];
    args.extend(engine);
    args.extend(spec.worker.extra_args.iter().cloned());
    args
}

/// Flags of the built-in engine; settings only where the author set them.
fn built_in_args(model_path: &str, engine: &BuiltIn) -> Vec<String> {
    let numbers = [
        ("threads", engine.threads),
        ("block-size", engine.block_size),
        ("kv-blocks", engine.kv_blocks),
        ("max-num-seqs", engine.max_num_seqs),
        ("max-num-batched-tokens", engine.max_num_batched_tokens),
    ];
    let set = numbers.into_iter().filter_map(|(flag, value)| value.map(|value| format!("--{flag}={value}")));
    std::iter::once(format!("--model={model_path}")).chain(set).collect()
}

/// What `--model` says, and the volume with the model or the room to download it to.
fn model_volume(source: &Source) -> (String, Volume, VolumeMount) {
    let volume = |name: &str| Volume { name: name.into(), ..Default::default() };
    let mount = |name: &str, path: String, read_only: bool| VolumeMount {
        name: name.into(),
        mount_path: path,
        read_only: read_only.then_some(true),
        ..Default::default()
    };
    match source {
        Source::Hub(id) => {
            let cache = Volume { empty_dir: Some(EmptyDirVolumeSource::default()), ..volume("cache") };
            (format!("hf://{id}"), cache, mount("cache", CACHE_DIRECTORY.into(), false))
        }
        Source::Claim { claim, path } => {
            let claim = PersistentVolumeClaimVolumeSource { claim_name: claim.clone(), read_only: Some(true) };
            let model = Volume { persistent_volume_claim: Some(claim), ..volume("model") };
            (format!("{MODEL_DIRECTORY}/{path}"), model, mount("model", MODEL_DIRECTORY.into(), true))
        }
        Source::Node(path) => {
            // A single file is mounted alone: pods see nothing else of the node.
            let file = path.rsplit_once('/').map(|(_, file)| file).filter(|file| file.ends_with(".gguf"));
            let target = file.map_or(MODEL_DIRECTORY.into(), |file| format!("{MODEL_DIRECTORY}/{file}"));
            let kind = if file.is_some() { "File" } else { "Directory" };
            let host = HostPathVolumeSource { path: path.clone(), type_: Some(kind.into()) };
            (target.clone(), Volume { host_path: Some(host), ..volume("model") }, mount("model", target, true))
        }
    }
}
