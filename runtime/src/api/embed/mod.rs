//! Elastic jobs inside another program: rank processes that may die, led from a thread of the host and followed from its
//! event loop.
//!
//! ```no_run
//! # async fn f() -> Result<(), Box<dyn std::error::Error>> {
//! use phalanx::{Event, Job, Runtime, rank_process};
//!
//! // First in `main`: the same executable is the program of the ranks.
//! let runtime = Runtime::new(rank_process())?;
//!
//! let job = runtime.start(Job::from_yaml("train.yaml")?).await?;
//! let mut events = job.events();
//! while let Some(event) = events.next().await {
//!     match event {
//!         Ok(Event::Step(m)) if m.loss < 2.0 => job.stop(),
//!         Ok(event) => println!("{event:?}"),
//!         Err(missed) => println!("{missed}"),
//!     }
//! }
//! println!("{:?}", job.wait().await?);
//! # Ok(()) }
//! ```
//!
//! What a host can rely on:
//! - **EMBED-1** Nothing here waits on the host's event loop: a job has threads of its own, one of them for its
//!   actors, and its tensors are in other processes.
//! - **EMBED-2** There is no global state: no variable of the environment is written or needed, no handler of signals
//!   or panics is installed in the host, and any number of jobs and runtimes run side by side. A folder has one job at
//!   a time.
//! - **EMBED-3** A panic in a thread of a job is the error with which that job ends.
//! - **EMBED-4** Nobody who follows a job can hold it up; see [`feed`].
//! - **EMBED-5** Ranks die with the host, however that ends. Started again, a job goes on from its last checkpoint.
//!
//! Map: [`program`] is what ranks are started from, [`running`] a job that runs, [`feed`] its events.
//!
//! A model written in Rust is made anew in every rank process, by the host's own `main`: see
//! [`rank_process_with`](program::rank_process_with).
//!
//! Deliberately absent: models written in Rust on several machines.

pub mod feed;
pub mod program;
pub mod running;

use crate::api::job::Job;
use crate::api::start::{Checked, Ranks};
use crate::control::Control;
use crate::coordinate::head_node::{LocalNode, lead};
use crate::coordinate::serve::Serve;
use crate::error::JobError;
use crate::error::host::HostError;
use crate::events::Report;
use crate::train::fit::check;
use feed::Feed;
use phalanx_actors::trust::join::parse_addresses;
use program::RankProgram;
use running::{Outcome, RunningJob, folder};
use std::any::Any;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Starts jobs. All clones are the same.
#[derive(Clone, Debug)]
pub struct Runtime {
    program: RankProgram,
    jobs: Arc<Mutex<Vec<RunningJob>>>,
}

/// How other machines take part in a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machines {
    /// Where they are listened for, UDP; by default a free port that no other machine can reach.
    pub listen: SocketAddr,
    /// Where they find it, as `host:port,…`, if that is another address.
    pub advertise: Option<String>,
    /// Rank processes of this machine; there may be none.
    pub ranks_here: u32,
    /// Where ranks of other machines reach those, if it is not the address on which is listened.
    pub advertise_ranks: Option<IpAddr>,
    /// How many may join, each with any number of ranks.
    pub n_max: u32,
    /// How long they may join; later, [`Runtime::coordinate`] anew.
    pub join_lifetime: Duration,
}

impl Default for Machines {
    fn default() -> Machines {
        Machines {
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            advertise: None,
            ranks_here: 0,
            advertise_ranks: None,
            n_max: 1024,
            join_lifetime: Duration::from_secs(24 * 3600),
        }
    }
}

/// What a job does on its thread: says that it is under way, with a join string if it has one, and runs to its end.
type Work = dyn FnOnce(&mut dyn FnMut(Option<&str>), &Control, &Feed) -> Result<Report, JobError> + Send;

impl Runtime {
    /// A runtime whose ranks are processes of this program.
    ///
    /// # Errors
    /// When that cannot be: see [`program`].
    pub fn new(program: RankProgram) -> Result<Runtime, JobError> {
        program.check(std::env::args_os().skip(1))?;
        Ok(Runtime { program, jobs: Arc::default() })
    }

    /// Starts a job whose ranks are processes of this machine; also a single rank is one. Returns once its
    /// configuration and model were checked; its data is prepared after that. The job starts even if this future is
    /// dropped.
    ///
    /// # Errors
    /// When the job cannot start: its input is at fault, or another job is writing into its folder.
    pub async fn start(&self, job: Job) -> Result<RunningJob, Arc<JobError>> {
        let (config, user) = job.into_parts();
        let (program, makes_models) = (self.program.path().to_owned(), self.program.makes_models());
        let output_dir = folder(&config.output.output_dir);
        let work = move |under_way: &mut dyn FnMut(Option<&str>), control: &Control, feed: &Feed| {
            let ranks = Ranks::Processes { program, makes_models };
            let checked = Checked::new(&config, user, &ranks)?;
            under_way(None);
            checked.run(control, &mut |event| feed.push(event.clone()))
        };
        self.launch(&output_dir, Box::new(work)).await
    }

