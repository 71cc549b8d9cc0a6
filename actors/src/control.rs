//! One OS thread for all control actors of a job in this process.
//!
//! Invariants:
//! - `CONTROL-1` The actors of one thread run one at a time and never block.
//! - `CONTROL-2` A panic in an actor or a request ends the whole thread, so a process never runs with some of its actors
//!   missing. The thread keeps the first cause and reports it to every caller.
//! - `CONTROL-3` There is no `System` and no global state: a process may have several threads, each with its own actors.
//!
//! The thread ends on [`stop`](ControlThread::stop), when the last handle is dropped, or by `CONTROL-2`. Its actors are
//! dropped with it.

use actix::prelude::SendError;
use actix::{Actor, Addr, AsyncContext, Context, Handler, Message};
use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::LocalSet;

/// Handle of a thread of actors. It is `Clone + Send + Sync`; dropping the last clone ends the thread.
#[derive(Clone, Debug)]
pub struct ControlThread {
    jobs: mpsc::Sender<Job>,
    stop: Arc<watch::Sender<bool>>,
    end: watch::Receiver<Option<End>>,
}

/// How a control thread ended: on request, or by a panic.
pub type End = Result<(), Panicked>;

/// An actor or request on a control thread panicked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {actor} panicked: {message}")]
pub struct Panicked {
    /// Name given to the actor at its start.
    pub actor: String,
    /// The panic message.
    pub message: String,
}

/// Why a request did not run on a control thread.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// The thread has ended on request.
    #[error("the control thread has ended")]
    Ended,
    /// The thread has ended by a panic.
    #[error(transparent)]
    Panicked(#[from] Panicked),
}

/// Starts actors on its thread and detects their panics (`CONTROL-2`).
#[derive(Clone, Debug)]
pub struct Guardian {
    panicked: mpsc::Sender<Panicked>,
}

type Job = Box<dyn FnOnce(Guardian) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// Capacity of the request queue; further callers wait.
const JOBS_MAX: usize = 64;

/// How long a stopping thread waits for file writes in progress.
const STORE_PATIENCE: Duration = Duration::from_secs(1);

/// Pause before another try after a full mailbox.
const FULL_PAUSE: Duration = Duration::from_micros(200);

/// Sends a message to an actor, and waits while its mailbox is full. For threads that may block. Drops the message if the
/// actor has ended.
pub(crate) fn deliver<A, M>(to: &Addr<A>, mut message: M)
where
    A: Actor<Context = Context<A>> + Handler<M>,
    M: Message<Result = ()> + Send + 'static,
{
    while let Err(SendError::Full(back)) = to.try_send(message) {
        message = back;
        std::thread::sleep(FULL_PAUSE);
    }
}

/// Runs a future to completion on the calling thread, for programs without an event loop.
///
/// # Errors
/// When the system cannot provide timers.
///
/// # Panics
/// When called from an event loop.
pub fn block_on<F: Future>(future: F) -> std::io::Result<F::Output> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}

impl ControlThread {
    /// Starts a thread of this name.
    ///
    /// # Errors
    /// When the system cannot provide a thread or timers.
    pub fn start(name: &str) -> std::io::Result<ControlThread> {
        let (jobs, incoming) = mpsc::channel(JOBS_MAX);
        let (stop, stopped) = watch::channel(false);
        let (ending, end) = watch::channel(None);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let actors = LocalSet::new();
            let body = AssertUnwindSafe(|| actors.block_on(&runtime, serve(incoming, stopped)));
            let end = catch_unwind(body).unwrap_or_else(|payload| Err(Panicked::of("control thread", &*payload)));
            if let Err(panicked) = &end {
                tracing::error!(%panicked, "the control thread ends");
            }
            // A caller that sees the end may rely on the actors being dropped.
            drop(actors);
            runtime.shutdown_timeout(STORE_PATIENCE);
            ending.send_replace(Some(end));
        })?;
        Ok(ControlThread { jobs, stop: Arc::new(stop), end })
    }

    /// Runs `job` on the thread, where it can start actors, and returns its result.
    ///
    /// # Errors
    /// When the thread has ended, or ends before `job` completes.
    pub async fn run<T, F>(&self, job: impl FnOnce(Guardian) -> F + Send + 'static) -> Result<T, RunError>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job: Job = Box::new(move |guardian| {
            Box::pin(async move {
                // The receiver may be gone.
                let _ = reply.send(job(guardian).await);
            })
        });
        if self.jobs.send(job).await.is_ok()
            && let Ok(value) = answer.await
        {
            return Ok(value);
        }
        self.ended().await?;
        Err(RunError::Ended)
    }

    /// Ends the thread with all its actors.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// How the thread ended, if it has.
    pub fn has_ended(&self) -> Option<End> {
        self.end.borrow().clone()
    }

    /// Waits until the thread ends.
    ///
    /// # Errors
    /// The panic that ended the thread, if one did.
    pub async fn ended(&self) -> End {
        let mut end = self.end.clone();
        let result = match end.wait_for(Option::is_some).await {
            Ok(end) => end.clone(),
            Err(_) => None,
        };
        result.unwrap_or_else(|| Err(Panicked { actor: "control thread".into(), message: "no cause is known".into() }))
    }
}

