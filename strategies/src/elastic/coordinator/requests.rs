//! Operator requests: a checkpoint, a stop, a drain, another mesh. A request is durable before it takes effect
//! (`COORDINATOR-6`), and repeating it changes nothing but the number of checkpoints.

use super::super::identity::{Generation, Incarnation, NodeId, Step, Worker};
use super::super::incident::{Cause, Culprit, Why};
use super::super::membership::Status;
use super::super::mesh_choice::ResizeError;
use super::super::message::{DesiredStateId, MemberPhase, Record, Report, Requests, Unsaved, printable};
use super::super::quorum::Blocked;
use super::change::GrowthCheck;
use super::outlook::NotDrained;
use super::{Command, Coordinator, Phase, Purpose};
use crate::elastic::checkpoint::Checkpoint;
use crate::mesh::Mesh;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Requests made so far, durable or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PendingRequests {
    requests: Requests,
    drained: BTreeSet<NodeId>,
    pub(super) gone: BTreeMap<NodeId, Incarnation>,
    wanted: Option<Mesh>,
    /// The step in progress when a checkpoint was last requested.
    save_from: Step,
}

impl PendingRequests {
    /// The durable requests.
    pub(super) fn of(record: &Record) -> PendingRequests {
        let Record { requests, wanted, .. } = *record;
        let (drained, gone) = (record.drained.clone(), record.gone.clone());
        PendingRequests { requests, drained, gone, wanted, save_from: Step(0) }
    }

    /// After a restart from `base`, a step in progress may be repeated or never be reached.
    pub(super) fn restart_from(&mut self, base: Step) {
        self.save_from = self.save_from.min(base);
    }
}

impl Coordinator {
    /// Stops the job after the current step and saves a checkpoint.
    pub fn handle_stop(&mut self, now: Instant) {
        self.asked.requests.stop = true;
        self.handle_timeout(now);
    }

    /// Requests a checkpoint.
    pub fn handle_save(&mut self, now: Instant) {
        self.asked.requests.save += 1;
        self.asked.save_from = self.entered().max(self.asked.save_from);
        self.handle_timeout(now);
    }

    /// Requests that the world of this generation pause.
    pub(super) fn ask_to_pause(&mut self, generation: Generation) {
        self.asked.requests.pause = generation;
    }

    /// Drains a node and releases it.
    ///
    /// # Errors
    /// When the node does not report. Nothing has changed.
    pub fn handle_drain(&mut self, now: Instant, node: NodeId) -> Result<(), NotDrained> {
        self.handle_timeout(now);
        self.check_drain(node)?;
        self.asked.drained.insert(node);
        self.handle_timeout(now);
        Ok(())
    }

    /// Requests this mesh. The current world continues until the mesh can be formed; [`Coordinator::blocked`] gives the
    /// reason.
    ///
    /// # Errors
    /// When the policy rejects the mesh. Nothing has changed.
    pub fn handle_resize(&mut self, now: Instant, mesh: Mesh) -> Result<(), ResizeError> {
        self.policy.check_resize(mesh)?;
        self.asked.wanted = Some(mesh);
        self.handle_timeout(now);
        Ok(())
    }

    /// Whether all requests are durable (`COORDINATOR-6`) and so survive this coordinator.
    pub fn is_durable(&self) -> bool {
        let PendingRequests { requests, wanted, .. } = self.asked;
        (self.record.requests, self.record.wanted) == (requests, wanted)
            && self.record.drained == self.asked.drained
            && self.record.gone == self.asked.gone
    }

    /// Writes pending requests (`COORDINATOR-6`). Returns whether there were any.
    pub(super) fn write_asked(&mut self) -> bool {
        let PendingRequests { requests, wanted, .. } = self.asked;
        if self.is_durable() || matches!(self.phase, Phase::Deposed | Phase::Ended { .. }) {
            return false;
        }
        let (drained, gone) = (self.asked.drained.clone(), self.asked.gone.clone());
        self.write(Record { requests, drained, gone, wanted, ..self.record.clone() }, Purpose::Request);
        true
    }

