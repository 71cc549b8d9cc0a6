//! Hugging Face `config.json` in both its old and its new form, and what is needed of it.

use serde::Deserialize;
use std::fmt;

/// Values of `model_type` that [`ModelConfig`] understands.
pub const SUPPORTED: [&str; 5] = ["llama", "mistral", "qwen2", "qwen3", "gpt2"];

/// Model family; decides the structure of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3.
    Llama,
    /// Mistral: Llama with an optional sliding window.
    Mistral,
    /// Qwen2: Llama with a bias on q, k and v.
    Qwen2,
    /// Qwen3: Llama with a norm on each query and key head.
    Qwen3,
    /// GPT-2: layer norm, learned positions, GELU, transposed weights.
    Gpt2,
}

/// Why a `config.json` cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// An architecture we do not build.
    #[error("architecture `{found}` is not supported; supported are {}", SUPPORTED.join(", "))]
    Unsupported {
        /// Its `model_type`.
        found: String,
    },
    /// A field the family needs.
    #[error("`{field}` is missing from the model configuration of a {family}")]
    Missing {
        /// Name of the field.
        field: &'static str,
        /// Family that needs it.
        family: &'static str,
    },
    /// A field whose value we cannot honour.
    #[error("`{field}: {found}` is not supported; {expected}")]
    Value {
        /// Name of the field.
        field: &'static str,
        /// What was found.
        found: String,
        /// What would fit.
        expected: String,
    },
    /// Rows longer than the model's positions.
    #[error("sequence_len {seq_len} exceeds the model's max_position_embeddings {max_positions}")]
    TooLong {
        /// Tokens of a row.
        seq_len: usize,
        /// Positions of the model.
        max_positions: usize,
    },
}

/// The fields of `config.json` that matter here; others are ignored.
#[derive(Clone, Debug, Default, Deserialize)]
#[allow(missing_docs)] // the names are Hugging Face's
pub struct HfConfig {
    pub model_type: Option<String>,
    #[serde(default)]
    pub architectures: Vec<String>,
    pub vocab_size: Option<usize>,
    pub hidden_size: Option<usize>,
    pub intermediate_size: Option<usize>,
    pub num_hidden_layers: Option<usize>,
    pub num_attention_heads: Option<usize>,
    pub num_key_value_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub max_position_embeddings: Option<usize>,
    pub rms_norm_eps: Option<f32>,
    pub rope_theta: Option<f64>,
    pub rope_scaling: Option<RopeParameters>,
    pub rope_parameters: Option<RopeParameters>,
    pub hidden_act: Option<String>,
    pub activation_function: Option<String>,
    pub tie_word_embeddings: Option<bool>,
    pub attention_bias: Option<bool>,
    pub mlp_bias: Option<bool>,
    pub sliding_window: Option<usize>,
    pub use_sliding_window: Option<bool>,
    pub max_window_layers: Option<usize>,
    pub layer_types: Option<Vec<String>>,
    pub initializer_range: Option<f32>,
    // GPT-2's own names
    pub n_embd: Option<usize>,
    pub n_head: Option<usize>,
    pub n_layer: Option<usize>,
    pub n_inner: Option<usize>,
    pub n_positions: Option<usize>,
    pub layer_norm_epsilon: Option<f32>,
    pub scale_attn_weights: Option<bool>,
    pub scale_attn_by_inverse_layer_idx: Option<bool>,
}

/// `rope_scaling` (old form, beside `rope_theta`) and `rope_parameters` (new form, containing it).
#[derive(Clone, Debug, Default, Deserialize)]
#[allow(missing_docs)] // the names are Hugging Face's
pub struct RopeParameters {
    pub rope_theta: Option<f64>,
    #[serde(alias = "type")]
    pub rope_type: Option<String>,
    pub factor: Option<f64>,
    pub low_freq_factor: Option<f64>,
    pub high_freq_factor: Option<f64>,
    pub original_max_position_embeddings: Option<usize>,
}

/// How rotary frequencies are stretched for long contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by a factor. Source: Chen et al. 2023 (arXiv:2306.15595).
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3: low frequencies divided by a factor, high ones kept, a ramp between. Source: Dubey et al. 2024
    /// (arXiv:2407.21783), with the constants of the released configuration files.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` count as low frequencies.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` count as high frequencies.
        high_freq_factor: f64,
        /// Context length of the base model.
        original_max_positions: usize,
    },
}

