//! `armature worker`: a model, the built-in engine on it, and the agent around the engine.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use worker_agent::agent::{self, AgentError, Listeners, ModelInfo};
use worker_agent::config::Config;
use worker_agent::engine::builtin::gguf::Gguf;
use worker_agent::engine::builtin::open::{OpenOptions, open};
use worker_agent::source::{Cache, ModelSource, Progress, SourceError, obtain};

use crate::flags::WorkerArgs;
use crate::outcome::{Failure, Outcome};

/// Runs a worker until `shutdown`.
pub async fn run(args: WorkerArgs, shutdown: CancellationToken) -> Outcome {
    let settings = args.agent.settings().map_err(Failure::settings)?;
    let source: ModelSource = args.model.parse().map_err(Failure::settings)?;
    let cache = Cache::from_env();
    let file = tokio::select! {
        file = obtain(&source, &cache, &log_progress) => file.map_err(source_failure)?,
        () = shutdown.cancelled() => return Ok(()),
    };
    let (options, path) = (options(&args.agent), file.clone());
    let opened = tokio::task::spawn_blocking(move || open(&path, options)).await?;
    let (engine, artifacts, facts) = opened.map_err(|error| refused(&file, &error))?;
    let engine = Arc::new(engine);
    let model = ModelInfo {
        name: args.agent.model_name.clone().or(facts.name).unwrap_or_else(|| stem(&file)),
        files: artifacts.files,
        eos_token_ids: artifacts.eos_token_ids,
        bos_token_id: artifacts.bos_token_id,
    };
    let listeners = Listeners::bind(&settings).await.map_err(|error| match error {
        AgentError::PortInUse { .. } => Failure::settings(error),
        error => error.into(),
    })?;
    let ended = agent::run(args.agent, engine.clone(), model, listeners, shutdown).await;
    tokio::task::spawn_blocking(move || engine.shutdown()).await?;
    Ok(ended?)
}

/// A source that cannot work is a setting; a download that broke is not.
pub fn source_failure(error: SourceError) -> Failure {
    match error {
        SourceError::Network { .. }
        | SourceError::Damaged { .. }
        | SourceError::Busy(_)
        | SourceError::Package { .. } => error.into(),
        error => Failure::settings(error),
    }
}

/// The model's own name, or the file's; reads only the file's head, and fails where that is no GGUF.
pub fn title(file: &Path) -> Result<String, Failure> {
    let gguf = Gguf::open(file).map_err(|error| refused(file, &error))?;
    let name = gguf.get::<&str>("general.name").map_err(|error| refused(file, &error))?;
    Ok(name.map_or_else(|| stem(file), str::to_owned))
}

/// One line that names the file.
fn refused(file: &Path, error: &dyn std::fmt::Display) -> Failure {
    let (text, path) = (error.to_string(), file.display().to_string());
    Failure::Settings(if text.contains(&path) { text } else { format!("{path}: {text}") })
}

fn options(config: &Config) -> OpenOptions {
    OpenOptions {
        threads: config.threads.and_then(NonZeroUsize::new),
        block_size: config.block_size,
        total_blocks: config.kv_blocks,
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        ..OpenOptions::default()
    }
}

fn stem(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// A pod has no terminal: one line at the start and one at the end of a download.
fn log_progress(progress: Progress<'_>) {
    if progress.done == 0 || Some(progress.done) == progress.total {
        tracing::info!(file = progress.file, done = progress.done, total = progress.total, "downloading the model");
    }
}
