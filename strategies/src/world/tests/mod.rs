//! Valid worlds, worlds with one fault, and simulated times.

mod faults;
mod random;
mod scale;
mod times;

use super::*;

const MICRO: Duration = Duration::from_micros(1);

/// `[all-reduce of n elements] #sequence` on a slot.
fn all_reduce(slot: u32, sequence: u32, n_elements: u64) -> Post {
    on(slot, sequence, Kind::AllReduce, n_elements)
}

fn on(slot: u32, sequence: u32, kind: Kind, n_elements: u64) -> Post {
    let collective = Collective { kind, group: GroupSlot(slot), sequence, unit: 1 };
    Post { collective, tensors: vec![Tensor { n_elements, dtype: DType::F32 }] }
}

fn compute(cost: Duration) -> Step {
    Step::Compute { name: "matmul", microbatch: None, cost }
}

/// Starts and awaits at once.
fn both(post: Post) -> [Step; 2] {
    let collective = post.collective;
    [Step::Start(post), Step::Await(collective)]
}

/// A world in which rank `i` runs `traces[i]` and binds all of `groups` that it is a member of, in their order.
fn world(groups: &[&[u32]], traces: Vec<Vec<Step>>) -> WorldTraces {
    let mut world = WorldTraces::new();
    let ids: Vec<GroupId> = groups.iter().map(|g| world.group(g.iter().map(|r| Rank(*r)).collect())).collect();
    for (rank, steps) in traces.into_iter().enumerate() {
        let bound = groups.iter().zip(&ids).filter(|(g, _)| g.contains(&(rank as u32))).map(|(_, id)| *id);
        let bound = bound.collect();
        let trace = world.trace(steps);
        world.rank(trace, bound);
    }
    world
}
