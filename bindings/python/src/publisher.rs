//! `KvPublisher`: what a Python engine calls where it allocates and evicts blocks.
//!
//! A call checks its arguments, puts the event into a bounded queue and returns: it never waits for a socket or a
//! subscriber. One thread of its own, which knows nothing of Python, sends. Its wire is vLLM's (docs/decisions/0010).

mod layout;
mod outbox;
mod ring;
mod sender;

use std::sync::Arc;

use kv_hashing::BlockSize;
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::arguments;
use layout::Event;
use outbox::{Outbox, Pushed};
use sender::{Sender, Settings, StartError};

/// Publishes the KV events of one rank of one engine.
#[pyclass(frozen)]
pub(crate) struct KvPublisher {
    outbox: Arc<Outbox>,
    /// `None` once closed.
    sender: Mutex<Option<Sender>>,
    endpoint: String,
    replay_endpoint: Option<String>,
    size: BlockSize,
    /// The process that owns the thread: a forked child has the object, but not the thread.
    process: u32,
}

impl KvPublisher {
    fn push(&self, event: Event, words: usize) -> PyResult<bool> {
        if self.process != std::process::id() {
            let message = "this publisher belongs to the parent process: make one after the fork";
            return Err(PyRuntimeError::new_err(message));
        }
        match self.outbox.push(event, words) {
            Pushed::Queued => Ok(true),
            Pushed::Dropped => Ok(false),
            Pushed::Closed => Err(PyRuntimeError::new_err("the publisher is closed")),
        }
    }
}

#[pymethods]
impl KvPublisher {
    #[new]
    #[pyo3(signature = (
        endpoint="tcp://*:5557", *, replay_endpoint=None, block_size=16, dp_rank=0, topic="kv-events",
        max_queued_events=10_000, max_replay_events=10_000
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    fn new(
        py: Python<'_>,
        endpoint: &str,
        replay_endpoint: Option<&str>,
        #[pyo3(from_py_with = arguments::integer)] block_size: i128,
        #[pyo3(from_py_with = arguments::integer)] dp_rank: i128,
        topic: &str,
        #[pyo3(from_py_with = arguments::integer)] max_queued_events: i128,
        #[pyo3(from_py_with = arguments::integer)] max_replay_events: i128,
    ) -> PyResult<Self> {
        let size = arguments::block_size(block_size)?;
        let outbox = Arc::new(Outbox::new(arguments::events(max_queued_events, "max_queued_events")?));
        let settings = Settings {
            topic: topic.to_owned(),
            dp_rank: arguments::dp_rank(dp_rank)?,
            max_replay_events: arguments::events(max_replay_events, "max_replay_events")?,
        };
        let start = || Sender::start(endpoint, replay_endpoint, settings, outbox.clone());
        let sender = py.detach(start).map_err(|error| match &error {
            StartError::Endpoint(_) => PyValueError::new_err(error.to_string()),
            StartError::Bind { source, .. } => match source.raw_os_error() {
                Some(code) => PyOSError::new_err((code, error.to_string())),
                None => PyOSError::new_err(error.to_string()),
            },
            StartError::Thread(_) | StartError::Socket(_) | StartError::Silent => {
                PyRuntimeError::new_err(error.to_string())
            }
        })?;
        let (endpoint, replay_endpoint) = (sender.endpoint().to_owned(), sender.replay_endpoint().map(str::to_owned));
        let (sender, process) = (Mutex::new(Some(sender)), std::process::id());
        Ok(Self { outbox, sender, endpoint, replay_endpoint, size, process })
    }

    /// A run of blocks became reusable; false when the queue was full.
    #[pyo3(signature = (token_ids, block_hashes, parent_hash=None, lora_name=None, medium=None))]
    fn stored(
        &self,
        token_ids: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        parent_hash: Option<&Bound<'_, PyAny>>,
        lora_name: Option<String>,
        medium: Option<&str>,
    ) -> PyResult<bool> {
        let (medium, _) = arguments::medium(medium)?;
        let parent_block_hash = parent_hash.map(|hash| arguments::one_hash(hash, "parent_hash")).transpose()?;
        let token_ids = arguments::tokens(token_ids, "token_ids")?;
        let block_hashes = arguments::hashes(block_hashes, "block_hashes")?;
        arguments::run_of_blocks(token_ids.len(), &block_hashes, parent_block_hash, self.size)?;
        if block_hashes.is_empty() {
            return Ok(true);
        }
        let words = token_ids.len() + 2 * block_hashes.len();
        let block_size = self.size.get() as u32;
        let stored =
            Event::Stored { block_hashes, parent_block_hash, token_ids, block_size, lora_id: None, medium, lora_name };
        self.push(stored, words)
    }

    /// Blocks are gone; false when the queue was full.
    #[pyo3(signature = (block_hashes, medium=None))]
    fn removed(&self, block_hashes: &Bound<'_, PyAny>, medium: Option<&str>) -> PyResult<bool> {
        let (medium, _) = arguments::medium(medium)?;
        let block_hashes = arguments::hashes(block_hashes, "block_hashes")?;
        if block_hashes.is_empty() {
            return Ok(true);
        }
        let words = 2 * block_hashes.len();
        self.push(Event::Removed { block_hashes, medium }, words)
    }

    /// Every block of the rank is gone, in every medium; false when the queue was full.
    fn cleared(&self) -> PyResult<bool> {
        self.push(Event::Cleared {}, 0)
    }

    /// Sends what is queued, for at most a second, and ends the thread. Closing again does nothing.
    fn close(&self, py: Python<'_>) {
        if self.process != std::process::id() {
            return;
        }
        self.outbox.close();
        let sender = self.sender.lock().take();
        py.detach(|| sender.map(Sender::finish));
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    /// Where subscribers connect, with the port that was bound.
    #[getter]
    fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Where subscribers ask for what they missed.
    #[getter]
    fn replay_endpoint(&self) -> Option<&str> {
        self.replay_endpoint.as_deref()
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.size.get()
    }

    /// Events handed to the socket.
    #[getter]
    fn published(&self) -> u64 {
        self.outbox.published()
    }

    /// Events lost because the queue was full.
    #[getter]
    fn dropped(&self) -> u64 {
        self.outbox.dropped()
    }

    /// Events in the queue.
    #[getter]
    fn queued(&self) -> usize {
        self.outbox.queued()
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.outbox.is_closed()
    }

    fn __repr__(&self) -> String {
        let (endpoint, state) = (&self.endpoint, if self.closed() { "closed" } else { "open" });
        format!("<KvPublisher {endpoint} {state} published={} dropped={}>", self.published(), self.dropped())
    }
}

impl Drop for KvPublisher {
    fn drop(&mut self) {
        // The thread sends what is queued and ends by itself; a finalizer should not wait for it. A forked child must not
        // touch a lock that the thread may have held at the fork.
        if self.process == std::process::id() {
            self.outbox.close();
        }
    }
}
