//! What must hold of a message beyond the types of its fields. Machines index by what messages say and count on from it,
//! so a message that contradicts itself is refused where it is decoded, before any machine sees it.

use super::identity::{Generation, NodeId, Worker};
use super::message::{Formation, Learner, MemberReport, Order, Record, Report, Stage};
use super::recovery::Transfer;
use super::shadow::{Cut, Shard};
use crate::mesh::Mesh;

/// More ranks, and more parts of a cut, than any world has.
pub const RANKS_MAX: usize = 1 << 16;
/// Beyond what anything can be counted to; counters may go on from here for ever.
pub const COUNTER_MAX: u64 = 1 << 62;

/// How a message contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsound {
    /// A node speaks for itself only.
    #[error("{node} reports {found}")]
    Foreign {
        /// Who reports.
        node: NodeId,
        /// Whom.
        found: Worker,
    },
    /// No cut has such a part.
    #[error("{0:?} is no shard; a model is cut into 1 to {RANKS_MAX}, counted from 0 on each axis")]
    Shard(Shard),
    /// No world has it.
    #[error("the mesh {0} does not have 1 to {RANKS_MAX} ranks")]
    Mesh(Mesh),
    /// A list that does not belong to the seats.
    #[error("the mesh {mesh} has {expected} {what}, found {found}")]
    Count {
        /// The shape.
        mesh: Mesh,
        /// What the list is of.
        what: &'static str,
        /// How many belong to it.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// Who catches up for a seat that its world does not lead to.
    #[error("{worker} learns for rank {rank} of {mesh}, which is no seat that this world leads to")]
    Learner {
        /// Who.
        worker: Worker,
        /// The mesh of the seat.
        mesh: Mesh,
        /// The seat.
        rank: usize,
    },
    /// An order of one world has another one in it.
    #[error("an order of {expected} has the world of {found}")]
    Generation {
        /// Of the order.
        expected: Generation,
        /// Of the world.
        found: Generation,
    },
    /// Members that are to stop learn of the next world when it is formed.
    #[error("an order that forms no world has that of {0} in it")]
    Untimely(Generation),
    /// A number that nothing has been counted to.
    #[error("{what} is {found}, more than the {COUNTER_MAX} that can be counted to")]
    Counter {
        /// Of what.
        what: &'static str,
        /// The number.
        found: u64,
    },
}

impl Report {
    /// Whether it can be of a node that keeps to the protocol.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self) -> Result<(), Unsound> {
        counted("boot", self.boot.0)?;
        counted("number of a report", self.number)?;
        for member in &self.members {
            if member.worker.member.node != self.node {
                return Err(Unsound::Foreign { node: self.node, found: member.worker });
            }
            member.check()?;
        }
        Ok(())
    }
}

impl MemberReport {
    fn check(&self) -> Result<(), Unsound> {
        let promise = &self.promise;
        let steps = promise.applied.map(|applied| applied.step).into_iter().chain(promise.voted.map(|vote| vote.step));
        let lineages =
            promise.applied.map(|applied| applied.lineage).into_iter().chain(promise.voted.map(|vote| vote.generation));
        counted("incarnation", self.worker.incarnation.0)?;
        counted("ticks of a device", self.progress.ticks)?;
        lineages.chain([self.generation, promise.entered]).try_for_each(|g| counted("generation", g.0))?;
        steps.chain([self.entered]).try_for_each(|step| counted("step", step.0))?;
        if let Some(saved) = &self.saved {
            counted("generation", saved.of.generation.0)?;
            counted("step", saved.of.step.0)?;
            saved.shard.check()?;
        }
        self.holds.iter().try_for_each(Shard::check)
    }
}

impl Order {
    /// Whether it can be of a coordinator that keeps to the protocol.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self) -> Result<(), Unsound> {
        counted("term", self.id.term.0)?;
        counted("generation", self.id.generation.0)?;
        counted("number of checkpoints", self.wishes.save)?;
        let Some(formation) = &self.formation else { return Ok(()) };
        let (found, expected) = (formation.generation, self.id.generation);
        if found != expected {
            return Err(Unsound::Generation { expected, found });
        }
        if !matches!(self.id.stage, Stage::Form | Stage::Run) {
            return Err(Unsound::Untimely(found));
        }
        formation.check()
    }
}

