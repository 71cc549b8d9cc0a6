//! Names of files and folders that a run writes or reads beside its weights.

use crate::config::JobConfig;
use std::path::PathBuf;

pub(crate) const JOB_YAML: &str = "job.yaml";

pub(crate) const CONFIG_JSON: &str = "config.json";

pub(crate) const GENERATION_JSON: &str = "generation_config.json";

/// File of a checkpoint with the inputs of its run.
pub(crate) const INPUTS_JSON: &str = "inputs.json";

/// Folder of prepared tokens, and of digests of weights.
pub(crate) fn cache_dir(config: &JobConfig) -> PathBuf {
    config.data.dataset_prepared_path.clone().unwrap_or_else(|| config.output.folder().join("data"))
}
