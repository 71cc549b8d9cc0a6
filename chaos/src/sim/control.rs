//! Coordinators: candidates for the lease, the leader's state machine, and the shared store.

use super::event::{Attempt, CandidateEvent, Event, LeaseWrite, RecordWrite};
use super::{Config, JOB, Sim};
use crate::environment::Machine;
use crate::invariants::Observation;
use crate::mutation::Mutation;
use phalanx_strategies::elastic::coordinator::{self, Activity, Coordinator};
use phalanx_strategies::elastic::identity::{Generation, Incarnation, NodeId, Term};
use phalanx_strategies::elastic::message::{Record, Report, Stage, WorldPlan};
use phalanx_strategies::elastic::quorum::FOREVER;
use phalanx_strategies::elastic::succession::{self, Succession};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A process that may coordinate.
pub struct Candidate {
    id: u32,
    /// Number of starts.
    pub life: u64,
    succession: Option<Succession>,
    pub coordinator: Option<Coordinator>,
    timer_at: Option<u64>,
    /// Number of faults that stop the process, and the events that wait meanwhile.
    pub stopped: u32,
    pub waiting: Vec<CandidateEvent>,
    /// When it last continued after such a fault.
    pub continued_at: Option<u64>,
    /// The latest announced world.
    announced: Generation,
    /// The term that it leads, and the version of the record in the store.
    pub term: Option<Term>,
    pub version: u64,
    /// The latest report of each node that the coordinator has taken.
    pub heard: BTreeMap<NodeId, (Incarnation, u64)>,
}

impl Candidate {
    pub fn new(id: u32) -> Candidate {
        Candidate {
            id,
            life: 0,
            succession: None,
            coordinator: None,
            timer_at: None,
            stopped: 0,
            waiting: vec![],
            continued_at: None,
            announced: Generation(0),
            term: None,
            version: 0,
            heard: BTreeMap::new(),
        }
    }

    pub fn is_up(&self) -> bool {
        self.succession.is_some()
    }
}

impl Sim {
    pub(super) fn start_candidate(&mut self, i: usize) {
        let (now, timing) = (self.candidate_now(i), self.config.timing);
        let candidate = &mut self.candidates[i];
        if candidate.is_up() {
            return;
        }
        candidate.life += 1;
        candidate.timer_at = None;
        candidate.succession = Some(Succession::new(now, candidate.id, timing));
        self.drive_candidate(i);
    }

    pub(super) fn kill_candidate(&mut self, i: usize) {
        let candidate = &mut self.candidates[i];
        *candidate = Candidate { life: candidate.life, ..Candidate::new(candidate.id) };
        self.set_stopped(Machine::Candidate(i), false);
    }

    /// The candidate that leads, if it is not deposed.
    pub(super) fn leading(&self) -> Option<usize> {
        let leads = |c: &Candidate| {
            c.coordinator.as_ref().is_some_and(|coordinator| coordinator.activity() != Activity::Deposed)
        };
        let newest = |i: &usize| self.candidates[*i].coordinator.as_ref().map(|c| c.record().term);
        (0..self.candidates.len()).filter(|i| leads(&self.candidates[*i])).max_by_key(newest)
    }

    pub(super) fn leader(&self) -> Option<&Coordinator> {
        self.leading().and_then(|i| self.candidates[i].coordinator.as_ref())
    }

    pub(super) fn send_report(&mut self, node: usize, mut report: Report) {
        if self.is(Mutation::ForgetVotes) {
            report.members.iter_mut().for_each(|member| member.commit_state.voted = None);
        }
        if self.is(Mutation::ForgetInputs) {
            report.inputs.clear();
        }
        self.note_report(&report);
        for i in 0..self.candidates.len() {
            for delay in self.network.delays_to_coordinators(self.nodes[node].id) {
                let what = CandidateEvent::Report(report.clone());
                let life = self.candidates[i].life;
                self.queue.push(self.now + delay, Event::ToCandidate { candidate: i, life, what });
            }
        }
    }

    pub(super) fn candidate_gets(&mut self, i: usize, life: u64, what: CandidateEvent) {
        let gone = self.candidates[i].life != life || !self.candidates[i].is_up();
        match what {
            CandidateEvent::WriteLease(write) => self.lease_reaches_store(i, life, write, gone),
            CandidateEvent::WriteRecord(write) => self.record_reaches_store(i, life, *write, gone),
            _ if gone => {}
            what if self.candidates[i].stopped > 0 => self.candidates[i].waiting.push(what),
            what => {
                self.candidate_handles(i, what);
                self.drive_candidate(i);
            }
        }
    }

    pub(super) fn answer(&mut self, i: usize, life: u64, what: CandidateEvent) {
        let at = self.now + self.dice.pick(200..3_000);
        self.queue.push(at, Event::ToCandidate { candidate: i, life, what });
    }

