//! The actor of a rank. It owns the rank's state machine (`phalanx_strategies::elastic::member`): it handles desired states,
//! sends heartbeats independently of the device, assigns tasks to the device thread, and starts a [`MeshGroup`] for each group
//! of the world that the device has joined.
//!
//! The device thread shares no state with the actor. It receives [`Task`]s, writes the records of its steps to a [`step_log`],
//! and sends everything else as a [`DeviceEvent`].
//!
//! Invariants:
//! - `RANK-ACTOR-1` Leaving a world aborts all its process groups, including groups created after the abort.
//! - `RANK-ACTOR-2` A rank that waits longer than its patience reports the awaited peers, once per group and set of peers.
//! - `RANK-ACTOR-3` Records that the device writes before the end of a world is announced are handled before the announcement.

use crate::control::{ControlThread, Guardian, deliver};
use crate::mesh_group::{Abort, Awaited, GroupFailed, MeshGroup, Missing, OwnedGroup, WhoIsMissing};
use crate::step_log::{Record, StepReader, StepWriter, step_log};
use actix::{Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message, WrapFuture};
use phalanx_strategies::elastic::checkpoint::Part;
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::copies::Difference;
use phalanx_strategies::elastic::identity::{Generation, Stale, Step};
use phalanx_strategies::elastic::member::{Command, Member};
use phalanx_strategies::elastic::message::{
    DesiredState, MemberPhase, MemberReport, NotFinite, Requests, Settled, WorldPlan,
};
use phalanx_strategies::elastic::progress::{At, Progress};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::Axes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A task of a device thread. Tasks run in order.
#[derive(Debug)]
pub enum Task {
    /// The outcome of the open step is known: commit or discard it.
    Settle(Option<Version>),
    /// Free the state of all other shards.
    Keep(Vec<Shard>),
    /// Join the world, and receive or send state.
    Join(Arc<WorldPlan>),
    /// Catch up while the other ranks train.
    CatchUp(StepWriter),
    /// Train, or finish if no step is left.
    Train {
        /// Log of the steps.
        steps: StepWriter,
        /// Whether the world trains, rather than only saving its base state.
        trains: bool,
    },
    /// The job is over.
    Exit,
}

/// A rank actor's access to its device thread and its supervisor. No method waits for the device.
pub trait RankPort: Send + 'static {
    /// Gives the device a task.
    fn assign(&mut self, task: Task);

    /// Ends all worlds before this generation: the device skips their tasks and may stop running ones.
    fn leave(&mut self, generation: Generation);

    /// Passes the operators' requests to the device.
    fn request(&mut self, requests: Requests);

    /// Sends a status report to the supervisor, with the progress of the device.
    fn report(&mut self, status_report: MemberReport);

    /// Progress of the device.
    fn progress(&self) -> Progress;

    /// Reports the peers that the device waits for.
    fn waits_for(&mut self, missing: &[Missing]);
}

/// Aborts a world whose groups are not connected yet.
pub type AbortWorld = Box<dyn Fn(&str) + Send>;

/// An event from a device thread to its actor, besides its step records.
pub enum DeviceEvent {
    /// The device is connecting the groups of a world.
    Connects(Generation, AbortWorld),
    /// The device has connected the groups of a world; the actor owns them from now on.
    Connected(Generation, Vec<Box<dyn OwnedGroup>>),
    /// The device has joined with its rank and received all planned transfers.
    Healed(Generation),
    /// The device has joined to catch up beside the training members.
    JoinedBeside(Generation),
    /// The step log has records to handle before the next heartbeat.
    Logged,
    /// A checkpoint of this step is durable.
    Saved(u64),
    /// The world could not save the checkpoint of this step, for this reason.
    NotSaved(Generation, u64, String),
    /// The work at the end of the job is done.
    Finished(Generation),
    /// A world failed at this rank: the member at this index cannot be reached, or the cause is unknown. Ignored if the world
    /// is already ending.
    Broken(Generation, Option<u32>, String),
    /// Copies of the state of a world differ, as the text says.
    Corrupt(Generation, Difference, String),
    /// The loss or gradient of a step in this world is not finite, although the copies of the state agree.
    NotFinite(Generation, NotFinite, String),
    /// All copies of the state of a world agree after a step at which they differed before.
    Settled(Generation, Settled),
    /// This member has failed permanently.
    Failed(String),
}

