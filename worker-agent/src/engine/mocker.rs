//! The mocker: the built-in engine with a timing model in place of the model.
//!
//! Scheduler, block pool, events, limits, cancellation and the engine's thread are those of the built-in engine, not copies.
//! What is missing is the model: a step takes the time that [`timing`] gives it, and tokens are a hash of their sequence
//! ([`text`]). It serves benchmarks and tests of everything around an engine; nobody should read its answers.

use std::path::Path;
use std::sync::Arc;

use kv_hashing::BlockSize;

use super::EngineInfo;
use super::builtin::Kv;
use super::builtin::arena::{KvArena, KvShape};
use super::builtin::gguf::Gguf;
use super::builtin::llama::LoadError;
use super::builtin::open::{OpenError, OpenOptions};
use super::builtin::scheduler::{InvalidConfig, SchedulerConfig};
use super::builtin::service::{BuiltIn, StartError};
use super::builtin::stop::Vocabulary;
use super::builtin::tiers::TierOptions;
use crate::artifacts::Artifacts;

pub mod pace;
#[cfg(test)]
mod tests;
pub mod text;
pub mod timing;

use pace::{Paced, Pacer, SystemClock};
use text::PlainText;
use timing::TimingModel;

/// Names what mockers compute: nothing, so that all are alike.
const MODEL: u64 = 0;

/// What a mocker imitates.
#[derive(Clone, Copy, Debug)]
pub struct MockerOptions {
    /// Time of a step.
    pub timing: TimingModel,
    /// How many times faster than the model its steps run; 0: they take no time.
    pub speedup_ratio: f64,
    /// Most tokens of prompt and answer together; no more than the arena holds.
    pub context_length: usize,
    /// Mean length of answers in tokens, where requests do not ignore the end token; without it only their limits end them.
    pub answer_tokens: Option<f64>,
}

/// What all mockers of a process share: options, and the tokenizer of a model file, whose weights are not read.
#[derive(Clone, Debug)]
pub struct MockedModel {
    /// Files for routers.
    pub artifacts: Artifacts,
    /// The name inside the file.
    pub name: Option<String>,
    options: MockerOptions,
    vocabulary: Arc<Vocabulary>,
    text: Arc<PlainText>,
}

impl MockedModel {
    /// Reads the metadata of a GGUF file.
    pub fn read(path: &Path, options: MockerOptions) -> Result<Self, OpenError> {
        let gguf = Gguf::open(path).map_err(LoadError::from)?;
        let artifacts = Artifacts::from_gguf(&gguf)?;
        let name = gguf.get::<&str>("general.name").map_err(LoadError::from)?.map(str::to_owned);
        let vocabulary = Arc::new(artifacts.vocabulary());
        let text = Arc::new(PlainText::new(&vocabulary, options.answer_tokens));
        Ok(Self { artifacts, name, options, vocabulary, text })
    }

    /// Starts one engine. Sizes are those of the built-in engine; it has no threads that compute.
    pub fn start(&self, sizes: OpenOptions) -> Result<BuiltIn, StartError> {
        let engine = EngineInfo {
            block_size: BlockSize::new(sizes.block_size).ok_or(InvalidConfig::TooSmall("block_size", 1))?,
            total_blocks: sizes.total_blocks,
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
            context_length: self.options.context_length,
        };
        let config = SchedulerConfig { engine, max_waiting: sizes.max_waiting };
        start(config, self.vocabulary.clone(), self.text.clone(), self.options, &sizes.tiers)
    }
}

/// Starts an engine whose answers are from `text`.
fn start(
    config: SchedulerConfig,
    vocabulary: Arc<Vocabulary>,
    text: Arc<PlainText>,
    options: MockerOptions,
    tiers: &TierOptions,
) -> Result<BuiltIn, StartError> {
    let pacer = Pacer::new(SystemClock::default(), options.speedup_ratio);
    let kv = kv(&config);
    let forward = Paced::new(options.timing, pacer, vocabulary.token_bytes.len(), text).with_kv(kv);
    BuiltIn::start_with_tiers(forward, config, vocabulary, tiers)
}

/// Blocks of a kilobyte or more that nobody computes: they are moved between mockers as a model's are between its workers, in
/// less time. None where the sizes are no arena's; then nothing is moved.
fn kv(config: &SchedulerConfig) -> Option<Kv> {
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 16, block_size: config.engine.block_size.get() };
    let arena = Arc::new(KvArena::new(shape, config.engine.total_blocks).ok()?);
    Some(Kv { arena, model: MODEL })
}
