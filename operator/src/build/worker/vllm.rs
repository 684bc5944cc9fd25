//! A pod with vLLM and a worker beside it.
//!
//! vLLM is a sidecar in Kubernetes' sense (an init container that goes on running): it is told to end only when the worker has
//! drained and ended. Only the worker talks to it, over loopback; whether it is well is the worker's readiness.

use crds::source::Source;
use crds::worker_pool::{Role, Vllm, WorkerPoolSpec};
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource, ObjectFieldSelector, PodSpec, Volume,
    VolumeMount,
};
use serde_json::json;

use super::{
    ADMIN_PORT, CACHE_DIRECTORY, EVENT_PORT, GRACE_S, MODEL_DIRECTORY, Part, REQUEST_PORT, TRANSFER_PORT, common_args,
    model_volume, name, non_empty, pod,
};
use crate::config::Settings;

/// Where vLLM answers.
const PORT: i32 = 8000;
/// Where the worker waits for its KV events, and where it sends past ones again.
const EVENTS: (i32, i32) = (5557, 5558);
/// Where another vLLM asks for the KV of a prompt.
const SIDE_CHANNEL: i32 = 5600;
/// What processes of different size share.
const SHARED_MEMORY: &str = "/dev/shm";

pub(super) fn pod_spec(
    spec: &WorkerPoolSpec,
    engine: &Vllm,
    part: &Part<'_>,
    settings: &Settings,
    source: &Source,
) -> PodSpec {
    let worker = &spec.worker;
    let model = Model::of(source);
    let image = spec.image.as_deref().unwrap_or(&settings.image);
    let pull_policy = spec.image_pull_policy.map_or(settings.image_pull_policy.as_str(), |policy| policy.as_str());
    let grace_s = worker.termination_grace_period_seconds.unwrap_or(GRACE_S);
    let ports = [("request", REQUEST_PORT), ("events", EVENT_PORT), ("transfer", TRANSFER_PORT), ("admin", ADMIN_PORT)];
    let mut agent =
        pod::container("worker", image, pull_policy, agent_args(spec, engine, &model, grace_s), &worker.env, &ports);
    agent.volume_mounts = Some(model.mounts.clone());
    pod::probes(&mut agent, "admin");
    let mut volumes = model.volumes.clone();
    volumes.extend([empty("tmp", None), empty("shared-memory", Some("Memory"))]);
    PodSpec {
        init_containers: Some(vec![server(spec, engine, &model, pull_policy)]),
        volumes: Some(volumes),
        node_selector: non_empty(&worker.node_selector),
        tolerations: (!worker.tolerations.is_empty()).then(|| worker.tolerations.clone()),
        ..pod::pod(part, settings, name::workers(&spec.deployment), agent, grace_s)
    }
}

/// The worker's flags. Pools with the same vLLM and model exchange KV.
fn agent_args(spec: &WorkerPoolSpec, engine: &Vllm, model: &Model, grace_s: i64) -> Vec<String> {
    let mut args = common_args(spec, &engine.image, &format!("--model-path={}", model.files), grace_s);
    let (events, replay) = EVENTS;
    args.extend([
        "--engine=vllm".into(),
        format!("--vllm-url=http://127.0.0.1:{PORT}"),
        format!("--vllm-kv-events=tcp://*:{events};replay=tcp://127.0.0.1:{replay}"),
    ]);
    args.extend(spec.worker.extra_args.iter().cloned());
    args
}

/// vLLM's container.
fn server(spec: &WorkerPoolSpec, engine: &Vllm, model: &Model, pull_policy: &str) -> Container {
    let disaggregated = spec.role != Role::Aggregated;
    let ports = disaggregated.then(|| {
        let port =
            ContainerPort { name: Some("side-channel".into()), container_port: SIDE_CHANNEL, ..Default::default() };
        vec![ContainerPort { protocol: Some("TCP".into()), ..port }]
    });
    let mut container = pod::container("vllm", &engine.image, pull_policy, server_args(spec, engine, model), &[], &[]);
    container.command = Some(vec!["vllm".into(), "serve".into()]);
    container.env = Some(server_env(spec, disaggregated));
    container.ports = ports;
    container.resources = spec.worker.resources.as_ref().and_then(|resources| resources.requirements());
    container.restart_policy = Some("Always".into());
    let more = [mount("tmp", "/tmp"), mount("shared-memory", SHARED_MEMORY)];
    container.volume_mounts = Some(model.mounts.iter().cloned().chain(more).collect());
    container
}

