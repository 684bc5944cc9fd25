//! Which workers exist: backends that deliver whole views, never differences.
//!
//! A view replaces the one before it, so whatever a backend missed meanwhile is right again with the next view. A backend
//! that cannot reach its source keeps silent: the last good view stays. What a worker says of itself is read here into a
//! [`WorkerSpec`]; connecting to it is the business of `workers`.

mod file;
pub(crate) mod kubernetes;
pub(crate) mod leased;
pub mod static_servers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use protocol::metadata::{ModelCard, REQUEST_CODEC, WorkerMetadata, entry_key};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::proxy::ProxyError;
use crate::proxy::config::ProxySettings;

/// Every worker that is visible now, in order of identity.
pub type View = Arc<[Arc<WorkerSpec>]>;

/// One life of a worker: a restarted process is another one, even at the same address and under the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// Below 2^53.
    pub instance_id: u64,
    /// Opaque; differs for each start of the process.
    pub boot_epoch: String,
}

/// What a router knows of a worker before it has spoken to it.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSpec {
    /// Which life.
    pub identity: Identity,
    /// Pod or process.
    pub name: String,
    /// `host:port` of the request plane.
    pub address: String,
    /// ZeroMQ address of its event publisher, where it has one.
    pub events: Option<String>,
    /// What it serves.
    pub card: ModelCard,
    /// It has not said for a while that it lives, and has not said goodbye either: whoever is connected to it knows more.
    pub lapsed: bool,
}

/// Where to look for workers.
#[derive(Clone, Debug)]
pub enum Source {
    /// A directory with a JSON file for each worker.
    File {
        /// The directory; it may appear later.
        directory: PathBuf,
    },
    /// `DynamoWorkerMetadata` objects of one namespace.
    Kubernetes {
        /// Kubernetes namespace; `None` is the one of the pod or of the kubeconfig.
        namespace: Option<String>,
        /// Only workers of this deployment (label `armature.dev/deployment`).
        deployment: Option<String>,
    },
    /// OpenAI servers that are listed: `proxy` looks after them, since they announce nothing of themselves.
    Static(Arc<ProxySettings>),
}

impl std::fmt::Display for Source {
    /// As the line at the start has it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { directory } => write!(f, "file:{}", directory.display()),
            Self::Kubernetes { namespace, deployment } => {
                write!(f, "kubernetes:{}", namespace.as_deref().unwrap_or("(own namespace)"))?;
                deployment.as_ref().map_or(Ok(()), |deployment| write!(f, "/{deployment}"))
            }
            Self::Static(proxy) => write!(f, "static:{} servers", proxy.servers.len()),
        }
    }
}

/// Discovery that cannot start at all.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// No configuration for the Kubernetes API: not in a pod, and this is what is wrong with the kubeconfig.
    #[error(
        "no Kubernetes cluster: this is no pod, and {0}; without a cluster use --discovery-backend file --discovery-dir DIR"
    )]
    NoCluster(String),
    /// That configuration makes no client.
    #[error("discovery over Kubernetes: {0}")]
    Kubernetes(String),
    /// The listed servers cannot be reached at all.
    #[error(transparent)]
    Proxy(#[from] ProxyError),
}

/// Starts a backend. `None` until its first view; `dynamo_namespace` limits the view to workers that registered under it.
pub async fn start(
    source: Source,
    dynamo_namespace: Option<String>,
    shutdown: CancellationToken,
) -> Result<watch::Receiver<Option<View>>, DiscoveryError> {
    let (publish, view) = watch::channel(None);
    let sink = Sink { publish, dynamo_namespace, twice: Vec::new() };
    match source {
        Source::File { directory } => {
            tokio::spawn(shutdown.run_until_cancelled_owned(file::run(directory, sink)));
        }
        Source::Kubernetes { namespace, deployment } => {
            let client = kubernetes::client().await?;
            tokio::spawn(shutdown.run_until_cancelled_owned(kubernetes::run(client, namespace, deployment, sink)));
        }
        // Nobody announces them: there is nothing to look for.
        Source::Static(_) => {}
    }
    Ok(view)
}

