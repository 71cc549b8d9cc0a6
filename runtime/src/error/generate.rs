//! Why a model cannot continue a text.

use crate::data::chat_template::ChatTemplateError;
use crate::shell::quoted;
use std::path::PathBuf;

/// Why a model cannot continue a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum GenerateError {
    /// The text has no token, or more than the generator supports.
    #[error(
        "cannot run {n_tokens} tokens; a text has at least one token, and at most {longest} with this model and setting"
    )]
    Length { n_tokens: usize, longest: usize },
    /// The model has no embedding for a token.
    #[error("token {id} at position {position} is not below the model's vocab_size {vocab_size}")]
    Token { id: u32, position: usize, vocab_size: usize },
    /// The program ends at its loss.
    #[error("the program computes no logits")]
    NoLogits,
    /// A reward model.
    #[error("{}: the model gives scores and no texts; `phalanx serve` answers requests for scores", dir.display())]
    OnlyScores { dir: PathBuf },
    /// A language model in the place of a reward model.
    #[error("{}: the model gives no scores; name a model that was trained with `reward_model: true`", dir.display())]
    NoScores { dir: PathBuf },
    /// A setting of the sampling has no meaning.
    #[error("{name} is {found}, expected {fits}")]
    Sampling { name: &'static str, found: String, fits: &'static str },
    /// A run that has not ended, or one of its checkpoints.
    #[error(
        "{run} has checkpoints, but no model yet: write one with `phalanx export {named} DIR`, and use DIR",
        run = run.display(), named = quoted(run)
    )]
    NoModelYet { run: PathBuf },
    /// A run in an object store, whose model is on the machine that ended it.
    #[error(
        "the model of {run} is not in {dir}, where the machine that ends the run writes it: write it here with `phalanx export {named} DIR`, \
         and use DIR",
        run = run.display(),
        named = quoted(run),
        dir = dir.display()
    )]
    NoModelHere { run: PathBuf, dir: PathBuf },
    /// A chat needs a template.
    #[error("the tokenizer of {} has no chat template; name one with `--chat_template`, for example chatml", dir.display())]
    NoTemplate { dir: PathBuf },
    /// `--chat_template` is neither a known name nor a file.
    #[error("--chat_template {name:?} is no file and none of {}", known.join(", "))]
    UnknownTemplate { name: String, known: Vec<&'static str> },
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    /// The prompt is empty, and the tokenizer has no beginning-of-text token.
    #[error("this tokenizer has no beginning-of-text token; set `--prompt`")]
    NoBeginning,
}
