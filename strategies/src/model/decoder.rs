//! The decoder of Llama and related families: RMS norm, rotary positions, grouped-query attention, SwiGLU.
//!
//! These families differ only in the fields of [`ModelConfig`], so this file names none of them. Tensor names are Hugging
//! Face's.

use super::config::check_layers;
use super::family::need;
use super::rope::{self, ROPE_TABLE};
use super::{
    BatchShape, Family, ForwardBuilder, HfConfig, Hidden, ModelConfig, ModelError, Multipliers, NormPlacement, Output,
    QkNorm, Tensor,
};
use crate::program::Init;

/// Prefix of all tensor names except the head's.
pub(super) const PREFIX: &str = "model.";

/// Names of the linear layers of a block.
pub(super) const LINEARS: &[&str] = &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Keys of `config.json` that [`parse`] reads, or that describe a model without changing how it trains.
pub(super) const KEYS: &[&str] = &[
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

/// Keys that [`optional_windows`] reads.
pub(super) const OPTIONAL_WINDOW_KEYS: &[&str] = &["max_window_layers", "sliding_window", "use_sliding_window"];

/// Reads the keys that all these families share; each family then sets its own fields.
pub(super) fn parse(hf: &HfConfig, family: &'static Family) -> Result<ModelConfig, ModelError> {
    let act = hf.text("hidden_act")?.unwrap_or("silu");
    if act != "silu" {
        return Err(ModelError::value("hidden_act", act, "this family uses silu"));
    }
    let hidden_size = need("hidden_size", family, hf.size("hidden_size")?)?;
    let n_heads = need("num_attention_heads", family, hf.size("num_attention_heads")?)?;
    let n_layers = need("num_hidden_layers", family, hf.size("num_hidden_layers")?)?;
    let n_layers = check_layers("num_hidden_layers", n_layers)?;
    let (rope_theta, rope_scaling) = rope::read(hf)?;
    let attention_bias = hf.flag("attention_bias")?.unwrap_or(false);
    Ok(ModelConfig {
        family,
        vocab_size: need("vocab_size", family, hf.size("vocab_size")?)?,
        hidden_size,
        intermediate_size: need("intermediate_size", family, hf.size("intermediate_size")?)?,
        n_layers,
        n_heads,
        n_kv_heads: hf.size("num_key_value_heads")?.unwrap_or(n_heads),
        head_dim: head_dim(hf, hidden_size, n_heads)?,
        max_positions: hf.size("max_position_embeddings")?.unwrap_or(2048),
        norm_eps: hf.float("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta,
        rope_scaling,
        tie_embeddings: hf.flag("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: attention_bias,
        o_bias: attention_bias,
        mlp_bias: hf.flag("mlp_bias")?.unwrap_or(false),
        output: Output::Logits,
        multipliers: Multipliers::default(),
        norm_placement: NormPlacement::Before,
        qk_norm: QkNorm::None,
        packed_projections: false,
        windows: windows(hf, None, 0, n_layers)?,
        init_std: hf.float("initializer_range")?.unwrap_or(0.02),
    })
}

fn head_dim(hf: &HfConfig, hidden_size: usize, n_heads: usize) -> Result<usize, ModelError> {
    let given = hf.size("head_dim")?;
    let head_dim = given.unwrap_or(hidden_size.checked_div(n_heads).unwrap_or(0));
    if given.is_none() && head_dim * n_heads != hidden_size {
        let expected = format!("it must divide hidden_size {hidden_size}, or head_dim must be given");
        return Err(ModelError::value("num_attention_heads", n_heads, expected));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(ModelError::value("head_dim", head_dim, "rotary embedding needs an even width"));
    }
    Ok(head_dim)
}

/// The window of each layer: `window` from layer `first` on, or as `layer_types` selects.
pub(super) fn windows(
    hf: &HfConfig,
    window: Option<usize>,
    first: usize,
    n_layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    if window == Some(0) {
        let expected = "a token sees at least itself; use null for no window";
        return Err(ModelError::value("sliding_window", 0, expected));
    }
    let Some(types) = hf.texts("layer_types")? else {
        return Ok((0..n_layers).map(|layer| window.filter(|_| layer >= first)).collect());
    };
    if types.len() != n_layers {
        let found = format!("{} entries", types.len());
        return Err(ModelError::value("layer_types", found, format!("expected {n_layers}")));
    }
    let of_type = |name: &str| match name {
        "full_attention" => Ok(None),
        "sliding_attention" => Ok(window),
        other => Err(ModelError::value("layer_types", other, "expected full_attention or sliding_attention")),
    };
    types.into_iter().map(of_type).collect()
}

/// The same window for all layers: transformers ignores `layer_types` in these families.
pub(super) fn window_of_all(hf: &HfConfig, n_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = hf.size("sliding_window")?;
    let windows = windows(hf, window, 0, n_layers)?;
    match windows.iter().all(|of_layer| *of_layer == window) {
        true => Ok(windows),
        false => Err(ModelError::Conflict { first: "sliding_window".into(), second: "layer_types".into() }),
    }
}

/// Windows that apply only if `use_sliding_window` is set, from layer `max_window_layers` on, which is 28 in transformers if it is absent.
pub(super) fn optional_windows(hf: &HfConfig, n_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let used = hf.flag("use_sliding_window")? == Some(true);
    let window = hf.size("sliding_window")?.filter(|_| used);
    windows(hf, window, hf.size("max_window_layers")?.unwrap_or(28), n_layers)
}

pub(super) fn hidden(cfg: &ModelConfig, b: &mut ForwardBuilder) -> Hidden {
    let batch = b.batch();
    let (c, v) = (cfg.hidden_size, cfg.vocab_size);
    let weights = Init::Normal { std: cfg.init_std };
    let table = b.param("model.embed_tokens.weight", &[v, c], weights);
    let rope = b.constant(ROPE_TABLE, &[2, batch.seq_len, cfg.head_dim / 2]);
    let x = b.embed_ids(table, None);
    let mut x = b.scale(x, cfg.multipliers.embedding);
    for layer in 0..cfg.n_layers {
        b.block(Some(layer as u32));
        x = block(b, cfg, batch, layer, x, rope);
    }
    b.block(None);
    let gain = b.param("model.norm.weight", &[c], Init::Ones);
    Hidden { states: b.rms_norm(x, gain, cfg.norm_eps), table }
}

fn block(
    b: &mut ForwardBuilder,
    cfg: &ModelConfig,
    batch: BatchShape,
    layer: usize,
    x: Tensor,
    rope: Tensor,
) -> Tensor {
    let norms = match cfg.norm_placement {
        NormPlacement::Before => ["input_layernorm", "post_attention_layernorm"],
        NormPlacement::After => ["post_attention_layernorm", "post_feedforward_layernorm"],
    };
    let [attention_norm, feed_forward_norm] = norms.map(|norm| format!("model.layers.{layer}.{norm}.weight"));
    let x = residual(b, cfg, &attention_norm, x, |b, h| attention(b, cfg, batch, layer, h, rope));
    residual(b, cfg, &feed_forward_norm, x, |b, h| feed_forward(b, cfg, layer, h))
}

/// `x + part(norm(x))`, or `x + norm(part(x))`.
fn residual(
    b: &mut ForwardBuilder,
    cfg: &ModelConfig,
    norm: &str,
    x: Tensor,
    part: impl Fn(&mut ForwardBuilder, Tensor) -> Tensor,
) -> Tensor {
    let gain = b.param(norm, &[cfg.hidden_size], Init::Ones);
    let y = match cfg.norm_placement {
        NormPlacement::Before => {
            let h = b.rms_norm(x, gain, cfg.norm_eps);
            part(b, h)
        }
        NormPlacement::After => {
            let y = part(b, x);
            b.rms_norm(y, gain, cfg.norm_eps)
        }
    };
    let y = b.scale(y, cfg.multipliers.residual);
    b.add(x, y)
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
    let (weight, bias) = projections(b, cfg, &at, "qkv", &[("q", q), ("k", kv), ("v", kv)], cfg.qkv_bias);
    let mut qkv = b.linear(h, weight, bias);
    let mut gains = |of_q, of_k| {
        [("q", of_q), ("k", of_k)].map(|(p, n)| b.param(&format!("{at}.{p}_norm.weight"), &[n], Init::Ones))
    };
    match cfg.qk_norm {
        QkNorm::None => {}
        QkNorm::Heads => {
            let [gain_q, gain_k] = gains(cfg.head_dim, cfg.head_dim);
            qkv = b.head_norm(qkv, gain_q, gain_k, heads, cfg.norm_eps);
        }
        QkNorm::Projections => {
            let [gain_q, gain_k] = gains(q, kv);
            qkv = b.qk_norm(qkv, gain_q, gain_k, cfg.norm_eps);
        }
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
    let (weight, bias) = projections(b, cfg, &at, "gate_up", &[("gate", f), ("up", f)], cfg.mlp_bias);
    let gate_up = b.linear(h, weight, bias);
    let a = b.swiglu(gate_up);
    let weight = b.param(&format!("{at}.down_proj.weight"), &[c, f], weights);
    let bias = cfg.mlp_bias.then(|| b.param(&format!("{at}.down_proj.bias"), &[c], Init::Zeros));
    b.linear(a, weight, bias)
}

/// The weight and optional bias of projections that read the same input. They are one parameter, so they run as one
/// product; the model file has a tensor for each of `parts`, or one for all parts if they are packed.
fn projections(
    b: &mut ForwardBuilder,
    cfg: &ModelConfig,
    at: &str,
    name: &str,
    parts: &[(&str, usize)],
    bias: bool,
) -> (Tensor, Option<Tensor>) {
    let n_out = parts.iter().map(|(_, rows)| rows).sum();
    let all = [(name, n_out)];
    let parts = if cfg.packed_projections { &all[..] } else { parts };
    let mut param = |kind: &str, shape: &[usize], init: Init| {
        let names: Vec<String> = parts.iter().map(|(part, _)| format!("{at}.{part}_proj.{kind}")).collect();
        let stacked: Vec<(&str, usize)> = names.iter().zip(parts).map(|(name, (_, n))| (name.as_str(), *n)).collect();
        b.fused_param(&format!("{at}.{name}.{kind}"), shape, &stacked, init)
    };
    let weight = param("weight", &[n_out, cfg.hidden_size], Init::Normal { std: cfg.init_std });
    (weight, bias.then(|| param("bias", &[n_out], Init::Zeros)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> ModelConfig {
        ModelConfig::try_from(&serde_json::from_str::<HfConfig>(json).unwrap()).unwrap()
    }

    const SIZES: &str = r#""vocab_size": 512, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256"#;

    #[test]
    fn sliding_window_applies_to_mistral_and_to_qwen_only_when_enabled() {
        let of = |family: &str, keys: &str| {
            parse(&format!(r#"{{"model_type": "{family}", {SIZES}, "sliding_window": 16{keys}}}"#)).windows
        };

        assert_eq!(of("mistral", ""), [Some(16), Some(16)]);
        assert_eq!(of("qwen2", r#", "use_sliding_window": false"#), [None, None]);
        assert_eq!(of("qwen2", r#", "use_sliding_window": true, "max_window_layers": 1"#), [None, Some(16)]);
    }
}
