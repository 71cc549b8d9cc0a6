//! Injection of faults: their start, duration and end.

use super::Sim;
use super::event::Event;
use super::network::{begin, end};
use crate::environment::Machine;
use crate::invariants::Observation;
use crate::plan::{Fault, Planned};
use phalanx_strategies::elastic::devices::DeviceHealth;
use phalanx_strategies::elastic::identity::{MemberId, NodeId};
use phalanx_strategies::elastic::message::{Broken, MemberPhase, MemberReport};
use phalanx_strategies::mesh::Mesh;
use std::collections::BTreeSet;

impl Sim {
    /// Injects the faults that are due.
    pub(super) fn inject(&mut self) {
        if self.safe || self.plan.first().is_none_or(|planned| planned.at_ms * 1_000 > self.now) {
            return;
        }
        let activity = self.leader().map(|leader| leader.activity());
        let now_ms = self.now / 1_000;
        let due =
            |planned: &Planned| planned.at_ms <= now_ms && planned.during.is_none_or(|phase| Some(phase) == activity);
        let (due, later): (Vec<Planned>, Vec<Planned>) = std::mem::take(&mut self.plan).into_iter().partition(due);
        self.plan = later;
        for planned in due {
            self.outcome.injected.push((now_ms, planned));
            self.mark(7, planned.at_ms, 0);
            self.begin_fault(planned.fault);
        }
    }

    fn begin_fault(&mut self, fault: Fault) {
        let for_ms = match fault {
            Fault::KillRank { member } => {
                self.disturb(member.node, false);
                if let Some(worker) = self.worker_in(member) {
                    self.kill_worker(worker);
                }
                return;
            }
            Fault::FailDevice { member } => return self.fail_device(member),
            Fault::Slander { member } => return self.slander(member),
            Fault::Environment(fault) => return self.begin_environment(fault),
            Fault::FailStarts { node, for_ms } => self.fail_starts(node, for_ms),
            Fault::KillNode { node, back_after_ms } => return self.kill_node(node.0 as usize, back_after_ms),
            Fault::LoseWorld => return self.lose_world(),
            Fault::IsolateWorld { for_ms } => self.isolate_world(for_ms),
            Fault::Drain { node, back_after_ms } => return self.drain(node, back_after_ms),
            Fault::Save => return self.ask(|coordinator, now| coordinator.handle_save(now)),
            Fault::Resize { dp_shard } => return self.resize(Mesh { dp_shard, ..self.config.policy.wanted }),
            Fault::Reshape { pp, dp_replicate, dp_shard, tp } => {
                self.resize(Mesh { pp, dp_replicate, dp_shard, cp: 1, tp });
                return;
            }
            Fault::KillCoordinator { back_after_ms } => return self.kill_coordinator(back_after_ms),
            Fault::PauseCoordinator { for_ms } => {
                let Some(candidate) = self.leading() else { return };
                self.observe(&Observation::CoordinationDisturbed { lasts: false });
                self.candidates[candidate].stopped += 1;
                for_ms
            }
            Fault::HangRank { member, for_ms } => self.stop_rank(member, false, for_ms),
            Fault::StarveRank { member, for_ms } => self.stop_rank(member, true, for_ms),
            Fault::SlowRank { member, factor, for_ms } => {
                self.disturb(member.node, true);
                self.nodes[member.node.0 as usize].slow.insert(member.slot, factor);
                for_ms
            }
            Fault::CutData { from, to, .. } if from == to => return,
            Fault::DeafTo { for_ms, .. }
            | Fault::MuteTo { for_ms, .. }
            | Fault::CutData { for_ms, .. }
            | Fault::BadNetwork { for_ms, .. } => {
                self.begin_of_network(fault);
                for_ms
            }
        };
        self.queue.push(self.now + for_ms * 1_000, Event::FaultEnds { fault });
    }

    fn begin_of_network(&mut self, fault: Fault) {
        match fault {
            Fault::DeafTo { node, .. } => {
                self.disturb(node, true);
                begin(&mut self.network.deaf_to, node);
            }
            Fault::MuteTo { node, .. } => {
                self.disturb(node, true);
                begin(&mut self.network.mute_to, node);
            }
            Fault::CutData { from, to, .. } => {
                self.disturb(from, true);
                self.disturb(to, true);
                begin(&mut self.network.cut, (from, to));
            }
            Fault::BadNetwork { loss, delay_ms, .. } => {
                (0..self.config.n_nodes).for_each(|node| self.disturb(NodeId(node), true));
                self.network.bad.push((loss, delay_ms));
            }
            _ => {}
        }
    }

