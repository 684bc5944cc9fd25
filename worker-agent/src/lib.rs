//! The worker agent: an engine, and everything that makes it a member of a deployment.
//!
//! Owns engines, the KV arena, the request-plane server, the KV event publisher with its local indexer, registration and
//! drain. It never chooses a worker and never speaks HTTP to clients; that is the router.

mod accelerators;
pub mod admin;
pub mod agent;
pub mod artifacts;
pub mod config;
pub mod drain;
pub mod engine;
pub mod metrics;
pub mod publisher;
pub mod registration;
pub mod request_plane;
pub mod source;
pub mod transfer;
