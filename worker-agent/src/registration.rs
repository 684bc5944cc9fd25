//! Makes a worker known to routers: builds its metadata, and keeps it in the discovery backend while the worker lives.
//!
//! One task owns the entry: it writes it, refreshes it, rewrites it when it changes, and takes it away at the end.

mod file;
mod kubernetes;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use protocol::metadata::{
    self, ArmatureCard, Endpoint, EventChannel, ModelCard, ModelEntry, REQUEST_CODEC, RuntimeConfig, WorkerMetadata,
};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use xxhash_rust::xxh3::xxh3_64;

use crate::agent::ModelInfo;
use crate::config::{Discovery, Settings};
use crate::engine::EngineInfo;
use file::FileEntry;
pub use kubernetes::KubernetesEntry;

/// After this long without a first success, a failure is final.
const FIRST_WRITE: Duration = Duration::from_secs(60);
/// Longest time a single write may take.
const ONE_WRITE: Duration = Duration::from_secs(10);
/// First and longest pause between two tries.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Why a worker could not be made known.
#[derive(Debug, thiserror::Error)]
pub enum RegistrationError {
    /// A file could not be written.
    #[error("registering in {path}: {source}")]
    File {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The discovery directory is something else.
    #[error("--discovery-dir {0} is not a directory")]
    NotADirectory(String),
    /// The Kubernetes API refused, or could not be reached.
    #[error("registering DynamoWorkerMetadata {name}: {source}")]
    Kubernetes {
        /// Name of the object.
        name: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// A write did not end.
    #[error("registering took over {} s", .0.as_secs())]
    Deadline(Duration),
}

/// Who this worker is, in this life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Below 2^53.
    pub instance_id: u64,
    /// Changes with every start.
    pub boot_epoch: String,
}

impl Identity {
    /// A new life: the epoch is `<pod UID>/<start, ms since 1970>/<random>`.
    pub fn new(settings: &Settings) -> Self {
        let start_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis());
        let epoch = |owner: &str| format!("{owner}/{start_ms}/{:08x}", rand::random::<u32>());
        match &settings.discovery {
            Discovery::Kubernetes(pod) => {
                Self { instance_id: metadata::instance_id(&pod.name), boot_epoch: epoch(&pod.uid) }
            }
            Discovery::File(_) => {
                let boot_epoch = epoch("local");
                Self { instance_id: metadata::instance_id(&format!("{}:{boot_epoch}", settings.name)), boot_epoch }
            }
        }
    }
}

/// Everything that the metadata is made of.
pub(crate) struct Description<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) identity: &'a Identity,
    pub(crate) engine: &'a EngineInfo,
    pub(crate) model: &'a ModelInfo,
    /// What the engine's blocks are, where they can be moved.
    pub(crate) kv_layout: Option<&'a str>,
    /// Room for blocks below device memory, if that is known.
    pub(crate) tier_blocks: Option<usize>,
    /// Ports of the request plane and of events, as they are bound.
    pub(crate) ports: (u16, u16),
    pub(crate) draining: bool,
    /// Accelerators that this process sees.
    pub(crate) devices: &'a [device::Description],
}

