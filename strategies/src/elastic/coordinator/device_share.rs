//! How many ranks a device has: a spare shares the device of a rank, and would compute beside it if it took the rank of another device,
//! which may not have memory for both. The successor of that rank comes soon, on the device that is free: the job waits for it as
//! for any replacement, and then prefers a smaller world.

use super::super::identity::{NodeId, Worker};
use super::super::membership::Status;
use super::Coordinator;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

impl Coordinator {
    /// Members that may take a rank now: the candidates, without those whose device has its share of ranks. After the time for
    /// replacements, those too if the others can form no world.
    pub(super) fn eligible(&self, waited: Duration) -> BTreeSet<Worker> {
        let candidates = self.candidates();
        let n_devices = self.n_devices();
        if n_devices == 0 {
            return candidates;
        }
        let share = self.policy.wanted.size().div_ceil(n_devices);
        let mut n_on: BTreeMap<(NodeId, u32), usize> = BTreeMap::new();
        let mut has_room = |worker: &Worker| {
            let Status::Alive(member) = self.membership.status(*worker) else { return true };
            let Some(device) = member.device else { return true };
            let n = n_on.entry((worker.member.node, device)).or_default();
            *n += 1;
            *n <= share
        };
        // Members of the last world keep their ranks, whatever the share.
        let (mut fit, others): (BTreeSet<_>, BTreeSet<_>) = candidates.iter().partition(|one| self.is_needed(**one));
        fit.iter().for_each(|worker| _ = has_room(worker));
        fit.extend(others.into_iter().filter(|worker| has_room(worker)));
        let last = self.record.world_plan.as_ref().map(|world_plan| world_plan.mesh);
        let is_stuck = waited >= self.policy.replace_patience && self.policy.largest(fit.len(), last).is_none();
        if is_stuck { candidates } else { fit }
    }

    /// Devices of the nodes that report, for which the job was sized: also those that have failed.
    fn n_devices(&self) -> usize {
        let nodes = self.membership.nodes().filter(|node| !self.membership.is_silent(*node));
        nodes.map(|node| self.membership.devices(node).len()).sum()
    }
}
