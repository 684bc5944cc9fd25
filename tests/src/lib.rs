//! What the suites share: the built binary, processes that end with the test, HTTP, servers that play an engine's, and waiting
//! with a deadline.
//!
//! Suites are in tests/tests, one for each boundary: `up` (processes on loopback), `engines` (the same beside servers that are
//! played), `vllm` (beside the real one) and `cluster` (pods in Kubernetes).

pub mod byte_model;
pub mod chat;
pub mod cluster;
pub mod engine;
pub mod model;
pub mod process;
pub mod system;
pub mod wait;
