//! GPT-2: layer norm, learned positions, GELU, weights stored `[in, out]`. Source: Radford et al. 2019.

use super::config::check_layers;
use super::family::need;
use super::hf_config::agreed;
use super::{
    BatchShape, Family, ForwardBuilder, HfConfig, Hidden, ModelConfig, ModelError, Multipliers, NormPlacement, Output,
    QkNorm, RopeScaling, Tensor,
};
use crate::program::Init;

pub(super) static FAMILY: Family = Family {
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    prefix: "transformer.",
    keys: &[KEYS, DESCRIPTION],
    linears: &["c_attn", "c_proj", "c_fc"],
    parse,
    hidden,
};

/// Each size is accepted under GPT-2's own name and under the name that other families use.
const KEYS: &[&str] = &[
    "activation_function",
    "hidden_size",
    "initializer_range",
    "layer_norm_epsilon",
    "max_position_embeddings",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "n_positions",
    "num_attention_heads",
    "num_hidden_layers",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "tie_word_embeddings",
];

/// Keys that do not change training here.
const DESCRIPTION: &[&str] = &[
    "add_cross_attention",
    "attn_pdrop",
    "embd_pdrop",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
];

fn parse(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    let act = hf.text("activation_function")?.unwrap_or("gelu_new");
    if act != "gelu_new" && act != "gelu_pytorch_tanh" {
        return Err(ModelError::value("activation_function", act, "gpt2 uses gelu_new"));
    }
    if hf.flag("scale_attn_by_inverse_layer_idx")? == Some(true) {
        return Err(ModelError::value("scale_attn_by_inverse_layer_idx", true, "expected false"));
    }
    if hf.flag("scale_attn_weights")? == Some(false) {
        return Err(ModelError::value("scale_attn_weights", false, "expected true"));
    }
    let size = |own, other| agreed([(own, hf.size(own)?), (other, hf.size(other)?)]);
    let hidden_size = need("n_embd", &FAMILY, size("n_embd", "hidden_size")?)?;
    let n_heads = need("n_head", &FAMILY, size("n_head", "num_attention_heads")?)?;
    let n_layers = check_layers("n_layer", need("n_layer", &FAMILY, size("n_layer", "num_hidden_layers")?)?)?;
    if n_heads == 0 || hidden_size % n_heads != 0 {
        return Err(ModelError::value("n_head", n_heads, format!("it must divide n_embd {hidden_size}")));
    }
    Ok(ModelConfig {
        family: &FAMILY,
        vocab_size: need("vocab_size", &FAMILY, hf.size("vocab_size")?)?,
        hidden_size,
        intermediate_size: hf.size("n_inner")?.unwrap_or(hidden_size.saturating_mul(4)),
        n_layers,
        n_heads,
        n_kv_heads: n_heads,
        head_dim: hidden_size / n_heads,
        max_positions: size("n_positions", "max_position_embeddings")?.unwrap_or(1024),
        norm_eps: hf.float("layer_norm_epsilon")?.unwrap_or(1e-5),
        rope_theta: 0.0,
        rope_scaling: RopeScaling::None,
        tie_embeddings: hf.flag("tie_word_embeddings")?.unwrap_or(true),
        qkv_bias: true,
        o_bias: true,
        mlp_bias: true,
        output: Output::Logits,
        multipliers: Multipliers::default(),
        norm_placement: NormPlacement::Before,
        qk_norm: QkNorm::None,
        packed_projections: true,
        windows: vec![None; n_layers],
        init_std: hf.float("initializer_range")?.unwrap_or(0.02),
    })
}

fn hidden(cfg: &ModelConfig, b: &mut ForwardBuilder) -> Hidden {
    let batch = b.batch();
    let (c, v) = (cfg.hidden_size, cfg.vocab_size);
    let weights = Init::Normal { std: cfg.init_std };
    let table = b.param("transformer.wte.weight", &[v, c], weights);
    let positions = b.param("transformer.wpe.weight", &[cfg.max_positions, c], weights);
    let x = b.embed_ids(table, None);
    let mut x = b.embed_positions(positions, Some(x));
    for layer in 0..cfg.n_layers {
        b.block(Some(layer as u32));
        x = block(b, cfg, batch, layer, x);
    }
    b.block(None);
    Hidden { states: norm(b, cfg, "transformer.ln_f", x), table }
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
