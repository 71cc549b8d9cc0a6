//! Models and data sets that a configuration calls by their names on the Hub, in the Hub's cache of this machine.

use crate::config::JobConfig;
use crate::config::output::is_url;
use crate::error::JobError;
use crate::error::plan::PlanError;
use phalanx_storage::hf::adapter::ADAPTER_CONFIG;
use phalanx_storage::hub::cache::HubCache;
use phalanx_storage::hub::name::Kind;
use std::path::{Path, PathBuf};

/// The directory of a model of the job: `base_model`, or that of a tokenizer or an adapter.
pub(crate) fn model_of(config: &JobConfig, path: &Path) -> Result<PathBuf, JobError> {
    let m = &config.model;
    let is_base = m.base_model.as_deref() == Some(path);
    let revision = m.revision_of_model.as_deref().filter(|_| is_base);
    readable(HubCache::of_user().resolve(Kind::Model, path, revision)?)
}

/// The directory of a model that is called by a path or a name.
pub(crate) fn model(path: &Path) -> Result<PathBuf, JobError> {
    model_at(path, None)
}

/// As [`model`], at a branch, tag or commit if it is called by a name.
pub(crate) fn model_at(path: &Path, revision: Option<&str>) -> Result<PathBuf, JobError> {
    readable(HubCache::of_user().resolve(Kind::Model, path, revision)?)
}

/// Refuses a path that leads nowhere, a file of llama.cpp, and a folder with nothing else.
pub(crate) fn readable(path: PathBuf) -> Result<PathBuf, JobError> {
    if !is_url(&path) && path.metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        return Err(PlanError::NoModelThere { path }.into());
    }
    let is_gguf = |path: &Path| path.extension().is_some_and(|extension| extension == "gguf");
    let is_model = ["config.json", ADAPTER_CONFIG].iter().any(|name| path.join(name).symlink_metadata().is_ok());
    let mut entries = std::fs::read_dir(&path).into_iter().flatten().flatten();
    if !is_model && (is_gguf(&path) && path.is_file() || entries.any(|entry| is_gguf(&entry.path()))) {
        return Err(PlanError::Gguf { path }.into());
    }
    Ok(path)
}