    /// Ends a lasting fault. Has no effect after the safety phase, which ends all faults.
    pub(super) fn end_fault(&mut self, fault: Fault) {
        if self.safe {
            return;
        }
        match fault {
            Fault::PauseCoordinator { .. } => {
                // Continues the first stopped candidate, which may not lead any more.
                let stopped = (0..self.candidates.len()).find(|i| self.candidates[*i].stopped > 0);
                stopped.into_iter().for_each(|i| self.continue_candidate(i));
            }
            Fault::HangRank { member, .. } | Fault::StarveRank { member, .. } => {
                let is_starved = matches!(fault, Fault::StarveRank { .. });
                if let Some(rank) = self.worker_in(member).and_then(|worker| self.rank(worker)) {
                    rank.starved = rank.starved.saturating_sub(u32::from(is_starved));
                }
                self.continue_rank(member);
                self.observe(&Observation::Undisturbed(member.node));
            }
            Fault::SlowRank { member, .. } => {
                self.nodes[member.node.0 as usize].slow.remove(&member.slot);
                self.observe(&Observation::Undisturbed(member.node));
            }
            Fault::DeafTo { node, .. } => {
                end(&mut self.network.deaf_to, node);
                self.observe(&Observation::Undisturbed(node));
            }
            Fault::MuteTo { node, .. } => {
                end(&mut self.network.mute_to, node);
                self.observe(&Observation::Undisturbed(node));
            }
            Fault::IsolateWorld { .. } => {
                for node in std::mem::take(&mut self.isolated) {
                    end(&mut self.network.deaf_to, node);
                    end(&mut self.network.mute_to, node);
                    self.observe(&Observation::Undisturbed(node));
                }
            }
            Fault::CutData { from, to, .. } => {
                end(&mut self.network.cut, (from, to));
                self.observe(&Observation::Undisturbed(from));
                self.observe(&Observation::Undisturbed(to));
            }
            Fault::BadNetwork { loss, delay_ms, .. } => {
                let i = self.network.bad.iter().position(|bad| *bad == (loss, delay_ms));
                if let Some(i) = i {
                    self.network.bad.remove(i);
                }
                (0..self.config.n_nodes).for_each(|node| self.observe(&Observation::Undisturbed(NodeId(node))));
            }
            Fault::FailStarts { node, .. } => {
                self.nodes[node.0 as usize].fails_starts -= 1;
                self.observe(&Observation::Undisturbed(node));
            }
            Fault::Environment(fault) => self.end_environment(fault),
            Fault::KillRank { .. } | Fault::FailDevice { .. } | Fault::Slander { .. } => {}
            Fault::KillNode { .. } | Fault::LoseWorld => {}
            Fault::KillCoordinator { .. } | Fault::Drain { .. } => {}
            Fault::Save | Fault::Resize { .. } | Fault::Reshape { .. } => {}
        }
    }

    /// Ends the safety phase: ends all faults and restarts dead nodes and candidates.
    pub(super) fn end_faults(&mut self) {
        self.safe = true;
        self.plan.clear();
        self.network.bad.clear();
        self.network.deaf_to.clear();
        self.network.mute_to.clear();
        self.network.cut.clear();
        self.end_environment_faults();
        for i in 0..self.nodes.len() {
            self.nodes[i].slow.clear();
            self.nodes[i].fails_starts = 0;
            self.start_node(i);
            let stopped: Vec<_> = self.nodes[i].ranks.keys().map(|worker| worker.member).collect();
            stopped.into_iter().for_each(|member| self.continue_rank(member));
        }
        for i in 0..self.candidates.len() {
            self.start_candidate(i);
            self.candidates[i].stopped = self.candidates[i].stopped.min(1);
            self.continue_candidate(i);
        }
    }

    /// The machines with a rank.
    fn nodes_of_world(&self) -> BTreeSet<NodeId> {
        self.world_plan.iter().flat_map(|world_plan| world_plan.members()).map(|worker| worker.member.node).collect()
    }

    fn lose_world(&mut self) {
        let lost = self.nodes_of_world();
        let n_left = (self.config.n_nodes as usize - lost.len()) * self.config.n_slots as usize;
        if lost.is_empty() || n_left < self.config.policy.smallest(None) {
            return;
        }
        for node in lost {
            self.disturb(node, false);
            self.lost.insert(node);
            self.kill_node(node.0 as usize, 0);
        }
    }

