//! Why a configuration does not become a model and a step.

/// Why a configuration does not become a model and a step.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum PlanError {
    /// A model's configuration is no description of a model; `origin` says where it is from.
    #[error("{origin}: {source}")]
    Description { origin: String, source: serde_json::Error },
    /// A model without tokens.
    #[error("{origin}: vocab_size is 0; a model has at least one token")]
    NoTokens { origin: String },
    /// A path of a dataset is no pattern.
    #[error("dataset pattern {pattern}: {source}")]
    Pattern { pattern: String, source: glob::PatternError },
    /// Something that a pattern of a dataset means cannot be read.
    #[error("dataset pattern {pattern}: {source}")]
    Unreadable { pattern: String, source: glob::GlobError },
    /// A pattern of a dataset means no file.
    #[error("dataset pattern {pattern}: no file matches")]
    NoFile { pattern: String },
    /// A file names a model that only a program has.
    #[error("the model is user-defined: it lives in the program that built this job, not in a file; run that program")]
    UserDefinedElsewhere,
    /// A program has a model of its own, and the configuration is for another one.
    #[error("the job was given a model, but its configuration names another one")]
    NotUserDefined,
    /// A key that says how a model computes.
    #[error("`{key}` does not apply to a user-defined model, which computes as it is written; remove it")]
    NotForUserDefined { key: String },
    /// The program of a rank could not make its model.
    #[error("the model of this rank: {source}")]
    Make { source: Box<dyn std::error::Error + Send + Sync> },
    /// A description of a user-defined model has no JSON form.
    #[error(transparent)]
    Encode(serde_json::Error),
    /// Tokens that the model has no embedding for.
    #[error(
        "the tokenizer has {n_tokens} tokens but the model's vocab_size is {vocab_size}; use the model's own tokenizer or a vocab_size of at least {n_tokens}"
    )]
    Vocabulary { n_tokens: usize, vocab_size: usize },
    /// The job was planned without evaluation, and is to evaluate.
    #[error("no program for evaluation was compiled")]
    NoEvaluation,
}
