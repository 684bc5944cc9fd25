//! Connections to one OpenAI server: kept alive, and driven by the task of the request that uses them.
//!
//! HTTP/1.1, over TLS where the server's URL says so. No task of its own lies between a request and its socket: whoever waits for an answer polls the
//! connection. What is dropped before its answer has ended closes its connection, which is how the server learns of it.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Incoming, SizeHint};
use hyper::client::conn::http1::{Connection, SendRequest, handshake};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::socket::{Socket, Trust};
use crate::discovery::static_servers::ServerUrl;

/// Longest time a connection waits for its next request. Servers close idle ones, many after 5 s; a request that meets that
/// close would have to be sent again.
const IDLE: Duration = Duration::from_secs(4);

/// Most idle connections to a server.
const IDLE_LINES: usize = 1024;

/// A request or an answer that failed on its way.
#[derive(Debug, thiserror::Error)]
pub(super) enum LineError {
    /// Nobody listens there: the server is down.
    #[error("cannot connect: {0}")]
    Dial(io::Error),
    /// Somebody may listen, and does not answer.
    #[error("cannot connect within {0:?}")]
    DialDeadline(Duration),
    /// Somebody answered, and not as a server that is trusted.
    #[error("TLS: {0}")]
    Tls(io::Error),
    /// The connection broke.
    #[error("{0}")]
    Http(#[from] hyper::Error),
    /// The connection ended in the middle of an answer.
    #[error("the connection was closed")]
    Closed,
}

impl LineError {
    /// Whether no connection was made: the server has seen nothing of a request.
    pub(super) fn is_of_dial(&self) -> bool {
        matches!(self, Self::Dial(_) | Self::DialDeadline(_) | Self::Tls(_))
    }
}

/// An open connection.
struct Line {
    sender: SendRequest<Full<Bytes>>,
    connection: Connection<TokioIo<Socket>, Full<Bytes>>,
    /// The connection has ended; it must not be polled again.
    ended: bool,
    idle_since: Instant,
}

impl Line {
    /// `deadline` is that of TCP and TLS together.
    async fn dial(url: &ServerUrl, trust: Option<&Trust>, deadline: Duration) -> Result<Self, LineError> {
        let dialing = async {
            let stream = TcpStream::connect((url.host(), url.port())).await.map_err(LineError::Dial)?;
            stream.set_nodelay(true).map_err(LineError::Dial)?;
            match trust {
                None => Ok(Socket::Plain(stream)),
                Some(trust) => trust.greet(url.host(), stream).await.map_err(LineError::Tls),
            }
        };
        let socket = timeout(deadline, dialing).await.map_err(|_| LineError::DialDeadline(deadline))??;
        let (sender, connection) = handshake(TokioIo::new(socket)).await?;
        Ok(Self { sender, connection, ended: false, idle_since: Instant::now() })
    }

    /// Reads and writes what there is to read and write.
    fn drive(&mut self, cx: &mut Context<'_>) {
        self.ended = self.ended || Pin::new(&mut self.connection).poll(cx).is_ready();
    }

    fn is_usable(&self) -> bool {
        !self.ended && self.sender.is_ready()
    }

    /// Sends a request and waits for the head of its answer.
    async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, LineError> {
        let mut answer = pin!(self.sender.send_request(request));
        let head = std::future::poll_fn(|cx| {
            self.ended = self.ended || Pin::new(&mut self.connection).poll(cx).is_ready();
            match answer.as_mut().poll(cx) {
                Poll::Ready(head) => Poll::Ready(head.map_err(LineError::from)),
                Poll::Pending if self.ended => Poll::Ready(Err(LineError::Closed)),
                Poll::Pending => Poll::Pending,
            }
        });
        head.await
    }
}

/// The idle connections to one server.
pub(super) struct Lines {
    url: ServerUrl,
    /// Present where it is spoken to over TLS.
    trust: Option<Trust>,
    dial: Duration,
    /// The one used last is on top: the others may grow old and go.
    idle: Mutex<Vec<Line>>,
}

impl Lines {
    /// None yet; `dial` is the deadline of connecting.
    pub(super) fn new(url: ServerUrl, trust: Option<Trust>, dial: Duration) -> Self {
        Self { url, trust, dial, idle: Mutex::default() }
    }

