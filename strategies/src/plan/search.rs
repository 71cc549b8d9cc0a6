//! Branch and bound over all candidates.
//!
//! The search enumerates all meshes of the world size and all candidates of each. It rejects invalid candidates with a
//! reason, bounds the rest ([`super::bound`]) and evaluates them in the order of their bounds, until the next bound is no
//! better than the candidates found. Source: Land and Doig 1960 (Econometrica 28), with the best bound first.
//!
//! Memory bounds are too low, by a similar factor for candidates that differ only in mesh and batch. So a candidate that
//! would not fit even with the smallest factor seen for its kind is evaluated after all others.

use super::bound::{Bound, MeshBound};
use super::candidate::{Candidate, MeshSizes, ZeroStage};
use super::hardware::Hardware;
use super::reason::Reason;
use super::workload::Workload;
use crate::passes::recompute::Recompute;
use crate::pipeline::ScheduleKind;
use serde::Serialize;
use std::collections::BTreeMap;

/// Limits of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of ranks.
    pub world_size: usize,
    /// Maximum rows of a microbatch.
    pub micro_batch_max: usize,
    /// Candidates to keep.
    pub n_keep: usize,
    /// Maximum number of candidates to evaluate.
    pub n_evaluate_max: usize,
}

/// Time and memory of a candidate, from its compiled program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Bytes of the fullest rank.
    pub memory_bytes: u64,
    /// Mean seconds that ranks wait: bubbles and communication that is not hidden.
    pub exposed_seconds: f64,
}

impl Evaluation {
    /// Extrapolates to a step of `n` microbatches from two shorter steps, given with their numbers of microbatches. Each
    /// additional microbatch holds its inputs, `input_bytes`, from the beginning of the step.
    #[must_use]
    pub fn extrapolated([a, b]: [(usize, Evaluation); 2], n: usize, input_bytes: u64) -> Evaluation {
        let times = (n - b.0) as f64 / (b.0 - a.0) as f64;
        let line = |of: fn(&Evaluation) -> f64| of(&b.1) + times * (of(&b.1) - of(&a.1));
        Evaluation {
            step_seconds: line(|e| e.step_seconds),
            memory_bytes: b.1.memory_bytes + (n - b.0) as u64 * input_bytes,
            exposed_seconds: line(|e| e.exposed_seconds),
        }
    }
}

/// A valid candidate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ranked {
    /// The candidate.
    pub candidate: Candidate,
    /// Its lower bound.
    pub bound: Bound,
    /// Its time and memory.
    pub evaluation: Evaluation,
    /// Tokens of a step over its seconds.
    pub tokens_per_s: f64,
}

/// Candidates of one mesh that are rejected for one kind of reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Refusal {
    /// The mesh.
    pub mesh: MeshSizes,
    /// The closest of them; `None` if the mesh itself is rejected.
    pub example: Option<Candidate>,
    /// Why `example` is rejected.
    pub reason: Reason,
    /// Number of candidates.
    pub n_candidates: usize,
}

/// The result of a search.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[must_use]
pub struct Plan {
    /// Valid candidates, fastest first.
    pub ranked: Vec<Ranked>,
    /// Rejected candidates, by mesh and kind of reason.
    pub refused: Vec<Refusal>,
    /// Candidates that were bounded or refused one by one.
    pub n_candidates: usize,
    /// Candidates that were evaluated.
    pub n_evaluated: usize,
}

/// Searches for the fastest candidates. `evaluate` compiles and simulates a candidate, or returns why it is rejected.
pub fn search(
    workload: &Workload,
    hardware: &Hardware,
    options: &Options,
    mut evaluate: impl FnMut(&Candidate) -> Result<Evaluation, Reason>,
) -> Plan {
    let mut search = Search { refused: BTreeMap::new(), plan: Plan::default() };
    let open = search.open(workload, hardware, options);
    let n_tokens = (workload.global_batch_rows * workload.seq_len) as f64;
    let mut experience = Experience::default();
    let mut doubtful = Vec::new();
    let mut try_one = |search: &mut Search, experience: &mut Experience, (candidate, bound): (Candidate, Bound)| {
        if let Some(reason) = search.reason_to_skip(&bound, options) {
            return search.refuse(candidate.mesh, Some(candidate), reason);
        }
        search.plan.n_evaluated += 1;
        let evaluated = evaluate(&candidate);
        if let Ok(evaluation) = &evaluated {
            experience.note(&candidate, &bound, evaluation);
        }
        match evaluated.and_then(|e| fits(e.memory_bytes, hardware).map(|()| e)) {
            Ok(evaluation) => {
                let tokens_per_s = n_tokens / evaluation.step_seconds;
                search.keep(Ranked { candidate, bound, evaluation, tokens_per_s }, options);
            }
            Err(reason) => search.refuse(candidate.mesh, Some(candidate), reason),
        }
    };
    for (candidate, bound) in open {
        match experience.expected_bytes(&candidate, &bound) > hardware.memory_bytes as f64 {
            true => doubtful.push((candidate, bound)),
            false => try_one(&mut search, &mut experience, (candidate, bound)),
        }
    }
    doubtful.into_iter().for_each(|open| try_one(&mut search, &mut experience, open));
    search.plan.refused = search.refused.into_values().collect();
    search.plan
}

