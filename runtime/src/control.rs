//! What can be asked of a run from outside, and the desk at which its coordinator takes such questions.

use phalanx_actors::operator::{Answer, Request};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// What can be asked of a run from outside.
#[derive(Debug, Default)]
pub struct Control {
    pub(crate) stop: AtomicBool,
    /// How often it was asked for.
    pub(crate) saves: AtomicU64,
    /// The world that is to come to rest between two steps.
    pub(crate) pause: AtomicU64,
    desk: Mutex<Desk>,
}

/// Why a question to a job has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// Its data is being prepared.
    #[error("the job has no ranks yet: it is preparing its data")]
    NotYet,
    /// It has ended.
    #[error("the job has ended")]
    Ended,
    /// Nobody has taken up what was asked before.
    #[error("the job has {0} questions to answer before this one; ask again later")]
    Busy(usize),
    /// Its coordinator says no.
    #[error("{0}")]
    Refused(String),
}

/// A question that waits, and where its answer goes.
pub(crate) type Asked = (Request, oneshot::Sender<Answer>);

/// Who is there to answer.
#[derive(Debug, Default)]
enum Desk {
    #[default]
    NotYet,
    Open(VecDeque<Asked>),
    Ended,
}

/// Questions that may wait; a coordinator takes them up many times a second.
const ASKED_MAX: usize = 64;

impl Control {
    /// Finish the step, save everything, and end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Save a checkpoint after the step.
    pub fn save(&self) {
        self.saves.fetch_add(1, Ordering::Release);
    }

    /// Whether the run shall stop.
    pub(crate) fn stops(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Puts a question to the coordinator of the run; the answer comes, or the sender is dropped because the run ends.
    pub(crate) fn ask(&self, request: Request) -> Result<oneshot::Receiver<Answer>, AskError> {
        match &mut *self.desk() {
            Desk::NotYet => Err(AskError::NotYet),
            Desk::Ended => Err(AskError::Ended),
            Desk::Open(asked) if asked.len() >= ASKED_MAX => Err(AskError::Busy(asked.len())),
            Desk::Open(asked) => {
                let (tx, rx) = oneshot::channel();
                asked.push_back((request, tx));
                Ok(rx)
            }
        }
    }

    /// A coordinator is there.
    pub(crate) fn open(&self) {
        *self.desk() = Desk::Open(VecDeque::new());
    }

    /// There is none any more; who waits for an answer hears that there is none.
    pub(crate) fn close(&self) {
        *self.desk() = Desk::Ended;
    }

    /// The question that waits longest.
    pub(crate) fn next_asked(&self) -> Option<Asked> {
        match &mut *self.desk() {
            Desk::Open(asked) => asked.pop_front(),
            Desk::NotYet | Desk::Ended => None,
        }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        // Every change is one assignment or one push: a panic leaves nothing half done.
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_taken_in_turn_while_somebody_is_there_to_answer() {
        let control = Control::default();

        assert_eq!(control.ask(Request::Save).unwrap_err(), AskError::NotYet);
        control.open();
        let first = control.ask(Request::Save).unwrap();
        let mut second = control.ask(Request::Stop).unwrap();
        let (request, answer) = control.next_asked().unwrap();
        answer.send(Answer::Done).unwrap();
        control.close();

        assert_eq!(request, Request::Save);
        assert_eq!(first.blocking_recv(), Ok(Answer::Done));
        assert_eq!(second.try_recv(), Err(oneshot::error::TryRecvError::Closed), "nobody is left to answer");
        assert_eq!(control.ask(Request::Status).unwrap_err(), AskError::Ended);
    }

    #[test]
    fn questions_that_nobody_takes_up_are_limited() {
        let control = Control::default();
        control.open();

        let waiting: Vec<_> = (0..ASKED_MAX).map(|_| control.ask(Request::Save).unwrap()).collect();

        assert_eq!(control.ask(Request::Save).unwrap_err(), AskError::Busy(waiting.len()));
    }
}
