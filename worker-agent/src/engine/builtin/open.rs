//! From a GGUF file to a running engine and the files its routers need: the one place where the rooms are wired together.

use std::num::NonZeroUsize;
use std::path::Path;

use kv_hashing::BlockSize;

use super::Forward;
use super::compute::{Compute, NotBuilt};
use super::gguf::Gguf;
#[cfg(feature = "candle")]
use super::llama::candle::{CandleDevice, CandleError, CandleLlama, CandleOptions};
use super::llama::{Config, Llama, LlamaOptions, LoadError};
use super::memory::{self, NoRoom};
use super::scheduler::{InvalidConfig, SchedulerConfig};
use super::service::{BuiltIn, StartError};
use super::tiers::TierOptions;
use super::tiers::mover::staging_bytes;
use crate::artifacts::{ArtifactError, Artifacts};
use crate::engine::EngineInfo;

/// Sizes of an engine.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// What computes.
    pub compute: Compute,
    /// Threads that compute; one per core the process may use when absent.
    pub threads: Option<NonZeroUsize>,
    /// Tokens per KV block: 16, 32 or 64.
    pub block_size: u32,
    /// KV blocks in the arena.
    pub total_blocks: usize,
    /// Most sequences in one step.
    pub max_num_seqs: usize,
    /// Most tokens in one step.
    pub max_num_batched_tokens: usize,
    /// Most requests that wait for their first step; those after them are refused as overload.
    pub max_waiting: usize,
    /// What is kept below the arena.
    pub tiers: TierOptions,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            compute: Compute::Cpu,
            threads: None,
            block_size: 16,
            total_blocks: 4096,
            max_num_seqs: 32,
            max_num_batched_tokens: 512,
            max_waiting: 1024,
            tiers: TierOptions::default(),
        }
    }
}

/// What a model card says of the model itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// The name inside the file.
    pub name: Option<String>,
    /// Most tokens of prompt and answer together, as served: no more than the arena holds.
    pub context_length: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Bytes of one KV block.
    pub block_bytes: usize,
}

