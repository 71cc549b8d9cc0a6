//! Why a model cannot continue a text.

/// Why a model cannot continue a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum GenerateError {
    /// No token, or more than the generator was made for.
    #[error("a text of {n_tokens} tokens does not fit")]
    Length { n_tokens: usize },
    /// A token that the model has no embedding for.
    #[error("token {id} at {position} is not below the model's vocab_size {vocab_size}")]
    Token { id: u32, position: usize, vocab_size: usize },
    /// A program that ends at its loss.
    #[error("the program has no logits")]
    NoLogits,
    /// Nothing to continue from.
    #[error("this tokenizer has no token that begins a text; give --prompt")]
    NoBeginning,
}