    fn candidate_handles(&mut self, i: usize, what: CandidateEvent) {
        let now = self.candidate_now(i);
        let candidate = &mut self.candidates[i];
        let Some(succession) = &mut candidate.succession else { return };
        match what {
            CandidateEvent::Timer => {
                candidate.timer_at = None;
                succession.handle_timeout(now);
                if let Some(coordinator) = &mut candidate.coordinator {
                    coordinator.handle_timeout(now);
                }
            }
            CandidateEvent::Lease(lease) => succession.handle_lease(now, lease),
            CandidateEvent::LeaseWritten { asked, result } => {
                succession.handle_written(now, asked, result);
            }
            CandidateEvent::Report(report) => self.coordinator_hears(i, report),
            CandidateEvent::ReadRecord(term) => {
                if candidate.term == Some(term) && candidate.coordinator.is_none() {
                    self.read_record(i, term);
                }
            }
            CandidateEvent::ListCheckpoints { term, listing } => {
                if candidate.term == Some(term) {
                    self.list_checkpoints(i, term, listing);
                }
            }
            CandidateEvent::Listed { term, listing, newest } => {
                if let Some(coordinator) = candidate.coordinator.as_mut().filter(|_| candidate.term == Some(term)) {
                    coordinator.handle_listed(now, listing, newest);
                }
            }
            CandidateEvent::RecordWritten { term, accepted, version } => {
                if let Some(coordinator) = candidate.coordinator.as_mut().filter(|_| candidate.term == Some(term)) {
                    candidate.version = version;
                    coordinator.handle_persisted(now, accepted);
                }
            }
            CandidateEvent::WriteLease(_) | CandidateEvent::WriteRecord(_) => {}
        }
    }

    fn coordinator_hears(&mut self, i: usize, report: Report) {
        let (now, is_right) = (self.candidate_now(i), self.is_right(&report));
        let candidate = &mut self.candidates[i];
        let Some(coordinator) = &mut candidate.coordinator else { return };
        // Overtaken reports are rejected.
        if coordinator.handle_report(now, &report).is_ok() && is_right {
            candidate.heard.insert(report.node, (report.boot, report.number));
        }
    }

    /// Sends a request to the leading coordinator, if any.
    pub(super) fn ask(&mut self, request: impl FnOnce(&mut Coordinator, Instant)) {
        let Some(i) = self.leading() else { return };
        let now = self.candidate_now(i);
        let candidate = &mut self.candidates[i];
        if let (0, Some(coordinator)) = (candidate.stopped, &mut candidate.coordinator) {
            request(coordinator, now);
            self.drive_candidate(i);
        }
    }

    pub(super) fn drive_candidate(&mut self, i: usize) {
        let life = self.candidates[i].life;
        while let Some(command) = self.candidates[i].succession.as_mut().and_then(Succession::poll_command) {
            let at = self.now + self.dice.pick(200..3_000);
            let to_me = |what| Event::ToCandidate { candidate: i, life, what };
            match command {
                succession::Command::Read => {
                    // Reads the store now, so the answer may be outdated on arrival.
                    if let Some(at) = self.lease_is_read(at) {
                        self.queue.push(at, to_me(CandidateEvent::Lease(self.store.lease)));
                    }
                }
                succession::Command::Write { old, new } => {
                    let asked = self.candidate_now(i);
                    let write = LeaseWrite { old, new, asked, attempt: Attempt::Awaited };
                    self.queue.push(at, to_me(CandidateEvent::WriteLease(write)));
                }
                succession::Command::Lead(term) => {
                    self.outcome.n_terms += 1;
                    self.mark(4, term.0, i as u64);
                    self.observe(&Observation::Leads(term));
                    // It was stopped after it had asked for the lease, which may soon end.
                    if self.candidates[i]
                        .continued_at
                        .is_some_and(|at| self.now < at + self.config.timing.lease.as_micros() as u64)
                    {
                        self.observe(&Observation::CoordinationDisturbed { lasts: false });
                    }
                    (self.candidates[i].coordinator, self.candidates[i].term) = (None, Some(term));
                    self.read_record(i, term);
                }
                succession::Command::StepDown => {
                    (self.candidates[i].coordinator, self.candidates[i].term) = (None, None);
                }
            }
        }
        while let Some(command) = self.candidates[i].coordinator.as_mut().and_then(Coordinator::poll_command) {
            self.perform(i, command);
        }
        self.arm(i);
    }

    /// Begins a term with the record in the store.
    pub(super) fn begin_term(&mut self, i: usize, term: Term, mut record: Record) {
        let now = self.candidate_now(i);
        if self.is(Mutation::ForgetDecisions) {
            record.inputs = None;
        }
        let Config { policy, mut timing, .. } = self.config;
        if self.is(Mutation::WaitForTheLost) {
            timing.disk_patience = FOREVER;
        }
        let coordinator = Coordinator::new(now, JOB, term, record, policy, timing);
        let candidate = &mut self.candidates[i];
        (candidate.announced, candidate.version) = (Generation(0), self.store.version());
        candidate.heard.clear();
        candidate.coordinator = Some(coordinator);
    }