/// Intervals of a rank's heartbeats and reports.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    /// Time between two heartbeats.
    pub interval: Duration,
    /// How long the device waits for peers before the rank reports them.
    pub patience: Duration,
}

/// Runs a rank's machine beside its device thread, which it gives one task at a time.
pub struct Rank {
    member: Member,
    port: Box<dyn RankPort>,
    life: Life,
    guardian: Guardian,
    /// The latest world that the device was assigned to join.
    joins: Generation,
    /// The step log of the world in which the device trains or catches up.
    steps: Option<StepReader>,
    /// Parts of checkpoints that are being written.
    parts: Vec<Part>,
    /// The world that the device is connecting.
    connects: Option<(Generation, AbortWorld)>,
    /// The world that the device has joined.
    world: Option<(Generation, Vec<Addr<MeshGroup>>)>,
    /// The device's progress while it waits, and the start of the wait.
    waits: Option<(Progress, Instant)>,
    /// Missing ranks already reported for this world.
    reported: Vec<(Axes, Awaited, Vec<u32>)>,
}

/// Name of the thread that sends a rank's heartbeats.
pub const THREAD: &str = "rank";

/// Reason for aborting the groups of an earlier world.
const LATER: &str = "a later world has begun";

/// The cause of a change of the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// A desired state: the device needs a task.
    DesiredState,
    /// The device itself, which continues without a task.
    Device,
}

/// Handle of a rank actor for other threads. Calls block while the mailbox is full. Dropping the last handle ends the thread.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Keeps the thread alive.
    _thread: ControlThread,
    rank: Addr<Rank>,
}

struct DesiredStateArrived(DesiredState);

impl Message for DesiredStateArrived {
    type Result = ();
}

impl Message for DeviceEvent {
    type Result = ();
}

impl Handle {
    /// Starts the actor of this member on a thread of its own.
    ///
    /// # Errors
    /// When the system cannot provide a thread.
    pub async fn start(member: Member, port: Box<dyn RankPort>, life: Life) -> std::io::Result<Handle> {
        let thread = ControlThread::start(THREAD)?;
        let start = move |guardian: Guardian| async move {
            let rank = Rank {
                member,
                port,
                life,
                guardian: guardian.clone(),
                joins: Generation(0),
                steps: None,
                parts: vec![],
                connects: None,
                world: None,
                waits: None,
                reported: vec![],
            };
            guardian.start("rank", |_| rank)
        };
        let rank = thread.run(start).await.map_err(std::io::Error::other)?;
        Ok(Handle { _thread: thread, rank })
    }

    /// Delivers a desired state.
    pub fn apply_desired_state(&self, desired_state: DesiredState) {
        deliver(&self.rank, DesiredStateArrived(desired_state));
    }

    /// Delivers an event of the device.
    pub fn tell(&self, event: DeviceEvent) {
        deliver(&self.rank, event);
    }
}

impl Rank {
    fn apply_desired_state(&mut self, desired_state: &DesiredState, ctx: &mut Context<Self>) -> Result<(), Stale> {
        // RANK-ACTOR-3: a closed log rejects all votes and commits of the device.
        if self.member.ends_world(desired_state)?
            && let Some(steps) = &self.steps
        {
            steps.close(desired_state.id.generation);
        }
        self.read_steps(ctx);
        self.member.handle_desired_state(desired_state)?;
        self.port.request(desired_state.requests);
        self.obey(Cause::DesiredState, ctx);
        if let Some(world_plan) = desired_state.world_plan.as_ref().filter(|plan| plan.generation > self.joins)
            && world_plan.member_of(self.member.worker()).is_some()
        {
            self.joins = world_plan.generation;
            self.port.assign(Task::Join(Arc::clone(world_plan)));
        }
        Ok(())
    }