fn server_args(spec: &WorkerPoolSpec, engine: &Vllm, model: &Model) -> Vec<String> {
    let name = spec.model.name.as_deref().unwrap_or(&spec.deployment);
    let (events, replay) = EVENTS;
    let publisher = json!({
        "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": format!("tcp://127.0.0.1:{events}"),
        "replay_endpoint": format!("tcp://127.0.0.1:{replay}"), "topic": "kv-events",
    });
    let mut args = vec![model.served.clone()];
    args.extend(model.revision.iter().map(|revision| format!("--revision={revision}")));
    args.extend([
        format!("--served-model-name={name}"),
        "--host=127.0.0.1".into(),
        format!("--port={PORT}"),
        "--enable-prefix-caching".into(),
        "--enable-prompt-tokens-details".into(),
        format!("--kv-events-config={publisher}"),
    ]);
    if spec.role != Role::Aggregated {
        let transfer = json!({"kv_connector": "NixlConnector", "kv_role": "kv_both"});
        args.push(format!("--kv-transfer-config={transfer}"));
    }
    args.extend(engine.args.iter().cloned());
    args
}

/// A home that can be written: images run as another user than they were made for.
fn server_env(spec: &WorkerPoolSpec, disaggregated: bool) -> Vec<EnvVar> {
    let set = |name: &str, value: String| EnvVar { name: name.into(), value: Some(value), ..Default::default() };
    let mut env = vec![
        set("HOME", CACHE_DIRECTORY.into()),
        set("USER", "vllm".into()),
        set("XDG_CACHE_HOME", CACHE_DIRECTORY.into()),
        set("HF_HOME", HUB_HOME.into()),
    ];
    if disaggregated {
        let field = ObjectFieldSelector { field_path: "status.podIP".into(), api_version: Some("v1".into()) };
        let from = EnvVarSource { field_ref: Some(field), ..Default::default() };
        let host = "VLLM_NIXL_SIDE_CHANNEL_HOST".to_string();
        env.push(EnvVar { name: host, value_from: Some(from), ..Default::default() });
        env.push(set("VLLM_NIXL_SIDE_CHANNEL_PORT", SIDE_CHANNEL.to_string()));
    }
    // Names must be unique: server-side apply treats the list as a map.
    for variable in &spec.worker.env {
        env.retain(|known| known.name != variable.name);
        env.push(variable.clone());
    }
    env
}

/// Where vLLM keeps what it downloads, as Hugging Face's libraries do.
const HUB_HOME: &str = "/cache/huggingface";

/// Where the model is, for both containers.
struct Model {
    /// What `vllm serve` is told.
    served: String,
    /// Of a repository, where one is named.
    revision: Option<String>,
    /// Where the worker finds the tokenizer.
    files: String,
    volumes: Vec<Volume>,
    mounts: Vec<VolumeMount>,
}

impl Model {
    fn of(source: &Source) -> Self {
        let cache = (empty("cache", None), mount("cache", CACHE_DIRECTORY));
        let Source::Hub(id) = source else {
            let (path, volume, model) = model_volume(source);
            debug_assert!(path.starts_with(MODEL_DIRECTORY));
            let (volumes, mounts) = (vec![volume, cache.0], vec![model, cache.1]);
            return Self { served: path.clone(), revision: None, files: path, volumes, mounts };
        };
        let (repository, revision) = match id.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision.to_owned())),
            None => (id.as_str(), None),
        };
        let files = format!("{HUB_HOME}/hub/models--{}", repository.replace('/', "--"));
        let served = repository.to_owned();
        Self { served, revision, files, volumes: vec![cache.0], mounts: vec![cache.1] }
    }
}

fn empty(name: &str, medium: Option<&str>) -> Volume {
    let empty_dir = EmptyDirVolumeSource { medium: medium.map(str::to_owned), ..Default::default() };
    Volume { name: name.into(), empty_dir: Some(empty_dir), ..Default::default() }
}

fn mount(name: &str, path: &str) -> VolumeMount {
    VolumeMount { name: name.into(), mount_path: path.into(), ..Default::default() }
}
