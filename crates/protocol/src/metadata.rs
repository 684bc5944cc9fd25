//! What a worker registers: the payload of a `DynamoWorkerMetadata` object and of a file in file discovery.
//!
//! Four maps, each keyed `<namespace>/<component>/<endpoint>/<instance hex>`, as Dynamo writes them. Nulls read as empty
//! maps; fields that this build does not know are kept, so that rewriting an object loses nothing.

use std::collections::BTreeMap;

use kv_hashing::{BlockSize, HashSpace, sequence_hashes};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// `spec.data` of a `DynamoWorkerMetadata`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerMetadata {
    /// Where requests go.
    #[serde(default, deserialize_with = "null_as_default")]
    pub endpoints: BTreeMap<String, Endpoint>,
    /// What is served.
    #[serde(default, deserialize_with = "null_as_default")]
    pub model_cards: BTreeMap<String, ModelEntry>,
    /// Where events are published.
    #[serde(default, deserialize_with = "null_as_default")]
    pub event_channels: BTreeMap<String, EventChannel>,
    /// Who owns the state behind the events, and where it can be recovered from. Kept as it is.
    #[serde(default, deserialize_with = "null_as_default")]
    pub event_sources: BTreeMap<String, Value>,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// One endpoint of an instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Always `"Endpoint"`.
    #[serde(rename = "type", default = "endpoint_type")]
    pub kind: String,
    /// Namespace in Dynamo's sense: one deployment.
    pub namespace: String,
    /// `backend`, `prefill`, …
    pub component: String,
    /// `generate`.
    pub endpoint: String,
    /// Below 2^53.
    pub instance_id: u64,
    /// Address by transport name, e.g. `{"tcp": "10.0.0.7:9000"}`.
    pub transport: BTreeMap<String, Value>,
    /// How requests are encoded on that transport; [`REQUEST_CODEC`] for our own workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_plane_codec: Option<String>,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// `request_plane_codec` of the frames in [`crate::request_plane`].
pub const REQUEST_CODEC: &str = "armature.v1";

/// A model served by an instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelEntry {
    /// Always `"Model"`.
    #[serde(rename = "type", default = "model_type")]
    pub kind: String,
    /// Namespace.
    pub namespace: String,
    /// Component.
    pub component: String,
    /// Endpoint.
    pub endpoint: String,
    /// Below 2^53.
    pub instance_id: u64,
    /// The card.
    pub card_json: ModelCard,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// What a router must know of a model to preprocess for it and to route to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// What clients put into `model`.
    pub display_name: String,
    /// Most tokens of prompt and answer together.
    #[serde(default)]
    pub context_length: u32,
    /// Tokens per KV block.
    #[serde(default)]
    pub kv_cache_block_size: u32,
    /// Role: `aggregated`, `prefill` or `decode`.
    #[serde(default)]
    pub worker_type: Option<String>,
    /// Capacities.
    #[serde(default)]
    pub runtime_config: RuntimeConfig,
    /// What only our workers say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub armature: Option<ArmatureCard>,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl ModelCard {
    /// The LoRA adapter that a card of Dynamo's is about: its model is the base model with this adapter.
    pub fn adapter(&self) -> Option<&str> {
        let name = self.extra.get("lora")?.get("name")?.as_str()?;
        (!name.is_empty()).then_some(name)
    }
}

/// Capacities of a worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RuntimeConfig {
    /// KV blocks in device memory.
    #[serde(default)]
    pub total_kv_blocks: Option<u64>,
    /// Most sequences that run at once.
    #[serde(default)]
    pub max_num_seqs: Option<u64>,
    /// Most tokens in one engine step.
    #[serde(default)]
    pub max_num_batched_tokens: Option<u64>,
    /// Data-parallel ranks behind this instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_parallel_size: Option<u32>,
    /// The worker answers range queries over its own events.
    #[serde(default)]
    pub enable_local_indexer: bool,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The part of a card that Dynamo has no field for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArmatureCard {
    /// Changes with every start of the process: pod UID, container restarts and start time in one opaque string.
    pub boot_epoch: String,
    /// Files a router may fetch over the request plane: name to digest (`xxh3:<16 hex digits>` of the bytes).
    pub artifacts: BTreeMap<String, String>,
    /// Token that ends an answer, and others that do too.
    pub eos_token_ids: Vec<u32>,
    /// Token put before a completion prompt, where the model wants one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u32>,
    /// Revision of the pod template.
    #[serde(default)]
    pub revision: String,
    /// Workers exchange KV only with those of the same one; absent where a worker does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_revision: Option<String>,
    /// What a block's bytes are: model, shape, format. Equal texts can be exchanged; absent where a worker does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_layout: Option<String>,
    /// Free labels, for filters.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The worker takes no new requests.
    #[serde(default)]
    pub draining: bool,
    /// What this worker makes of [`block_hash_probe`]'s tokens; empty where it does not say. A router that hashes otherwise
    /// would find nothing in its events.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub block_hash_probe: Vec<u64>,
    /// KV blocks that it has room for below device memory, all tiers together; absent where a worker does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier_blocks: Option<u64>,
    /// The worker answers `KvSample` on the request plane.
    #[serde(default)]
    pub answers_samples: bool,
    /// Accelerators that the worker sees.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceCard>,
}