impl Record {
    /// Whether it can be of a coordinator that keeps to the protocol.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self) -> Result<(), Unsound> {
        counted("term", self.term.0)?;
        counted("generation", self.generation.0)?;
        counted("number of checkpoints", self.wishes.save.max(self.n_saves))?;
        counted("generation", self.wishes.pause.0.max(self.checkpoint.generation.0))?;
        counted("step", self.checkpoint.step.0)?;
        if let Some(mesh) = self.wanted {
            ranks(mesh)?;
        }
        self.formation.as_ref().map_or(Ok(()), |formation| formation.check())
    }
}

impl Formation {
    /// Whether each list has an entry for each rank, and the mesh as many ranks.
    fn check(&self) -> Result<(), Unsound> {
        let mesh = self.mesh;
        let n_ranks = ranks(mesh)?;
        let counts = [
            ("seats", n_ranks, self.seats.len()),
            ("addresses of members", n_ranks + self.learners.len() + self.guests.len(), self.addresses.len()),
            ("lists of shards", n_ranks, self.holds.len()),
            ("ranks with a shard of their own", n_ranks, self.holds.iter().filter(|shards| !shards.is_empty()).count()),
            ("lists of transfers", n_ranks, self.transfers.len()),
        ];
        if let Some((what, expected, found)) = counts.into_iter().find(|(_, expected, found)| expected != found) {
            return Err(Unsound::Count { mesh, what, expected, found });
        }
        counted("generation", self.generation.0.max(self.base.lineage.0).max(self.voted_in.0))?;
        counted("step", self.base.step.0)?;
        counted("number of checkpoints", self.n_saves)?;
        self.holds.iter().flatten().try_for_each(Shard::check)?;
        check_transfers(self.transfers.iter().flatten())?;
        self.learners.iter().try_for_each(|learner| learner.check(mesh))
    }
}

impl Learner {
    /// Whether there is such a seat, in a mesh that cuts the state as that of the world does.
    fn check(&self, world: Mesh) -> Result<(), Unsound> {
        let leads_there = self.rank < ranks(self.mesh)? && Cut::of(&self.mesh) == Cut::of(&world);
        if !leads_there || self.holds.first() != Some(&Shard::of(&self.mesh, self.rank)) {
            return Err(Unsound::Learner { worker: self.worker, mesh: self.mesh, rank: self.rank });
        }
        self.holds.iter().try_for_each(Shard::check)?;
        check_transfers(self.transfers.iter())
    }
}

fn check_transfers<'a>(mut transfers: impl Iterator<Item = &'a Transfer>) -> Result<(), Unsound> {
    transfers.try_for_each(|transfer| {
        transfer.shard.check()?;
        transfer.source.sender(transfer.shard).map_or(Ok(()), |(_, held)| held.check())
    })
}

impl Shard {
    fn check(&self) -> Result<(), Unsound> {
        let Shard { stage, tensor, part, cut } = *self;
        let n =
            u64::from(cut.n_stages).checked_mul(cut.n_tensors.into()).and_then(|n| n.checked_mul(cut.n_parts.into()));
        let is_within = stage < cut.n_stages && tensor < cut.n_tensors && part < cut.n_parts;
        if is_within && n.is_some_and(|n| n <= RANKS_MAX as u64) { Ok(()) } else { Err(Unsound::Shard(*self)) }
    }
}

/// Number of ranks of a mesh that can be one of a world.
fn ranks(mesh: Mesh) -> Result<usize, Unsound> {
    mesh.checked_size().filter(|n| (1..=RANKS_MAX).contains(n)).ok_or(Unsound::Mesh(mesh))
}

