//! Which blocks are brought to the device: those that others have written and a step reads, each once.

use std::collections::HashSet;

use rand::seq::IteratorRandom;

use super::*;

/// Writes a block as transfers and tiers do.
fn import(to: &KvArena, block: BlockId, from: &KvArena, source: BlockId) {
    // SAFETY: one thread, and no step is under way.
    unsafe { to.block_mut(block).copy_from_slice(from.block(source)) };
}

/// Fails unless the device has what the arena has at the first `positions` positions of a table.
fn assert_mirrored(candle: &mut CandleLlama, blocks: &[BlockId], positions: usize) {
    let shape = candle.arena.shape();
    let width = shape.kv_heads * shape.head_dim;
    for layer in 0..shape.layers {
        let planes = candle.mirror.layer(layer);
        let both = Tensor::cat(&[&planes.keys, &planes.values], 1).expect("planes are alike");
        let rows = candle.carrier.down(&both).expect("copied");
        for position in 0..positions {
            let (block, slot) = (blocks[position / shape.block_size], position % shape.block_size);
            let row = &rows[(block.0 as usize * shape.block_size + slot) * 2 * width..][..2 * width];
            for head in 0..shape.kv_heads {
                let at = candle.arena.head(block, layer, head);
                for d in 0..shape.head_dim {
                    // SAFETY: in bounds; one thread.
                    let (key, value) =
                        unsafe { (*at.keys.add(d * at.slots + slot), *at.values.add(slot * at.dim + d)) };
                    let index = head * shape.head_dim + d;
                    let device = (row[index].to_bits(), row[width + index].to_bits());
                    assert_eq!(device, (key, value), "layer {layer}, position {position}, head {head}, element {d}");
                }
            }
        }
    }
}

#[test]
fn blocks_have_the_meaning_that_our_own_kernels_give_them() {
    let model = Model { kv_heads: 2, ..Model::llama() };
    let (tokens, blocks) = (tokens(40, 4), table([7, 2, 11]));
    for (device, block_size) in devices().into_iter().flat_map(|device| [(device, 16), (device, 32)]) {
        let (mut own, mut candle) = (own(&model, block_size), load_with(&model.file(), device, block_size));
        in_chunks(&mut own, &tokens, &blocks, &[40]);
        in_chunks(&mut candle, &tokens, &blocks, &[25, 15]);
        for &block in &blocks[..40 / block_size] {
            let halves = |arena: &KvArena| -> Vec<f32> {
                // SAFETY: no step is under way.
                let bytes = unsafe { arena.block(block) };
                bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            };
            assert_close(&halves(own.arena()), &halves(candle.arena()), "a block");
        }
        assert_mirrored(&mut candle, &blocks, 40);
    }
}

#[test]
fn blocks_that_came_from_elsewhere_are_read_and_brought_once() {
    let model = Model::llama();
    let (first, mut second) = (tokens(50, 5), tokens(70, 6));
    second[..32].copy_from_slice(&first[..32]);
    let mut own = own(&model, 16);
    in_chunks(&mut own, &first, &table([7, 2, 11, 4]), &[50]);
    let whole = in_chunks(&mut own, &second, &table(20..25), &[70]);
    for device in devices() {
        let mut candle = load(&model, device);
        // The blocks have been somebody else's before.
        in_chunks(&mut candle, &tokens(40, 9), &table([30, 31, 32]), &[40]);
        import(candle.arena(), BlockId(30), own.arena(), BlockId(7));
        import(candle.arena(), BlockId(31), own.arena(), BlockId(2));
        let blocks = table([30, 31, 40, 41, 42]);
        let mut reused = Vec::new();
        let mut step = |candle: &mut CandleLlama, range: std::ops::Range<usize>| {
            let tokens = &second[range.clone()];
            let chunk = Chunk { tokens, start: range.start, blocks: &blocks, logits: Logits::All };
            candle.forward(&[chunk], &mut reused);
            candle.blocks_brought()
        };
        assert_eq!([step(&mut candle, 32..60), step(&mut candle, 60..70)], [2, 2]);
        assert_close(&whole[32 * VOCAB..], &reused, "imported blocks");
        assert_mirrored(&mut candle, &blocks, 70);
        // A prefix that was computed here costs nothing to reuse.
        let mut again = Vec::new();
        let shared = table([30, 31, 40, 50, 51]);
        candle.forward(&[Chunk { tokens: &second[48..], start: 48, blocks: &shared, logits: Logits::All }], &mut again);
        assert_eq!(candle.blocks_brought(), 2);
        assert_close(&whole[48 * VOCAB..], &again, "a reused prefix");
    }
}

