//! One step through all layers.

use std::ops::Range;

use super::super::arena::KvArena;
use super::super::kernels::Isa;
use super::super::kernels::threads::ThreadPool;
use super::super::{BlockId, Chunk, Forward, Kv, Logits};
use super::Llama;
use super::attention::Plan;
use super::linear::{Product, multiply};
use super::rope::Rope;
use super::weights::Layer;

/// Rows that one task of a row-wise operation takes. Steps of fewer rows do those operations on the caller's thread.
const ROWS_PER_TASK: usize = 16;

/// Buffers that are kept from step to step; all hold one row per token.
#[derive(Default)]
pub(super) struct Scratch {
    /// The residual stream.
    x: Vec<f32>,
    /// What a block of the network reads: the stream, normalised.
    normed: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Rotations of the positions.
    turns: Vec<f32>,
}

/// Where a token's key and value go.
pub(super) struct Place {
    pub(super) block: BlockId,
    pub(super) slot: usize,
}

impl Forward for Llama {
    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn kv(&self) -> Option<Kv> {
        Some(Kv { arena: self.arena.clone(), model: self.fingerprint })
    }

    /// Memory beside the arena: `4 * (3 hidden + 2 queries + 2 keys + 2 feed_forward)` bytes for each token of the largest
    /// step so far, where queries and keys are the widths of all heads.
    fn forward(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) {
        self.forward_while(chunks, logits, &|_| true);
    }

    /// Asks before each layer.
    fn forward_while(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>, worth: &dyn Fn(f64) -> bool) -> bool {
        let places = places(chunks, self.arena.shape().block_size);
        self.embed(chunks);
        let (kv_heads, group) = (self.config.kv_heads, self.config.group());
        let plan = Plan::new(chunks, kv_heads, group, |_| 0);
        let wanted = wanted_rows(chunks);
        let last = self.weights.layers.len() - 1;
        let mut rows = places.len();
        for index in 0..=last {
            if !worth(index as f64 / (last + 1) as f64) {
                return false;
            }
            self.attention_input(index, rows);
            self.store_keys(index, &places);
            if index == last && wanted.is_empty() {
                return true;
            }
            if index < last {
                self.attend(&plan, index);
            } else {
                // Only the wanted rows go further than the last layer's keys and values.
                self.attend(&Plan::new(chunks, kv_heads, group, unwanted), index);
                self.keep(&wanted);
                rows = wanted.len();
            }
            self.finish_layer(index, rows);
        }
        self.project(rows, logits);
        true
    }
}

