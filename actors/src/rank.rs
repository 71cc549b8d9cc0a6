//! The actor shell of a rank: takes orders and gives signs of life, whatever the device is doing, and keeps a
//! [`MeshGroup`] for each group of the world that the device is in.
//!
//! What the rank decides is the machine `phalanx_strategies::elastic::member`. It lies on a [`Desk`] that the device thread
//! shares: between the halves of a step the device asks it twice, and must have the answer before it goes on.
//!
//! Invariants:
//! - `K-1` When a world is left, all its groups are aborted, also those that are only told of afterwards.
//! - `K-2` A rank that waits for others for long says who they are, once for each group of a world and the same others.

use crate::control::{ControlThread, Guardian};
use crate::mesh_group::{Abort, Communicator, MeshGroup, Missing, WhoIsMissing};
use actix::{Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message, WrapFuture};
use phalanx_strategies::elastic::identity::Generation;
use phalanx_strategies::elastic::message::Order;
use phalanx_strategies::elastic::progress::{At, Progress};
use phalanx_strategies::mesh::Axes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a rank and its device thread share. Nothing here waits for the device.
pub trait Desk: Send + Sync + 'static {
    /// Takes up an order, or refuses one that is stale.
    fn order(&self, order: &Order);

    /// Tells the supervisor where the rank is.
    fn say(&self);

    /// How the device gets on.
    fn progress(&self) -> Progress;

    /// The latest world that it was told of.
    fn generation(&self) -> Generation;

    /// Others have been waited for for a while.
    fn waits_for(&self, missing: &[Missing]);
}

/// How a rank shows that it is alive.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    /// Time between two signs of life.
    pub interval: Duration,
    /// So long it waits for others before it says for whom.
    pub patience: Duration,
}

/// See the [module](self).
pub struct Rank {
    desk: Arc<dyn Desk>,
    life: Life,
    guardian: Guardian,
    /// The world of which the device has told.
    world: Option<(Generation, Vec<Addr<MeshGroup>>)>,
    /// Where the device has been waiting, and since when.
    waits: Option<(Progress, Instant)>,
    /// What was said of this world.
    said: Vec<(Axes, Vec<u32>)>,
}

/// Handle of a rank, for other threads. With the last one its thread ends.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Kept for as long as there is a handle.
    _thread: ControlThread,
    rank: Addr<Rank>,
}

struct OrderArrived(Order);

/// The device has joined a world.
struct Entered {
    generation: Generation,
    groups: Vec<Box<dyn Communicator>>,
}

/// Its machine has left all worlds before this one.
struct Left(Generation);

macro_rules! notifications {
    ($($message:ident),*) => {
        $(impl Message for $message {
            type Result = ();
        })*
    };
}

notifications!(OrderArrived, Entered, Left);

impl Handle {
    /// Starts the actor of a rank on a thread of its own.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub async fn start(desk: Arc<dyn Desk>, life: Life) -> std::io::Result<Handle> {
        let thread = ControlThread::start("rank")?;
        let start = move |guardian: Guardian| async move {
            let rank = Rank { desk, life, guardian: guardian.clone(), world: None, waits: None, said: vec![] };
            guardian.start("rank", |_| rank)
        };
        let rank = thread.run(start).await.map_err(std::io::Error::other)?;
        Ok(Handle { _thread: thread, rank })
    }

    /// An order has come.
    pub fn order(&self, order: Order) {
        self.rank.do_send(OrderArrived(order));
    }

    /// The device has joined the world of this generation, and has these groups there.
    pub fn entered(&self, generation: Generation, groups: Vec<Box<dyn Communicator>>) {
        self.rank.do_send(Entered { generation, groups });
    }

    /// Its machine has left all worlds before this generation.
    pub fn left(&self, generation: Generation) {
        self.rank.do_send(Left(generation));
    }
}

impl Rank {
    /// Aborts the groups of a world that is over (`K-1`).
    fn leave(&mut self, generation: Generation) {
        if let Some((_, groups)) = self.world.take_if(|(before, _)| *before < generation) {
            for group in groups {
                group.do_send(Abort("a later world has begun".into()));
            }
        }
    }

