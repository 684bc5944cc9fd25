//! KV events as an engine publishes them itself over ZeroMQ: in order, without gaps that nobody knows of.
//!
//! There may be no agent beside the engine, and no index to ask. Messages are numbered; what is missing is asked for at the
//! engine's replay socket, where it has one. What cannot be had again makes everything known of the engine void: a reader then
//! knows less than the engine holds, never more. What the events mean is the business of the [`Sink`].
#![forbid(unsafe_code)]

mod cursor;
mod replay;

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use bytes::Bytes;
use protocol::vllm_events::{EventBatch, decode_batch, decode_sequence};
use tokio::sync::Notify;
use tokio::time::sleep;

use cursor::{Cursor, Step};
pub use protocol::vllm_events::EventSource;
pub use replay::ReplayError;
pub use zmtp::CollectorCounters;
use zmtp::{Collector, PAUSE, Subscriber, ZmtpError};

/// An idle engine publishes nothing, and so does a connection that is dead: after this long a new one is made.
const SILENCE: Duration = Duration::from_secs(30);

/// Who takes an engine's events.
pub trait Sink: Send {
    /// The events of one engine step, with its number; all that came before have been told, or [`Self::forget`] has been called.
    fn take(&mut self, sequence: u64, batch: EventBatch) -> impl Future<Output = ()> + Send;

    /// Everything known of the engine is void.
    fn forget(&mut self) -> impl Future<Output = ()> + Send;

    /// Something that is to be counted, or told.
    fn note(&mut self, note: Note);
}

/// What happened on the way.
#[derive(Debug)]
pub enum Note {
    /// Numbers are missing.
    Gap,
    /// The numbers began anew: the engine is another process.
    Restarted,
    /// The engine has sent again what it had.
    Replayed,
    /// It has not.
    NotReplayed(ReplayError),
    /// A message came twice.
    Duplicate,
    /// A message cannot be read; `.0` says of which kind it is, as a metric label.
    Refused(&'static str),
    /// The port that the engine connects to cannot be listened on; it is tried again.
    Unbound(std::io::Error),
    /// The subscription ended; another one is made.
    Ended(ZmtpError),
}

/// How an engine is followed.
#[derive(Debug)]
pub struct Feed {
    source: EventSource,
    bind: IpAddr,
    counters: CollectorCounters,
    cursor: Cursor,
}

/// Where messages come from.
enum Socket {
    /// We connected to the engine.
    Connected(Subscriber),
    /// It connects to us, and again by itself.
    Bound(Collector),
}

impl Socket {
    async fn next(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        match self {
            Self::Connected(subscriber) => subscriber.next().await,
            Self::Bound(collector) => collector.next().await,
        }
    }
}

impl Feed {
    /// Nothing has been read. An engine that connects to us may do so at all addresses; `counters` count whom it turns away.
    pub fn new(source: EventSource, counters: CollectorCounters) -> Self {
        Self { source, bind: Ipv4Addr::UNSPECIFIED.into(), counters, cursor: Cursor::default() }
    }

    /// The same, where the engine connects to this address only.
    pub fn bound_at(self, bind: IpAddr) -> Self {
        Self { bind, ..self }
    }

    /// Follows the engine until it is dropped. `revived`: the engine could not be reached for a while and can be now; it may be
    /// another process.
    pub async fn run(mut self, revived: &Notify, mut sink: impl Sink) {
        loop {
            if let Some(socket) = self.open(&mut sink).await {
                // What was published before, and while there was no socket.
                self.recover(self.cursor.next(), &mut sink).await;
                self.read(socket, revived, &mut sink).await;
            }
            sleep(PAUSE).await;
        }
    }

    /// A socket that has subscribed, or that the engine can connect to.
    async fn open(&mut self, sink: &mut impl Sink) -> Option<Socket> {
        let Some(port) = self.source.bound_port() else {
            // Engines choose their topics.
            return Subscriber::connect(&self.source.address, &[""], SILENCE).await.map(Socket::Connected);
        };
        match Collector::bind((self.bind, port).into(), self.counters.clone()).await {
            Ok(collector) => Some(Socket::Bound(collector)),
            Err(error) => {
                sink.note(Note::Unbound(error));
                None
            }
        }
    }

    /// Reads one socket until it is no good any more.
    async fn read(&mut self, mut socket: Socket, revived: &Notify, sink: &mut impl Sink) {
        loop {
            let received = tokio::select! {
                received = socket.next() => received,
                // It is another process now, or the same one that could not be reached.
                () = revived.notified() => match socket {
                    Socket::Bound(_) => {
                        self.recover(self.cursor.next(), sink).await;
                        continue;
                    }
                    Socket::Connected(_) => return,
                },
            };
            match received {
                Ok(parts) => self.live(&parts, sink).await,
                Err(error) => {
                    if let ZmtpError::TooLarge(_) = error {
                        sink.note(Note::Refused("too large"));
                    }
                    return sink.note(Note::Ended(error));
                }
            }
        }
    }

    /// Takes a message: topic, sequence, batch.
    async fn live(&mut self, parts: &[Bytes], sink: &mut impl Sink) {
        let [_, sequence, payload] = parts else { return sink.note(Note::Refused("malformed")) };
        let Some(sequence) = decode_sequence(sequence) else { return sink.note(Note::Refused("malformed")) };
        match self.cursor.look(sequence, payload) {
            Step::Gap => {
                sink.note(Note::Gap);
                self.recover(self.cursor.next(), sink).await;
            }
            Step::Restarted => {
                sink.note(Note::Restarted);
                sink.forget().await;
                self.cursor = Cursor::default();
                self.recover(0, sink).await;
            }
            Step::Next | Step::Duplicate => {}
        }
        self.take(sequence, payload, sink).await;
    }

    /// Asks for the messages from `start` on, where the engine keeps them.
    async fn recover(&mut self, start: u64, sink: &mut impl Sink) {
        let Some(address) = self.source.replay.clone() else { return };
        match replay::ask(&address, start).await {
            Ok(messages) => {
                sink.note(Note::Replayed);
                for (sequence, payload) in messages {
                    self.take(sequence, &payload, sink).await;
                }
            }
            Err(error) => sink.note(Note::NotReplayed(error)),
        }
    }

    /// Takes what may be applied now, whatever is missing before it.
    async fn take(&mut self, sequence: u64, payload: &Bytes, sink: &mut impl Sink) {
        match self.cursor.look(sequence, payload) {
            Step::Duplicate => return sink.note(Note::Duplicate),
            Step::Next => {}
            Step::Gap | Step::Restarted => sink.forget().await,
        }
        self.cursor.advance(sequence, payload);
        match decode_batch(payload) {
            Ok(batch) => sink.take(sequence, batch).await,
            Err(error) => {
                tracing::debug!(%error, "KV events are unreadable");
                sink.note(Note::Refused("malformed"));
                sink.forget().await;
            }
        }
    }
}
