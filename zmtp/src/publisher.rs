//! A PUB socket: never waits for a reader, and keeps a bounded number of bytes for each.
//!
//! What does not fit is dropped for that reader and counted; it sees a gap in the numbers. A reader that takes nothing for
//! [`UNREAD`] is disconnected.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::ZmtpError;
use super::handshake::shake;
use super::message::{Incoming, command, encode};
use super::reader::Reader;

/// Most readers at once.
pub(super) const READERS: usize = 512;

/// Most bytes that wait for one reader: more than a snapshot of all that a router counts (4 Mi blocks of 9 bytes).
pub(super) const READER_BYTES: usize = 64 << 20;

/// Most bytes that wait for all readers together; a message that waits for several counts for each.
const ALL_BYTES: usize = 256 << 20;

/// Most messages that wait for one reader.
const QUEUE: usize = 16_384;

/// Most bytes of what a reader sends: a topic.
const TOPIC: usize = 1024;

/// Most topics of a reader.
const TOPICS: usize = 64;

/// A message that a reader does not take for so long ends its connection.
const UNREAD: Duration = Duration::from_secs(10);

/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(50);

/// What was not sent.
#[derive(Clone, Debug, Default)]
pub struct PublisherCounters {
    /// Messages dropped for one reader, because too much waits for it.
    pub dropped: Counter,
    /// Readers that were turned away because there are too many.
    pub refused: Counter,
}

/// The socket; dropping it closes all connections.
pub struct Publisher {
    readers: Arc<Readers>,
    accepting: JoinHandle<()>,
}

#[derive(Default)]
struct Readers {
    all: Mutex<Vec<Arc<Queue>>>,
    /// Bytes that wait.
    waiting: AtomicUsize,
    counters: PublisherCounters,
}

/// What waits for one reader.
struct Queue {
    topics: Mutex<Vec<Bytes>>,
    messages: mpsc::Sender<Bytes>,
    waiting: AtomicUsize,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Publisher {
    /// Serves whoever connects to `listener`.
    pub fn new(listener: TcpListener, counters: PublisherCounters) -> Self {
        let readers = Arc::new(Readers { counters, ..Readers::default() });
        Self { accepting: tokio::spawn(accept(listener, readers.clone())), readers }
    }

    /// Sends a message to the readers that have subscribed to its first part.
    pub fn send(&self, parts: &[Bytes]) {
        let Some(topic) = parts.first() else { return };
        let mut encoded = None;
        for queue in self.readers.all.lock().iter().filter(|queue| queue.wants(topic)) {
            let message = encoded.get_or_insert_with(|| encode(parts));
            if !self.readers.put(queue, message.clone()) {
                self.readers.counters.dropped.inc();
            }
        }
    }

    /// How many read.
    #[cfg(test)]
    pub(super) fn readers(&self, topic: &[u8]) -> usize {
        self.readers.all.lock().iter().filter(|queue| queue.wants(topic)).count()
    }
}

impl Queue {
    fn wants(&self, topic: &[u8]) -> bool {
        self.topics.lock().iter().any(|wanted| topic.starts_with(wanted))
    }

    /// Takes what a reader sends: in ZMTP 3.0 a message of 1 or 0 and the topic, later a command.
    fn heed(&self, incoming: &Incoming) {
        let (subscribe, topic) = match incoming {
            Incoming::Message(parts) => match parts.first().and_then(|part| part.split_first()) {
                Some((1, topic)) => (true, topic),
                Some((0, topic)) => (false, topic),
                _ => return,
            },
            Incoming::Command(body) => match command(body) {
                Some((b"SUBSCRIBE", topic)) => (true, topic),
                Some((b"CANCEL", topic)) => (false, topic),
                _ => return,
            },
        };
        let mut topics = self.topics.lock();
        if !subscribe {
            topics.retain(|known| **known != *topic);
        } else if topics.len() < TOPICS && !topics.iter().any(|known| **known == *topic) {
            topics.push(Bytes::copy_from_slice(topic));
        }
    }
}

impl Readers {
    /// False when there is no room for it.
    fn put(&self, queue: &Queue, message: Bytes) -> bool {
        let size = message.len();
        let fits = queue.waiting.load(Ordering::Relaxed) + size <= READER_BYTES
            && self.waiting.load(Ordering::Relaxed) + size <= ALL_BYTES;
        if !fits {
            return false;
        }
        // Before it can be taken out.
        queue.waiting.fetch_add(size, Ordering::Relaxed);
        self.waiting.fetch_add(size, Ordering::Relaxed);
        let sent = queue.messages.try_send(message).is_ok();
        if !sent {
            self.took(queue, size);
        }
        sent
    }

    fn took(&self, queue: &Queue, size: usize) {
        queue.waiting.fetch_sub(size, Ordering::Relaxed);
        self.waiting.fetch_sub(size, Ordering::Relaxed);
    }
}

/// A reader among the others, until it is dropped.
struct Listed {
    readers: Arc<Readers>,
    queue: Arc<Queue>,
}

impl Listed {
    fn new(readers: Arc<Readers>, messages: mpsc::Sender<Bytes>) -> Self {
        let (topics, waiting) = Default::default();
        let queue = Arc::new(Queue { topics, messages, waiting });
        readers.all.lock().push(queue.clone());
        Self { readers, queue }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.readers.all.lock().retain(|other| !Arc::ptr_eq(other, &self.queue));
        // Nothing is put into it any more.
        self.readers.took(&self.queue, self.queue.waiting.load(Ordering::Relaxed));
    }
}

async fn accept(listener: TcpListener, readers: Arc<Readers>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) if connections.len() < READERS => _ = connections.spawn(serve(stream, readers.clone())),
                Ok(_) => _ = readers.counters.refused.inc(),
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a reader");
                    sleep(PAUSE).await;
                }
            },
            Some(ended) = connections.join_next() => if let Ok(Err(error)) = ended {
                tracing::debug!(%error, "a reader left");
            },
        }
    }
}

/// Serves one reader until it leaves.
async fn serve(mut stream: TcpStream, readers: Arc<Readers>) -> Result<(), ZmtpError> {
    stream.set_nodelay(true)?;
    let rest = shake(&mut stream, "PUB", &["SUB", "XSUB"]).await?;
    let (read, mut write) = stream.into_split();
    let (messages, mut queue) = mpsc::channel(QUEUE);
    let listed = Listed::new(readers, messages);
    let mut reader = Reader::new(read, rest, TOPIC);
    let heeding = async {
        loop {
            let (incoming, _) = reader.next(None).await?;
            listed.queue.heed(&incoming);
        }
    };
    let writing = async {
        while let Some(message) = queue.recv().await {
            timeout(UNREAD, write.write_all(&message)).await.map_err(|_| ZmtpError::Stalled)??;
            listed.readers.took(&listed.queue, message.len());
        }
        Ok(())
    };
    tokio::select! {
        ended = heeding => ended,
        ended = writing => ended,
    }
}
