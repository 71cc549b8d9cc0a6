//! Why a model cannot continue a text.

/// Why a model cannot continue a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum GenerateError {
    /// The text has no token, or more than the generator supports.
    #[error("cannot run {n_tokens} tokens; the text is empty or longer than the generator's maximum")]
    Length { n_tokens: usize },
    /// The model has no embedding for a token.
    #[error("token {id} at position {position} is not below the model's vocab_size {vocab_size}")]
    Token { id: u32, position: usize, vocab_size: usize },
    /// The program ends at its loss.
    #[error("the program computes no logits")]
    NoLogits,
    /// The prompt is empty, and the tokenizer has no beginning-of-text token.
    #[error("this tokenizer has no beginning-of-text token; set `--prompt`")]
    NoBeginning,
}
