//! Human-readable text of events.

use phalanx_actors::events::{Event, IncidentLine, What};
use phalanx_strategies::elastic::message::Ending;

/// An event as text.
pub(crate) fn sentence(event: &Event) -> String {
    match &event.what {
        What::Leads => format!("coordinating ({})", event.term),
        What::StepsDown => "the lease is lost: another coordinator has taken over, or the store does not answer".into(),
        What::World(world) => {
            format!("{}: {} ranks ({}) from {}", world.generation, world.ranks.len(), world.mesh, world.step)
        }
        What::Incident(line) => incident(line),
        What::Checkpoint(checkpoint) => format!("saved at {}", checkpoint.step),
        What::NotSaved { checkpoint, reason } => {
            format!("the checkpoint of {} was not saved: {reason}; training goes on", checkpoint.step)
        }
        What::Ended { ending: Ending::Finished } => "the job is done".into(),
        What::Ended { ending: Ending::Failed(why) } => format!("the job has failed: {why}"),
        What::NodeRefused { reason, .. } => format!("refused a node: {reason}"),
        What::NodeDiffers { text, .. } => text.clone(),
        What::StoreSilent { error } => format!(
            "the store of the coordinator does not answer; ranks train on, and the job ends only once it does: {error}"
        ),
        What::StoreAnswers { silent_ms } => {
            format!("the store of the coordinator answers again, after {} s", silent_ms / 1000)
        }
        What::NodesNotified => "all nodes have been notified".into(),
    }
}

/// An incident as text: the cause, and the duration of each recovery phase.
pub(crate) fn incident(line: &IncidentLine) -> String {
    let also = if line.also.is_empty() { String::new() } else { format!(" (and {} more)", line.also.len()) };
    let detail = line.detail.as_ref().map_or(String::new(), |detail| format!(": {detail}"));
    let repeated = match line.n_repeated {
        0 => String::new(),
        n => format!(", repeating {n} steps whose state is lost"),
    };
    let p = &line.phases_ms;
    format!(
        "{}: {}{detail}{also} · detect {:.1} · agree {:.1} · abort {:.1} · regroup {:.1} · heal {:.1} · resume {:.1} = {:.1} ms; continuing at {}{repeated}",
        line.generation,
        line.cause,
        p.detect,
        p.agree,
        p.abort,
        p.regroup,
        p.heal,
        p.resume,
        line.total_ms,
        line.first_step
    )
}