/// A model that we can build.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Structure of a block.
    pub family: Family,
    /// Tokens of the vocabulary, `V`.
    pub vocab_size: usize,
    /// Width of the residual stream, `C`.
    pub hidden_size: usize,
    /// Width of the feed-forward part, `F`.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub n_layers: usize,
    /// Query heads, `H`.
    pub n_heads: usize,
    /// Key/value heads, `K`.
    pub n_kv_heads: usize,
    /// Width of a head, `D`.
    pub head_dim: usize,
    /// Longest row.
    pub max_positions: usize,
    /// Added to the variance in norms.
    pub norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Stretching of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Head shares the embedding's weight.
    pub tie_embeddings: bool,
    /// Bias on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention output.
    pub o_bias: bool,
    /// Biases in the feed-forward part.
    pub mlp_bias: bool,
    /// Sliding window of each layer.
    pub windows: Vec<Option<usize>>,
    /// Standard deviation of weights that start from scratch.
    pub init_std: f32,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}

impl Family {
    /// Its `model_type` in `config.json`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Gpt2 => "gpt2",
        }
    }

    /// Its class name in `architectures`.
    pub const fn architecture(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Mistral => "MistralForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
            Family::Gpt2 => "GPT2LMHeadModel",
        }
    }

    fn parse(name: &str) -> Option<Family> {
        [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3, Family::Gpt2]
            .into_iter()
            .find(|f| f.model_type() == name || f.architecture() == name)
    }
}

impl TryFrom<&HfConfig> for ModelConfig {
    type Error = ModelError;

    fn try_from(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
        let named = hf.model_type.as_deref().or(hf.architectures.first().map(String::as_str));
        let name = named.ok_or(ModelError::Missing { field: "model_type", family: "model" })?;
        let family = Family::parse(name).ok_or_else(|| ModelError::Unsupported { found: name.into() })?;
        let config = if family == Family::Gpt2 { gpt2(hf)? } else { decoder(hf, family)? };
        config.check()
    }
}

fn need<T: Copy>(field: &'static str, family: Family, value: Option<T>) -> Result<T, ModelError> {
    value.ok_or(ModelError::Missing { field, family: family.model_type() })
}

/// More layers than any model has; each costs memory before anything of a model is there.
const LAYERS_MAX: usize = 1 << 16;

/// The number of layers, before a list of as many is made.
fn layers(field: &'static str, family: Family, value: Option<usize>) -> Result<usize, ModelError> {
    let n_layers = need(field, family, value)?;
    if (1..=LAYERS_MAX).contains(&n_layers) {
        return Ok(n_layers);
    }
    Err(value_error(field, n_layers, format!("it must lie between 1 and {LAYERS_MAX}")))
}

fn decoder(hf: &HfConfig, family: Family) -> Result<ModelConfig, ModelError> {
    let act = hf.hidden_act.as_deref().unwrap_or("silu");
    if act != "silu" {
        return Err(value_error("hidden_act", act, "this family uses silu"));
    }
    let hidden_size = need("hidden_size", family, hf.hidden_size)?;
    let n_heads = need("num_attention_heads", family, hf.num_attention_heads)?;
    let n_layers = layers("num_hidden_layers", family, hf.num_hidden_layers)?;
    let attention_bias = hf.attention_bias.unwrap_or(false);
    let head_dim = hf.head_dim.unwrap_or(hidden_size.checked_div(n_heads).unwrap_or(0));
    if hf.head_dim.is_none() && head_dim * n_heads != hidden_size {
        return Err(value_error(
            "num_attention_heads",
            n_heads,
            format!("it must divide hidden_size {hidden_size}, or head_dim must be given"),
        ));
    }
    Ok(ModelConfig {
        family,
        vocab_size: need("vocab_size", family, hf.vocab_size)?,
        hidden_size,
        intermediate_size: need("intermediate_size", family, hf.intermediate_size)?,
        n_layers,
        n_heads,
        n_kv_heads: hf.num_key_value_heads.unwrap_or(n_heads),
        head_dim,
        max_positions: hf.max_position_embeddings.unwrap_or(2048),
        norm_eps: hf.rms_norm_eps.unwrap_or(1e-6),
        rope_theta: rope_theta(hf),
        rope_scaling: rope_scaling(hf)?,
        tie_embeddings: hf.tie_word_embeddings.unwrap_or(false),
        qkv_bias: attention_bias || family == Family::Qwen2,
        o_bias: attention_bias && family != Family::Qwen2,
        mlp_bias: hf.mlp_bias.unwrap_or(false),
        windows: windows(hf, family, n_layers)?,
        init_std: hf.initializer_range.unwrap_or(0.02),
    })
}