/// Runs requests until the thread is stopped or a task panics.
async fn serve(mut jobs: mpsc::Receiver<Job>, mut stopped: watch::Receiver<bool>) -> End {
    let (panicked, mut panics) = mpsc::channel(1);
    let guardian = Guardian { panicked };
    loop {
        tokio::select! {
            biased;
            Some(cause) = panics.recv() => return Err(cause),
            // An error here, like the end of `jobs`, means that the last handle was dropped.
            _ = stopped.wait_for(|stop| *stop) => return Ok(()),
            job = jobs.recv() => match job {
                Some(job) => guardian.watch("request", job(guardian.clone())),
                None => return Ok(()),
            },
        }
    }
}

impl Guardian {
    /// Starts an actor; its panic ends the thread and is reported under `name`. Call it on the thread.
    pub fn start<A>(&self, name: &str, create: impl FnOnce(&mut Context<A>) -> A) -> Addr<A>
    where
        A: Actor<Context = Context<A>>,
    {
        let mut ctx = Context::new();
        let actor = create(&mut ctx);
        let addr = ctx.address();
        self.watch(name, ctx.into_future(actor));
        addr
    }

    /// Runs a task beside the actors; its panic ends the thread and is reported under `name`. Call it on the thread.
    pub fn spawn(&self, name: &str, task: impl Future<Output = ()> + 'static) {
        self.watch(name, task);
    }

    fn watch(&self, name: &str, task: impl Future<Output = ()> + 'static) {
        let (name, panicked) = (name.to_owned(), self.panicked.clone());
        let task = tokio::task::spawn_local(task);
        tokio::task::spawn_local(async move {
            if let Err(error) = task.await
                && let Ok(payload) = error.try_into_panic()
            {
                // A full channel already holds the first cause.
                let _ = panicked.try_send(Panicked::of(&name, &*payload));
            }
        });
    }
}

impl Panicked {
    fn of(actor: &str, payload: &(dyn Any + Send)) -> Panicked {
        let text = payload.downcast_ref::<String>().cloned();
        let message = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Panicked { actor: actor.to_owned(), message: message.unwrap_or_else(|| "no message".into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds one, and panics at three.
    struct Counter(u32);

    struct Add;

    impl Message for Add {
        type Result = u32;
    }

    impl Actor for Counter {
        type Context = Context<Self>;
    }

    impl Handler<Add> for Counter {
        type Result = u32;

        fn handle(&mut self, _: Add, _: &mut Context<Self>) -> u32 {
            self.0 += 1;
            assert!(self.0 < 3, "three is too many");
            self.0
        }
    }

    async fn counter(thread: &ControlThread, name: &'static str) -> Addr<Counter> {
        thread.run(move |guardian| async move { guardian.start(name, |_| Counter(0)) }).await.unwrap()
    }

    // CONTROL-2
    #[tokio::test]
    async fn panicking_actor_ends_its_thread_and_all_siblings() {
        let thread = ControlThread::start("control").unwrap();
        let (bad, sibling) = (counter(&thread, "bad counter").await, counter(&thread, "sibling").await);
        assert_eq!((bad.send(Add).await, bad.send(Add).await, sibling.send(Add).await), (Ok(1), Ok(2), Ok(1)));

        assert!(bad.send(Add).await.is_err());

        let cause = Panicked { actor: "bad counter".into(), message: "three is too many".into() };
        assert_eq!(thread.ended().await, Err(cause.clone()));
        assert_eq!(cause.to_string(), "the bad counter panicked: three is too many");
        assert!(!sibling.connected());
        assert_eq!(thread.run(|_| async {}).await, Err(RunError::Panicked(cause)));
    }

    // CONTROL-2
    #[tokio::test]
    async fn panicking_request_ends_its_thread() {
        let thread = ControlThread::start("control").unwrap();

        let answer = thread.run(|_| async { panic!("no actor was created") }).await;

        let Err::<(), _>(RunError::Panicked(cause)) = answer else { panic!("{answer:?}") };
        assert_eq!((cause.actor.as_str(), cause.message.as_str()), ("request", "no actor was created"));
    }

    // CONTROL-3
    #[tokio::test]
    async fn stopping_a_thread_leaves_other_threads_running() {
        let (first, second) = (ControlThread::start("first").unwrap(), ControlThread::start("second").unwrap());
        let (one, two) = (counter(&first, "one").await, counter(&second, "two").await);

        first.stop();

        assert_eq!(first.ended().await, Ok(()));
        assert!(!one.connected());
        assert_eq!(first.run(|_| async {}).await, Err(RunError::Ended));
        assert_eq!(two.send(Add).await, Ok(1));
    }

    #[tokio::test]
    async fn thread_ends_when_its_last_handle_is_dropped() {
        let thread = ControlThread::start("control").unwrap();
        let mut end = thread.end.clone();

        drop(thread);

        let end = tokio::time::timeout(Duration::from_secs(60), end.wait_for(Option::is_some)).await;
        assert_eq!(*end.unwrap().unwrap(), Some(Ok(())));
    }
}
