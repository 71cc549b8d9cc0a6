//! A small set of cells, found by a greedy choice, with every possible pair of choices.
//!
//! Most interaction faults involve two choices. Source: Kuhn et al. 2004, Software Fault Interactions and
//! Implications for Software Testing, IEEE TSE 30(6).

use super::cell::{Cell, SCHEDULES, cells};
use super::model::Shape;
use std::collections::BTreeSet;

/// Two choices, each as index and value.
type Pair = (usize, usize, usize, usize);

/// Models and cells of at most `max` ranks that cover all pairs. Deterministic.
pub fn pairwise(max: usize) -> Vec<(Shape, Cell)> {
    let all = candidates(max);
    let mut open: BTreeSet<Pair> = all.iter().flat_map(|c| pairs(*c)).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let gain = |c: &(Shape, Cell)| pairs(*c).filter(|p| open.contains(p)).count();
        // Among equal gains, prefer the fewest ranks.
        let best = all.iter().max_by_key(|c| (gain(c), std::cmp::Reverse(c.1.mesh.size())));
        let best = *best.expect("every open pair belongs to a candidate");
        open.retain(|p| !pairs(best).any(|q| q == *p));
        chosen.push(best);
    }
    chosen
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
}