    /// Sends a request and waits for the head of its answer. A kept connection may turn out to be closed; then the request,
    /// of which the server has seen nothing, goes over a new one.
    pub(super) async fn send(
        self: &Arc<Self>,
        request: impl Fn() -> Request<Full<Bytes>>,
    ) -> Result<Response<Answer>, LineError> {
        let mut kept = true;
        loop {
            let idle = if kept { self.take() } else { None };
            let mut line = match idle {
                Some(line) => line,
                None => {
                    kept = false;
                    Line::dial(&self.url, self.trust.as_ref(), self.dial).await?
                }
            };
            match line.send(request()).await {
                Ok(head) => {
                    let (head, body) = head.into_parts();
                    let answer = Answer { body, line: Some(line), lines: self.clone() };
                    return Ok(Response::from_parts(head, answer));
                }
                Err(error) if kept && never_arrived(&error) => kept = false,
                Err(error) => return Err(error),
            }
        }
    }

    /// The freshest connection that is still open.
    fn take(&self) -> Option<Line> {
        let mut idle = self.idle.lock();
        while let Some(mut line) = idle.pop() {
            if line.idle_since.elapsed() > IDLE {
                // All below it are older.
                idle.clear();
                return None;
            }
            // Notices a close that has arrived; costs no system call while nothing has.
            line.drive(&mut Context::from_waker(Waker::noop()));
            if line.is_usable() {
                return Some(line);
            }
        }
        None
    }

    fn put(&self, mut line: Line) {
        line.idle_since = Instant::now();
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_LINES {
            idle.push(line);
        }
    }

    /// Closes idle connections: all of a server that is down, and those that nobody will use any more.
    pub(super) fn sweep(&self, all: bool) {
        self.idle.lock().retain(|line| !all && line.idle_since.elapsed() <= IDLE);
    }
}

/// Whether the server closed the connection before it saw the request: what happens when both act at the same time.
fn never_arrived(error: &LineError) -> bool {
    match error {
        LineError::Closed => true,
        LineError::Http(error) => {
            let io = error.source().and_then(|source| source.downcast_ref::<io::Error>()).map(io::Error::kind);
            error.is_canceled()
                || error.is_closed()
                || error.is_incomplete_message()
                || matches!(io, Some(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted))
        }
        LineError::Dial(_) | LineError::DialDeadline(_) | LineError::Tls(_) => false,
    }
}

/// The body of an answer. Read to its end, it gives the connection back; dropped before, it closes it.
pub(crate) struct Answer {
    body: Incoming,
    line: Option<Line>,
    lines: Arc<Lines>,
}

impl Answer {
    /// The next piece. Nothing is read from the server before it is asked for.
    pub(super) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, LineError>>> {
        let mut driven = false;
        loop {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(piece) => return Poll::Ready(Some(Ok(piece))),
                    Err(_trailers) => continue,
                },
                Poll::Ready(Some(Err(error))) => {
                    self.line = None;
                    return Poll::Ready(Some(Err(error.into())));
                }
                Poll::Ready(None) => {
                    self.give_back(cx);
                    return Poll::Ready(None);
                }
                Poll::Pending => {}
            }
            let Some(line) = &mut self.line else { return Poll::Ready(None) };
            if driven {
                // A connection that has ended has delivered all that it had.
                return if line.ended { Poll::Ready(Some(Err(LineError::Closed))) } else { Poll::Pending };
            }
            driven = true;
            line.drive(cx);
        }
    }

    /// The next piece.
    pub(super) async fn piece(&mut self) -> Option<Result<Bytes, LineError>> {
        std::future::poll_fn(|cx| self.poll_piece(cx)).await
    }

    /// How many bytes are to come, where that is known.
    pub(super) fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    fn give_back(&mut self, cx: &mut Context<'_>) {
        let Some(mut line) = self.line.take() else { return };
        // The connection notices only now that the answer has been taken.
        line.drive(cx);
        if line.is_usable() {
            self.lines.put(line);
        }
    }
}