    /// Starts the coordinator of a job over several machines in this process, and a node with ranks of this machine if it is
    /// to have any. Others join with [`RunningJob::join_string`]. All write into the same `output_dir`.
    ///
    /// Of the events of ranks, those of the leader are told while it runs on this machine; worlds, incidents and
    /// checkpoints always.
    ///
    /// # Errors
    /// As [`Runtime::start`].
    pub async fn coordinate(&self, job: Job, machines: Machines) -> Result<RunningJob, Arc<JobError>> {
        let (config, user) = job.into_parts();
        let here = LocalNode {
            program: self.program.path().to_owned(),
            n_slots: machines.ranks_here,
            advertise: machines.advertise_ranks,
        };
        let output_dir = folder(&config.output.output_dir);
        let work = move |under_way: &mut dyn FnMut(Option<&str>), control: &Control, feed: &Feed| {
            if user.is_some() {
                return Err(HostError::MachinesWithoutModel.into());
            }
            let model = check(&config)?;
            let mut told = |join: &str| under_way(Some(join));
            let how = machines.serve()?;
            lead(&config, &model, &how, here, control, &mut told, &mut |event| feed.push(event.clone()))
        };
        self.launch(&output_dir, Box::new(work)).await
    }

    /// The jobs that run.
    pub fn jobs(&self) -> Vec<RunningJob> {
        let mut jobs = self.list();
        jobs.retain(|job| job.outcome().is_none());
        jobs.clone()
    }

    /// Stops all jobs, each after its step and saved, and waits for their end.
    pub async fn shutdown(&self) {
        let jobs = self.jobs();
        jobs.iter().for_each(RunningJob::stop);
        for job in jobs {
            // How it ended is told to those who wait for it.
            let _ = job.wait().await;
        }
    }

    async fn launch(&self, output_dir: &Path, work: Box<Work>) -> Result<RunningJob, Arc<JobError>> {
        let (mut under_way, job) = {
            let mut jobs = self.list();
            jobs.retain(|job| job.outcome().is_none());
            if jobs.iter().any(|job| job.is_in(output_dir)) {
                return Err(Arc::new(JobError::InUse { path: output_dir.to_owned() }));
            }
            let (under_way, job) = spawn(output_dir, work).map_err(Arc::new)?;
            jobs.push(job.clone());
            (under_way, job)
        };
        if under_way.wait_for(|is| *is).await.is_ok() {
            return Ok(job);
        }
        // It ended before it was under way.
        job.wait().await.map(|_| job)
    }

    fn list(&self) -> MutexGuard<'_, Vec<RunningJob>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Machines {
    fn serve(&self) -> Result<Serve, JobError> {
        let advertise = self.advertise.as_deref().map(parse_addresses).transpose();
        let advertise = advertise.map_err(HostError::Advertise)?;
        Ok(Serve {
            listen: self.listen,
            advertise: advertise.unwrap_or_default(),
            n_machines: self.n_max,
            token_lifetime: self.join_lifetime,
        })
    }
}

/// Runs work on a thread of its own. The receiver turns true once it is under way, and is closed if it never will be.
fn spawn(output_dir: &Path, work: Box<Work>) -> Result<(watch::Receiver<bool>, RunningJob), JobError> {
    let (control, feed) = (Arc::new(Control::default()), Arc::new(Feed::default()));
    let (under_way, is_under_way) = watch::channel(false);
    let (joins, join) = watch::channel(None);
    let (ending, outcome) = watch::channel(None);
    let job = RunningJob { output_dir: output_dir.into(), control: control.clone(), feed: feed.clone(), outcome, join };
    let run = move || {
        let worked = catch_unwind(AssertUnwindSafe(|| {
            let mut under_way = |join: Option<&str>| {
                joins.send_replace(join.map(str::to_owned));
                under_way.send_replace(true);
            };
            work(&mut under_way, &control, &feed)
        }));
        let outcome: Outcome =
            worked.unwrap_or_else(|panic| Err(JobError::Panicked(message(&*panic)))).map_err(Arc::new);
        control.close();
        // Waiters for the end have the result before the event stream ends.
        ending.send_replace(Some(outcome));
        feed.end();
        drop(under_way);
    };
    let spawned = std::thread::Builder::new().name("phalanx-job".into()).spawn(run);
    spawned.map_err(|e| JobError::Thread(phalanx_device::ThreadError::Spawn(e)))?;
    Ok((is_under_way, job))
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it left no message").to_owned()
}

#[cfg(test)]
mod tests;
