//! Memory of the writer alone: cache lines in chunks of 16 KiB, shared by the reverse maps of all ranks.
//!
//! A map that shrinks or goes gives its chunks to the next one, so that neither growth nor the removal of a worker
//! touches fresh pages.

use std::sync::atomic::Ordering::Relaxed;

use super::arena::{CHUNK, Chunk, Chunks, GRANULE, Line, prefetch};

const CHUNK_BYTES: usize = CHUNK * GRANULE * size_of::<u64>();

/// Chunks of lines.
pub(super) struct Pool {
    fresh: Chunks,
    /// Chunks ever handed out, and how many may be for now.
    used: usize,
    limit: usize,
    free: Vec<Chunk>,
}

/// A growing array of lines out of a pool.
#[derive(Default)]
pub(super) struct Lines {
    chunks: Vec<Chunk>,
}

impl Pool {
    /// At most `bytes`.
    pub(super) fn new(bytes: usize) -> Self {
        Self { fresh: Chunks::new(), used: 0, limit: bytes / CHUNK_BYTES, free: Vec::new() }
    }

    /// Lets at most `bytes` of fresh memory be taken from now on.
    pub(super) fn allow(&mut self, bytes: usize) {
        self.limit = self.used + bytes / CHUNK_BYTES;
    }

    /// Bytes ever handed out, and of the list of free chunks.
    pub(super) fn resident(&self) -> usize {
        self.used * CHUNK_BYTES + self.free.capacity() * size_of::<Chunk>()
    }

    /// Bytes handed out now.
    pub(super) fn live(&self) -> usize {
        (self.used - self.free.len()) * CHUNK_BYTES
    }

    fn take(&mut self) -> Option<Chunk> {
        if let Some(chunk) = self.free.pop() {
            return Some(chunk);
        }
        (self.used < self.limit).then(|| {
            self.used += 1;
            self.fresh.take()
        })
    }
}

impl Lines {
    /// Lines there are.
    pub(super) fn len(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Bytes of the list of chunks.
    pub(super) fn list_bytes(&self) -> usize {
        self.chunks.capacity() * size_of::<Chunk>()
    }

    /// Grows to at least `lines`, with whatever words they had before. False when the pool is exhausted.
    pub(super) fn grow(&mut self, pool: &mut Pool, lines: usize) -> bool {
        while self.len() < lines {
            let Some(chunk) = pool.take() else { return false };
            self.chunks.push(chunk);
        }
        true
    }

    /// Zeroes every line.
    pub(super) fn clear(&self) {
        for line in self.chunks.iter().flat_map(|chunk| chunk.iter()) {
            line.iter().for_each(|word| word.store(0, Relaxed));
        }
    }

    /// Gives every line back.
    pub(super) fn release(&mut self, pool: &mut Pool) {
        pool.free.append(&mut self.chunks);
        self.chunks = Vec::new();
    }

    /// A line. Panics beyond the end.
    #[inline]
    pub(super) fn line(&self, index: usize) -> &Line {
        &self.chunks[index / CHUNK][index % CHUNK]
    }

    /// Asks the processor to fetch a line.
    #[inline]
    pub(super) fn prefetch(&self, index: usize) {
        prefetch(&self.line(index)[0]);
    }
}
