//! The controls of a rank's communicators in a world, for its mesh-group actors.

use crate::train::team::TeamPlan;
use phalanx_actors::mesh_group::{GroupControl, Watermark};
use phalanx_collective::hierarchical::placement::Placement;
use phalanx_collective::shm::control::Control;
use phalanx_strategies::mesh::Axes;
use std::sync::Arc;

/// A group that lies on one machine, or the part of one that does.
struct GroupControls {
    axes: Axes,
    rank: u32,
    members: Vec<u32>,
    /// Its number in the world of this machine and the places of its members there, if all of them are here.
    here: Option<(usize, Vec<u32>)>,
    control: Arc<Control>,
}

impl GroupControl for GroupControls {
    fn axes(&self) -> Axes {
        self.axes
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn members(&self) -> &[u32] {
        &self.members
    }

    fn watermarks(&self) -> Vec<Option<Watermark>> {
        let Some((group, positions)) = &self.here else { return vec![None; self.members.len()] };
        let mark = |position: &u32| {
            let progress = self.control.progress_in(*group, *position).ok()?;
            Some(Watermark { entered: progress.entered, finished: progress.finished })
        };
        positions.iter().map(mark).collect()
    }

    /// One memory carries all groups of a machine, so they end together.
    fn abort(&self, reason: &str) {
        self.control.abort(reason);
    }
}

/// Those of `member`: one for each of its groups, and that of all ranks, which a guest has too.
pub(crate) fn group_controls(
    plan: &TeamPlan,
    placement: &Placement,
    control: &Arc<Control>,
    machine: u32,
    member: u32,
) -> Vec<Box<dyn GroupControl>> {
    let here = placement.ranks_of(machine);
    let of = |(group, axes): (usize, Axes)| {
        let members = placement.world().groups()[group].clone();
        let position = |rank: &u32| here.iter().position(|other| other == rank).map(|at| at as u32);
        let positions: Option<Vec<u32>> = members.iter().map(position).collect();
        let here = positions.map(|positions| (placement.machine_group(group, machine), positions));
        let controls = GroupControls { axes, rank: member, members, here, control: control.clone() };
        Box::new(controls) as Box<dyn GroupControl>
    };
    plan.meetings(member).into_iter().map(of).collect()
}
