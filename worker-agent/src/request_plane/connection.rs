//! One router's connection, served by one task: handshake, then turns of "wait for anything, handle it, write".

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use protocol::request_plane::{
    ClientFrame, Draining, ErrorCode, Failed, FrameError, Generate, Hello, PROTOCOL_VERSION, Pong, ServerFrame,
    Welcome, client_frame, decode_frame, encode_frame, server_frame::Body,
};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, MissedTickBehavior};

use super::bulk::{Bulk, Prepared, Question};
use super::liveness::{Liveness, Lost, WRITE_STALL};
use super::streams::{Account, INITIAL_CREDIT, Streams};
use super::{Service, failed};
use crate::engine::SubmitError;
use crate::metrics::Ending;

/// From accepting to a valid Hello.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Largest Hello, in bytes.
const MAX_HELLO_BYTES: usize = 4096;
/// Most Generate streams on one connection.
const MAX_STREAMS: usize = 8192;
/// Space for one read, in bytes.
const READ_BYTES: usize = 64 << 10;
/// How much may wait in the outbox while more is put into it, in bytes: large answers stop first, then streams, then
/// reading, so that a router that does not read is answered nothing, and costs 1.3 MB and one frame at most.
const BULK_MARK: usize = 64 << 10;
const STREAM_MARK: usize = 256 << 10;
const READ_MARK: usize = 1 << 20;
/// Most bytes written in one turn, so that a router that reads fast does not keep its own requests waiting.
const WRITE_BYTES: usize = 256 << 10;
/// Send buffer of the kernel, in bytes (which doubles it): what a token frame may have to wait behind.
const SEND_BUFFER: usize = 256 << 10;
/// The kernel asks an idle peer after this long, and so often; it is given up after three missed answers.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));
/// How often stalls and silence are looked for.
const CHECK: Duration = Duration::from_secs(5);
/// How long a refused peer may take to read why.
const LINGER: Duration = Duration::from_millis(500);

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("closed by the router")]
    Closed,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("{0}")]
    Violation(String),
    #[error("this is worker {0}, not the one meant")]
    WrongWorker(String),
    #[error("no valid Hello within {} s", HANDSHAKE.as_secs())]
    HandshakeDeadline,
    #[error(transparent)]
    Lost(#[from] Lost),
}

impl ConnectionError {
    /// What the router is told, if telling it makes sense.
    fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Closed | Self::Io(_) | Self::Lost(Lost::WriteStall) => None,
            Self::Frame(_) | Self::Violation(_) => Some(ErrorCode::InvalidRequest),
            Self::WrongWorker(_) => Some(ErrorCode::WrongWorker),
            Self::HandshakeDeadline | Self::Lost(Lost::Silence) => Some(ErrorCode::Deadline),
        }
    }
}

/// Serves a connection to its end.
pub(super) async fn serve(socket: TcpStream, peer: SocketAddr, service: &Arc<Service>) {
    if let Err(error) = set_options(&socket) {
        tracing::warn!(%peer, %error, "socket options not set");
    }
    let mut connection = Connection::new(socket, service.clone());
    let ended = match tokio::time::timeout(HANDSHAKE, connection.handshake()).await {
        Ok(Ok(router)) => {
            tracing::debug!(%peer, router, "router connected");
            connection.run().await
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ConnectionError::HandshakeDeadline),
    };
    // Before the goodbye: the engine gets the blocks back at once.
    connection.streams.give_up().into_iter().for_each(|lease| service.engine.end_lease(lease));
    match ended {
        Ok(()) => connection.flush().await,
        Err(error) => match error.code() {
            Some(code) => {
                tracing::warn!(%peer, %error, "router connection refused");
                connection.refuse(failed(0, code, error.to_string())).await;
            }
            None => tracing::debug!(%peer, %error, "router connection ended"),
        },
    }
}

fn set_options(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let options = SockRef::from(socket);
    options.set_send_buffer_size(SEND_BUFFER)?;
    options
        .set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE.0).with_interval(KEEPALIVE.1).with_retries(3))?;
    #[cfg(target_os = "linux")]
    options.set_tcp_user_timeout(Some(WRITE_STALL))?;
    Ok(())
}

