//! Causal attention of a step's tokens to their sequences' rows of the mirror.
//!
//! A chunk is cut into tiles; tiles with equal numbers of tokens, such as those of all sequences that decode, are computed as
//! one batch. A batch picks the rows that its tiles see, padded to the longest, and multiplies.

use candle_core::{D, DType, Device, Tensor};

use super::super::config::Config;
use super::indices;
use super::mirror::{Planes, row};
use crate::engine::builtin::{BlockId, Chunk};

/// Most tokens of a tile. Later ones see more: short tiles compute less that is masked.
const TILE: usize = 128;
/// Most positions that a batch of several tiles picks, padding included: 256 MiB of keys and values for eight heads of 128.
pub(super) const MOST_POSITIONS: usize = 1 << 15;
/// Most scores of a batch: 256 MiB, of which there are a few copies at once.
pub(super) const MOST_SCORES: usize = 1 << 26;
/// Picks nothing: zeros.
const NOWHERE: u32 = u32::MAX;

/// Some consecutive tokens of one sequence.
#[derive(Clone, Copy)]
struct Tile<'a> {
    blocks: &'a [BlockId],
    /// Position of the first token.
    start: usize,
    /// Its row in the step.
    row: usize,
    count: usize,
}

impl Tile<'_> {
    /// Positions that its last token sees.
    fn end(&self) -> usize {
        self.start + self.count
    }
}

/// Tiles of equal length, one after the other.
struct Batch {
    tiles: usize,
    /// Tokens of each.
    count: usize,
    /// Positions of each, padding included.
    seen: usize,
    /// `[tiles × count]`: rows of the step.
    queries: Tensor,
    /// `[tiles × seen]`: rows of the planes.
    slots: Tensor,
    /// `[tiles, 1, count, 1, seen]`: 0 where a token sees a position, else −∞; absent where all see all.
    mask: Option<Tensor>,
}

/// The batches of a step; they are the same in every layer.
pub(super) struct Plan {
    batches: Vec<Batch>,
    /// Puts the batches' rows into the order of the step.
    order: Tensor,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
}

