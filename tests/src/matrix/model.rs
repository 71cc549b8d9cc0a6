//! The small models that cells train.

use std::fmt;

/// Shape of a small model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Shape {
    /// Grouped-query attention, rotary positions, SwiGLU, untied head; extents that no degree divides.
    Llama,
    /// Packed projections, biases, learned positions, tied head.
    Gpt2,
    /// Norms per head, one key/value head for all queries, a prime feed-forward extent, a tied head.
    Qwen3,
    /// A window of attention that ends inside a chunk, and one that spans several.
    Mistral,
    /// Projections packed into one tensor, and a window of attention.
    Phi3,
    /// Norms after the parts of a block, and over all heads of queries and of keys.
    Olmo2,
    /// Factors on embeddings, scores, the residual stream and logits, also after biases.
    Granite,
}

impl Shape {
    /// The shapes of the whole matrix.
    pub const ALL: [Shape; 2] = [Shape::Llama, Shape::Gpt2];

    /// The keys of the shape in a job's YAML.
    pub const fn keys(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Shape::Llama => &[
                ("model.model_type", "llama"),
                ("model.hidden_size", "32"),
                ("model.intermediate_size", "54"),
                ("model.num_hidden_layers", "9"),
                ("model.num_attention_heads", "4"),
                ("model.num_key_value_heads", "2"),
                ("model.max_position_embeddings", "32"),
                ("model.initializer_range", "0.1"),
            ],
            Shape::Gpt2 => &[
                ("model.model_type", "gpt2"),
                ("model.n_embd", "32"),
                ("model.n_head", "4"),
                ("model.n_layer", "8"),
                ("model.n_positions", "32"),
                ("model.initializer_range", "0.1"),
            ],
            Shape::Qwen3 => &[
                ("model.model_type", "qwen3"),
                ("model.hidden_size", "24"),
                ("model.intermediate_size", "53"),
                ("model.num_hidden_layers", "8"),
                ("model.num_attention_heads", "4"),
                ("model.num_key_value_heads", "1"),
                ("model.head_dim", "10"),
                // A prime number, larger than the byte tokenizer's.
                ("model.vocab_size", "269"),
                ("model.tie_word_embeddings", "true"),
                ("model.max_position_embeddings", "32"),
                ("model.initializer_range", "0.1"),
            ],
            Shape::Mistral => &[
                ("model.model_type", "mistral"),
                ("model.hidden_size", "32"),
                ("model.intermediate_size", "40"),
                ("model.num_hidden_layers", "8"),
                ("model.num_attention_heads", "4"),
                ("model.num_key_value_heads", "2"),
                ("model.sliding_window", "11"),
                ("model.max_position_embeddings", "32"),
                ("model.initializer_range", "0.1"),
            ],
            Shape::Phi3 => PHI3,
            Shape::Olmo2 => OLMO2,
            Shape::Granite => GRANITE,
        }
    }
}

const PHI3: &[(&str, &str)] = &[
    ("model.model_type", "phi3"),
    ("model.hidden_size", "32"),
    ("model.intermediate_size", "53"),
    ("model.num_hidden_layers", "8"),
    ("model.num_attention_heads", "4"),
    // Fewer than the tensor-parallel ranks of some cells, so ranks hold the same parts of a packed tensor.
    ("model.num_key_value_heads", "2"),
    ("model.sliding_window", "20"),
    ("model.max_position_embeddings", "32"),
    ("model.initializer_range", "0.1"),
];

const OLMO2: &[(&str, &str)] = &[
    ("model.model_type", "olmo2"),
    ("model.hidden_size", "32"),
    ("model.intermediate_size", "54"),
    ("model.num_hidden_layers", "8"),
    ("model.num_attention_heads", "4"),
    ("model.num_key_value_heads", "2"),
    ("model.max_position_embeddings", "32"),
    ("model.initializer_range", "0.1"),
];

const GRANITE: &[(&str, &str)] = &[
    ("model.model_type", "granite"),
    ("model.hidden_size", "32"),
    ("model.intermediate_size", "54"),
    ("model.num_hidden_layers", "8"),
    ("model.num_attention_heads", "4"),
    ("model.num_key_value_heads", "2"),
    ("model.max_position_embeddings", "32"),
    ("model.initializer_range", "0.1"),
    ("model.embedding_multiplier", "3"),
    ("model.attention_multiplier", "0.2"),
    ("model.residual_multiplier", "0.4"),
    ("model.logits_scaling", "2"),
    ("model.attention_bias", "true"),
];

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Shape::Llama => "Llama",
            Shape::Gpt2 => "GPT-2",
            Shape::Qwen3 => "Qwen3",
            Shape::Mistral => "Mistral",
            Shape::Phi3 => "Phi-3",
            Shape::Olmo2 => "OLMo 2",
            Shape::Granite => "Granite",
        })
    }
}
