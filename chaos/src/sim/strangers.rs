//! Messages that are not for their receiver, although they are well-formed: of another job, or older than what the receiver knows.
//!
//! A delivery may have exactly the effect that the passing of time has. Replays that the receiver cannot know to be old, such as
//! a node's report at a new coordinator, are only delivered.

use super::event::{Event, RankEvent};
use super::{JOB, Sim};
use crate::dice::Dice;
use crate::environment::EnvironmentFault;
use crate::invariants::Observation;
use crate::mutation::Mutation;
use crate::plan::{Fault, Plan};
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, JobId, NodeId, Step, Term, Worker};
use phalanx_strategies::elastic::message::{DesiredState, MemberPhase, MemberReport, Refusal, Report};
use phalanx_strategies::elastic::validate::COUNTER_MAX;
use std::collections::VecDeque;

/// The sender of such messages: it has recorded messages of the job.
pub struct Strangers {
    dice: Dice,
    reports: VecDeque<Report>,
    desired_states: VecDeque<(NodeId, DesiredState)>,
}

/// Messages of each kind that it keeps; an older one is as good as any.
const KEPT_MAX: usize = 200;

impl Strangers {
    /// Strangers, if the plan has any.
    pub fn of(seed: u64, plan: &Plan) -> Option<Strangers> {
        let come = |fault: &Fault| matches!(fault, Fault::Environment(EnvironmentFault::Strangers { .. }));
        plan.0.iter().any(|planned| come(&planned.fault)).then(|| Strangers {
            dice: Dice::new(seed, "strangers"),
            reports: VecDeque::new(),
            desired_states: VecDeque::new(),
        })
    }

    fn counter(&mut self) -> u64 {
        let bits = self.dice.pick(1..62);
        self.dice.pick(0..1 << bits).min(COUNTER_MAX)
    }

    fn any<'a, T>(dice: &mut Dice, kept: &'a VecDeque<T>) -> Option<&'a T> {
        let n = kept.len() as u64;
        (n > 0).then(|| &kept[dice.pick(0..n) as usize])
    }

    /// A report of another job, with contents of its own.
    fn foreign_report(&mut self) -> Option<Report> {
        let mut report = Strangers::any(&mut self.dice, &self.reports)?.clone();
        report.job = JobId(JOB.0 + 1 + self.counter());
        self.alter(&mut report);
        (report.boot, report.number) = (Incarnation(self.counter()), self.counter());
        Some(report)
    }

    /// A report that was sent, or an older one with other contents, and whether it has those.
    fn old_report(&mut self) -> Option<(Report, bool)> {
        let mut report = Strangers::any(&mut self.dice, &self.reports)?.clone();
        let is_altered = self.dice.percent(50);
        if is_altered {
            self.alter(&mut report);
            if self.dice.percent(50) {
                report.number = self.dice.pick(0..report.number + 1);
            } else {
                report.boot = Incarnation(self.dice.pick(0..report.boot.0 + 1));
            }
        }
        Some((report, is_altered))
    }

    /// Gives a report other contents.
    fn alter(&mut self, report: &mut Report) {
        report.draining = self.dice.percent(30);
        report.n_failed_starts = self.dice.pick(0..2_000) as u32;
        report.devices.iter_mut().for_each(|device| device.name = String::from("another device"));
        report.inputs.iter_mut().for_each(|input| input.value = String::from("other data"));
        for member in &mut report.members {
            member.worker.incarnation = Incarnation(self.counter());
            member.generation = Generation(self.counter());
            member.entered = Step(self.counter());
            member.hangs = self.dice.percent(30);
            member.commit_state.voted = None;
            let (step, lineage) = (Step(self.counter()), Generation(self.counter()));
            member.commit_state.applied = Some(Version { step, lineage });
            member.failure = self.dice.percent(30).then(|| String::from("a stranger"));
        }
    }

    /// A desired state of another job that would end the node or its workers.
    fn foreign_desired_state(&mut self, boot: Incarnation, workers: Vec<Worker>) -> Option<(NodeId, DesiredState)> {
        let (node, mut desired_state) = Strangers::any(&mut self.dice, &self.desired_states)?.clone();
        desired_state.job = JobId(JOB.0 + 1 + self.counter());
        desired_state.id.term = Term(self.counter());
        if desired_state.world_plan.is_none() {
            desired_state.id.generation = Generation(self.counter());
        }
        desired_state.evict = workers;
        desired_state.requests.stop = true;
        desired_state.release = self.dice.percent(50).then_some(boot);
        let refused = Refusal { boot, reason: String::from("a stranger") };
        desired_state.refused = self.dice.percent(50).then_some(refused);
        Some((node, desired_state))
    }

    /// A message to a rank about an older generation.
    fn rank_event(&mut self, latest: Generation, applied: Step, worker: Worker) -> RankEvent {
        let generation = Generation(self.dice.pick(0..latest.0));
        let step = Step(self.dice.pick(applied.0.saturating_sub(2)..applied.0 + 4));
        let digest = self.counter();
        let base = Version { step, lineage: generation };
        match self.dice.pick(0..7) {
            0 => RankEvent::Reduced { generation, step, digest },
            1 => RankEvent::Committed { generation, step, requests: Default::default() },
            2 => RankEvent::CatchUpPart { generation, step, digest, base, pieces: vec![] },
            3 => RankEvent::Outcome { generation, step },
            4 => RankEvent::Finished { generation },
            5 => RankEvent::JoinedWorld { generation },
            _ => RankEvent::Broken { generation, lost: Some(worker) },
        }
    }
}