impl Description<'_> {
    /// The metadata, as the discovery contract has it.
    pub(crate) fn metadata(&self) -> WorkerMetadata {
        let (namespace, component) = (self.settings.namespace.clone(), self.settings.component.clone());
        let instance_id = self.identity.instance_id;
        let key = |endpoint: &str| metadata::entry_key(&namespace, &component, endpoint, instance_id);
        let endpoint = Endpoint {
            kind: "Endpoint".into(),
            namespace: namespace.clone(),
            component: component.clone(),
            endpoint: "generate".into(),
            instance_id,
            transport: self.transport("tcp", self.settings.address(self.ports.0)),
            request_plane_codec: Some(REQUEST_CODEC.into()),
            extra: Default::default(),
        };
        let model = ModelEntry {
            kind: "Model".into(),
            namespace: namespace.clone(),
            component: component.clone(),
            endpoint: "generate".into(),
            instance_id,
            card_json: self.card(),
            extra: Default::default(),
        };
        let channel = EventChannel {
            kind: "EventChannel".into(),
            namespace: namespace.clone(),
            component: component.clone(),
            topic: None,
            instance_id,
            transport: self.transport("zmq", format!("tcp://{}", self.settings.address(self.ports.1))),
            extra: Default::default(),
        };
        WorkerMetadata {
            endpoints: BTreeMap::from([(key("generate"), endpoint)]),
            model_cards: BTreeMap::from([(key("generate"), model)]),
            event_channels: BTreeMap::from([(key("events"), channel)]),
            ..Default::default()
        }
    }

    fn card(&self) -> ModelCard {
        let files = &self.model.files;
        let digests = files.iter().map(|(name, bytes)| (name.clone(), metadata::artifact_digest(xxh3_64(bytes))));
        ModelCard {
            display_name: self.model.name.clone(),
            context_length: u32::try_from(self.engine.context_length).unwrap_or(u32::MAX),
            kv_cache_block_size: self.engine.block_size.get() as u32,
            worker_type: Some(self.settings.role.as_str().into()),
            runtime_config: RuntimeConfig {
                total_kv_blocks: Some(self.engine.total_blocks as u64),
                max_num_seqs: Some(self.engine.max_num_seqs as u64),
                max_num_batched_tokens: Some(self.engine.max_num_batched_tokens as u64),
                data_parallel_size: None,
                enable_local_indexer: true,
                extra: Default::default(),
            },
            armature: Some(ArmatureCard {
                boot_epoch: self.identity.boot_epoch.clone(),
                artifacts: digests.collect(),
                eos_token_ids: self.model.eos_token_ids.clone(),
                bos_token_id: self.model.bos_token_id,
                revision: self.settings.revision.clone(),
                kv_revision: self.kv_layout.map(|_| self.settings.kv_revision.clone()),
                kv_layout: self.kv_layout.map(str::to_owned),
                labels: self.settings.labels.clone(),
                draining: self.draining,
                block_hash_probe: metadata::block_hash_probe(self.engine.block_size),
                tier_blocks: self.tier_blocks.map(|blocks| blocks as u64),
                answers_samples: true,
                devices: crate::accelerators::cards(self.devices),
            }),
            extra: Default::default(),
        }
    }

    fn transport(&self, name: &str, address: String) -> BTreeMap<String, Value> {
        BTreeMap::from([(name.to_owned(), Value::String(address))])
    }
}

/// The entry of one worker in a discovery backend.
pub enum Entry {
    /// A file.
    File(FileEntry),
    /// An object.
    Kubernetes(Box<KubernetesEntry>),
}

impl Entry {
    /// Prepares the entry; writes nothing yet. For Kubernetes it reads the pod's service account.
    pub async fn open(settings: &Settings, identity: &Identity) -> Result<Self, RegistrationError> {
        match &settings.discovery {
            Discovery::File(dir) => {
                let no_directory = match tokio::fs::metadata(dir).await {
                    Ok(found) => !found.is_dir(),
                    Err(error) => error.kind() == std::io::ErrorKind::NotADirectory,
                };
                if no_directory {
                    return Err(RegistrationError::NotADirectory(dir.display().to_string()));
                }
                Ok(Self::File(FileEntry::new(dir, &settings.name, identity.instance_id)))
            }
            Discovery::Kubernetes(pod) => {
                let client = kube::Client::try_default().await;
                let source =
                    |source| RegistrationError::Kubernetes { name: pod.name.clone(), source: Box::new(source) };
                Ok(Self::Kubernetes(Box::new(KubernetesEntry::new(client.map_err(source)?, pod.clone()))))
            }
        }
    }