fn gpt2(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
    let family = Family::Gpt2;
    let act = hf.activation_function.as_deref().unwrap_or("gelu_new");
    if act != "gelu_new" && act != "gelu_pytorch_tanh" {
        return Err(value_error("activation_function", act, "gpt2 uses gelu_new"));
    }
    if hf.scale_attn_by_inverse_layer_idx == Some(true) {
        return Err(value_error("scale_attn_by_inverse_layer_idx", true, "only false is"));
    }
    if hf.scale_attn_weights == Some(false) {
        return Err(value_error("scale_attn_weights", false, "only true is"));
    }
    let hidden_size = need("n_embd", family, hf.n_embd.or(hf.hidden_size))?;
    let n_heads = need("n_head", family, hf.n_head.or(hf.num_attention_heads))?;
    let n_layers = layers("n_layer", family, hf.n_layer.or(hf.num_hidden_layers))?;
    if n_heads == 0 || hidden_size % n_heads != 0 {
        return Err(value_error("n_head", n_heads, format!("it must divide n_embd {hidden_size}")));
    }
    Ok(ModelConfig {
        family,
        vocab_size: need("vocab_size", family, hf.vocab_size)?,
        hidden_size,
        intermediate_size: hf.n_inner.unwrap_or(hidden_size.saturating_mul(4)),
        n_layers,
        n_heads,
        n_kv_heads: n_heads,
        head_dim: hidden_size / n_heads,
        max_positions: hf.n_positions.or(hf.max_position_embeddings).unwrap_or(1024),
        norm_eps: hf.layer_norm_epsilon.unwrap_or(1e-5),
        rope_theta: 0.0,
        rope_scaling: RopeScaling::None,
        tie_embeddings: hf.tie_word_embeddings.unwrap_or(true),
        qkv_bias: true,
        o_bias: true,
        mlp_bias: true,
        windows: vec![None; n_layers],
        init_std: hf.initializer_range.unwrap_or(0.02),
    })
}

fn value_error(field: &'static str, found: impl fmt::Display, expected: impl Into<String>) -> ModelError {
    ModelError::Value { field, found: found.to_string(), expected: expected.into() }
}

fn rope_theta(hf: &HfConfig) -> f64 {
    let new = hf.rope_parameters.as_ref().and_then(|r| r.rope_theta);
    let scaling = hf.rope_scaling.as_ref().and_then(|r| r.rope_theta);
    new.or(hf.rope_theta).or(scaling).unwrap_or(10_000.0)
}

fn rope_scaling(hf: &HfConfig) -> Result<RopeScaling, ModelError> {
    let Some(rope) = hf.rope_parameters.as_ref().or(hf.rope_scaling.as_ref()) else { return Ok(RopeScaling::None) };
    let missing = |field| ModelError::Missing { field, family: "model with scaled rotary embedding" };
    match rope.rope_type.as_deref().unwrap_or("default") {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: rope.factor.ok_or(missing("factor"))? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: rope.factor.ok_or(missing("factor"))?,
            low_freq_factor: rope.low_freq_factor.ok_or(missing("low_freq_factor"))?,
            high_freq_factor: rope.high_freq_factor.ok_or(missing("high_freq_factor"))?,
            original_max_positions: rope
                .original_max_position_embeddings
                .ok_or(missing("original_max_position_embeddings"))?,
        }),
        other => Err(value_error("rope_type", other, "supported are default, linear, llama3")),
    }
}

/// Mistral's window holds for every layer; Qwen's only where `use_sliding_window` says so, from `max_window_layers` on,
/// or where `layer_types` names it.
fn windows(hf: &HfConfig, family: Family, n_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = match family {
        Family::Mistral => hf.sliding_window,
        Family::Qwen2 | Family::Qwen3 if hf.use_sliding_window == Some(true) => hf.sliding_window,
        _ => None,
    };
    if window == Some(0) {
        return Err(value_error("sliding_window", 0, "a token sees at least itself; use null for no window"));
    }
    let Some(types) = &hf.layer_types else {
        let first = if family == Family::Mistral { 0 } else { hf.max_window_layers.unwrap_or(0) };
        return Ok((0..n_layers).map(|layer| window.filter(|_| layer >= first)).collect());
    };
    if types.len() != n_layers {
        return Err(value_error("layer_types", format!("{} entries", types.len()), format!("{n_layers} fit")));
    }
    types
        .iter()
        .map(|t| match t.as_str() {
            "full_attention" => Ok(None),
            "sliding_attention" => Ok(window),
            other => Err(value_error("layer_types", other, "full_attention and sliding_attention are")),
        })
        .collect()
}

