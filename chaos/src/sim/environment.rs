//! Faults of the environment: their begin and their end.

use super::Sim;
use super::event::Event;
use super::storage::AFTER_OUTAGE;
use crate::environment::{EnvironmentFault, Machine, StoreName};
use crate::invariants::Observation;
use crate::plan::{Fault, Plan};
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::elastic::inputs::Input;
use phalanx_strategies::elastic::message::Report;

impl Sim {
    pub(super) fn begin_environment(&mut self, fault: EnvironmentFault) {
        let mut late = 0;
        match fault {
            EnvironmentFault::FailStore { store, how, for_ms } => {
                self.storage.fail(store, how, self.now + for_ms * 1_000);
                late = AFTER_OUTAGE;
                if store == StoreName::Coordinators {
                    self.observe(&Observation::CoordinationDisturbed { lasts: true });
                }
            }
            EnvironmentFault::SkewClock { machine, percent, .. } => self.set_rate(machine, percent),
            EnvironmentFault::SetClock { machine, by_s } => self.set_time_of_day(machine, by_s),
            EnvironmentFault::Suspend { machine, clock_stops, .. } => self.suspend(machine, clock_stops),
            EnvironmentFault::WrongData { node, back_after_ms, .. } => {
                self.disturb(node, true);
                self.nodes[node.0 as usize].data_set += 1;
                self.kill_node(node.0 as usize, back_after_ms);
            }
            EnvironmentFault::FlipBit { member, piece, bit } => self.flip_bit(member, piece, bit),
            EnvironmentFault::Strangers { n_messages, for_ms } => self.invite_strangers(n_messages, for_ms),
        }
        if let Some(for_ms) = fault.for_ms() {
            let fault = Fault::Environment(fault);
            self.queue.push(self.now + for_ms * 1_000 + late, Event::FaultEnds { fault });
        }
    }

    pub(super) fn end_environment(&mut self, fault: EnvironmentFault) {
        match fault {
            EnvironmentFault::FailStore { store: StoreName::Coordinators, .. } => {
                self.observe(&Observation::CoordinationUndisturbed);
            }
            EnvironmentFault::FailStore { store: StoreName::Checkpoints, .. } => {}
            EnvironmentFault::SkewClock { machine, .. } => self.set_rate(machine, 100),
            EnvironmentFault::Suspend { machine: Machine::Node(node), .. } => {
                self.resume(node.0 as usize);
                self.observe(&Observation::Undisturbed(node));
            }
            EnvironmentFault::Suspend { machine: Machine::Candidate(i), .. } => self.continue_candidate(i),
            EnvironmentFault::WrongData { node, .. } => {
                self.nodes[node.0 as usize].data_set -= 1;
                self.kill_node(node.0 as usize, 50);
                self.observe(&Observation::Undisturbed(node));
            }
            EnvironmentFault::SetClock { .. }
            | EnvironmentFault::Strangers { .. }
            | EnvironmentFault::FlipBit { .. } => {}
        }
    }

    /// Ends all faults of the environment at the end of the safety phase.
    pub(super) fn end_environment_faults(&mut self) {
        self.storage.recover();
        for i in 0..self.nodes.len() {
            self.set_rate(Machine::Node(NodeId(i as u32)), 100);
            self.nodes[i].suspended = self.nodes[i].suspended.min(1);
            self.resume(i);
            if std::mem::take(&mut self.nodes[i].data_set) > 0 {
                self.kill_node(i, 50);
            }
        }
        (0..self.candidates.len()).for_each(|i| self.set_rate(Machine::Candidate(i), 100));
    }

    fn suspend(&mut self, machine: Machine, clock_stops: bool) {
        match machine {
            Machine::Node(node) => {
                self.disturb(node, true);
                let node = &mut self.nodes[node.0 as usize];
                node.suspended += 1;
                node.ranks.values_mut().for_each(|rank| rank.stopped += 1);
            }
            Machine::Candidate(i) => {
                self.observe(&Observation::CoordinationDisturbed { lasts: false });
                self.candidates[i].stopped += 1;
            }
        }
        if clock_stops {
            self.set_stopped(machine, true);
        }
    }

    /// Ends one suspension of a node.
    fn resume(&mut self, i: usize) {
        let node = &mut self.nodes[i];
        // The machine may have been restarted meanwhile.
        if node.suspended == 0 {
            return;
        }
        node.suspended -= 1;
        let is_resumed = node.suspended == 0;
        let members: Vec<_> = node.ranks.keys().map(|worker| worker.member).collect();
        members.into_iter().for_each(|member| self.continue_rank(member));
        if is_resumed {
            self.set_stopped(Machine::Node(self.nodes[i].id), false);
            for event in std::mem::take(&mut self.nodes[i].waiting) {
                self.queue.push(self.now, event);
            }
        }
    }

    /// A machine that is switched off is not suspended any more.
    pub(super) fn switch_on(&mut self, i: usize) {
        self.nodes[i].suspended = 0;
        self.nodes[i].waiting.clear();
        self.set_stopped(Machine::Node(self.nodes[i].id), false);
    }

    /// What a node trains on. Nodes of a job in which no fault changes that report nothing: nobody can join such a job.
    pub(super) fn inputs_of(&self, i: usize) -> Vec<Input> {
        if self.reports_inputs { vec![data_set(self.nodes[i].data_set)] } else { vec![] }
    }

    /// Whether the sender of a report has the data of the job.
    pub(super) fn is_right(&self, report: &Report) -> bool {
        report.inputs.is_empty() || report.inputs == [data_set(0)]
    }
}

/// Whether a fault changes what a node trains on.
pub fn changes_inputs(plan: &Plan) -> bool {
    let changes = |fault: &Fault| matches!(fault, Fault::Environment(EnvironmentFault::WrongData { .. }));
    plan.0.iter().any(|planned| changes(&planned.fault))
}

fn data_set(number: u64) -> Input {
    Input { name: String::from("data set"), value: number.to_string() }
}