#[test]
fn a_block_that_was_fetched_and_never_read_is_not_brought() {
    let model = Model::llama();
    let mut own = own(&model, 16);
    in_chunks(&mut own, &tokens(16, 8), &table([0]), &[16]);
    for device in devices() {
        let mut candle = load(&model, device);
        import(candle.arena(), BlockId(3), own.arena(), BlockId(0));
        let prompt = tokens(40, 9);
        let got = in_chunks(&mut candle, &prompt, &table([3, 4, 5]), &[1, 20, 19]);
        assert_eq!(candle.blocks_brought(), 0);
        let expected: Vec<f32> = model.logits(&prompt).into_iter().map(|v| v as f32).collect();
        assert_close(&expected, &got, "a block that was given away");
    }
}

/// Two chunks that read one such block in one step, and one that is not whole.
#[test]
fn sequences_that_share_a_block_bring_it_once() {
    let model = Model::llama();
    let prompt = tokens(24, 8);
    let mut own = own(&model, 16);
    let whole = in_chunks(&mut own, &prompt, &table([0, 1]), &[24]);
    for device in devices() {
        let mut candle = load(&model, device);
        import(candle.arena(), BlockId(3), own.arena(), BlockId(0));
        import(candle.arena(), BlockId(4), own.arena(), BlockId(1));
        let (one, other) = (table([3, 4]), table([3, 5]));
        let mut logits = Vec::new();
        let chunks = [
            Chunk { tokens: &prompt[20..], start: 20, blocks: &one, logits: Logits::All },
            Chunk { tokens: &prompt[16..], start: 16, blocks: &other, logits: Logits::All },
        ];
        candle.forward(&chunks, &mut logits);
        assert_eq!(candle.blocks_brought(), 2);
        let expected = [&whole[20 * VOCAB..], &whole[16 * VOCAB..]].concat();
        assert_close(&expected, &logits, "both");
    }
}

/// A sequence of the random history.
struct Running {
    tokens: Vec<u32>,
    blocks: Vec<BlockId>,
    /// Leading positions with their KV.
    done: usize,
}

/// Sequences come, go, take over blocks from another arena and each other's ids. The obvious rule: a block is brought when it is
/// read for the first time since it was imported.
#[test]
fn any_history_brings_what_is_stale_and_nothing_else() {
    const SIZE: usize = 16;
    let model = Model::llama();
    let mut source = own(&model, SIZE);
    let prompt = tokens(48, 1);
    in_chunks(&mut source, &prompt, &table([0, 1, 2]), &[48]);
    for device in devices() {
        let mut rng = SmallRng::seed_from_u64(11);
        let mut candle = load(&model, device);
        let mut free: Vec<BlockId> = table(0..24);
        let mut running: Vec<Running> = Vec::new();
        let (mut unread, mut expected) = (HashSet::new(), 0);
        for _ in 0..120 {
            let mut take = |rng: &mut SmallRng| {
                let index = rng.random_range(0..free.len());
                free.swap_remove(index)
            };
            if running.len() < 4 {
                let imported = rng.random_range(0..3_usize);
                let blocks: Vec<BlockId> = (0..5).map(|_| take(&mut rng)).collect();
                for (index, &block) in blocks[..imported].iter().enumerate() {
                    import(candle.arena(), block, source.arena(), BlockId(index as u32));
                    unread.insert(block);
                }
                let mut all = tokens(SIZE * 5, rng.random());
                all[..imported * SIZE].copy_from_slice(&prompt[..imported * SIZE]);
                running.push(Running { tokens: all, blocks, done: imported * SIZE });
            }
            let mut ends = Vec::new();
            for sequence in &running {
                let rest = sequence.tokens.len() - sequence.done;
                ends.push(sequence.done + rng.random_range(1..=rest.min(20)));
            }
            let chunks: Vec<Chunk<'_>> = running
                .iter()
                .zip(&ends)
                .map(|(s, &end)| Chunk {
                    tokens: &s.tokens[s.done..end],
                    start: s.done,
                    blocks: &s.blocks,
                    logits: Logits::None,
                })
                .collect();
            for chunk in &chunks {
                let (read, end) = (chunk.start.div_ceil(SIZE), (chunk.start + chunk.tokens.len()).div_ceil(SIZE));
                expected += chunk.blocks[..read].iter().filter(|block| unread.remove(*block)).count() as u64;
                // What was there is overwritten.
                unread.retain(|block| !chunk.blocks[read..end].contains(block));
            }
            candle.forward(&chunks, &mut Vec::new());
            assert_eq!(candle.blocks_brought(), expected);
            for (sequence, end) in running.iter_mut().zip(ends) {
                sequence.done = end;
            }
            for sequence in &running {
                assert_mirrored(&mut candle, &sequence.blocks, sequence.done);
            }
            // Some are cancelled, some end by themselves.
            let cancelled = (0..running.len()).choose(&mut rng).filter(|_| rng.random_bool(0.1));
            free.extend(cancelled.into_iter().flat_map(|index| running.swap_remove(index).blocks));
            let over = running.extract_if(.., |sequence| sequence.done == sequence.tokens.len());
            free.extend(over.flat_map(|sequence| sequence.blocks));
        }
        assert!(expected > 10, "only {expected} blocks were stale");
    }
}
