//! A rank as the control plane and the device thread see it together: the pure machine, what the device is to do next, and
//! what stops it where it waits.
//!
//! Both sides take the lock for microseconds and never while they wait for somebody. In the hot loop that is twice a step.
//! Whatever need not be answered at once is the rank actor's (`phalanx_actors::rank`), of which this is the desk.

use crate::control::Control;
use crate::error::JobError;
use crate::launch::channel::FrameSender;
use crate::rank::words::FromRank;
use crate::train::trainer::Member as TrainingMember;
use phalanx_actors::mesh_group::{Communicator, Missing};
use phalanx_actors::rank::{Desk, Handle};
use phalanx_device::pulse::Pulse;
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::identity::{Generation, Stale, Step};
use phalanx_strategies::elastic::member::{Command, Member};
use phalanx_strategies::elastic::message::{Formation, MemberPhase, MemberReport, Order, Wishes};
use phalanx_strategies::elastic::progress::Progress;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::elastic::snapshot::Part;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// What the device thread does next.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Task {
    /// The outcome of the open step is known: it counts, or not.
    Settle(Option<Version>),
    /// Free the state of all other shards.
    Keep(Vec<Shard>),
    /// Join the world, and get or give state.
    Join(Arc<Formation>),
    /// Catch up while others train.
    Learn(Generation),
    /// Train, or finish if nothing is left to train.
    Train(Generation),
    /// The job is over.
    Exit,
}

/// See the [module](self).
pub(crate) struct Cell {
    inner: Mutex<Inner>,
    changed: Condvar,
    sender: Mutex<FrameSender>,
    control: Arc<Control>,
    pulse: Pulse,
    /// The actor beside the device.
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
    /// Whether the supervisor is to be told something.
    news: bool,
}

/// What others must be told of.
#[must_use]
struct News {
    /// Earlier worlds than this are left.
    left: Option<Generation>,
    /// The supervisor is to hear where this member is.
    report: bool,
}

impl Cell {
    /// A member whose supervisor listens at the other end of `sender`; wishes of the operator go to `control`.
    pub(crate) fn new(member: Member, sender: FrameSender, control: Arc<Control>, pulse: Pulse) -> Cell {
        let inner = Inner {
            member,
            tasks: VecDeque::new(),
            joined: Generation(0),
            left: None,
            training: None,
            parts: Vec::new(),
            news: false,
        };
        Cell {
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            sender: Mutex::new(sender),
            control,
            pulse,
            rank: OnceLock::new(),
        }
    }

    /// From now on the groups of worlds belong to this actor.
    pub(crate) fn belongs_to(&self, rank: Handle) {
        let _ = self.rank.set(rank);
    }

