//! A job from a YAML file or from code, run to its end on threads of this process, or followed and stopped from outside.
//! Ranks that are processes, which may die: [`crate::api::embed`].
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

/// Events that a slow reader may be behind before the run waits for it.
const EVENTS_BEHIND: usize = 1024;

impl Job {
    /// Reads a job from its YAML file.
    ///
    /// # Errors
    /// When the file or a key in it is not in order.
    pub fn from_yaml(path: impl AsRef<Path>) -> Result<Job, JobError> {
        Ok(Job { config: JobConfig::load(path.as_ref(), &[])?, user: None })
    }

    /// A job from a configuration made in code.
    pub const fn from_config(config: JobConfig) -> Job {
        Job { config, user: None }
    }

    /// Gives the job a model that the user wrote; its configuration must say `model_type: user_defined` under `model`.
    ///
    /// # Errors
    /// When it says otherwise, or asks for something that does not apply to such a model.
    pub fn with_model(self, model: impl Into<UserModel>) -> Result<Job, JobError> {
        check_user_defined(&self.config)?;
        Ok(Job { user: Some(model.into()), ..self })
    }

    /// A job from keys and values, as they stand in the YAML file.
    pub fn builder() -> JobBuilder {
        JobBuilder::default()
    }

    /// What it will do, and with which model if that is not in it.
    pub(crate) fn into_parts(self) -> (JobConfig, Option<UserModel>) {
        (self.config, self.user)
    }

    /// What it will do.
    pub const fn config(&self) -> &JobConfig {
        &self.config
    }

    /// Runs to the end on this thread and those it starts.
    ///
    /// # Errors
    /// See [`JobError`].
    pub fn run(self) -> Result<Report, JobError> {
        start::run(&self.config, self.user, &Ranks::Threads, &Control::default(), &mut |_| {})
    }

    /// Runs to the end and shows every event to `on_event`, on the device thread.
    ///
    /// # Errors
    /// See [`JobError`].
    pub fn run_with(self, control: &Control, mut on_event: impl FnMut(&Event) + Send) -> Result<Report, JobError> {
        start::run(&self.config, self.user, &Ranks::Threads, control, &mut |event| on_event(event))
    }

    /// Starts on a thread of its own.
    ///
    /// # Errors
    /// When the system refuses the thread.
    pub fn start(self) -> Result<JobHandle, JobError> {
        let control = Arc::new(Control::default());
        let (tx, rx) = sync_channel(EVENTS_BEHIND);
        let theirs = Arc::clone(&control);
        let work = move || {
            // Whoever dropped the receiver does not want to hear; the run goes on.
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
    /// Sets a key as in the YAML file; sections with dots: `model.hidden_size`, `datasets.0.path`.
    #[must_use]
    pub fn set(mut self, key: impl Into<String>, value: impl ToString) -> JobBuilder {
        self.keys.push((key.into(), value.to_string()));
        self
    }

    /// Trains a model that the user wrote, such as a [`crate::frontend::dfdx::DfdxModel`]; `base_model` and `model` are
    /// not given then.
    #[must_use]
    pub fn model(mut self, model: impl Into<UserModel>) -> JobBuilder {
        self.user = Some(model.into());
        self
    }

    /// Checks all keys.
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
    /// Events as they happen; ends when the run does.
    pub fn events(&self) -> impl Iterator<Item = Event> + '_ {
        self.events.iter()
    }

    /// What can be asked of the run; may be kept and used from any thread.
    pub fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control)
    }

    /// Finish the step, save everything, and end.
    pub fn stop(&self) {
        self.control.stop();
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// What the run ended with.
    pub fn wait(self) -> Result<Report, JobError> {
        // The run must not wait for a reader that only waits for it.
        drop(self.events);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
