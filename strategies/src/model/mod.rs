//! Model descriptions and the forward programs they yield.
//!
//! A family is one file ([`Family`]: how to read its `config.json`, the names of its linear layers, its forward program
//! with tensor names) and one entry of [`FAMILIES`]. Families related to Llama share `decoder` and differ only in the
//! fields of [`ModelConfig`].

pub mod builder;
mod config;
mod decoder;
mod error;
mod family;
mod hf_config;
mod rope;

mod gpt2;
mod granite;
mod head;
mod llama;
mod mistral;
mod olmo2;
mod output;
mod phi3;
mod qwen2;
mod qwen3;

pub use builder::{ForwardBuilder, Tensor};
pub use config::{ModelConfig, Multipliers, NormPlacement, QkNorm};
pub use error::ModelError;
pub use family::{Family, keys};
pub use head::SCORE;
pub use hf_config::HfConfig;
pub use output::{Hidden, Output};
pub use rope::RopeScaling;

/// Every supported family.
pub static FAMILIES: &[&Family] = &[
    &llama::FAMILY,
    &mistral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &gpt2::FAMILY,
    &phi3::FAMILY,
    &olmo2::FAMILY,
    &granite::FAMILY,
];

/// Size of one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Rows.
    pub n_rows: usize,
    /// Tokens of a row.
    pub seq_len: usize,
}

impl BatchShape {
    /// Tokens of a microbatch.
    pub const fn n_tokens(&self) -> usize {
        self.n_rows * self.seq_len
    }
}

/// Where a forward program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// At the logits.
    Logits,
    /// At the summed negative log-likelihood.
    Loss,
}
