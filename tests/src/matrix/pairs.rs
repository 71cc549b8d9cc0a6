//! A small set of cells, found by a greedy choice, with every possible pair of choices.
//!
//! Most interaction faults involve two choices. Source: Kuhn et al. 2004, Software Fault Interactions and
//! Implications for Software Testing, IEEE TSE 30(6).

use super::cell::{Cell, SCHEDULES, cells};
use super::model::Shape;
use phalanx_strategies::mesh::Axis;
use std::collections::BTreeSet;

/// Two choices, each as index and value.
type Pair = (usize, usize, usize, usize);

/// Models and cells of at most `max` ranks that cover all pairs. Deterministic.
pub fn pairwise(max: usize) -> Vec<(Shape, Cell)> {
    let all = candidates(max);
    let mut open: BTreeSet<Pair> = all.iter().flat_map(|c| pairs(*c)).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let best = best(&all, &open);
        open.retain(|p| !pairs(best).any(|q| q == *p));
        chosen.push(best);
    }
    chosen
}

/// A model and a cell of four ranks for each pair of axes, two ranks along both, with as many other pairs of choices as fit in so
/// few cells. Deterministic.
pub fn axis_pairs() -> Vec<(Shape, Cell)> {
    let mut all = candidates(4);
    all.retain(|(_, cell)| Axis::ALL.iter().filter(|axis| cell.mesh.axis(**axis) == 2).count() == 2);
    let mut open: BTreeSet<Pair> = all.iter().flat_map(|c| pairs(*c)).collect();
    let mut chosen = Vec::new();
    while !all.is_empty() {
        let best = best(&all, &open);
        open.retain(|p| !pairs(best).any(|q| q == *p));
        all.retain(|(_, cell)| cell.mesh != best.1.mesh);
        chosen.push(best);
    }
    chosen
}

/// The candidate with the most open pairs; among equals, the one with the fewest ranks.
fn best(candidates: &[(Shape, Cell)], open: &BTreeSet<Pair>) -> (Shape, Cell) {
    let gain = |c: &(Shape, Cell)| pairs(*c).filter(|p| open.contains(p)).count();
    let best = candidates.iter().max_by_key(|c| (gain(c), std::cmp::Reverse(c.1.mesh.size())));
    *best.expect("every open pair belongs to a candidate")
}

fn candidates(max: usize) -> Vec<(Shape, Cell)> {
    let cells = cells(max);
    Shape::ALL.into_iter().flat_map(|shape| cells.iter().map(move |cell| (shape, *cell))).collect()
}

fn pairs(candidate: (Shape, Cell)) -> impl Iterator<Item = Pair> {
    let values = choices(candidate);
    (0..values.len()).flat_map(move |i| (0..i).map(move |j| (i, values[i], j, values[j])))
}

/// The value of every choice; 0 if the choice does not apply.
fn choices((shape, cell): (Shape, Cell)) -> [usize; 10] {
    let m = cell.mesh;
    let schedule = 1 + SCHEDULES.iter().position(|s| *s == cell.schedule).expect("a cell has one of the schedules");
    [
        m.pp,
        m.dp_replicate,
        m.dp_shard,
        m.cp,
        m.tp,
        if m.dp_shard * m.cp > 1 { cell.zero } else { 0 },
        if m.pp > 1 { schedule } else { 0 },
        if m.tp > 1 { 1 + usize::from(cell.sequence_parallel) } else { 0 },
        if m.cp > 1 { 1 + usize::from(cell.cp_comm == "ring") } else { 0 },
        shape as usize,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_chosen_cells_cover_every_pair_of_choices() {
        let chosen = pairwise(8);

        let covered: BTreeSet<Pair> = chosen.iter().flat_map(|c| pairs(*c)).collect();
        for candidate in candidates(8) {
            for pair in pairs(candidate) {
                assert!(covered.contains(&pair), "{pair:?} of {} {}", candidate.0, candidate.1);
            }
        }
        println!("{} of {} cells cover {} pairs", chosen.len(), candidates(8).len(), covered.len());
        assert!(chosen.len() <= 64, "{} cells", chosen.len());
        assert_eq!(chosen, pairwise(8));
    }

    #[test]
    fn few_cells_of_four_ranks_have_every_pair_of_axes_and_every_option() {
        let chosen = axis_pairs();

        assert_eq!(chosen.len(), 10);
        for (i, a) in Axis::ALL.into_iter().enumerate() {
            for b in Axis::ALL.into_iter().skip(i + 1) {
                let n = chosen.iter().filter(|(_, c)| c.mesh.axis(a) == 2 && c.mesh.axis(b) == 2).count();
                assert_eq!(n, 1, "{a:?} and {b:?}");
            }
        }
        let used = |i: usize| chosen.iter().map(|c| choices(*c)[i]).collect::<BTreeSet<_>>().len();
        // Stages, schedules, sequence parallelism, exchange of context-parallel ranks, each besides "does not apply"; models.
        assert_eq!((5..10).map(used).collect::<Vec<_>>(), [4, 5, 3, 3, 2], "{chosen:?}");
    }
}
