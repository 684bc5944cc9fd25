//! The same network, written down without blocks, vectors or quantisation, in double precision.

use std::collections::HashMap;

use half::f16;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::super::super::gguf::fixture::GgufBuilder;
use super::super::super::quant::Quant;
use super::super::super::quant::tests::random_weights;

pub(in super::super) const VOCAB: usize = 70;
const EPS: f32 = 1e-5;
const BASE: f32 = 1000.0;

/// A random model of two layers and its variations.
#[derive(Clone, Debug)]
pub(in super::super) struct Model {
    pub(in super::super) architecture: &'static str,
    pub(in super::super) quant: Quant,
    pub(in super::super) hidden: usize,
    pub(in super::super) kv_heads: usize,
    pub(in super::super) head_dim: usize,
    pub(in super::super) rope_dims: Option<usize>,
    pub(in super::super) rope_scale: Option<f32>,
    pub(in super::super) rope_factors: bool,
    pub(in super::super) bias: bool,
    pub(in super::super) head_norms: bool,
    /// Whether there is an output matrix.
    pub(in super::super) output: bool,
    /// A tensor to leave out.
    pub(in super::super) missing: Option<&'static str>,
}

const HEADS: usize = 4;
const LAYERS: usize = 2;

impl Model {
    pub(in super::super) fn llama() -> Model {
        Model {
            architecture: "llama",
            quant: Quant::F32,
            hidden: 64,
            kv_heads: 2,
            head_dim: 16,
            rope_dims: None,
            rope_scale: None,
            rope_factors: false,
            bias: false,
            head_norms: false,
            output: true,
            missing: None,
        }
    }

    /// Matrices of arbitrary bits of a format, wide enough for its blocks.
    pub(in super::super) fn quantized(quant: Quant) -> Model {
        Model { quant, hidden: 256, head_dim: 64, ..Model::llama() }
    }

    fn feed_forward(&self) -> usize {
        if self.hidden == 256 { 512 } else { 96 }
    }

    fn rope_dims(&self) -> usize {
        self.rope_dims.unwrap_or(self.head_dim)
    }