/// What a turn waited for.
enum Turn {
    Readable,
    Writable,
    Streams,
    Bulk(Option<Prepared>),
    Deadline,
    Check,
    Draining,
    Stopped,
}

struct Connection {
    socket: TcpStream,
    service: Arc<Service>,
    inbox: BytesMut,
    outbox: BytesMut,
    streams: Streams,
    bulk: Bulk,
    /// Deadlines of streams, soonest first; those of ended streams stay for a while.
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
    newest_stream: u64,
    liveness: Liveness,
}

impl Connection {
    fn new(socket: TcpStream, service: Arc<Service>) -> Self {
        Self {
            socket,
            service,
            inbox: BytesMut::new(),
            outbox: BytesMut::new(),
            streams: Streams::new(),
            bulk: Bulk::default(),
            deadlines: BinaryHeap::new(),
            newest_stream: 0,
            liveness: Liveness::new(Instant::now()),
        }
    }

    /// Reads Hello, answers Welcome; returns the router's id.
    async fn handshake(&mut self) -> Result<String, ConnectionError> {
        let frame = loop {
            let announced = self.inbox.first_chunk::<4>().map_or(0, |header| u32::from_be_bytes(*header) as usize);
            if announced > MAX_HELLO_BYTES {
                return Err(FrameError::TooLarge(announced).into());
            }
            if let Some(frame) = decode_frame::<ClientFrame>(&mut self.inbox)? {
                break frame;
            }
            if self.socket.read_buf(&mut self.inbox).await? == 0 {
                return Err(ConnectionError::Closed);
            }
        };
        let ClientFrame { stream_id: 0, body: Some(client_frame::Body::Hello(hello)) } = frame else {
            return Err(ConnectionError::Violation("the first frame must be Hello on stream 0".into()));
        };
        let Hello { protocol_version, router_id, instance_id, boot_epoch } = hello;
        if protocol_version != PROTOCOL_VERSION {
            let message = format!("protocol version {protocol_version}; this worker speaks {PROTOCOL_VERSION}");
            return Err(ConnectionError::Violation(message));
        }
        let own = &self.service.identity;
        if (instance_id, &boot_epoch) != (own.instance_id, &own.boot_epoch) {
            return Err(ConnectionError::WrongWorker(format!("{:x} of {}", own.instance_id, own.boot_epoch)));
        }
        let (instance_id, boot_epoch) = (own.instance_id, own.boot_epoch.clone());
        self.send(0, Body::Welcome(Welcome { instance_id, boot_epoch, initial_credit: INITIAL_CREDIT }));
        self.write()?;
        Ok(router_id)
    }

