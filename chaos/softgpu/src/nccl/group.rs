//! Groups: what a thread calls between `ncclGroupStart` and `ncclGroupEnd` happens at the end, at once.

use super::abort;
use super::batch::{self, Work};
use super::collective::{Collective, Kind};
use super::communicator::Communicator;
use super::job::Job;
use super::transfer::Transfer;
use super::{Code, IN_PROGRESS, INVALID_USAGE, SUCCESS, refuse};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// One operation.
pub enum Operation {
    Collective(Collective),
    Transfer(Transfer),
}

/// What a thread has called since the outermost start.
#[derive(Default)]
struct Group {
    depth: usize,
    new: Vec<Arc<Communicator>>,
    works: Vec<(Arc<Communicator>, u64, Work)>,
    aborts: Vec<Arc<Communicator>>,
    failed: Code,
}

thread_local!(static GROUP: RefCell<Group> = RefCell::default());

pub fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Does everything when the outermost group ends. `ncclGroupEnd` does not look at what it has begun.
pub fn end() -> Code {
    close().map_or_else(|code| code, |group| group.map_or(SUCCESS, |group| group.run(false)))
}

/// Ends a group; what was called in it, if it is the outermost one.
fn close() -> Result<Option<Group>, Code> {
    GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(refuse(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart"));
        }
        group.depth -= 1;
        Ok((group.depth == 0).then(|| std::mem::take(group)))
    })
}

/// Runs a call in a group of its own, unless there is one; a failed call fails the whole group.
pub fn within(call: impl FnOnce() -> Result<(), Code>) -> Code {
    start();
    let outcome = call();
    if let Err(code) = outcome {
        GROUP.with_borrow_mut(|group| {
            if group.failed == SUCCESS {
                group.failed = code
            }
        });
    }
    let ended = close().map_or_else(|code| code, |group| group.map_or(SUCCESS, |group| group.run(true)));
    match (ended, outcome) {
        (SUCCESS, Err(code)) => code,
        (code, _) => code,
    }
}

/// Adds a new communicator to the thread's group.
pub fn add_new(communicator: Arc<Communicator>) {
    GROUP.with_borrow_mut(|group| group.new.push(communicator));
}

/// Adds an abort to the thread's group.
pub fn add_abort(communicator: Arc<Communicator>) {
    GROUP.with_borrow_mut(|group| group.aborts.push(communicator));
}

/// Adds an operation to the thread's group.
pub fn add(communicator: &Arc<Communicator>, stream: u64, operation: Operation) -> Result<(), Code> {
    communicator.check_usable()?;
    GROUP.with_borrow_mut(|group| {
        let found = group.works.iter().position(|(other, _, _)| Arc::ptr_eq(other, communicator));
        let i = found.unwrap_or_else(|| {
            group.works.push((communicator.clone(), stream, Work::default()));
            group.works.len() - 1
        });
        let (_, other, work) = &mut group.works[i];
        if *other != stream {
            let text = "a group with one communicator on two streams is not imitated";
            return Err(refuse(INVALID_USAGE, text));
        }
        match operation {
            // NCCL discards empty collectives, but not empty messages.
            Operation::Collective(collective) if collective.what.count == 0 => {}
            Operation::Collective(collective) => work.collectives.push(collective),
            Operation::Transfer(transfer) => work.transfers.push(transfer),
        }
        Ok(())
    })
}

impl Group {
    /// Does everything. A single call looks at the state of its communicator afterwards.
    fn run(self, is_single: bool) -> Code {
        let launched = self.works.iter().map(|(communicator, _, _)| communicator);
        let with_job: Vec<_> = self.new.iter().chain(launched).filter(|c| !c.is_blocking).collect();
        let mut code = self.failed;
        if code == SUCCESS {
            Job::start(with_job.iter().copied());
            code = self.launch().err().unwrap_or(SUCCESS);
        }
        for communicator in self.new.iter().filter(|c| c.is_blocking) {
            let state = communicator.settle();
            code = if code == SUCCESS { state } else { code };
        }
        if !self.aborts.is_empty() {
            abort::abort(&self.aborts);
        }
        let is_pending = |c: &Arc<Communicator>| !c.is_aborted.load(SeqCst) && (!is_single || c.look() == IN_PROGRESS);
        if code == SUCCESS && with_job.into_iter().any(is_pending) { IN_PROGRESS } else { code }
    }

    fn launch(&self) -> Result<(), Code> {
        for (communicator, stream, work) in &self.works {
            let own =
                |is_send| work.transfers.iter().filter(|t| t.peer == communicator.rank && t.is_send == is_send).count();
            if own(true) != own(false) {
                let text = "a message to oneself needs its counterpart in the same group";
                return Err(refuse(INVALID_USAGE, text));
            }
            if !work.collectives.is_empty() || !work.transfers.is_empty() {
                batch::launch(communicator, *stream, work.clone())?;
            }
        }
        Ok(())
    }
}

/// Whether a kind's root is meaningful.
pub const fn has_root(kind: Kind) -> bool {
    matches!(kind, Kind::Broadcast | Kind::Reduce)
}
