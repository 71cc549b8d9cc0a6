//! The actor of a rank: handles desired states and sends heartbeats whatever the device is doing, and keeps a
//! [`MeshGroup`] for each group of the device's world.
//!
//! Decisions are made by the state machine `phalanx_strategies::elastic::member`, which lies behind a [`RankPort`]
//! shared with the device thread: the device queries it twice per step and needs the answer at once.
//!
//! Invariants:
//! - `RANK-ACTOR-1` Leaving a world aborts all its process groups, including groups created after the abort.
//! - `RANK-ACTOR-2` A rank that waits long for peers reports them, once per group and set of peers.

use crate::control::{ControlThread, Guardian};
use crate::mesh_group::{Abort, GroupControl, MeshGroup, Missing, WhoIsMissing};
use actix::{Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message, WrapFuture};
use phalanx_strategies::elastic::identity::Generation;
use phalanx_strategies::elastic::message::DesiredState;
use phalanx_strategies::elastic::progress::{At, Progress};
use phalanx_strategies::mesh::Axes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// State shared by a rank actor and its device thread. No method waits for the device.
pub trait RankPort: Send + Sync + 'static {
    /// Applies a desired state, or rejects a stale one.
    fn apply_desired_state(&self, desired_state: &DesiredState);

    /// Sends a status report to the supervisor.
    fn say(&self);

    /// Progress of the device.
    fn progress(&self) -> Progress;

    /// The latest generation announced to it.
    fn generation(&self) -> Generation;

    /// Reports the peers that the device has been waiting for.
    fn waits_for(&self, missing: &[Missing]);
}

/// Intervals of a rank's heartbeats and reports.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    /// Time between two heartbeats.
    pub interval: Duration,
    /// How long the device waits for peers before the rank reports them.
    pub patience: Duration,
}

/// See the [module](self).
pub struct Rank {
    port: Arc<dyn RankPort>,
    life: Life,
    guardian: Guardian,
    /// The world that the device has joined.
    world: Option<(Generation, Vec<Addr<MeshGroup>>)>,
    /// What the device waits for, and since when.
    waits: Option<(Progress, Instant)>,
    /// Missing ranks that have been reported for this world.
    said: Vec<(Axes, Vec<u32>)>,
}

/// Handle of a rank's actor, for other threads. Dropping the last one ends its thread.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Kept for as long as there is a handle.
    _thread: ControlThread,
    rank: Addr<Rank>,
}

struct DesiredStateArrived(DesiredState);

/// The device has joined a world.
struct Entered {
    generation: Generation,
    groups: Vec<Box<dyn GroupControl>>,
}

/// The rank has left all earlier worlds.
struct Left(Generation);

macro_rules! notifications {
    ($($message:ident),*) => {
        $(impl Message for $message {
            type Result = ();
        })*
    };
}

notifications!(DesiredStateArrived, Entered, Left);

impl Handle {
    /// Starts the actor of a rank on a thread of its own.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub async fn start(port: Arc<dyn RankPort>, life: Life) -> std::io::Result<Handle> {
        let thread = ControlThread::start("rank")?;
        let start = move |guardian: Guardian| async move {
            let rank = Rank { port, life, guardian: guardian.clone(), world: None, waits: None, said: vec![] };
            guardian.start("rank", |_| rank)
        };
        let rank = thread.run(start).await.map_err(std::io::Error::other)?;
        Ok(Handle { _thread: thread, rank })
    }

    /// Delivers a desired state.
    pub fn apply_desired_state(&self, desired_state: DesiredState) {
        self.rank.do_send(DesiredStateArrived(desired_state));
    }

    /// The device has joined the world of this generation, and has these groups there.
    pub fn entered(&self, generation: Generation, groups: Vec<Box<dyn GroupControl>>) {
        self.rank.do_send(Entered { generation, groups });
    }

    /// The rank has left all worlds before this generation.
    pub fn left(&self, generation: Generation) {
        self.rank.do_send(Left(generation));
    }
}

impl Rank {
    /// Aborts the groups of an ended world (`RANK-ACTOR-1`).
    fn leave(&mut self, generation: Generation) {
        if let Some((_, groups)) = self.world.take_if(|(before, _)| *before < generation) {
            for group in groups {
                group.do_send(Abort("a later world has begun".into()));
            }
        }
    }

    /// Reports the peers that the device waits for, if it has waited long (`RANK-ACTOR-2`).
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
                missing.extend(answer.await.ok().flatten());
            }
            missing
        };
        ctx.spawn(answers.into_actor(self).map(|missing, rank, _| rank.waits_for(missing)));
    }

    fn waits_for(&mut self, mut missing: Vec<Missing>) {
        missing
            .retain(|missing| !self.said.iter().any(|(axes, ranks)| (*axes, ranks) == (missing.axes, &missing.ranks)));
        self.said.extend(missing.iter().map(|missing| (missing.axes, missing.ranks.clone())));
        if !missing.is_empty() {
            self.port.waits_for(&missing);
        }
    }
}

impl Actor for Rank {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        self.port.say();
        ctx.run_interval(self.life.interval, |rank, ctx| {
            rank.port.say();
            rank.report_waits(ctx);
        });
    }
}

impl Handler<DesiredStateArrived> for Rank {
    type Result = ();

    fn handle(&mut self, DesiredStateArrived(desired_state): DesiredStateArrived, _: &mut Context<Self>) {
        self.port.apply_desired_state(&desired_state);
    }
}

impl Handler<Entered> for Rank {
    type Result = ();

