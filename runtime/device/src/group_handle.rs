//! The device thread's handle to a group; a mesh-group actor owns the group's communicator for one generation.
//!
//! Owner and handle share a few atomics: the device starts and finishes operations without messages or locks, and each
//! operation advances the watermark. Once the actor has closed the group, the device starts no more operations in it.
//! The overhead per operation is three loads and two stores, without a read-modify-write.

use crate::CollectiveError;
use crate::communicator::{Collective, CollectiveControl, Progress, Ticket};
use crate::operation::{Operand, Operation};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The device's end: a communicator that wraps the group's communicator.
pub struct GroupHandle {
    communicator: Box<dyn Collective>,
    words: Arc<Words>,
}

/// The actor's end.
pub struct GroupOwner {
    control: Arc<dyn CollectiveControl>,
    words: Arc<Words>,
}

#[derive(Debug, Default)]
struct Words {
    entered: AtomicU64,
    finished: AtomicU64,
    /// Why the group was closed; once set, no operation starts.
    closed: OnceLock<String>,
}

/// Divides a communicator between its owner and the device that uses it.
pub fn owned(communicator: Box<dyn Collective>) -> (GroupOwner, GroupHandle) {
    let words: Arc<Words> = Arc::default();
    let owner = GroupOwner { control: communicator.control(), words: words.clone() };
    (owner, GroupHandle { communicator, words })
}

impl GroupOwner {
    /// Operations that the device has started and finished.
    pub fn progress(&self) -> Progress {
        let finished = self.words.finished.load(Ordering::Acquire);
        Progress { entered: self.words.entered.load(Ordering::Acquire), finished }
    }

    /// The communicator's control end.
    pub fn control(&self) -> &Arc<dyn CollectiveControl> {
        &self.control
    }

    /// Ends the group: the device starts no more operations in it, and every wait of its members returns.
    pub fn abort(&self, reason: &str) {
        self.words.closed.get_or_init(|| reason.to_owned());
        self.control.abort(reason);
    }
}

impl Collective for GroupHandle {
    fn position(&self) -> u32 {
        self.communicator.position()
    }

    fn size(&self) -> u32 {
        self.communicator.size()
    }

    #[allow(unsafe_code)] // Starting an operation is unsafe by the trait's contract.
    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        if let Some(reason) = self.words.closed.get() {
            return Err(CollectiveError::aborted(reason.clone()));
        }
        // SAFETY: the caller's contract.
        let ticket = unsafe { self.communicator.start(operation, operands) }?;
        // One thread writes: no read-modify-write is needed.
        self.words.entered.store(self.words.entered.load(Ordering::Relaxed) + 1, Ordering::Release);
        Ok(ticket)
    }

    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError> {
        self.communicator.finish(ticket)?;
        self.words.finished.store(self.words.finished.load(Ordering::Relaxed) + 1, Ordering::Release);
        Ok(())
    }

    fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        self.communicator.control()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::{Behind, SliceOperations};
    use crate::operation::Stream;
    use std::sync::Mutex;

    /// A group of one member that counts operations and records aborts.
    #[derive(Clone, Default)]
    struct Alone(Arc<Mutex<(Progress, Vec<String>)>>);

    impl CollectiveControl for Alone {
        fn behind(&self) -> Vec<Behind> {
            Vec::new()
        }

        fn abort(&self, reason: &str) {
            self.0.lock().unwrap().1.push(reason.to_owned());
        }
    }

    #[allow(unsafe_code)] // By the trait's contract; no memory is accessed.
    impl Collective for Alone {
        fn position(&self) -> u32 {
            0
        }

        fn size(&self) -> u32 {
            1
        }

        unsafe fn start(&mut self, _: &Operation, _: &[Operand]) -> Result<Ticket, CollectiveError> {
            let progress = &mut self.0.lock().unwrap().0;
            progress.entered += 1;
            Ok(Ticket { stream: Stream::Group, index: progress.entered - 1 })
        }

        fn finish(&mut self, _: Ticket) -> Result<(), CollectiveError> {
            Ok(())
        }

        fn abort(&self, _: &str) {}

        fn control(&self) -> Arc<dyn CollectiveControl> {
            Arc::new(self.clone())
        }
    }

    #[test]
    fn owner_observes_the_device_and_aborts_its_operations() {
        let alone = Alone::default();
        let (owner, mut handle) = owned(Box::new(alone.clone()));

        handle.barrier().unwrap();
        handle.barrier().unwrap();
        assert_eq!(owner.progress(), Progress { entered: 2, finished: 2 });
        owner.abort("a later world has begun");

        assert_eq!(handle.barrier(), Err(CollectiveError::aborted("a later world has begun")));
        assert_eq!(owner.progress(), Progress { entered: 2, finished: 2 });
        assert_eq!(alone.0.lock().unwrap().0.entered, 2, "the communicator got an operation after the abort");
        assert_eq!(alone.0.lock().unwrap().1, ["a later world has begun"]);
    }
}
