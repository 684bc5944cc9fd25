//! One TCP connection to a worker: greeting, multiplexed streams, heartbeats.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use parking_lot::Mutex;
use protocol::request_plane::{
    Cancel, ClientFrame, Credit, ErrorCode, Failed, Hello, PROTOCOL_VERSION, Ping, ServerFrame, Welcome, client_frame,
    decode_frame, encode_frame, server_frame,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::outbox::Outbox;
use super::{Caller, ConnectError, OpenError, Signals, Target};

/// How often a silent connection is pinged.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Heartbeats in a row without a byte from the worker with which it counts as lost: 6 s, and two pings without an answer.
const MISSED: u32 = 3;

/// Deadline of one write: a peer that takes nothing for so long is lost.
const WRITE: Duration = Duration::from_secs(10);

/// Most frames of `Output` a stream may be granted ahead, whatever a worker proposes.
const MAX_CREDIT: u32 = 4096;

/// Bytes of room for each read: many small frames with one system call.
const READ_BYTES: usize = 16 << 10;

/// Room for frames that need no credit: parts of an answer to a query (up to 256 KB each) and the last frame.
const UNCREDITED: usize = 1024;

/// The two ends of a fresh connection, and bytes read beyond the greeting.
pub(crate) struct Io {
    read: OwnedReadHalf,
    write: OwnedWriteHalf,
    buffer: BytesMut,
}

/// An open connection.
#[derive(Debug)]
pub(crate) struct Link {
    outbox: Outbox,
    streams: Mutex<Streams>,
    caller: Arc<Caller>,
    credit: u32,
    heard: AtomicBool,
}

#[derive(Debug, Default)]
struct Streams {
    open: HashMap<u64, mpsc::Sender<server_frame::Body>>,
    last_id: u64,
    closed: Option<Arc<str>>,
}

impl Link {
    /// Dials and greets. The worker must be the one that is meant.
    pub(crate) async fn connect(target: &Target) -> Result<(Arc<Self>, Io), ConnectError> {
        let stream = TcpStream::connect(&*target.address).await?;
        stream.set_nodelay(true)?;
        let (mut read, mut write) = stream.into_split();
        let hello = Hello {
            protocol_version: PROTOCOL_VERSION,
            router_id: target.caller.id.clone(),
            instance_id: target.identity.instance_id,
            boot_epoch: target.identity.boot_epoch.clone(),
        };
        let mut buffer = BytesMut::new();
        encode_frame(&ClientFrame { stream_id: 0, body: Some(client_frame::Body::Hello(hello)) }, &mut buffer);
        write.write_all_buf(&mut buffer).await?;
        let welcome = read_welcome(&mut read, &mut buffer).await?;
        let ours = &target.identity;
        if (welcome.instance_id, &welcome.boot_epoch) != (ours.instance_id, &ours.boot_epoch) {
            return Err(ConnectError::WrongWorker);
        }
        let credit = welcome.initial_credit.clamp(1, MAX_CREDIT);
        let (caller, heard) = (target.caller.clone(), AtomicBool::new(true));
        let link = Self { outbox: Outbox::default(), streams: Mutex::default(), caller, credit, heard };
        Ok((Arc::new(link), Io { read, write, buffer }))
    }

    /// Moves bytes until the connection ends; returns why.
    pub(crate) async fn drive(&self, io: Io, signals: &Signals, changed: &Notify) -> String {
        let Io { read, write, buffer } = io;
        tokio::select! {
            reason = self.read(read, buffer, signals, changed) => reason,
            reason = self.write(write) => reason,
            reason = self.watch() => reason,
        }
    }

    /// Ends every open stream and refuses new ones.
    pub(super) fn close(&self, reason: &str) {
        let mut streams = self.streams.lock();
        streams.closed = Some(reason.into());
        streams.open.clear();
    }

    /// Whether no stream is open.
    pub(super) fn is_idle(&self) -> bool {
        self.streams.lock().open.is_empty()
    }

    /// Opens a stream with `frame`, whose stream id is set here.
    pub(crate) fn open(self: &Arc<Self>, frame: &mut ClientFrame) -> Result<Stream, OpenError> {
        let (sender, frames) = mpsc::channel(self.credit as usize + UNCREDITED);
        let mut streams = self.streams.lock();
        if let Some(reason) = &streams.closed {
            return Err(OpenError::Unreachable(reason.clone()));
        }
        streams.last_id += 1;
        let id = streams.last_id;
        frame.stream_id = id;
        // Under the lock, so that ids rise on the wire as well.
        if !self.outbox.offer(frame) {
            return Err(OpenError::Congested);
        }
        streams.open.insert(id, sender);
        self.caller.streams.fetch_add(1, Ordering::Relaxed);
        Ok(Stream { id, frames, link: self.clone(), consumed: 0, open: true })
    }

    async fn read(&self, mut read: OwnedReadHalf, mut buffer: BytesMut, signals: &Signals, changed: &Notify) -> String {
        loop {
            loop {
                match decode_frame::<ServerFrame>(&mut buffer) {
                    Ok(Some(frame)) => {
                        if let Some(reason) = self.take(frame, signals, changed) {
                            return reason;
                        }
                    }
                    Ok(None) => break,
                    Err(error) => return error.to_string(),
                }
            }
            buffer.reserve(READ_BYTES);
            match read.read_buf(&mut buffer).await {
                Ok(0) => return "the worker closed the connection".into(),
                Ok(_) => self.heard.store(true, Ordering::Relaxed),
                Err(error) => return error.to_string(),
            }
        }
    }

    /// Handles one frame; a reason when the connection ends with it.
    fn take(&self, frame: ServerFrame, signals: &Signals, changed: &Notify) -> Option<String> {
        let body = frame.body?;
        if frame.stream_id != 0 {
            self.deliver(frame.stream_id, body);
            return None;
        }
        match body {
            server_frame::Body::Draining(_) => {
                signals.draining.store(true, Ordering::Relaxed);
                changed.notify_one();
                None
            }
            server_frame::Body::Failed(failed) => Some(failed.message),
            _ => None,
        }
    }

    fn deliver(&self, id: u64, body: server_frame::Body) {
        let last = is_last(&body);
        let mut streams = self.streams.lock();
        let Some(sender) = streams.open.get(&id) else { return };
        // Full means that the worker sent more than it had credit for: the stream ends here, without its last frame.
        let overrun = matches!(sender.try_send(body), Err(mpsc::error::TrySendError::Full(_)));
        if last || overrun {
            streams.open.remove(&id);
        }
        if overrun {
            drop(streams);
            self.cancel(id);
        }
    }

    async fn write(&self, mut write: OwnedWriteHalf) -> String {
        loop {
            self.outbox.filled().await;
            self.caller.gather().await;
            let mut bytes = self.outbox.take();
            match timeout(WRITE, write.write_all_buf(&mut bytes)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error.to_string(),
                Err(_) => return format!("the worker took no bytes for {} s", WRITE.as_secs()),
            }
        }
    }

    async fn watch(&self) -> String {
        let mut ticks = interval(HEARTBEAT);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut missed, mut nonce) = (0, 0);
        loop {
            ticks.tick().await;
            if self.heard.swap(false, Ordering::Relaxed) {
                missed = 0;
                continue;
            }
            missed += 1;
            if missed >= MISSED {
                return format!("the worker was silent for {} s", (HEARTBEAT * MISSED).as_secs());
            }
            nonce += 1;
            self.outbox.push(&ClientFrame { stream_id: 0, body: Some(client_frame::Body::Ping(Ping { nonce })) });
        }
    }

    /// A worker ignores it for a stream that has ended and left nothing behind.
    fn cancel(&self, id: u64) {
        self.outbox.push(&ClientFrame { stream_id: id, body: Some(client_frame::Body::Cancel(Cancel {})) });
    }
}

