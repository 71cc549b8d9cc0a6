//! Validation of messages beyond the types of their fields. The state machines index by message fields, so a
//! contradictory message is rejected where it is decoded.

use super::copies::CLAIMS_MAX;
use super::devices::{DEVICES_MAX, DeviceHealth, TEXT_LEN_MAX};
use super::identity::{Generation, NodeId, Worker};
use super::inputs::{INPUT_LEN_MAX, INPUTS_MAX};
use super::message::{CatchUp, DesiredState, MemberReport, Record, Report, Stage, WorldPlan};
use super::recovery::Transfer;
use super::shadow::{Cut, Shard};
use crate::mesh::Mesh;

/// Upper limit of ranks, and of parts of a cut.
pub const RANKS_MAX: usize = 1 << 16;
/// Upper limit of decoded counters, which leaves room to increment them.
pub const COUNTER_MAX: u64 = 1 << 62;

/// Why a message is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMessage {
    /// A node may report its own workers only.
    #[error("{node} reports a worker of another node: {found}")]
    Foreign {
        /// The reporting node.
        node: NodeId,
        /// The foreign worker.
        found: Worker,
    },
    /// The shard lies outside its cut.
    #[error("{0:?} is not a valid shard: each axis is cut into 1 to {RANKS_MAX} parts, counted from 0")]
    Shard(Shard),
    /// The mesh has no ranks, or too many.
    #[error("mesh {0} must have 1 to {RANKS_MAX} ranks")]
    Mesh(Mesh),
    /// A list whose length does not match the mesh.
    #[error("mesh {mesh} needs {expected} {what}, found {found}")]
    Count {
        /// The shape.
        mesh: Mesh,
        /// Contents of the list.
        what: &'static str,
        /// Expected length.
        expected: usize,
        /// Found length.
        found: usize,
    },
    /// A catching-up member whose future rank does not extend the current mesh.
    #[error("{worker} catches up for rank {rank} of {mesh}, which does not extend the current mesh")]
    CatchUp {
        /// The worker.
        worker: Worker,
        /// The mesh of the rank.
        mesh: Mesh,
        /// The rank.
        rank: usize,
    },
    /// The desired state of one generation carries the plan of another.
    #[error("desired state for {expected} carries a world plan for {found}")]
    Generation {
        /// Generation of the desired state.
        expected: Generation,
        /// Generation of the world plan.
        found: Generation,
    },
    /// A desired state that stops the members carries a world plan.
    #[error("desired state that stops the members carries a world plan for {0}")]
    Untimely(Generation),
    /// A counter above [`COUNTER_MAX`].
    #[error("{what} is {found}, expected at most {COUNTER_MAX}")]
    Counter {
        /// Name of the counter.
        what: &'static str,
        /// Its value.
        found: u64,
    },
    /// A node with more devices than a machine can have.
    #[error("found {0} devices of a node, expected at most {DEVICES_MAX}")]
    Devices(usize),
    /// A text of a device that is too long.
    #[error("found {0} bytes of text about a device, expected at most {TEXT_LEN_MAX}")]
    DeviceText(usize),
    /// A node with more inputs than a message may name.
    #[error("found {0} inputs of a node, expected at most {INPUTS_MAX}")]
    Inputs(usize),
    /// A text of an input that is too long.
    #[error("found {0} bytes of text about an input, expected at most {INPUT_LEN_MAX}")]
    InputText(usize),
    /// A worker on a device that its node does not have.
    #[error("{worker} uses device {found} of {n_devices}")]
    NoSuchDevice {
        /// The worker.
        worker: Worker,
        /// Its device.
        found: u32,
        /// Number of devices of its node.
        n_devices: usize,
    },
    /// A report of differing copies with too many entries.
    #[error("{0} reports more than {CLAIMS_MAX} copies of a tensor, or a name that is too long")]
    Difference(Worker),
}

