//! From the process's signals to one token: SIGTERM or Ctrl-C asks for a drain, a second one ends the process at once.

use std::future::Future;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::outcome::Outcome;

/// Runs a service on a fresh runtime until it ends by itself or has drained.
pub fn serve<F: Future<Output = Outcome>>(service: impl FnOnce(CancellationToken) -> F) -> Outcome {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let shutdown = CancellationToken::new();
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let asked = shutdown.clone();
        tokio::spawn(async move {
            let mut next = async || tokio::select! { _ = terminate.recv() => 143, _ = interrupt.recv() => 130 };
            next().await;
            tracing::info!("draining; a second signal ends at once");
            asked.cancel();
            std::process::exit(next().await);
        });
        service(shutdown).await
    });
    // What still runs is a computation that cannot be interrupted, and nobody waits for its result.
    runtime.shutdown_background();
    outcome
}
