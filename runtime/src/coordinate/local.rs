//! Coordinator, supervisor and ranks of one machine from one command.

use crate::config::JobConfig;
use crate::config::datasets::ValSetSize;
use crate::control::Control;
use crate::coordinate::chorus::Chorus;
use crate::coordinate::event_log::EventLog;
use crate::coordinate::serve::{ADDRESS, CONTROL, job_id, write};
use crate::error::JobError;
use crate::error::unusable;
use crate::events::{Event, Report};
use crate::launch::failure::Ending as ProcessEnding;
use crate::node::processes::{Node, NodeEvent};
use crate::rank::excuse::Excuse;
use crate::rank::words::Begin;
use crate::train::fit::fits_here;
use crate::train::plan::ModelPlan;
use crate::train::programs::state_bytes;
use crate::train::saving::Saving;
use phalanx_actors::events::{Event as Happening, What};
use phalanx_actors::operator::{Answer, Request};
use phalanx_actors::quic::listener::{Inbound, Listener, ListenerConfig};
use phalanx_actors::trust::join::Address;
use phalanx_actors::wire;
use phalanx_cpu::available_threads;
use phalanx_cpu::matmul::peak_flops;
use phalanx_storage::checkpoint::reader::Checkpoint as Stored;
use phalanx_strategies::elastic::coordinator::{self, Coordinator};
use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, NodeId, Term, Worker};
use phalanx_strategies::elastic::mesh_choice::Policy;
use phalanx_strategies::elastic::message::{Ending, Record};
use phalanx_strategies::elastic::snapshot::Checkpoint;
use phalanx_strategies::elastic::supervisor::{self, Supervisor};
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::mesh::Mesh;
use phalanx_strategies::passes::precision::Precision;
use std::collections::BTreeSet;
use std::path::Path;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often it is looked whether somebody asked to stop or save.
const LOOK: Duration = Duration::from_millis(50);
/// Processes in a row that end before they have begun: more say that none ever will.
const STILLBORN_MAX: usize = 3;

/// A run on one machine.
pub(crate) struct Local<'a> {
    pub(crate) config: &'a JobConfig,
    pub(crate) program: PathBuf,
    pub(crate) model: &'a ModelPlan,
    pub(crate) evaluates: bool,
    pub(crate) policy: Policy,
    pub(crate) timing: Timing,
    pub(crate) n_slots: u32,
    /// The checkpoint to begin from.
    pub(crate) checkpoint: Checkpoint,
    pub(crate) begin: Begin,
    pub(crate) control: &'a Control,
}

impl Local<'_> {
    /// Starts the ranks and follows them to the end of the job.
    pub(crate) fn run(self, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<Report, JobError> {
        let (node, job) = (NodeId(0), self.begin.job);
        let now = Instant::now();
        let boot = Incarnation(1);
        let record = Record { checkpoint: self.checkpoint, ..Record::default() };
        let coordinator = Coordinator::new(now, job, Term(1), record, self.policy, self.timing);
        let (model, evaluates, n_slots) = (self.model.clone(), self.evaluates, self.n_slots);
        let fits = Box::new(move |mesh| fits_here(&model, mesh, evaluates, n_slots));
        let supervisor = Supervisor::new(now, job, node, boot, self.n_slots, self.timing);
        let processes = Node::new(node, self.program, self.model.clone(), self.evaluates, self.begin, self.n_slots)?;
        let control = self.config.output.output_dir.join(CONTROL);
        let listen = ListenerConfig { timing: self.timing, ..ListenerConfig::new(&control, job) };
        // Nobody but the operator of this machine is heard: there is no join string.
        let (listener, inbound) = Listener::start(listen).map_err(unusable)?;
        write(&control.join(ADDRESS), Address::from(listener.address()).to_string().as_bytes())?;
        let watch = Watch {
            inbound,
            _listener: listener,
            coordinator,
            fits,
            supervisor,
            node: processes,
            chorus: (0, Chorus::default()),
            events: EventLog::open(&self.config.output.output_dir)?,
            world: Generation(0),
            report: None,
            excuse: None,
            ending: None,
            n_stillborn: 0,
            begun: BTreeSet::new(),
            last_line: None,
            wishes: (false, 0),
            over: false,
        };
        self.control.open();
        watch.follow(self.control, on_event)
    }
}

/// A job that runs.
struct Watch {
    /// What the operator asks.
    inbound: phalanx_actors::quic::listener::Inbox,
    _listener: Listener,
    coordinator: Coordinator,
    /// Whether the job can run on a mesh.
    fits: Box<dyn Fn(Mesh) -> Result<(), JobError>>,
    supervisor: Supervisor,
    node: Node,
    /// Events of the ranks of a generation.
    chorus: (u64, Chorus),
    events: EventLog,
    /// The latest world that was told of.
    world: Generation,
    report: Option<Report>,
    /// What the first rank that failed said.
    excuse: Option<(Worker, Excuse)>,
    ending: Option<Ending>,
    n_stillborn: usize,
    /// Processes that have said a word.
    begun: BTreeSet<Worker>,
    last_line: Option<String>,
    /// What was asked of the run and passed on.
    wishes: (bool, u64),
    over: bool,
}

