//! A plan as rows of a table.

use super::candidate::{Candidate, ZeroStage};
use super::search::{Plan, Ranked};
use crate::passes::recompute::Recompute;

/// Headers of the columns of [`row`].
pub const COLUMNS: [&str; 10] =
    ["mesh", "zero", "schedule", "recompute", "batch", "step s", "tokens/s", "waiting", "GiB", "bound s"];

/// The row of a valid candidate.
pub fn row(ranked: &Ranked) -> [String; COLUMNS.len()] {
    let Ranked { candidate, bound, evaluation, tokens_per_s } = ranked;
    let seconds = evaluation.step_seconds;
    [
        candidate.mesh.to_string(),
        zero(candidate.zero).into(),
        schedule(candidate),
        recompute(candidate.recompute).into(),
        format!("{} x {}", candidate.n_microbatches, candidate.micro_batch_size),
        format!("{seconds:.3}"),
        format!("{tokens_per_s:.0}"),
        format!("{:.1}%", 100.0 * evaluation.exposed_seconds / seconds),
        format!("{:.1}", evaluation.memory_bytes as f64 / (1u64 << 30) as f64),
        format!("{:.3}", bound.step_seconds),
    ]
}

/// Rejected candidates by kind of reason, most frequent first: their number, and the reason of the closest one.
pub fn refusals(plan: &Plan) -> Vec<(usize, String)> {
    let mut all: Vec<(usize, String)> = plan.summary().into_values().map(|(n, why)| (n, why.to_string())).collect();
    all.sort_by_key(|(n, _)| std::cmp::Reverse(*n));
    all
}

/// The schedule; a single stage has none.
fn schedule(candidate: &Candidate) -> String {
    if candidate.mesh.pp == 1 { "-".into() } else { candidate.schedule.to_string() }
}

const fn zero(stage: ZeroStage) -> &'static str {
    match stage {
        ZeroStage::Zero0 => "0",
        ZeroStage::Zero1 => "1",
        ZeroStage::Zero2 => "2",
        ZeroStage::Zero3 => "3",
    }
}

const fn recompute(policy: Recompute) -> &'static str {
    match policy {
        Recompute::None => "none",
        Recompute::Selective => "selective",
        Recompute::Full => "full",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::ScheduleKind;
    use crate::plan::bound::Bound;
    use crate::plan::{Evaluation, MeshSizes, Reason, Refusal};

    fn mesh(pp: usize) -> MeshSizes {
        MeshSizes { pp, dp_replicate: 1, dp_shard: 4, cp: 1, tp: 8 }
    }

    #[test]
    fn row_lists_a_candidate_and_its_figures() {
        let schedule = ScheduleKind::Interleaved { chunks: 2 };
        let (zero, recompute) = (ZeroStage::Zero2, Recompute::Full);
        let candidate = Candidate { mesh: mesh(2), zero, schedule, recompute, micro_batch_size: 1, n_microbatches: 16 };
        let evaluation = Evaluation { step_seconds: 2.0, memory_bytes: 3 << 29, exposed_seconds: 0.25 };
        let bound = Bound { step_seconds: 1.5, memory_bytes: 1 << 30 };

        let cells = row(&Ranked { candidate, bound, evaluation, tokens_per_s: 1234.4 });

        let mesh = "pp 2 x dp_shard 4 x tp 8";
        let policy = ["2", "interleaved over 2 chunks", "full", "16 x 1"];
        let figures = ["2.000", "1234", "12.5%", "1.5", "1.500"];
        assert_eq!(cells.to_vec(), [&[mesh][..], &policy, &figures].concat());
    }

    #[test]
    fn mesh_of_one_rank_is_written_as_one_rank() {
        let one = MeshSizes { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 1 };

        assert_eq!(one.to_string(), "one rank");
    }

    #[test]
    fn refusals_come_most_frequent_first_with_the_closest_example() {
        let refusal = |needed: u64, n_candidates| {
            let reason = Reason::Memory { needed: needed << 30, available: 1 << 30 };
            Refusal { mesh: mesh(1), example: None, reason, n_candidates }
        };
        let heads = Refusal { reason: Reason::Heads { n_heads: 3, tp: 8 }, ..refusal(2, 1) };
        let plan = Plan { refused: vec![heads, refusal(5, 2), refusal(3, 4)], ..Plan::default() };

        let memory = "needs 3.0 of 1.0 GiB, 2.0 GiB too much";
        let heads = "3 attention heads do not divide by tp = 8";
        assert_eq!(refusals(&plan), [(6, memory.to_string()), (1, heads.to_string())]);
    }
}
