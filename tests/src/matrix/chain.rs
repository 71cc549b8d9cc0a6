//! In which order cells go on from each other's checkpoints.
//!
//! The order is a ring: each cell goes on from the checkpoint of the one before it, the first from that of the last, so
//! that every cell both writes and reads one. Neighbours differ in as many axes of the mesh as a greedy choice finds.

use super::cell::Cell;
use phalanx_strategies::mesh::Mesh;
use std::collections::BTreeMap;

/// Axes beyond which another one counts less than that no mesh is left with only itself at the end.
const APART_ENOUGH: usize = 3;

/// The cells in the order of the ring. Deterministic: a function of the list.
pub fn chain(mut cells: Vec<Cell>) -> Vec<Cell> {
    if cells.is_empty() {
        return cells;
    }
    // Meshes with many cells first, so that none is left with only itself.
    let mut left: BTreeMap<Mesh, usize> = BTreeMap::new();
    cells.iter().for_each(|c| *left.entry(c.mesh).or_default() += 1);
    let mut ring = vec![cells.remove(0)];
    left.entry(ring[0].mesh).and_modify(|n| *n -= 1);
    while let Some(last) = ring.last().copied().filter(|_| !cells.is_empty()) {
        let worth = |c: &Cell| {
            let apart = last.axes_apart(c);
            (apart.min(APART_ENOUGH), left[&c.mesh], apart, last.choices_apart(c))
        };
        let next = (0..cells.len()).rev().max_by_key(|i| worth(&cells[*i])).expect("cells are left");
        left.entry(cells[next].mesh).and_modify(|n| *n -= 1);
        ring.push(cells.remove(next));
    }
    ring
}

#[cfg(test)]
mod tests {
    use super::super::cell::cells;
    use super::*;

    #[test]
    fn every_cell_goes_on_from_a_mesh_that_differs_from_its_own_in_most_axes() {
        let all = cells(8);

        let ring = chain(all.clone());

        let apart: Vec<usize> = (0..ring.len()).map(|i| ring[i].axes_apart(&ring[(i + 1) % ring.len()])).collect();
        let mut sorted = ring.clone();
        sorted.sort();
        let mut expected = all;
        expected.sort();
        assert_eq!(sorted, expected, "the ring has every cell once");
        let alike = apart.iter().filter(|n| **n == 0).count();
        assert_eq!(alike, 0, "neighbours of one mesh: {apart:?}");
        let mean = apart.iter().sum::<usize>() as f64 / apart.len() as f64;
        assert!(mean >= 3.0, "{mean} axes on average");
    }
}
