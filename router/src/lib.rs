//! The router: an OpenAI frontend, preprocessing, discovery, KV event ingest, and dispatch to workers.
//!
//! The decision itself is pure and lives in `routing` and `kv-index`; this crate does the IO around it.

mod again;
pub mod backend;
pub mod config;
pub mod discovery;
pub mod dispatch;
pub mod http;
mod index;
mod ingest;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod openai;
pub mod preprocess;
pub mod proxy;
pub mod replicas;
mod request_plane;
pub mod service;
pub mod stream;
mod workers;
