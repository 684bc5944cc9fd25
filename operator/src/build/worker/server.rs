//! Pods whose engine is a server: it is a sidecar of the worker, which is its only client.
//!
//! As a sidecar it starts before the worker and ends after it, so that a draining worker's requests are finished. It listens on
//! loopback where it can, and publishes its KV events to the worker there. What is particular to an engine is in a file of its own.

mod arguments;
mod sglang;
mod tensorrt_llm;
#[cfg(test)]
mod tests;
mod vllm;

use std::collections::BTreeMap;

use crds::source::Source;
use crds::worker_pool::{Engine, Server, TensorRtLlm, WorkerPoolSpec, WorkerTemplate};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, DownwardAPIVolumeFile, DownwardAPIVolumeSource, EmptyDirVolumeSource,
    EnvVar, EnvVarSource, ExecAction, ObjectFieldSelector, PodSpec, Probe, ResourceRequirements, SecurityContext,
    Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{CACHE_DIRECTORY, MODEL_DIRECTORY};
use crate::build::pod;
use crate::validate::{self, Invalid};

/// Port of the worker, on loopback, to which a server connects with its KV events.
const EVENT_PORT: i32 = 5557;
/// Port of a server, on loopback, at which past KV events can be had again.
const REPLAY_PORT: i32 = 5558;
/// Seconds that a server may take to start, the download of its model included.
const START_S: i32 = 1800;
/// Annotation of a pod with its server's options, where these are a file.
const OPTIONS_ANNOTATION: &str = "armature.dev/engine-options";
/// Where that file appears.
const OPTIONS_DIRECTORY: &str = "/etc/armature";
/// Its name.
const OPTIONS_FILE: &str = "engine-options.yaml";

/// What is the same for all servers of one engine.
struct Dialect {
    /// As people write it.
    name: &'static str,
    /// Of its container; also its user, who has no name in the image otherwise.
    container: &'static str,
    /// What starts it.
    command: &'static [&'static str],
    /// Arguments that would part it from its worker.
    refused: &'static [&'static str],
    /// A variable that would.
    refused_variable: Option<&'static str>,
    /// Arguments that change what the bytes of a KV block are, beyond model and image.
    kv: &'static [&'static str],
    /// Port of its API.
    api_port: i32,
}

/// What an engine makes of one pool.
struct Recipe {
    /// Arguments of the server, before the author's.
    args: Vec<String>,
    /// Flags of the worker.
    worker_args: Vec<String>,
    /// Variables of the server.
    variables: Vec<EnvVar>,
    /// Port that other pods reach.
    port: Option<(&'static str, i32)>,
    /// The file of options.
    options: Option<String>,
}

/// The server that an engine is.
#[derive(Clone, Copy)]
pub(crate) enum Kind<'a> {
    Vllm(&'a Server),
    Sglang(&'a Server),
    TensorRtLlm(&'a TensorRtLlm),
}

impl<'a> Kind<'a> {
    /// That of `engine`, unless it is the built-in one.
    pub(crate) fn of(engine: &'a Engine) -> Option<Self> {
        let vllm = engine.vllm.as_ref().map(Self::Vllm);
        vllm.or(engine.sglang.as_ref().map(Self::Sglang)).or(engine.tensorrt_llm.as_ref().map(Self::TensorRtLlm))
    }

    fn dialect(self) -> &'static Dialect {
        match self {
            Self::Vllm(_) => &vllm::DIALECT,
            Self::Sglang(_) => &sglang::DIALECT,
            Self::TensorRtLlm(_) => &tensorrt_llm::DIALECT,
        }
    }

    fn server(self) -> &'a Server {
        match self {
            Self::Vllm(server) | Self::Sglang(server) => server,
            Self::TensorRtLlm(engine) => &engine.server,
        }
    }

    fn recipe(self, spec: &WorkerPoolSpec, model: &Model) -> Recipe {
        let name = spec.model.name.as_deref().unwrap_or(&spec.deployment);
        match self {
            Self::Vllm(server) => vllm::recipe(spec, server, model, name),
            Self::Sglang(server) => sglang::recipe(spec, server, model, name),
            Self::TensorRtLlm(engine) => tensorrt_llm::recipe(spec, engine, model),
        }
    }

    /// Checks what only the whole pod makes wrong.
    pub(crate) fn check(self, pool: &WorkerTemplate) -> Result<(), Invalid> {
        let dialect = self.dialect();
        let mut args = self.server().args.iter().filter_map(|arg| arguments::named(arg)).map(|(name, _)| name);
        let argument = args.find(|name| dialect.refused.contains(&name.as_str()));
        let option = match self {
            Self::TensorRtLlm(engine) => tensorrt_llm::refused(engine),
            Self::Vllm(_) | Self::Sglang(_) => None,
        };
        let variable = || {
            let set = |name: &&str| pool.env.iter().any(|variable| variable.name == *name);
            dialect.refused_variable.filter(set).map(str::to_owned)
        };
        match argument.or(option).or_else(variable) {
            Some(argument) => Err(Invalid::EngineArgument { engine: dialect.name, argument }),
            None => Ok(()),
        }
    }

    /// What the KV of such a pod is: servers that differ in it exchange none.
    fn kv_kind(self) -> Vec<String> {
        let server = self.server();
        let mut kind = vec![server.image.clone()];
        kind.extend(arguments::set(&server.args, self.dialect().kv));
        if let Self::TensorRtLlm(engine) = self {
            kind.extend(tensorrt_llm::kv_kind(engine));
        }
        kind
    }
}

/// How the model is named to a server, and where the worker finds the model's files.
struct Model {
    /// A repository and its revision, or a directory.
    repository: String,
    revision: Option<String>,
    /// Directory with tokenizer.json, or the model's folder in the cache of the hub's clients.
    directory: String,
}

impl Model {
    fn of(source: &Source) -> Result<Self, Invalid> {
        validate::directory(source)?;
        let mounted = |directory: String| Self { repository: directory.clone(), revision: None, directory };
        Ok(match source {
            Source::Hub(id) => {
                let (repository, revision) = match id.split_once('@') {
                    Some((repository, revision)) => (repository, Some(revision.to_owned())),
                    None => (id.as_str(), None),
                };
                let folder = repository.replace('/', "--");
                let directory = format!("{CACHE_DIRECTORY}/huggingface/hub/models--{folder}");
                Self { repository: repository.to_owned(), revision, directory }
            }
            Source::Claim { path, .. } => mounted(format!("{MODEL_DIRECTORY}/{path}")),
            Source::Node(_) => mounted(MODEL_DIRECTORY.into()),
        })
    }

