//! Requests to a run from outside, the queue from which its coordinator takes them, and the bell that wakes the coordinator's
//! thread.

use phalanx_actors::operator::{Answer, Request};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// How long a run that is to stop waits for a silent store, or a coordinator: batch systems and container runtimes kill after
/// 30 s.
pub(crate) const STOP_PATIENCE: Duration = Duration::from_secs(15);

/// Requests to a run from outside.
#[derive(Debug, Default)]
pub struct Control {
    pub(crate) stop: AtomicBool,
    /// Number of requested checkpoints.
    pub(crate) saves: AtomicU64,
    /// Generation of the world that is to pause between two steps.
    pub(crate) pause: AtomicU64,
    request_queue: Mutex<RequestQueue>,
    /// Whether ranks may hold state that is not saved.
    has_ranks: AtomicBool,
    /// Rung by each request.
    pub(crate) bell: Arc<Bell>,
}

/// Wakes a thread that waits for one of several sources. Each source stores what happened, then rings.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    has_rung: Mutex<bool>,
    rung: Condvar,
}

impl Bell {
    /// Wakes the waiting thread; if none waits, the next wait returns at once.
    pub(crate) fn ring(&self) {
        // The flag is valid after a panic of another thread.
        *self.has_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.rung.notify_one();
    }

    /// Waits until the bell has rung since the last wait, but not longer than `most`.
    pub(crate) fn wait(&self, most: Duration) {
        let has_rung = self.has_rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.rung.wait_timeout_while(has_rung, most, |has_rung| !*has_rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

/// Why a request to a job has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The job is preparing its data.
    #[error("the job has no ranks yet: it is preparing its data")]
    NotYet,
    /// The job has ended.
    #[error("the job has ended")]
    Ended,
    /// Too many requests are waiting.
    #[error("{0} requests are already waiting; try again later")]
    Busy(usize),
    /// The job's coordinator rejected the request.
    #[error("{0}")]
    Refused(String),
    /// The request is recorded, but has no effect unless something else changes.
    #[error("the request is recorded, but has no effect now: {0}")]
    NoEffect(String),
}

/// A waiting request and the channel for its answer.
pub(crate) type Asked = (Request, oneshot::Sender<Answer>);

/// The queue of waiting requests.
#[derive(Debug, Default)]
enum RequestQueue {
    #[default]
    NotYet,
    Open(VecDeque<Asked>),
    Ended,
}

/// Capacity of the queue, which the coordinator drains at once.
const ASKED_MAX: usize = 64;

impl Control {
    /// Ends the run after the current step and a checkpoint.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Saves a checkpoint after the current step.
    pub fn save(&self) {
        self.saves.fetch_add(1, Ordering::Release);
        self.bell.ring();
    }

    /// Whether a stop is requested.
    pub(crate) fn stops(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Records that ranks may hold state that is not saved.
    pub(crate) fn set_has_ranks(&self) {
        self.has_ranks.store(true, Ordering::Release);
    }

    /// Whether ranks may hold state that is not saved.
    pub(crate) fn has_ranks(&self) -> bool {
        self.has_ranks.load(Ordering::Acquire)
    }

    /// Queues a request for the coordinator; the sender is dropped if the run ends before the answer.
    pub(crate) fn ask(&self, request: Request) -> Result<oneshot::Receiver<Answer>, RequestError> {
        match &mut *self.request_queue() {
            RequestQueue::NotYet => Err(RequestError::NotYet),
            RequestQueue::Ended => Err(RequestError::Ended),
            RequestQueue::Open(asked) if asked.len() >= ASKED_MAX => Err(RequestError::Busy(asked.len())),
            RequestQueue::Open(asked) => {
                let (tx, rx) = oneshot::channel();
                asked.push_back((request, tx));
                self.bell.ring();
                Ok(rx)
            }
        }
    }

    /// Opens the queue for a coordinator, which leads from now on.
    pub(crate) fn open(&self) {
        self.set_has_ranks();
        *self.request_queue() = RequestQueue::Open(VecDeque::new());
    }

    /// Closes the queue; waiting requests fail.
    pub(crate) fn close(&self) {
        *self.request_queue() = RequestQueue::Ended;
    }

    /// Takes the oldest waiting request.
    pub(crate) fn next_asked(&self) -> Option<Asked> {
        match &mut *self.request_queue() {
            RequestQueue::Open(asked) => asked.pop_front(),
            RequestQueue::NotYet | RequestQueue::Ended => None,
        }
    }

    fn request_queue(&self) -> MutexGuard<'_, RequestQueue> {
        // Every change is one assignment or one push: a panic leaves nothing half done.
        self.request_queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_served_in_order_while_the_queue_is_open() {
        let control = Control::default();

        assert_eq!(control.ask(Request::Save).unwrap_err(), RequestError::NotYet);
        control.open();
        let first = control.ask(Request::Save).unwrap();
        let mut second = control.ask(Request::Stop).unwrap();
        let (request, answer) = control.next_asked().unwrap();
        answer.send(Answer::Done).unwrap();
        control.close();

        assert_eq!(request, Request::Save);
        assert_eq!(first.blocking_recv(), Ok(Answer::Done));
        assert_eq!(
            second.try_recv(),
            Err(oneshot::error::TryRecvError::Closed),
            "closing the queue drops waiting requests"
        );
        assert_eq!(control.ask(Request::Status).unwrap_err(), RequestError::Ended);
    }

    #[test]
    fn every_request_wakes_the_waiting_thread_even_if_it_came_before_the_wait() {
        let control = Arc::new(Control::default());
        control.open();
        let requests: [fn(&Control); 3] = [Control::stop, Control::save, |control| drop(control.ask(Request::Status))];

        for request in requests {
            request(&control);
            let (begin, most) = (std::time::Instant::now(), Duration::from_secs(60));
            control.bell.wait(most);
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| control.bell.wait(most));
                std::thread::sleep(Duration::from_millis(5));
                request(&control);
                waiting.join().unwrap();
            });
            assert!(begin.elapsed() < most);
        }
        control.bell.wait(Duration::from_millis(1));
    }

    #[test]
    fn full_queue_rejects_requests() {
        let control = Control::default();
        control.open();

        let waiting: Vec<_> = (0..ASKED_MAX).map(|_| control.ask(Request::Save).unwrap()).collect();

        assert_eq!(control.ask(Request::Save).unwrap_err(), RequestError::Busy(waiting.len()));
    }
}