impl Plan {
    /// `skip` gives the tokens at a chunk's beginning whose results nobody needs.
    pub(super) fn new(
        chunks: &[Chunk<'_>],
        config: &Config,
        device: &Device,
        block_size: usize,
        skip: impl Fn(&Chunk<'_>) -> usize,
    ) -> candle_core::Result<Self> {
        let mut tiles = tiles(chunks, config.heads, skip);
        let mut rows: Vec<usize> = Vec::new();
        tiles.sort_by_key(|tile| (tile.count, tile.end()));
        let mut batches = Vec::new();
        for tiles in batched(&tiles, config.heads) {
            rows.extend(tiles.iter().flat_map(|tile| tile.row..tile.row + tile.count));
            batches.push(Batch::new(tiles, device, block_size)?);
        }
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&at| rows[at]);
        let (kv_heads, group, head_dim) = (config.kv_heads, config.group(), config.head_dim);
        Ok(Self { batches, order: indices(&order, device)?, kv_heads, group, head_dim })
    }

    /// One layer's attention: `queries` is `[rows of the step, heads × head_dim]`, the result the same for the rows that are
    /// needed, in their order.
    pub(super) fn attend(&self, queries: &Tensor, planes: &Planes) -> candle_core::Result<Tensor> {
        let results: Vec<Tensor> =
            self.batches.iter().map(|batch| self.batch(batch, queries, planes)).collect::<Result<_, _>>()?;
        Tensor::cat(&results, 0)?.index_select(&self.order, 0)
    }

    fn batch(&self, batch: &Batch, queries: &Tensor, planes: &Planes) -> candle_core::Result<Tensor> {
        let Self { kv_heads, group, head_dim, .. } = *self;
        let Batch { tiles, count, seen, .. } = *batch;
        // A key-value head's queries are rows of one matrix: tokens, and the heads of its group within.
        let queries = queries.index_select(&batch.queries, 0)?.reshape((tiles, count, kv_heads, group, head_dim))?;
        let queries = queries.permute((0, 2, 1, 3, 4))?.contiguous()?;
        let queries = (queries.reshape((tiles, kv_heads, count * group, head_dim))? / (head_dim as f64).sqrt())?;
        let picked = |plane: &Tensor, order: (usize, usize, usize, usize)| {
            let rows = plane.index_select(&batch.slots, 0)?.reshape((tiles, seen, kv_heads, head_dim))?;
            rows.permute(order)?.contiguous()?.to_dtype(DType::F32)
        };
        let scores = queries.matmul(&picked(&planes.keys, (0, 2, 3, 1))?)?;
        let scores = match &batch.mask {
            Some(mask) => {
                let apart = scores.reshape((tiles, kv_heads, count, group, seen))?;
                apart.broadcast_add(mask)?.reshape((tiles, kv_heads, count * group, seen))?
            }
            None => scores,
        };
        let mixed = softmax(&scores)?.matmul(&picked(&planes.values, (0, 2, 1, 3))?)?;
        let mixed = mixed.reshape((tiles, kv_heads, count, group, head_dim))?.permute((0, 2, 1, 3, 4))?;
        mixed.contiguous()?.reshape((tiles * count, kv_heads * group * head_dim))
    }
}

fn softmax(scores: &Tensor) -> candle_core::Result<Tensor> {
    let exponentials = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

fn tiles<'a>(chunks: &[Chunk<'a>], heads: usize, skip: impl Fn(&Chunk<'_>) -> usize) -> Vec<Tile<'a>> {
    let mut tiles = Vec::new();
    let mut row = 0;
    for chunk in chunks {
        let tokens = chunk.tokens.len();
        // Of a long sequence fewer at once.
        let most = (MOST_SCORES / (heads * (chunk.start + tokens)).max(1)).clamp(1, TILE);
        tiles.extend((skip(chunk)..tokens).step_by(most).map(|first| Tile {
            blocks: chunk.blocks,
            start: chunk.start + first,
            row: row + first,
            count: most.min(tokens - first),
        }));
        row += tokens;
    }
    tiles
}

/// Cuts tiles, which are sorted by length and then by what they see, into batches.
fn batched<'a, 't>(tiles: &'a [Tile<'t>], heads: usize) -> Vec<&'a [Tile<'t>]> {
    let mut batches = Vec::new();
    let mut rest = tiles;
    while let Some(first) = rest.first() {
        let fits = |number: usize, tile: &Tile<'_>| {
            let positions = number * tile.end();
            tile.count == first.count && positions <= MOST_POSITIONS && positions * tile.count * heads <= MOST_SCORES
        };
        // The last one sees most, and what it sees is what all are padded to.
        let more = rest.iter().enumerate().skip(1).take_while(|(index, tile)| fits(index + 1, tile)).count();
        let (batch, others) = rest.split_at(1 + more);
        batches.push(batch);
        rest = others;
    }
    batches
}

impl Batch {
    fn new(tiles: &[Tile<'_>], device: &Device, block_size: usize) -> candle_core::Result<Self> {
        let count = tiles[0].count;
        let seen = tiles.iter().map(Tile::end).max().unwrap_or(0);
        let queries: Vec<usize> = tiles.iter().flat_map(|tile| tile.row..tile.row + count).collect();
        let slots: Vec<u32> = tiles
            .iter()
            .flat_map(|tile| {
                (0..seen).map(|position| match position < tile.end() {
                    true => row(tile.blocks[position / block_size], position % block_size, block_size),
                    false => NOWHERE,
                })
            })
            .collect();
        let all_see_all = count == 1 && tiles.iter().all(|tile| tile.end() == seen);
        let mask = (!all_see_all).then(|| {
            let sees = tiles.iter().flat_map(|tile| (tile.start..tile.end()).map(|position| position + 1));
            let mask: Vec<f32> = sees
                .flat_map(|visible| (0..seen).map(move |at| if at < visible { 0.0 } else { f32::NEG_INFINITY }))
                .collect();
            Tensor::from_vec(mask, (tiles.len(), 1, count, 1, seen), device)
        });
        Ok(Self {
            tiles: tiles.len(),
            count,
            seen,
            queries: indices(&queries, device)?,
            slots: Tensor::from_vec(slots, tiles.len() * seen, device)?,
            mask: mask.transpose()?,
        })
    }
}
