//! GPT-2: layer norm, learned positions, GELU, weights stored `[in, out]`. Source: Radford et al. 2019.

use super::{BatchShape, ForwardBuilder, Head, ModelConfig, Tensor};
use crate::program::{Init, Program};

pub(super) fn forward(cfg: &ModelConfig, batch: BatchShape, head: Head) -> Program {
    let mut b = ForwardBuilder::new(batch);
    let (c, v) = (cfg.hidden_size, cfg.vocab_size);
    let weights = Init::Normal { std: cfg.init_std };
    let table = b.param("transformer.wte.weight", &[v, c], weights);
    let positions = b.param("transformer.wpe.weight", &[cfg.max_positions, c], weights);
    let x = b.embed_ids(table, None);
    let mut x = b.embed_positions(positions, Some(x));
    for layer in 0..cfg.n_layers {
        b.block(Some(layer as u32));
        x = block(&mut b, cfg, batch, layer, x);
    }
    b.block(None);
    let h = norm(&mut b, cfg, "transformer.ln_f", x);
    let head_weight = if cfg.tie_embeddings { table } else { b.param("lm_head.weight", &[v, c], weights) };
    let logits = b.linear(h, head_weight, None);
    match head {
        Head::Logits => b.finish_logits(logits),
        Head::Loss => b.finish_loss(logits),
    }
}

fn block(b: &mut ForwardBuilder, cfg: &ModelConfig, batch: BatchShape, layer: usize, x: Tensor) -> Tensor {
    let at = format!("transformer.h.{layer}");
    let (c, f) = (cfg.hidden_size, cfg.intermediate_size);
    // Projections into the residual stream start smaller, so that its variance does not grow with depth.
    let into_stream = cfg.init_std / (2.0 * cfg.n_layers as f32).sqrt();
    let h = norm(b, cfg, &format!("{at}.ln_1"), x);
    let qkv = linear(b, &format!("{at}.attn.c_attn"), h, [c, 3 * c], cfg.init_std);
    let o = b.attention(qkv, cfg.attention(batch, layer));
    let y = linear(b, &format!("{at}.attn.c_proj"), o, [c, c], into_stream);
    let x = b.add(x, y);
    let h = norm(b, cfg, &format!("{at}.ln_2"), x);
    let u = linear(b, &format!("{at}.mlp.c_fc"), h, [c, f], cfg.init_std);
    let a = b.gelu_tanh(u);
    let y = linear(b, &format!("{at}.mlp.c_proj"), a, [f, c], into_stream);
    b.add(x, y)
}

fn norm(b: &mut ForwardBuilder, cfg: &ModelConfig, at: &str, x: Tensor) -> Tensor {
    let gain = b.param(&format!("{at}.weight"), &[cfg.hidden_size], Init::Ones);
    let bias = b.param(&format!("{at}.bias"), &[cfg.hidden_size], Init::Zeros);
    b.layer_norm(x, gain, bias, cfg.norm_eps)
}

fn linear(b: &mut ForwardBuilder, at: &str, x: Tensor, shape: [usize; 2], std: f32) -> Tensor {
    let weight = b.param(&format!("{at}.weight"), &shape, Init::Normal { std });
    let bias = b.param(&format!("{at}.bias"), &[shape[1]], Init::Zeros);
    b.linear_transposed(x, weight, Some(bias))
}