impl Report {
    /// Validates a report.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self) -> Result<(), InvalidMessage> {
        counted("boot", self.boot.0)?;
        counted("number of a report", self.number)?;
        let n_devices = self.devices.len();
        if n_devices > DEVICES_MAX {
            return Err(InvalidMessage::Devices(n_devices));
        }
        self.devices.iter().try_for_each(DeviceHealth::check)?;
        let n_inputs = self.inputs.len();
        if n_inputs > INPUTS_MAX {
            return Err(InvalidMessage::Inputs(n_inputs));
        }
        let longest = self.inputs.iter().flat_map(|input| [&input.name, &input.value]).map(String::len).max();
        if let Some(len) = longest.filter(|len| *len > INPUT_LEN_MAX) {
            return Err(InvalidMessage::InputText(len));
        }
        for member in &self.members {
            if member.worker.member.node != self.node {
                return Err(InvalidMessage::Foreign { node: self.node, found: member.worker });
            }
            if let Some(found) = member.device.filter(|device| *device as usize >= n_devices) {
                return Err(InvalidMessage::NoSuchDevice { worker: member.worker, found, n_devices });
            }
            member.check()?;
        }
        Ok(())
    }
}

impl DeviceHealth {
    fn check(&self) -> Result<(), InvalidMessage> {
        let optional = [&self.slowed_by, &self.event, &self.fault].into_iter().flatten();
        let longest = optional.chain([&self.id, &self.name]).map(String::len).max().unwrap_or_default();
        if longest <= TEXT_LEN_MAX { Ok(()) } else { Err(InvalidMessage::DeviceText(longest)) }
    }
}

impl MemberReport {
    /// Validates a status report.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self) -> Result<(), InvalidMessage> {
        let commit_state = &self.commit_state;
        let steps = commit_state
            .applied
            .map(|applied| applied.step)
            .into_iter()
            .chain(commit_state.voted.map(|vote| vote.step));
        let lineages = commit_state
            .applied
            .map(|applied| applied.lineage)
            .into_iter()
            .chain(commit_state.voted.map(|vote| vote.generation));
        counted("incarnation", self.worker.incarnation.0)?;
        counted("ticks of a device", self.progress.ticks)?;
        lineages.chain([self.generation, commit_state.entered]).try_for_each(|g| counted("generation", g.0))?;
        steps.chain([self.entered]).try_for_each(|step| counted("step", step.0))?;
        if let Some(saved) = &self.saved {
            counted("generation", saved.of.generation.0)?;
            counted("step", saved.of.step.0)?;
            saved.shard.check()?;
        }
        if let Some(unsaved) = &self.unsaved {
            counted("generation", unsaved.of.generation.0)?;
            counted("step", unsaved.of.step.0)?;
        }
        if let Some(settled) = &self.settled {
            counted("step", settled.step.0)?;
            if settled.suspects.len() > CLAIMS_MAX {
                return Err(InvalidMessage::Difference(self.worker));
            }
        }
        if let Some(difference) = self.broken.as_ref().and_then(|broken| broken.corrupt.as_ref()) {
            counted("step", difference.step.0)?;
            if !difference.is_bounded() {
                return Err(InvalidMessage::Difference(self.worker));
            }
        }
        if let Some(found) = self.broken.as_ref().and_then(|broken| broken.not_finite.as_ref()) {
            counted("step", found.step.0)?;
        }
        self.holds.iter().try_for_each(Shard::check)
    }
}

impl DesiredState {
    /// Validates a desired state.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self) -> Result<(), InvalidMessage> {
        counted("term", self.id.term.0)?;
        counted("generation", self.id.generation.0)?;
        counted("number of checkpoints", self.requests.save)?;
        let Some(world_plan) = &self.world_plan else { return Ok(()) };
        let (found, expected) = (world_plan.generation, self.id.generation);
        if found != expected {
            return Err(InvalidMessage::Generation { expected, found });
        }
        if !matches!(self.id.stage, Stage::Form | Stage::Run) {
            return Err(InvalidMessage::Untimely(found));
        }
        world_plan.check()
    }
}

