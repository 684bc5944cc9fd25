//! Agents of other workers that ours has loaded. To load one is to connect to it, so they are kept from fetch to fetch.
//!
//! NIXL names agents, and takes one that is forgotten for gone, whatever it still reads there. So each is loaded once, and
//! forgotten when nobody has it any more.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Agent;
use crate::transfer::wire::AgentHead;

/// How long an agent is kept that nothing is read from: workers of one deployment come back to each other.
const KEEP: Duration = Duration::from_secs(300);

/// Another worker's agent.
pub(in crate::transfer) struct Remote {
    agent: Arc<Agent>,
    name: String,
    base: u64,
    broken: AtomicBool,
}

impl Remote {
    /// Our own agent, which has loaded it.
    pub(super) fn agent(&self) -> &Agent {
        &self.agent
    }

    /// As our agent knows it.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Where its arena begins.
    pub(super) fn base(&self) -> u64 {
        self.base
    }

    /// A read has failed: the connection is not used again.
    pub(super) fn set_broken(&self) {
        self.broken.store(true, Relaxed);
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Relaxed)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.agent.forget(&self.name);
    }
}

/// Those that are known, by the life of their worker.
pub(in crate::transfer) struct Remotes {
    agent: Arc<Agent>,
    known: Mutex<HashMap<String, Known>>,
}

struct Known {
    remote: Arc<Remote>,
    used: Instant,
}

impl Known {
    /// Whether a read or a fetch has it.
    fn is_used(&self) -> bool {
        Arc::strong_count(&self.remote) > 1
    }

    fn take(&mut self) -> io::Result<Arc<Remote>> {
        if self.remote.is_broken() {
            return Err(io::Error::other("a NIXL read from it has failed, and another has not ended"));
        }
        self.used = Instant::now();
        Ok(self.remote.clone())
    }
}

impl Remotes {
    pub(super) fn new(agent: Arc<Agent>) -> Self {
        Self { agent, known: Mutex::default() }
    }

    /// The agent of a worker, if it is known. Forgets those that have not been used for long.
    pub(super) fn get(&self, boot_epoch: &str) -> io::Result<Option<Arc<Remote>>> {
        let mut known = self.known.lock();
        known.retain(|_, known| known.is_used() || known.used.elapsed() < KEEP && !known.remote.is_broken());
        known.get_mut(boot_epoch).map(Known::take).transpose()
    }

    /// Loads it, unless another fetch has done so meanwhile.
    pub(super) fn load(&self, boot_epoch: &str, head: &AgentHead) -> io::Result<Arc<Remote>> {
        let mut known = self.known.lock();
        if let Some(known) = known.get_mut(boot_epoch) {
            return known.take();
        }
        let name = self.agent.load(&head.metadata)?;
        let (agent, base, broken) = (self.agent.clone(), head.base, AtomicBool::new(false));
        let remote = Arc::new(Remote { agent, name, base, broken });
        known.insert(boot_epoch.to_owned(), Known { remote: remote.clone(), used: Instant::now() });
        Ok(remote)
    }

    /// How many have an agent, [`Self`] among them.
    #[cfg(all(test, feature = "nixl"))]
    pub(in crate::transfer) fn holders(&self, boot_epoch: &str) -> usize {
        self.known.lock().get(boot_epoch).map_or(0, |known| Arc::strong_count(&known.remote))
    }
}