    /// Turns, until the drain stops or the connection fails.
    async fn run(&mut self) -> Result<(), ConnectionError> {
        let service = self.service.clone();
        let mut check = tokio::time::interval(CHECK);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut begun, mut stopped) = (pin!(service.drain.begun()), pin!(service.drain.stopped()));
        let mut announced = false;
        // The Hello may have come with more behind it.
        self.handle_frames()?;
        loop {
            self.write()?;
            let waiting = self.outbox.len();
            let deadline = self.deadlines.peek().map(|Reverse((at, _))| *at);
            let (socket, streams, bulk) = (&self.socket, &mut self.streams, &mut self.bulk);
            let bulk_waits = waiting < BULK_MARK && !bulk.is_idle();
            let turn = tokio::select! {
                ready = socket.readable(), if waiting < READ_MARK => ready.map(|()| Turn::Readable)?,
                ready = socket.writable(), if waiting > 0 => ready.map(|()| Turn::Writable)?,
                () = std::future::poll_fn(|cx| streams.poll_ready(cx)), if waiting < STREAM_MARK => Turn::Streams,
                prepared = bulk.ready(), if bulk_waits => Turn::Bulk(prepared),
                () = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => Turn::Deadline,
                _ = check.tick() => Turn::Check,
                () = &mut begun, if !announced => Turn::Draining,
                () = &mut stopped => Turn::Stopped,
            };
            match turn {
                Turn::Readable => self.read()?,
                Turn::Writable => {}
                Turn::Streams => self.streams.write_ready(&mut self.outbox, STREAM_MARK),
                Turn::Bulk(prepared) => self.bulk.write_chunk(prepared, &mut self.outbox),
                Turn::Deadline => self.pass_deadlines(),
                Turn::Check => self.liveness.check(Instant::now())?,
                Turn::Draining => {
                    announced = true;
                    self.send(0, Body::Draining(Draining {}));
                }
                Turn::Stopped => {
                    self.streams.cut_short(service.drain.why_cut_short(), &mut self.outbox);
                    return Ok(());
                }
            }
        }
    }

    fn read(&mut self) -> Result<(), ConnectionError> {
        self.inbox.reserve(READ_BYTES);
        match self.socket.try_read_buf(&mut self.inbox) {
            Ok(0) => Err(ConnectionError::Closed),
            Ok(_) => {
                self.liveness.read(Instant::now());
                self.handle_frames()
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn handle_frames(&mut self) -> Result<(), ConnectionError> {
        while let Some(ClientFrame { stream_id, body }) = decode_frame::<ClientFrame>(&mut self.inbox)? {
            let body = body.ok_or_else(|| ConnectionError::Violation("a frame without a body".into()))?;
            self.handle(stream_id, body)?;
        }
        Ok(())
    }

    fn handle(&mut self, id: u64, body: client_frame::Body) -> Result<(), ConnectionError> {
        use client_frame::Body as Client;
        match body {
            Client::Ping(ping) => {
                self.liveness.pinged();
                self.send(0, Body::Pong(Pong { nonce: ping.nonce }));
            }
            Client::Credit(credit) => self.streams.add_credit(id, credit.frames),
            Client::Cancel(_) => self.cancel(id),
            Client::Generate(generate) => {
                self.open(id)?;
                self.generate(id, generate);
            }
            Client::KvQuery(query) => {
                self.open(id)?;
                self.ask(id, Question::Query(query));
            }
            Client::KvSample(sample) => {
                self.open(id)?;
                self.ask(id, Question::Sample(sample));
            }
            Client::ArtifactGet(get) => {
                self.open(id)?;
                match self.service.files.get(&get.name).cloned() {
                    Some(_) if self.bulk.is_full() => {
                        self.fail(id, ErrorCode::Overloaded, "too many large answers at once")
                    }
                    Some(file) => self.bulk.send_file(id, file),
                    None => self.fail(id, ErrorCode::NotFound, format!("no artifact {:?}", get.name)),
                }
            }
            Client::Hello(_) => return Err(ConnectionError::Violation("a second Hello".into())),
        }
        Ok(())
    }

    /// Of a stream that has ended with its prompt kept for another worker, or is about to, none will fetch it.
    fn cancel(&mut self, id: u64) {
        let lease = match self.streams.cancel(id) {
            Some(untold) => untold,
            None => self.streams.take_lease(id),
        };
        match lease {
            Some(lease) => self.service.engine.end_lease(lease),
            None => self.bulk.cancel(id),
        }
    }

    /// Ids rise; with 0 being the connection itself, that also excludes it.
    fn open(&mut self, id: u64) -> Result<(), ConnectionError> {
        if id <= self.newest_stream {
            let message = format!("stream {id} opened after stream {}", self.newest_stream);
            return Err(ConnectionError::Violation(message));
        }
        self.newest_stream = id;
        Ok(())
    }

    fn generate(&mut self, id: u64, generate: Generate) {
        let Some(admitted) = self.service.drain.admit() else {
            return self.turn_away(id, Ending::draining, ErrorCode::Draining, "the worker is draining".into());
        };
        if self.streams.len() >= MAX_STREAMS {
            let why = format!("over {MAX_STREAMS} streams on one connection");
            return self.turn_away(id, Ending::overloaded, ErrorCode::Overloaded, why);
        }
        let (dp_rank, ranks) = (generate.dp_rank, self.service.engine.ranks());
        if dp_rank >= ranks {
            let why = format!("dp_rank {dp_rank} of a worker with {ranks}");
            return self.turn_away(id, Ending::invalid, ErrorCode::InvalidRequest, why);
        }
        let deadline = Duration::from_millis(generate.deadline_ms.into());
        match self.service.engine.submit(generate) {
            Ok(outputs) => {
                self.streams.open(id, outputs, Account::new(self.service.metrics.clone()), admitted);
                if !deadline.is_zero() {
                    self.watch_deadline(id, Instant::now() + deadline);
                }
            }
            Err(error) => {
                let (ending, code) = match error {
                    SubmitError::Invalid(_) => (Ending::invalid, ErrorCode::InvalidRequest),
                    SubmitError::Overloaded(_) => (Ending::overloaded, ErrorCode::Overloaded),
                    SubmitError::Stopped => (Ending::draining, ErrorCode::Draining),
                };
                self.turn_away(id, ending, code, error.to_string());
            }
        }
    }

    /// Refuses a request with which nothing has begun.
    fn turn_away(&mut self, id: u64, ending: Ending, code: ErrorCode, message: String) {
        self.service.metrics.request_ended(ending);
        self.send(id, Body::Failed(Failed { code: code.into(), message, not_begun: true }));
    }

    fn ask(&mut self, id: u64, question: Question) {
        if self.bulk.is_full() {
            return self.fail(id, ErrorCode::Overloaded, "too many large answers at once");
        }
        self.bulk.ask(id, question, &self.service);
    }

    fn watch_deadline(&mut self, id: u64, at: Instant) {
        // Ended streams leave theirs behind: swept when they are the greater part, so the heap stays within twice the streams.
        if self.deadlines.len() > 2 * self.streams.len() {
            self.deadlines.retain(|Reverse((_, id))| self.streams.contains(*id));
        }
        self.deadlines.push(Reverse((at, id)));
    }

    fn pass_deadlines(&mut self) {
        let now = Instant::now();
        while let Some(Reverse((at, id))) = self.deadlines.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            tracing::debug!(stream = id, ?at, "deadline passed");
            self.deadlines.pop();
            if let Some(lease) = self.streams.pass_deadline(id, &mut self.outbox) {
                self.service.engine.end_lease(lease);
            }
        }
    }

    fn fail(&mut self, id: u64, code: ErrorCode, message: impl Into<String>) {
        encode_frame(&failed(id, code, message), &mut self.outbox);
    }

    fn send(&mut self, stream_id: u64, body: Body) {
        encode_frame(&ServerFrame { stream_id, body: Some(body) }, &mut self.outbox);
    }

    /// Writes as much as the socket takes now, up to [`WRITE_BYTES`].
    fn write(&mut self) -> io::Result<()> {
        let mut left = self.outbox.len().min(WRITE_BYTES);
        while left > 0 {
            match self.socket.try_write(&self.outbox[..left]) {
                Ok(written) => {
                    self.outbox.advance(written);
                    left -= written;
                    self.liveness.written(Instant::now());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.liveness.blocked(Instant::now());
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes what is left and closes; the server bounds the time this takes.
    async fn flush(mut self) {
        let rest = self.outbox.split();
        if let Err(error) = self.socket.write_all(&rest).await {
            tracing::debug!(%error, "last frames not written");
        }
        self.linger().await;
    }

    /// Says why the connection ends, and gives the router a moment to read it.
    async fn refuse(mut self, why: ServerFrame) {
        encode_frame(&why, &mut self.outbox);
        let rest = self.outbox.split();
        if let Ok(Ok(())) = tokio::time::timeout(LINGER, self.socket.write_all(&rest)).await {
            self.linger().await;
        }
    }

    /// Closes our side and reads to the end: closing with unread bytes would reset the connection, and the router would
    /// lose frames it has not read.
    async fn linger(&mut self) {
        let read = async {
            self.socket.shutdown().await?;
            loop {
                self.inbox.clear();
                if self.socket.read_buf(&mut self.inbox).await? == 0 {
                    return io::Result::Ok(());
                }
            }
        };
        if let Ok(Err(error)) = tokio::time::timeout(LINGER, read).await {
            tracing::debug!(%error, "connection closed without its end");
        }
    }
}
