//! Watches a device that works apart from its thread, such as a GPU, by what the device itself has written.
//!
//! Invariants:
//! - `DEVICE-WATCH-1` A device hangs if it has work, completes none of it for the suspicion time, or for [`PAUSES`] times the
//!   longest earlier pause or the longest estimated one if that is longer, and is in no collective of its world: those may wait
//!   for peers. The process then ends at once, because a call of the driver that never returns can be neither joined nor
//!   cancelled; its successor receives the state from peers.
//! - `DEVICE-WATCH-2` Time in which this process did not run does not count.
//! - `DEVICE-WATCH-3` Until the process has committed a step, nothing is known of its device: only the time for a first step
//!   counts.

use crate::error::JobError;
use crate::process_end::end_with;
use crate::train::team::ConnectedGroup;
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_device::{Activity, CollectiveControl, Device, ThreadError};
use phalanx_strategies::elastic::progress::{At, PAUSES, Patience, Progress, Wait};
use phalanx_strategies::mesh::Axes;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Looks at the device in each suspicion time.
const LOOKS: u32 = 8;

/// The control ends of a world's groups, with their axes.
type World = Vec<(Axes, Arc<dyn CollectiveControl>)>;

#[derive(Clone)]
pub(crate) struct DeviceWatch {
    device: Arc<dyn Device>,
    progress_counter: ProgressCounter,
    world: Arc<Mutex<World>>,
    /// Whether the process has committed a step.
    is_proven: Arc<AtomicBool>,
}

impl DeviceWatch {
    /// A watch on the device of this process, whose thread counts its own progress.
    pub(crate) fn new(device: Arc<dyn Device>, progress_counter: ProgressCounter) -> DeviceWatch {
        DeviceWatch { device, progress_counter, world: Arc::default(), is_proven: Arc::default() }
    }

    /// The device joins the world of these groups.
    pub(crate) fn join(&self, groups: &[ConnectedGroup]) {
        *self.world() = groups.iter().map(|group| (group.axes, group.owner.control().clone())).collect();
    }

    /// The world ends: from now on a pause in one of its collectives counts.
    pub(crate) fn leave(&self) {
        self.world().clear();
    }

    /// The process has committed a step.
    pub(crate) fn commit(&self) {
        self.is_proven.store(true, Ordering::Relaxed);
    }

    /// Progress of the device: of its thread, and of what it does apart from it.
    pub(crate) fn progress(&self) -> Progress {
        let Progress { ticks, at } = self.progress_counter.read();
        let Some(Activity { completed, .. }) = self.device.activity() else { return Progress { ticks, at } };
        let at = self.waits().filter(|_| at == At::Computes).map_or(at, At::Waits);
        Progress { ticks: ticks.wrapping_add(u64::from(completed)), at }
    }

    /// The collective that the device is in, if any: it has begun it and not completed it.
    fn waits(&self) -> Option<Wait> {
        self.world().iter().find_map(|(axes, group)| {
            let progress = group.device_progress()?;
            let number = progress.entered.saturating_sub(1) as u32;
            (progress.entered > progress.finished).then_some(Wait { axes: *axes, number })
        })
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches on a thread of its own, which ends the process when the device hangs: when it pauses for `patience.stuck`, or for
    /// `patience.first_step` before the process has committed a step.
    ///
    /// # Errors
    /// When the system has no room for another thread.
    pub(crate) fn start(self, patience: Patience) -> Result<(), JobError> {
        let watch = move || {
            let mut stall = Stall::new(patience);
            let mut before = Instant::now();
            loop {
                std::thread::sleep(patience.stuck / LOOKS);
                let now = Instant::now();
                let elapsed = now.duration_since(std::mem::replace(&mut before, now));
                let Some(activity) = self.device.activity() else { continue };
                let is_proven = self.is_proven.load(Ordering::Relaxed);
                if let Some(paused) = stall.look(elapsed, activity, self.waits().is_some(), is_proven) {
                    end_process(&format!(
                        "the {} device has work and completed none of it for {:.2} s: it hangs",
                        self.device.name(),
                        paused.as_secs_f64()
                    ));
                }
            }
        };
        let spawned = std::thread::Builder::new().name("device-watch".into()).spawn(watch);
        spawned.map(drop).map_err(|e| JobError::Thread(ThreadError::Spawn(e)))
    }
}

/// Ends this process because its device or its data are lost to it; the node starts a successor.
pub(crate) fn end_process(reason: &str) -> ! {
    eprintln!("{reason}; this process ends, and its successor gets the state from other ranks or the last checkpoint");
    end_with(1)
}

/// How long a device has completed nothing (`DEVICE-WATCH-1`).
struct Stall {
    patience: Patience,
    completed: u32,
    paused: Duration,
    /// The longest pause that ended.
    longest: Duration,
}

impl Stall {
    fn new(patience: Patience) -> Stall {
        Stall { patience, completed: 0, paused: Duration::ZERO, longest: Duration::ZERO }
    }

