//! The timer of an actor whose machine has deadlines.
//!
//! Most messages to a machine move its next deadline a little later. Cancelling and arming a timer for each of them costs more
//! than the messages themselves, so an armed timer stays as it is unless it would fire too late; a timer that fires before the
//! deadline finds nothing due and is armed again.

use actix::{Actor, AsyncContext, Context, SpawnHandle};
use std::time::Instant;

/// See the [module](self). One of its actor's fields; armed after each event.
#[derive(Debug, Default)]
pub(crate) struct Timer(Option<(Instant, SpawnHandle)>);

/// An actor with deadlines.
pub(crate) trait Deadlines: Actor<Context = Context<Self>> {
    /// Its timer.
    fn timer(&mut self) -> &mut Timer;

    /// The timer has fired: handles the deadlines that have passed, and arms the timer again.
    fn wake(&mut self, ctx: &mut Context<Self>);

    /// Calls [`Deadlines::wake`] at `due` or earlier; never if there is no deadline.
    fn arm(&mut self, due: Option<Instant>, ctx: &mut Context<Self>) {
        let armed = self.timer().0;
        match (armed, due) {
            (Some((at, _)), Some(due)) if at <= due => return,
            (Some((_, timer)), _) => drop(ctx.cancel_future(timer)),
            (None, _) => {}
        }
        let start = |due: Instant| {
            let timer = ctx.run_later(due.saturating_duration_since(now()), |actor, ctx| {
                actor.timer().0 = None;
                actor.wake(ctx);
            });
            (due, timer)
        };
        self.timer().0 = due.map(start);
    }
}

/// The clock; virtual in tests.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix::{Handler, Message};
    use std::time::Duration;

    /// Wakes at its deadline, and records when.
    #[derive(Default)]
    struct Sleeper {
        timer: Timer,
        due: Option<Instant>,
        woken: Vec<Instant>,
    }

    impl Actor for Sleeper {
        type Context = Context<Self>;
    }

    impl Deadlines for Sleeper {
        fn timer(&mut self) -> &mut Timer {
            &mut self.timer
        }

        fn wake(&mut self, ctx: &mut Context<Self>) {
            self.woken.push(now());
            self.due = self.due.filter(|due| *due > now());
            self.arm(self.due, ctx);
        }
    }

    struct SetDeadline(Option<Instant>);

    impl Message for SetDeadline {
        type Result = ();
    }

    impl Handler<SetDeadline> for Sleeper {
        type Result = ();

        fn handle(&mut self, SetDeadline(due): SetDeadline, ctx: &mut Context<Self>) {
            self.due = due;
            self.arm(due, ctx);
        }
    }

    struct Woken;

    impl Message for Woken {
        type Result = Vec<Instant>;
    }

    impl Handler<Woken> for Sleeper {
        type Result = Vec<Instant>;

        fn handle(&mut self, _: Woken, _: &mut Context<Self>) -> Vec<Instant> {
            self.woken.clone()
        }
    }

    /// The times in milliseconds at which the actor wakes, if its deadlines are set to these times at the start.
    async fn wakes(deadlines: &[Option<u64>]) -> Vec<u128> {
        let start = now();
        let sleeper = Sleeper::default().start();
        for due in deadlines {
            sleeper.send(SetDeadline(due.map(|ms| start + Duration::from_millis(ms)))).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let woken = sleeper.send(Woken).await.unwrap();
        woken.into_iter().map(|at| at.duration_since(start).as_millis()).collect()
    }

    fn check(deadlines: &'static [Option<u64>], expected: &[u128]) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let found = tokio::task::LocalSet::new().block_on(&runtime, wakes(deadlines));
        let is_near = |(found, expected): (&u128, &u128)| (*expected..=expected + 2).contains(found);
        assert!(
            found.len() == expected.len() && found.iter().zip(expected).all(is_near),
            "deadlines {deadlines:?}: expected {expected:?}, found {found:?}"
        );
    }

    #[test]
    fn actor_wakes_at_its_deadline_however_often_it_moves() {
        check(&[Some(100)], &[100]);
        check(&[Some(100), Some(50)], &[50]);
        check(&[Some(100), Some(300)], &[100, 300]);
        check(&[Some(100), Some(300), Some(40)], &[40]);
        check(&[Some(100), None], &[]);
        check(&[None], &[]);
    }
}
