//! Models by what they are made of: fetched once for each set of files, from any worker that has it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use protocol::metadata::{ModelCard, artifact, artifact_digest};
use protocol::request_plane::{ArtifactGet, ClientFrame, client_frame, server_frame};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use xxhash_rust::xxh3::xxh3_64;

use super::Life;
use crate::model::{Model, ModelError, ModelFiles};
use crate::request_plane::{Client, OpenError};

/// Deadline of one file.
const FETCH: Duration = Duration::from_secs(30);

/// Deadline of building a model from its files.
const BUILD: Duration = Duration::from_secs(60);

/// Largest file: tokenizers of large vocabularies take 10 to 30 MB.
const FILE_LIMIT: usize = 128 << 20;

/// First and longest pause after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// What a model is made of: two workers with equal keys share one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ModelKey {
    artifacts: BTreeMap<String, String>,
    bos_token_id: Option<u32>,
}

impl ModelKey {
    pub(super) fn of(card: &ModelCard) -> Self {
        let Some(ours) = &card.armature else { return Self { artifacts: BTreeMap::new(), bos_token_id: None } };
        Self { artifacts: ours.artifacts.clone(), bos_token_id: ours.bos_token_id }
    }
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error("no connection: {0}")]
    Open(#[from] OpenError),
    #[error("{name}: {reason}")]
    File { name: &'static str, reason: String },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("building the model took over {} s", BUILD.as_secs())]
    Deadline,
}

enum Slot {
    Loading { failures: u32 },
    Ready(Arc<Model>),
    Failed { failures: u32, retry: Instant },
}

type Loaded = (ModelKey, String, Result<Arc<Model>, LoadError>);

/// Every model in use, or on its way.
pub(super) struct Models {
    slots: BTreeMap<ModelKey, Slot>,
    results: (mpsc::UnboundedSender<Loaded>, mpsc::UnboundedReceiver<Loaded>),
}

impl Default for Models {
    fn default() -> Self {
        // Holds at most one result for each slot.
        Self { slots: BTreeMap::new(), results: mpsc::unbounded_channel() }
    }
}

impl Models {
    pub(super) fn get(&self, key: &ModelKey) -> Option<&Arc<Model>> {
        match self.slots.get(key) {
            Some(Slot::Ready(model)) => Some(model),
            _ => None,
        }
    }

    /// When a failed load is to be tried again.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.slots
            .values()
            .filter_map(|slot| if let Slot::Failed { retry, .. } = slot { Some(*retry) } else { None })
            .min()
    }

    /// Waits for a load to end. May be dropped and called again.
    pub(super) async fn loaded(&mut self) {
        let Some((key, worker, result)) = self.results.1.recv().await else { return };
        let failures = if let Some(Slot::Loading { failures }) = self.slots.get(&key) { *failures } else { 0 };
        let slot = match result {
            Ok(model) => {
                tracing::info!(worker, tokenizer = model.tokenizer_name(), "model loaded");
                Slot::Ready(model)
            }
            Err(error) => {
                tracing::warn!(worker, %error, "a model could not be loaded; trying again");
                Slot::Failed { failures: failures + 1, retry: Instant::now() + pause(failures) }
            }
        };
        self.slots.insert(key, slot);
    }

    /// Starts loads for models that no slot has, each from a reachable worker, after failures from another one; forgets models
    /// that nobody serves any more.
    pub(super) fn load_missing<'a>(&mut self, lives: impl Iterator<Item = &'a Arc<Life>>) {
        let mut sources: BTreeMap<&ModelKey, Vec<&Arc<Life>>> = BTreeMap::new();
        for life in lives.filter(|life| !life.model_key().artifacts.is_empty()) {
            sources.entry(life.model_key()).or_default().push(life);
        }
        self.slots.retain(|key, slot| matches!(slot, Slot::Loading { .. }) || sources.contains_key(key));
        let now = Instant::now();
        for (key, sources) in sources {
            let failures = match self.slots.get(key) {
                None => 0,
                Some(Slot::Failed { failures, retry }) if *retry <= now => *failures,
                Some(_) => continue,
            };
            let reachable: Vec<_> = sources.iter().filter(|life| !life.client.is_down()).collect();
            let Some(life) = reachable.get(failures as usize % reachable.len().max(1)) else {
                // Never left in the past: whoever waits for it would not wait at all.
                if let Some(Slot::Failed { retry, .. }) = self.slots.get_mut(key) {
                    *retry = now + pause(failures.saturating_sub(1));
                }
                continue;
            };
            let (client, spec, done) = (life.client.clone(), life.spec(), self.results.0.clone());
            self.slots.insert(key.clone(), Slot::Loading { failures });
            let key = key.clone();
            tokio::spawn(async move {
                let result = load(&client, &key, &spec.card).await;
                // The receiver is gone only when the router stops.
                let _ = done.send((key, spec.name.clone(), result));
            });
        }
    }
}

