//! A worker whose engine has no model: every token is ready the moment a request arrives.
//!
//! Everything around the engine is the real agent (request plane, events, registration), and the engine reports real blocks,
//! so that a router in KV mode has what it has with any other worker.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use kv_hashing::{BlockSize, HashSpace, sequence_hashes};
use kv_index::{EngineHash, KvEventData, StoredBlock, Tier};
use parking_lot::Mutex;
use protocol::request_plane::{FinishReason, Generate};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;
use worker_agent::agent::{self, Listeners, ModelInfo};
use worker_agent::artifacts::Artifacts;
use worker_agent::engine::builtin::gguf::Gguf;
use worker_agent::engine::{ArenaEvent, Engine, EngineInfo, EngineLoad, EngineOutput, Finish, SubmitError};

/// Flags of the worker.
#[derive(clap::Args)]
pub struct Options {
    /// Where the tokenizer comes from.
    #[arg(long, env = "ARMATURE_MODEL")]
    model: PathBuf,
    /// The agent.
    #[command(flatten)]
    agent: worker_agent::config::Config,
}

/// Blocks before the engine forgets everything and starts again: 2^16 blocks of 16 tokens.
const CAPACITY: usize = 1 << 16;
/// A token of plain text in any vocabulary of usual size.
const TOKEN: u32 = 1000;

/// Serves until the process is killed.
pub async fn serve(options: Options) -> anyhow::Result<()> {
    let settings = options.agent.settings()?;
    let artifacts = Artifacts::from_gguf(&Gguf::open(&options.model)?)?;
    let model = ModelInfo {
        name: options.agent.model_name.clone().context("--model-name is missing")?,
        files: artifacts.files,
        eos_token_ids: artifacts.eos_token_ids,
        bos_token_id: artifacts.bos_token_id,
    };
    let block_size = BlockSize::new(options.agent.block_size).context("--block-size is 0")?;
    let listeners = Listeners::bind(&settings).await?;
    Ok(agent::run(options.agent, Arc::new(Instant::new(block_size)), model, listeners, CancellationToken::new())
        .await?)
}

/// The engine.
struct Instant {
    info: EngineInfo,
    known: Mutex<HashSet<u64>>,
    events: UnboundedSender<ArenaEvent>,
    receiver: Mutex<Option<UnboundedReceiver<ArenaEvent>>>,
}

impl Instant {
    fn new(block_size: BlockSize) -> Self {
        let (events, receiver) = unbounded_channel();
        let info = EngineInfo {
            block_size,
            total_blocks: CAPACITY,
            max_num_seqs: 4096,
            max_num_batched_tokens: 1 << 20,
            context_length: 1 << 20,
        };
        Self { info, known: Mutex::default(), events, receiver: Mutex::new(Some(receiver)) }
    }

    /// Stores the prompt's blocks; returns how many leading ones were there, and how many there are.
    fn store(&self, tokens: &[u32]) -> (usize, usize) {
        let local = HashSpace::default().blocks(tokens, self.info.block_size);
        let sequence = sequence_hashes(&local);
        let mut known = self.known.lock();
        if known.len() + sequence.len() > CAPACITY {
            known.clear();
            self.publish(KvEventData::Cleared);
        }
        let reused = sequence.iter().take_while(|hash| known.contains(&hash.0)).count();
        known.extend(sequence[reused..].iter().map(|hash| hash.0));
        let parent = reused.checked_sub(1).map(|last| EngineHash(sequence[last].0));
        let fresh = sequence.iter().zip(&local).skip(reused);
        let blocks: Vec<_> = fresh.map(|(hash, &local)| StoredBlock { engine: EngineHash(hash.0), local }).collect();
        if !blocks.is_empty() {
            self.publish(KvEventData::Stored { parent, blocks });
        }
        (reused, local.len())
    }

    fn publish(&self, data: KvEventData) {
        // Without a publisher nobody wants to know.
        let _ = self.events.send(ArenaEvent { tier: Tier::Device, data });
    }
}

impl Engine for Instant {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn submit(&self, request: Generate) -> Result<UnboundedReceiver<EngineOutput>, SubmitError> {
        let (reused_blocks, prompt_blocks) = self.store(&request.token_ids);
        let tokens = request.stop.as_ref().map_or(1, |stop| stop.max_tokens.max(1));
        let first = EngineOutput::First {
            token: TOKEN,
            logprobs: None,
            reused_blocks,
            prompt_blocks,
            prompt_logprobs: Vec::new(),
        };
        let rest = (1..tokens).map(|number| EngineOutput::Token { token: TOKEN + number % 1000, logprobs: None });
        let finished = EngineOutput::Finished(Finish {
            reason: FinishReason::Length,
            prompt_tokens: request.token_ids.len(),
            completion_tokens: tokens as usize,
            reused_tokens: reused_blocks * self.info.block_size.get(),
            stop_string: None,
            stop_token: None,
        });
        let (sender, receiver) = unbounded_channel();
        for output in std::iter::once(first).chain(rest).chain([finished]) {
            // The receiver is in our hands.
            let _ = sender.send(output);
        }
        Ok(receiver)
    }

    fn load(&self) -> EngineLoad {
        EngineLoad { used_blocks: self.known.lock().len(), ..EngineLoad::default() }
    }

    fn take_events(&self) -> Option<UnboundedReceiver<ArenaEvent>> {
        self.receiver.lock().take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_request_reuses_the_first_ones_blocks() {
        let engine = Instant::new(BlockSize::new(16).expect("not zero"));
        let mut events = engine.take_events().expect("the first time");
        let tokens: Vec<u32> = (0..40).collect();
        assert_eq!((engine.store(&tokens), engine.store(&tokens)), ((0, 2), (2, 2)));
        assert_eq!(engine.store(&(0..64).collect::<Vec<_>>()), (2, 4));
        let mut stored = Vec::new();
        while let Ok(event) = events.try_recv() {
            let KvEventData::Stored { parent, blocks } = event.data else { panic!("{event:?}") };
            stored.push((parent.is_some(), blocks.len()));
        }
        assert_eq!(stored, [(false, 2), (true, 2)]);
    }
}