    /// Names, dimensions and values of all tensors.
    fn tensors(&self) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        let (hidden, ff) = (self.hidden, self.feed_forward());
        let (q, kv) = (HEADS * self.head_dim, self.kv_heads * self.head_dim);
        let mut list = vec![("token_embd.weight".to_owned(), vec![hidden, VOCAB])];
        if self.output {
            list.push(("output.weight".into(), vec![hidden, VOCAB]));
        }
        list.push(("output_norm.weight".into(), vec![hidden]));
        if self.rope_factors {
            list.push(("rope_freqs.weight".into(), vec![self.rope_dims() / 2]));
        }
        for layer in 0..LAYERS {
            let mut add = |name: &str, dims: &[usize]| list.push((format!("blk.{layer}.{name}"), dims.to_vec()));
            add("attn_norm.weight", &[hidden]);
            add("ffn_norm.weight", &[hidden]);
            for (name, cols, rows) in [
                ("attn_q", hidden, q),
                ("attn_k", hidden, kv),
                ("attn_v", hidden, kv),
                ("attn_output", q, hidden),
                ("ffn_gate", hidden, ff),
                ("ffn_up", hidden, ff),
                ("ffn_down", ff, hidden),
            ] {
                add(&format!("{name}.weight"), &[cols, rows]);
                if self.bias {
                    add(&format!("{name}.bias"), &[rows]);
                }
            }
            if self.head_norms {
                add("attn_q_norm.weight", &[self.head_dim]);
                add("attn_k_norm.weight", &[self.head_dim]);
            }
        }
        let mut rng = SmallRng::seed_from_u64(42);
        let mut value = |dims: &[usize]| match dims {
            [_] => rng.random_range(0.5..1.5f32),
            _ => rng.random_range(-0.3..0.3),
        };
        let filled = |(name, dims): (String, Vec<usize>)| {
            let values = (0..dims.iter().product()).map(|_| value(&dims)).collect();
            (name, dims, values)
        };
        list.into_iter().map(filled).collect()
    }

    pub(in super::super) fn file(&self) -> GgufBuilder {
        let key = |suffix: &str| format!("{}.{suffix}", self.architecture);
        let mut file = GgufBuilder::default()
            .str("general.architecture", self.architecture)
            .u32(&key("context_length"), 128)
            .u32(&key("block_count"), LAYERS as u32)
            .u32(&key("embedding_length"), self.hidden as u32)
            .u32(&key("feed_forward_length"), self.feed_forward() as u32)
            .u32(&key("attention.head_count"), HEADS as u32)
            .u32(&key("attention.head_count_kv"), self.kv_heads as u32)
            .u32(&key("attention.key_length"), self.head_dim as u32)
            .f32(&key("attention.layer_norm_rms_epsilon"), EPS)
            .f32(&key("rope.freq_base"), BASE);
        if let Some(dims) = self.rope_dims {
            file = file.u32(&key("rope.dimension_count"), dims as u32);
        }
        if let Some(scale) = self.rope_scale {
            file = file.str(&key("rope.scaling.type"), "linear").f32(&key("rope.scaling.factor"), scale);
        }
        for (seed, (name, dims, values)) in self.tensors().into_iter().enumerate() {
            if Some(name.as_str()) == self.missing {
                continue;
            }
            file = if dims.len() == 1 || self.quant == Quant::F32 {
                file.f32_tensor(&name, &dims, &values)
            } else {
                let number = (0..64).find(|&n| Quant::from_ggml(n) == Some(self.quant)).unwrap();
                file.tensor(&name, &dims, number, random_weights(self.quant, values.len(), seed as u64))
            };
        }
        file
    }

    /// Logits of every token, one row after the other. Keys and values are rounded to half precision, as in the arena.
    pub(in super::super) fn logits(&self, tokens: &[u32]) -> Vec<f64> {
        let tensors: HashMap<_, _> = self.tensors().into_iter().map(|(name, _, values)| (name, values)).collect();
        let embedding = &tensors["token_embd.weight"];
        let mut xs: Vec<Vec<f64>> =
            tokens.iter().map(|&t| wide(&embedding[t as usize * self.hidden..][..self.hidden])).collect();
        for layer in 0..LAYERS {
            self.layer(&tensors, layer, &mut xs);
        }
        let output = tensors.get("output.weight").unwrap_or(embedding);
        xs.iter().flat_map(|x| product(output, None, &norm(x, &tensors["output_norm.weight"]))).collect()
    }

    fn layer(&self, tensors: &HashMap<String, Vec<f32>>, layer: usize, xs: &mut [Vec<f64>]) {
        let get = |name: &str| &tensors[&format!("blk.{layer}.{name}")];
        let linear = |name: &str, x: &[f64]| {
            let bias = tensors.get(&format!("blk.{layer}.{name}.bias"));
            product(get(&format!("{name}.weight")), bias, x)
        };
        let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (Vec::new(), Vec::new());
        for (position, x) in xs.iter_mut().enumerate() {
            let normed = norm(x, get("attn_norm.weight"));
            let [mut query, mut key] = ["attn_q", "attn_k"].map(|name| linear(name, &normed));
            for (heads, name) in [(&mut query, "attn_q_norm.weight"), (&mut key, "attn_k_norm.weight")] {
                for head in heads.chunks_mut(self.head_dim) {
                    if self.head_norms {
                        head.copy_from_slice(&norm(head, get(name)));
                    }
                    self.rotate(tensors, position, head);
                }
            }
            keys.push(key.into_iter().map(rounded).collect());
            values.push(linear("attn_v", &normed).into_iter().map(rounded).collect());
            let attended = self.attend(&query, &keys, &values);
            add(x, &linear("attn_output", &attended));
            let normed = norm(x, get("ffn_norm.weight"));
            let (gate, up) = (linear("ffn_gate", &normed), linear("ffn_up", &normed));
            let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(x, &linear("ffn_down", &inner));
        }
    }

    fn attend(&self, query: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>]) -> Vec<f64> {
        let mut out = Vec::new();
        for (head, query) in query.chunks(self.head_dim).enumerate() {
            let at = head / (HEADS / self.kv_heads) * self.head_dim;
            let dot = |key: &Vec<f64>| query.iter().zip(&key[at..]).map(|(a, b)| a * b).sum::<f64>();
            let weights: Vec<f64> = keys.iter().map(|k| (dot(k) / (self.head_dim as f64).sqrt()).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend(
                (0..self.head_dim).map(|d| weights.iter().zip(values).map(|(w, v)| w * v[at + d]).sum::<f64>() / sum),
            );
        }
        out
    }

    fn rotate(&self, tensors: &HashMap<String, Vec<f32>>, position: usize, head: &mut [f64]) {
        let dims = self.rope_dims();
        for i in 0..dims / 2 {
            let factor = tensors.get("rope_freqs.weight").map_or(1.0, |f| f64::from(f[i]));
            let scaled = position as f64 / f64::from(self.rope_scale.unwrap_or(1.0));
            let angle = scaled * f64::from(BASE).powf(-2.0 * i as f64 / dims as f64) / factor;
            let (a, b) = if self.architecture == "llama" { (2 * i, 2 * i + 1) } else { (i, i + dims / 2) };
            (head[a], head[b]) =
                (head[a] * angle.cos() - head[b] * angle.sin(), head[a] * angle.sin() + head[b] * angle.cos());
        }
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

fn rounded(v: f64) -> f64 {
    f64::from(f16::from_f32(v as f32).to_f32())
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn norm(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(v, &w)| v / (mean + f64::from(EPS)).sqrt() * f64::from(w)).collect()
}

fn product(weights: &[f32], bias: Option<&Vec<f32>>, x: &[f64]) -> Vec<f64> {
    let rows = weights.chunks(x.len()).enumerate();
    rows.map(|(r, row)| {
        row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum::<f64>() + bias.map_or(0.0, |b| f64::from(b[r]))
    })
    .collect()
}