async fn read_welcome(read: &mut OwnedReadHalf, buffer: &mut BytesMut) -> Result<Welcome, ConnectError> {
    loop {
        match decode_frame::<ServerFrame>(buffer) {
            Ok(Some(frame)) => return greeted(frame),
            Ok(None) => {}
            Err(_) => return Err(ConnectError::Protocol),
        }
        buffer.reserve(READ_BYTES);
        if read.read_buf(buffer).await? == 0 {
            return Err(ConnectError::Refused("the worker closed the connection".into()));
        }
    }
}

fn greeted(frame: ServerFrame) -> Result<Welcome, ConnectError> {
    match frame.body {
        Some(server_frame::Body::Welcome(welcome)) => Ok(welcome),
        Some(server_frame::Body::Failed(failed)) if failed.code() == ErrorCode::WrongWorker => {
            Err(ConnectError::WrongWorker)
        }
        Some(server_frame::Body::Failed(Failed { message, .. })) => Err(ConnectError::Refused(message)),
        _ => Err(ConnectError::Protocol),
    }
}

/// Whether a stream ends with this frame.
fn is_last(body: &server_frame::Body) -> bool {
    match body {
        server_frame::Body::Finished(_) | server_frame::Body::Failed(_) | server_frame::Body::KvSampled(_) => true,
        server_frame::Body::KvAnswer(answer) => answer.end,
        server_frame::Body::ArtifactChunk(chunk) => chunk.end,
        _ => false,
    }
}