    /// Handles the device's step records.
    fn read_steps(&mut self, ctx: &mut Context<Self>) {
        let Some(mut steps) = self.steps.take() else { return };
        let generation = steps.generation();
        while let Some(record) = steps.read() {
            if let Err(stale) = self.handle_record(generation, record) {
                tracing::warn!(%stale, ?record, "ignored a step record of an ended world");
            }
        }
        self.steps = Some(steps);
        self.obey(Cause::Device, ctx);
    }

    fn handle_record(&mut self, generation: Generation, record: Record) -> Result<(), Stale> {
        let member = &mut self.member;
        match record {
            Record::Computed(step) => {
                member.handle_entered(generation, step)?;
                member.handle_computed(generation, step)
            }
            Record::Committed(step, requests) => member.handle_committed(generation, step, requests),
            Record::Stopped(step) => member.handle_stopped(generation, step),
            Record::CaughtUp(step) => {
                let base = member.beside().map(|world_plan| world_plan.base).unwrap_or_default();
                member.handle_caught_up(generation, Version { step, ..base })
            }
            Record::Followed(step) => member.handle_followed(generation, step),
            Record::Outcome(step) => member.handle_outcome(generation, step),
        }
    }

    fn handle_device_event(&mut self, event: DeviceEvent, ctx: &mut Context<Self>) -> Result<(), Stale> {
        match event {
            DeviceEvent::Connects(generation, abort) => {
                (self.connects, self.reported) = (Some((generation, abort)), Vec::new());
                self.leave(self.member.generation(), LATER, ctx);
            }
            DeviceEvent::Connected(generation, groups) => {
                let (rank, interval) = (ctx.address(), self.life.interval);
                let start = |group| {
                    let rank = rank.clone().recipient();
                    self.guardian.start("mesh group", |_| MeshGroup::new(group, generation, rank, interval))
                };
                let groups = groups.into_iter().map(start).collect();
                self.leave(generation, LATER, ctx);
                (self.connects, self.world) = (None, Some((generation, groups)));
                self.leave(self.member.generation(), LATER, ctx);
            }
            DeviceEvent::Healed(generation) => {
                self.member.handle_joined(generation)?;
                let assignment = self.member.assignment();
                let transfers = assignment.map(|(plan, rank)| plan.transfers[rank].clone()).unwrap_or_default();
                transfers.into_iter().try_for_each(|transfer| self.member.handle_fetched(generation, transfer))?;
            }
            DeviceEvent::JoinedBeside(generation) => self.member.handle_joined(generation)?,
            DeviceEvent::Logged => {}
            DeviceEvent::Saved(step) => {
                let ended: Vec<Part> = self.parts.extract_if(.., |part| part.of.step.0 <= step).collect();
                // Saves of earlier steps have failed.
                let durable = ended.into_iter().filter(|part| part.of.step.0 == step);
                durable.for_each(|part| self.member.handle_saved(part));
            }
            DeviceEvent::NotSaved(generation, step, reason) => {
                self.member.handle_unsaved(generation, Step(step), &reason)?;
            }
            DeviceEvent::Finished(generation) => self.member.handle_finished(generation)?,
            DeviceEvent::Broken(generation, lost, reason) => {
                let world_plan = self.member.assignment().map(|(world_plan, _)| world_plan).or(self.member.beside());
                let lost = world_plan.and_then(|plan| plan.members().nth(lost? as usize));
                self.member.handle_broken(generation, lost, &reason)?;
                // Releases the peers that wait for this rank.
                self.leave(Generation(generation.0 + 1), &reason, ctx);
            }
            DeviceEvent::NotFinite(generation, found, reason) => {
                self.member.handle_not_finite(generation, found, &reason)?;
                self.leave(Generation(generation.0 + 1), &reason, ctx);
            }
            DeviceEvent::Corrupt(generation, found, reason) => {
                self.member.handle_corrupt(generation, found, &reason)?;
                self.leave(Generation(generation.0 + 1), &reason, ctx);
            }
            DeviceEvent::Settled(generation, settled) => self.member.handle_settled(generation, settled)?,
            DeviceEvent::Failed(reason) => self.member.handle_failed(&reason),
        }
        Ok(())
    }

