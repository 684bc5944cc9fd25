//! The sending thread: PUB and replay sockets, vLLM's layout.
//!
//! A published message has three parts: topic, sequence (u64 big endian), payload. A replay request is a sequence number;
//! the answer is every kept message from there on, and an end mark. The PUB socket never waits: of a subscriber that is
//! 100,000 messages behind it drops further ones, which that subscriber sees as a gap.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use zeromq::{PubSocket, RouterRecvHalf, RouterSendHalf, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::layout;
use super::outbox::Outbox;
use super::ring::Ring;

/// Longest time the thread may take to take over its sockets, which are bound already.
const START: Duration = Duration::from_secs(10);
/// Longest time that queued messages may take to reach their subscribers after a close.
const LINGER: Duration = Duration::from_secs(1);
/// Longest time one message of a replay may wait for a reader that has 100,000 of them waiting.
const REPLAY_SEND: Duration = Duration::from_secs(1);
/// Sequence number of the end mark of a replay: −1.
const REPLAY_END: u64 = u64::MAX;

/// What a sender is told.
pub(super) struct Settings {
    pub(super) topic: String,
    pub(super) dp_rank: u32,
    /// Messages kept for replay.
    pub(super) max_replay_events: usize,
}

/// Why there is no sender.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    /// Not an address to listen on.
    #[error("endpoint {0:?} is not of the form tcp://HOST:PORT (HOST may be *, PORT may be 0)")]
    Endpoint(String),
    /// Nothing can listen there.
    #[error("cannot bind {endpoint}: {source}")]
    Bind { endpoint: String, source: std::io::Error },
    /// The operating system gives no thread.
    #[error("cannot start the publisher's thread: {0}")]
    Thread(std::io::Error),
    /// The socket library failed.
    #[error("event socket: {0}")]
    Socket(String),
    /// The thread does not answer.
    #[error("the publisher's thread did not start within {} s", START.as_secs())]
    Silent,
}

/// A running sender.
pub(super) struct Sender {
    ended: Mutex<Receiver<()>>,
    endpoint: String,
    replay_endpoint: Option<String>,
}

impl Sender {
    /// Binds and starts; it ends when the outbox is closed and empty.
    pub(super) fn start(
        endpoint: &str,
        replay_endpoint: Option<&str>,
        settings: Settings,
        outbox: Arc<Outbox>,
    ) -> Result<Self, StartError> {
        let (events, endpoint) = bind(endpoint)?;
        let (replay, replay_endpoint) = replay_endpoint.map(bind).transpose()?.unzip();
        let (started, ready) = sync_channel(1);
        // Never written to: it closes when the thread ends, however it ends.
        let (alive, ended) = sync_channel(0);
        let body = move || {
            let _alive: SyncSender<()> = alive;
            serve(events, replay, settings, &outbox, &started);
            outbox.close();
        };
        std::thread::Builder::new().name("kv-publisher".into()).spawn(body).map_err(StartError::Thread)?;
        ready.recv_timeout(START).map_err(|_| StartError::Silent)??;
        Ok(Self { ended: Mutex::new(ended), endpoint, replay_endpoint })
    }

    /// The address that was bound.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The address that was bound for replay.
    pub(super) fn replay_endpoint(&self) -> Option<&str> {
        self.replay_endpoint.as_deref()
    }

    /// Waits until the thread has ended. The outbox is closed before.
    pub(super) fn finish(self) {
        // What is left after twice the time that the thread gives itself is not worth more waiting.
        let _ = self.ended.lock().recv_timeout(LINGER * 2);
    }
}

fn bind(endpoint: &str) -> Result<(TcpListener, String), StartError> {
    let malformed = || StartError::Endpoint(endpoint.to_owned());
    let (host, port) = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(malformed)?;
    let port: u16 = port.parse().map_err(|_| malformed())?;
    let host = match host {
        "" => return Err(malformed()),
        "*" => "0.0.0.0",
        host => host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host),
    };
    let bound = TcpListener::bind((host, port)).and_then(|listener| {
        let address = listener.local_addr()?;
        Ok((listener, format!("tcp://{address}")))
    });
    bound.map_err(|source| StartError::Bind { endpoint: endpoint.to_owned(), source })
}

