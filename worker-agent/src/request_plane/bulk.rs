//! Answers of one connection that take time: KV queries, samples and model files, sent one chunk at a time between the frames of streams.
//!
//! The state behind a dump is copied under the indexer's lock and ordered, both on a blocking thread, and whoever else needs
//! the indexer awaits its lock without blocking a thread of the runtime; a chunk is encoded only when the connection has
//! room for it.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kv_index::local::{Answer, LocalIndexer};
use kv_index::{EngineHash, KvEvent, Tier};
use protocol::event_plane::encode_events;
use protocol::request_plane::{
    ArtifactChunk, CHUNK_BYTES, ErrorCode, KvAnswer, KvBlock, KvQuery, KvSample, KvSampled, ServerFrame, encode_frame,
    kv_answer::Kind, server_frame::Body,
};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;

use super::{Service, failed};
use crate::publisher::wire;

/// Payload that a chunk aims at: 64 KiB leave a 1 Gbit/s link in half a millisecond. A single event may take more, never
/// more than [`CHUNK_BYTES`].
const CHUNK_AIM: usize = CHUNK_BYTES / 4;
/// Most large answers on one connection at once.
const MAX_OPEN: usize = 16;
/// Longest wait for a turn among the KV answers of all connections.
const TURN: Duration = Duration::from_secs(30);

/// Most blocks of a sample, asked for and drawn.
const MAX_SAMPLE: usize = 1024;

/// What is asked of the local indexer.
pub(super) enum Question {
    /// Events, or the whole state.
    Query(KvQuery),
    /// A few blocks.
    Sample(KvSample),
}

impl Question {
    fn dp_rank(&self) -> u32 {
        match self {
            Self::Query(query) => query.dp_rank,
            Self::Sample(sample) => sample.dp_rank,
        }
    }
}

/// The large answers of a connection, in turn.
#[derive(Default)]
pub(super) struct Bulk {
    preparing: JoinSet<Prepared>,
    /// Ids in `preparing` that are still wanted.
    wanted: HashSet<u64>,
    sending: VecDeque<(u64, Source)>,
}

/// A stream's answer, or why there is none.
pub(super) type Prepared = (u64, Result<Source, (ErrorCode, String)>);

/// The rest of an answer.
pub(super) enum Source {
    /// Of a query.
    Events {
        kind: Kind,
        worker_id: u64,
        events: VecDeque<Arc<KvEvent>>,
        last_event_id: Option<u64>,
        _turn: OwnedSemaphorePermit,
    },
    /// Of a sample.
    Sampled(KvSampled),
    /// Of a file.
    File(Bytes),
}

impl Bulk {
    /// Nothing to prepare or send.
    pub(super) fn is_idle(&self) -> bool {
        self.sending.is_empty() && self.preparing.is_empty()
    }

    /// Whether the connection takes no more of them.
    pub(super) fn is_full(&self) -> bool {
        self.sending.len() + self.preparing.len() >= MAX_OPEN
    }

    /// Starts a file's stream.
    pub(super) fn send_file(&mut self, id: u64, file: Bytes) {
        self.sending.push_back((id, Source::File(file)));
    }

    /// Starts the answer to a question.
    pub(super) fn ask(&mut self, id: u64, question: Question, service: &Arc<Service>) {
        let service = service.clone();
        self.wanted.insert(id);
        self.preparing.spawn(async move {
            let turn = tokio::time::timeout(TURN, service.kv_answers.clone().acquire_owned()).await;
            let Ok(Ok(turn)) = turn else {
                let message = format!("no turn among the KV queries within {} s", TURN.as_secs());
                return (id, Err((ErrorCode::Overloaded, message)));
            };
            let prepared = tokio::task::spawn_blocking(move || prepare(question, &service, turn)).await;
            let panicked = |_| Err((ErrorCode::Overloaded, "the KV query could not be prepared".into()));
            (id, prepared.unwrap_or_else(panicked))
        });
    }

    /// The router no longer wants an answer.
    pub(super) fn cancel(&mut self, id: u64) {
        self.wanted.remove(&id);
        self.sending.retain(|(other, _)| *other != id);
    }

    /// Waits until there is something to write; returns an answer that became ready just now. Only when not idle.
    pub(super) async fn ready(&mut self) -> Option<Prepared> {
        match self.sending.is_empty() {
            true => self.preparing.join_next().await?.ok(),
            false => self.preparing.try_join_next()?.ok(),
        }
    }