    /// Performs the commands of the state machine.
    fn obey(&mut self, cause: Cause, ctx: &mut Context<Self>) {
        let (mut starts, mut report) = (None, false);
        while let Some(command) = self.member.poll_command() {
            match command {
                Command::Abort(generation) => {
                    self.parts.clear();
                    if let Some(steps) = self.steps.take() {
                        steps.close(generation);
                    }
                    self.port.leave(generation);
                    self.leave(generation, LATER, ctx);
                }
                Command::Report => report = true,
                Command::Save(part) => {
                    self.parts.push(part);
                    starts = Some(part.of.generation);
                }
                Command::Compute { generation, .. } | Command::Finish(generation) => starts = Some(generation),
                Command::CatchUp(generation) => {
                    let steps = self.new_steps(generation);
                    self.port.assign(Task::CatchUp(steps));
                }
                // While training, the device settles its step itself; otherwise the outcome comes with the next world.
                Command::Apply(_) if cause == Cause::Device => {}
                Command::Apply(version) => self.port.assign(Task::Settle(Some(version))),
                Command::Discard => self.port.assign(Task::Settle(None)),
                Command::Keep(shards) => self.port.assign(Task::Keep(shards)),
                Command::Exit => self.port.assign(Task::Exit),
                // Covered by the device's tasks: it is assigned to join with the plan, fetches while joining, and votes
                // after computing.
                Command::Join(_) | Command::Fetch { .. } | Command::Vote(..) => {}
            }
        }
        if let Some(generation) = starts.filter(|_| cause == Cause::DesiredState) {
            let trains = self.member.phase() == MemberPhase::Running;
            let steps = self.new_steps(generation);
            self.port.assign(Task::Train { steps, trains });
        }
        if report {
            self.port.report(self.member.report());
        }
    }

    fn new_steps(&mut self, generation: Generation) -> StepWriter {
        let (writer, reader) = step_log(generation);
        self.steps = Some(reader);
        writer
    }

    /// Aborts the groups of worlds before this generation (`RANK-ACTOR-1`).
    fn leave(&mut self, generation: Generation, reason: &str, ctx: &mut Context<Self>) {
        if let Some((_, abort)) = self.connects.take_if(|(before, _)| *before < generation) {
            abort(reason);
        }
        let Some((_, groups)) = self.world.take_if(|(before, _)| *before < generation) else { return };
        for group in groups {
            // The message is in the mailbox when `send` returns, or enters it once there is room.
            let sent = group.send(Abort(reason.into()));
            ctx.spawn(async move { sent.await.unwrap_or_default() }.into_actor(self));
        }
    }

    fn heartbeat(&mut self, ctx: &mut Context<Self>) {
        self.read_steps(ctx);
        self.port.report(self.member.report());
        self.report_waits(ctx);
    }

    /// Reports the peers that the device has waited for longer than its patience (`RANK-ACTOR-2`).
    fn report_waits(&mut self, ctx: &mut Context<Self>) {
        let (now, progress) = (Instant::now(), self.port.progress());
        if self.waits.is_none_or(|(before, _)| before != progress) {
            self.waits = matches!(progress.at, At::Waits(_)).then_some((progress, now));
        }
        let is_long = self.waits.is_some_and(|(_, since)| now >= since + self.life.patience);
        let Some((_, groups)) = self.world.as_ref().filter(|_| is_long) else { return };
        let asked: Vec<_> = groups.iter().map(|group| group.send(WhoIsMissing)).collect();
        let answers = async move {
            let mut missing = Vec::new();
            for answer in asked {
                missing.extend(answer.await.into_iter().flatten());
            }
            missing
        };
        ctx.spawn(answers.into_actor(self).map(|missing, rank, _| rank.report_missing(missing)));
    }

