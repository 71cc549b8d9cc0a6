//! The outputs of a rank actor: the queue of its device thread, operators' requests, and the channel to its supervisor.

use crate::control::Control;
use crate::error::JobError;
use crate::launch::channel::FrameSender;
use crate::rank::device_watch::DeviceWatch;
use crate::rank::rank_messages::FromRank;
use crate::train::event_sink::Fault;
use crate::train::member::Member;
use phalanx_actors::mesh_group::Missing;
use phalanx_actors::rank::{DeviceEvent, Handle, RankPort, Task};
use phalanx_actors::step_log::{Record, StepWriter};
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_strategies::elastic::identity::{Generation, Step, Worker};
use phalanx_strategies::elastic::message::{FAILURE_LEN_MAX, MemberReport, Requests, Settled};
use phalanx_strategies::elastic::progress::Progress;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

/// The channel to the supervisor, for the actor and the device thread.
#[derive(Clone)]
pub(crate) struct Outbox(Arc<Mutex<FrameSender>>);

impl Outbox {
    pub(crate) fn new(sender: FrameSender) -> Outbox {
        Outbox(Arc::new(Mutex::new(sender)))
    }

    /// Sends a message.
    pub(crate) fn send(&self, what: &FromRank) {
        what.deliver(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

pub(crate) struct Port {
    pub(crate) worker: Worker,
    tasks: mpsc::Sender<Task>,
    left: Arc<AtomicU64>,
    outbox: Outbox,
    control: Arc<Control>,
    progress_counter: ProgressCounter,
    device_watch: DeviceWatch,
    /// A fault of the device thread that does not stop it.
    pub(crate) fault: Fault,
}

/// The tasks of a device thread.
pub(crate) struct Tasks {
    tasks: mpsc::Receiver<Task>,
    /// Worlds before this generation have ended.
    left: Arc<AtomicU64>,
}

impl Port {
    /// The port of a worker, and the receiver of its tasks.
    pub(crate) fn new(
        worker: Worker,
        outbox: Outbox,
        control: Arc<Control>,
        progress_counter: ProgressCounter,
        device_watch: DeviceWatch,
    ) -> (Port, Tasks) {
        let (sender, tasks) = mpsc::channel();
        let left: Arc<AtomicU64> = Arc::default();
        let fault = Fault::default();
        let port =
            Port { worker, tasks: sender, left: left.clone(), outbox, control, progress_counter, device_watch, fault };
        (port, Tasks { tasks, left })
    }
}

impl RankPort for Port {
    fn assign(&mut self, task: Task) {
        // When the device thread ends, the process exits.
        let _ = self.tasks.send(task);
    }

    fn leave(&mut self, generation: Generation) {
        self.left.fetch_max(generation.0, Ordering::AcqRel);
        self.progress_counter.leave(generation.0);
        self.device_watch.leave();
    }

    fn request(&mut self, requests: Requests) {
        if requests.stop {
            self.control.stop();
        }
        self.control.saves.fetch_max(requests.save, Ordering::AcqRel);
        self.control.pause.fetch_max(requests.pause.0, Ordering::AcqRel);
    }

    fn report(&mut self, status_report: MemberReport) {
        let progress = self.device_watch.progress();
        // A supervisor that no longer reads is about to end this process.
        let mut fault = self.fault.now();
        fault.iter_mut().for_each(|fault| fault.truncate(fault.floor_char_boundary(FAILURE_LEN_MAX)));
        self.outbox.send(&FromRank::StatusReport(MemberReport { progress, fault, ..status_report }));
    }

    fn progress(&self) -> Progress {
        self.device_watch.progress()
    }

    fn waits_for(&mut self, missing: &[Missing]) {
        for missing in missing {
            let (worker, entered, finished) = (self.worker, missing.watermark.entered, missing.watermark.finished);
            tracing::info!(%worker, %missing, entered, finished, "waiting for peers");
        }
    }
}

impl Tasks {
    /// Waits for the next task, and works `meanwhile` until that returns `false`; `None` once the actor has ended. Skips tasks in worlds
    /// that this rank has left, except settling the outcome.
    pub(crate) fn next(&self, mut meanwhile: impl FnMut() -> bool) -> Option<Task> {
        let is_left = |task: &Task| generation(task).is_some_and(|of| of.0 < self.left.load(Ordering::Acquire));
        loop {
            match self.tasks.try_recv() {
                Ok(task) if is_left(&task) => {}
                Ok(task) => return Some(task),
                Err(mpsc::TryRecvError::Disconnected) => return None,
                Err(mpsc::TryRecvError::Empty) if meanwhile() => {}
                Err(mpsc::TryRecvError::Empty) => return self.tasks.iter().find(|task| !is_left(task)),
            }
        }
    }
}

/// The world of a task.
pub(crate) fn generation(task: &Task) -> Option<Generation> {
    match task {
        Task::Join(world_plan) => Some(world_plan.generation),
        Task::Train { steps, .. } | Task::CatchUp(steps) => Some(steps.generation()),
        Task::Settle(_) | Task::Keep(_) | Task::Exit => None,
    }
}

/// The membership of a trainer in a world; records of its steps reach the actor through the step log.
pub(crate) struct Membership {
    pub(crate) steps: StepWriter,
    pub(crate) rank: Handle,
}

impl Membership {
    fn write(&mut self, record: Record) -> Result<(), JobError> {
        self.steps.write(record).map_err(JobError::Superseded)
    }
}

impl Member for Membership {
    fn computed(&mut self, step: u64) -> Result<(), JobError> {
        self.write(Record::Computed(Step(step)))
    }

    fn committed(&mut self, step: u64, requests: Requests) -> Result<(), JobError> {
        self.write(Record::Committed(Step(step), requests))
    }

    fn stopped(&mut self, step: u64) -> Result<(), JobError> {
        self.write(Record::Stopped(Step(step)))
    }

    fn caught_up(&mut self, step: u64) -> Result<(), JobError> {
        self.write(Record::CaughtUp(Step(step)))?;
        self.rank.tell(DeviceEvent::Logged);
        Ok(())
    }

    fn followed(&mut self, step: u64) -> Result<(), JobError> {
        self.write(Record::Followed(Step(step)))
    }

    fn outcome(&mut self, step: u64) -> Result<(), JobError> {
        self.write(Record::Outcome(Step(step)))
    }

    fn settled(&mut self, step: u64, suspect: Option<u32>) -> Result<(), JobError> {
        let settled = Settled { step: Step(step), suspects: suspect.into_iter().collect() };
        self.rank.tell(DeviceEvent::Settled(self.steps.generation(), settled));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_actors::step_log::step_log;
    use phalanx_strategies::elastic::identity::{Incarnation, MemberId, NodeId};
    use std::os::unix::net::UnixStream;

    #[test]
    fn tasks_of_a_left_world_are_skipped_except_its_outcome() {
        let (socket, _node) = UnixStream::pair().unwrap();
        let worker = Worker { member: MemberId { node: NodeId(0), slot: 0 }, incarnation: Incarnation(1) };
        let outbox = Outbox::new(FrameSender::into_socket(socket));
        let progress_counter = ProgressCounter::new();
        let device_watch = DeviceWatch::new(crate::devices::host(), progress_counter.clone());
        let (mut port, tasks) = Port::new(worker, outbox, Arc::default(), progress_counter, device_watch);
        let train = |generation| Task::Train { steps: step_log(Generation(generation)).0, trains: true };

        port.assign(train(3));
        port.assign(Task::Settle(None));
        port.leave(Generation(4));
        port.assign(train(4));
        drop(port);

        assert!(matches!(tasks.next(|| false), Some(Task::Settle(None))));
        assert!(matches!(tasks.next(|| false), Some(Task::Train { steps, .. }) if steps.generation() == Generation(4)));
        assert!(tasks.next(|| false).is_none());
    }

    #[test]
    fn device_prepares_only_while_it_has_no_task() {
        let (sender, tasks) = mpsc::channel();
        let tasks = Tasks { tasks, left: Arc::default() };
        let mut n_pieces = 0;
        sender.send(Task::Settle(None)).unwrap();

        let first = tasks.next(|| unreachable!("a task waits"));
        let second = tasks.next(|| {
            n_pieces += 1;
            if n_pieces == 3 {
                sender.send(Task::Exit).unwrap();
            }
            true
        });

        assert!(matches!((first, second), (Some(Task::Settle(None)), Some(Task::Exit))));
        assert_eq!(n_pieces, 3);
    }
}