impl ModelConfig {
    fn check(self) -> Result<ModelConfig, ModelError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.n_layers),
            ("num_attention_heads", self.n_heads),
            ("num_key_value_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_positions),
        ];
        if let Some((field, found)) = sizes.into_iter().find(|(_, n)| *n == 0 || *n > 1 << 28) {
            return Err(value_error(field, found, "it must lie between 1 and 268435456"));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let expected = format!("it must divide num_attention_heads {}", self.n_heads);
            return Err(value_error("num_key_value_heads", self.n_kv_heads, expected));
        }
        if self.family != Family::Gpt2 && !self.head_dim.is_multiple_of(2) {
            return Err(value_error("head_dim", self.head_dim, "rotary embedding needs an even width"));
        }
        Ok(self)
    }

    /// Rotary angle per position of each of the `D / 2` pairs.
    pub fn rope_frequencies(&self) -> Vec<f64> {
        let half = self.head_dim / 2;
        let base = (0..half).map(|i| self.rope_theta.powf(-2.0 * i as f64 / self.head_dim as f64));
        match self.rope_scaling {
            RopeScaling::None => base.collect(),
            RopeScaling::Linear { factor } => base.map(|f| f / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let original = original_max_positions as f64;
                let stretch = |f: f64| {
                    let wavelength = 2.0 * std::f64::consts::PI / f;
                    let position = original / wavelength - low_freq_factor;
                    let kept = (position / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    f * kept + f / factor * (1.0 - kept)
                };
                base.map(stretch).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<ModelConfig, ModelError> {
        ModelConfig::try_from(&serde_json::from_str::<HfConfig>(json).unwrap())
    }

    const SIZES: &str = r#""vocab_size": 512, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256"#;

    #[test]
    fn old_and_new_rope_forms_mean_the_same() {
        let scaling = r#""factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64"#;
        let old = format!(
            r#"{{"model_type": "llama", {SIZES}, "rope_theta": 500000.0, "rope_scaling": {{"rope_type": "llama3", {scaling}}}}}"#
        );
        let new = format!(
            r#"{{"model_type": "llama", {SIZES}, "rope_parameters": {{"rope_theta": 500000.0, "rope_type": "llama3", {scaling}}}}}"#
        );
        let (old, new) = (parse(&old).unwrap(), parse(&new).unwrap());
        assert_eq!(old, new);
        assert!(matches!(old.rope_scaling, RopeScaling::Llama3 { .. }));
    }

    #[test]
    fn an_unsupported_architecture_lists_those_supported() {
        let err = parse(&format!(r#"{{"model_type": "mamba", {SIZES}}}"#)).unwrap_err().to_string();
        assert_eq!(err, "architecture `mamba` is not supported; supported are llama, mistral, qwen2, qwen3, gpt2");
    }

    #[test]
    fn layers_beyond_any_model_are_refused_before_they_take_memory() {
        let json = format!(r#"{{"model_type": "llama", {SIZES}}}"#)
            .replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 9223372036854775807");
        let gpt2 =
            r#"{"model_type": "gpt2", "n_embd": 9223372036854775800, "n_head": 4, "n_layer": 1, "vocab_size": 5}"#;

        let refused = parse(&json).unwrap_err().to_string();

        assert!(refused.ends_with("it must lie between 1 and 65536"), "{refused}");
        assert!(parse(gpt2).is_err());
    }

    #[test]
    fn key_value_heads_must_divide_query_heads() {
        let json = format!(r#"{{"model_type": "llama", {SIZES}}}"#)
            .replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3");
        let err = parse(&json).unwrap_err().to_string();
        assert_eq!(err, "`num_key_value_heads: 3` is not supported; it must divide num_attention_heads 4");
    }

    #[test]
    fn a_window_holds_for_mistral_but_for_qwen_only_when_asked() {
        let mistral = parse(&format!(r#"{{"model_type": "mistral", {SIZES}, "sliding_window": 16}}"#)).unwrap();
        let qwen =
            parse(&format!(r#"{{"model_type": "qwen2", {SIZES}, "sliding_window": 16, "use_sliding_window": false}}"#))
                .unwrap();
        let some = parse(&format!(r#"{{"model_type": "qwen2", {SIZES}, "sliding_window": 16, "use_sliding_window": true, "max_window_layers": 1}}"#)).unwrap();
        assert_eq!(mistral.windows, [Some(16), Some(16)]);
        assert_eq!(qwen.windows, [None, None]);
        assert_eq!(some.windows, [None, Some(16)]);
    }
}
