//! What the suites share: the built binary, processes that end with the test, HTTP, and waiting with a deadline.
//!
//! Suites are in tests/tests, one for each boundary: `up` (processes on loopback) and `cluster` (pods in Kubernetes).

pub mod chat;
pub mod cluster;
pub mod process;
pub mod wait;
