//! Plans the next world from the members' reports: the rank assignment, the base state, and its senders
//! (`COORDINATOR-3`).

use super::super::catch_up::{CatchUpPlan, catch_up_plan};
use super::super::commit::{Version, decide};
use super::super::identity::{Generation, NodeId, Worker};
use super::super::membership::Status;
use super::super::mesh_choice::{Choice, Last};
use super::super::message::{MemberReport, WorldPlan};
use super::super::quorum::{Blocked, Liveness, may_follow};
use super::super::recovery::{self, Missing, Transfer};
use super::super::shadow::{Shard, place};
use super::Coordinator;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

impl Coordinator {
    /// The world to form now, or why there is none yet. The coordinator has been regrouping since `since`.
    pub(super) fn next_world(&self, now: Instant, since: Instant) -> Result<WorldPlan, Blocked> {
        let last = self.record.world_plan.as_deref();
        let assignments: Vec<Liveness> =
            last.iter().flat_map(|last| &last.assignments).map(|worker| self.assignment(*worker)).collect();
        let waited = now.saturating_duration_since(since);
        if !self.record.idle {
            may_follow(&assignments, waited, self.lost_patience())?;
        }
        if self.record.unrecorded && waited < self.timing.takeover_grace {
            // Its members are known from their reports only.
            return Err(Blocked::Unrecorded { remaining: self.timing.takeover_grace - waited });
        }
        let assigned = last.map(Last::from);
        let fit = self.eligible(waited);
        let eligible = self.relieved.without(fit.clone(), self.policy.wanted.size());
        // A stopped job has no use for replacements, and little time: what stops it may kill it.
        let is_last = self.failing.is_some() || self.record.requests.stop;
        let policy = if is_last { self.policy.of_last_save() } else { self.policy };
        let for_replacements = self.waited_for_replacements(waited);
        let (choice, leaves) = match policy.choose(assigned, &eligible, for_replacements) {
            // The leaving members first make their state durable (`COORDINATOR-8`).
            Err(Blocked::TooFew { .. }) if last.is_some() && (self.all_here() || waited >= self.timing.suspicion) => {
                let candidates = self.candidates();
                let crowded = |worker: &Worker| candidates.contains(worker) && !fit.contains(worker);
                let all: BTreeSet<Worker> = self.here().map(|m| m.worker).filter(|worker| !crowded(worker)).collect();
                (policy.choose(assigned, &all, waited).map_err(|_| self.too_few())?, true)
            }
            choice => (choice?, false),
        };
        // A stopping or failing job has no more steps.
        let rests = leaves || is_last;
        let holds = place(&choice.mesh, &choice.assignments, self.policy.shadows);
        let faulted = self.faulted_nodes();
        let from_memory = self.committed_state(&assignments).map(|(base, voted_in)| {
            let plan =
                |holders: BTreeMap<Worker, &[Shard]>| match catch_up_plan(&self.policy, &choice, &holders, &faulted) {
                    Some(catch_up_plan) if !rests => {
                        Ok((catch_up_plan.choice.assignments.iter().map(|_| vec![]).collect(), Some(catch_up_plan)))
                    }
                    _ => recovery::plan(&choice.assignments, &holds, &holders).map(|transfers| (transfers, None)),
                };
            let reached = plan(self.holders(base, voted_in, |node| !self.left_out.contains(&node)));
            // A node that is left out may hold the only copy of the state and be reachable by some members.
            (base, voted_in, reached.or_else(|_| plan(self.holders(base, voted_in, |_| true))))
        });
        let generation = self.record.generation;
        let (base, voted_in, (transfers, catch_up_plan)) = match from_memory {
            Some((base, voted_in, Ok(plan))) => (base, voted_in, plan),
            Some((_, _, Err(Missing(shards)))) if self.may_return(now) && waited < self.timing.disk_patience => {
                let remaining = self.timing.disk_patience - waited;
                return Err(Blocked::StateElsewhere { n_shards: shards.len(), remaining });
            }
            // State that comes from disk needs no save.
            _ if leaves || self.failing.is_some() => return Err(self.too_few()),
            _ => {
                let base = Version { lineage: generation, step: self.record.checkpoint.step };
                (base, generation, (recovery::from_disk(&holds, self.record.checkpoint), None))
            }
        };
        let catch_up_plan = catch_up_plan.unwrap_or(CatchUpPlan { choice, holds, catching_up: vec![] });
        let CatchUpPlan { choice: Choice { mesh, assignments }, holds, catching_up } = catch_up_plan;
        let guests = guests(&assignments, &transfers);
        let n_saves = self.record.n_saves;
        let addresses = vec![];
        let world_plan = WorldPlan {
            generation,
            mesh,
            assignments,
            catching_up,
            guests,
            addresses,
            base,
            voted_in,
            holds,
            transfers,
            n_saves,
            rests,
            disputed: self.disputed_steps(),
        };
        let addresses = world_plan.members().map(|worker| self.address(worker)).collect();
        Ok(WorldPlan { addresses, ..world_plan })
    }

