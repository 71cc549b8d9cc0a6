//! Description of a supported model, independent of its family.

use super::rope::RopeScaling;
use super::{BatchShape, Family, ForwardBuilder, Head, HfConfig, ModelError, Output};
use crate::program::{Attention, Program};

/// A supported model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Defines the structure of the model.
    pub family: &'static Family,
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
    /// Tokens of the longest row.
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
    /// What the head gives.
    pub output: Output,
    /// Factors of intermediate values.
    pub multipliers: Multipliers,
    /// Where the norms of a block apply.
    pub norm_placement: NormPlacement,
    /// Norm of queries and keys.
    pub qk_norm: QkNorm,
    /// Projections that read the same input are one tensor of the model file: `qkv_proj` and `gate_up_proj`.
    pub packed_projections: bool,
    /// Sliding window of each layer.
    pub windows: Vec<Option<usize>>,
    /// Standard deviation of weights that start from scratch.
    pub init_std: f32,
}

/// Factors of a decoder's values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Factor of the embeddings.
    pub embedding: f32,
    /// Factor of the terms that attention and feed-forward parts add to the residual stream.
    pub residual: f32,
    /// Factor of the attention scores; `None` is `1 / sqrt(D)`.
    pub attention: Option<f32>,
    /// Factor of the logits.
    pub logits: f32,
}

impl Default for Multipliers {
    fn default() -> Multipliers {
        Multipliers { embedding: 1.0, residual: 1.0, attention: None, logits: 1.0 }
    }
}

/// Norm of queries and keys before they are rotated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QkNorm {
    /// No norm.
    #[default]
    None,
    /// RMS norm of each head, with one gain for all query heads and one for all key heads.
    Heads,
    /// RMS norm over all query heads together and over all key heads together.
    Projections,
}

/// Where the norm of an attention or feed-forward part applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormPlacement {
    /// To the input of the part: `x + part(norm(x))`.
    #[default]
    Before,
    /// To the output of the part: `x + norm(part(x))`.
    After,
}

impl TryFrom<&HfConfig> for ModelConfig {
    type Error = ModelError;

    fn try_from(hf: &HfConfig) -> Result<ModelConfig, ModelError> {
        let parsed = (Family::of(hf)?.parse)(hf)?;
        ModelConfig { output: Output::of(hf, parsed.family)?, ..parsed }.check()
    }
}

/// Maximum number of layers, above any real model; parsing allocates memory for each layer.
const LAYERS_MAX: usize = 1 << 16;

/// Checks the number of layers before a list of that length is allocated.
pub(super) fn check_layers(field: &'static str, n_layers: usize) -> Result<usize, ModelError> {
    if (1..=LAYERS_MAX).contains(&n_layers) {
        return Ok(n_layers);
    }
    Err(ModelError::value(field, n_layers, format!("it must lie between 1 and {LAYERS_MAX}")))
}