fn keep<T>(kept: &mut VecDeque<T>, message: T) {
    if kept.len() == KEPT_MAX {
        kept.pop_front();
    }
    kept.push_back(message);
}

impl Sim {
    pub(super) fn invite_strangers(&mut self, n_messages: u64, for_ms: u64) {
        let Some(strangers) = &mut self.strangers else { return };
        for _ in 0..n_messages {
            let at = self.now + strangers.dice.pick(0..for_ms * 1_000 + 1);
            self.queue.push(at, Event::Stranger);
        }
    }

    pub(super) fn note_report(&mut self, report: &Report) {
        if let Some(strangers) = &mut self.strangers {
            keep(&mut strangers.reports, report.clone());
        }
    }

    pub(super) fn note_desired_state(&mut self, node: NodeId, desired_state: &DesiredState) {
        if let Some(strangers) = &mut self.strangers {
            keep(&mut strangers.desired_states, (node, desired_state.clone()));
        }
    }

    /// Delivers one message of a stranger.
    pub(super) fn stranger_comes(&mut self) {
        let Some(strangers) = &mut self.strangers else { return };
        self.outcome.n_strangers += 1;
        match strangers.dice.pick(0..6) {
            0 => {
                let report = strangers.foreign_report();
                self.give_report(report.map(|report| (report, true)));
            }
            1 => {
                let report = strangers.old_report();
                self.give_report(report);
            }
            2 => self.give_foreign_desired_state(),
            3 => {
                let old = Strangers::any(&mut strangers.dice, &strangers.desired_states).cloned();
                self.give_desired_state(old);
            }
            4 => self.give_status_report(),
            _ => self.give_rank_event(),
        }
    }

    fn pick(&mut self, n: usize) -> Option<usize> {
        let strangers = self.strangers.as_mut()?;
        (n > 0).then(|| strangers.dice.pick(0..n as u64) as usize)
    }

    fn give_report(&mut self, report: Option<(Report, bool)>) {
        let Some((mut report, is_altered)) = report.filter(|(report, _)| report.check().is_ok()) else { return };
        let Some(i) = self.pick(self.candidates.len()) else { return };
        let (now, believes) = (self.candidate_now(i), self.is(Mutation::BelieveStrangers));
        let renumbers = self.is(Mutation::BelieveReplays);
        let candidate = &mut self.candidates[i];
        let Some(coordinator) = candidate.coordinator.as_mut().filter(|_| candidate.stopped == 0) else { return };
        let is_foreign = report.job != JOB;
        let latest = candidate.heard.get(&report.node).copied();
        let is_old = latest.is_some_and(|latest| (report.boot, report.number) <= latest);
        // Reports are authentic: one of this job with other contents does not exist, unless an earlier start of the node sent it.
        if is_altered && !is_foreign && !is_old {
            return;
        }
        let mut expected = coordinator.clone();
        if !is_foreign {
            expected.handle_timeout(now);
        }
        let what =
            format!("{} of {} of {}", if is_foreign { "a report" } else { "an old report" }, report.node, report.job);
        if believes {
            report.job = JOB;
        }
        if let Some(latest) = latest.filter(|_| renumbers && is_old) {
            (report.boot, report.number) = (latest.0, latest.1 + 1);
        }
        let _ = coordinator.handle_report(now, &report);
        let has_effect = (is_foreign || is_old) && format!("{coordinator:?}") != format!("{expected:?}");
        self.observe(&Observation::Stranger { what: &what, has_effect });
        self.drive_candidate(i);
    }

