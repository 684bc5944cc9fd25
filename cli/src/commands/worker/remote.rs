//! A worker beside a server that is its engine: each life of the server is a life of the worker, with its own epoch and registration.

use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use worker_agent::admin;
use worker_agent::agent::{self, ModelInfo};
use worker_agent::artifacts::directory;
use worker_agent::config::{Config, RemoteSettings};
use worker_agent::engine::remote::metrics::RemoteMetrics;
use worker_agent::engine::remote::{ConnectError, Loss, wait, wait_until_it_computes};

use super::{agent_failure, listen};
use crate::outcome::{Failure, Outcome};

/// Runs until `shutdown`; while the server is away, there is no worker.
pub(super) async fn run(config: Config, shutdown: CancellationToken) -> Outcome {
    let settings = config.remote_settings().map_err(Failure::settings)?;
    let metrics = RemoteMetrics::default();
    let mut before = None;
    while let Some(loss) = live(&config, &settings, &metrics, before.as_ref(), &shutdown).await? {
        tracing::warn!(url = settings.url, "the worker has left; waiting for the engine to come back");
        before = Some(loss);
    }
    Ok(())
}

/// One life after another that ended for the reason `before`; its own end, unless it was the last.
async fn live(
    config: &Config,
    settings: &RemoteSettings,
    metrics: &RemoteMetrics,
    before: Option<&Loss>,
    shutdown: &CancellationToken,
) -> Result<Option<Loss>, Failure> {
    let probes = Probes::answer(config).await?;
    let ready = async {
        match before {
            Some(Loss::Hung { .. }) => wait_until_it_computes(settings).await,
            Some(Loss::Gone(_)) | None => wait(settings).await,
        }
    };
    let ready = tokio::select! {
        ready = ready => ready,
        () = shutdown.cancelled() => return Ok(None),
    };
    let ready = ready.map_err(|error| match error {
        ConnectError::Untold { .. } | ConnectError::Rank { .. } => Failure::settings(error),
        error => error.into(),
    })?;
    // Only now: it may be the server that has put the files there.
    let path = settings.model_path.clone();
    let artifacts = tokio::task::spawn_blocking(move || directory::read(&path)).await?.map_err(Failure::settings)?;
    let model = ModelInfo {
        name: config.model_name.clone().unwrap_or_else(|| ready.model.clone()),
        files: artifacts.files,
        eos_token_ids: artifacts.eos_token_ids.clone(),
        bos_token_id: artifacts.bos_token_id,
    };
    probes.end().await;
    let engine = Arc::new(ready.start(settings, artifacts.eos_token_ids, metrics.clone()));
    let listeners = listen(config).await?;
    let ended = agent::run(config.clone(), engine.clone(), model, listeners, shutdown.clone()).await;
    match (ended, engine.lost()) {
        // The agent has drained: whatever ended it, the engine is gone.
        (Err(_), Some(loss)) if !shutdown.is_cancelled() => Ok(Some(loss.clone())),
        (ended, _) => ended.map(|()| None).map_err(agent_failure),
    }
}

/// Tells probes that the process lives while there is no worker.
struct Probes(JoinHandle<()>);

impl Probes {
    async fn answer(config: &Config) -> Result<Self, Failure> {
        // Bound with all the others, so that an address that is taken is told at once.
        let admin = listen(config).await?.admin;
        Ok(Self(tokio::spawn(admin::serve_waiting(admin, Arc::default()))))
    }

    /// Gives the port back.
    async fn end(mut self) {
        self.0.abort();
        // Cancelled, or over by itself: either way it holds nothing any more.
        let _ = (&mut self.0).await;
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.0.abort();
    }
}