    /// The argument of that name, where there is a revision.
    fn revision(&self) -> Option<String> {
        self.revision.as_ref().map(|revision| format!("--revision={revision}"))
    }
}

/// A server that is to stand beside a worker.
pub(super) struct Beside<'a> {
    kind: Kind<'a>,
    recipe: Recipe,
}

impl<'a> Beside<'a> {
    pub(super) fn new(kind: Kind<'a>, spec: &WorkerPoolSpec, source: &Source) -> Result<Self, Invalid> {
        Ok(Self { kind, recipe: kind.recipe(spec, &Model::of(source)?) })
    }

    /// What the KV of such a pod is.
    pub(super) fn kv_kind(&self) -> Vec<String> {
        self.kind.kv_kind()
    }

    /// The worker's own flags in such a pod.
    pub(super) fn worker_args(&self) -> Vec<String> {
        self.recipe.worker_args.clone()
    }

    /// Annotations of such a pod.
    pub(super) fn annotations(&self) -> Option<BTreeMap<String, String>> {
        self.recipe.options.as_ref().map(|options| BTreeMap::from([(OPTIONS_ANNOTATION.into(), options.clone())]))
    }

    /// Adds the server to the pod of a worker, with the mounts that the worker has.
    pub(super) fn add_to(self, pod: &mut PodSpec, spec: &WorkerPoolSpec) {
        let (server, dialect, recipe) = (self.kind.server(), self.kind.dialect(), self.recipe);
        let worker = &mut pod.containers[0];
        let mounts = worker.volume_mounts.get_or_insert_default();
        let volumes = pod.volumes.get_or_insert_default();
        if !mounts.iter().any(|mount| mount.mount_path == CACHE_DIRECTORY) {
            volumes.push(directory("cache", EmptyDirVolumeSource::default()));
            mounts.push(mount("cache", CACHE_DIRECTORY));
        }
        let size_limit = server.shared_memory.as_ref().map(Into::into);
        volumes.push(directory("shm", EmptyDirVolumeSource { medium: Some("Memory".into()), size_limit }));
        volumes.push(directory("tmp", EmptyDirVolumeSource::default()));
        let mut more = vec![mount("shm", "/dev/shm"), mount("tmp", "/tmp")];
        if recipe.options.is_some() {
            volumes.push(options_volume());
            more.push(mount("engine-options", OPTIONS_DIRECTORY));
        }
        let health = health(dialect.api_port);
        let container = Container {
            name: dialect.container.into(),
            image: Some(server.image.clone()),
            image_pull_policy: server.image_pull_policy.map(|policy| policy.as_str().into()),
            command: Some(match server.command.as_slice() {
                [] => dialect.command.iter().map(|word| word.to_string()).collect(),
                command => command.to_vec(),
            }),
            args: Some(recipe.args.into_iter().chain(server.args.iter().cloned()).collect()),
            env: Some(environment(dialect.container, recipe.variables, &spec.worker.env)),
            ports: recipe.port.map(|(name, port)| {
                vec![ContainerPort {
                    name: Some(name.into()),
                    container_port: port,
                    protocol: Some("TCP".into()),
                    ..Default::default()
                }]
            }),
            resources: worker.resources.replace(beside_a_server()),
            restart_policy: Some("Always".into()),
            liveness_probe: Some(Probe { period_seconds: Some(20), failure_threshold: Some(6), ..health.clone() }),
            startup_probe: Some(Probe { period_seconds: Some(10), failure_threshold: Some(START_S / 10), ..health }),
            security_context: Some(security(server.run_as_user)),
            volume_mounts: Some(mounts.iter().cloned().chain(more).collect()),
            ..Default::default()
        };
        pod.init_containers = Some(vec![container]);
    }
}