    fn give_foreign_desired_state(&mut self) {
        let Some(i) = self.pick(self.nodes.len()) else { return };
        let (boot, workers) = (self.nodes[i].boot(), self.nodes[i].ranks.keys().copied().collect());
        let Some(strangers) = &mut self.strangers else { return };
        let foreign = strangers.foreign_desired_state(boot, workers);
        self.give_desired_state(foreign.map(|(_, desired_state)| (NodeId(i as u32), desired_state)));
    }

    fn give_desired_state(&mut self, message: Option<(NodeId, DesiredState)>) {
        let Some((node, mut desired_state)) = message.filter(|(_, desired)| desired.check().is_ok()) else { return };
        let i = node.0 as usize;
        let (now, believes) = (self.node_now(i), self.is(Mutation::BelieveStrangers));
        let is_suspended = self.nodes[i].suspended > 0;
        let Some(supervisor) = self.nodes[i].supervisor.as_mut().filter(|_| !is_suspended) else { return };
        let is_foreign = desired_state.job != JOB;
        // A refusal is for one start of the node, whatever came after it. Of one position, a copy may name other evictions.
        if !is_foreign && (desired_state.refused.is_some() || desired_state.id >= supervisor.desired_state_id()) {
            return;
        }
        let mut expected = supervisor.clone();
        expected.handle_timeout(now);
        let what = format!("a desired state of {} for {node}", desired_state.job);
        if believes {
            desired_state.job = JOB;
        }
        let _ = supervisor.handle_desired_state(now, desired_state);
        let has_effect = format!("{supervisor:?}") != format!("{expected:?}");
        self.observe(&Observation::Stranger { what: &what, has_effect });
        self.drive_node(i);
    }

    /// A status report of a process that was replaced.
    fn give_status_report(&mut self) {
        let Some((i, worker)) = self.some_rank() else { return };
        let now = self.node_now(i);
        let Some(rank) = self.rank(worker) else { return };
        let report = rank.member.report();
        let Some(strangers) = &mut self.strangers else { return };
        let incarnation = Incarnation(strangers.dice.pick(0..worker.incarnation.0));
        let report = MemberReport {
            worker: Worker { incarnation, ..worker },
            generation: Generation(strangers.counter()),
            phase: MemberPhase::Done,
            ..report
        };
        let Some(supervisor) = self.nodes[i].supervisor.as_mut() else { return };
        let before = format!("{supervisor:?}");
        supervisor.handle_status_report(now, report);
        let has_effect = format!("{supervisor:?}") != before;
        self.observe(&Observation::Stranger { what: "a status report of a replaced process", has_effect });
        self.drive_node(i);
    }

    fn give_rank_event(&mut self) {
        let Some((_, worker)) = self.some_rank() else { return };
        let state = |sim: &mut Sim| {
            let rank = sim.rank(worker)?;
            Some((format!("{:?}{:?}", rank.member, rank.catch_up_parts), rank.atoms.clone(), rank.open))
        };
        let Some(rank) = self.rank(worker).filter(|rank| rank.stopped == 0) else { return };
        let report = rank.member.report();
        if report.generation == Generation(0) {
            return;
        }
        let applied = report.commit_state.applied.map(|version| version.step).unwrap_or_default();
        let Some(strangers) = &mut self.strangers else { return };
        let event = strangers.rank_event(report.generation, applied, worker);
        let what = format!("{event:?} at {worker} in {}", report.generation);
        let before = state(self);
        self.rank_gets(worker, event);
        let has_effect = state(self) != before;
        self.observe(&Observation::Stranger { what: &what, has_effect });
    }

    /// A rank process of a machine that is not suspended.
    fn some_rank(&mut self) -> Option<(usize, Worker)> {
        let i = self.pick(self.nodes.len()).filter(|i| self.nodes[*i].suspended == 0)?;
        let n_ranks = self.nodes[i].ranks.len();
        let at = self.pick(n_ranks)?;
        self.nodes[i].ranks.keys().nth(at).map(|worker| (i, *worker))
    }
}
