//! One client's connection, from the first byte it sends to its end.
//!
//! The protocol is told from the first bytes, and only then do the HTTP libraries' own timers run. Until the first
//! request is there, the deadlines here hold: neither silence nor half a preface keeps a connection open.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::FrontendConfig;
use super::pace::{PacedBody, StreamExecutor};
use super::routes::Frontend;
use super::socket::ClientSocket;
use crate::backend::Backend;

/// How HTTP/1 and HTTP/2 are spoken.
pub(super) fn builder(config: &FrontendConfig) -> Builder<StreamExecutor> {
    let header_timeout = Duration::from_secs(config.header_timeout_s);
    let mut builder = Builder::new(StreamExecutor { limit: Duration::from_secs(config.write_timeout_s) });
    builder.http1().timer(TokioTimer::new()).header_read_timeout(header_timeout);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(header_timeout / 2)
        .keep_alive_timeout(header_timeout / 2)
        .max_concurrent_streams(1024);
    builder
}

/// Serves a connection to its end. `shutdown` lets the requests on it finish; `kill` ends it at once.
pub(super) async fn serve<B: Backend>(
    stream: TcpStream,
    frontend: Arc<Frontend<B>>,
    builder: Builder<StreamExecutor>,
    shutdown: CancellationToken,
    kill: CancellationToken,
) {
    let _open = frontend.metrics.connection();
    let first_request = Instant::now() + Duration::from_secs(frontend.config.header_timeout_s);
    tokio::select! {
        readable = stream.readable() => if readable.is_err() { return },
        () = sleep_until(first_request) => {
            tracing::debug!("a connection was silent");
            return;
        }
        () = shutdown.cancelled() => return,
    }
    let socket = ClientSocket::new(stream, Duration::from_secs(frontend.config.write_timeout_s));
    let requested = Arc::new(AtomicBool::new(false));
    let service = service_fn(|request| {
        requested.store(true, Ordering::Relaxed);
        let frontend = frontend.clone();
        async move { Ok::<_, Infallible>(frontend.handle(request).await.map(PacedBody::new)) }
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(socket), service));
    let mut deadline = pin!(sleep_until(first_request));
    let (mut draining, mut waiting) = (false, true);
    loop {
        tokio::select! {
            biased;
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(%error, "a connection ended");
                }
                return;
            }
            () = deadline.as_mut(), if waiting => {
                waiting = false;
                if !requested.load(Ordering::Relaxed) {
                    tracing::debug!("no request arrived on a connection in time");
                    return;
                }
            }
            () = shutdown.cancelled(), if !draining => {
                draining = true;
                connection.as_mut().graceful_shutdown();
            }
            () = kill.cancelled() => return,
        }
    }
}