/// Why an engine cannot be opened; each is one line for the person who chose the model or the sizes.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file, or a model of a kind that we do not compute.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// What is to compute.
    #[error(transparent)]
    NotBuilt(#[from] NotBuilt),
    /// The device that is to compute.
    #[cfg(feature = "candle")]
    #[error(transparent)]
    Candle(#[from] CandleError),
    /// The arena.
    #[error(transparent)]
    Memory(#[from] NoRoom),
    /// The tokenizer.
    #[error(transparent)]
    Artifacts(#[from] ArtifactError),
    /// The sizes, or the thread.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The tokenizer has tokens that the model has no embedding for.
    #[error("the tokenizer has {tokens} tokens, but the model only {vocab}")]
    Vocabulary {
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Rows of the embedding.
        vocab: usize,
    },
}

/// Checks that the arenas of so many engines of these sizes fit into memory beside each other. Reads the file's head only.
pub fn fits(path: &Path, options: &OpenOptions, engines: usize) -> Result<(), OpenError> {
    room(&Gguf::open(path).map_err(LoadError::from)?, options, engines)
}

fn room(gguf: &Gguf, options: &OpenOptions, engines: usize) -> Result<(), OpenError> {
    let shape = Config::read(gguf)?.kv_shape(options.block_size as usize);
    let block_bytes = shape.block_bytes();
    let beside = options.tiers.host_bytes.saturating_add(staging_bytes(&options.tiers, block_bytes));
    Ok(memory::check(block_bytes, options.total_blocks, engines, beside)?)
}

/// Opens a model file, makes its artifacts, and starts the engine.
pub fn open(path: &Path, options: OpenOptions) -> Result<(BuiltIn, Artifacts, ModelFacts), OpenError> {
    let gguf = Gguf::open(path).map_err(LoadError::from)?;
    room(&gguf, &options, 1)?;
    let artifacts = Artifacts::from_gguf(&gguf)?;
    let block_size =
        BlockSize::new(options.block_size).ok_or_else(|| StartError::from(InvalidConfig::TooSmall("block_size", 1)))?;
    let model = Config::read(&gguf)?;
    let vocab = model.vocab;
    if artifacts.token_bytes.len() > vocab {
        return Err(OpenError::Vocabulary { tokens: artifacts.token_bytes.len(), vocab });
    }
    let engine = EngineInfo {
        block_size,
        total_blocks: options.total_blocks,
        max_num_seqs: options.max_num_seqs,
        max_num_batched_tokens: options.max_num_batched_tokens,
        context_length: model.context_length,
    };
    let config = SchedulerConfig { engine, max_waiting: options.max_waiting }.validated().map_err(StartError::from)?;
    let facts = ModelFacts {
        name: gguf.get::<&str>("general.name").map_err(LoadError::from)?.map(str::to_owned),
        context_length: config.engine.context_length,
        vocab,
        block_bytes: model.kv_shape(block_size.get()).block_bytes(),
    };
    let start = Start { config, artifacts: &artifacts, tiers: &options.tiers };
    let engine = start.on(&gguf, &options)?;
    Ok((engine, artifacts, facts))
}

/// An engine that wants only what computes.
struct Start<'a> {
    config: SchedulerConfig,
    artifacts: &'a Artifacts,
    tiers: &'a TierOptions,
}

impl Start<'_> {
    fn on(self, gguf: &Gguf, options: &OpenOptions) -> Result<BuiltIn, OpenError> {
        options.compute.check()?;
        let (block_size, total_blocks) = (options.block_size as usize, options.total_blocks);
        #[cfg(feature = "candle")]
        let candle = |device| {
            let OpenOptions { max_num_seqs, max_num_batched_tokens, .. } = *options;
            let sizes = CandleOptions { device, block_size, total_blocks, max_num_seqs, max_num_batched_tokens };
            CandleLlama::from_gguf(gguf, sizes)
        };
        match options.compute {
            #[cfg(feature = "candle")]
            Compute::CandleCpu => self.with(candle(CandleDevice::Cpu)?),
            #[cfg(feature = "candle")]
            Compute::Cuda(ordinal) => self.with(candle(CandleDevice::Cuda(ordinal))?),
            _ => {
                let threads = options.threads.or_else(|| std::thread::available_parallelism().ok());
                let threads = threads.map_or(1, NonZeroUsize::get);
                self.with(Llama::from_gguf(gguf, LlamaOptions { threads, block_size, total_blocks })?)
            }
        }
    }

    fn with(self, model: impl Forward + 'static) -> Result<BuiltIn, OpenError> {
        Ok(BuiltIn::start_with_tiers(model, self.config, self.artifacts.vocabulary(), self.tiers)?)
    }
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;
    use std::time::{Duration, Instant};

    use integration_tests::model;
    use protocol::metadata::artifact;
    use protocol::request_plane::{FinishReason, Generate, Stop};
    use tokenizers::Tokenizer;

    use super::*;
    use crate::engine::{Engine, EngineOutput, Finish};

    async fn answer(engine: &BuiltIn, request: Generate) -> (Vec<u32>, Finish) {
        let mut outputs = engine.submit(request).expect("room");
        let mut tokens = Vec::new();
        loop {
            let next = tokio::time::timeout(Duration::from_secs(120), outputs.recv());
            match next.await.expect("a token in time").expect("outputs end with Finished") {
                EngineOutput::First { token, .. } | EngineOutput::Token { token, .. } => tokens.push(token),
                EngineOutput::Finished(finish) => return (tokens, finish),
                other => panic!("{other:?}"),
            }
        }
    }

    #[tokio::test]
    async fn the_default_model_answers_and_a_second_turn_reuses_the_first() {
        let options = OpenOptions { total_blocks: 64, ..OpenOptions::default() };
        let (engine, artifacts, facts) = open(&model::path(), options).expect("opens");
        assert_eq!((facts.vocab, facts.context_length), (49152, 64 * 16));
        let json = std::str::from_utf8(&artifacts.files[artifact::TOKENIZER]).expect("UTF-8");
        let tokenizer = Tokenizer::from_str(json).expect("a tokenizer.json");
        let mut prompt = tokenizer
            .encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n", false)
            .expect("any text can be encoded")
            .get_ids()
            .to_vec();
        let request = |token_ids: &[u32]| {
            let stop = Stop { max_tokens: 24, ..Default::default() };
            Generate { token_ids: token_ids.to_vec(), stop: Some(stop), ..Default::default() }
        };
        let (tokens, finish) = answer(&engine, request(&prompt)).await;
        let text = tokenizer.decode(&tokens, true).expect("known tokens");
        assert!(text.contains("Paris"), "{text:?}");
        assert_eq!((finish.reason, finish.reused_tokens), (FinishReason::Eos, 0));
        assert!(!tokens.contains(&2), "the end token is not delivered");

        let (again, reused) = answer(&engine, request(&prompt)).await;
        assert_eq!(again, tokens, "a reused prefix changes nothing");
        assert_eq!(reused.reused_tokens, (prompt.len() - 1) / 16 * 16);

        let computed = prompt.len() + tokens.len();
        prompt.extend(&tokens);
        prompt
            .extend(tokenizer.encode("<|im_end|>\n<|im_start|>user\nAnd of Italy?", false).expect("encodes").get_ids());
        let (_, second) = answer(&engine, request(&prompt)).await;
        assert_eq!(second.reused_tokens, computed / 16 * 16, "prompt and answer of the first turn");
        assert_eq!(engine.load().active_blocks, 0);
    }

    #[tokio::test]
    async fn a_client_that_leaves_in_a_long_step_is_rid_of_within_a_second() {
        // On one thread a step of 512 tokens takes two seconds.
        let (options, threads) = (OpenOptions { total_blocks: 64, ..OpenOptions::default() }, NonZeroUsize::new(1));
        let (engine, ..) = open(&model::path(), OpenOptions { threads, ..options }).expect("opens");
        let stop = Some(Stop { max_tokens: 2, ..Default::default() });
        let prompt = (0..900).map(|n| 1000 + n * 7 % 4000).collect();
        let outputs = engine.submit(Generate { token_ids: prompt, stop, ..Default::default() }).expect("room");
        let until = async |what: &str, condition: &dyn Fn() -> bool| {
            let mut look = tokio::time::interval(Duration::from_millis(2));
            let wait = async {
                while !condition() {
                    look.tick().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap_or_else(|_| panic!("{what}"));
        };
        until("it is being computed", &|| engine.load().running == 1).await;
        drop(outputs);
        let left = Instant::now();
        until("its blocks are free", &|| engine.load().active_blocks == 0 && engine.load().running == 0).await;
        assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
    }

    #[test]
    fn a_broken_file_and_impossible_sizes_are_one_line() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let broken = dir.path().join("broken.gguf");
        std::fs::write(&broken, b"GGUF?").expect("writable");
        let message = |path: &Path, options| match open(path, options) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("opened"),
        };
        for path in [broken.clone(), dir.path().join("missing.gguf")] {
            let text = message(&path, OpenOptions::default());
            assert!(text.contains(&path.display().to_string()) && !text.contains('\n'), "{text}");
        }
        let few = OpenOptions { max_num_batched_tokens: 1, total_blocks: 4, ..OpenOptions::default() };
        assert!(message(&model::path(), few).contains("max_num_batched_tokens"));
        let many = OpenOptions { total_blocks: 100_000_000, ..OpenOptions::default() };
        let text = message(&model::path(), many);
        assert!(text.contains("--kv-blocks 100000000 needs 36864.0 GB (368640 bytes a block)"), "{text}");
    }
}
