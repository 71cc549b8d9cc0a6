//! The coordinator of a job over several nodes, in a process of its own: no tensors, no devices, and nothing that its
//! successor cannot read from the store or hear from the nodes.

use crate::config::JobConfig;
use crate::config::datasets::ValSetSize;
use crate::control::Control;
use crate::coordinate::event_log::EventLog;
use crate::coordinate::standby;
use crate::coordinate::standby::Watched;
use crate::error::{JobError, unusable};
use crate::node::welcome::Welcome;
use crate::train::fit::fits;
use crate::train::plan::ModelPlan;
use crate::train::programs::state_bytes;
use crate::train::saving::Saving;
use phalanx_actors::control::{ControlThread, block_on};
use phalanx_actors::coordinator::Settings;
use phalanx_actors::events::{Event, What};
use phalanx_actors::head::{Fits, Head};
use phalanx_actors::operator::{Answer, Request};
use phalanx_actors::quic::listener::{Inbox, Listener, ListenerConfig};
use phalanx_actors::store::directory::Directory;
use phalanx_actors::store::{SharedStore, Store};
use phalanx_actors::trust::authority::Authority;
use phalanx_actors::trust::join::Address;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::{Generation, JobId, Step};
use phalanx_strategies::elastic::message::{Ending, Record};
use phalanx_strategies::elastic::snapshot;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Folder of a job in which its coordinators keep what they know.
pub(crate) const CONTROL: &str = "control";
/// File of that folder that says where the coordinator listens.
pub(crate) const ADDRESS: &str = "address";

/// How a coordinator is reached and who may join.
#[derive(Clone, Debug)]
pub(crate) struct Serve {
    pub(crate) listen: SocketAddr,
    /// Where nodes find it, if not at `listen`; port 0 is the one on which it listens.
    pub(crate) advertise: Vec<Address>,
    /// How many machines may join with one join string, and how long.
    pub(crate) n_machines: u32,
    pub(crate) token_lifetime: Duration,
}

/// What a coordinator tells whoever started it.
pub(crate) enum Told {
    /// Machines join with this.
    Join(String),
    /// Another one coordinates; this one does if that dies.
    StandsBy,
    /// Something happened.
    Event(Event),
}

/// Coordinates a job to its end; returns what it was then, unless another coordinator has taken over. Asks `is_abandoned`
/// often: once it is, the job is stopped, and not waited for when no node is left.
pub(crate) fn serve(
    config: &JobConfig,
    model: &ModelPlan,
    serve: &Serve,
    control: &Control,
    is_abandoned: &dyn Fn() -> bool,
    tell: &mut dyn FnMut(Told),
) -> Result<Option<Box<Status>>, JobError> {
    let folder = config.output.output_dir.join(CONTROL);
    let store = Directory::open(&folder.join("store")).map_err(unusable)?;
    let timing = config.elastic.timing();
    let stops = || control.stops() || is_abandoned();
    let watched = match standby::wait(&store, &timing, &stops, &mut || tell(Told::StandsBy))? {
        Watched::Vacant(lease, since) => Some((lease, since)),
        Watched::NotNeeded => return Ok(None),
    };
    let found = begin(config, &folder, &store)?;
    let job = job_of(&folder)?;
    let (listener, inbound) = listen(config, serve.listen, job, found)?;
    let addresses =
        if serve.advertise.is_empty() { vec![Address::from(listener.address())] } else { serve.advertise.clone() };
    let addresses: Vec<Address> = addresses
        .into_iter()
        .map(|a| if a.port == 0 { Address { port: listener.address().port(), ..a } } else { a })
        .collect();
    let text: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    write(&folder.join(ADDRESS), text.join(",").as_bytes())?;
    let invitation = listener.invite(addresses, serve.token_lifetime, serve.n_machines).map_err(unusable)?;
    tell(Told::Join(invitation.to_string()));
    let policy = config.elastic.policy(config.parallel.mesh()?, model.n_microbatches, state_bytes(model)?);
    let fits = fits_of(config, model);
    // Processes of two machines may have the same number.
    let candidate = job_id().0 as u32;
    let settings = Settings { job, candidate, watched, policy, timing };
    let thread = ControlThread::start("phalanx-control").map_err(|e| unusable(format!("no thread: {e}")))?;
    let (happened, events) = channel();
    let head = {
        let listener = listener.clone();
        let orders = move |node, order: &_| {
            if let Err(error) = listener.order(node, order) {
                tracing::debug!(%error, "an order was not sent");
            }
        };
        let store: SharedStore = Arc::new(store);
        let started = Head::start(&thread, settings, store, fits, orders, move |event: &Event| {
            let _ = happened.send(event.clone());
        });
        block_on(started).map_err(unusable)?.map_err(unusable)?
    };
    let server = head.clone();
    let serving = std::thread::Builder::new()
        .name("phalanx-serving".into())
        .spawn(move || block_on(server.serve(inbound)))
        .map_err(unusable)?;
    control.open();
    let log = EventLog::open(&config.output.output_dir)?;
    let following = Following { head, thread: &thread, listener: &listener, events, log, ending: None };
    let outcome = following.follow(control, is_abandoned, tell);
    control.close();
    thread.stop();
    listener.close();
    let _ = serving.join();
    outcome
}