/// Most elements of a kind: far more than any cluster holds, and few enough that bytes and copies of them fit 64 bits.
const ELEMENTS_MAX: u64 = 1 << 52;

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
            return Err(ModelError::value(field, found, "it must lie between 1 and 268435456"));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let expected = format!("it must divide num_attention_heads {}", self.n_heads);
            return Err(ModelError::value("num_key_value_heads", self.n_kv_heads, expected));
        }
        Ok(self)
    }

    /// The single-device forward program of one microbatch.
    ///
    /// # Errors
    /// When a row is longer than `max_positions`, or the elements are too many to be counted in bytes.
    pub fn forward(&self, batch: BatchShape, head: Head) -> Result<Program, ModelError> {
        let mut b = self.builder(batch)?;
        Ok(match (self.output, head) {
            (Output::Logits, Head::Logits) => {
                let logits = self.logits(&mut b);
                b.finish_logits(logits)
            }
            (Output::Logits, Head::Loss) => {
                let logits = self.logits(&mut b);
                b.finish_loss(logits)
            }
            (Output::Score, Head::Logits) => {
                let scores = self.scores(&mut b);
                b.finish_logits(scores)
            }
            (Output::Score, Head::Loss) => self.squared_scores(b),
        })
    }

    /// A builder for programs over this model.
    ///
    /// # Errors
    /// As [`ModelConfig::forward`].
    pub fn builder(&self, batch: BatchShape) -> Result<ForwardBuilder, ModelError> {
        if batch.seq_len > self.max_positions {
            return Err(ModelError::TooLong { seq_len: batch.seq_len, max_positions: self.max_positions });
        }
        self.check_elements(batch)?;
        Ok(ForwardBuilder::new(batch))
    }

    /// Bounds the elements of parameters and activations, so that no later sum of bytes overflows 64 bits.
    fn check_elements(&self, batch: BatchShape) -> Result<(), ModelError> {
        let wide = |n: usize| n as u128;
        let (layers, hidden, inner) = (wide(self.n_layers), wide(self.hidden_size), wide(self.intermediate_size));
        let heads = (wide(self.n_heads) + 2 * wide(self.n_kv_heads)) * wide(self.head_dim);
        let vocab = wide(self.vocab_size);
        let n_params = 2 * vocab * hidden + layers * hidden * (2 * heads + 3 * inner);
        // Twice what a block keeps for the backward pass, with its gradients.
        let per_token = layers * 8 * (hidden + inner + heads) + 4 * vocab;
        let n_activations = wide(batch.n_rows) * wide(batch.seq_len) * per_token;
        for (what, n) in [("parameters", n_params), ("activation elements", n_activations)] {
            if n > ELEMENTS_MAX.into() {
                return Err(ModelError::TooLarge { what, n: n.to_string(), max: ELEMENTS_MAX });
            }
        }
        Ok(())
    }

    /// Geometry of the attention of one layer.
    pub fn attention(&self, batch: BatchShape, layer: usize) -> Attention {
        Attention {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            seq_len: batch.seq_len,
            window: self.windows[layer],
            scale: self.multipliers.attention.unwrap_or(1.0 / (self.head_dim as f32).sqrt()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<ModelConfig, ModelError> {
        ModelConfig::try_from(&serde_json::from_str::<HfConfig>(json).unwrap())
    }

    const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 172,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}"#;

    #[test]
    fn layer_count_above_the_limit_is_rejected_before_allocation() {
        let json = LLAMA.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 9223372036854775807");
        let gpt2 =
            r#"{"model_type": "gpt2", "n_embd": 9223372036854775800, "n_head": 4, "n_layer": 1, "vocab_size": 5}"#;

        let refused = parse(&json).unwrap_err().to_string();

        assert!(refused.ends_with("it must lie between 1 and 65536"), "{refused}");
        assert!(parse(gpt2).is_err());
    }

    #[test]
    fn model_or_batch_whose_bytes_cannot_be_counted_is_rejected() {
        let model = |hidden: usize| {
            parse(&LLAMA.replace("\"hidden_size\": 64", &format!("\"hidden_size\": {hidden}"))).unwrap()
        };
        let of = |hidden: usize, inner: usize, n_rows: usize| {
            let model = ModelConfig { intermediate_size: inner, ..model(hidden) };
            model.forward(BatchShape { n_rows, seq_len: 8 }, Head::Loss).map(drop)
        };

        assert_eq!(of(64, 172, 1 << 20), Ok(()));
        assert!(matches!(of(1 << 28, 1 << 28, 1), Err(ModelError::TooLarge { what: "parameters", .. })));
        assert!(matches!(of(64, 172, 1 << 56), Err(ModelError::TooLarge { what: "activation elements", .. })));
    }

    #[test]
    fn key_value_heads_must_divide_query_heads() {
        let json = LLAMA.replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3");

        let err = parse(&json).unwrap_err().to_string();

        assert_eq!(err, "`num_key_value_heads: 3` is not supported; it must divide num_attention_heads 4");
    }
}