    /// Tells the supervisor something else.
    pub(crate) fn tell(&self, what: &FromRank) {
        what.deliver(&mut self.sender.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for the next task.
    pub(crate) fn next_task(&self) -> Task {
        let mut inner = self.lock();
        loop {
            if let Some(task) = inner.tasks.pop_front() {
                inner.training = match task {
                    Task::Train(generation) | Task::Learn(generation) => Some(generation),
                    _ => None,
                };
                return task;
            }
            inner.training = None;
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The device has joined a world and has these groups there: from now on an order to leave it wakes the device wherever it
    /// waits.
    pub(crate) fn entered(&self, generation: Generation, groups: Vec<Box<dyn Communicator>>) {
        if let Some(rank) = self.rank.get() {
            rank.entered(generation, groups);
        }
    }

    /// The device has its seat, and all pieces of state that the world's formation names for it have arrived.
    pub(crate) fn healed(&self, formation: &Formation, rank: usize) {
        self.with(|member| {
            let generation = formation.generation;
            member.handle_joined(generation)?;
            formation.transfers[rank].iter().try_for_each(|transfer| member.handle_fetched(generation, *transfer))
        })
        .unwrap_or_else(|stale| tracing::debug!(%stale, "healed too late"));
    }

    /// The device has its place beside those who train.
    pub(crate) fn seated(&self, generation: Generation) {
        self.with(|member| member.handle_joined(generation))
            .unwrap_or_else(|stale| tracing::debug!(%stale, "came too late to learn"));
    }

    /// Whether its world is to train, rather than only to save what it has.
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

    /// All that belongs to the end of the job is done.
    pub(crate) fn finished(&self, generation: Generation) {
        if let Err(stale) = self.with(|member| member.handle_finished(generation)) {
            tracing::debug!(%stale, "finished too late");
        }
    }

    /// The world of this generation cannot go on here: `lost`, by its position among the members, cannot be reached, or
    /// nobody knows what broke it. If the world was to end anyhow, that is no news.
    pub(crate) fn broken(&self, generation: Generation, lost: Option<u32>, reason: &str) {
        let lost_in = |member: &Member| {
            let formation = member.seat().map(|(formation, _)| formation).or(member.beside())?;
            formation.members().nth(lost? as usize)
        };
        self.with(|member| member.handle_broken(generation, lost_in(member), reason))
            .unwrap_or_else(|stale| tracing::debug!(%stale, "an older world broke"));
    }

    /// This member cannot go on, and no successor could.
    pub(crate) fn failed(&self, reason: &str) {
        self.change(|inner| inner.member.handle_failed(reason));
    }

    fn in_training(&self, act: impl FnOnce(&mut Member, Generation) -> Result<(), Stale>) -> Result<(), JobError> {
        let mut outcome = Ok(());
        self.change(|inner| {
            // A task that is not training has no steps.
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
            self.pulse.leave(left.0);
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

impl Desk for Cell {
    fn order(&self, order: &Order) {
        let news = {
            let mut inner = self.lock();
            if let Err(stale) = inner.member.handle_order(order) {
                tracing::debug!(%stale, "an order was refused");
                return;
            }
            if order.wishes.stop {
                self.control.stop();
            }
            self.control.saves.fetch_max(order.wishes.save, Ordering::AcqRel);
            self.control.pause.fetch_max(order.wishes.pause.0, Ordering::AcqRel);
            inner.drain(order.formation.as_ref());
            inner.take_news()
        };
        self.changed.notify_all();
        self.pass_on(news);
    }

    fn say(&self) {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let word = MemberReport { progress: self.pulse.read(), ..self.lock().member.report() };
        // Whoever does not listen any more is about to end this process.
        let _ = sender.send(&FromRank::Word(word));
    }

    fn progress(&self) -> Progress {
        self.pulse.read()
    }

    fn generation(&self) -> Generation {
        self.lock().member.generation()
    }

    fn waits_for(&self, missing: &[Missing]) {
        let missing: Vec<String> = missing.iter().map(Missing::to_string).collect();
        tracing::info!(worker = %self.lock().member.worker(), missing = missing.join("; "), "waits for others");
    }
}

impl Inner {
    fn take_news(&mut self) -> News {
        News { left: self.left.take(), report: std::mem::take(&mut self.news) }
    }

    /// Does at once what need not wait for the device, and leaves it the rest.
    fn drain(&mut self, formation: Option<&Arc<Formation>>) {
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
                Command::Learn(generation) => self.tasks.push_back(Task::Learn(generation)),
                Command::Exit => self.tasks.push_back(Task::Exit),
                // The device is told to join below; it fetches when it does, and votes when it has computed.
                Command::Join(_) | Command::Fetch { .. } | Command::Vote(..) => {}
                Command::Report => self.news = true,
            }
        }
        if let Some(formation) = formation.filter(|f| f.generation > self.joined) {
            let me = self.member.report().worker;
            if formation.member_of(me).is_some() {
                self.joined = formation.generation;
                self.tasks.push_back(Task::Join(Arc::clone(formation)));
            }
        }
        let queued = |generation| self.tasks.contains(&Task::Train(generation));
        if let Some(generation) = train.filter(|g| self.training != Some(*g) && !queued(*g)) {
            self.tasks.push_back(Task::Train(generation));
        }
    }
}

impl TrainingMember for Cell {
    fn computed(&self, step: u64) -> Result<(), JobError> {
        self.in_training(|member, generation| {
            member.handle_entered(generation, Step(step))?;
            member.handle_computed(generation, Step(step))
        })
    }

    fn committed(&self, step: u64, wishes: Wishes) -> Result<(), JobError> {
        self.in_training(|member, generation| member.handle_committed(generation, Step(step), wishes))
    }

    fn learnt(&self, step: u64) -> Result<(), JobError> {
        self.in_training(|member, generation| {
            let base = member.beside().map(|formation| formation.base).unwrap_or_default();
            member.handle_learnt(generation, Version { step: Step(step), ..base })
        })
    }

    fn followed(&self, step: u64) -> Result<(), JobError> {
        self.in_training(|member, generation| member.handle_followed(generation, Step(step)))
    }

    fn outcome(&self, step: u64) -> Result<(), JobError> {
        self.in_training(|member, generation| member.handle_outcome(generation, Step(step)))
    }
}