/// What meshes the job could run on.
fn fits_of(config: &JobConfig, model: &ModelPlan) -> Fits {
    let (model, evaluates) = (model.clone(), config.data.val_set_size != ValSetSize::Nothing);
    Fits::new(move |mesh| fits(&model, mesh, evaluates).map(drop).map_err(|error| error.to_string()))
}

/// Opens the coordinator's side to nodes and operators.
fn listen(
    config: &JobConfig,
    at: SocketAddr,
    job: JobId,
    start_from: Option<(u64, PathBuf)>,
) -> Result<(Listener, Inbox), JobError> {
    let folder = config.output.output_dir.join(CONTROL);
    let authority = Authority::open(&folder, job).map_err(unusable)?;
    let secret = authority.secret("tensors between ranks").to_vec();
    drop(authority);
    let welcome = Welcome { yaml: config.to_yaml(), secret, start_from };
    let settings = ListenerConfig {
        listen: at,
        timing: config.elastic.timing(),
        welcome: serde_json::to_vec(&welcome).map_err(unusable)?,
        ..ListenerConfig::new(&folder, job)
    };
    Listener::start(settings).map_err(unusable)
}

/// A job that is coordinated.
struct Following<'a> {
    head: Head,
    thread: &'a ControlThread,
    listener: &'a Listener,
    events: Receiver<Event>,
    log: EventLog,
    ending: Option<Ending>,
}

