//! Python bindings: block hashes, a KV event publisher for engines, and the prefix index.
//!
//! Converts, checks and releases the GIL; what a hash, an event or an overlap *is* lives in `kv-hashing` and `kv-index`. The
//! Python package around it is `armature_kv`; its stub file is the documentation of the Python side.

mod arguments;
mod hashing;
mod indexer;
mod publisher;

use pyo3::prelude::*;

/// The native half of `armature_kv`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::hashing::{block_hashes, sequence_hashes};
    #[pymodule_export]
    use super::indexer::{Applied, KvIndexer, Overlap};
    #[pymodule_export]
    use super::publisher::KvPublisher;
}
