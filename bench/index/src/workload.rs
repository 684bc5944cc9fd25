//! What both sides are measured with: which worker holds which conversation, as plain numbers.
//!
//! Every worker holds conversations that begin with one of a few system prompts, the same on all workers, and go on for some
//! turns of their own; some conversations are on two workers. Each turn is one event, those of all workers interleaved.

/// Blocks of a system prompt, and how many of them there are.
pub const SYSTEM: usize = 32;
/// Different system prompts.
pub const PROMPTS: u64 = 16;
/// Turns of a conversation.
pub const TURNS: usize = 8;
/// Blocks of a turn.
pub const TURN: usize = 16;
/// Conversations that a second worker holds as well, in percent.
const SHARED: u64 = 20;

/// How much of it.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Workers.
    pub workers: u64,
    /// Blocks of each, system prompts apart.
    pub blocks: u64,
    /// Another seed, other hashes.
    pub seed: u64,
    /// Whether each worker has engine hashes of its own for the same content.
    pub opaque: bool,
    /// Local hashes to engine hashes.
    pub sequence: fn(&[u64]) -> Vec<u64>,
}

/// A conversation on a worker.
pub struct Held {
    /// The worker.
    pub worker: u64,
    /// Local hashes, system prompt first.
    pub locals: Vec<u64>,
    /// Engine hashes.
    pub engines: Vec<u64>,
}

impl Held {
    /// The blocks that a turn's event stores: the first brings the system prompt along.
    pub fn turn(&self, turn: usize) -> std::ops::Range<usize> {
        let start = if turn == 0 { 0 } else { SYSTEM + turn * TURN };
        start..SYSTEM + (turn + 1) * TURN
    }
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

impl Workload {
    /// Conversations on each worker.
    pub fn conversations(&self) -> u64 {
        (self.blocks / (TURNS * TURN) as u64).max(1)
    }

    /// Blocks owned once `conversations` are on each worker; those that two workers hold count twice.
    pub fn owned(&self, conversations: u64) -> u64 {
        let prompts: std::collections::HashSet<u64> = (0..conversations.min(4096)).map(|n| self.prompt(0, n)).collect();
        self.workers * (conversations * (TURNS * TURN) as u64 + (prompts.len() * SYSTEM) as u64)
    }

    /// The number of a worker's `n`th conversation: its own, or one of its neighbour's.
    fn identity(&self, worker: u64, n: u64) -> u64 {
        if n % 100 < SHARED {
            let neighbour = (worker + self.workers - 1) % self.workers;
            neighbour << 32 | (n + 50)
        } else {
            worker << 32 | n
        }
    }

    fn prompt(&self, worker: u64, n: u64) -> u64 {
        mix(self.identity(worker, n) ^ self.seed << 56) % PROMPTS
    }

    /// Local hashes of a worker's `n`th conversation.
    pub fn locals(&self, worker: u64, n: u64) -> Vec<u64> {
        let (identity, prompt) = (self.identity(worker, n), self.prompt(worker, n));
        let system = (0..SYSTEM as u64).map(|at| mix(mix(self.seed << 32 | prompt << 16 | at)));
        let own = (0..(TURNS * TURN) as u64).map(|at| mix(mix(identity ^ self.seed << 56) ^ at));
        system.chain(own).collect()
    }

    /// It as its worker holds it.
    pub fn held(&self, worker: u64, n: u64) -> Held {
        let locals = self.locals(worker, n);
        let mut engines = (self.sequence)(&locals);
        if self.opaque {
            engines.iter_mut().for_each(|hash| *hash ^= mix(worker + 1));
        }
        Held { worker, locals, engines }
    }

    /// Prompts: a conversation up to a random turn, and a turn that nobody holds yet.
    pub fn prompts(&self, count: u64) -> Vec<Vec<u64>> {
        let mut state = self.seed;
        let mut random = || {
            state += 1;
            mix(mix(state))
        };
        let make = |_| {
            let mut locals = self.locals(random() % self.workers, random() % self.conversations());
            locals.truncate(SYSTEM + (1 + (random() % TURNS as u64) as usize) * TURN);
            locals.extend((0..TURN).map(|_| random()));
            locals
        };
        (0..count).map(make).collect()
    }
}