impl Record {
    /// Validates a record.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self) -> Result<(), InvalidMessage> {
        counted("term", self.term.0)?;
        counted("generation", self.generation.0)?;
        counted("number of checkpoints", self.requests.save.max(self.n_saves))?;
        counted("generation", self.requests.pause.0.max(self.checkpoint.generation.0))?;
        counted("step", self.checkpoint.step.0)?;
        self.gone.values().try_for_each(|incarnation| counted("incarnation", incarnation.0))?;
        if let Some(mesh) = self.wanted {
            ranks(mesh)?;
        }
        self.world_plan.as_ref().map_or(Ok(()), |world_plan| world_plan.check())
    }
}

impl WorldPlan {
    /// Checks that each list has one entry for each rank of the mesh.
    fn check(&self) -> Result<(), InvalidMessage> {
        let mesh = self.mesh;
        let n_ranks = ranks(mesh)?;
        let counts = [
            ("ranks", n_ranks, self.assignments.len()),
            ("addresses of members", n_ranks + self.catching_up.len() + self.guests.len(), self.addresses.len()),
            ("lists of shards", n_ranks, self.holds.len()),
            ("ranks with a shard of their own", n_ranks, self.holds.iter().filter(|shards| !shards.is_empty()).count()),
            ("lists of transfers", n_ranks, self.transfers.len()),
        ];
        if let Some((what, expected, found)) = counts.into_iter().find(|(_, expected, found)| expected != found) {
            return Err(InvalidMessage::Count { mesh, what, expected, found });
        }
        counted("generation", self.generation.0.max(self.base.lineage.0).max(self.voted_in.0))?;
        counted("step", self.base.step.0)?;
        counted("number of checkpoints", self.n_saves)?;
        self.disputed.iter().try_for_each(|step| counted("step", step.0))?;
        self.holds.iter().flatten().try_for_each(Shard::check)?;
        check_transfers(self.transfers.iter().flatten())?;
        self.catching_up.iter().try_for_each(|catch_up| catch_up.check(mesh))
    }
}

impl CatchUp {
    /// Checks that the rank exists, in a mesh that cuts the state as the world's mesh does.
    fn check(&self, world: Mesh) -> Result<(), InvalidMessage> {
        let leads_there = self.rank < ranks(self.mesh)? && Cut::of(&self.mesh) == Cut::of(&world);
        if !leads_there || self.holds.first() != Some(&Shard::of(&self.mesh, self.rank)) {
            return Err(InvalidMessage::CatchUp { worker: self.worker, mesh: self.mesh, rank: self.rank });
        }
        self.holds.iter().try_for_each(Shard::check)?;
        check_transfers(self.transfers.iter())
    }
}

fn check_transfers<'a>(mut transfers: impl Iterator<Item = &'a Transfer>) -> Result<(), InvalidMessage> {
    transfers.try_for_each(|transfer| {
        transfer.shard.check()?;
        transfer.source.sender(transfer.shard).map_or(Ok(()), |(_, held)| held.check())
    })
}

impl Shard {
    fn check(&self) -> Result<(), InvalidMessage> {
        let Shard { stage, tensor, part, cut } = *self;
        let n =
            u64::from(cut.n_stages).checked_mul(cut.n_tensors.into()).and_then(|n| n.checked_mul(cut.n_parts.into()));
        let is_within = stage < cut.n_stages && tensor < cut.n_tensors && part < cut.n_parts;
        if is_within && n.is_some_and(|n| n <= RANKS_MAX as u64) { Ok(()) } else { Err(InvalidMessage::Shard(*self)) }
    }
}

/// Number of ranks of a valid mesh.
fn ranks(mesh: Mesh) -> Result<usize, InvalidMessage> {
    mesh.checked_size().filter(|n| (1..=RANKS_MAX).contains(n)).ok_or(InvalidMessage::Mesh(mesh))
}