    /// The state that the last world has committed, and where its members voted for it; `None` if no member that has left it can
    /// tell, or its state is not used (`COORDINATOR-17`).
    fn committed_state(&self, assignments: &[Liveness]) -> Option<(Version, Generation)> {
        if self.record.unrecorded {
            return self.unrecorded_state();
        }
        let last = self.record.world_plan.as_deref().filter(|last| last.base.lineage > self.corrupt)?;
        let left = assignments.iter().filter_map(|assignment| {
            if let Liveness::Left(commit_state) = assignment { Some(commit_state) } else { None }
        });
        let committed = || decide(last.generation, last.base.step, left);
        let step = if self.record.idle { last.base.step } else { committed()? };
        let voted_in = if step > last.base.step { last.generation } else { last.voted_in };
        Some((Version { step, ..last.base }, voted_in))
    }

    /// How long members that are missing have been waited for: long enough, if the operator has declared all of them gone.
    fn waited_for_replacements(&self, waited: Duration) -> Duration {
        let here: BTreeSet<Worker> = self.here().map(|member| member.worker).collect();
        let is_gone =
            |worker: &Worker| self.record.gone.get(&worker.member.node).is_some_and(|last| worker.incarnation <= *last);
        let mut missing = self.assignments.iter().filter(|worker| !here.contains(worker)).peekable();
        let are_gone = missing.peek().is_some() && missing.all(is_gone);
        if are_gone { waited.max(self.policy.replace_patience) } else { waited }
    }

    fn address(&self, worker: Worker) -> Option<SocketAddr> {
        if let Status::Alive(member) = self.membership.status(worker) { member.address } else { None }
    }

    fn assignment(&self, worker: Worker) -> Liveness {
        match self.membership.status(worker) {
            Status::Alive(member) if member.generation == self.record.generation => Liveness::Left(member.commit_state),
            Status::Alive(_) | Status::Unheard => Liveness::Unheard,
            Status::Dead => Liveness::Dead,
        }
    }

    /// The members that hold the state `base`, including those of draining nodes.
    fn holders(
        &self,
        base: Version,
        voted_in: Generation,
        is_asked: impl Fn(NodeId) -> bool,
    ) -> BTreeMap<Worker, &[Shard]> {
        let reached = self.here().filter(|member| is_asked(member.worker.member.node));
        let able = reached.filter(|member| !member.holds.is_empty() && member.commit_state.can_reach(base, voted_in));
        able.map(|member| (member.worker, &member.holds[..])).collect()
    }

    /// Nodes that have lost a member of the last world. A draining node still holds its copies.
    fn faulted_nodes(&self) -> BTreeSet<NodeId> {
        let here: BTreeSet<Worker> = self.here().map(|member| member.worker).collect();
        let lost = self.assignments.iter().chain(&self.catching_up).filter(|worker| !here.contains(worker));
        lost.map(|worker| worker.member.node).collect()
    }

    /// Whether a member that has not reported yet may hold state. If the last world never trained, this may be a worker
    /// outside it, which only its own report names to a new coordinator.
    fn may_return(&self, now: Instant) -> bool {
        let is_new = self.record.idle && now < self.began + self.timing.takeover_grace;
        let behind = |member: &MemberReport| member.generation != self.record.generation;
        let unheard = |worker: &Worker| matches!(self.membership.status(*worker), Status::Unheard);
        let waits = self.membership.any_silent() || self.membership.alive().any(behind);
        is_new || waits || self.members().any(unheard)
    }

    /// Members that have acknowledged the latest generation and may take a rank.
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

    /// Members that have acknowledged the latest generation, including those of draining nodes.
    pub(super) fn here(&self) -> impl Iterator<Item = &MemberReport> {
        self.membership.alive().filter(|member| member.generation == self.record.generation)
    }

    /// Whether every candidate for a rank has reported in this generation.
    pub(super) fn all_here(&self) -> bool {
        let behind = |member: &MemberReport| member.generation != self.record.generation;
        !self.membership.alive().any(behind)
            && !self.members().any(|member| self.assignment(*member) == Liveness::Unheard)
    }

    fn too_few(&self) -> Blocked {
        let last = self.record.world_plan.as_ref().map(|world_plan| world_plan.mesh);
        Blocked::TooFew { have: self.n_candidates(), need: self.policy.smallest(last) }
    }
}

/// Members that send state and have no rank.
fn guests(assignments: &[Worker], transfers: &[Vec<Transfer>]) -> Vec<Worker> {
    let assigned: BTreeSet<Worker> = assignments.iter().copied().collect();
    let senders = transfers.iter().flatten().filter_map(|transfer| transfer.source.sender(transfer.shard));
    let guests: BTreeSet<Worker> =
        senders.map(|(worker, _)| worker).filter(|worker| !assigned.contains(worker)).collect();
    guests.into_iter().collect()
}
