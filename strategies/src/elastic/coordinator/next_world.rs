//! The next world, from what members have said: who sits where, which state it begins from, and who sends it (`K-3`).

use super::super::commit::{Version, decide};
use super::super::identity::{Generation, NodeId, Worker};
use super::super::learner::{Course, course};
use super::super::membership::Status;
use super::super::mesh_choice::{Choice, Last};
use super::super::message::{Formation, MemberReport};
use super::super::quorum::{Blocked, Seat, may_follow};
use super::super::recovery::{self, Missing, Transfer};
use super::super::shadow::{Shard, place};
use super::Coordinator;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Instant;

impl Coordinator {
    /// The world to form now, or why there is none yet; a new one has been looked for `since` then.
    pub(super) fn next_world(&self, now: Instant, since: Instant) -> Result<Formation, Blocked> {
        let last = self.record.formation.as_deref();
        let seats: Vec<Seat> = last.iter().flat_map(|last| &last.seats).map(|worker| self.seat(*worker)).collect();
        if !self.record.idle {
            may_follow(&seats)?;
        }
        let waited = now.saturating_duration_since(since);
        let seated = last.map(Last::from);
        let willing = self.relieved.without(self.candidates(), self.policy.wanted.size());
        let (choice, leaves) = match self.policy.choose(seated, &willing, waited) {
            // Before those that are to leave do so, what they have is made durable.
            Err(Blocked::TooFew { .. }) if last.is_some() && (self.all_here() || waited >= self.timing.suspicion) => {
                let all: BTreeSet<Worker> = self.here().map(|member| member.worker).collect();
                (self.policy.choose(seated, &all, waited).map_err(|_| self.too_few())?, true)
            }
            choice => (choice?, false),
        };
        // A job that is to stop has no more steps to do.
        let rests = leaves || self.record.wishes.stop;
        let holds = place(&choice.mesh, &choice.seats, self.policy.shadows);
        let shaken = self.shaken();
        let from_memory = last.and_then(|last| {
            let left =
                seats.iter().filter_map(|seat| if let Seat::Left(promise) = seat { Some(promise) } else { None });
            let committed = || decide(last.generation, last.base.step, left);
            let step = if self.record.idle { last.base.step } else { committed()? };
            let voted_in = if step > last.base.step { last.generation } else { last.voted_in };
            let base = Version { step, ..last.base };
            let plan = |holders: BTreeMap<Worker, &[Shard]>| match course(&self.policy, &choice, &holders, &shaken) {
                Some(course) if !rests => Ok((course.choice.seats.iter().map(|_| vec![]).collect(), Some(course))),
                _ => recovery::plan(&choice.seats, &holds, &holders).map(|transfers| (transfers, None)),
            };
            let reached = plan(self.holders(base, voted_in, |node| !self.left_out.contains(&node)));
            // Who is left out may still be all that has the state, and within reach of some.
            Some((base, voted_in, reached.or_else(|_| plan(self.holders(base, voted_in, |_| true)))))
        });
        let generation = self.record.generation;
        let (base, voted_in, (transfers, course)) = match from_memory {
            Some((base, voted_in, Ok(plan))) => (base, voted_in, plan),
            Some((_, _, Err(Missing(shards)))) if self.may_return(now) && waited < self.timing.disk_patience => {
                let remaining = self.timing.disk_patience - waited;
                return Err(Blocked::StateElsewhere { n_shards: shards.len(), remaining });
            }
            // What is on disk only need not be saved.
            _ if leaves => return Err(self.too_few()),
            _ => {
                let base = Version { lineage: generation, step: self.record.checkpoint.step };
                (base, generation, (recovery::from_disk(&holds, self.record.checkpoint), None))
            }
        };
        let course = course.unwrap_or(Course { choice, holds, learners: vec![] });
        let Course { choice: Choice { mesh, seats }, holds, learners } = course;
        let guests = guests(&seats, &transfers);
        let n_saves = self.record.n_saves;
        let addresses = vec![];
        let formation = Formation {
            generation,
            mesh,
            seats,
            learners,
            guests,
            addresses,
            base,
            voted_in,
            holds,
            transfers,
            n_saves,
            rests,
        };
        let addresses = formation.members().map(|worker| self.address(worker)).collect();
        Ok(Formation { addresses, ..formation })
    }

