//! `KvIndexer`: which worker holds which prefix, for Python.
//!
//! Conversions around the index of the router, and a lock around its writing side. The lock is only ever taken with the GIL
//! released, so that no thread can hold one of them while it waits for the other; reads take none.

mod dump;

use std::collections::HashMap;

use kv_hashing::{BlockHash, BlockSize, HashSpace};
use kv_index::tree::{self, Limits, Reader, Writer};
use kv_index::{EngineHash, KvEventData, StoredBlock, Tier, WorkerId, WorkerRank};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments;

/// What an event did to the index.
#[pyclass(frozen, get_all, eq)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Applied {
    added: usize,
    removed: usize,
    orphans: usize,
    unknown: usize,
    refused: usize,
}

impl From<kv_index::Applied> for Applied {
    fn from(applied: kv_index::Applied) -> Self {
        let kv_index::Applied { added, removed, orphans, unknown, refused } = applied;
        Self { added, removed, orphans, unknown, refused }
    }
}

#[pymethods]
impl Applied {
    fn __repr__(&self) -> String {
        let Self { added, removed, orphans, unknown, refused } = self;
        format!("Applied(added={added}, removed={removed}, orphans={orphans}, unknown={unknown}, refused={refused})")
    }
}

/// How many leading blocks of a prompt a rank holds, each counted in the fastest tier that has it.
#[pyclass(frozen, get_all, eq)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Overlap {
    device: u32,
    host: u32,
    disk: u32,
    shared: u32,
}

#[pymethods]
impl Overlap {
    /// Blocks in any tier.
    #[getter]
    fn total(&self) -> u32 {
        self.device + self.host + self.disk + self.shared
    }

    fn __repr__(&self) -> String {
        let Self { device, host, disk, shared } = self;
        format!("Overlap(device={device}, host={host}, disk={disk}, shared={shared})")
    }
}

/// Which worker holds which prefix, built from stored, removed and cleared events.
#[pyclass(frozen)]
pub(crate) struct KvIndexer {
    index: Mutex<Writer>,
    reader: Reader,
    size: BlockSize,
}

impl KvIndexer {
    fn apply(&self, py: Python<'_>, rank: WorkerRank, tier: Tier, data: KvEventData) -> Applied {
        py.detach(|| self.index.lock().apply(rank, tier, &data)).into()
    }

    fn overlaps(&self, py: Python<'_>, blocks: &[BlockHash]) -> kv_index::Overlaps {
        py.detach(|| self.reader.find_matches(blocks))
    }

    /// The most that any rank of each worker holds.
    fn by_worker(&self, py: Python<'_>, blocks: &[BlockHash]) -> HashMap<u64, u32> {
        let mut workers = HashMap::new();
        for (rank, blocks) in self.overlaps(py, blocks).iter() {
            let most = workers.entry(rank.worker.0).or_default();
            *most = blocks.total().max(*most);
        }
        workers
    }

    fn prompt(
        &self,
        tokens: &Bound<'_, PyAny>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
    ) -> PyResult<Vec<BlockHash>> {
        let space = HashSpace::new(lora_name, cache_namespace);
        Ok(arguments::block_hashes(tokens.py(), &arguments::tokens(tokens, "tokens")?, self.size, space))
    }
}

#[pymethods]
impl KvIndexer {
    #[new]
    #[pyo3(signature = (block_size=16))]
    fn new(#[pyo3(from_py_with = arguments::integer)] block_size: i128) -> PyResult<Self> {
        let (index, reader) = tree::new(Limits::default());
        Ok(Self { index: Mutex::new(index), reader, size: arguments::block_size(block_size)? })
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.size.get()
    }

