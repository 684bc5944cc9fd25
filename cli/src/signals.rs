//! From the process's signals to one token: SIGTERM or Ctrl-C asks for a drain, a second one ends the process at once.

use std::future::Future;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::outcome::{Failure, Outcome};

/// Time to delete temporary files after the second signal.
const CLEAN_UP: Duration = Duration::from_secs(1);

/// Runs a service on a fresh runtime until it ends by itself or has drained.
pub fn serve<F: Future<Output = Outcome>>(service: impl FnOnce(CancellationToken) -> F) -> Outcome {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let shutdown = CancellationToken::new();
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let asked = shutdown.clone();
        let twice = tokio::spawn(async move {
            let mut next = async || tokio::select! { _ = terminate.recv() => 143, _ = interrupt.recv() => 130 };
            next().await;
            tracing::info!("draining; a second signal ends at once");
            asked.cancel();
            let code = next().await;
            // Whatever happens to compute or block where the service should be dropped.
            std::thread::spawn(move || {
                std::thread::sleep(CLEAN_UP);
                std::process::exit(code.into())
            });
            code
        });
        // A service that is dropped takes its temporary files with it, which `exit` would not.
        tokio::select! {
            outcome = service(shutdown) => outcome,
            Ok(code) = twice => Err(Failure::Said(code)),
        }
    });
    // What still runs is a computation that cannot be interrupted, and nobody waits for its result.
    runtime.shutdown_background();
    outcome
}