    fn address(&self, worker: Worker) -> Option<SocketAddr> {
        if let Status::Alive(member) = self.membership.status(worker) { member.address } else { None }
    }

    fn seat(&self, worker: Worker) -> Seat {
        match self.membership.status(worker) {
            Status::Alive(member) if member.generation == self.record.generation => Seat::Left(member.promise),
            Status::Alive(_) | Status::Unheard => Seat::Unheard,
            Status::Dead => Seat::Dead,
        }
    }

    /// Who has the state `base`, those of draining nodes too.
    fn holders(
        &self,
        base: Version,
        voted_in: Generation,
        is_asked: impl Fn(NodeId) -> bool,
    ) -> BTreeMap<Worker, &[Shard]> {
        let reached = self.here().filter(|member| is_asked(member.worker.member.node));
        let able = reached.filter(|member| !member.holds.is_empty() && member.promise.can_reach(base, voted_in));
        able.map(|member| (member.worker, &member.holds[..])).collect()
    }

    /// Nodes of which a member of the last world was lost. Who is only to go has its copies still.
    fn shaken(&self) -> BTreeSet<NodeId> {
        let here: BTreeSet<Worker> = self.here().map(|member| member.worker).collect();
        let lost = self.seats.iter().chain(&self.learners).filter(|worker| !here.contains(worker));
        lost.map(|worker| worker.member.node).collect()
    }

    /// Whether anybody may still turn up with state. If the last world was not to train yet, that may be somebody who is no
    /// member of it, and of whom a new coordinator knows only by its report.
    fn may_return(&self, now: Instant) -> bool {
        let is_new = self.record.idle && now < self.began + self.timing.takeover_grace;
        let behind = |member: &MemberReport| member.generation != self.record.generation;
        let unheard = |worker: &Worker| matches!(self.membership.status(*worker), Status::Unheard);
        let waits = self.membership.any_silent() || self.membership.alive().any(behind);
        is_new || waits || self.members().any(unheard)
    }

    /// Members that have been told of the latest generation and may take a seat.
    pub(super) fn candidates(&self) -> BTreeSet<Worker> {
        self.stay().collect()
    }

    pub(super) fn n_candidates(&self) -> usize {
        self.stay().count()
    }

    fn stay(&self) -> impl Iterator<Item = Worker> {
        let stays = |worker: &Worker| !self.drains(worker.member.node) && !self.left_out.contains(&worker.member.node);
        self.here().map(|member| member.worker).filter(stays)
    }

    /// Members that have been told of the latest generation, those of draining nodes too.
    fn here(&self) -> impl Iterator<Item = &MemberReport> {
        self.membership.alive().filter(|member| member.generation == self.record.generation)
    }

    /// Whether everybody who may have a seat has been heard in this generation.
    fn all_here(&self) -> bool {
        let behind = |member: &MemberReport| member.generation != self.record.generation;
        !self.membership.alive().any(behind) && !self.members().any(|member| self.seat(*member) == Seat::Unheard)
    }

    fn too_few(&self) -> Blocked {
        let last = self.record.formation.as_ref().map(|formation| formation.mesh);
        Blocked::TooFew { have: self.n_candidates(), need: self.policy.smallest(last) }
    }
}

/// Who sends state and has no seat.
fn guests(seats: &[Worker], transfers: &[Vec<Transfer>]) -> Vec<Worker> {
    let seated: BTreeSet<Worker> = seats.iter().copied().collect();
    let senders = transfers.iter().flatten().filter_map(|transfer| transfer.source.sender(transfer.shard));
    let guests: BTreeSet<Worker> =
        senders.map(|(worker, _)| worker).filter(|worker| !seated.contains(worker)).collect();
    guests.into_iter().collect()
}