fn counted(what: &'static str, found: u64) -> Result<(), Unsound> {
    if found <= COUNTER_MAX { Ok(()) } else { Err(Unsound::Counter { what, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{Incarnation, MemberId};
    use crate::elastic::message::OrderId;
    use crate::elastic::recovery::{Source, Transfer};
    use crate::elastic::shadow::{Cut, place};
    use crate::elastic::snapshot::Checkpoint;
    use std::sync::Arc;

    const SHARD: Shard = Shard { stage: 0, tensor: 0, part: 0, cut: Cut::WHOLE };

    fn worker(node: u32) -> Worker {
        Worker { member: MemberId { node: NodeId(node), slot: 0 }, incarnation: Incarnation(1) }
    }

    fn report(of: Worker, holds: Vec<Shard>) -> Report {
        use crate::elastic::member::{Member, Schedule};
        let word = Member::new(Default::default(), of, None, Schedule::default()).report();
        let (node, members) = (NodeId(0), vec![MemberReport { holds, ..word }]);
        let (job, boot, order) = Default::default();
        Report { job, node, boot, number: 1, order, draining: false, n_stillborn: 0, members }
    }

    fn order(change: impl FnOnce(&mut Formation)) -> Order {
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let seats = vec![worker(0), worker(1)];
        let holds = place(&mesh, &seats, true);
        let mut formation = Formation {
            generation: Generation(1),
            mesh,
            addresses: vec![None; 3],
            learners: vec![],
            guests: vec![worker(2)],
            base: Default::default(),
            voted_in: Generation(0),
            transfers: crate::elastic::recovery::from_disk(&holds, Checkpoint::default()),
            holds,
            seats,
            n_saves: 0,
            rests: false,
        };
        change(&mut formation);
        let (job, wishes) = Default::default();
        let id = OrderId { generation: Generation(1), stage: Stage::Form, ..OrderId::default() };
        Order { job, id, formation: Some(Arc::new(formation)), evict: vec![], wishes, release: None }
    }

    #[test]
    fn a_node_speaks_for_its_own_workers_and_of_parts_that_exist() {
        assert_eq!(report(worker(0), vec![SHARD]).check(), Ok(()));
        assert_eq!(report(worker(1), vec![]).check(), Err(Unsound::Foreign { node: NodeId(0), found: worker(1) }));
        let cut = |n_stages, n_parts| Cut { n_stages, n_tensors: 1, n_parts };
        for (part, cut) in [(0, cut(1, 0)), (1, cut(1, 1)), (0, cut(1, u32::MAX)), (0, cut(u32::MAX, u32::MAX))] {
            let shard = Shard { part, cut, ..SHARD };
            assert_eq!(report(worker(0), vec![shard]).check(), Err(Unsound::Shard(shard)));
        }
        let late = Report { number: u64::MAX, ..report(worker(0), vec![]) };
        assert!(matches!(late.check(), Err(Unsound::Counter { what: "number of a report", .. })));
    }

    // A member that took a seat from one such order and lost its state to the next would run without.
    #[test]
    fn an_order_that_forms_no_world_has_none() {
        for stage in [Stage::Stop, Stage::End] {
            let untimely = Order { id: OrderId { stage, ..order(|_| ()).id }, ..order(|_| ()) };

            assert_eq!(untimely.check(), Err(Unsound::Untimely(Generation(1))));
            assert_eq!(Order { formation: None, ..untimely }.check(), Ok(()));
        }
    }

    #[test]
    fn a_world_has_an_entry_in_each_list_for_each_rank() {
        assert_eq!(order(|_| ()).check(), Ok(()));
        let count = |change: fn(&mut Formation)| match order(change).check() {
            Err(Unsound::Count { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(count(|f| f.seats.truncate(1)), "seats");
        assert_eq!(count(|f| f.addresses.truncate(2)), "addresses of members");
        assert_eq!(count(|f| f.holds.truncate(1)), "lists of shards");
        assert_eq!(count(|f| f.holds[1].clear()), "ranks with a shard of their own");
        assert_eq!(count(|f| f.transfers.truncate(1)), "lists of transfers");
        assert!(matches!(order(|f| f.mesh.tp = usize::MAX).check(), Err(Unsound::Mesh(_))));
        let (expected, found) = (Generation(1), Generation(2));
        assert_eq!(order(|f| f.generation = found).check(), Err(Unsound::Generation { expected, found }));
        assert!(matches!(order(|f| f.mesh.tp = 0).check(), Err(Unsound::Mesh(_))));
        let learner = |rank: usize, mesh: Mesh| Learner {
            worker: worker(3),
            mesh,
            rank,
            holds: vec![Shard::of(&Mesh { dp_shard: 2, ..Mesh::ONE }, 1)],
            transfers: vec![],
        };
        let learns = |learner: Learner| {
            let with_learner = |f: &mut Formation| {
                f.learners = vec![learner];
                f.addresses.push(None);
            };
            order(with_learner).check()
        };
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };
        assert_eq!(learns(learner(3, mesh)), Ok(()));
        let wrong = [learner(2, mesh), learner(4, mesh), learner(1, Mesh { dp_shard: 3, ..Mesh::ONE })];
        assert!(wrong.into_iter().all(|wrong| matches!(learns(wrong), Err(Unsound::Learner { .. }))));
        let bad = Shard { tensor: 1, ..SHARD };
        let transfer = |source| Transfer { shard: SHARD, source };
        let survivor = order(|f| f.transfers[0].push(transfer(Source::Survivor(worker(1), bad))));
        assert_eq!(survivor.check(), Err(Unsound::Shard(bad)));
    }
}