    fn report_missing(&mut self, mut missing: Vec<Missing>) {
        let key = |missing: &Missing| (missing.axes, missing.behind.awaited, missing.behind.ranks.clone());
        missing.retain(|missing| !self.reported.contains(&key(missing)));
        self.reported.extend(missing.iter().map(key));
        if !missing.is_empty() {
            self.port.waits_for(&missing);
        }
    }
}

impl Actor for Rank {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        self.heartbeat(ctx);
        ctx.run_interval(self.life.interval, Rank::heartbeat);
    }
}

impl Handler<DesiredStateArrived> for Rank {
    type Result = ();

    fn handle(&mut self, DesiredStateArrived(desired_state): DesiredStateArrived, ctx: &mut Context<Self>) {
        if let Err(stale) = self.apply_desired_state(&desired_state, ctx) {
            tracing::debug!(%stale, "rejected a desired state");
        }
    }
}

impl Handler<DeviceEvent> for Rank {
    type Result = ();

    fn handle(&mut self, event: DeviceEvent, ctx: &mut Context<Self>) {
        self.read_steps(ctx);
        if let Err(stale) = self.handle_device_event(event, ctx) {
            tracing::debug!(%stale, "ignored a device event of an ended world");
        }
        self.obey(Cause::Device, ctx);
    }
}

impl Handler<GroupFailed> for Rank {
    type Result = ();

