//! Asks a worker's local indexer for events or for its whole state, over the request plane.

use std::time::Duration;

use kv_index::KvEvent;
use protocol::event_plane::{EventFrameError, decode_events};
use protocol::request_plane::{ClientFrame, KvQuery, client_frame, kv_answer::Kind, server_frame};
use tokio::time::timeout;

use super::wire;
use crate::request_plane::{Client, OpenError};

/// Longest wait for each part of an answer.
const PART: Duration = Duration::from_secs(30);

/// Most bytes of an answer: about 6M blocks.
const LIMIT: usize = 256 << 20;

/// What a worker answered.
#[derive(Debug)]
pub(super) struct Answer {
    /// It is the whole state, in synthetic events.
    pub(super) dump: bool,
    /// In order.
    pub(super) events: Vec<KvEvent>,
    /// The newest event that the answer includes.
    pub(super) last_event_id: Option<u64>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum QueryError {
    #[error("no connection: {0}")]
    Open(#[from] OpenError),
    #[error("connection lost: {0}")]
    Lost(String),
    #[error("refused: {0}")]
    Refused(String),
    #[error("no part of the answer in {} s", PART.as_secs())]
    Deadline,
    #[error("the answer is over {} MB", LIMIT >> 20)]
    TooLarge,
    #[error(transparent)]
    Malformed(#[from] EventFrameError),
    #[error("an answer of another kind")]
    Unexpected,
}

/// Asks for events `start` to `end`; without `start` for the whole state. The worker may answer a range with the whole state.
pub(super) async fn ask(
    client: &Client,
    dp_rank: u32,
    start: Option<u64>,
    end: Option<u64>,
) -> Result<Answer, QueryError> {
    let query = KvQuery { dp_rank, start, end };
    let mut frame = ClientFrame { stream_id: 0, body: Some(client_frame::Body::KvQuery(query)) };
    let mut stream = client.open(&mut frame).await?;
    let (mut events, mut bytes) = (Vec::new(), 0);
    loop {
        let part = match timeout(PART, stream.next()).await.map_err(|_| QueryError::Deadline)? {
            Some(server_frame::Body::KvAnswer(part)) => part,
            Some(server_frame::Body::Failed(failed)) => return Err(QueryError::Refused(failed.message)),
            Some(_) => return Err(QueryError::Unexpected),
            None => return Err(QueryError::Lost(stream.lost_reason())),
        };
        bytes += part.events.len();
        if bytes > LIMIT {
            return Err(QueryError::TooLarge);
        }
        if !part.events.is_empty() {
            events.extend(decode_events(&part.events)?.into_iter().map(wire::event));
        }
        if part.end {
            let dump = part.kind() == Kind::Dump;
            return Ok(Answer { dump, events, last_event_id: part.last_event_id });
        }
    }
}
