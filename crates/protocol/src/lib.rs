//! Wire types of every plane, and their encoding; no sockets.
//!
//! One module per wire: [`request_plane`] (router to worker, prost frames), [`kv_event`] and [`event_plane`] (KV events and
//! load over publish/subscribe, msgpack), [`vllm_events`] (KV events as engines publish them themselves), [`replica_sync`]
//! (running requests, router to router, msgpack), [`metadata`] (what a worker registers, Dynamo-compatible JSON), [`model_directory`] (a
//! tokenizer and chat template as Hugging Face lays them out).
#![forbid(unsafe_code)]

pub mod event_plane;
pub mod kv_event;
pub mod metadata;
pub mod model_directory;
pub mod replica_sync;
pub mod request_plane;
pub mod vllm_events;