    pub(super) fn take_up_requests(&mut self, now: Instant) {
        self.policy.wanted = self.record.wanted.unwrap_or(self.policy.wanted);
        self.forget_gone(now);
        match &mut self.phase {
            Phase::Running { growth_check, .. } => *growth_check = Some(GrowthCheck::at(now)),
            Phase::Regrouping { retry, .. } => *retry = Some(now),
            _ => {}
        }
        if self.has_desired_state() {
            self.broadcast();
        }
    }

    /// Whether a node is draining, by its own request or the operator's.
    pub(super) fn drains(&self, node: NodeId) -> bool {
        let is_drained = self.record.drained.contains(&node) && self.asked.drained.contains(&node);
        self.membership.drains(node) || is_drained
    }

    /// Ends the drain of a node that is started again after it was released: it then takes part as any other.
    pub(super) fn note_new_start(&mut self, report: &Report) {
        let is_new = self.membership.boot(report.node).is_none_or(|before| before < report.boot);
        if is_new && report.desired_state == DesiredStateId::default() && !self.takes_part(report.node) {
            self.asked.drained.remove(&report.node);
        }
    }

    /// Whether the current world trains no more, or not beyond the current step: it saves the state, so no node needs to move
    /// its part of it. What ends a whole job drains all its nodes and stops it at about the same time.
    pub(super) fn ends_soon(&self) -> bool {
        self.rests() || self.asked.requests.stop
    }

    /// Whether a drained node can be released.
    pub(super) fn releases(&self, node: NodeId) -> bool {
        let ends =
            self.trouble.is_some() || self.writing.as_ref().is_some_and(|(_, purpose)| *purpose == Purpose::Stop);
        let settled = match self.phase {
            Phase::Running { .. } => !ends && !self.rests(),
            // The checkpoint holds the whole state.
            Phase::Regrouping { .. } => self.record.world_plan.is_none(),
            _ => false,
        };
        settled && self.drains(node) && !self.takes_part(node)
    }

    /// Whether this node has a member in the latest world.
    pub(super) fn takes_part(&self, node: NodeId) -> bool {
        self.members().any(|worker| worker.member.node == node)
    }

    /// Ends a world that has members on a node that the operator has drained.
    pub(super) fn find_drained_ranks(&mut self, now: Instant) {
        // This runs after every report of thousands of nodes.
        if self.record.drained.is_empty() || self.ends_soon() {
            return;
        }
        let drained = |worker: &&Worker| self.record.drained.contains(&worker.member.node);
        let node = self.members().find(drained).map(|worker| worker.member.node);
        if let Some(node) = node {
            self.trouble(Cause { culprit: Culprit::Node(node), why: Why::Drains }, now);
        }
    }

    /// Why the running world is not yet the requested one.
    pub(super) fn missing_for_wanted(&self) -> Option<Blocked> {
        let mesh = self.record.world_plan.as_ref()?.mesh;
        let (have, want) = (self.candidates().len(), self.policy.wanted.size());
        (mesh != self.policy.wanted && have < want).then_some(Blocked::Wanted { have, want })
    }

    /// Handles a checkpoint that the world could not save: it answers the requests that it would have served.
    pub(super) fn note_unsaved(&mut self, unsaved: &Unsaved) {
        if self.unsaved.as_ref().is_some_and(|known| known.of >= unsaved.of) {
            return;
        }
        if unsaved.of.step >= self.asked.save_from {
            self.n_unsaved = self.record.requests.save;
        }
        let unsaved = Unsaved { reason: printable(&unsaved.reason), ..unsaved.clone() };
        self.unsaved = Some(unsaved.clone());
        self.commands.push_back(Command::NotSaved(unsaved));
    }

    /// The number of requested checkpoints that are complete once this one is.
    pub(super) fn n_saves_with(&self, checkpoint: Checkpoint) -> u64 {
        let serves = checkpoint.step >= self.asked.save_from;
        if serves { self.record.requests.save } else { self.record.n_saves }
    }

    /// The latest step known to be in progress in this world.
    fn entered(&self) -> Step {
        let here = (self.record.generation, MemberPhase::Running);
        let entered = |worker: &Worker| match self.membership.status(*worker) {
            // A member that does not train in this world yet may have been ahead of it, in an abandoned lineage.
            Status::Alive(member) if (member.generation, member.phase) >= here => Some(member.entered),
            _ => None,
        };
        self.assignments.iter().filter_map(entered).max().unwrap_or_default()
    }
}
