//! The router's side of the request plane: one connection to each worker, kept up by a task of its own.
//!
//! The task dials at once and again after each loss, so that requests find either an open connection or a fresh reason why
//! there is none. Many streams share the connection; a slow reader of one never holds up the others.

mod link;
mod outbox;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use protocol::request_plane::ClientFrame;
use tokio::sync::{Notify, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::discovery::Identity;
pub(crate) use link::{Kept, Link, Stream};

/// First and longest pause between two dials of a worker that does not answer.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How often a connection that is no longer wanted is looked at for open streams.
const RETIRING: Duration = Duration::from_millis(250);

/// A connection that lived this long was a good one: the next dial starts with the shortest pause.
const GOOD: Duration = Duration::from_secs(5);

/// Whom to connect to, and as whom.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// `host:port`.
    pub(crate) address: String,
    /// The life that must answer there.
    pub(crate) identity: Identity,
    /// Who calls.
    pub(crate) caller: Arc<Caller>,
}

/// This router, to all its connections.
#[derive(Debug)]
pub(crate) struct Caller {
    /// As workers know it.
    id: String,
    /// Streams on all connections.
    streams: AtomicUsize,
}

impl Caller {
    pub(crate) fn new(id: String) -> Arc<Self> {
        Arc::new(Self { id, streams: AtomicUsize::new(0) })
    }

    /// Where more than one stream is open, waits until this thread has no other task that is ready, or has run 61 of them: they
    /// may have frames, too, and one system call writes them all. A stream that is alone would wait for nothing, and the pause
    /// wake another thread to look for work.
    async fn gather(&self) {
        if self.streams.load(Ordering::Relaxed) > 1 {
            yield_now().await;
        }
    }
}

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("no answer in {0:?}")]
    Deadline(Duration),
    #[error("the address belongs to another worker now")]
    WrongWorker,
    #[error("{0}")]
    Refused(String),
    #[error("unexpected answer to the greeting")]
    Protocol,
}

/// Why a stream could not be opened. Another worker may do.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("{0}")]
    Unreachable(Arc<str>),
    #[error("no connection in {0:?}")]
    Deadline(Duration),
    #[error("the worker does not read its requests")]
    Congested,
}

#[derive(Clone)]
enum State {
    Dialing,
    Up(Arc<Link>),
    Down(Arc<str>),
}

/// What the connection tells the rest of the router.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// The worker said that it drains.
    pub(crate) draining: AtomicBool,
    /// There was a connection.
    connected: AtomicBool,
}

/// The connection to one worker.
pub(crate) struct Client {
    state: watch::Receiver<State>,
    deadline: Duration,
    signals: Arc<Signals>,
    changed: Arc<Notify>,
}

impl Client {
    /// Starts the connection's task. After `stop` it dials no more, and closes the connection once its streams have ended: a
    /// worker that has left discovery may still be finishing what it has. `changed` is notified whenever the worker becomes
    /// reachable, unreachable or draining.
    pub(crate) fn start(target: Target, deadline: Duration, changed: Arc<Notify>, stop: CancellationToken) -> Self {
        let (set, state) = watch::channel(State::Dialing);
        let signals = Arc::<Signals>::default();
        tokio::spawn(keep_up(target, deadline, signals.clone(), changed.clone(), set, stop));
        Self { state, deadline, signals, changed }
    }

    /// Whether the connection was lost or the last dial failed. Cost: one uncontended lock.
    pub(crate) fn is_down(&self) -> bool {
        matches!(*self.state.borrow(), State::Down(_))
    }

    /// Whether there was a connection at any time.
    pub(crate) fn was_up(&self) -> bool {
        self.signals.connected.load(Ordering::Relaxed)
    }

    /// Whether the worker said that it takes nothing new.
    pub(crate) fn is_draining(&self) -> bool {
        self.signals.draining.load(Ordering::Relaxed)
    }

    /// Remembers that the worker refused a request because it drains, or says so in its heartbeats.
    pub(crate) fn set_draining(&self) {
        if !self.signals.draining.swap(true, Ordering::Relaxed) {
            self.changed.notify_one();
        }
    }

    /// Opens a stream with its first frame. Waits for the first dial; while a lost connection is being made anew it fails at
    /// once, so that the request goes elsewhere.
    pub(crate) async fn open(&self, frame: &mut ClientFrame) -> Result<Stream, OpenError> {
        let mut state = self.state.clone();
        let settled = state.wait_for(|state| !matches!(state, State::Dialing));
        let state = match timeout(self.deadline, settled).await {
            Ok(Ok(state)) => state.clone(),
            Ok(Err(_)) => return Err(OpenError::Unreachable("the worker is gone".into())),
            Err(_) => return Err(OpenError::Deadline(self.deadline)),
        };
        match state {
            State::Up(link) => link.open(frame),
            State::Down(reason) => Err(OpenError::Unreachable(reason)),
            State::Dialing => Err(OpenError::Deadline(self.deadline)),
        }
    }
}

async fn keep_up(
    target: Target,
    deadline: Duration,
    signals: Arc<Signals>,
    changed: Arc<Notify>,
    state: watch::Sender<State>,
    stop: CancellationToken,
) {
    let mut pause = BACKOFF.0;
    while !stop.is_cancelled() {
        let dialed = match timeout(deadline, Link::connect(&target)).await {
            Ok(dialed) => dialed,
            Err(_) => Err(ConnectError::Deadline(deadline)),
        };
        match dialed {
            Ok((link, io)) => {
                let since = Instant::now();
                signals.connected.store(true, Ordering::Relaxed);
                state.send_replace(State::Up(link.clone()));
                changed.notify_one();
                let reason = tokio::select! {
                    reason = link.drive(io, &signals, &changed) => reason,
                    () = retired(&stop, &link) => "the worker has left".to_owned(),
                };
                link.close(&reason);
                tracing::info!(worker = %target.address, reason, "connection to a worker ended");
                if since.elapsed() > GOOD {
                    pause = BACKOFF.0;
                }
                // Down and not dialing while it pauses: requests go elsewhere at once.
                state.send_replace(State::Down(reason.into()));
                changed.notify_one();
            }
            Err(error) => {
                let was_down = matches!(*state.borrow(), State::Down(_));
                if !was_down {
                    tracing::info!(worker = %target.address, %error, "cannot connect to a worker");
                }
                state.send_replace(State::Down(error.to_string().into()));
                if !was_down {
                    changed.notify_one();
                }
            }
        }
        if stop.run_until_cancelled(sleep(pause)).await.is_none() {
            return;
        }
        pause = (pause * 2).min(BACKOFF.1);
    }
}

/// Waits until the connection is no longer wanted and its streams have ended.
async fn retired(stop: &CancellationToken, link: &Link) {
    stop.cancelled().await;
    while !link.is_idle() {
        sleep(RETIRING).await;
    }
}