/// Resolves block tables; checks what `Chunk` promises.
pub(super) fn places(chunks: &[Chunk<'_>], block_size: usize) -> Vec<Place> {
    let size = block_size;
    let mut places = Vec::with_capacity(chunks.iter().map(|c| c.tokens.len()).sum());
    for chunk in chunks {
        let end = chunk.start + chunk.tokens.len();
        assert!(!chunk.tokens.is_empty() && chunk.blocks.len() * size >= end, "a chunk's blocks do not cover it");
        places.extend((chunk.start..end).map(|p| Place { block: chunk.blocks[p / size], slot: p % size }));
    }
    places
}

/// Tokens at the chunk's beginning whose logits are not wanted.
pub(super) fn unwanted(chunk: &Chunk<'_>) -> usize {
    match chunk.logits {
        Logits::None => chunk.tokens.len(),
        Logits::Last => chunk.tokens.len() - 1,
        Logits::All => 0,
    }
}

/// Rows of the step whose logits are wanted.
pub(super) fn wanted_rows(chunks: &[Chunk<'_>]) -> Vec<usize> {
    let mut rows = Vec::new();
    let mut first = 0;
    for chunk in chunks {
        rows.extend(first + unwanted(chunk)..first + chunk.tokens.len());
        first += chunk.tokens.len();
    }
    rows
}

impl Llama {
    /// Starts the residual stream, and computes the rotations of all positions.
    fn embed(&mut self, chunks: &[Chunk<'_>]) {
        let Llama { config, weights, isa, scratch, .. } = self;
        let rows: usize = chunks.iter().map(|c| c.tokens.len()).sum();
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        scratch.resize(rows, config.hidden, queries, keys, config.feed_forward);
        scratch.turns.resize(rows * weights.rope.turn_len(), 0.0);

        let bytes = weights.embedding.bytes();
        let row_bytes = bytes.len() / config.vocab;
        let tokens = chunks.iter().flat_map(|c| c.tokens.iter().zip(c.start..));
        let x = scratch.x.chunks_exact_mut(config.hidden);
        for (((&token, position), x), turn) in
            tokens.zip(x).zip(scratch.turns.chunks_exact_mut(weights.rope.turn_len()))
        {
            let token = token as usize;
            assert!(token < config.vocab, "token {token} is not in the vocabulary");
            isa.dequantize(weights.embedding.quant, &bytes[token * row_bytes..][..row_bytes], x);
            weights.rope.turn(position, turn);
        }
    }

    /// Queries, keys and values of a layer.
    fn attention_input(&mut self, index: usize, rows: usize) {
        let Llama { config, weights, pool, isa, scratch, .. } = self;
        let layer = &weights.layers[index];
        norm_rows(pool, *isa, &scratch.x, &layer.attention_norm, config.norm_eps, &mut scratch.normed);
        let products = [
            Product::set(&layer.query, &mut scratch.query),
            Product::set(&layer.key, &mut scratch.key),
            Product::set(&layer.value, &mut scratch.value),
        ];
        multiply(pool, *isa, &scratch.normed, rows, &products);
    }

    /// Rotates queries and keys, and writes keys and values to the arena.
    fn store_keys(&mut self, index: usize, places: &[Place]) {
        let Llama { config, weights, arena, pool, isa, scratch, .. } = self;
        let layer = &weights.layers[index];
        let store = Store { layer, index, eps: config.norm_eps, rope: &weights.rope, arena, isa: *isa, places };
        let (queries, keys, turn) =
            (config.heads * config.head_dim, config.kv_heads * config.head_dim, weights.rope.turn_len());
        let [query, key] = [&mut scratch.query, &mut scratch.key].map(Rows::of);
        let (value, turns) = (&scratch.value, &scratch.turns);
        for_rows(pool, places.len(), &|range: Range<usize>| {
            for row in range {
                // SAFETY: each row is visited once.
                let (query, key) = unsafe { (query.row(row, queries), key.row(row, keys)) };
                store.row(row, query, key, &value[row * keys..][..keys], &turns[row * turn..][..turn]);
            }
        });
    }

    fn attend(&mut self, plan: &Plan<'_>, index: usize) {
        let Llama { arena, pool, isa, scratch, .. } = self;
        plan.run(pool, *isa, arena, index, &scratch.query, &mut scratch.attended);
    }

    /// Drops all rows of the stream and of the attention's result but the wanted ones.
    fn keep(&mut self, wanted: &[usize]) {
        let Llama { config, scratch, .. } = self;
        let queries = config.heads * config.head_dim;
        for (to, &from) in wanted.iter().enumerate() {
            scratch.x.copy_within(from * config.hidden..(from + 1) * config.hidden, to * config.hidden);
            scratch.attended.copy_within(from * queries..(from + 1) * queries, to * queries);
        }
        let keys = config.kv_heads * config.head_dim;
        scratch.resize(wanted.len(), config.hidden, queries, keys, config.feed_forward);
    }

    /// Adds the attention's result and the feed-forward network's to the stream.
    fn finish_layer(&mut self, index: usize, rows: usize) {
        let Llama { config, weights, pool, isa, scratch, .. } = self;
        let layer = &weights.layers[index];
        multiply(pool, *isa, &scratch.attended, rows, &[Product::add(&layer.attention_output, &mut scratch.x)]);
        norm_rows(pool, *isa, &scratch.x, &layer.feed_forward_norm, config.norm_eps, &mut scratch.normed);
        let products = [Product::set(&layer.gate, &mut scratch.gate), Product::set(&layer.up, &mut scratch.up)];
        multiply(pool, *isa, &scratch.normed, rows, &products);
        let (isa, width, up) = (*isa, config.feed_forward, &scratch.up);
        let gate = Rows::of(&mut scratch.gate);
        for_rows(pool, rows, &|range: Range<usize>| {
            for row in range {
                // SAFETY: each row is visited once.
                isa.swiglu(unsafe { gate.row(row, width) }, &up[row * width..][..width]);
            }
        });
        multiply(pool, isa, &scratch.gate, rows, &[Product::add(&layer.down, &mut scratch.x)]);
    }

    /// Appends the logits of the rows that are left.
    fn project(&mut self, rows: usize, logits: &mut Vec<f32>) {
        let Llama { config, weights, pool, isa, scratch, .. } = self;
        norm_rows(pool, *isa, &scratch.x, &weights.output_norm, config.norm_eps, &mut scratch.normed);
        let start = logits.len();
        logits.resize(start + rows * config.vocab, 0.0);
        multiply(pool, *isa, &scratch.normed, rows, &[Product::set(&weights.output, &mut logits[start..])]);
    }
}

impl Scratch {
    fn resize(&mut self, rows: usize, hidden: usize, queries: usize, keys: usize, feed_forward: usize) {
        let widths = [
            (&mut self.x, hidden),
            (&mut self.normed, hidden),
            (&mut self.query, queries),
            (&mut self.key, keys),
            (&mut self.value, keys),
            (&mut self.attended, queries),
            (&mut self.gate, feed_forward),
            (&mut self.up, feed_forward),
        ];
        for (buffer, width) in widths {
            buffer.resize(rows * width, 0.0);
        }
    }
}

/// What a layer does to the keys and values of each token.
struct Store<'a> {
    layer: &'a Layer,
    index: usize,
    eps: f32,
    rope: &'a Rope,
    arena: &'a KvArena,
    isa: Isa,
    places: &'a [Place],
}

impl Store<'_> {
    fn row(&self, row: usize, query: &mut [f32], key: &mut [f32], value: &[f32], turn: &[f32]) {
        for (heads, norm) in [(&mut *query, &self.layer.query_norm), (&mut *key, &self.layer.key_norm)] {
            if let Some(norm) = norm {
                for head in heads.chunks_exact_mut(norm.len()) {
                    let copy = head.to_vec();
                    self.isa.rms_norm(&copy, norm, self.eps, head);
                }
            }
        }
        self.rope.rotate(turn, query);
        self.rope.rotate(turn, key);
        let mut halves = vec![0u16; key.len() + value.len()];
        let (key_half, value_half) = halves.split_at_mut(key.len());
        self.isa.to_half(key, key_half);
        self.isa.to_half(value, value_half);
        let place = &self.places[row];
        // SAFETY: a step has no two tokens for one slot: sequences own the blocks that they write to.
        unsafe { self.arena.write(place.block, self.index, place.slot, key_half, value_half) };
    }
}

/// A matrix whose rows are given to different tasks.
struct Rows<'a> {
    at: *mut f32,
    len: usize,
    life: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for a `&mut [f32]`, and `row` leaves it to the caller that rows do not overlap.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    fn of(matrix: &'a mut Vec<f32>) -> Rows<'a> {
        Rows { at: matrix.as_mut_ptr(), len: matrix.len(), life: std::marker::PhantomData }
    }

    /// # Safety
    /// No row may be borrowed twice at the same time, and all calls must give the same width.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the rows apart")]
    unsafe fn row(&self, row: usize, width: usize) -> &mut [f32] {
        assert!((row + 1) * width <= self.len);
        // SAFETY: in bounds; not borrowed elsewhere, by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(row * width), width) }
    }
}

/// Runs a row-wise operation over all rows, in parallel if they are many.
fn for_rows(pool: &mut ThreadPool, rows: usize, run: &(dyn Fn(Range<usize>) + Sync)) {
    if rows < ROWS_PER_TASK {
        return run(0..rows);
    }
    pool.run(rows.div_ceil(ROWS_PER_TASK), &|i| run(i * ROWS_PER_TASK..rows.min((i + 1) * ROWS_PER_TASK)));
}

fn norm_rows(pool: &mut ThreadPool, isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut Vec<f32>) {
    let width = weight.len();
    let rows = x.len() / width;
    assert_eq!(x.len(), out.len());
    let out = Rows::of(out);
    for_rows(pool, rows, &|range: Range<usize>| {
        for row in range {
            // SAFETY: each row is visited once.
            isa.rms_norm(&x[row * width..][..width], weight, eps, unsafe { out.row(row, width) });
        }
    });
}