/// How long to wait after this many failures before the last one.
fn pause(failures: u32) -> Duration {
    (BACKOFF.0 * 2_u32.saturating_pow(failures)).min(BACKOFF.1)
}

async fn load(client: &Client, key: &ModelKey, card: &ModelCard) -> Result<Arc<Model>, LoadError> {
    let fetch = async |name: &'static str| match key.artifacts.get(name) {
        Some(digest) => fetch(client, name, digest).await.map(Some),
        None => Ok(None),
    };
    let missing = LoadError::File { name: artifact::TOKENIZER, reason: "the worker does not offer it".into() };
    let tokenizer_json = fetch(artifact::TOKENIZER).await?.ok_or(missing)?;
    let chat_template = match fetch(artifact::CHAT_TEMPLATE).await? {
        Some(bytes) => Some(String::from_utf8(bytes).map_err(|error| bad_file(artifact::CHAT_TEMPLATE, error))?),
        None => None,
    };
    let special_tokens = fetch(artifact::SPECIAL_TOKENS).await?;
    let files = ModelFiles { tokenizer_json, chat_template, special_tokens };
    let card = card.clone();
    let built = tokio::task::spawn_blocking(move || Model::load(files, &card));
    match timeout(BUILD, built).await {
        Ok(Ok(model)) => Ok(Arc::new(model?)),
        Ok(Err(panicked)) => Err(bad_file(artifact::TOKENIZER, panicked)),
        Err(_) => Err(LoadError::Deadline),
    }
}

/// One file, whole, and checked against its digest.
async fn fetch(client: &Client, name: &'static str, digest: &str) -> Result<Vec<u8>, LoadError> {
    let get = client_frame::Body::ArtifactGet(ArtifactGet { name: name.to_owned() });
    let mut stream = client.open(&mut ClientFrame { stream_id: 0, body: Some(get) }).await?;
    let whole = async {
        let mut bytes = Vec::new();
        loop {
            match stream.next().await {
                Some(server_frame::Body::ArtifactChunk(chunk)) => {
                    bytes.extend_from_slice(&chunk.data);
                    if bytes.len() > FILE_LIMIT {
                        return Err(format!("over {} MB", FILE_LIMIT >> 20));
                    }
                    if chunk.end {
                        return Ok(bytes);
                    }
                }
                Some(server_frame::Body::Failed(failed)) => return Err(failed.message),
                Some(_) => return Err("an answer of another kind".to_owned()),
                None => return Err(stream.lost_reason()),
            }
        }
    };
    let fetched = timeout(FETCH, whole).await.unwrap_or_else(|_| Err(format!("not complete in {} s", FETCH.as_secs())));
    let bytes = fetched.map_err(|reason| bad_file(name, reason))?;
    let actual = artifact_digest(xxh3_64(&bytes));
    if actual != digest {
        return Err(bad_file(name, format!("its digest is {actual}, the card says {digest}")));
    }
    Ok(bytes)
}

fn bad_file(name: &'static str, reason: impl ToString) -> LoadError {
    LoadError::File { name, reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Notify;

    use super::*;
    use crate::discovery::{Identity, WorkerSpec};
    use crate::request_plane::Caller;

    #[tokio::test]
    async fn a_failed_load_without_a_reachable_worker_is_not_due_at_once() {
        let card = serde_json::json!({
            "display_name": "m",
            "armature": {"boot_epoch": "e", "artifacts": {(artifact::TOKENIZER): "xxh3:0"}, "eos_token_ids": []},
        });
        let identity = Identity { instance_id: 1, boot_epoch: "e".into() };
        // Nobody can listen on port 0.
        let (name, address) = ("w".to_owned(), "127.0.0.1:0".to_owned());
        let card = serde_json::from_value(card).expect("a card");
        let spec = Arc::new(WorkerSpec { identity, name, address, events: None, card, lapsed: false });
        let changed = Arc::<Notify>::default();
        let life = Life::start(
            spec,
            1,
            Caller::new("router".into()),
            Duration::from_secs(5),
            Duration::from_secs(5),
            changed.clone(),
        );
        while !life.client.is_down() {
            timeout(Duration::from_secs(10), changed.notified()).await.expect("the dial fails");
        }
        let mut models = Models::default();
        models.slots.insert(life.model_key().clone(), Slot::Failed { failures: 3, retry: Instant::now() });
        models.load_missing([&life].into_iter());
        assert!(models.retry_at().expect("still wanted") > Instant::now() + BACKOFF.0);
        life.retire();
    }
}
