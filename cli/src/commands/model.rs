//! `armature model`: a model's file on this machine, for whoever wants its path before anything runs.

use tokio_util::sync::CancellationToken;
use worker_agent::source::{Cache, ModelSource, obtain};

use super::worker::{log_progress, source_failure};
use crate::outcome::{Failure, Outcome};

/// Downloads the model if need be, and prints where it is.
pub async fn run(model: String, shutdown: CancellationToken) -> Outcome {
    let source: ModelSource = model.parse().map_err(Failure::settings)?;
    let cache = Cache::from_env();
    let file = tokio::select! {
        file = obtain(&source, &cache, &log_progress) => file.map_err(source_failure)?,
        () = shutdown.cancelled() => return Err(anyhow::anyhow!("interrupted").into()),
    };
    crate::reference::print(format!("{}\n", file.display()))
}
