//! Agents of other workers that ours has loaded. To load one is to connect to it, so they are kept from fetch to fetch.
//!
//! NIXL names agents, and takes one that is forgotten for gone, whatever it still reads there. So each is loaded once, and
//! forgotten when nothing is read from it: after an error as soon as the last read has ended, otherwise when nobody has it any more.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Agent;
use crate::transfer::wire::AgentHead;

/// How long an agent is kept that nothing is read from: workers of one deployment come back to each other.
const KEEP: Duration = Duration::from_secs(300);
/// Reads from a worker that hang, each with its room of 4 MiB, after which no fetch begins there: others would only hang, too.
/// Those under way go on.
pub(in crate::transfer) const MOST_LEFT: usize = 4;

/// Another worker's agent.
pub(in crate::transfer) struct Remote {
    agent: Arc<Agent>,
    name: String,
    base: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Reads that have not ended.
    reads: usize,
    /// Reads that nobody has waited for for a while, whose room is not given back yet.
    left: usize,
    /// A read has failed: the connection is not used again.
    broken: bool,
    /// The connection has ended.
    forgotten: bool,
}

impl State {
    fn check_whole(&self) -> io::Result<()> {
        if self.broken {
            return Err(io::Error::other("a NIXL read from it has failed, and what it wrote to is not free yet"));
        }
        Ok(())
    }

    /// Refuses what would not come to an end.
    fn check(&self) -> io::Result<()> {
        self.check_whole()?;
        if self.left >= MOST_LEFT {
            let left = self.left;
            return Err(io::Error::other(format!("{left} NIXL reads from it were given up and have not ended")));
        }
        Ok(())
    }
}

impl Remote {
    fn new(agent: Arc<Agent>, name: String, base: u64) -> Self {
        Self { agent, name, base, state: Mutex::default() }
    }

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

    /// A read that is about to begin; refused after an error.
    pub(super) fn read(self: &Arc<Self>) -> io::Result<UnderWay> {
        let mut state = self.state.lock();
        state.check_whole()?;
        state.reads += 1;
        Ok(UnderWay(self.clone()))
    }

    /// A read has failed: nothing begins here any more, and the connection ends with the last read.
    pub(super) fn set_broken(&self) {
        self.state.lock().broken = true;
    }

    /// One of the reads that nobody waits for does not end.
    pub(super) fn hangs(&self) {
        self.state.lock().left += 1;
    }

    /// The room of such a read is given back.
    pub(super) fn hung(&self) {
        self.state.lock().left -= 1;
    }

    /// Whether the connection has ended.
    pub(in crate::transfer) fn is_forgotten(&self) -> bool {
        self.state.lock().forgotten
    }

    /// Ends the connection, once: another one may have the name after that.
    fn forget(&self, state: &mut State) {
        if !std::mem::replace(&mut state.forgotten, true) {
            self.agent.forget(&self.name);
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let mut state = std::mem::take(self.state.get_mut());
        self.forget(&mut state);
    }
}

/// A read that has not ended, as far as the other worker's agent is concerned. Dropped when it has, after its request is released.
pub(super) struct UnderWay(Arc<Remote>);

impl UnderWay {
    pub(super) fn remote(&self) -> &Arc<Remote> {
        &self.0
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.reads -= 1;
        if state.broken && state.reads == 0 {
            self.0.forget(&mut state);
        }
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

    fn is_broken(&self) -> bool {
        self.remote.state.lock().broken
    }

    fn take(&mut self) -> io::Result<Arc<Remote>> {
        self.remote.state.lock().check()?;
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
        known.retain(|_, known| known.is_used() || known.used.elapsed() < KEEP && !known.is_broken());
        known.get_mut(boot_epoch).map(Known::take).transpose()
    }

    /// Loads it, unless another fetch has done so meanwhile.
    pub(super) fn load(&self, boot_epoch: &str, head: &AgentHead) -> io::Result<Arc<Remote>> {
        let mut known = self.known.lock();
        if let Some(known) = known.get_mut(boot_epoch) {
            return known.take();
        }
        let name = self.agent.load(&head.metadata)?;
        let remote = Arc::new(Remote::new(self.agent.clone(), name, head.base));
        known.insert(boot_epoch.to_owned(), Known { remote: remote.clone(), used: Instant::now() });
        Ok(remote)
    }

    /// How many have an agent, [`Self`] among them.
    #[cfg(all(test, feature = "nixl"))]
    pub(in crate::transfer) fn holders(&self, boot_epoch: &str) -> usize {
        self.known.lock().get(boot_epoch).map_or(0, |known| Arc::strong_count(&known.remote))
    }

    /// How many reads from a worker hang.
    #[cfg(all(test, feature = "nixl"))]
    pub(in crate::transfer) fn hanging(&self, boot_epoch: &str) -> usize {
        self.known.lock().get(boot_epoch).map_or(0, |known| known.remote.state.lock().left)
    }

    /// Whether the connection to a worker has ended while somebody has its agent still.
    #[cfg(all(test, feature = "nixl"))]
    pub(in crate::transfer) fn has_forgotten(&self, boot_epoch: &str) -> bool {
        self.known
            .lock()
            .get(boot_epoch)
            .is_some_and(|known| known.remote.is_forgotten() && !known.remote.agent.knows(&known.remote.name))
    }
}