impl Watch {
    fn follow(mut self, control: &Control, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<Report, JobError> {
        loop {
            self.drive(on_event)?;
            if self.over {
                break;
            }
            let due = [self.coordinator.poll_timeout(), self.supervisor.poll_timeout()].into_iter().flatten().min();
            let wait = due.map_or(LOOK, |due| due.saturating_duration_since(Instant::now()).min(LOOK));
            let event = self.node.next_event(Some(wait))?;
            let now = Instant::now();
            self.pass_on(now, control);
            self.answer(now, control);
            if let Some(event) = event {
                self.hear(now, event, on_event)?;
            }
            self.supervisor.handle_timeout(now);
            self.coordinator.handle_timeout(now);
        }
        while let Some(event) = self.chorus.1.next_as_it_is() {
            on_event(&event);
        }
        self.outcome()
    }

    /// Answers the operator, and the program that this is a part of.
    fn answer(&mut self, now: Instant, control: &Control) {
        while let Some((request, answer)) = control.next_asked() {
            let _ = answer.send(self.obey(now, request));
        }
        while let Ok(inbound) = self.inbound.try_recv() {
            let Inbound::Request { frame, answer } = inbound else { continue };
            let said = match wire::decode::<Request>(&frame) {
                Ok(request) => self.obey(now, request),
                Err(error) => Answer::Refused(error.to_string()),
            };
            if let Ok(frame) = wire::encode(&said) {
                // Whoever asked may have gone.
                let _ = answer.send(frame);
            }
        }
    }

    fn obey(&mut self, now: Instant, request: Request) -> Answer {
        match request {
            Request::Status => return Answer::Status(Box::new(self.coordinator.status(now))),
            Request::Save => self.coordinator.handle_save(now),
            Request::Stop => self.coordinator.handle_stop(now),
            Request::Drain(_) => {
                return Answer::Refused(
                    "the job runs on one machine, which has no other to leave its state to; stopping it saves it"
                        .into(),
                );
            }
            Request::Resize(mesh) => {
                if let Err(error) = (self.fits)(mesh) {
                    return Answer::Refused(error.to_string());
                }
                if let Err(error) = self.coordinator.handle_resize(now, mesh) {
                    return Answer::Refused(error.to_string());
                }
            }
        }
        Answer::Done
    }

    fn pass_on(&mut self, now: Instant, control: &Control) {
        if control.stops() && !std::mem::replace(&mut self.wishes.0, true) {
            self.coordinator.handle_stop(now);
        }
        let n_saves = control.saves.load(Ordering::Acquire);
        while self.wishes.1 < n_saves {
            self.wishes.1 += 1;
            self.coordinator.handle_save(now);
        }
    }

    /// Does what the machines ask for, until they ask for nothing more.
    fn drive(&mut self, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<(), JobError> {
        loop {
            let now = Instant::now();
            if let Some(command) = self.supervisor.poll_command() {
                self.supervise(now, command)?;
            } else if let Some(command) = self.coordinator.poll_command() {
                self.coordinate(now, command, on_event)?;
            } else {
                return Ok(());
            }
        }
    }

    fn supervise(&mut self, now: Instant, command: supervisor::Command) -> Result<(), JobError> {
        match command {
            supervisor::Command::Send(report) => {
                if let Err(stale) = self.coordinator.handle_report(now, &report) {
                    tracing::warn!(%stale, "a report was refused");
                }
            }
            supervisor::Command::Spawn(worker) => self.node.spawn(worker)?,
            supervisor::Command::Kill(worker) => self.node.kill(worker)?,
            supervisor::Command::Tell(worker, order) => self.node.tell(worker, &order)?,
            supervisor::Command::Shutdown => self.over = true,
        }
        Ok(())
    }

    fn coordinate(
        &mut self,
        now: Instant,
        command: coordinator::Command,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<(), JobError> {
        match command {
            coordinator::Command::Send(_, order) => {
                if let Err(stale) = self.supervisor.handle_order(now, order) {
                    tracing::debug!(%stale, "an order was refused");
                }
            }
            // This coordinator does not outlive its ranks, nor they it: the disk has nothing to tell a successor.
            coordinator::Command::Persist(_) => {
                self.coordinator.handle_persisted(now, true);
                let formed = self.coordinator.record().formation.clone();
                if let Some(formation) = formed.filter(|formation| formation.generation > self.world) {
                    self.world = formation.generation;
                    self.events.write(&Happening::now(Term(1), What::World((&*formation).into())))?;
                }
            }
            coordinator::Command::Resumed(timeline) => {
                self.events.write(&Happening::now(Term(1), What::Incident((&timeline).into())))?;
                if timeline.cause.why != phalanx_strategies::elastic::incident::Why::Started {
                    on_event(&Event::Note(timeline.to_string()));
                }
            }
            coordinator::Command::Saved(checkpoint) => {
                self.events.write(&Happening::now(Term(1), What::Checkpoint(checkpoint)))?;
            }
            coordinator::Command::Ended(ending) => {
                self.events.write(&Happening::now(Term(1), What::Ended { ending: ending.clone() }))?;
                self.ending = Some(ending);
            }
        }
        Ok(())
    }

    fn hear(
        &mut self,
        now: Instant,
        event: NodeEvent,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<(), JobError> {
        match event {
            NodeEvent::Started(word) => {
                self.n_stillborn = 0;
                self.begun.insert(word.worker);
                self.supervisor.handle_started(now, word);
            }
            NodeEvent::Word(word) => self.supervisor.handle_word(now, word),
            NodeEvent::Exited(worker, ending, has_begun) => {
                self.n_stillborn += usize::from(!has_begun);
                if self.n_stillborn > STILLBORN_MAX {
                    return Err(self.stillborn(worker, ending));
                }
                self.supervisor.handle_exited(now, worker);
            }
            NodeEvent::Happened { generation, rank, event } => {
                if generation > self.chorus.0 {
                    while let Some(event) = self.chorus.1.next_as_it_is() {
                        on_event(&event);
                    }
                    self.chorus = (generation, Chorus::default());
                }
                if generation == self.chorus.0 {
                    self.chorus.1.hear(rank, event);
                }
                while let Some(event) = self.chorus.1.next() {
                    on_event(&event);
                }
            }
            NodeEvent::Done(report) => self.report = Some(report),
            NodeEvent::Failed(worker, excuse) => {
                let has_begun = self.begun.contains(&worker);
                let excuse = &self.excuse.get_or_insert((worker, excuse)).1;
                if !has_begun && excuse.is_input {
                    // Any other process would find the same.
                    let text = excuse.text.clone();
                    return Err(JobError::OfRank { rank: worker.member.slot, text, is_input: true });
                }
            }
            NodeEvent::Line(worker, text) => {
                on_event(&Event::Note(format!("{worker}: {text}")));
                self.last_line = Some(text);
            }
            NodeEvent::Woken => {}
        }
        Ok(())
    }

    fn stillborn(&mut self, worker: Worker, ending: ProcessEnding) -> JobError {
        if let Some((_, excuse)) = self.excuse.take() {
            return JobError::OfRank { rank: worker.member.slot, text: excuse.text, is_input: excuse.is_input };
        }
        let last = self.last_line.take().map_or(String::new(), |line| format!("; its last line was: {line}"));
        let how = format!("{worker} {ending}, and so did those before it{last}");
        JobError::RankLost { how, when: "before its first step".into(), checkpoint: None }
    }

    fn outcome(mut self) -> Result<Report, JobError> {
        if let Some((worker, excuse)) = self.excuse.take() {
            return Err(JobError::OfRank { rank: worker.member.slot, text: excuse.text, is_input: excuse.is_input });
        }
        match (self.ending.take(), self.report.take()) {
            (Some(Ending::Failed(why)), _) => Err(JobError::JobFailed(why)),
            (_, Some(report)) => Ok(report),
            (_, None) => Err(JobError::JobFailed("no rank has told how the run ended".into())),
        }
    }
}

/// Runs the ranks as processes that may die.
pub(crate) fn elastic(
    config: &JobConfig,
    model: ModelPlan,
    program: &Path,
    control: &Control,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    let output = &config.output;
    let saving = Saving::new(output, Vec::new());
    let (resume, warnings) = saving.find(&output.resume_from_checkpoint)?;
    warnings.into_iter().for_each(|w| on_event(&Event::Note(w)));
    let found = resume.as_deref().map(Stored::open).transpose()?;
    let start_from = found.as_ref().map(|c| (c.id().step, c.id().path.clone()));
    let checkpoint = found.map_or_else(Checkpoint::default, |c| Checkpoint {
        generation: Generation(c.id().generation),
        step: Step(c.id().step),
    });
    let mesh = config.parallel.mesh()?;
    let timing = config.elastic.timing();
    let begin = Begin {
        job: job_id(),
        worker: Worker::default(),
        seat: (mesh, 0),
        seat_bytes: 0,
        n_threads: config.precision.threads.unwrap_or_else(|| (available_threads() / mesh.size()).max(1)),
        yaml: config.to_yaml(),
        listen: None,
        secret: Vec::new(),
        peak_flops: peak_flops(model.spec.precision == Precision::Bf16),
        start_from,
        timing,
    };
    let local = Local {
        config,
        program: program.to_owned(),
        evaluates: config.data.val_set_size != ValSetSize::Nothing,
        policy: config.elastic.policy(mesh, model.n_microbatches, state_bytes(&model)?),
        model: &model,
        timing,
        n_slots: mesh.size() as u32 + config.elastic.spare_ranks as u32,
        checkpoint,
        begin,
        control,
    };
    local.run(on_event)
}