/// What `--kv-events-config` says: vLLM needs to be told that it shall publish at all, SGLang has no such word.
fn kv_events(switch: bool) -> String {
    let switch = if switch { r#""enable_kv_cache_events":true,"# } else { "" };
    format!(
        r#"{{{switch}"publisher":"zmq","endpoint":"tcp://127.0.0.1:{EVENT_PORT}","replay_endpoint":"tcp://127.0.0.1:{REPLAY_PORT}","topic":"kv-events"}}"#
    )
}

/// Asks as the worker would, from inside: servers listen on loopback. A server that hangs is started anew.
fn health(port: i32) -> Probe {
    let ask = format!("import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/health', timeout=15)");
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

fn variable(name: &str, value: &str) -> EnvVar {
    EnvVar { name: name.into(), value: Some(value.into()), ..Default::default() }
}

/// A variable with the pod's address.
fn pod_ip(name: &str) -> EnvVar {
    EnvVar { name: name.into(), value_from: Some(field("status.podIP")), ..Default::default() }
}

fn field(path: &str) -> EnvVarSource {
    EnvVarSource { field_ref: Some(field_selector(path)), ..Default::default() }
}

fn field_selector(path: &str) -> ObjectFieldSelector {
    ObjectFieldSelector { field_path: path.into(), api_version: Some("v1".into()) }
}

/// Where a server and what it uses keep files, since its user may have no home; `its` own; and the author's variables, which win.
fn environment(user: &str, its: Vec<EnvVar>, more: &[EnvVar]) -> Vec<EnvVar> {
    let mut variables = vec![
        variable("HOME", CACHE_DIRECTORY),
        // A user without an entry in the image's /etc/passwd has no name otherwise, and PyTorch asks for one.
        variable("USER", user),
        variable("HF_HOME", &format!("{CACHE_DIRECTORY}/huggingface")),
        variable("XDG_CACHE_HOME", CACHE_DIRECTORY),
        // Block hashes of two servers agree only with the same seed.
        variable("PYTHONHASHSEED", "0"),
    ];
    variables.extend(its);
    pod::override_with(&mut variables, more);
    // The worker reads the model's files where the server puts them.
    pod::override_with(&mut variables, &[variable("HF_HUB_CACHE", &format!("{CACHE_DIRECTORY}/huggingface/hub"))]);
    variables
}

/// What the worker itself needs where another container computes.
fn beside_a_server() -> ResourceRequirements {
    let amounts = [("cpu", "200m"), ("memory", "128Mi")];
    let requests = amounts.into_iter().map(|(name, amount)| (name.into(), Quantity(amount.into()))).collect();
    ResourceRequirements { requests: Some(requests), ..Default::default() }
}

/// The annotation as a file.
fn options_volume() -> Volume {
    let file = DownwardAPIVolumeFile {
        path: OPTIONS_FILE.into(),
        field_ref: Some(field_selector(&format!("metadata.annotations['{OPTIONS_ANNOTATION}']"))),
        ..Default::default()
    };
    let source = DownwardAPIVolumeSource { items: Some(vec![file]), ..Default::default() };
    Volume { name: "engine-options".into(), downward_api: Some(source), ..Default::default() }
}

fn directory(name: &str, source: EmptyDirVolumeSource) -> Volume {
    Volume { name: name.into(), empty_dir: Some(source), ..Default::default() }
}

fn mount(name: &str, path: &str) -> VolumeMount {
    VolumeMount { name: name.into(), mount_path: path.into(), ..Default::default() }
}
