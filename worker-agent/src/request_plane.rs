//! The server of the request plane: routers connect over TCP and open streams, many on one connection.
//!
//! One task serves a connection: it reads frames, polls the engine's channels of its own streams directly, and writes what
//! became ready in one go. A token goes from the engine's thread into that task's wake-up and from there into the socket;
//! no other task touches it. A connection that fails takes down its own streams and nothing else.

mod bulk;
mod connection;
mod liveness;
mod streams;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_index::local::LocalIndexer;
use protocol::request_plane::{ErrorCode, Failed, ServerFrame, server_frame};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore};
use tokio_util::task::TaskTracker;

use crate::drain::Drain;
use crate::engine::Engine;
use crate::metrics::Metrics;
use crate::registration::Identity;

/// Most connections at once: one per router replica, with room for their restarts.
const MAX_CONNECTIONS: usize = 256;
/// Most dumps and ranges prepared or sent at once, over all connections; more wait for their turn.
const MAX_KV_ANSWERS: usize = 8;
/// Longest wait, at the end, for connections to write what they have.
const FLUSH: Duration = Duration::from_secs(2);
/// Pause after a failed accept (out of file descriptors, for one).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the connections serve.
pub struct Service {
    /// Whom a router must mean to be let in.
    pub identity: Identity,
    /// Runs the requests.
    pub engine: Arc<dyn Engine>,
    /// Answers queries about KV events. Locked while a whole state is copied: tasks await it, blocking threads block.
    pub indexer: Arc<Mutex<LocalIndexer>>,
    /// Files of the model, by name.
    pub files: BTreeMap<String, Bytes>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Admits requests, and ends the server.
    pub drain: Arc<Drain>,
    kv_answers: Arc<Semaphore>,
}

impl Service {
    /// A service of these parts.
    pub fn new(
        identity: Identity,
        engine: Arc<dyn Engine>,
        indexer: Arc<Mutex<LocalIndexer>>,
        files: BTreeMap<String, Bytes>,
        metrics: Arc<Metrics>,
        drain: Arc<Drain>,
    ) -> Self {
        let kv_answers = Arc::new(Semaphore::new(MAX_KV_ANSWERS));
        Self { identity, engine, indexer, files, metrics, drain, kv_answers }
    }
}

/// Serves until the drain stops, then lets connections write what they have, for at most two seconds.
pub async fn serve(listener: TcpListener, service: Arc<Service>) {
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = service.drain.stopped() => break,
        };
        match accepted {
            Ok((socket, peer)) if connections.len() < MAX_CONNECTIONS => {
                let service = service.clone();
                connections.spawn(async move {
                    service.metrics.connections.inc();
                    connection::serve(socket, peer, &service).await;
                    service.metrics.connections.dec();
                });
            }
            Ok((socket, peer)) => {
                tracing::warn!(%peer, limit = MAX_CONNECTIONS, "too many connections; one more is refused");
                refuse(&socket);
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
    if tokio::time::timeout(FLUSH, connections.wait()).await.is_err() {
        tracing::warn!(connections = connections.len(), "connections did not end in time");
    }
}

/// Says why, as far as the socket's buffer takes it at once.
fn refuse(socket: &TcpStream) {
    let mut frame = bytes::BytesMut::new();
    let message = format!("more than {MAX_CONNECTIONS} connections");
    protocol::request_plane::encode_frame(&failed(0, ErrorCode::Overloaded, message), &mut frame);
    if let Err(error) = socket.try_write(&frame) {
        tracing::debug!(%error, "refusal not written");
    }
}

fn failed(stream_id: u64, code: ErrorCode, message: impl Into<String>) -> ServerFrame {
    let failed = Failed { code: code.into(), message: message.into(), not_begun: false };
    ServerFrame { stream_id, body: Some(server_frame::Body::Failed(failed)) }
}
