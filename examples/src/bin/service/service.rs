//! The jobs of the service, by number.

use super::refusal::Refusal;
use phalanx::{Job, RunningJob, Runtime};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Limit of jobs that run at the same time.
const RUNNING_MAX: usize = 4;
/// Limit of listed jobs, including ended ones.
const KEPT_MAX: usize = 256;

pub(crate) struct Service {
    pub(crate) runtime: Runtime,
    /// The only folder whose files a client can name.
    configs: PathBuf,
    jobs: Mutex<BTreeMap<u64, RunningJob>>,
    n_started: AtomicU64,
}

impl Service {
    pub(crate) fn new(runtime: Runtime, configs: PathBuf) -> Service {
        Service { runtime, configs, jobs: Mutex::default(), n_started: AtomicU64::new(0) }
    }

    /// Starts the job of a YAML file in the folder.
    pub(crate) async fn start(&self, config: &str) -> Result<u64, Refusal> {
        let path = self.configs.join(file_name(config)?);
        if self.runtime.jobs().len() >= RUNNING_MAX {
            return Err(Refusal::Busy(RUNNING_MAX));
        }
        // Reading a file would block the event loop.
        let job = tokio::task::spawn_blocking(move || Job::from_yaml(path)).await.map_err(Refusal::panicked)??;
        let job = self.runtime.start(job).await?;
        let id = 1 + self.n_started.fetch_add(1, Ordering::Relaxed);
        let mut jobs = self.list();
        jobs.insert(id, job);
        while jobs.len() > KEPT_MAX {
            let Some(oldest) = jobs.iter().find_map(|(id, job)| job.outcome().map(|_| *id)) else { break };
            jobs.remove(&oldest);
        }
        Ok(id)
    }

    pub(crate) fn job(&self, id: u64) -> Result<RunningJob, Refusal> {
        self.list().get(&id).cloned().ok_or(Refusal::NoSuchJob(id))
    }

    pub(crate) fn jobs(&self) -> Vec<(u64, RunningJob)> {
        self.list().iter().map(|(id, job)| (*id, job.clone())).collect()
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<u64, RunningJob>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that a name is that of a YAML file directly in the folder.
fn file_name(name: &str) -> Result<&Path, Refusal> {
    let path = Path::new(name);
    let mut components = path.components();
    let first = components.next();
    // `components` drops a trailing slash, so compare with the whole name.
    let is_name = matches!(first, Some(Component::Normal(only)) if only == name) && components.next().is_none();
    let is_yaml = path.extension().and_then(OsStr::to_str) == Some("yaml");
    if is_name && is_yaml { Ok(path) } else { Err(Refusal::NotAConfig(name.chars().take(80).collect())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_names_files_of_the_folder_only() {
        assert_eq!(file_name("tiny.yaml").unwrap(), Path::new("tiny.yaml"));
        for name in
            ["", ".", "..", "../tiny.yaml", "/etc/tiny.yaml", "a/tiny.yaml", "./tiny.yaml", "tiny.yaml/", "passwd"]
        {
            assert!(file_name(name).is_err(), "{name}");
        }
    }
}