    /// How often the entry has to be refreshed.
    fn refresh_every(&self) -> Duration {
        match self {
            Self::File(_) => file::REFRESH,
            Self::Kubernetes(_) => kubernetes::REFRESH,
        }
    }

    async fn write(&mut self, metadata: &WorkerMetadata) -> Result<(), RegistrationError> {
        let write = async {
            match self {
                Self::File(entry) => entry.write(metadata).await,
                Self::Kubernetes(entry) => entry.apply(metadata).await,
            }
        };
        tokio::time::timeout(ONE_WRITE, write).await.unwrap_or(Err(RegistrationError::Deadline(ONE_WRITE)))
    }

    async fn refresh(&mut self, metadata: &WorkerMetadata) -> Result<(), RegistrationError> {
        if let Self::File(entry) = self {
            match tokio::time::timeout(ONE_WRITE, entry.touch()).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => {
                    tracing::warn!(path = %entry.path().display(), %error, "registration not touched; writing it again")
                }
                Err(_) => tracing::warn!(path = %entry.path().display(), "touching the registration takes long"),
            }
        }
        self.write(metadata).await
    }

    /// The last word on a worker; `unwritten` is what the entry does not say yet.
    async fn leave(mut self, unwritten: Option<&WorkerMetadata>) {
        if let Self::File(entry) = &self {
            return entry.remove().await;
        }
        // Its owner is the pod: Kubernetes removes both together. Until then it says that the worker drains.
        if let Some(metadata) = unwritten
            && let Err(error) = self.write(metadata).await
        {
            tracing::warn!(%error, "the last state is not registered");
        }
    }
}

/// Writes the entry, calls `registered`, and keeps the entry equal to `metadata` until `stop`; then takes it away. Fails only
/// when the first write keeps failing for a minute.
///
/// A write that has begun is always waited for: one that is dropped may still happen, and bring back what was removed.
pub async fn hold(
    mut entry: Entry,
    mut metadata: watch::Receiver<WorkerMetadata>,
    registered: impl FnOnce(),
    stop: CancellationToken,
) -> Result<(), RegistrationError> {
    let started = Instant::now();
    let mut registered = Some(registered);
    let every = entry.refresh_every();
    let mut refresh = tokio::time::interval_at(started + every, every);
    refresh.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut retry = Retry::default();
    let mut changed = true;
    while !stop.is_cancelled() {
        let current = metadata.borrow_and_update().clone();
        let written = if changed { entry.write(&current).await } else { entry.refresh(&current).await };
        match written {
            Ok(()) => {
                if let Some(registered) = registered.take() {
                    registered();
                }
                (retry, changed) = (Retry::default(), false);
                tokio::select! {
                    Ok(()) = metadata.changed() => changed = true,
                    _ = refresh.tick() => {}
                    () = stop.cancelled() => {}
                }
            }
            Err(error) if registered.is_some() && started.elapsed() > FIRST_WRITE => return Err(error),
            Err(error) => {
                changed = true;
                tokio::select! {
                    () = retry.pause(&error, every) => {}
                    () = stop.cancelled() => {}
                }
            }
        }
    }
    let unwritten = registered.is_none() && (changed || metadata.has_changed().unwrap_or(false));
    let last = metadata.borrow().clone();
    entry.leave(unwritten.then_some(&last)).await;
    Ok(())
}

/// Pauses that double, with up to a quarter of jitter.
#[derive(Default)]
struct Retry {
    tries: u32,
}

impl Retry {
    /// `refresh` bounds the pause as well: a try also refreshes what is there.
    async fn pause(&mut self, error: &RegistrationError, refresh: Duration) {
        let pause = BACKOFF.0.saturating_mul(1 << self.tries.min(10)).min(BACKOFF.1).min(refresh);
        self.tries += 1;
        tracing::warn!(%error, tries = self.tries, "registration failed; trying again");
        tokio::time::sleep(pause.mul_f64(rand::random_range(1.0..1.25))).await;
    }
}
