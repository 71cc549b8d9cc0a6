//! The order in which cells resume from each other's checkpoints.
//!
//! The order is a ring: each cell resumes from the checkpoint of its predecessor, the first cell from that of the last, so
//! every cell both writes and reads a checkpoint. A greedy choice makes neighbours differ in many axes of the mesh.

use super::cell::Cell;
use phalanx_strategies::mesh::Mesh;
use std::collections::BTreeMap;

/// Number of differing axes beyond which balancing the remaining meshes counts more than another axis.
const APART_ENOUGH: usize = 3;

/// The cells in the order of the ring. Deterministic: a function of the list.
pub fn chain(mut cells: Vec<Cell>) -> Vec<Cell> {
    if cells.is_empty() {
        return cells;
    }
    // Meshes with many cells go first, so that the end of the ring is not left with cells of one mesh.
    let mut remaining: BTreeMap<Mesh, usize> = BTreeMap::new();
    cells.iter().for_each(|c| *remaining.entry(c.mesh).or_default() += 1);
    let mut ring = vec![cells.remove(0)];
    remaining.entry(ring[0].mesh).and_modify(|n| *n -= 1);
    while let Some(last) = ring.last().copied().filter(|_| !cells.is_empty()) {
        let worth = |c: &Cell| {
            let apart = last.axes_apart(c);
            (apart.min(APART_ENOUGH), remaining[&c.mesh], apart, last.choices_apart(c))
        };
        let next = (0..cells.len()).rev().max_by_key(|i| worth(&cells[*i])).expect("the list is not empty");
        remaining.entry(cells[next].mesh).and_modify(|n| *n -= 1);
        ring.push(cells.remove(next));
    }
    ring
}

#[cfg(test)]
mod tests {
    use super::super::cell::cells;
    use super::*;

    #[test]
    fn every_cell_resumes_from_a_mesh_that_differs_in_most_axes() {
        let all = cells(8);

        let ring = chain(all.clone());

        let apart: Vec<usize> = (0..ring.len()).map(|i| ring[i].axes_apart(&ring[(i + 1) % ring.len()])).collect();
        let mut sorted = ring.clone();
        sorted.sort();
        let mut expected = all;
        expected.sort();
        assert_eq!(sorted, expected, "the ring has every cell once");
        let alike = apart.iter().filter(|n| **n == 0).count();
        assert_eq!(alike, 0, "neighbours with equal meshes: {apart:?}");
        let mean = apart.iter().sum::<usize>() as f64 / apart.len() as f64;
        assert!(mean >= 3.0, "{mean} axes on average");
    }
}