    fn isolate_world(&mut self, for_ms: u64) -> u64 {
        for node in self.nodes_of_world() {
            self.disturb(node, true);
            begin(&mut self.network.deaf_to, node);
            begin(&mut self.network.mute_to, node);
            self.isolated.push(node);
        }
        for_ms
    }

    fn resize(&mut self, mesh: Mesh) {
        // A mesh larger than the machines would never train.
        if mesh.size() as u32 <= self.config.n_nodes * self.config.n_slots {
            self.ask(|coordinator, now| {
                // The policy may reject the mesh.
                let _ = coordinator.handle_resize(now, mesh);
            });
        }
    }

    pub(super) fn disturb(&mut self, node: NodeId, lasts: bool) {
        self.observe(&Observation::Disturbed { node, lasts });
    }

    fn fail_device(&mut self, member: MemberId) {
        self.disturb(member.node, false);
        let (i, now) = (member.node.0 as usize, self.node_now(member.node.0 as usize));
        let Some(supervisor) = &mut self.nodes[i].supervisor else { return };
        let Some(device) = supervisor.device_of(member.slot) else { return };
        let fault = Some("planted".to_owned());
        let latest = DeviceHealth { fault, ..supervisor.health()[device as usize].clone() };
        supervisor.handle_health(now, vec![latest]);
        self.drive_node(i);
    }

    fn kill_coordinator(&mut self, back_after_ms: u64) {
        let Some(candidate) = self.leading() else { return };
        self.observe(&Observation::CoordinationDisturbed { lasts: false });
        self.kill_candidate(candidate);
        self.queue.push(self.now + back_after_ms * 1_000, Event::CandidateStarts { candidate });
    }

    fn fail_starts(&mut self, node: NodeId, for_ms: u64) -> u64 {
        self.disturb(node, true);
        self.nodes[node.0 as usize].fails_starts += 1;
        for_ms
    }

    fn slander(&mut self, member: MemberId) {
        self.disturb(member.node, false);
        let (i, now) = (member.node.0 as usize, self.node_now(member.node.0 as usize));
        let Some(report) = self.worker_in(member).and_then(|worker| self.rank(worker)).map(|rank| rank.member.report())
        else {
            return;
        };
        let Some(supervisor) = &mut self.nodes[i].supervisor else { return };
        let broken = Some(Broken { lost: None, corrupt: None, not_finite: None, reason: "without a cause".to_owned() });
        supervisor.handle_status_report(now, MemberReport { phase: MemberPhase::Guest, broken, ..report });
        self.drive_node(i);
    }

    fn drain(&mut self, node: NodeId, back_after_ms: u64) {
        self.disturb(node, false);
        let (i, now) = (node.0 as usize, self.node_now(node.0 as usize));
        let Some(supervisor) = &mut self.nodes[i].supervisor else { return };
        supervisor.handle_drain(now);
        self.queue.push(self.now + 500_000, Event::NodeDies { node: i, back_after_ms });
    }

    /// Stops a process, or takes only its processor away.
    fn stop_rank(&mut self, member: MemberId, is_starved: bool, for_ms: u64) -> u64 {
        // Whatever begins meanwhile waits for it.
        self.disturb(member.node, true);
        let now = self.node_now(member.node.0 as usize);
        if let Some(rank) = self.worker_in(member).and_then(|worker| self.rank(worker)) {
            rank.stopped += 1;
            rank.starved += u32::from(is_starved);
            rank.examined = now;
        }
        for_ms
    }

    pub(super) fn continue_rank(&mut self, member: MemberId) {
        let Some(worker) = self.worker_in(member) else { return };
        let safe = self.safe;
        let Some(rank) = self.rank(worker) else { return };
        rank.stopped = if safe { 0 } else { rank.stopped.saturating_sub(1) };
        if rank.stopped > 0 {
            return;
        }
        for what in std::mem::take(&mut rank.waiting) {
            self.queue.push(self.now, Event::ToRank { worker, what });
        }
    }

    pub(super) fn continue_candidate(&mut self, i: usize) {
        let candidate = &mut self.candidates[i];
        candidate.stopped = candidate.stopped.saturating_sub(1);
        if candidate.stopped > 0 {
            return;
        }
        candidate.continued_at = Some(self.now);
        let life = candidate.life;
        self.set_stopped(Machine::Candidate(i), false);
        let candidate = &mut self.candidates[i];
        for what in std::mem::take(&mut candidate.waiting) {
            self.queue.push(self.now, Event::ToCandidate { candidate: i, life, what });
        }
    }
}
