//! The first machine of a job over several: its coordinator and, if it has ranks, a node, in one process.

use crate::config::JobConfig;
use crate::control::Control;
use crate::coordinate::sentence::sentence;
use crate::coordinate::serve::{CONTROL, Serve, Told, serve};
use crate::error::{JobError, unusable};
use crate::events::{Event, Report};
use crate::node::join::{JoinAs, Leave, enter, join};
use crate::train::output_lock::OutputLock;
use crate::train::plan::ModelPlan;
use crate::train::saving::Saving;
use phalanx_actors::trust::join::JoinString;
use phalanx_strategies::elastic::coordinator::status::Status;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

/// The ranks of this machine.
#[derive(Clone, Debug)]
pub(crate) struct Here {
    pub(crate) program: PathBuf,
    /// Rank processes; there may be none.
    pub(crate) n_slots: u32,
    /// Where ranks of other machines reach them; found out if absent.
    pub(crate) advertise: Option<IpAddr>,
}

/// Coordinates a job and takes part in it, to its end. `told` gets the join string of the other machines.
pub(crate) fn lead(
    config: &JobConfig,
    model: &ModelPlan,
    how: &Serve,
    here: Here,
    control: &Control,
    told: &mut dyn FnMut(&str),
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    let _lock = OutputLock::take(&config.output.output_dir)?;
    let on_event = Mutex::new(on_event);
    // Two threads tell; a reader that panicked on one of them is not asked again on the other.
    let tell = |event: &Event| on_event.lock().unwrap_or_else(PoisonError::into_inner)(event);
    let (has_done_its_part, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let ((joins, joined), (entered, has_entered)) = (channel(), channel());
    let (served, node) = std::thread::scope(|scope| {
        let node = scope.spawn(|| {
            let outcome = take_part(config, here, joined, entered, &is_over, &mut |event| tell(event));
            has_done_its_part.store(outcome.is_ok(), Ordering::Release);
            outcome
        });
        let served = {
            let (joins, _over) = (joins, Raise(&is_over));
            let is_abandoned = || node.is_finished() && !has_done_its_part.load(Ordering::Acquire);
            serve(config, model, how, control, &is_abandoned, &mut |happened| match happened {
                Told::Join(string) => {
                    let _ = joins.send(string.clone());
                    // This machine is the first of the job, so that its leader is here; an error means that it has no ranks.
                    let _ = has_entered.recv();
                    told(&string);
                }
                Told::StandsBy => tell(&Event::Note("another coordinator of this job lives; it is waited for".into())),
                Told::Event(event) => tell(&Event::Note(sentence(&event))),
            })
        };
        (served, node.join())
    });
    // What went wrong here is why the job went wrong.
    let reported = node.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    let status = served?;
    match (reported, status) {
        (Some(report), _) => Ok(report),
        (None, Some(status)) => report_of(config, &status),
        (None, None) => Err(JobError::JobFailed("another coordinator has taken over".into())),
    }
}

/// Is set when it goes, however that comes about.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn take_part(
    config: &JobConfig,
    here: Here,
    joined: Receiver<String>,
    entered: Sender<()>,
    is_over: &AtomicBool,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Option<Report>, JobError> {
    let Ok(string) = joined.recv() else { return Ok(None) };
    if here.n_slots == 0 {
        return Ok(None);
    }
    let string: JoinString = string.parse().map_err(unusable)?;
    let dir = config.output.output_dir.join(CONTROL).join("here");
    let credential = enter(&string, &dir)?;
    // Nobody waits for it any more if the coordinator has failed.
    let _ = entered.send(());
    drop(entered);
    let (n_slots, advertise, program) = (here.n_slots, here.advertise, here.program);
    let how = JoinAs { join: string, credential, dir, n_slots, advertise, program };
    let leaves = || if is_over.load(Ordering::Acquire) { Leave::Now } else { Leave::Stay };
    join(how, &leaves, on_event)
}

/// How a job ended whose leader was on another machine.
fn report_of(config: &JobConfig, status: &Status) -> Result<Report, JobError> {
    let output = &config.output;
    let saving = Saving::new(output, Vec::new());
    let (checkpoint, _) = saving.find(&crate::config::output::Resume::Auto)?;
    let finished = !status.wishes.stop;
    let model_dir = finished.then(|| output.output_dir.join("model"));
    Ok(Report { steps: status.checkpoint.step.0, finished, last: None, checkpoint, model_dir })
}