/// What a worker says of itself, as a backend found it.
struct Announced<'a> {
    name: &'a str,
    metadata: &'a WorkerMetadata,
    /// When it was written down first.
    since: SystemTime,
    /// See [`WorkerSpec::lapsed`].
    lapsed: bool,
}

/// Where backends put their views.
struct Sink {
    publish: watch::Sender<Option<View>>,
    dynamo_namespace: Option<String>,
    /// See [`Duplicate`]; those of the last view.
    twice: Vec<Duplicate>,
}

/// Two workers with one instance id: who is left out, and for whom.
type Duplicate = (String, String);

impl Sink {
    /// Publishes the view made of these workers, unless it equals the last one.
    fn publish<'a>(&mut self, workers: impl IntoIterator<Item = Announced<'a>>) {
        let specs = workers.into_iter().flat_map(|Announced { name, metadata, since, lapsed }| {
            let specs = self.read(name, metadata).into_iter();
            specs.map(move |spec| (since, Arc::new(WorkerSpec { lapsed, ..spec })))
        });
        let (view, twice) = view(specs.collect());
        for (out, kept) in twice.iter().filter(|duplicate| !self.twice.contains(duplicate)) {
            tracing::warn!(worker = %kept, other = %out, "two workers share an instance id; the newer one counts");
        }
        self.twice = twice;
        self.publish.send_if_modified(|last| {
            let changed = last.as_ref() != Some(&view);
            if changed {
                *last = Some(view);
            }
            changed
        });
    }

    fn read(&self, name: &str, metadata: &WorkerMetadata) -> Vec<WorkerSpec> {
        let wanted = |namespace: &str| self.dynamo_namespace.as_deref().is_none_or(|ours| ours == namespace);
        let endpoints = metadata.endpoints.values();
        let generate = endpoints.filter(|e| e.endpoint == "generate" && wanted(&e.namespace));
        generate.filter_map(|endpoint| WorkerSpec::read(name, metadata, endpoint)).collect()
    }
}

/// Sorts, and leaves the newest life for each instance id, or of those that have not lapsed: the router keys work by it.
fn view(mut specs: Vec<(SystemTime, Arc<WorkerSpec>)>) -> (View, Vec<Duplicate>) {
    let mut twice = Vec::new();
    specs.sort_by(|(since_a, a), (since_b, b)| {
        let by_life = a.identity.instance_id.cmp(&b.identity.instance_id).then(b.lapsed.cmp(&a.lapsed));
        let by_age = by_life.then(since_a.cmp(since_b));
        by_age.then_with(|| a.identity.boot_epoch.cmp(&b.identity.boot_epoch))
    });
    specs.dedup_by(|later, kept| {
        let same = later.1.identity.instance_id == kept.1.identity.instance_id;
        if same {
            twice.push((kept.1.name.clone(), later.1.name.clone()));
            std::mem::swap(later, kept);
        }
        same
    });
    (specs.into_iter().map(|(_, spec)| spec).collect(), twice)
}

