//! A real agent over loopback: TCP request plane, ZeroMQ events, file registration, HTTP admin. Only the engine is a
//! double, so that a test decides when each token comes.

#[path = "agent/events.rs"]
mod events;
#[path = "agent/harness.rs"]
mod harness;
#[path = "agent/kubernetes.rs"]
mod kubernetes;
#[path = "agent/life.rs"]
mod life;
#[path = "agent/protocol_errors.rs"]
mod protocol_errors;
#[path = "agent/streams.rs"]
mod streams;
#[path = "agent/transfer.rs"]
mod transfer;
