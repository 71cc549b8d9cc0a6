//! State of a rank, shared by the control plane and the device thread: the state machine, the device's next tasks, and
//! the means to interrupt its waits.
//!
//! Both sides hold the lock for microseconds and never while waiting; the hot loop takes it twice per step. Everything
//! that needs no immediate answer is handled by the rank actor (`phalanx_actors::rank`), whose port this is.

use crate::control::Control;
use crate::error::JobError;
use crate::launch::channel::FrameSender;
use crate::rank::rank_messages::FromRank;
use crate::train::trainer::Member as TrainingMember;
use phalanx_actors::mesh_group::{GroupControl, Missing};
use phalanx_actors::rank::{Handle, RankPort};
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::identity::{Generation, Stale, Step};
use phalanx_strategies::elastic::member::{Command, Member};
use phalanx_strategies::elastic::message::{DesiredState, MemberPhase, MemberReport, Requests, WorldPlan};
use phalanx_strategies::elastic::progress::Progress;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::elastic::snapshot::Part;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// Tasks of the device thread.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Task {
    /// The outcome of the open step is known: commit or discard it.
    Settle(Option<Version>),
    /// Free the state of all other shards.
    Keep(Vec<Shard>),
    /// Join the world, and receive or send state.
    Join(Arc<WorldPlan>),
    /// Catch up while others train.
    CatchUp(Generation),
    /// Train, or finish if nothing is left to train.
    Train(Generation),
    /// The job is over.
    Exit,
}

/// See the [module](self).
pub(crate) struct RankState {
    inner: Mutex<Inner>,
    changed: Condvar,
    sender: Mutex<FrameSender>,
    control: Arc<Control>,
    progress_counter: ProgressCounter,
    /// The rank's actor.
    rank: OnceLock<Handle>,
}

struct Inner {
    member: Member,
    tasks: VecDeque<Task>,
    /// The latest world that the device was told to join.
    joined: Generation,
    /// Earlier worlds than this are left.
    left: Option<Generation>,
    /// The world in which the device trains.
    training: Option<Generation>,
    /// Parts of checkpoints that are being written.
    parts: Vec<Part>,
    /// Whether a status report is due.
    news: bool,
}

/// Pending notifications.
#[must_use]
struct News {
    /// Earlier worlds than this are left.
    left: Option<Generation>,
    /// A status report is due.
    report: bool,
}

impl RankState {
    /// The state of a member whose supervisor reads from `sender`; operator requests go to `control`.
    pub(crate) fn new(
        member: Member,
        sender: FrameSender,
        control: Arc<Control>,
        progress_counter: ProgressCounter,
    ) -> RankState {
        let inner = Inner {
            member,
            tasks: VecDeque::new(),
            joined: Generation(0),
            left: None,
            training: None,
            parts: Vec::new(),
            news: false,
        };
        RankState {
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            sender: Mutex::new(sender),
            control,
            progress_counter,
            rank: OnceLock::new(),
        }
    }

    /// Sets the actor that owns the groups of worlds.
    pub(crate) fn belongs_to(&self, rank: Handle) {
        let _ = self.rank.set(rank);
    }

