//! The coordinator of a job over several nodes, in a process of its own: no tensors, no devices, and nothing that its
//! successor cannot read from the store or hear from the nodes.

use crate::checkpoint::reader::Checkpoint;
use crate::config::JobConfig;
use crate::train::JobError;
use crate::train::elastic::local::job_id;
use crate::train::saving::Saving;
use phalanx_actors::control::{ControlThread, block_on};
use phalanx_actors::coordinator::Settings;
use phalanx_actors::events::{Event, What};
use phalanx_actors::head::Head;
use phalanx_actors::operator::Request;
use phalanx_actors::quic::listener::{Listener, ListenerConfig};
use phalanx_actors::store::directory::Directory;
use phalanx_actors::store::{SharedStore, Store};
use phalanx_actors::trust::join::Address;
use phalanx_strategies::elastic::identity::{Generation, JobId, Step};
use phalanx_strategies::elastic::message::{Ending, Record};
use phalanx_strategies::elastic::snapshot;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Folder of a job in which its coordinators keep what they know.
pub(crate) const CONTROL: &str = "control";
/// File of that folder that says where the coordinator listens.
pub(crate) const ADDRESS: &str = "address";

/// What every node is told with its certificate.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// The whole configuration, overrides applied.
    pub(crate) yaml: String,
    /// What all ranks of the job know and nobody else does.
    pub(crate) secret: Vec<u8>,
    /// Where the checkpoint lies from which the job begins, if there is one.
    pub(crate) start_from: Option<(u64, PathBuf)>,
}

/// How a coordinator is reached and who may join.
#[derive(Clone, Debug)]
pub(crate) struct Serve {
    pub(crate) listen: SocketAddr,
    /// Where nodes find it, if not at `listen`.
    pub(crate) advertise: Vec<Address>,
    /// How many machines may join with one join string, and how long.
    pub(crate) n_machines: u32,
    pub(crate) token_lifetime: Duration,
}

/// What a coordinator tells whoever started it.
pub(crate) enum Told {
    /// Machines join with this.
    Join(String),
    /// Something happened.
    Event(Event),
}

/// Coordinates a job to its end. `asked` is looked at often: `true` once the job shall stop.
pub(crate) fn serve(
    config: &JobConfig,
    n_microbatches: usize,
    serve: &Serve,
    asked_to_stop: &dyn Fn() -> bool,
    tell: &mut dyn FnMut(Told),
) -> Result<(), JobError> {
    let control = config.output.output_dir.join(CONTROL);
    let store = Directory::open(&control.join("store")).map_err(unusable)?;
    let found = begin(config, &control, &store)?;
    let job = job_of(&control)?;
    let timing = config.elastic.timing();
    let authority = phalanx_actors::trust::authority::Authority::open(&control, job).map_err(unusable)?;
    let welcome = Welcome {
        yaml: config.to_yaml(),
        secret: authority.secret("tensors between ranks").to_vec(),
        start_from: found,
    };
    drop(authority);
    let listen = ListenerConfig {
        listen: serve.listen,
        timing,
        welcome: serde_json::to_vec(&welcome).map_err(unusable)?,
        ..ListenerConfig::new(&control, job)
    };
    let (listener, inbound) = Listener::start(listen).map_err(unusable)?;
    let addresses =
        if serve.advertise.is_empty() { vec![Address::from(listener.address())] } else { serve.advertise.clone() };
    let text: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    write(&control.join(ADDRESS), text.join(",").as_bytes())?;
    let invitation = listener.invite(addresses, serve.token_lifetime, serve.n_machines).map_err(unusable)?;
    tell(Told::Join(invitation.to_string()));
    let policy = config.elastic.policy(config.parallel.mesh()?, n_microbatches);
    let settings = Settings { job, candidate: std::process::id(), policy, timing };
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
        let started = Head::start(&thread, settings, store, orders, move |event: &Event| {
            let _ = happened.send(event.clone());
        });
        block_on(started).map_err(unusable)?.map_err(unusable)?
    };
    let server = head.clone();
    let serving = std::thread::Builder::new()
        .name("phalanx-serving".into())
        .spawn(move || block_on(server.serve(inbound)))
        .map_err(unusable)?;
    let mut log = EventLog::open(&config.output.output_dir)?;
    let (mut ending, mut stopping) = (None, false);
    loop {
        if !stopping && asked_to_stop() {
            stopping = true;
            let answer = block_on(head.ask(Request::Stop)).map_err(unusable)?;
            tracing::info!(?answer, "asked to stop");
        }
        if let Some(Err(panicked)) = poll_end(&thread) {
            return Err(JobError::JobFailed(panicked));
        }
        match events.recv_timeout(LOOK) {
            Ok(event) => {
                log.write(&event)?;
                if let What::Ended { ending: how } = &event.what {
                    ending = Some(how.clone());
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
    thread.stop();
    listener.close();
    let _ = serving.join();
    match ending {
        Some(Ending::Failed(why)) => Err(JobError::JobFailed(why)),
        _ => Ok(()),
    }
}

/// How often it is looked whether the job shall stop.
const LOOK: Duration = Duration::from_millis(100);

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
        let _ = fs::remove_file(control.join("job"));
    }
    if record.formation.is_some() {
        return Ok(None);
    }
    let saving = Saving::new(&output.output_dir, output.save_total_limit, Vec::new());
    let (resume, warnings) = saving.find(&output.resume_from_checkpoint)?;
    warnings.into_iter().for_each(|warning| tracing::warn!("{warning}"));
    let Some(path) = resume else { return Ok(None) };
    let id = Checkpoint::open(&path)?.id().clone();
    record.checkpoint = snapshot::Checkpoint { generation: Generation(id.generation), step: Step(id.step) };
    record.generation = record.generation.max(Generation(id.generation));
    store.write_record(&record).map_err(unusable)?;
    Ok(Some((id.step, path)))
}

/// The number of the job, kept so that a coordinator that is started again is of the same one.
fn job_of(control: &Path) -> Result<JobId, JobError> {
    let path = control.join("job");
    if let Ok(text) = fs::read_to_string(&path)
        && let Ok(job) = text.trim().parse()
    {
        return Ok(JobId(job));
    }
    let job = job_id();
    write(&path, job.0.to_string().as_bytes())?;
    Ok(job)
}

pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), JobError> {
    let beside = path.with_extension("new");
    let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    written.map_err(|source| JobError::Io { action: "write", path: path.to_owned(), source })
}

pub(crate) fn unusable(error: impl std::fmt::Display) -> JobError {
    JobError::Unusable(error.to_string())
}

/// `events.jsonl`: a line for everything that happens to the job; incidents have their phases.
pub(crate) struct EventLog {
    path: PathBuf,
    file: fs::File,
}

impl EventLog {
    /// Opens the file in a job's folder. Appended to: a job that goes on keeps its history.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn open(output_dir: &Path) -> Result<EventLog, JobError> {
        let path = output_dir.join("events.jsonl");
        let file = fs::File::options().append(true).create(true).open(&path);
        let file = file.map_err(|source| JobError::Io { action: "write", path: path.clone(), source })?;
        Ok(EventLog { path, file })
    }

    /// Adds a line.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write(&mut self, event: &Event) -> Result<(), JobError> {
        let mut line = serde_json::to_vec(event).unwrap_or_default();
        line.push(b'\n');
        self.file.write_all(&line).map_err(|source| JobError::Io { action: "write", path: self.path.clone(), source })
    }
}