fn counted(what: &'static str, found: u64) -> Result<(), InvalidMessage> {
    if found <= COUNTER_MAX { Ok(()) } else { Err(InvalidMessage::Counter { what, found }) }
}

#[cfg(test)]
mod tests {
    use super::super::inputs::Input;
    use super::*;
    use crate::elastic::checkpoint::Checkpoint;
    use crate::elastic::identity::{Incarnation, MemberId};
    use crate::elastic::message::DesiredStateId;
    use crate::elastic::recovery::{Source, Transfer};
    use crate::elastic::shadow::{Cut, place};
    use std::sync::Arc;

    const SHARD: Shard = Shard { stage: 0, tensor: 0, part: 0, cut: Cut::WHOLE };

    fn worker(node: u32) -> Worker {
        Worker { member: MemberId { node: NodeId(node), slot: 0 }, incarnation: Incarnation(1) }
    }

    fn report(of: Worker, holds: Vec<Shard>) -> Report {
        use crate::elastic::member::{Member, Schedule};
        let status_report = Member::new(Default::default(), of, None, Schedule::default()).report();
        let (node, members) = (NodeId(0), vec![MemberReport { holds, ..status_report }]);
        let (job, boot, desired_state) = Default::default();
        let devices = vec![];
        Report {
            job,
            node,
            boot,
            number: 1,
            desired_state,
            draining: false,
            n_failed_starts: 0,
            devices,
            inputs: vec![],
            members,
        }
    }

    fn desired_state(change: impl FnOnce(&mut WorldPlan)) -> DesiredState {
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let assignments = vec![worker(0), worker(1)];
        let holds = place(&mesh, &assignments, true);
        let mut world_plan = WorldPlan {
            generation: Generation(1),
            mesh,
            addresses: vec![None; 3],
            catching_up: vec![],
            guests: vec![worker(2)],
            base: Default::default(),
            voted_in: Generation(0),
            transfers: crate::elastic::recovery::from_disk(&holds, Checkpoint::default()),
            holds,
            assignments,
            n_saves: 0,
            rests: false,
            disputed: vec![],
        };
        change(&mut world_plan);
        let (job, requests) = Default::default();
        let id = DesiredStateId { generation: Generation(1), stage: Stage::Form, ..DesiredStateId::default() };
        DesiredState {
            job,
            id,
            world_plan: Some(Arc::new(world_plan)),
            evict: vec![],
            requests,
            release: None,
            refused: None,
        }
    }

    #[test]
    fn report_with_a_foreign_worker_or_an_invalid_shard_is_rejected() {
        assert_eq!(report(worker(0), vec![SHARD]).check(), Ok(()));
        assert_eq!(
            report(worker(1), vec![]).check(),
            Err(InvalidMessage::Foreign { node: NodeId(0), found: worker(1) })
        );
        let cut = |n_stages, n_parts| Cut { n_stages, n_tensors: 1, n_parts };
        for (part, cut) in [(0, cut(1, 0)), (1, cut(1, 1)), (0, cut(1, u32::MAX)), (0, cut(u32::MAX, u32::MAX))] {
            let shard = Shard { part, cut, ..SHARD };
            assert_eq!(report(worker(0), vec![shard]).check(), Err(InvalidMessage::Shard(shard)));
        }
        let on_device = |device| {
            let mut on_device = report(worker(0), vec![]);
            on_device.members[0].device = Some(device);
            on_device.devices = vec![DeviceHealth::default()];
            on_device
        };
        assert_eq!(on_device(0).check(), Ok(()));
        assert!(matches!(on_device(1).check(), Err(InvalidMessage::NoSuchDevice { n_devices: 1, .. })));
        let mut wordy = on_device(0);
        wordy.devices[0].event = Some("x".repeat(TEXT_LEN_MAX + 1));
        assert_eq!(wordy.check(), Err(InvalidMessage::DeviceText(TEXT_LEN_MAX + 1)));
        let many = Report { devices: vec![DeviceHealth::default(); DEVICES_MAX + 1], ..on_device(0) };
        assert_eq!(many.check(), Err(InvalidMessage::Devices(DEVICES_MAX + 1)));
        let input = |len| Input { name: "x".repeat(len), value: String::new() };
        let with = |inputs| Report { inputs, ..on_device(0) };
        assert_eq!(with(vec![input(INPUT_LEN_MAX); INPUTS_MAX]).check(), Ok(()));
        let many = with(vec![input(1); INPUTS_MAX + 1]);
        assert_eq!(many.check(), Err(InvalidMessage::Inputs(INPUTS_MAX + 1)));
        assert_eq!(with(vec![input(INPUT_LEN_MAX + 1)]).check(), Err(InvalidMessage::InputText(INPUT_LEN_MAX + 1)));
        let late = Report { number: u64::MAX, ..report(worker(0), vec![]) };
        assert!(matches!(late.check(), Err(InvalidMessage::Counter { what: "number of a report", .. })));
    }

