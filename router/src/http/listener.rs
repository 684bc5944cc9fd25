//! Taking connections from the listener's queue, as many as there are file descriptors for.

use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Duration, Instant, sleep};

/// Descriptors kept for everything but clients: workers, peers, files. Of a small limit a quarter.
const RESERVED_FILES: u64 = 512;

/// Pause after a failed accept, which is mostly a lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// Failed accepts are logged no more often.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// Connections that may be open: `wanted`, or what the limit on open files leaves.
pub(super) fn connections(wanted: usize) -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let fitting = fitting(wanted, files);
    if fitting < wanted {
        tracing::warn!(
            wanted,
            fitting,
            files,
            "the limit on open files allows fewer connections than --max-connections"
        );
    }
    fitting.min(Semaphore::MAX_PERMITS)
}

fn fitting(wanted: usize, files: u64) -> usize {
    let left = files - RESERVED_FILES.min(files / 4);
    wanted.min(usize::try_from(left).unwrap_or(usize::MAX)).max(1)
}

/// A listener that tells of trouble once in a while.
pub(super) struct Listener {
    listener: TcpListener,
    failed: u64,
    said: Option<Instant>,
}

impl Listener {
    pub(super) fn new(listener: TcpListener) -> Listener {
        Listener { listener, failed: 0, said: None }
    }

    /// The next connection. Cancel safe.
    pub(super) async fn accept(&mut self) -> TcpStream {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "TCP_NODELAY cannot be set");
                    }
                    return stream;
                }
                Err(error) => {
                    self.failed += 1;
                    if self.said.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
                        self.said = Some(Instant::now());
                        tracing::warn!(%error, failed = self.failed, "accepting connections fails");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_for_the_rest() {
        for (wanted, files, expected) in
            [(16_384, 1024, 768), (16_384, 1 << 20, 16_384), (16_384, 16_384, 15_872), (5, u64::MAX, 5), (5, 0, 1)]
        {
            assert_eq!(fitting(wanted, files), expected);
        }
    }
}
