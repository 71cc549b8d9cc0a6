//! A job from a YAML file or from code, on threads of this process: run to its end, or followed and stopped through a
//! handle. For ranks in processes that may die, see [`crate::api::embed`].
//!
//! ```no_run
//! use phalanx::{Event, Job};
//!
//! let handle = Job::from_yaml("train.yaml")?.start()?;
//! for event in handle.events() {
//!     if let Event::Step(m) = event {
//!         println!("{} {}", m.step, m.loss);
//!     }
//! }
//! let report = handle.wait()?;
//! println!("{} steps, saved at {:?}", report.steps, report.checkpoint);
//! # Ok::<(), phalanx::JobError>(())
//! ```

use crate::api::start;
use crate::api::start::Ranks;
use crate::config::JobConfig;
use crate::control::Control;
use crate::error::JobError;
use crate::events::{Event, Report};
use crate::frontend::user_model::{MODEL_TYPE, UserModel};
use crate::train::plan::check_user_defined;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

/// A job that is ready to run.
#[derive(Debug)]
pub struct Job {
    config: JobConfig,
    user: Option<UserModel>,
}

/// Number of events that a slow reader may lag behind before the run waits for it.
const EVENTS_BEHIND: usize = 1024;

impl Job {
    /// Reads a job from its YAML file.
    ///
    /// # Errors
    /// When the file cannot be read or a key in it is invalid.
    pub fn from_yaml(path: impl AsRef<Path>) -> Result<Job, JobError> {
        Ok(Job { config: JobConfig::load(path.as_ref(), &[])?, user: None })
    }

    /// Makes a job from a configuration.
    pub const fn from_config(config: JobConfig) -> Job {
        Job { config, user: None }
    }

    /// Gives the job a user-defined model; its configuration must have `model_type: user_defined` under `model`.
    ///
    /// # Errors
    /// When the configuration names another model type, or has keys that do not apply to a user-defined model.
    pub fn with_model(self, model: impl Into<UserModel>) -> Result<Job, JobError> {
        check_user_defined(&self.config)?;
        Ok(Job { user: Some(model.into()), ..self })
    }

    /// Builds a job from keys and values of the YAML file.
    pub fn builder() -> JobBuilder {
        JobBuilder::default()
    }

    /// The configuration, and the user-defined model if there is one.
    pub(crate) fn into_parts(self) -> (JobConfig, Option<UserModel>) {
        (self.config, self.user)
    }

    /// The configuration of the job.
    pub const fn config(&self) -> &JobConfig {
        &self.config
    }

    /// Runs the job to its end, on this thread and threads that it starts.
    ///
    /// # Errors
    /// See [`JobError`].
    pub fn run(self) -> Result<Report, JobError> {
        start::run(&self.config, self.user, &Ranks::Threads, &Control::default(), &mut |_| {})
    }

    /// Runs the job to its end and calls `on_event` with every event, on the device thread.
    ///
    /// # Errors
    /// See [`JobError`].
    pub fn run_with(self, control: &Control, mut on_event: impl FnMut(&Event) + Send) -> Result<Report, JobError> {
        self.notes().for_each(|note| on_event(&note));
        start::run(&self.config, self.user, &Ranks::Threads, control, &mut |event| on_event(event))
    }

    /// What became of keys of other tools in the job's file.
    fn notes(&self) -> impl Iterator<Item = Event> + '_ {
        self.config.notes.iter().cloned().map(Event::Note)
    }

    /// Starts the job on its own thread.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(self) -> Result<JobHandle, JobError> {
        let control = Arc::new(Control::default());
        let (tx, rx) = sync_channel(EVENTS_BEHIND);
        let theirs = Arc::clone(&control);
        let work = move || {
            // The run continues without a receiver.
            self.notes().for_each(|note| drop(tx.send(note)));
            start::run(&self.config, self.user, &Ranks::Threads, &theirs, &mut |event| drop(tx.send(event.clone())))
        };
        let thread = std::thread::Builder::new()
            .name("phalanx-job".into())
            .spawn(work)
            .map_err(|e| JobError::Thread(phalanx_device::ThreadError::Spawn(e)))?;
        Ok(JobHandle { control, events: rx, thread })
    }
}

/// Collects keys and values of a job.
#[derive(Debug, Default)]
pub struct JobBuilder {
    keys: Vec<(String, String)>,
    user: Option<UserModel>,
}

impl JobBuilder {
    /// Sets a key of the YAML file; keys of sections have dots: `model.hidden_size`, `datasets.0.path`.
    #[must_use]
    pub fn set(mut self, key: impl Into<String>, value: impl ToString) -> JobBuilder {
        self.keys.push((key.into(), value.to_string()));
        self
    }

    /// Trains a user-defined model, such as a [`crate::frontend::dfdx::DfdxModel`]; the keys `base_model` and `model` are
    /// then not set.
    #[must_use]
    pub fn model(mut self, model: impl Into<UserModel>) -> JobBuilder {
        self.user = Some(model.into());
        self
    }

    /// Checks all keys and returns the job.
    ///
    /// # Errors
    /// As for a YAML file, and as [`Job::with_model`].
    pub fn build(mut self) -> Result<Job, JobError> {
        if self.user.is_some() {
            self.keys.insert(0, ("model.model_type".into(), MODEL_TYPE.into()));
        }
        let job = Job::from_config(JobConfig::from_yaml_str("{}", &self.keys)?);
        match self.user {
            Some(user) => job.with_model(user),
            None => Ok(job),
        }
    }
}

/// A running job.
#[derive(Debug)]
pub struct JobHandle {
    control: Arc<Control>,
    events: Receiver<Event>,
    thread: JoinHandle<Result<Report, JobError>>,
}

impl JobHandle {
    /// Events as they happen; the iterator ends with the run.
    pub fn events(&self) -> impl Iterator<Item = Event> + '_ {
        self.events.iter()
    }

    /// Requests to the run, from any thread.
    pub fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control)
    }

    /// Stops the run after its current step and a checkpoint.
    pub fn stop(&self) {
        self.control.stop();
    }

    /// Waits for the end of the run.
    ///
    /// # Errors
    /// The error that ended the run.
    pub fn wait(self) -> Result<Report, JobError> {
        // Otherwise the run could wait for this reader, which takes no more events.
        drop(self.events);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
