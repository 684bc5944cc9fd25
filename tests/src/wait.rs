//! Waiting for a condition, never for a time.

use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

/// Longest wait of [`within`] for anything that should come.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Waits for `future`, at most [`DEADLINE`]; panics with what was awaited.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("{what}: nothing within {DEADLINE:?}"))
}

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// Looks until `look` is `Ok`; panics with what was awaited and the last look's error when `limit` is over.
pub async fn until<T, E: Debug, F: Future<Output = Result<T, E>>>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> F,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        match look().await {
            Ok(value) => return value,
            Err(error) if Instant::now() > deadline => panic!("{what}: not within {} s: {error:?}", limit.as_secs()),
            Err(_) => tokio::time::sleep(INTERVAL).await,
        }
    }
}
