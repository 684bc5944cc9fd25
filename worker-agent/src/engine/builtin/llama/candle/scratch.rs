//! How much memory of the device a step takes beside weights and KV blocks: an estimate, asked before anything is placed.
//!
//! Without it a model that just fits starts well and fails at its first long prompt, which ends the engine.

use super::super::config::Config;
use super::attention::{MOST_POSITIONS, MOST_SCORES};

/// CUDA's context grows with the kernels that are loaded when they are first used, cuBLAS has a workspace (32 MiB), and the
/// allocator keeps what it was given in larger pieces.
const FIXED: u64 = 256 << 20;
const SINGLE: u64 = size_of::<f32>() as u64;
const HALF: u64 = size_of::<half::f16>() as u64;

/// The largest step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Largest {
    /// Most tokens of it.
    pub(super) tokens: usize,
    /// Most sequences in it.
    pub(super) sequences: usize,
    /// Most positions of one of them.
    pub(super) positions: usize,
}

/// Bytes that the largest step takes at once, at most.
///
/// With `T` tokens, `S` sequences of `C` positions, and of the model `L` layers and the widths `H` (hidden), `F` (feed-forward),
/// `Q` (query heads × head size), `K` (KV heads × head size) and `V` (vocabulary), it is the sum of
///
/// | bytes | what |
/// |---|---|
/// | 4·T·(6H + 6Q + 6K + 4F) | one layer's rows in single precision: the stream and its norms; queries and keys before and after rotation, and its parts; gate, up, their product and its factor |
/// | 2·T·(H + Q + F) | rows of eight bits with their scales (9 bits an element), padded, for products with quantised weights |
/// | 2·T·2K·(L + 1) | keys and values of all layers in half precision, until they are in the arena, and one layer's joined |
/// | 8·P·K | positions that a batch of tiles picks, of keys or values: as they are, transposed, and in single precision |
/// | 4·4·E | scores of that batch: as they are, masked, their exponentials, and the quotients |
/// | 4·T·V | logits, of all tokens where a request asks for its prompt's |
///
/// and 256 MiB, with P = max(C, min(2¹⁵, S·C)) and E = min(heads·T·C, max(2²⁶, heads·C)), as attention is cut (see `attention`).
/// What is copied to the device for a step (32 MiB at once) comes before the rest and is less than it.
pub(super) fn bytes(config: &Config, step: Largest) -> u64 {
    let [tokens, sequences, positions] = [step.tokens, step.sequences, step.positions].map(|count| count as u64);
    let [heads, head_dim, kv_heads] = [config.heads, config.head_dim, config.kv_heads].map(|count| count as u64);
    let [hidden, forward, vocab, layers] =
        [config.hidden, config.feed_forward, config.vocab, config.layers].map(|count| count as u64);
    let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
    let rows = SINGLE * tokens * (6 * (hidden + queries + keys) + 4 * forward);
    let eight_bits = 2 * tokens * (hidden + queries + forward);
    let kept = HALF * tokens * 2 * keys * (layers + 1);
    let picked = positions.max((sequences * positions).min(MOST_POSITIONS as u64));
    let picked = (2 * HALF + SINGLE) * picked * keys;
    let scores = (heads * tokens * positions).min((heads * positions).max(MOST_SCORES as u64));
    let logits = SINGLE * tokens * vocab;
    rows + eight_bits + kept + picked + 4 * SINGLE * scores + logits + FIXED
}

#[cfg(test)]
mod tests {
    use super::super::super::config::Architecture;
    use super::*;

    fn config() -> Config {
        Config {
            architecture: Architecture::Llama,
            context_length: 8192,
            layers: 32,
            hidden: 4096,
            feed_forward: 14336,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 128_256,
            norm_eps: 1e-5,
            rope_dims: 128,
            rope_base: 500_000.0,
            rope_scale: 1.0,
            bos: None,
            eos: Vec::new(),
        }
    }

    #[test]
    fn a_model_of_eight_billions_by_hand() {
        let step = Largest { tokens: 512, sequences: 32, positions: 8192 };
        let rows = 4 * 512 * (6 * (4096 + 4096 + 1024) + 4 * 14336);
        let eight_bits = 2 * 512 * (4096 + 4096 + 14336);
        let kept = 2 * 512 * 2 * 1024 * 33;
        let picked = 8 * 32768 * 1024;
        let scores = 16 * (1 << 26);
        let logits = 4 * 512 * 128_256;
        let all = rows + eight_bits + kept + picked + scores + logits + (256 << 20);
        assert_eq!(bytes(&config(), step), all);
        assert_eq!(all, 2_196_242_432);
    }

    #[test]
    fn attention_is_cut_but_not_below_one_token_of_one_sequence() {
        let of = |tokens, sequences, positions| bytes(&config(), Largest { tokens, sequences, positions });
        // One token of one sequence: its own positions, and no more.
        let short = of(1, 1, 100);
        assert_eq!(of(1, 1, 200) - short, 100 * (8 * 1024 + 16 * 32));
        // More sequences than a batch has positions for change nothing.
        assert_eq!(of(512, 64, 8192), of(512, 32, 8192));
        // One that is longer than a batch is picked whole.
        let long = of(1, 1, 1 << 22);
        assert_eq!(of(1, 1, (1 << 22) + 1) - long, 8 * 1024 + 16 * 32);
    }

    #[test]
    fn each_size_counts() {
        let step = Largest { tokens: 64, sequences: 4, positions: 256 };
        let least = bytes(&config(), step);
        for larger in [
            Config { layers: 33, ..config() },
            Config { hidden: 8192, ..config() },
            Config { feed_forward: 20000, ..config() },
            Config { heads: 64, ..config() },
            Config { kv_heads: 16, ..config() },
            Config { vocab: 200_000, ..config() },
        ] {
            assert!(bytes(&larger, step) > least, "{larger:?}");
        }
        for larger in
            [Largest { tokens: 128, ..step }, Largest { sequences: 8, ..step }, Largest { positions: 512, ..step }]
        {
            assert!(bytes(&config(), larger) > least, "{larger:?}");
        }
    }
}