    /// Looks at a device, `elapsed` after the last look. Returns its pause if the device hangs.
    fn look(
        &mut self,
        elapsed: Duration,
        activity: Activity,
        is_in_collective: bool,
        is_proven: bool,
    ) -> Option<Duration> {
        let Activity { completed, is_busy, expected } = activity;
        if std::mem::replace(&mut self.completed, completed) != completed || !is_busy || is_in_collective {
            self.longest = self.longest.max(std::mem::take(&mut self.paused));
            return None;
        }
        // DEVICE-WATCH-2
        self.paused += elapsed.min(self.patience.stuck / LOOKS * 2);
        // DEVICE-WATCH-3
        let patience = if is_proven { self.patience.stuck } else { self.patience.first_step };
        (self.paused >= patience.max(self.longest.max(expected) * PAUSES)).then_some(self.paused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience { first_step: Duration::from_secs(5), stuck: Duration::from_millis(800) };
    const LOOK: Duration = Duration::from_millis(100);

    fn busy(completed: u32) -> Activity {
        Activity { completed, is_busy: true, expected: Duration::ZERO }
    }

    /// Looks at a device that completes nothing until it counts as hung, at most 100 times.
    fn looks_until_hung(stall: &mut Stall, activity: Activity, is_in_collective: bool) -> Option<usize> {
        (1..=100).find(|_| stall.look(LOOK, activity, is_in_collective, true).is_some())
    }

    // DEVICE-WATCH-1
    #[test]
    fn device_that_completes_no_work_for_the_suspicion_time_hangs() {
        let mut stall = Stall::new(PATIENCE);
        assert_eq!(stall.look(LOOK, busy(7), false, true), None);

        assert_eq!(looks_until_hung(&mut stall, busy(7), false), Some(8));
    }

    // DEVICE-WATCH-1
    #[test]
    fn device_without_work_in_a_collective_or_with_progress_does_not_hang() {
        let idle = Activity { is_busy: false, ..busy(7) };
        let mut stall = Stall::new(PATIENCE);

        assert_eq!(looks_until_hung(&mut stall, idle, false), None);
        assert_eq!(looks_until_hung(&mut stall, busy(7), true), None);
        assert!((8..108).all(|n| stall.look(LOOK * 2, busy(n), false, true).is_none()));
    }

    // DEVICE-WATCH-1
    #[test]
    fn device_that_recovered_from_a_pause_may_pause_longer() {
        let mut stall = Stall::new(PATIENCE);
        (0..6).for_each(|_| assert_eq!(stall.look(LOOK, busy(0), false, true), None));
        assert_eq!(stall.look(LOOK, busy(1), false, true), None);

        assert_eq!(looks_until_hung(&mut stall, busy(1), false), Some(6 * PAUSES as usize));
    }

    // DEVICE-WATCH-1
    #[test]
    fn device_whose_work_is_estimated_to_take_long_may_pause_longer() {
        let mut stall = Stall::new(PATIENCE);
        let slow = Activity { expected: LOOK * 5, ..busy(7) };
        assert_eq!(stall.look(LOOK, slow, false, true), None);

        assert_eq!(looks_until_hung(&mut stall, slow, false), Some(5 * PAUSES as usize));
    }

    // DEVICE-WATCH-3
    #[test]
    fn device_of_a_process_without_a_committed_step_has_the_time_for_a_first_step() {
        let mut stall = Stall::new(PATIENCE);
        assert_eq!(stall.look(LOOK, busy(7), false, false), None);

        assert!((1..50).all(|_| stall.look(LOOK, busy(7), false, false).is_none()));
        assert!(stall.look(LOOK, busy(7), false, false).is_some());
    }

    // DEVICE-WATCH-2
    #[test]
    fn device_of_a_process_that_was_suspended_does_not_hang() {
        let mut stall = Stall::new(PATIENCE);

        assert_eq!(stall.look(LOOK * 100, busy(0), false, true), None);
        assert_eq!(looks_until_hung(&mut stall, busy(0), false), Some(6));
    }
}
