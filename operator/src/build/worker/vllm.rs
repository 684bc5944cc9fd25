//! Pods whose engine is vLLM: the server is a sidecar of the worker, which is its only client.
//!
//! As a sidecar it starts before the worker and ends after it, so that a draining worker's requests are finished. It listens on
//! loopback alone, and publishes its KV events to the worker there.

use crds::source::Source;
use crds::worker_pool::{Role, Vllm, WorkerPoolSpec, WorkerTemplate};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource, ExecAction,
    ObjectFieldSelector, PodSpec, Probe, ResourceRequirements, SecurityContext, Volume, VolumeMount,
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
/// Seconds that vLLM may take to start, the download of its model included.
const START_S: i32 = 1800;

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
/// Arguments that change what the bytes of a KV block are, beyond model and image.
const KV: [&str; 7] =
    ["dtype", "kv-cache-dtype", "quantization", "hf-overrides", "attention-backend", "model-impl", "revision"];
/// Arguments that would part vLLM from its worker, or hide what it was told.
const REFUSED: [&str; 17] = [
    "api-key",
    "api-server-count",
    "config",
    "data-parallel-size",
    "download-dir",
    "dp",
    "headless",
    "host",
    "kv-events-config",
    "port",
    "root-path",
    "served-model-name",
    "ssl-ca-certs",
    "ssl-certfile",
    "ssl-keyfile",
    "uds",
    "asc",
];

/// An argument's name as vLLM reads it: with `-` where `_` was written, too, and the value that came with it.
fn named(arg: &str) -> Option<(String, Option<&str>)> {
    let (name, value) = arg.split_once('=').map_or((arg, None), |(name, value)| (name, Some(value)));
    let name = name.strip_prefix("--").or_else(|| name.strip_prefix('-'))?;
    Some((name.replace('_', "-"), value))
}

/// Checks what only the whole pod makes wrong.
pub(crate) fn check(pool: &WorkerTemplate, vllm: &Vllm) -> Result<(), Invalid> {
    let mut names = vllm.args.iter().filter_map(|arg| named(arg));
    if let Some((name, _)) = names.find(|(name, _)| REFUSED.contains(&name.as_str())) {
        return Err(Invalid::VllmArgument(name));
    }
    match pool.env.iter().find(|variable| variable.name == "VLLM_API_KEY") {
        Some(_) => Err(Invalid::VllmArgument("VLLM_API_KEY".into())),
        None => Ok(()),
    }
}

/// What the KV of such a pool is: servers that differ in it exchange none.
pub(super) fn kv_kind(vllm: &Vllm) -> Vec<String> {
    let set = KV.iter().filter_map(|name| Some(format!("{name}={}", last(&vllm.args, name)?)));
    std::iter::once(vllm.image.clone()).chain(set).collect()
}

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
    args.iter().enumerate().rev().find_map(|(at, arg)| {
        let (found, value) = named(arg)?;
        if found == name { value.or_else(|| args.get(at + 1).map(String::as_str)) } else { None }
    })
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
        liveness_probe: Some(Probe { period_seconds: Some(20), failure_threshold: Some(6), ..health() }),
        startup_probe: Some(Probe { period_seconds: Some(10), failure_threshold: Some(START_S / 10), ..health() }),
        security_context: Some(security(vllm.run_as_user)),
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
    let kv_role = match spec.role {
        Role::Aggregated => None,
        Role::Prefill => Some("kv_producer"),
        Role::Decode => Some("kv_consumer"),
    };
    args.extend(
        kv_role.map(|role| format!(r#"--kv-transfer-config={{"kv_connector":"NixlConnector","kv_role":"{role}"}}"#)),
    );
    args.extend(vllm.args.iter().cloned());
    args
}

/// Asks as the worker would, from inside: vLLM listens on loopback alone. A server that hangs is started anew.
fn health() -> Probe {
    let ask = format!("import urllib.request as r; r.urlopen('http://127.0.0.1:{API_PORT}/health', timeout=15)");
    Probe {
        exec: Some(ExecAction { command: Some(vec!["python3".into(), "-c".into(), ask]) }),
        timeout_seconds: Some(20),
        ..Default::default()
    }
}

/// As our own containers have it, but for the file system, which the server writes to. Root keeps what root of a container has.
fn security(user: Option<i64>) -> SecurityContext {
    let root = user == Some(0);
    SecurityContext {
        allow_privilege_escalation: Some(false),
        run_as_user: user,
        run_as_non_root: root.then_some(false),
        capabilities: (!root).then(|| Capabilities { drop: Some(vec!["ALL".into()]), add: None }),
        ..Default::default()
    }
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
    // The worker reads the model's files where vLLM puts them.
    pod::override_with(&mut variables, &[set("HF_HUB_CACHE", &format!("{CACHE_DIRECTORY}/huggingface/hub"))]);
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
        assert_eq!(told(&["--scheduling_policy=priority"]), ["--vllm-priority"]);
    }

    #[test]
    fn what_would_part_vllm_from_its_worker_is_refused() {
        let checked = |args: &[&str], env: &str| {
            let pool: WorkerTemplate =
                serde_json::from_value(serde_json::json!({"env": [{"name": env, "value": "x"}]})).expect("valid");
            let vllm = serde_json::from_value(serde_json::json!({"image": "vllm:1", "args": args})).expect("valid");
            check(&pool, &vllm)
        };
        assert_eq!(checked(&["--max-model-len=8192", "--block_size", "64"], "HF_TOKEN"), Ok(()));
        for (arg, name) in [("--port=1", "port"), ("--served_model_name", "served-model-name"), ("-dp", "dp")] {
            assert_eq!(checked(&[arg, "2"], "HF_TOKEN"), Err(Invalid::VllmArgument(name.into())));
        }
        assert!(checked(&[], "VLLM_API_KEY").is_err());
    }

    #[test]
    fn servers_exchange_kv_only_if_it_is_the_same() {
        let kind = |args: &[&str]| {
            kv_kind(&serde_json::from_value(serde_json::json!({"image": "vllm:1", "args": args})).expect("valid"))
        };
        assert_eq!(kind(&["--max-num-seqs=8"]), kind(&[]));
        assert_ne!(kind(&["--kv_cache_dtype", "fp8"]), kind(&[]));
    }
}