/// One accelerator of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceCard {
    /// As its maker calls it.
    pub name: String,
    /// The same over reboots.
    pub uuid: String,
    /// All its memory, in bytes.
    pub memory_bytes: u64,
    /// What its code may use, as `9.0`.
    pub capability: String,
}

/// Block hashes of a fixed sequence of tokens, plain and in a hash space: equal on both sides if they hash alike.
pub fn block_hash_probe(size: BlockSize) -> Vec<u64> {
    let tokens: Vec<u32> = (0..2 * size.get() as u32).map(|at| at.wrapping_mul(7919) % 131_071).collect();
    let spaces = [HashSpace::default(), HashSpace::new(Some("adapter"), Some("namespace"))];
    spaces.into_iter().flat_map(|space| sequence_hashes(&space.blocks(&tokens, size))).map(|hash| hash.0).collect()
}

/// Names of the artifacts in [`ArmatureCard::artifacts`].
pub mod artifact {
    /// Hugging Face `tokenizer.json`.
    pub const TOKENIZER: &str = "tokenizer.json";
    /// The chat template's text.
    pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
    /// JSON: special tokens by role (`bos_token`, `eos_token`, …) as the template sees them.
    pub const SPECIAL_TOKENS: &str = "special_tokens.json";
}

/// Digest of an artifact as [`ArmatureCard::artifacts`] carries it is `xxh3:` and 16 hex digits.
pub fn artifact_digest(xxh3_64: u64) -> String {
    format!("xxh3:{xxh3_64:016x}")
}

/// Where an instance publishes events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventChannel {
    /// Always `"EventChannel"`.
    #[serde(rename = "type", default = "event_channel_type")]
    pub kind: String,
    /// Namespace.
    pub namespace: String,
    /// Component.
    pub component: String,
    /// `kv-events`, `kv_metrics`, … A channel without topic carries all of them.
    #[serde(default)]
    pub topic: Option<String>,
    /// Below 2^53.
    pub instance_id: u64,
    /// Address by transport name, e.g. `{"zmq": "tcp://10.0.0.7:9001"}`.
    pub transport: BTreeMap<String, Value>,
    /// Unknown fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The key of an entry in each of the four maps.
pub fn entry_key(namespace: &str, component: &str, endpoint: &str, instance_id: u64) -> String {
    format!("{namespace}/{component}/{endpoint}/{instance_id:x}")
}

/// Instance id of a worker in Kubernetes: SipHash-1-3 with zero keys over the object's name, low 53 bits, as Dynamo
/// computes it (a Rust `str` hashes as its bytes and one 0xff).
pub fn instance_id(object_name: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    object_name.hash(&mut hasher);
    hasher.finish() & ((1 << 53) - 1)
}

fn endpoint_type() -> String {
    "Endpoint".into()
}

fn model_type() -> String {
    "Model".into()
}

fn event_channel_type() -> String {
    "EventChannel".into()
}

fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_ids_equal_the_peers() {
        assert_eq!(instance_id("my-pod-0"), 6120456604145318);
    }

    #[test]
    fn the_probe_tells_hashes_apart() {
        let probe = |tokens| block_hash_probe(BlockSize::new(tokens).expect("not zero"));
        assert_eq!(probe(16), probe(16));
        assert_ne!(probe(16), probe(32));
        let different: std::collections::BTreeSet<u64> = probe(16).into_iter().collect();
        assert_eq!(different.len(), 4, "two blocks in two spaces");
    }

    #[test]
    fn nulls_are_empty_maps_and_unknown_fields_survive() {
        let text = r#"{"endpoints":null,"model_cards":{"ns/backend/generate/1":{"type":"Model","namespace":"ns","component":"backend",
            "endpoint":"generate","instance_id":1,"card_json":{"display_name":"m","slug":"m","runtime_config":{"taints":["x"]}}}},"later":1}"#;
        let read: WorkerMetadata = serde_json::from_str(text).expect("valid");
        assert!(read.endpoints.is_empty() && read.event_channels.is_empty());
        let written = serde_json::to_value(&read).expect("serializable");
        assert_eq!(written["later"], 1);
        let card = &written["model_cards"]["ns/backend/generate/1"]["card_json"];
        assert_eq!((&card["slug"], &card["runtime_config"]["taints"][0]), (&"m".into(), &"x".into()));
    }
}