    /// Takes in what [`Self::ready`] returned, and writes one chunk of the answer whose turn it is.
    pub(super) fn write_chunk(&mut self, prepared: Option<Prepared>, out: &mut BytesMut) {
        match prepared.filter(|(id, _)| self.wanted.remove(id)) {
            Some((id, Ok(source))) => self.sending.push_back((id, source)),
            Some((id, Err((code, message)))) => encode_frame(&failed(id, code, message), out),
            None => {}
        }
        let Some((id, mut source)) = self.sending.pop_front() else { return };
        let (body, end) = source.next_chunk();
        encode_frame(&ServerFrame { stream_id: id, body: Some(body) }, out);
        if !end {
            self.sending.push_back((id, source));
        }
    }
}

/// Copies what is asked for, and puts it in order. Blocks; cost: see [`kv_index::local::LocalIndexer`].
fn prepare(question: Question, service: &Service, turn: OwnedSemaphorePermit) -> Result<Source, (ErrorCode, String)> {
    let answer = {
        let indexer = service.indexer.blocking_lock();
        let (own, dp_rank) = (indexer.dp_rank(), question.dp_rank());
        if dp_rank != own {
            let message = format!("dp_rank {dp_rank}; this worker has only {own}");
            return Err((ErrorCode::InvalidRequest, message));
        }
        match question {
            Question::Query(KvQuery { start: Some(start), end, .. }) => indexer.range(start, end),
            Question::Query(_) => Answer::Dump(indexer.dump()),
            Question::Sample(sample) => return sampled(&sample, &indexer).map(Source::Sampled),
        }
    };
    let (kind, events, last_event_id) = match answer {
        Answer::Events { events, last_id } => (Kind::Events, events.into(), last_id),
        Answer::Dump(snapshot) => {
            service.metrics.dumps.inc();
            let last_id = snapshot.last_id();
            (Kind::Dump, snapshot.into_events().into_iter().map(Arc::new).collect(), last_id)
        }
    };
    Ok(Source::Events { kind, worker_id: service.identity.instance_id, events, last_event_id, _turn: turn })
}

/// Answers a sample, from one state of the indexer.
fn sampled(sample: &KvSample, indexer: &LocalIndexer) -> Result<KvSampled, (ErrorCode, String)> {
    let draw = sample.draw as usize;
    if sample.blocks.len().max(draw) > MAX_SAMPLE {
        return Err((ErrorCode::InvalidRequest, format!("a sample of over {MAX_SAMPLE} blocks")));
    }
    let holds =
        |block: &KvBlock| tier(block.tier).is_some_and(|tier| indexer.holds(tier, EngineHash(block.engine_hash)));
    let drawn = indexer.draw(rand::random(), draw).into_iter();
    Ok(KvSampled {
        held: sample.blocks.iter().map(holds).collect(),
        drawn: drawn.map(|(tier, engine)| KvBlock { tier: tier as u32, engine_hash: engine.0 }).collect(),
        last_event_id: indexer.last_id(),
    })
}

/// A tier by its number on the wire, which is that of its declaration.
fn tier(number: u32) -> Option<Tier> {
    [Tier::Device, Tier::Host, Tier::Disk, Tier::Shared].into_iter().find(|tier| *tier as u32 == number)
}

impl Source {
    /// The next frame, and whether it is the last.
    fn next_chunk(&mut self) -> (Body, bool) {
        match self {
            Self::Sampled(sampled) => (Body::KvSampled(std::mem::take(sampled)), true),
            Self::File(rest) => {
                let data = rest.split_to(rest.len().min(CHUNK_AIM));
                let end = rest.is_empty();
                (Body::ArtifactChunk(ArtifactChunk { data, end }), end)
            }
            Self::Events { kind, worker_id, events, last_event_id, .. } => {
                let (mut chunk, mut bytes) = (Vec::new(), 0);
                while let Some(event) = events.front() {
                    bytes += wire::encoded_bytes(event);
                    if bytes > CHUNK_AIM && !chunk.is_empty() {
                        break;
                    }
                    chunk.push(wire::router_event(*worker_id, event));
                    events.pop_front();
                }
                let end = events.is_empty();
                let last_event_id = last_event_id.filter(|_| end);
                let kind = (*kind).into();
                (Body::KvAnswer(KvAnswer { kind, events: encode_events(&chunk).into(), last_event_id, end }), end)
            }
        }
    }
}
