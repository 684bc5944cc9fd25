//! Waiting for a condition, never for a time.

use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

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
