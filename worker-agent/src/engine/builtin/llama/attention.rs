//! Causal attention of a step's tokens to their sequences' blocks.

use std::cell::RefCell;

use super::super::arena::KvArena;
use super::super::kernels::threads::ThreadPool;
use super::super::kernels::{Isa, MAX_QUERIES, Queries};
use super::super::{BlockId, Chunk};

/// Some queries of one sequence that attend to the same key-value head.
///
/// A chunk's queries of one key-value head are numbered token by token, the heads of its group within; a tile is a run of
/// them.
struct Tile<'a> {
    blocks: &'a [BlockId],
    /// Position of the chunk's first token in its sequence.
    start: usize,
    /// Its row in the step's activations.
    row: usize,
    kv_head: usize,
    first: usize,
    count: usize,
}

/// The tiles of a step; they are the same in every layer.
pub(super) struct Plan<'a> {
    tiles: Vec<Tile<'a>>,
    heads: usize,
    group: usize,
}

impl<'a> Plan<'a> {
    /// `skip` gives the tokens at a chunk's beginning whose results nobody needs.
    pub(super) fn new(
        chunks: &[Chunk<'a>],
        kv_heads: usize,
        group: usize,
        skip: impl Fn(&Chunk<'a>) -> usize,
    ) -> Plan<'a> {
        let mut tiles = Vec::new();
        let mut row = 0;
        for chunk in chunks {
            let queries = skip(chunk) * group..chunk.tokens.len() * group;
            for kv_head in 0..kv_heads {
                tiles.extend(queries.clone().step_by(MAX_QUERIES).map(|first| Tile {
                    blocks: chunk.blocks,
                    start: chunk.start,
                    row,
                    kv_head,
                    first,
                    count: MAX_QUERIES.min(queries.end - first),
                }));
            }
            row += chunk.tokens.len();
        }
        // The longest first: the last tasks of a job should be small.
        tiles.reverse();
        Plan { tiles, heads: kv_heads * group, group }
    }

    /// Computes one layer's attention: `queries` and `out` hold `heads * head_dim` elements for each row of the step.
    pub(super) fn run(
        &self,
        pool: &mut ThreadPool,
        isa: Isa,
        arena: &KvArena,
        layer: usize,
        queries: &[f32],
        out: &mut [f32],
    ) {
        assert_eq!(queries.len(), out.len());
        let layer = LayerAttention { plan: self, isa, arena, layer, queries, out: out.as_mut_ptr() };
        pool.run(self.tiles.len(), &|i| layer.tile(&self.tiles[i]));
    }
}

struct LayerAttention<'a> {
    plan: &'a Plan<'a>,
    isa: Isa,
    arena: &'a KvArena,
    layer: usize,
    queries: &'a [f32],
    out: *mut f32,
}

// SAFETY: `out` stands for a `&mut [f32]` of which each tile writes its own elements.
unsafe impl Sync for LayerAttention<'_> {}

thread_local! {
    static SCORES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl LayerAttention<'_> {
    fn tile(&self, tile: &Tile<'_>) {
        SCORES.with_borrow_mut(|scores| self.tile_with(tile, scores));
    }

    fn tile_with(&self, tile: &Tile<'_>, scores: &mut Vec<f32>) {
        let (shape, group) = (self.arena.shape(), self.plan.group);
        let (dim, size) = (shape.head_dim, shape.block_size);
        let visible = |i: usize| tile.start + (tile.first + i) / group + 1;
        let longest = visible(tile.count - 1);
        let blocks = &tile.blocks[..longest.div_ceil(size)];
        let row_len = blocks.len() * size;
        scores.resize(scores.len().max(tile.count * row_len), 0.0);

        let offset = |i: usize| {
            let (token, head) = ((tile.first + i) / group, (tile.first + i) % group);
            ((tile.row + token) * self.plan.heads + tile.kv_head * group + head) * dim
        };
        let queries: [_; MAX_QUERIES] = std::array::from_fn(|i| self.queries[offset(i.min(tile.count - 1))..].as_ptr());
        // SAFETY: `run` has checked that `out` is as long as `queries`.
        let out: [_; MAX_QUERIES] = std::array::from_fn(|i| unsafe { self.out.add(offset(i.min(tile.count - 1))) });
        // SAFETY: a row for each query.
        let rows: [_; MAX_QUERIES] =
            std::array::from_fn(|i| unsafe { scores.as_mut_ptr().add(i.min(tile.count - 1) * row_len) });
        let count = tile.count;
        let batch = Queries { queries: &queries[..count], scores: &rows[..count], out: &out[..count] };
        let head = |block: &BlockId| self.arena.head(*block, self.layer, tile.kv_head);
        let scale = 1.0 / (dim as f32).sqrt();

        // SAFETY: queries and results are rows of `dim`, scores rows of whole blocks; no other tile has these results.
        unsafe {
            for (b, block) in blocks.iter().enumerate() {
                batch.scores(self.isa, head(block), b * size, scale);
            }
            let mut norms = [0.0; MAX_QUERIES];
            for (i, norm) in norms.iter_mut().take(count).enumerate() {
                let row = std::slice::from_raw_parts_mut(rows[i], longest);
                let (seen, hidden) = row.split_at_mut(visible(i));
                *norm = 1.0 / self.isa.exponentials(seen);
                hidden.fill(0.0);
                std::slice::from_raw_parts_mut(out[i], dim).fill(0.0);
            }
            for (b, block) in blocks.iter().enumerate() {
                batch.mix(self.isa, head(block), b * size, size.min(longest - b * size));
            }
            for (&out, norm) in out.iter().zip(norms).take(count) {
                std::slice::from_raw_parts_mut(out, dim).iter_mut().for_each(|v| *v *= norm);
            }
        }
    }
}
