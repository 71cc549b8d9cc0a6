//! Model descriptions and the forward programs they yield.

pub mod builder;
mod decoder;
mod gpt2;
pub mod hf_config;

pub use builder::{ForwardBuilder, Tensor};
pub use hf_config::{Family, HfConfig, ModelConfig, ModelError, RopeScaling, SUPPORTED};

use crate::program::Program;

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

impl ModelConfig {
    /// The single-device forward program of one microbatch.
    ///
    /// # Errors
    /// When a row is longer than the positions the model has.
    pub fn forward(&self, batch: BatchShape, head: Head) -> Result<Program, ModelError> {
        if batch.seq_len > self.max_positions {
            return Err(ModelError::TooLong { seq_len: batch.seq_len, max_positions: self.max_positions });
        }
        Ok(match self.family {
            Family::Gpt2 => gpt2::forward(self, batch, head),
            _ => decoder::forward(self, batch, head),
        })
    }
}