impl Following<'_> {
    fn follow(
        mut self,
        control: &Control,
        is_abandoned: &dyn Fn() -> bool,
        tell: &mut dyn FnMut(Told),
    ) -> Result<Option<Box<Status>>, JobError> {
        let mut is_stopping = false;
        loop {
            let is_abandoned = is_abandoned();
            if !is_stopping && (control.stops() || is_abandoned) {
                is_stopping = true;
                let answer = self.ask(Request::Stop)?;
                tracing::info!(?answer, "asked to stop");
            }
            if is_abandoned && self.listener.connected().is_empty() {
                return Err(JobError::JobFailed("no node is left".into()));
            }
            while let Some((request, answer)) = control.next_asked() {
                // Whoever asked may have gone.
                let _ = answer.send(self.ask(request)?);
            }
            if let Some(Err(panicked)) = poll_end(self.thread) {
                return Err(JobError::JobFailed(panicked));
            }
            match self.events.recv_timeout(LOOK) {
                Ok(event) => {
                    self.log.write(&event)?;
                    if let What::Ended { ending } = &event.what {
                        self.ending = Some(ending.clone());
                    }
                    let is_over = event.what == What::NodesTold;
                    tell(Told::Event(event));
                    if is_over {
                        break;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        match self.ending.take() {
            Some(Ending::Failed(why)) => Err(JobError::JobFailed(why)),
            Some(Ending::Finished) => match self.ask(Request::Status)? {
                Answer::Status(status) => Ok(Some(status)),
                other => Err(JobError::JobFailed(format!("the coordinator did not say how the job ended: {other:?}"))),
            },
            None => Ok(None),
        }
    }

    fn ask(&self, request: Request) -> Result<Answer, JobError> {
        block_on(self.head.ask(request)).map_err(unusable)
    }
}

/// How often it is looked whether somebody asks for something.
const LOOK: Duration = Duration::from_millis(50);

/// The end of a thread, if it has come.
fn poll_end(thread: &ControlThread) -> Option<Result<(), String>> {
    let end = thread.has_ended()?;
    Some(end.map_err(|panicked| panicked.to_string()))
}

/// Prepares the store: a job that has ended begins anew, from its last checkpoint if it is to. Returns what it begins from.
fn begin(config: &JobConfig, control: &Path, store: &Directory) -> Result<Option<(u64, PathBuf)>, JobError> {
    let output = &config.output;
    let mut record = store.read_record().map_err(unusable)?;
    if record.ending.is_some() {
        // A later run of the job; who took part in the earlier one has nothing to do with it.
        let lease = store.read_lease().map_err(unusable)?;
        record = Record { term: lease.term, generation: record.generation, ..Record::default() };
        store.write_record(&record).map_err(unusable)?;
        forget_job(control)?;
    }
    if record.formation.is_some() {
        return Ok(None);
    }
    let saving = Saving::new(output, Vec::new());
    let (resume, warnings) = saving.find(&output.resume_from_checkpoint)?;
    warnings.into_iter().for_each(|warning| tracing::warn!("{warning}"));
    let Some(path) = resume else { return Ok(None) };
    let id = Checkpoint::open(&path)?.id().clone();
    record.checkpoint = snapshot::Checkpoint { generation: Generation(id.generation), step: Step(id.step) };
    record.generation = record.generation.max(Generation(id.generation));
    store.write_record(&record).map_err(unusable)?;
    Ok(Some((id.step, path)))
}

/// File of the control folder that holds the number of the job.
const JOB: &str = "job";

/// The number of the job, kept so that a coordinator that is started again is of the same one. Only where there is no file
/// the job is a new one.
fn job_of(control: &Path) -> Result<JobId, JobError> {
    let path = control.join(JOB);
    match fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().map(JobId).map_err(|_| {
            let path = path.display();
            JobError::Unusable(format!("{path} does not hold the number of a job; remove it to begin a new job"))
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let job = job_id();
            write(&path, job.0.to_string().as_bytes())?;
            Ok(job)
        }
        Err(source) => Err(JobError::Io { action: "read", path, source }),
    }
}

/// The next run in this folder is of another job.
fn forget_job(control: &Path) -> Result<(), JobError> {
    let path = control.join(JOB);
    match fs::remove_file(&path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(JobError::Io { action: "remove", path, source }),
        _ => Ok(()),
    }
}

/// Writes a file, which is on the disk under its name when this returns.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), JobError> {
    let beside = path.with_extension("new");
    let written = || {
        let mut file = File::create(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(dir)?.sync_all()
    };
    written().map_err(|source| JobError::Io { action: "write", path: path.to_owned(), source })
}

/// The number of a job of this process.
pub(crate) fn job_id() -> JobId {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    JobId(now.as_nanos() as u64 ^ u64::from(std::process::id()) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restarted_coordinator_reads_the_job_number_that_the_first_one_wrote() {
        let dir = tempfile::tempdir().unwrap();

        let (first, again) = (job_of(dir.path()).unwrap(), job_of(dir.path()).unwrap());
        forget_job(dir.path()).unwrap();
        forget_job(dir.path()).unwrap();

        assert_eq!(first, again);
        assert_ne!(job_of(dir.path()).unwrap(), first, "a forgotten job is followed by another one");
    }

    #[test]
    fn a_job_file_that_cannot_be_read_or_removed_is_an_error_and_no_new_job() {
        for content in [&b"17 and more"[..], b"", b"\xff"] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(JOB);
            fs::write(&path, content).unwrap();

            let refused = job_of(dir.path()).unwrap_err().to_string();

            assert!(refused.contains(path.to_str().unwrap()), "{refused}");
            assert_eq!(fs::read(&path).unwrap(), content, "the file is left as it was");
        }
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(JOB)).unwrap();

        assert!(matches!(job_of(dir.path()), Err(JobError::Io { action: "read", .. })));
        assert!(matches!(forget_job(dir.path()), Err(JobError::Io { action: "remove", .. })));
    }
}
