//! A SUB socket that publishers connect to.
//!
//! Peers, messages that wait, and bytes are bounded. When there is no room a connection is not read, its publisher's own bound
//! is reached, and it drops: a gap in its numbers, which whoever takes the messages must see to.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::metrics::counter::Counter;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::handshake::{shake, subscription};
use super::message::{Incoming, encode};
use super::reader::Reader;
use super::{HANDSHAKE, MAX_MESSAGE, ZmtpError};

/// Most publishers connected at once: the data-parallel ranks of one engine, and connections of theirs that have not been found dead.
pub(super) const PEERS: usize = 64;

/// Messages that wait to be taken.
const QUEUE: usize = 64;

/// Large messages that wait or are on their way: 8 of 8 MiB.
const LARGE: usize = 8;

/// A silent connection is asked for a sign of life after this long: a peer that is gone must not hold a place.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(50);

/// A message, and the room that it takes until it is taken.
type Held = (Vec<Bytes>, Option<OwnedSemaphorePermit>);

/// What was turned away.
#[derive(Clone, Debug, Default)]
pub struct CollectorCounters {
    /// Publishers, because there are too many.
    pub peers: Counter,
    /// Messages that are too large; their publishers are disconnected.
    pub large: Counter,
}

/// The socket; dropping it closes all connections.
pub struct Collector {
    messages: mpsc::Receiver<Held>,
    accepting: JoinHandle<()>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Collector {
    /// Listens at `address` for publishers of any topic.
    pub async fn bind(address: SocketAddr, counters: CollectorCounters) -> std::io::Result<Self> {
        Ok(Self::on(TcpListener::bind(address).await?, counters))
    }

    /// The same on a bound listener.
    pub fn on(listener: TcpListener, counters: CollectorCounters) -> Self {
        let (out, messages) = mpsc::channel(QUEUE);
        Self { messages, accepting: tokio::spawn(accept(listener, out, counters)) }
    }

    /// The parts of the next message of any publisher. May be dropped and called again.
    pub async fn next(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        self.messages.recv().await.map(|(parts, _room)| parts).ok_or(ZmtpError::Closed)
    }
}

async fn accept(listener: TcpListener, out: mpsc::Sender<Held>, counters: CollectorCounters) {
    let room = Arc::new(Semaphore::new(LARGE));
    let mut peers = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) if peers.len() < PEERS => _ = peers.spawn(serve(stream, out.clone(), room.clone())),
                Ok(_) => _ = counters.peers.inc(),
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a publisher of KV events");
                    sleep(PAUSE).await;
                }
            },
            Some(ended) = peers.join_next() => match ended {
                Ok(Err(ZmtpError::TooLarge(_))) => _ = counters.large.inc(),
                Ok(Err(error)) => tracing::debug!(%error, "a publisher of KV events left"),
                // A panic has been reported already.
                Ok(Ok(())) | Err(_) => {}
            },
        }
    }
}

/// Reads one publisher until it or the collector ends.
async fn serve(mut stream: TcpStream, out: mpsc::Sender<Held>, room: Arc<Semaphore>) -> Result<(), ZmtpError> {
    SockRef::from(&stream)
        .set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 3).with_retries(3))?;
    let rest = shake(&mut stream, "SUB", &["PUB", "XPUB"]).await?;
    timeout(HANDSHAKE, stream.write_all(&encode(&[subscription("")]))).await.map_err(|_| ZmtpError::Handshake)??;
    let mut reader = Reader::new(stream, rest, MAX_MESSAGE);
    loop {
        if let (Incoming::Message(parts), room) = reader.next(Some(&room)).await?
            && out.send((parts, room)).await.is_err()
        {
            return Ok(());
        }
    }
}
