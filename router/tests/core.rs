//! The router's core against workers that speak the real protocols: TCP request plane, ZeroMQ events, file discovery.
//!
//! The workers (`core/worker.rs`) keep a real local indexer; what a test may bend is what happens to messages on their way.

#[path = "core/adapters.rs"]
mod adapters;
#[path = "core/events.rs"]
mod events;
#[path = "core/harness.rs"]
mod harness;
#[path = "core/load.rs"]
mod load;
#[path = "core/migration.rs"]
mod migration;
#[path = "core/pairing.rs"]
mod pairing;
#[path = "core/prefill.rs"]
mod prefill;
#[path = "core/recovery.rs"]
mod recovery;
#[path = "core/replicas.rs"]
mod replicas;
#[path = "core/requests.rs"]
mod requests;
#[path = "core/second_half.rs"]
mod second_half;
#[path = "core/selection.rs"]
mod selection;
#[path = "core/truth.rs"]
mod truth;
#[path = "core/worker.rs"]
mod worker;