    /// Sends another message to the supervisor.
    pub(crate) fn tell(&self, what: &FromRank) {
        what.deliver(&mut self.sender.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for the next task.
    pub(crate) fn next_task(&self) -> Task {
        let mut inner = self.lock();
        loop {
            if let Some(task) = inner.tasks.pop_front() {
                inner.training = match task {
                    Task::Train(generation) | Task::CatchUp(generation) => Some(generation),
                    _ => None,
                };
                return task;
            }
            inner.training = None;
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The device has joined a world with these groups: from now on a desired state to leave it wakes the device from
    /// any wait.
    pub(crate) fn entered(&self, generation: Generation, groups: Vec<Box<dyn GroupControl>>) {
        if let Some(rank) = self.rank.get() {
            rank.entered(generation, groups);
        }
    }

    /// The device has joined with its rank, and all planned transfers to it have arrived.
    pub(crate) fn healed(&self, world_plan: &WorldPlan, rank: usize) {
        self.with(|member| {
            let generation = world_plan.generation;
            member.handle_joined(generation)?;
            world_plan.transfers[rank].iter().try_for_each(|transfer| member.handle_fetched(generation, *transfer))
        })
        .unwrap_or_else(|stale| tracing::debug!(%stale, "healed after the world had ended"));
    }

    /// The device has joined to catch up beside the training members.
    pub(crate) fn joined_beside(&self, generation: Generation) {
        self.with(|member| member.handle_joined(generation))
            .unwrap_or_else(|stale| tracing::debug!(%stale, "joined to catch up after the world had ended"));
    }

    /// Whether its world trains, rather than only saving its base state.
    pub(crate) fn trains(&self) -> bool {
        self.lock().member.report().phase == MemberPhase::Running
    }

    /// A checkpoint of `step` is durable.
    pub(crate) fn saved(&self, step: u64) {
        let saved = |inner: &mut Inner| {
            let (done, rest) = inner.parts.drain(..).partition(|part| part.of.step.0 <= step);
            inner.parts = rest;
            let done: Vec<Part> = done;
            done.into_iter().for_each(|part| inner.member.handle_saved(part));
        };
        self.change(saved);
    }

    /// The work at the end of the job is done.
    pub(crate) fn finished(&self, generation: Generation) {
        if let Err(stale) = self.with(|member| member.handle_finished(generation)) {
            tracing::debug!(%stale, "finished after the world had ended");
        }
    }

    /// The world of this generation cannot go on here: the member at index `lost` cannot be reached, or the cause is
    /// unknown. Ignored if the world was ending anyway.
    pub(crate) fn broken(&self, generation: Generation, lost: Option<u32>, reason: &str) {
        let lost_in = |member: &Member| {
            let world_plan = member.assignment().map(|(world_plan, _)| world_plan).or(member.beside())?;
            world_plan.members().nth(lost? as usize)
        };
        self.with(|member| member.handle_broken(generation, lost_in(member), reason))
            .unwrap_or_else(|stale| tracing::debug!(%stale, "an earlier world failed"));
    }

    /// This member has failed permanently.
    pub(crate) fn failed(&self, reason: &str) {
        self.change(|inner| inner.member.handle_failed(reason));
    }

    fn in_training(&self, act: impl FnOnce(&mut Member, Generation) -> Result<(), Stale>) -> Result<(), JobError> {
        let mut outcome = Ok(());
        self.change(|inner| {
            // Only a training task has steps.
            let generation = inner.training.unwrap_or_default();
            outcome = act(&mut inner.member, generation);
        });
        outcome.map_err(JobError::Superseded)
    }

    fn with(&self, act: impl FnOnce(&mut Member) -> Result<(), Stale>) -> Result<(), Stale> {
        let mut outcome = Ok(());
        self.change(|inner| outcome = act(&mut inner.member));
        outcome
    }

    /// Does something, then what the machine asks for.
    fn change(&self, act: impl FnOnce(&mut Inner)) {
        let news = {
            let mut inner = self.lock();
            act(&mut inner);
            inner.drain(None);
            inner.take_news()
        };
        self.pass_on(news);
    }

    /// Tells the rank actor and the supervisor what a change was about.
    fn pass_on(&self, News { left, report }: News) {
        if let Some(left) = left {
            self.progress_counter.leave(left.0);
        }
        if let Some((rank, left)) = self.rank.get().zip(left) {
            rank.left(left);
        }
        if report {
            self.say();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RankPort for RankState {
    fn apply_desired_state(&self, desired_state: &DesiredState) {
        let news = {
            let mut inner = self.lock();
            if let Err(stale) = inner.member.handle_desired_state(desired_state) {
                tracing::debug!(%stale, "rejected a desired state");
                return;
            }
            if desired_state.requests.stop {
                self.control.stop();
            }
            self.control.saves.fetch_max(desired_state.requests.save, Ordering::AcqRel);
            self.control.pause.fetch_max(desired_state.requests.pause.0, Ordering::AcqRel);
            inner.drain(desired_state.world_plan.as_ref());
            inner.take_news()
        };
        self.changed.notify_all();
        self.pass_on(news);
    }

    fn say(&self) {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let status_report = MemberReport { progress: self.progress_counter.read(), ..self.lock().member.report() };
        // Whoever does not listen any more is about to end this process.
        let _ = sender.send(&FromRank::StatusReport(status_report));
    }

    fn progress(&self) -> Progress {
        self.progress_counter.read()
    }

    fn generation(&self) -> Generation {
        self.lock().member.generation()
    }

    fn waits_for(&self, missing: &[Missing]) {
        let missing: Vec<String> = missing.iter().map(Missing::to_string).collect();
        tracing::info!(worker = %self.lock().member.worker(), missing = missing.join("; "), "waiting for peers");
    }
}

impl Inner {
    fn take_news(&mut self) -> News {
        News { left: self.left.take(), report: std::mem::take(&mut self.news) }
    }

    /// Does at once what need not wait for the device, and leaves it the rest.
    fn drain(&mut self, world_plan: Option<&Arc<WorldPlan>>) {
        let mut train = None;
        while let Some(command) = self.member.poll_command() {
            match command {
                Command::Abort(generation) => {
                    self.left = Some(generation);
                    self.parts.clear();
                    // The device may not have noticed yet.
                    self.training = None;
                    // What was to be done in the world that is left is not done; its outcome stands.
                    self.tasks.retain(|task| matches!(task, Task::Settle(_) | Task::Keep(_)));
                }
                // In training the device knows by itself; out of it the outcome comes with the next world.
                Command::Apply(_) if self.training.is_some() => {}
                Command::Apply(version) => self.tasks.push_back(Task::Settle(Some(version))),
                Command::Discard => self.tasks.push_back(Task::Settle(None)),
                Command::Keep(shards) => self.tasks.push_back(Task::Keep(shards)),
                Command::Compute { generation, .. } | Command::Finish(generation) => train = Some(generation),
                Command::Save(part) => {
                    self.parts.push(part);
                    train = Some(part.of.generation);
                }
                Command::CatchUp(generation) => self.tasks.push_back(Task::CatchUp(generation)),
                Command::Exit => self.tasks.push_back(Task::Exit),
                // The device is told to join below; it fetches when it does, and votes when it has computed.
                Command::Join(_) | Command::Fetch { .. } | Command::Vote(..) => {}
                Command::Report => self.news = true,
            }
        }
        if let Some(world_plan) = world_plan.filter(|f| f.generation > self.joined) {
            let me = self.member.report().worker;
            if world_plan.member_of(me).is_some() {
                self.joined = world_plan.generation;
                self.tasks.push_back(Task::Join(Arc::clone(world_plan)));
            }
        }
        let queued = |generation| self.tasks.contains(&Task::Train(generation));
        if let Some(generation) = train.filter(|g| self.training != Some(*g) && !queued(*g)) {
            self.tasks.push_back(Task::Train(generation));
        }
    }
}

impl TrainingMember for RankState {
    fn computed(&self, step: u64) -> Result<(), JobError> {
        self.in_training(|member, generation| {
            member.handle_entered(generation, Step(step))?;
            member.handle_computed(generation, Step(step))
        })
    }

    fn committed(&self, step: u64, requests: Requests) -> Result<(), JobError> {
        self.in_training(|member, generation| member.handle_committed(generation, Step(step), requests))
    }

    fn caught_up(&self, step: u64) -> Result<(), JobError> {
        self.in_training(|member, generation| {
            let base = member.beside().map(|world_plan| world_plan.base).unwrap_or_default();
            member.handle_caught_up(generation, Version { step: Step(step), ..base })
        })
    }

    fn followed(&self, step: u64) -> Result<(), JobError> {
        self.in_training(|member, generation| member.handle_followed(generation, Step(step)))
    }

    fn outcome(&self, step: u64) -> Result<(), JobError> {
        self.in_training(|member, generation| member.handle_outcome(generation, Step(step)))
    }
}