    /// A run of blocks became reusable on a worker.
    #[pyo3(signature = (
        worker, token_ids, block_hashes, parent_hash=None, *, dp_rank=0, medium=None, lora_name=None, cache_namespace=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn apply_stored(
        &self,
        #[pyo3(from_py_with = arguments::integer)] worker: i128,
        token_ids: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        parent_hash: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = arguments::integer)] dp_rank: i128,
        medium: Option<&str>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
    ) -> PyResult<Applied> {
        let py = token_ids.py();
        let (rank, (_, tier)) = (arguments::rank(worker, dp_rank)?, arguments::medium(medium)?);
        let parent = parent_hash.map(|hash| arguments::one_hash(hash, "parent_hash")).transpose()?;
        let tokens = arguments::tokens(token_ids, "token_ids")?;
        let engine = arguments::hashes(block_hashes, "block_hashes")?;
        arguments::run_of_blocks(tokens.len(), &engine, parent, self.size)?;
        let local = arguments::block_hashes(py, &tokens, self.size, HashSpace::new(lora_name, cache_namespace));
        let blocks = engine.into_iter().zip(local);
        let blocks = blocks.map(|(engine, local)| StoredBlock { engine: EngineHash(engine), local }).collect();
        let data = KvEventData::Stored { parent: parent.map(EngineHash), blocks };
        Ok(self.apply(py, rank, tier, data))
    }

    /// Blocks are gone from a worker.
    #[pyo3(signature = (worker, block_hashes, *, dp_rank=0, medium=None))]
    fn apply_removed(
        &self,
        #[pyo3(from_py_with = arguments::integer)] worker: i128,
        block_hashes: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::integer)] dp_rank: i128,
        medium: Option<&str>,
    ) -> PyResult<Applied> {
        let (rank, (_, tier)) = (arguments::rank(worker, dp_rank)?, arguments::medium(medium)?);
        let blocks = arguments::hashes(block_hashes, "block_hashes")?.into_iter().map(EngineHash).collect();
        Ok(self.apply(block_hashes.py(), rank, tier, KvEventData::Removed { blocks }))
    }

    /// Every block of a rank is gone, in every tier.
    #[pyo3(signature = (worker, *, dp_rank=0))]
    fn apply_cleared(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::integer)] worker: i128,
        #[pyo3(from_py_with = arguments::integer)] dp_rank: i128,
    ) -> PyResult<Applied> {
        Ok(self.apply(py, arguments::rank(worker, dp_rank)?, Tier::Device, KvEventData::Cleared))
    }

    /// Forgets a worker; returns how many blocks it held.
    fn remove_worker(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::integer)] worker: i128,
    ) -> PyResult<usize> {
        let worker = arguments::worker(worker)?;
        Ok(py.detach(|| self.index.lock().remove_worker(worker)))
    }

    /// Leading blocks of a prompt that each worker holds, in any tier; of several ranks the best.
    #[pyo3(signature = (tokens, *, lora_name=None, cache_namespace=None))]
    fn find_matches(
        &self,
        tokens: &Bound<'_, PyAny>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
    ) -> PyResult<HashMap<u64, u32>> {
        Ok(self.by_worker(tokens.py(), &self.prompt(tokens, lora_name, cache_namespace)?))
    }

    /// Like `find_matches`, from the local hashes of the prompt's blocks.
    fn find_matches_for_hashes(&self, block_hashes: &Bound<'_, PyAny>) -> PyResult<HashMap<u64, u32>> {
        let blocks: Vec<_> = arguments::hashes(block_hashes, "block_hashes")?.into_iter().map(BlockHash).collect();
        Ok(self.by_worker(block_hashes.py(), &blocks))
    }

    /// Like `find_matches`, by (worker, rank) and tier.
    #[pyo3(signature = (tokens, *, lora_name=None, cache_namespace=None))]
    fn find_matches_by_rank(
        &self,
        tokens: &Bound<'_, PyAny>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
    ) -> PyResult<HashMap<(u64, u32), Overlap>> {
        let overlaps = self.overlaps(tokens.py(), &self.prompt(tokens, lora_name, cache_namespace)?);
        let shown = |blocks: kv_index::TierBlocks| Overlap {
            device: blocks.device,
            host: blocks.host,
            disk: blocks.disk,
            shared: blocks.shared,
        };
        Ok(overlaps.iter().map(|(rank, blocks)| ((rank.worker.0, rank.dp_rank), shown(blocks))).collect())
    }

    /// Workers that hold anything, in order.
    fn workers(&self, py: Python<'_>) -> Vec<u64> {
        py.detach(|| {
            let index = self.index.lock();
            let holding = index.ranks().filter(|rank| self.reader.blocks(*rank).total() > 0);
            let mut workers: Vec<u64> = holding.map(|rank| rank.worker.0).collect();
            workers.dedup();
            workers
        })
    }

    /// Distinct prefixes.
    fn __len__(&self) -> usize {
        self.reader.len()
    }

    /// The whole content.
    fn dump(&self, py: Python<'_>) -> Vec<u8> {
        py.detach(|| dump::write(&self.index.lock(), self.size))
    }

    /// Replaces the content by that of a dump.
    fn load(&self, py: Python<'_>, dump: &[u8]) -> PyResult<()> {
        let loaded = py.detach(|| {
            let events = dump::read(dump, self.size)?;
            let mut index = self.index.lock();
            let workers: Vec<WorkerId> = index.ranks().map(|rank| rank.worker).collect();
            for worker in workers {
                index.remove_worker(worker);
            }
            for (rank, tier, data) in events {
                index.apply(rank, tier, &data);
            }
            Ok::<_, dump::DumpError>(())
        });
        loaded.map_err(|error| PyValueError::new_err(error.to_string()))
    }
}