    fn handle(&mut self, GroupFailed { generation, reason }: GroupFailed, ctx: &mut Context<Self>) {
        self.handle(DeviceEvent::Broken(generation, None, reason), ctx);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh_group::Behind;
    use crate::mesh_group::tests::Fake;
    use phalanx_strategies::elastic::checkpoint::Checkpoint;
    use phalanx_strategies::elastic::identity::{Incarnation, JobId, MemberId, NodeId, Term, Worker};
    use phalanx_strategies::elastic::member::Schedule;
    use phalanx_strategies::elastic::message::{DesiredStateId, Stage};
    use phalanx_strategies::elastic::progress::Wait;
    use phalanx_strategies::elastic::recovery::from_disk;
    use phalanx_strategies::elastic::shadow::place;
    use phalanx_strategies::mesh::Mesh;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc;

    const WORKER: Worker = Worker { member: MemberId { node: NodeId(0), slot: 0 }, incarnation: Incarnation(1) };

    /// Records the calls of a port. The device waits; the test advances its progress counter.
    #[derive(Clone, Default)]
    struct Notes {
        ticks: Arc<AtomicU64>,
        reports: Arc<Mutex<Vec<MemberReport>>>,
        missing: Arc<Mutex<Vec<String>>>,
    }

    struct Port(Notes, mpsc::Sender<Task>);

    impl RankPort for Port {
        fn assign(&mut self, task: Task) {
            self.1.send(task).unwrap();
        }

        fn leave(&mut self, _: Generation) {}

        fn request(&mut self, _: Requests) {}

        fn report(&mut self, status_report: MemberReport) {
            self.0.reports.lock().unwrap().push(status_report);
        }

        fn progress(&self) -> Progress {
            Progress { ticks: self.0.ticks.load(Ordering::SeqCst), at: At::Waits(Wait::default()) }
        }

        fn waits_for(&mut self, missing: &[Missing]) {
            self.0.missing.lock().unwrap().extend(missing.iter().map(Missing::to_string));
        }
    }

    fn group(behind: &[u32]) -> Fake {
        let behind = Behind { awaited: Awaited::Collective, number: 6, ranks: behind.to_vec() };
        let behind = if behind.ranks.is_empty() { vec![] } else { vec![behind] };
        Fake { behind: Arc::new(Mutex::new(behind)), ..Fake::default() }
    }

    fn owned(groups: &[&Fake]) -> Vec<Box<dyn OwnedGroup>> {
        groups.iter().map(|group| Box::new((*group).clone()) as Box<dyn OwnedGroup>).collect()
    }

    fn desired_state(generation: u64, stage: Stage, world_plan: Option<&Arc<WorldPlan>>) -> DesiredState {
        let id = DesiredStateId { term: Term(1), generation: Generation(generation), stage, revision: 0 };
        let (job, world_plan, evict) = (JobId(1), world_plan.cloned(), vec![]);
        DesiredState { job, id, world_plan, evict, requests: Requests::default(), release: None, refused: None }
    }

    /// A world of one rank, from the initial weights.
    fn world_plan(generation: u64) -> Arc<WorldPlan> {
        let holds = place(&Mesh::ONE, &[WORKER], false);
        Arc::new(WorldPlan {
            generation: Generation(generation),
            mesh: Mesh::ONE,
            assignments: vec![WORKER],
            catching_up: vec![],
            guests: vec![],
            addresses: vec![None],
            base: Version { lineage: Generation(generation), step: Step(0) },
            voted_in: Generation(generation),
            transfers: from_disk(&holds, Checkpoint::default()),
            holds,
            n_saves: 0,
            rests: false,
            disputed: vec![],
        })
    }

    async fn start(patience: Duration) -> (Notes, mpsc::Receiver<Task>, Handle) {
        let (notes, (sender, tasks)) = (Notes::default(), mpsc::channel());
        let life = Life { interval: Duration::from_millis(5), patience };
        let member = Member::new(JobId(1), WORKER, None, Schedule::default());
        let port = Box::new(Port(notes.clone(), sender));
        (notes, tasks, Handle::start(member, port, life).await.unwrap())
    }

    async fn until(is_so: impl Fn() -> bool) {
        let wait = async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap();
    }

    const LONG: Duration = Duration::from_secs(600);

    // RANK-ACTOR-1
    #[tokio::test]
    async fn leaving_a_world_aborts_its_groups_and_no_group_of_the_next_world() {
        let (notes, _tasks, rank) = start(LONG).await;
        let (first, second, next) = (group(&[]), group(&[]), group(&[]));
        rank.apply_desired_state(desired_state(1, Stage::Stop, None));
        rank.tell(DeviceEvent::Connected(Generation(1), owned(&[&first, &second])));

        rank.apply_desired_state(desired_state(2, Stage::Stop, None));
        rank.tell(DeviceEvent::Connected(Generation(2), owned(&[&next])));

        until(|| second.aborted.lock().unwrap().len() == 1).await;
        let n_reports = notes.reports.lock().unwrap().len();
        until(|| notes.reports.lock().unwrap().len() > n_reports + 3).await;
        assert_eq!(*first.aborted.lock().unwrap(), ["a later world has begun"]);
        assert!(next.aborted.lock().unwrap().is_empty());
    }

    // RANK-ACTOR-1
    #[tokio::test]
    async fn groups_of_an_ended_world_are_aborted_while_connecting_and_when_connected() {
        let (_, _tasks, rank) = start(LONG).await;
        let (late, reasons) = (group(&[]), Arc::new(Mutex::new(Vec::new())));
        let aborts = reasons.clone();
        let abort = Box::new(move |reason: &str| aborts.lock().unwrap().push(reason.to_owned()));
        rank.tell(DeviceEvent::Connects(Generation(1), abort));
        rank.apply_desired_state(desired_state(2, Stage::Stop, None));
        until(|| *reasons.lock().unwrap() == ["a later world has begun"]).await;

        rank.tell(DeviceEvent::Connected(Generation(1), owned(&[&late])));

        until(|| !late.aborted.lock().unwrap().is_empty()).await;
    }

    // RANK-ACTOR-1
    #[tokio::test]
    async fn broken_world_aborts_its_groups() {
        let (_, _tasks, rank) = start(LONG).await;
        let (plan, of_world) = (world_plan(1), group(&[]));
        rank.apply_desired_state(desired_state(1, Stage::Form, Some(&plan)));
        rank.tell(DeviceEvent::Connected(Generation(1), owned(&[&of_world])));

        rank.tell(DeviceEvent::Broken(Generation(1), None, "a connection broke".into()));

        until(|| *of_world.aborted.lock().unwrap() == ["a connection broke"]).await;
    }

    #[tokio::test]
    async fn failure_that_a_group_notices_by_itself_breaks_its_world() {
        let (notes, _tasks, rank) = start(LONG).await;
        let (plan, failed, other) = (world_plan(1), group(&[]), group(&[]));
        rank.apply_desired_state(desired_state(1, Stage::Form, Some(&plan)));
        rank.tell(DeviceEvent::Connected(Generation(1), owned(&[&failed, &other])));

        *failed.failure.lock().unwrap() = Some("NCCL: remote process exited".into());

        until(|| *other.aborted.lock().unwrap() == ["NCCL: remote process exited"]).await;
        let broken = || notes.reports.lock().unwrap().iter().find_map(|report| report.broken.clone());
        until(|| broken().is_some_and(|broken| broken.reason == "NCCL: remote process exited")).await;
    }

    // RANK-ACTOR-2
    #[tokio::test]
    async fn missing_ranks_are_reported_once_and_again_when_they_change() {
        let (notes, _tasks, rank) = start(Duration::from_millis(20)).await;
        let of_world = group(&[1]);
        let missing = || notes.missing.lock().unwrap().clone();
        rank.tell(DeviceEvent::Connected(Generation(1), owned(&[&of_world])));

        until(|| missing().len() == 1).await;
        for tick in 1..10 {
            notes.ticks.store(tick, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        assert_eq!(missing(), ["rank 1 has not entered collective #6 on dp_shard"]);
        of_world.behind.lock().unwrap()[0].ranks = vec![2];

        until(|| missing().len() == 2).await;
        assert_eq!(missing()[1], "rank 2 has not entered collective #6 on dp_shard");
    }

    // RANK-ACTOR-2
    #[tokio::test]
    async fn missing_ranks_are_not_reported_before_the_patience_ends() {
        let (notes, _tasks, rank) = start(LONG).await;
        rank.tell(DeviceEvent::Connected(Generation(1), owned(&[&group(&[1])])));

        until(|| notes.reports.lock().unwrap().len() > 10).await;

        assert!(notes.missing.lock().unwrap().is_empty());
    }

    // RANK-ACTOR-3
    #[tokio::test]
    async fn records_before_the_end_of_a_world_are_reported_and_later_ones_are_rejected() {
        let (notes, tasks, rank) = start(LONG).await;
        let plan = world_plan(1);
        rank.apply_desired_state(desired_state(1, Stage::Form, Some(&plan)));
        rank.tell(DeviceEvent::Healed(Generation(1)));
        rank.apply_desired_state(desired_state(1, Stage::Run, Some(&plan)));
        let trains = |task| match task {
            Task::Train { steps, trains: true } => Some(steps),
            _ => None,
        };
        let mut steps = tasks.iter().find_map(trains).unwrap();
        for step in 1..=2 {
            steps.write(Record::Computed(Step(step))).unwrap();
            steps.write(Record::Committed(Step(step), Requests::default())).unwrap();
        }
        steps.write(Record::Computed(Step(3))).unwrap();

        rank.apply_desired_state(desired_state(2, Stage::Stop, None));

        let reported = || notes.reports.lock().unwrap().iter().find(|report| report.generation.0 == 2).cloned();
        until(|| reported().is_some()).await;
        let commit_state = reported().unwrap().commit_state;
        assert_eq!(commit_state.applied.map(|version| version.step), Some(Step(2)));
        assert_eq!(commit_state.voted.map(|vote| vote.step), Some(Step(3)));
        let stale = Stale::Generation { found: Generation(1), have: Generation(2) };
        assert_eq!(steps.write(Record::Committed(Step(3), Requests::default())), Err(stale));
    }

    #[tokio::test]
    async fn device_event_waits_when_the_mailbox_is_full() {
        let (notes, _tasks, rank) = start(LONG).await;

        let many = tokio::task::spawn_blocking(move || {
            (1..=1000).for_each(|_| rank.tell(DeviceEvent::Logged));
            rank.tell(DeviceEvent::Failed("the last one".into()));
            rank
        });
        let _rank = many.await.unwrap();

        until(|| notes.reports.lock().unwrap().iter().any(|report| report.failure.is_some())).await;
    }
}