    // A member that took a rank from one such desired state and dropped its state at the next would run without state.
    #[test]
    fn desired_state_that_forms_no_world_must_carry_no_plan() {
        for stage in [Stage::Stop, Stage::End] {
            let untimely =
                DesiredState { id: DesiredStateId { stage, ..desired_state(|_| ()).id }, ..desired_state(|_| ()) };

            assert_eq!(untimely.check(), Err(InvalidMessage::Untimely(Generation(1))));
            assert_eq!(DesiredState { world_plan: None, ..untimely }.check(), Ok(()));
        }
    }

    #[test]
    fn world_plan_without_an_entry_for_each_rank_is_rejected() {
        assert_eq!(desired_state(|_| ()).check(), Ok(()));
        let count = |change: fn(&mut WorldPlan)| match desired_state(change).check() {
            Err(InvalidMessage::Count { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(count(|f| f.assignments.truncate(1)), "ranks");
        assert_eq!(count(|f| f.addresses.truncate(2)), "addresses of members");
        assert_eq!(count(|f| f.holds.truncate(1)), "lists of shards");
        assert_eq!(count(|f| f.holds[1].clear()), "ranks with a shard of their own");
        assert_eq!(count(|f| f.transfers.truncate(1)), "lists of transfers");
        assert!(matches!(desired_state(|f| f.mesh.tp = usize::MAX).check(), Err(InvalidMessage::Mesh(_))));
        let (expected, found) = (Generation(1), Generation(2));
        assert_eq!(
            desired_state(|f| f.generation = found).check(),
            Err(InvalidMessage::Generation { expected, found })
        );
        assert!(matches!(desired_state(|f| f.mesh.tp = 0).check(), Err(InvalidMessage::Mesh(_))));
        let catch_up = |rank: usize, mesh: Mesh| CatchUp {
            worker: worker(3),
            mesh,
            rank,
            holds: vec![Shard::of(&Mesh { dp_shard: 2, ..Mesh::ONE }, 1)],
            transfers: vec![],
        };
        let catches_up = |catch_up: CatchUp| {
            let with_catch_up = |f: &mut WorldPlan| {
                f.catching_up = vec![catch_up];
                f.addresses.push(None);
            };
            desired_state(with_catch_up).check()
        };
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };
        assert_eq!(catches_up(catch_up(3, mesh)), Ok(()));
        let wrong = [catch_up(2, mesh), catch_up(4, mesh), catch_up(1, Mesh { dp_shard: 3, ..Mesh::ONE })];
        assert!(wrong.into_iter().all(|wrong| matches!(catches_up(wrong), Err(InvalidMessage::CatchUp { .. }))));
        let bad = Shard { tensor: 1, ..SHARD };
        let transfer = |source| Transfer { shard: SHARD, source };
        let survivor = desired_state(|f| f.transfers[0].push(transfer(Source::Survivor(worker(1), bad))));
        assert_eq!(survivor.check(), Err(InvalidMessage::Shard(bad)));
    }
}
