//! Why a configuration cannot be turned into a model and a step.

use std::path::PathBuf;

/// Why a configuration cannot be turned into a model and a step.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum PlanError {
    /// The configuration at `origin` does not describe a model.
    #[error("{origin}: {source}")]
    Description { origin: String, source: serde_json::Error },
    /// Other tools have quantised the weights.
    #[error(
        "{origin}: the weights are quantised in the format {format}, which cannot be read; \
         use the model's directory with weights in F32, F16 or BF16, or write one with the tool that quantised them"
    )]
    Quantised { origin: String, format: String },
    /// An objective over pairs, and a model without the one that it began with.
    #[error(
        "{path}: a model alone cannot be evaluated with `rl`, which compares it with the model that it began with; evaluate the run, as in \
         `phalanx eval outputs`, or one of its checkpoints"
    )]
    NoReference { path: PathBuf },
    /// A path that leads nowhere in the place of a model.
    #[error(
        "there is no {}: name the folder of a model with its `config.json`, or a model of the Hub that `phalanx fetch` has downloaded",
        path.display()
    )]
    NoModelThere { path: PathBuf },
    /// A checkpoint of a run that did not compute them.
    #[error(
        "step {step}: `precompute_ref_log_probs` computes the log-probabilities of the reference before the first step, and neither the \
         checkpoint nor a rank has those of this data; continue with `precompute_ref_log_probs: false`"
    )]
    ReferenceNotComputed { step: u64 },
    /// A model of texts in the place of one of scores.
    #[error(
        "{path}: the model gives no scores; name a model that was trained with `reward_model: true`, or remove `reward_model`"
    )]
    NoScores { path: String },
    /// A model of scores in the place of one of texts.
    #[error("{path}: the model gives scores and no texts; set `reward_model: true` to train or evaluate it on pairs")]
    OnlyScores { path: String },
    /// The model has no tokens.
    #[error("{origin}: vocab_size is 0; a model has at least one token")]
    NoTokens { origin: String },
    /// The path of a dataset is not a valid pattern.
    #[error("dataset pattern {pattern}: {source}")]
    Pattern { pattern: String, source: glob::PatternError },
    /// A path that matches the pattern of a dataset cannot be read.
    #[error("dataset pattern {pattern}: cannot read {path}: {source}", path = path.display())]
    Unreadable { pattern: String, path: PathBuf, source: std::io::Error },
    /// A file that matches the pattern of a dataset has a name that patterns cannot describe.
    #[error("dataset pattern {pattern}: the name of {path} is no UTF-8; rename the file, or name its folder instead", path = path.display())]
    NameNotUtf8 { pattern: String, path: PathBuf },
    /// The pattern of a dataset matches no file.
    #[error("dataset pattern {pattern}: no file matches")]
    NoFile { pattern: String },
    /// A model for llama.cpp.
    #[error(
        "{} is a model for llama.cpp (GGUF), which is written but not read; name the model directory that it was made from",
        path.display()
    )]
    Gguf { path: PathBuf },
    /// The configuration file names a user-defined model, which only a program can have.
    #[error("the model is user-defined and exists only in the program that built this job; run that program")]
    UserDefinedElsewhere,
    /// The program supplies a model, but the configuration names another one.
    #[error("the job was given a model, but its configuration names another one")]
    NotUserDefined,
    /// A key controls the computation of built-in models only.
    #[error("`{key}` does not apply to a user-defined model; remove it")]
    NotForUserDefined { key: String },
    /// The rank program could not make its model.
    #[error("cannot make the model of this rank: {source}")]
    Make { source: Box<dyn std::error::Error + Send + Sync> },
    /// The description of a user-defined model cannot be encoded.
    #[error(transparent)]
    Encode(serde_json::Error),
    /// The tokenizer has tokens without an embedding in the model.
    #[error(
        "the tokenizer has {n_tokens} tokens, but the model's vocab_size is {vocab_size}; use the model's own tokenizer or a vocab_size of at least {n_tokens}"
    )]
    Vocabulary { n_tokens: usize, vocab_size: usize },
    /// Adapters leave the embedding as it is.
    #[error(
        "the vocabulary needs {n_new} more rows in the embedding, which adapters leave as it is; {way_out}, or remove \
         `resize_token_embeddings_to_32x`"
    )]
    FrozenEmbedding { n_new: usize, way_out: String },
    /// Nothing trains the rows of new tokens.
    #[error(
        "the job adds {tokens}, but does not train {modules}, where these tokens have rows; {way_out}, or add no tokens"
    )]
    UntrainedTokens { tokens: String, modules: String, way_out: String },
    /// A regular expression matches no module.
    #[error(
        "lora_target_modules is the regular expression {pattern:?}, which matches the whole path of no linear layer; \
         a path is {example}, and names of layers are given as a list"
    )]
    NoTarget { pattern: String, example: String },
    /// A regular expression needs too many steps.
    #[error("lora_target_modules: {0}")]
    Targets(Box<fancy_regex::Error>),
    /// A pattern of trained parameters cannot be used.
    #[error("trained_parameters has the regular expression {pattern:?}: {source}")]
    TrainedPattern { pattern: String, source: Box<fancy_regex::Error> },
    /// No parameter is trained.
    #[error("trained_parameters matches no parameter of this model; a name is {example}")]
    NoneTrained { example: String },
    /// Parameters that are computed together are trained or frozen together.
    #[error("trained_parameters matches {trained} without {frozen}, which is computed with it; match both or none")]
    TrainedApart { trained: String, frozen: String },
    /// An adapter computes something else than the job's own adapters.
    #[error("lora_model_dir {}: `{key}` is {found}, but {wanted}", dir.display())]
    Adapter { dir: PathBuf, key: &'static str, found: String, wanted: String },
    /// An adapter has other tensors than the job trains.
    #[error(
        "lora_model_dir {}: the adapter {has} tensor `{tensor}`, unlike the adapters of this job; \
         set the target modules, and the modules to save, that it was made with",
        dir.display()
    )]
    AdapterTensor { dir: PathBuf, has: &'static str, tensor: String },
    /// The weight of an adapted module in an adapter is not that of the job's model.
    #[error(
        "lora_model_dir {}: its tensor `{tensor}` differs from that weight of `base_model`, to which the adapter does not belong",
        dir.display()
    )]
    AdapterBase { dir: PathBuf, tensor: String },
    /// `phalanx eval` of a job before its training.
    #[error("output_dir {} has no trained model and no checkpoint yet; train first, or name a model with --model", dir.display())]
    NothingTrained { dir: PathBuf },
    /// The job evaluates, but was planned without evaluation.
    #[error("no program for evaluation was compiled")]
    NoEvaluation,
}
