//! How busy the server is: what it said last, and what the agent has sent it since.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;

use super::dialect::Busy;
use crate::engine::{EngineInfo, EngineLoad};

/// The figures.
#[derive(Debug, Default)]
pub(super) struct Load {
    /// Requests of ours that have not ended.
    requests: AtomicUsize,
    /// Tokens of those prompts whose first token has not come.
    prefill_tokens: AtomicUsize,
    polled: Mutex<Polled>,
}

/// What the server said, and how many requests of ours it had then.
#[derive(Clone, Copy, Debug, Default)]
struct Polled {
    busy: Busy,
    ours: usize,
}

impl Load {
    /// Takes what the server said.
    pub(super) fn said(&self, busy: Busy) {
        *self.polled.lock() = Polled { busy, ours: self.requests.load(Relaxed) };
    }

    /// As it is now. `cached`: blocks on the device that can be reused or are in use, as far as events tell.
    pub(super) fn now(&self, info: &EngineInfo, cached: usize) -> EngineLoad {
        let Polled { busy, ours } = *self.polled.lock();
        // Who asks the server past us is in its figures alone.
        let others = (busy.running + busy.waiting).saturating_sub(ours);
        let requests = self.requests.load(Relaxed) + others;
        let over = requests.saturating_sub(info.max_num_seqs);
        let waiting = busy.waiting.min(requests).max(over);
        let active = (busy.kv_usage.clamp(0.0, 1.0) * info.total_blocks as f64).round() as usize;
        EngineLoad {
            running: requests - waiting,
            waiting,
            active_blocks: active,
            used_blocks: cached.max(active).min(info.total_blocks),
            pending_prefill_tokens: self.prefill_tokens.load(Relaxed),
        }
    }

    /// A request of ours begins.
    pub(super) fn begin(&self, prompt_tokens: usize) -> Counted<'_> {
        self.requests.fetch_add(1, Relaxed);
        self.prefill_tokens.fetch_add(prompt_tokens, Relaxed);
        Counted { load: self, pending: prompt_tokens }
    }
}

/// A request that counts until it is dropped.
pub(super) struct Counted<'a> {
    load: &'a Load,
    pending: usize,
}

impl Counted<'_> {
    /// Its first token has come.
    pub(super) fn prefilled(&mut self) {
        self.load.prefill_tokens.fetch_sub(std::mem::take(&mut self.pending), Relaxed);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.prefilled();
        self.load.requests.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use kv_hashing::BlockSize;

    use super::*;

    #[test]
    fn what_the_server_said_and_what_was_sent_since_add_up() {
        let info = EngineInfo {
            block_size: BlockSize::new(32).expect("not zero"),
            total_blocks: 1000,
            max_num_seqs: 4,
            max_num_batched_tokens: 512,
            context_length: 2048,
        };
        let load = Load::default();
        let mut first = load.begin(100);
        load.said(Busy { running: 3, waiting: 0, kv_usage: 0.1, ..Busy::default() });
        let now = load.now(&info, 300);
        assert_eq!((now.running, now.waiting, now.active_blocks, now.used_blocks), (3, 0, 100, 300), "two are others'");
        let (_second, _third) = (load.begin(50), load.begin(50));
        assert_eq!(load.now(&info, 0).pending_prefill_tokens, 200);
        assert_eq!((load.now(&info, 0).running, load.now(&info, 0).waiting), (4, 1), "five, of which four fit");
        first.prefilled();
        assert_eq!(load.now(&info, 0).pending_prefill_tokens, 100);
        drop(first);
        assert_eq!((load.now(&info, 0).running, load.now(&info, 0).used_blocks), (4, 100));
    }
}