/// The thread's life.
fn serve(
    events: TcpListener,
    replay: Option<TcpListener>,
    settings: Settings,
    outbox: &Outbox,
    started: &SyncSender<Result<(), StartError>>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return drop(started.send(Err(StartError::Thread(error)))),
    };
    runtime.block_on(async {
        let (socket, replay) = match take_over(events, replay).await {
            Ok(sockets) => sockets,
            Err(error) => return drop(started.send(Err(StartError::Socket(error.to_string())))),
        };
        let ring = Arc::new(Mutex::new(Ring::new(settings.max_replay_events)));
        let replaying = replay.map(|replay| {
            let (to, from) = replay.split();
            tokio::spawn(answer_replays(from, to, ring.clone()))
        });
        // The other end waits for this or has given up.
        let _ = started.send(Ok(()));
        let socket = publish(socket, &settings, outbox, &ring).await;
        if let Some(replaying) = replaying {
            replaying.abort();
        }
        linger(socket).await;
    });
}

async fn take_over(
    events: TcpListener,
    replay: Option<TcpListener>,
) -> zeromq::ZmqResult<(PubSocket, Option<RouterSocket>)> {
    let mut socket = PubSocket::new();
    socket.bind_listener(events).await?;
    let Some(replay) = replay else { return Ok((socket, None)) };
    let mut router = RouterSocket::new();
    router.bind_listener(replay).await?;
    Ok((socket, Some(router)))
}

/// Sends until the outbox is closed and empty.
async fn publish(mut socket: PubSocket, settings: &Settings, outbox: &Outbox, ring: &Mutex<Ring>) -> PubSocket {
    let topic = Bytes::copy_from_slice(settings.topic.as_bytes());
    while let Some(messages) = outbox.take().await {
        for message in messages {
            let payload = Bytes::from(layout::payload(&message, settings.dp_rank));
            // First the history: who sees a gap behind this message must find what is before it.
            ring.lock().push(message.sequence, payload.clone());
            let mut parts = ZmqMessage::from(topic.clone());
            parts.push_back(Bytes::copy_from_slice(&message.sequence.to_be_bytes()));
            parts.push_back(payload);
            // Sending to a PUB socket cannot fail: it drops what it cannot send.
            let _ = socket.send(parts).await;
            if message.event.is_some() {
                outbox.count_published();
            }
            // The socket hands on in a task of this thread; its queue must not run full meanwhile.
            tokio::task::yield_now().await;
        }
    }
    socket
}

/// Answers requests one after the other. A malformed one gets no answer: it has no form in which to answer it.
async fn answer_replays(mut from: RouterRecvHalf, mut to: RouterSendHalf, ring: Arc<Mutex<Ring>>) {
    while let Ok(request) = from.recv().await {
        let mut frames = request.into_vec();
        let Some(start) = frames.pop().and_then(|start| Some(u64::from_be_bytes(start.as_ref().try_into().ok()?)))
        else {
            continue;
        };
        // What remains is the way back: the peer's identity and, from a REQ socket, an empty delimiter.
        let way_back = frames;
        let kept = ring.lock().since(start);
        for (sequence, payload) in kept.into_iter().chain([(REPLAY_END, Bytes::new())]) {
            let mut parts = way_back.iter().cloned();
            let Some(identity) = parts.next() else { break };
            let mut answer = ZmqMessage::from(identity);
            parts.for_each(|part| answer.push_back(part));
            answer.push_back(Bytes::copy_from_slice(&sequence.to_be_bytes()));
            answer.push_back(payload);
            if !matches!(timeout(REPLAY_SEND, to.send(answer)).await, Ok(Ok(()))) {
                break;
            }
        }
    }
}

/// Lets the socket's tasks, which all run on this thread, write what they have; they end when that is done.
async fn linger(socket: PubSocket) {
    // The task that hands messages to the subscribers' queues runs before we do again, and empties its own.
    tokio::task::yield_now().await;
    drop(socket);
    let (metrics, deadline) = (tokio::runtime::Handle::current().metrics(), Instant::now() + LINGER);
    while metrics.num_alive_tasks() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
