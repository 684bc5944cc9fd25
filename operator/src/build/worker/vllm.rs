//! Pods whose engine is vLLM: the server is a sidecar of the worker, which is its only client.
//!
//! As a sidecar it starts before the worker and ends after it, so that a draining worker's requests are finished. It listens on
//! loopback alone, and publishes its KV events to the worker there.

use crds::source::Source;
use crds::worker_pool::{Role, Vllm, WorkerPoolSpec};
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource, ObjectFieldSelector, PodSpec,
    ResourceRequirements, SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{CACHE_DIRECTORY, MODEL_DIRECTORY};
use crate::build::pod;
use crate::validate::{self, Invalid};

/// Port of vLLM's API, on loopback.
const API_PORT: i32 = 8000;
/// Port of the worker, on loopback, to which vLLM connects with its KV events.
const EVENT_PORT: i32 = 5557;
/// Port of vLLM, on loopback, at which past KV events can be had again.
const REPLAY_PORT: i32 = 5558;
/// Port at which vLLM servers of other pods ask how KV is fetched from this one.
const NIXL_PORT: i32 = 5600;

/// How the model is named to vLLM, and where the worker finds the model's files.
struct Model {
    /// What `vllm serve` is given.
    serve: Vec<String>,
    /// Directory with tokenizer.json, or the model's folder in the cache of the hub's clients.
    directory: String,
}

fn model(source: &Source) -> Result<Model, Invalid> {
    validate::directory(source)?;
    let mounted = |directory: String| Model { serve: vec![directory.clone()], directory };
    Ok(match source {
        Source::Hub(id) => {
            let (repository, revision) = match id.split_once('@') {
                Some((repository, revision)) => (repository, Some(format!("--revision={revision}"))),
                None => (id.as_str(), None),
            };
            let folder = repository.replace('/', "--");
            Model {
                serve: std::iter::once(repository.to_owned()).chain(revision).collect(),
                directory: format!("{CACHE_DIRECTORY}/huggingface/hub/models--{folder}"),
            }
        }
        Source::Claim { path, .. } => mounted(format!("{MODEL_DIRECTORY}/{path}")),
        Source::Node(_) => mounted(MODEL_DIRECTORY.into()),
    })
}

/// Arguments of vLLM that the worker must know too, since vLLM does not tell.
const SHARED: [&str; 2] = ["max-num-seqs", "max-num-batched-tokens"];

/// The worker's own flags in such a pod.
pub(super) fn worker_args(vllm: &Vllm, source: &Source) -> Result<Vec<String>, Invalid> {
    let told = SHARED.iter().filter_map(|name| Some(format!("--vllm-{name}={}", last(&vllm.args, name)?)));
    let by_priority = last(&vllm.args, "scheduling-policy") == Some("priority");
    let told: Vec<_> = told.chain(by_priority.then(|| "--vllm-priority".into())).collect();
    let mut args = vec![
        "--engine=vllm".into(),
        format!("--vllm-url=http://127.0.0.1:{API_PORT}"),
        format!("--model-path={}", model(source)?.directory),
        format!("--vllm-kv-events=tcp://*:{EVENT_PORT};replay=tcp://127.0.0.1:{REPLAY_PORT}"),
    ];
    args.extend(told);
    Ok(args)
}

/// The value that counts of an argument, written `--name=value` or as two arguments.
fn last<'a>(args: &'a [String], name: &str) -> Option<&'a str> {
    let values = args.iter().enumerate().filter_map(|(at, arg)| {
        let rest = arg.strip_prefix("--")?.strip_prefix(name)?;
        if rest.is_empty() { args.get(at + 1).map(String::as_str) } else { rest.strip_prefix('=') }
    });
    values.last()
}

/// Adds vLLM to the pod of a worker, with the mounts that the worker has.
pub(super) fn beside(pod: &mut PodSpec, spec: &WorkerPoolSpec, vllm: &Vllm, source: &Source) -> Result<(), Invalid> {
    let model = model(source)?;
    let worker = &mut pod.containers[0];
    let mounts = worker.volume_mounts.get_or_insert_default();
    let volumes = pod.volumes.get_or_insert_default();
    if !mounts.iter().any(|mount| mount.mount_path == CACHE_DIRECTORY) {
        volumes.push(directory("cache", EmptyDirVolumeSource::default()));
        mounts.push(mount("cache", CACHE_DIRECTORY));
    }
    let shared =
        EmptyDirVolumeSource { medium: Some("Memory".into()), size_limit: vllm.shared_memory.as_ref().map(Into::into) };
    volumes.push(directory("shm", shared));
    volumes.push(directory("tmp", EmptyDirVolumeSource::default()));
    let more = [mount("shm", "/dev/shm"), mount("tmp", "/tmp")];
    let container = Container {
        name: "vllm".into(),
        image: Some(vllm.image.clone()),
        image_pull_policy: vllm.image_pull_policy.map(|policy| policy.as_str().into()),
        command: Some(match vllm.command.as_slice() {
            [] => vec!["vllm".into(), "serve".into()],
            command => command.to_vec(),
        }),
        args: Some(server_args(spec, vllm, model.serve)),
        env: Some(environment(&spec.worker.env)),
        ports: (spec.role != Role::Aggregated).then(|| {
            vec![ContainerPort {
                name: Some("nixl".into()),
                container_port: NIXL_PORT,
                protocol: Some("TCP".into()),
                ..Default::default()
            }]
        }),
        resources: worker.resources.replace(beside_vllm()),
        restart_policy: Some("Always".into()),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            run_as_user: vllm.run_as_user,
            run_as_non_root: (vllm.run_as_user == Some(0)).then_some(false),
            ..Default::default()
        }),
        volume_mounts: Some(mounts.iter().cloned().chain(more).collect()),
        ..Default::default()
    };
    pod.init_containers = Some(vec![container]);
    Ok(())
}