    fn perform(&mut self, i: usize, command: coordinator::Command) {
        match command {
            coordinator::Command::Send(node, mut desired_state) => {
                if let Some(world_plan) = &mut desired_state.world_plan {
                    if self.is(Mutation::ShadowsAtHome) {
                        *world_plan = Arc::new(without_shadows(world_plan));
                    }
                    if world_plan.generation > self.candidates[i].announced && desired_state.id.stage >= Stage::Form {
                        self.candidates[i].announced = world_plan.generation;
                        self.announce(world_plan.clone());
                    }
                }
                self.note_desired_state(node, &desired_state);
                for delay in self.network.delays_to_node(node) {
                    let desired_state = desired_state.clone();
                    self.queue
                        .push(self.now + delay, Event::DesiredStateArrives { node: node.0 as usize, desired_state });
                }
            }
            coordinator::Command::Persist(record) => self.persist(i, record),
            coordinator::Command::Resumed(timeline) => {
                self.mark(5, timeline.generation.0, timeline.total().as_micros() as u64);
                self.observe(&Observation::Resumed(&timeline));
                self.outcome.incidents.push((self.now / 1_000, timeline));
            }
            coordinator::Command::NotSaved(_) => {}
            coordinator::Command::ListCheckpoints(listing) => {
                if let Some(term) = self.candidates[i].term {
                    self.answer(i, self.candidates[i].life, CandidateEvent::ListCheckpoints { term, listing });
                }
            }
            coordinator::Command::Outrun(term) => {
                if let Some(succession) = &mut self.candidates[i].succession {
                    succession.handle_outrun(term);
                }
            }
            coordinator::Command::Saved(checkpoint) => self.mark(6, checkpoint.generation.0, checkpoint.step.0),
            coordinator::Command::Refused(..) => self.outcome.n_refused += 1,
            coordinator::Command::Mixed(..) => {}
            coordinator::Command::Ended(_) => self.mark(8, self.step.0, 0),
        }
    }

    fn persist(&mut self, i: usize, record: Record) {
        let life = self.candidates[i].life;
        let at = self.now + self.dice.pick(300..5_000);
        let (term, over) = (record.term, self.candidates[i].version);
        let what = CandidateEvent::WriteRecord(Box::new(RecordWrite { record, over, attempt: Attempt::Awaited }));
        if self.is(Mutation::TrustUnsyncedWrites) {
            self.answer(i, life, CandidateEvent::RecordWritten { term, accepted: true, version: over + 1 });
            return self.queue.push(at + 50_000, Event::ToCandidate { candidate: i, life, what });
        }
        self.queue.push(at, Event::ToCandidate { candidate: i, life, what });
    }

    /// Called when a coordinator sends its first desired state with a world.
    fn announce(&mut self, world_plan: Arc<WorldPlan>) {
        self.observe(&Observation::Announced(&world_plan));
        let known = self.world_plan.as_ref().map(|known| known.generation).unwrap_or_default();
        if world_plan.generation > known {
            let (step, generation) = (world_plan.base.step, world_plan.voted_in);
            let open = self.collectives.get(&(generation, step)).and_then(|collective| collective.digest);
            if let Some(digest) = open.filter(|_| step > self.step) {
                self.observe(&Observation::Decided { generation, step, digest });
                self.step = step;
            }
            if step < self.step {
                self.outcome.n_rollbacks += 1;
                self.step = step;
            }
            self.ready.clear();
            let before = self.world_plan.replace(world_plan.clone());
            let had_to_catch_up =
                before.iter().flat_map(|before| &before.catching_up).filter(|l| !l.transfers.is_empty());
            let assignments = had_to_catch_up.filter_map(|catch_up| world_plan.rank_of(catch_up.worker));
            self.outcome.n_caught_up +=
                assignments.filter(|rank| world_plan.transfers[*rank].is_empty()).count() as u64;
            self.outcome.n_catch_up_plans += u64::from(!world_plan.catching_up.is_empty());
            self.begin_comparisons(&world_plan);
            self.observe(&Observation::Formed(&world_plan));
        }
    }

    pub(super) fn arm(&mut self, i: usize) {
        let candidate = &self.candidates[i];
        let own = candidate.succession.as_ref().and_then(Succession::poll_timeout);
        let led = candidate.coordinator.as_ref().and_then(Coordinator::poll_timeout);
        let due = [own, led].into_iter().flatten().min();
        let Some(due) = due.and_then(|due| self.when(&self.clocks.candidates[i], due)) else { return };
        if candidate.timer_at.is_none_or(|at| due < at) {
            let life = candidate.life;
            self.candidates[i].timer_at = Some(due);
            let what = CandidateEvent::Timer;
            self.queue.push(due.max(self.now), Event::ToCandidate { candidate: i, life, what });
        }
    }
}

/// The same world without shadows.
fn without_shadows(world_plan: &WorldPlan) -> WorldPlan {
    let mut poorer = world_plan.clone();
    for (shards, transfers) in poorer.holds.iter_mut().zip(&mut poorer.transfers) {
        shards.truncate(1);
        transfers.retain(|transfer| transfer.shard == shards[0]);
    }
    poorer
}
