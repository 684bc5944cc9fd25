//! `armature worker`: a model, an engine on it, and the agent around the engine; of mockers any number; or a server beside it.

mod remote;

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use worker_agent::agent::{self, AgentError, Listeners, ModelInfo};
use worker_agent::artifacts::Artifacts;
use worker_agent::config::{Config, EngineKind};
use worker_agent::engine::builtin::gguf::Gguf;
use worker_agent::engine::builtin::open::{OpenOptions, open};
use worker_agent::engine::builtin::service::BuiltIn;
use worker_agent::engine::mocker::MockedModel;
use worker_agent::registration::RegistrationError;
use worker_agent::source::{Cache, ModelSource, Progress, SourceError, obtain};

use crate::flags::WorkerArgs;
use crate::outcome::{Failure, Outcome};

/// Runs a worker until `shutdown`.
pub async fn run(args: WorkerArgs, shutdown: CancellationToken) -> Outcome {
    args.agent.settings().map_err(Failure::settings)?;
    if args.agent.engine.server().is_some() {
        return remote::run(args.agent, shutdown).await;
    }
    let source: ModelSource = args.model.parse().map_err(Failure::settings)?;
    let cache = Cache::from_env();
    let file = tokio::select! {
        file = obtain(&source, &cache, &log_progress) => file.map_err(source_failure)?,
        () = shutdown.cancelled() => return Ok(()),
    };
    if args.agent.engine == EngineKind::Mocker {
        return mockers(args.agent, file, shutdown).await;
    }
    built_in(args.agent, file, args.with_parent.is_some(), shutdown).await
}

/// One engine; tells a parent that reads its output where its metrics are.
async fn built_in(config: Config, file: PathBuf, tell: bool, shutdown: CancellationToken) -> Outcome {
    let (options, path) = (options(&config)?, file.clone());
    let opened = tokio::task::spawn_blocking(move || open(&path, options)).await?;
    let (engine, artifacts, facts) = opened.map_err(|error| refused(&file, &error))?;
    let model = model_info(&config, artifacts, facts.name, &file);
    let listeners = listen(&config).await?;
    if tell {
        // A parent that has gone takes us with it.
        let _ = writeln!(std::io::stdout(), "http://{}/metrics", listeners.admin.local_addr()?);
    }
    serve(config, engine, model, listeners, shutdown).await
}

/// All mockers of this process; when one fails, the others end too.
async fn mockers(config: Config, file: PathBuf, shutdown: CancellationToken) -> Outcome {
    let configs = config.mockers().map_err(Failure::settings)?;
    let (mocker, path) = (config.mocker.options(), file.clone());
    let read = tokio::task::spawn_blocking(move || MockedModel::read(&path, mocker)).await?;
    let mocked = read.map_err(|error| refused(&file, &error))?;
    let model = model_info(&config, mocked.artifacts.clone(), mocked.name.clone(), &file);
    tracing::warn!(workers = configs.len(), "a mocker computes nothing: its answers are random words");
    let (stop, mut workers) = (shutdown.child_token(), JoinSet::new());
    for config in configs {
        let engine = mocked.start(options(&config)?).map_err(Failure::settings)?;
        let (model, stop) = (model.clone(), stop.clone());
        workers.spawn(async move {
            let listeners = listen(&config).await?;
            serve(config, engine, model, listeners, stop).await
        });
    }
    let mut outcome = Ok(());
    while let Some(ended) = workers.join_next().await {
        stop.cancel();
        outcome = outcome.and(ended.map_err(Failure::from).and_then(|ended| ended));
    }
    outcome
}

fn model_info(config: &Config, artifacts: Artifacts, name: Option<String>, file: &Path) -> ModelInfo {
    ModelInfo {
        name: config.model_name.clone().or(name).unwrap_or_else(|| stem(file)),
        files: artifacts.files,
        eos_token_ids: artifacts.eos_token_ids,
        bos_token_id: artifacts.bos_token_id,
    }
}

/// Binds the agent's ports.
async fn listen(config: &Config) -> Result<Listeners, Failure> {
    let settings = config.settings().map_err(Failure::settings)?;
    Listeners::bind(&settings).await.map_err(|error| match error {
        AgentError::PortInUse { .. } => Failure::settings(error),
        error => error.into(),
    })
}

/// Runs an agent around the engine until `shutdown`; then stops the engine.
async fn serve(
    config: Config,
    engine: BuiltIn,
    model: ModelInfo,
    listeners: Listeners,
    shutdown: CancellationToken,
) -> Outcome {
    let engine = Arc::new(engine);
    let ended = agent::run(config, engine.clone(), model, listeners, shutdown).await;
    tokio::task::spawn_blocking(move || engine.shutdown()).await?;
    ended.map_err(agent_failure)
}

/// A directory that is none is a setting; the rest is not.
fn agent_failure(error: AgentError) -> Failure {
    match error {
        AgentError::Registration(RegistrationError::NotADirectory(_)) => Failure::settings(error),
        error => error.into(),
    }
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
pub fn refused(file: &Path, error: &dyn std::fmt::Display) -> Failure {
    let (text, path) = (error.to_string(), file.display().to_string());
    Failure::Settings(if text.contains(&path) { text } else { format!("{path}: {text}") })
}

fn options(config: &Config) -> Result<OpenOptions, Failure> {
    Ok(OpenOptions {
        compute: config.device,
        threads: config.threads.and_then(NonZeroUsize::new),
        block_size: config.block_size,
        total_blocks: config.kv_blocks,
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        tiers: config.tiers().map_err(Failure::settings)?,
        ..OpenOptions::default()
    })
}

fn stem(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// A pod has no terminal: one line at the start and one at the end of a download.
pub fn log_progress(progress: Progress<'_>) {
    if progress.done == 0 || Some(progress.done) == progress.total {
        tracing::info!(file = progress.file, done = progress.done, total = progress.total, "downloading the model");
    }
}