impl Plan {
    /// Number of rejected candidates (meshes, where the mesh itself is rejected) by kind of reason, with the reason of the
    /// closest one.
    pub fn summary(&self) -> BTreeMap<&'static str, (usize, &Reason)> {
        let mut summary = BTreeMap::new();
        for refusal in &self.refused {
            let (n, reason) = summary.entry(refusal.reason.kind()).or_insert((0, &refusal.reason));
            *n += refusal.n_candidates;
            if closeness(&refusal.reason) < closeness(reason) {
                *reason = &refusal.reason;
            }
        }
        summary
    }
}

/// Smallest ratio of memory to its bound so far, by kind of candidate.
#[derive(Default)]
struct Experience(Vec<(Kind, f64)>);

type Kind = (ZeroStage, ScheduleKind, Recompute);

impl Experience {
    fn note(&mut self, candidate: &Candidate, bound: &Bound, evaluation: &Evaluation) {
        let ratio = evaluation.memory_bytes as f64 / bound.memory_bytes.max(1) as f64;
        match self.0.iter_mut().find(|(kind, _)| *kind == kind_of(candidate)) {
            Some((_, least)) => *least = least.min(ratio),
            None => self.0.push((kind_of(candidate), ratio)),
        }
    }

    fn expected_bytes(&self, candidate: &Candidate, bound: &Bound) -> f64 {
        let least = self.0.iter().find(|(kind, _)| *kind == kind_of(candidate)).map_or(1.0, |(_, least)| *least);
        bound.memory_bytes as f64 * least
    }
}

const fn kind_of(candidate: &Candidate) -> Kind {
    (candidate.zero, candidate.schedule, candidate.recompute)
}

struct Search {
    refused: BTreeMap<(MeshSizes, &'static str), Refusal>,
    plan: Plan,
}

impl Search {
    /// Candidates that may be valid, best bound first, ties in order of enumeration.
    fn open(&mut self, workload: &Workload, hardware: &Hardware, options: &Options) -> Vec<(Candidate, Bound)> {
        let mut open = Vec::new();
        for mesh in MeshSizes::all(options.world_size) {
            if let Err(reason) = mesh.fits(workload, hardware) {
                self.refuse(mesh, None, reason);
                continue;
            }
            let bounds = MeshBound::new(mesh, workload, hardware);
            for candidate in Candidate::all(mesh, workload, options.micro_batch_max) {
                self.plan.n_candidates += 1;
                let bound = bounds.of(&candidate);
                match candidate.fits(workload).and_then(|()| fits(bound.memory_bytes, hardware)) {
                    Ok(()) => open.push((candidate, bound)),
                    Err(reason) => self.refuse(mesh, Some(candidate), reason),
                }
            }
        }
        open.sort_by(|a, b| a.1.step_seconds.total_cmp(&b.1.step_seconds));
        open
    }

    /// Why a candidate need not be evaluated.
    fn reason_to_skip(&self, bound: &Bound, options: &Options) -> Option<Reason> {
        let worst = self.plan.ranked.last().filter(|_| self.plan.ranked.len() >= options.n_keep);
        let best_s = worst.map_or(f64::INFINITY, |r| r.evaluation.step_seconds);
        if bound.step_seconds >= best_s {
            return Some(Reason::Slower { at_least_s: bound.step_seconds, best_s });
        }
        let n_evaluated = self.plan.n_evaluated;
        (n_evaluated >= options.n_evaluate_max).then_some(Reason::NotReached { n_evaluated })
    }

    fn keep(&mut self, ranked: Ranked, options: &Options) {
        let seconds = ranked.evaluation.step_seconds;
        let at = self.plan.ranked.partition_point(|r| r.evaluation.step_seconds <= seconds);
        self.plan.ranked.insert(at, ranked);
        if let Some(out) = self.plan.ranked.get(options.n_keep).copied() {
            self.plan.ranked.truncate(options.n_keep);
            let best_s = self.plan.ranked.last().map_or(f64::INFINITY, |r| r.evaluation.step_seconds);
            let reason = Reason::Slower { at_least_s: out.evaluation.step_seconds, best_s };
            self.refuse(out.candidate.mesh, Some(out.candidate), reason);
        }
    }

    fn refuse(&mut self, mesh: MeshSizes, example: Option<Candidate>, reason: Reason) {
        let refusal = self.refused.entry((mesh, reason.kind())).or_insert_with(|| Refusal {
            mesh,
            example,
            reason: reason.clone(),
            n_candidates: 0,
        });
        refusal.n_candidates += 1;
        if closeness(&reason) < closeness(&refusal.reason) {
            (refusal.example, refusal.reason) = (example, reason);
        }
    }
}

fn fits(needed: u64, hardware: &Hardware) -> Result<(), Reason> {
    let available = hardware.memory_bytes;
    if needed > available { Err(Reason::Memory { needed, available }) } else { Ok(()) }
}

/// By how much a candidate misses, for reasons with a measure.
fn closeness(reason: &Reason) -> f64 {
    match reason {
        Reason::Memory { needed, .. } => *needed as f64,
        Reason::Slower { at_least_s, .. } => *at_least_s,
        _ => 0.0,
    }
}
