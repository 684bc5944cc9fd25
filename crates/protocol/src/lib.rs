//! Wire types of every plane, and their encoding; no sockets.
//!
//! One module per wire: [`request_plane`] (router to worker, prost frames), [`kv_event`] and [`event_plane`] (KV events and
//! load over publish/subscribe, msgpack), [`metadata`] (what a worker registers, Dynamo-compatible JSON).
#![forbid(unsafe_code)]

pub mod event_plane;
pub mod kv_event;
pub mod metadata;
pub mod request_plane;
