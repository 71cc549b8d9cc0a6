//! Llama and its relatives: RMS norm, rotary positions, grouped-query attention, SwiGLU.
//!
//! Source: Touvron et al. 2023 (arXiv:2307.09288), Jiang et al. 2023 (Mistral, arXiv:2310.06825), Yang et al. 2024
//! (Qwen2, arXiv:2407.10671), Yang et al. 2025 (Qwen3, arXiv:2505.09388). Names are Hugging Face's.

use super::{BatchShape, Family, ForwardBuilder, Head, ModelConfig, Tensor};
use crate::program::{Attention, Init, Program};

/// Name of the constant that holds the rotary table, `[2, P, D/2]`: cosines, then sines.
pub(super) const ROPE_TABLE: &str = "rope_table";

pub(super) fn forward(cfg: &ModelConfig, batch: BatchShape, head: Head) -> Program {
    let mut b = ForwardBuilder::new(batch);
    let (c, v) = (cfg.hidden_size, cfg.vocab_size);
    let weights = Init::Normal { std: cfg.init_std };
    let table = b.param("model.embed_tokens.weight", &[v, c], weights);
    let rope = b.constant(ROPE_TABLE, &[2, batch.seq_len, cfg.head_dim / 2]);
    let mut x = b.embed_ids(table, None);
    for layer in 0..cfg.n_layers {
        b.block(Some(layer as u32));
        x = block(&mut b, cfg, batch, layer, x, rope);
    }
    b.block(None);
    let gain = b.param("model.norm.weight", &[c], Init::Ones);
    let h = b.rms_norm(x, gain, cfg.norm_eps);
    let head_weight = if cfg.tie_embeddings { table } else { b.param("lm_head.weight", &[v, c], weights) };
    let logits = b.linear(h, head_weight, None);
    match head {
        Head::Logits => b.finish_logits(logits),
        Head::Loss => b.finish_loss(logits),
    }
}

fn block(
    b: &mut ForwardBuilder,
    cfg: &ModelConfig,
    batch: BatchShape,
    layer: usize,
    x: Tensor,
    rope: Tensor,
) -> Tensor {
    let h = input_norm(b, cfg, &format!("model.layers.{layer}.input_layernorm.weight"), x);
    let y = attention(b, cfg, batch, layer, h, rope);
    let x = b.add(x, y);
    let h = input_norm(b, cfg, &format!("model.layers.{layer}.post_attention_layernorm.weight"), x);
    let y = feed_forward(b, cfg, layer, h);
    b.add(x, y)
}

fn input_norm(b: &mut ForwardBuilder, cfg: &ModelConfig, name: &str, x: Tensor) -> Tensor {
    let gain = b.param(name, &[cfg.hidden_size], Init::Ones);
    b.rms_norm(x, gain, cfg.norm_eps)
}

fn attention(
    b: &mut ForwardBuilder,
    cfg: &ModelConfig,
    batch: BatchShape,
    layer: usize,
    h: Tensor,
    rope: Tensor,
) -> Tensor {
    let at = format!("model.layers.{layer}.self_attn");
    let heads = cfg.attention(batch, layer);
    let (q, kv) = (heads.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim);
    let weights = Init::Normal { std: cfg.init_std };
    let stacked = |kind: &str| [("q", q), ("k", kv), ("v", kv)].map(|(p, n)| (format!("{at}.{p}_proj.{kind}"), n));
    let weight = fused(b, &format!("{at}.qkv.weight"), &[q + 2 * kv, cfg.hidden_size], &stacked("weight"), weights);
    let bias = cfg.qkv_bias.then(|| fused(b, &format!("{at}.qkv.bias"), &[q + 2 * kv], &stacked("bias"), Init::Zeros));
    let mut qkv = b.linear(h, weight, bias);
    if cfg.family == Family::Qwen3 {
        let gain_q = b.param(&format!("{at}.q_norm.weight"), &[cfg.head_dim], Init::Ones);
        let gain_k = b.param(&format!("{at}.k_norm.weight"), &[cfg.head_dim], Init::Ones);
        qkv = b.head_norm(qkv, gain_q, gain_k, heads, cfg.norm_eps);
    }
    let qkv = b.rotary(qkv, rope, heads);
    let o = b.attention(qkv, heads);
    let weight = b.param(&format!("{at}.o_proj.weight"), &[cfg.hidden_size, q], weights);
    let bias = cfg.o_bias.then(|| b.param(&format!("{at}.o_proj.bias"), &[cfg.hidden_size], Init::Zeros));
    b.linear(o, weight, bias)
}

fn feed_forward(b: &mut ForwardBuilder, cfg: &ModelConfig, layer: usize, h: Tensor) -> Tensor {
    let at = format!("model.layers.{layer}.mlp");
    let (c, f) = (cfg.hidden_size, cfg.intermediate_size);
    let weights = Init::Normal { std: cfg.init_std };
    let stacked = |kind: &str| ["gate", "up"].map(|p| (format!("{at}.{p}_proj.{kind}"), f));
    let weight = fused(b, &format!("{at}.gate_up.weight"), &[2 * f, c], &stacked("weight"), weights);
    let bias = cfg.mlp_bias.then(|| fused(b, &format!("{at}.gate_up.bias"), &[2 * f], &stacked("bias"), Init::Zeros));
    let gate_up = b.linear(h, weight, bias);
    let a = b.swiglu(gate_up);
    let weight = b.param(&format!("{at}.down_proj.weight"), &[c, f], weights);
    let bias = cfg.mlp_bias.then(|| b.param(&format!("{at}.down_proj.bias"), &[c], Init::Zeros));
    b.linear(a, weight, bias)
}

fn fused(b: &mut ForwardBuilder, name: &str, shape: &[usize], parts: &[(String, usize)], init: Init) -> Tensor {
    let parts: Vec<(&str, usize)> = parts.iter().map(|(name, rows)| (name.as_str(), *rows)).collect();
    b.fused_param(name, shape, &parts, init)
}

impl ModelConfig {
    /// Geometry of the attention of one layer.
    pub fn attention(&self, batch: BatchShape, layer: usize) -> Attention {
        Attention {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            seq_len: batch.seq_len,
            window: self.windows[layer],
            scale: 1.0 / (self.head_dim as f32).sqrt(),
        }
    }

    /// Contents of the constant of this name and shape; `None` if the model has no such constant.
    ///
    /// `rope_table`: `[2, P, D/2]`, cosines then sines. Angles are computed in f32 as PyTorch does, so that long
    /// positions round alike.
    pub fn constant(&self, name: &str, shape: &[usize]) -> Option<Vec<f32>> {
        if name != ROPE_TABLE {
            return None;
        }
        let n_positions = shape.get(1).copied()?;
        let frequencies: Vec<f32> = self.rope_frequencies().iter().map(|f| *f as f32).collect();
        let angles = || (0..n_positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f));
        Some(angles().map(|a| f64::from(a).cos() as f32).chain(angles().map(|a| f64::from(a).sin() as f32)).collect())
    }
}
