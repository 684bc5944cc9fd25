//! Asks a worker's local indexer for events, for its whole state or for a few blocks, over the request plane.

use std::time::Duration;

use kv_index::{EngineHash, KvEvent, Tier};
use protocol::event_plane::{EventFrameError, decode_events};
use protocol::request_plane::{
    ClientFrame, KvBlock, KvQuery, KvSample, KvSampled, client_frame, kv_answer::Kind, server_frame,
};
use tokio::time::timeout;

use super::wire;
use crate::index::Block;
use crate::metrics::CoreMetrics;
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

/// What a worker says of a few blocks.
#[derive(Debug)]
pub(super) struct Sampled {
    /// For each of the blocks asked for, whether it holds them.
    pub(super) held: Vec<bool>,
    /// Some that it holds, at random.
    pub(super) drawn: Vec<Block>,
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
    metrics: &CoreMetrics,
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
            events.extend(decode_events(&part.events)?.into_iter().map(|event| wire::event(event, metrics)));
        }
        if part.end {
            let dump = part.kind() == Kind::Dump;
            return Ok(Answer { dump, events, last_event_id: part.last_event_id });
        }
    }
}

/// Asks which of `blocks` the worker holds, and for `draw` blocks at random.
pub(super) async fn sample(
    client: &Client,
    dp_rank: u32,
    blocks: &[Block],
    draw: usize,
) -> Result<Sampled, QueryError> {
    let asked = blocks.iter().map(|(tier, engine)| KvBlock { tier: *tier as u32, engine_hash: engine.0 });
    let sample = KvSample { dp_rank, blocks: asked.collect(), draw: draw as u32 };
    let mut frame = ClientFrame { stream_id: 0, body: Some(client_frame::Body::KvSample(sample)) };
    let mut stream = client.open(&mut frame).await?;
    match timeout(PART, stream.next()).await.map_err(|_| QueryError::Deadline)? {
        Some(server_frame::Body::KvSampled(KvSampled { held, drawn, last_event_id })) => {
            let known = drawn.into_iter().filter_map(|block| Some((tier(block.tier)?, EngineHash(block.engine_hash))));
            Ok(Sampled { held, drawn: known.collect(), last_event_id })
        }
        Some(server_frame::Body::Failed(failed)) => Err(QueryError::Refused(failed.message)),
        Some(_) => Err(QueryError::Unexpected),
        None => Err(QueryError::Lost(stream.lost_reason())),
    }
}

/// A tier by its number on the wire, which is that of its declaration.
fn tier(number: u32) -> Option<Tier> {
    [Tier::Device, Tier::Host, Tier::Disk, Tier::Shared].into_iter().find(|tier| *tier as u32 == number)
}
