//! Elastic jobs inside another program: a thread of the host coordinates rank processes, which may die, and the host's event
//! loop follows the job.
//!
//! ```no_run
//! # async fn f() -> Result<(), Box<dyn std::error::Error>> {
//! use phalanx::{Event, Job, Runtime, rank_process};
//!
//! // First in `main`: the ranks are processes of the same executable.
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
//! Guarantees for the host:
//! - **EMBED-1** A job never blocks the host's event loop: it has its own threads, one of them for its actors, and its
//!   tensors are in other processes.
//! - **EMBED-2** There is no global state: no environment variable is written or required, no signal handler or panic hook
//!   is installed in the host, and any number of jobs and runtimes run side by side. A folder has one job at a time.
//! - **EMBED-3** A panic in a thread of a job ends only that job, as its error.
//! - **EMBED-4** A reader of events cannot block a job; see [`feed`].
//! - **EMBED-5** Ranks die with the host, however the host ends. A restarted job resumes from its last checkpoint. Ranks ignore
//!   SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2, which batch systems and service managers send to every process: a host that
//!   handles them saves with [`Runtime::shutdown`].
//!
//! Map: [`program`] is the program of rank processes, [`running`] the handle of a running job, [`feed`] its events.
//!
//! The host's `main` makes a model written in Rust in every rank process: see
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
use crate::coordinate::serving::Serve;
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

/// Starts jobs. Clones share the same jobs.
#[derive(Clone, Debug)]
pub struct Runtime {
    program: RankProgram,
    jobs: Arc<Mutex<Vec<RunningJob>>>,
}

/// How other machines join a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machines {
    /// UDP address to listen on; by default a free port that other machines cannot reach.
    pub listen: SocketAddr,
    /// Addresses at which nodes reach the coordinator, as `host:port,…`, if they differ from `listen`.
    pub advertise: Option<String>,
    /// Number of rank processes on this machine, possibly 0.
    pub ranks_here: u32,
    /// Address at which ranks of other machines reach the ranks of this one, if it differs from the listening address.
    pub advertise_ranks: Option<IpAddr>,
    /// Number of machines that may join, each with any number of ranks.
    pub n_max: u32,
    /// Lifetime of the join string; for a new one, call [`Runtime::coordinate`] again.
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

/// The work of a job on its thread: it calls back once it is under way, with its join string if any, and runs to its end.
type Work = dyn FnOnce(&mut dyn FnMut(Option<&str>), &Control, &Feed) -> Result<Report, JobError> + Send;

impl Runtime {
    /// A runtime whose ranks are processes of this program.
    ///
    /// # Errors
    /// When the program cannot be a rank: see [`program`].
    pub fn new(program: RankProgram) -> Result<Runtime, JobError> {
        program.check(std::env::args_os().skip(1))?;
        Ok(Runtime { program, jobs: Arc::default() })
    }

    /// Starts a job whose ranks, even a single one, are processes of this machine. Returns once the configuration and model
    /// are checked; the data is prepared after that. The job starts even if this future is dropped.
    ///
    /// # Errors
    /// When the job cannot start: its input is at fault, or another job is writing into its folder.
    pub async fn start(&self, job: Job) -> Result<RunningJob, Arc<JobError>> {
        let (config, user) = job.into_parts();
        let (program, makes_models) = (self.program.executable().clone(), self.program.makes_models());
        let output_dir = folder(&config.output.folder());
        let work = move |under_way: &mut dyn FnMut(Option<&str>), control: &Control, feed: &Feed| {
            let ranks = Ranks::Processes { program, makes_models };
            let checked = Checked::new(&config, user, &ranks)?;
            under_way(None);
            checked.run(control, &mut |event| feed.push(event.clone()))
        };
        self.launch(&output_dir, Box::new(work)).await
    }

    /// Starts the coordinator of a job on several machines in this process, and a node if `ranks_here` is above 0. Other
    /// machines join with [`RunningJob::join_string`]. All machines share `output_dir`.
    ///
    /// Events of the leading rank are reported while it runs on this machine; worlds, incidents and checkpoints are always
    /// reported.
    ///
    /// # Errors
    /// As [`Runtime::start`].
    pub async fn coordinate(&self, job: Job, machines: Machines) -> Result<RunningJob, Arc<JobError>> {
        let (config, user) = job.into_parts();
        let here = LocalNode {
            program: self.program.executable().clone(),
            n_slots: machines.ranks_here,
            advertise: machines.advertise_ranks,
        };
        let output_dir = folder(&config.output.folder());
        let work = move |under_way: &mut dyn FnMut(Option<&str>), control: &Control, feed: &Feed| {
            if user.is_some() {
                return Err(HostError::MachinesWithoutModel.into());
            }
            let model = check(&config)?;
            let mut on_join = |join: &str| under_way(Some(join));
            let how = machines.serve()?;
            lead(&config, &model, &how, here, control, &mut on_join, &mut |event| feed.push(event.clone()))
        };
        self.launch(&output_dir, Box::new(work)).await
    }

    /// The running jobs.
    pub fn jobs(&self) -> Vec<RunningJob> {
        let mut jobs = self.list();
        jobs.retain(|job| job.outcome().is_none());
        jobs.clone()
    }

    /// Stops all jobs, each after its current step and a checkpoint, and waits for them to end.
    pub async fn shutdown(&self) {
        let jobs = self.jobs();
        jobs.iter().for_each(RunningJob::stop);
        for job in jobs {
            // The outcome goes to the callers that wait for this job.
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
        // The job ended before it was under way.
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
            is_beside_node: false,
        })
    }
}

/// Runs work on its own thread. The receiver turns true once the job is under way, and closes if the job ends before.
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

/// The message of a panic.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no panic message").to_owned()
}

#[cfg(test)]
mod tests;