impl WorkerSpec {
    /// `None` for an endpoint that this router cannot use: another codec or transport, or no model card.
    fn read(name: &str, metadata: &WorkerMetadata, endpoint: &protocol::metadata::Endpoint) -> Option<Self> {
        if endpoint.request_plane_codec.as_deref() != Some(REQUEST_CODEC) {
            tracing::debug!(worker = name, codec = ?endpoint.request_plane_codec, "worker speaks another request plane");
            return None;
        }
        let id = endpoint.instance_id;
        let address = endpoint.transport.get("tcp")?.as_str()?.to_owned();
        let key = |name| entry_key(&endpoint.namespace, &endpoint.component, name, id);
        let card = metadata.model_cards.get(&key(&endpoint.endpoint))?.card_json.clone();
        let channels = metadata.event_channels.values();
        let mut ours = channels
            .filter(|c| c.instance_id == id && c.component == endpoint.component && c.namespace == endpoint.namespace);
        let events = ours.find_map(|channel| Some(channel.transport.get("zmq")?.as_str()?.to_owned()));
        let boot_epoch = card.armature.as_ref().map(|a| a.boot_epoch.clone()).unwrap_or_default();
        let identity = Identity { instance_id: id, boot_epoch };
        Some(Self { identity, name: name.to_owned(), address, events, card, lapsed: false })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    fn metadata(id: u64, epoch: &str) -> WorkerMetadata {
        let entry = |endpoint: &str| json!({"namespace": "ns", "component": "backend", "endpoint": endpoint, "instance_id": id});
        let with = |mut base: serde_json::Value, key: &str, value: serde_json::Value| {
            base[key] = value;
            base
        };
        let endpoint = with(entry("generate"), "transport", json!({"tcp": "127.0.0.1:9000"}));
        let endpoint = with(endpoint, "request_plane_codec", json!(REQUEST_CODEC));
        let card =
            json!({"display_name": "m", "armature": {"boot_epoch": epoch, "artifacts": {}, "eos_token_ids": []}});
        let channel = with(entry("events"), "transport", json!({"zmq": "tcp://127.0.0.1:9001"}));
        let text = json!({
            "endpoints": {(entry_key("ns", "backend", "generate", id)): endpoint},
            "model_cards": {(entry_key("ns", "backend", "generate", id)): with(entry("generate"), "card_json", card)},
            "event_channels": {(entry_key("ns", "backend", "events", id)): channel},
        });
        serde_json::from_value(text).expect("valid metadata")
    }

    fn sink(dynamo_namespace: Option<&str>) -> (Sink, watch::Receiver<Option<View>>) {
        let (publish, view) = watch::channel(None);
        (Sink { publish, dynamo_namespace: dynamo_namespace.map(str::to_owned), twice: Vec::new() }, view)
    }

    fn announced<'a>(name: &'a str, metadata: &'a WorkerMetadata, since_s: u64) -> Announced<'a> {
        Announced { name, metadata, since: SystemTime::UNIX_EPOCH + Duration::from_secs(since_s), lapsed: false }
    }

    #[test]
    fn a_worker_is_read_from_its_three_maps() {
        let (mut sink, view) = sink(None);
        sink.publish([announced("w", &metadata(7, "e1"), 0)]);
        let view = view.borrow().clone().expect("published");
        let spec = &view[0];
        assert_eq!(spec.identity, Identity { instance_id: 7, boot_epoch: "e1".into() });
        assert_eq!((spec.address.as_str(), spec.events.as_deref()), ("127.0.0.1:9000", Some("tcp://127.0.0.1:9001")));
    }

    #[test]
    fn equal_views_do_not_wake_anybody_and_a_new_epoch_does() {
        let (mut sink, mut view) = sink(None);
        sink.publish([announced("w", &metadata(7, "e1"), 0)]);
        view.mark_unchanged();
        sink.publish([announced("w", &metadata(7, "e1"), 0)]);
        assert!(!view.has_changed().expect("open"));
        sink.publish([announced("w", &metadata(7, "e2"), 0)]);
        assert!(view.has_changed().expect("open"));
    }

    #[test]
    fn other_namespaces_codecs_and_double_ids_are_left_out() {
        let (mut sink, view) = sink(Some("other"));
        sink.publish([announced("w", &metadata(7, "e1"), 0)]);
        assert_eq!(view.borrow().as_deref().map(<[_]>::len), Some(0));
        let (mut sink, view) = self::sink(Some("ns"));
        let mut foreign = metadata(8, "e");
        foreign.endpoints.values_mut().for_each(|e| e.request_plane_codec = Some("msgpack".into()));
        let (a, b) = (metadata(7, "e2"), metadata(7, "e1"));
        sink.publish([announced("a", &a, 1), announced("b", &b, 2), announced("c", &foreign, 3)]);
        let names = || view.borrow().iter().flat_map(|view| view.iter()).map(|w| w.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(), ["b"], "the newer one");
        assert_eq!(sink.twice, [("a".to_owned(), "b".to_owned())]);
        sink.publish([announced("a", &a, 1), Announced { lapsed: true, ..announced("b", &b, 2) }]);
        assert_eq!(names(), ["a"], "the other one has lapsed");
    }
}
