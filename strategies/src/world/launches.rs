//! `WORLD-4`: the starts of all ranks, over all groups, have a common order.
//!
//! Proven by a run in which each rank waits for every collective where it starts it. All ranks of such a run finish if and
//! only if a common order exists: in a common order, the members of the first collective that is not done all arrive at it;
//! without one, some collectives form a cycle in which each comes before the next on some rank, and none of them begins.

use super::error::WorldError;
use super::run::{Links, Mover, run};
use super::{Post, Step, TraceId, WorldTraces, check, symmetry};
use std::time::Duration;

/// Checks `WORLD-4`; the world is valid otherwise.
pub(super) fn verify(world: &WorldTraces) -> Result<(), WorldError> {
    let strict = WorldTraces { traces: world.traces.iter().map(|steps| at_once(steps)).collect(), ..world.clone() };
    let projections = check::traces(&strict)?;
    let classes = symmetry::classes(&strict, &projections, &|_| 0);
    let no_time = |_: &Post, _: &[u32]| Duration::ZERO;
    let links = Links { mover: Mover::Links, node: &|_| 0, duration: &no_time };
    match run(&strict, &projections, &classes, &links, false) {
        Ok(_) => Ok(()),
        Err(WorldError::Deadlock { mut cycle }) => {
            for wait in &mut cycle {
                // Two steps of the strict trace are one start.
                wait.step = start(world, world.binding(wait.rank).trace, wait.step / 2);
            }
            Err(WorldError::LaunchOrder { cycle })
        }
        Err(error) => Err(error),
    }
}

/// The starts of a trace, each with its await after it.
fn at_once(steps: &[Step]) -> Vec<Step> {
    let starts = steps.iter().filter_map(|step| if let Step::Start(post) = step { Some(post) } else { None });
    starts.flat_map(|post| [Step::Start(post.clone()), Step::Await(post.collective)]).collect()
}

/// The step of a trace that starts its `n`-th collective.
fn start(world: &WorldTraces, trace: TraceId, n: usize) -> usize {
    let steps = world.steps(trace).iter().enumerate();
    let mut starts = steps.filter(|(_, step)| matches!(step, Step::Start(_))).map(|(i, _)| i);
    starts.nth(n).expect("the strict trace has the same starts")
}