    fn handle(&mut self, Entered { generation, groups }: Entered, _: &mut Context<Self>) {
        let start = |group| self.guardian.start("mesh group", |_| MeshGroup::new(group));
        let groups = groups.into_iter().map(start).collect();
        self.leave(generation);
        (self.world, self.said) = (Some((generation, groups)), Vec::new());
        self.leave(self.port.generation());
    }
}

impl Handler<Left> for Rank {
    type Result = ();

    fn handle(&mut self, Left(generation): Left, _: &mut Context<Self>) {
        self.leave(generation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh_group::tests::Fake;
    use phalanx_strategies::elastic::identity::{JobId, Term};
    use phalanx_strategies::elastic::message::{DesiredStateId, Requests, Stage};
    use phalanx_strategies::elastic::progress::Wait;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    /// A port that only notes what happens; its device waits at a place that the test moves.
    #[derive(Default)]
    struct Notes {
        generation: AtomicU64,
        ticks: AtomicU64,
        n_said: AtomicUsize,
        missing: Mutex<Vec<String>>,
    }

    impl RankPort for Notes {
        fn apply_desired_state(&self, desired_state: &DesiredState) {
            self.generation.store(desired_state.id.generation.0, Ordering::SeqCst);
        }

        fn say(&self) {
            self.n_said.fetch_add(1, Ordering::SeqCst);
        }

        fn progress(&self) -> Progress {
            Progress { ticks: self.ticks.load(Ordering::SeqCst), at: At::Waits(Wait::default()) }
        }

        fn generation(&self) -> Generation {
            Generation(self.generation.load(Ordering::SeqCst))
        }

        fn waits_for(&self, missing: &[Missing]) {
            self.missing.lock().unwrap().extend(missing.iter().map(Missing::to_string));
        }
    }

    fn group(entered: &[u64]) -> Fake {
        let entered = entered.iter().copied().map(Some).collect();
        Fake { rank: 0, members: vec![0, 1], entered: Arc::new(Mutex::new(entered)), ..Fake::default() }
    }

    fn desired_state(generation: u64) -> DesiredState {
        let id = DesiredStateId { term: Term(1), generation: Generation(generation), stage: Stage::Stop, revision: 0 };
        DesiredState {
            job: JobId(1),
            id,
            world_plan: None,
            evict: vec![],
            requests: Requests::default(),
            release: None,
        }
    }

    async fn start(patience: Duration) -> (Arc<Notes>, Handle) {
        let notes = Arc::new(Notes::default());
        let life = Life { interval: Duration::from_millis(5), patience };
        (notes.clone(), Handle::start(notes, life).await.unwrap())
    }

    async fn until(is_so: impl Fn() -> bool) {
        let wait = async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap();
    }

    // RANK-ACTOR-1
    #[tokio::test]
    async fn all_groups_of_a_world_that_is_left_are_aborted_and_none_of_the_next() {
        let (notes, rank) = start(Duration::from_secs(600)).await;
        let (first, second, next) = (group(&[0, 0]), group(&[0, 0]), group(&[0, 0]));
        rank.apply_desired_state(desired_state(1));
        rank.entered(Generation(1), vec![Box::new(first.clone()), Box::new(second.clone())]);

        rank.apply_desired_state(desired_state(2));
        rank.left(Generation(2));
        rank.entered(Generation(2), vec![Box::new(next.clone())]);

        until(|| second.aborted.lock().unwrap().len() == 1).await;
        until(|| notes.n_said.load(Ordering::SeqCst) > 3).await;
        assert_eq!(*first.aborted.lock().unwrap(), ["a later world has begun"]);
        assert!(next.aborted.lock().unwrap().is_empty());
    }

    // RANK-ACTOR-1
    #[tokio::test]
    async fn groups_that_arrive_after_their_world_ended_are_aborted() {
        let (_, rank) = start(Duration::from_secs(600)).await;
        let late = group(&[0, 0]);
        rank.apply_desired_state(desired_state(2));
        rank.left(Generation(2));

        rank.entered(Generation(1), vec![Box::new(late.clone())]);

        until(|| !late.aborted.lock().unwrap().is_empty()).await;
    }

    // RANK-ACTOR-2
    #[tokio::test]
    async fn absent_ranks_are_reported_once_and_again_when_they_change() {
        let (notes, rank) = start(Duration::from_millis(20)).await;
        let waited_for = group(&[7, 6]);
        rank.entered(Generation(1), vec![Box::new(waited_for.clone())]);

        until(|| !notes.missing.lock().unwrap().is_empty()).await;
        for tick in 1..10 {
            notes.ticks.store(tick, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        assert_eq!(*notes.missing.lock().unwrap(), ["rank 1 has not entered collective #6 on dp_shard"]);
        let third = Fake { members: vec![0, 1, 2], ..group(&[9, 9, 5]) };
        rank.entered(Generation(2), vec![Box::new(third)]);

        until(|| notes.missing.lock().unwrap().len() == 2).await;
        assert_eq!(notes.missing.lock().unwrap()[1], "rank 2 has not entered collective #8 on dp_shard");
    }

    // RANK-ACTOR-2
    #[tokio::test]
    async fn a_device_that_gets_on_is_not_asked_whom_it_waits_for() {
        let (notes, rank) = start(Duration::from_secs(600)).await;
        rank.entered(Generation(1), vec![Box::new(group(&[7, 6]))]);

        until(|| notes.n_said.load(Ordering::SeqCst) > 10).await;

        assert!(notes.missing.lock().unwrap().is_empty());
    }
}
