//! A rank process: takes its orders, runs, says how it went, and ends with a code that says whose fault it was.

use super::error::JobError;
use super::orders::{Assignment, Excuse, Order, Word};
use super::session;
use crate::job::{Control, Event};
use crate::launch::channel::{self, FrameReceiver, FrameSender};
use crate::launch::error::LaunchError;
use crate::launch::failure::EXIT_PEER_LOST;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Runs the rank whose launcher is at the other ends of these inherited descriptors; returns its exit code.
///
/// # Errors
/// When there is no launcher at their other ends, so that nobody could be told.
pub(crate) fn run(channel: RawFd, passage: RawFd) -> Result<i32, LaunchError> {
    let (mut sender, mut receiver) = channel::adopt(channel)?;
    let passage = channel::adopt_passage(passage)?;
    let control = Arc::new(Control::default());
    let outcome = assignment(&mut receiver).and_then(|assignment| {
        obey(receiver, Arc::clone(&control))?;
        let leads = assignment.rank == 0;
        // Whoever does not listen any more is about to end this process.
        let mut tell = |event: &Event| tell(&mut sender, leads, event);
        session::run_rank(&assignment, &passage, &control, &mut tell)
    });
    let (word, code) = match outcome {
        Ok(report) => (Word::Done(report), 0),
        Err(error) => {
            let excuse = Excuse::from(&error);
            let code = match (excuse.is_consequence, excuse.is_input) {
                (true, _) => EXIT_PEER_LOST,
                (false, true) => 2,
                (false, false) => 1,
            };
            (Word::Failed(excuse), code)
        }
    };
    let _ = sender.send(&word);
    Ok(code)
}

/// The leader tells everything, the others how their steps went.
fn tell(sender: &mut FrameSender, leads: bool, event: &Event) {
    if leads || matches!(event, Event::Step(_)) {
        let _ = sender.send(&Word::Event(event.clone()));
    }
}

fn assignment(receiver: &mut FrameReceiver) -> Result<Assignment, JobError> {
    let unusable = |what: String| JobError::Unusable(format!("a rank was told nothing that it can run: {what}"));
    let frame = receiver.receive().map_err(|e| unusable(e.to_string()))?;
    let frame = frame.ok_or_else(|| unusable("its launcher has gone".into()))?;
    match serde_json::from_slice(&frame) {
        Ok(Order::Run(assignment)) => Ok(assignment),
        Ok(order) => Err(unusable(format!("{order:?} came first"))),
        Err(error) => Err(unusable(error.to_string())),
    }
}

/// Takes orders on a thread of its own, as long as there is a launcher.
fn obey(mut receiver: FrameReceiver, control: Arc<Control>) -> Result<(), JobError> {
    let listen = move || {
        while let Ok(Some(frame)) = receiver.receive() {
            match serde_json::from_slice(&frame) {
                Ok(Order::Stop) => control.stop(),
                Ok(Order::Save) => control.save(),
                Ok(Order::Run(_)) | Err(_) => tracing::warn!("an order that is none was ignored"),
            }
        }
    };
    let spawned = std::thread::Builder::new().name("orders".into()).spawn(listen);
    spawned.map(drop).map_err(|e| JobError::Thread(crate::cpu::thread::ThreadError::Spawn(e)))
}