/// What a stream left behind at its worker when it ended, for another worker to fetch. Dropping it tells the worker that
/// nobody will.
pub(crate) struct Kept {
    id: u64,
    link: Option<Arc<Link>>,
}

impl Kept {
    /// It has been fetched, or will be.
    pub(crate) fn taken(mut self) {
        self.link = None;
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(link) = &self.link {
            link.cancel(self.id);
        }
    }
}

/// One stream of a connection. Dropping it before its last frame was read cancels it at the worker.
#[derive(Debug)]
pub(crate) struct Stream {
    id: u64,
    frames: mpsc::Receiver<server_frame::Body>,
    link: Arc<Link>,
    /// `Output` frames taken since credit was last granted.
    consumed: u32,
    open: bool,
}

impl Stream {
    /// The next frame; `None` when the connection was lost first.
    pub(crate) async fn next(&mut self) -> Option<server_frame::Body> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Like [`Self::next`].
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<server_frame::Body>> {
        let body = std::task::ready!(self.frames.poll_recv(cx));
        match &body {
            Some(server_frame::Body::Output(_)) => self.consume(),
            Some(body) if is_last(body) => self.open = false,
            Some(_) => {}
            None => self.open = false,
        }
        Poll::Ready(body)
    }

    /// What a first half leaves behind with its last frame.
    pub(crate) fn keep(&self) -> Kept {
        Kept { id: self.id, link: Some(self.link.clone()) }
    }

    /// Why the connection was lost.
    pub(crate) fn lost_reason(&self) -> String {
        let closed = self.link.streams.lock().closed.clone();
        closed.map_or_else(|| "the worker sent more than it may".to_owned(), |reason| reason.to_string())
    }

    /// Grants credit in halves of the window, so that one small frame pays for many.
    fn consume(&mut self) {
        self.consumed += 1;
        if self.consumed * 2 >= self.link.credit {
            let credit = Credit { frames: std::mem::take(&mut self.consumed) };
            self.link.outbox.push(&ClientFrame { stream_id: self.id, body: Some(client_frame::Body::Credit(credit)) });
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.link.caller.streams.fetch_sub(1, Ordering::Relaxed);
        if !self.open {
            return;
        }
        let connected = {
            let mut streams = self.link.streams.lock();
            streams.open.remove(&self.id);
            streams.closed.is_none()
        };
        // Also when its last frame has come and nobody read it: what a first half left behind is nobody's then.
        if connected {
            self.link.cancel(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use protocol::request_plane::Generate;
    use tokio::net::TcpListener;

    use super::*;

    fn link() -> Arc<Link> {
        let (outbox, streams, caller) = (Outbox::default(), Mutex::default(), Caller::new("router".into()));
        Arc::new(Link { outbox, streams, caller, credit: 1, heard: AtomicBool::new(true) })
    }

    fn open(link: &Arc<Link>) -> Stream {
        let body = Some(client_frame::Body::Generate(Generate::default()));
        link.open(&mut ClientFrame { stream_id: 0, body }).expect("there is room")
    }

    /// Goes to the end of the queue of tasks that are ready.
    async fn last_in_turn() {
        let mut waited = false;
        std::future::poll_fn(|cx| {
            cx.waker().wake_by_ref();
            if std::mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    #[test]
    fn streams_count_while_they_are_open() {
        let link = link();
        let count = || link.caller.streams.load(Ordering::Relaxed);
        let (first, second) = (open(&link), open(&link));
        assert_eq!(count(), 2);
        drop(first);
        link.close("lost");
        assert!(link.open(&mut ClientFrame::default()).is_err());
        assert_eq!(count(), 1);
        drop(second);
        assert_eq!(count(), 0);
    }

    #[tokio::test]
    async fn the_writer_waits_for_who_is_ready_when_a_stream_is_not_alone() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("somebody listens");
        let (_read, write) = stream.into_split();
        let link = link();
        let writing = tokio::spawn({
            let link = link.clone();
            async move { link.write(write).await }
        });
        last_in_turn().await;
        let waiting = || !link.outbox.is_empty();
        let _first = open(&link);
        assert!(waiting());
        last_in_turn().await;
        assert!(!waiting(), "it is alone");
        let _second = open(&link);
        last_in_turn().await;
        assert!(waiting(), "a third may be about to come");
        let _third = open(&link);
        while waiting() {
            tokio::task::yield_now().await;
        }
        writing.abort();
    }
}