fn server_args(spec: &WorkerPoolSpec, vllm: &Vllm, model: Vec<String>) -> Vec<String> {
    let name = spec.model.name.as_deref().unwrap_or(&spec.deployment);
    let events = format!(
        r#"{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:{EVENT_PORT}","replay_endpoint":"tcp://127.0.0.1:{REPLAY_PORT}","topic":"kv-events"}}"#
    );
    let mut args = model;
    args.extend([
        format!("--served-model-name={name}"),
        "--host=127.0.0.1".into(),
        format!("--port={API_PORT}"),
        "--enable-prefix-caching".into(),
        "--enable-prompt-tokens-details".into(),
        format!("--kv-events-config={events}"),
    ]);
    if spec.role != Role::Aggregated {
        args.push(r#"--kv-transfer-config={"kv_connector":"NixlConnector","kv_role":"kv_both"}"#.into());
    }
    args.extend(vllm.args.iter().cloned());
    args
}

/// Where vLLM and what it uses keep files, since its user may have no home; where others reach it; and the author's variables,
/// which win.
fn environment(more: &[EnvVar]) -> Vec<EnvVar> {
    let set = |name: &str, value: &str| EnvVar { name: name.into(), value: Some(value.into()), ..Default::default() };
    let field = EnvVarSource {
        field_ref: Some(ObjectFieldSelector { field_path: "status.podIP".into(), api_version: Some("v1".into()) }),
        ..Default::default()
    };
    let mut variables = vec![
        set("HOME", CACHE_DIRECTORY),
        // A user without an entry in the image's /etc/passwd has no name otherwise, and PyTorch asks for one.
        set("USER", "vllm"),
        set("HF_HOME", &format!("{CACHE_DIRECTORY}/huggingface")),
        set("XDG_CACHE_HOME", CACHE_DIRECTORY),
        // Block hashes of two servers agree only with the same seed.
        set("PYTHONHASHSEED", "0"),
        EnvVar { name: "VLLM_NIXL_SIDE_CHANNEL_HOST".into(), value_from: Some(field), ..Default::default() },
        set("VLLM_NIXL_SIDE_CHANNEL_PORT", &NIXL_PORT.to_string()),
    ];
    pod::override_with(&mut variables, more);
    variables
}

/// What the worker itself needs where another container computes.
fn beside_vllm() -> ResourceRequirements {
    let amounts = [("cpu", "200m"), ("memory", "128Mi")];
    let requests = amounts.into_iter().map(|(name, amount)| (name.into(), Quantity(amount.into()))).collect();
    ResourceRequirements { requests: Some(requests), ..Default::default() }
}

fn directory(name: &str, source: EmptyDirVolumeSource) -> Volume {
    Volume { name: name.into(), empty_dir: Some(source), ..Default::default() }
}

fn mount(name: &str, path: &str) -> VolumeMount {
    VolumeMount { name: name.into(), mount_path: path.into(), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worker_is_told_what_vllm_was_told() {
        let vllm = |args: &[&str]| -> Vllm {
            serde_json::from_value(serde_json::json!({"image": "vllm:1", "args": args})).expect("valid")
        };
        let source = Source::Hub("org/name".into());
        let told = |args: &[&str]| worker_args(&vllm(args), &source).expect("a directory")[4..].to_vec();
        assert_eq!(told(&["--max-model-len=8192", "--max-num-seqs-x=1"]), Vec::<String>::new());
        assert_eq!(
            told(&["--max-num-seqs=8", "--max-num-batched-tokens", "512", "--max-num-seqs", "64"]),
            ["--vllm-max-num-seqs=64", "--vllm-max-num-batched-tokens=512"]
        );
        assert_eq!(told(&["--scheduling-policy=priority"]), ["--vllm-priority"]);
    }
}