    /// Says for whom the device waits, if it has waited for long (`K-2`).
    fn look(&mut self, ctx: &mut Context<Self>) {
        let (now, progress) = (Instant::now(), self.desk.progress());
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
            self.desk.waits_for(&missing);
        }
    }
}

impl Actor for Rank {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        self.desk.say();
        ctx.run_interval(self.life.interval, |rank, ctx| {
            rank.desk.say();
            rank.look(ctx);
        });
    }
}

impl Handler<OrderArrived> for Rank {
    type Result = ();

    fn handle(&mut self, OrderArrived(order): OrderArrived, _: &mut Context<Self>) {
        self.desk.order(&order);
    }
}

impl Handler<Entered> for Rank {
    type Result = ();

    fn handle(&mut self, Entered { generation, groups }: Entered, _: &mut Context<Self>) {
        let start = |group| self.guardian.start("mesh group", |_| MeshGroup::new(group));
        let groups = groups.into_iter().map(start).collect();
        self.leave(generation);
        (self.world, self.said) = (Some((generation, groups)), Vec::new());
        self.leave(self.desk.generation());
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
    use phalanx_strategies::elastic::message::{OrderId, Stage, Wishes};
    use phalanx_strategies::elastic::progress::Wait;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    /// A desk that only notes what happens; its device waits at a place that the test moves.
    #[derive(Default)]
    struct Notes {
        generation: AtomicU64,
        ticks: AtomicU64,
        n_said: AtomicUsize,
        missing: Mutex<Vec<String>>,
    }

    impl Desk for Notes {
        fn order(&self, order: &Order) {
            self.generation.store(order.id.generation.0, Ordering::SeqCst);
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

    fn order(generation: u64) -> Order {
        let id = OrderId { term: Term(1), generation: Generation(generation), stage: Stage::Stop, revision: 0 };
        Order { job: JobId(1), id, formation: None, evict: vec![], wishes: Wishes::default(), release: None }
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

    // K-1
    #[tokio::test]
    async fn all_groups_of_a_world_that_is_left_are_aborted_and_none_of_the_next() {
        let (notes, rank) = start(Duration::from_secs(600)).await;
        let (first, second, next) = (group(&[0, 0]), group(&[0, 0]), group(&[0, 0]));
        rank.order(order(1));
        rank.entered(Generation(1), vec![Box::new(first.clone()), Box::new(second.clone())]);

        rank.order(order(2));
        rank.left(Generation(2));
        rank.entered(Generation(2), vec![Box::new(next.clone())]);

        until(|| second.aborted.lock().unwrap().len() == 1).await;
        until(|| notes.n_said.load(Ordering::SeqCst) > 3).await;
        assert_eq!(*first.aborted.lock().unwrap(), ["a later world has begun"]);
        assert!(next.aborted.lock().unwrap().is_empty());
    }

    // K-1
    #[tokio::test]
    async fn a_world_that_is_over_before_its_groups_are_told_of_is_aborted() {
        let (_, rank) = start(Duration::from_secs(600)).await;
        let late = group(&[0, 0]);
        rank.order(order(2));
        rank.left(Generation(2));

        rank.entered(Generation(1), vec![Box::new(late.clone())]);

        until(|| !late.aborted.lock().unwrap().is_empty()).await;
    }

    // K-2
    #[tokio::test]
    async fn who_has_not_come_is_said_once_after_a_while_and_again_if_it_is_another() {
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

    // K-2
    #[tokio::test]
    async fn a_device_that_gets_on_is_not_asked_whom_it_waits_for() {
        let (notes, rank) = start(Duration::from_secs(600)).await;
        rank.entered(Generation(1), vec![Box::new(group(&[7, 6]))]);

        until(|| notes.n_said.load(Ordering::SeqCst) > 10).await;

        assert!(notes.missing.lock().unwrap().is_empty());
    }
}
