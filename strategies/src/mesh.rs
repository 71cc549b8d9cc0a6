//! The mesh: how the ranks of a world are arranged along the five axes, and which of them form groups.
//!
//! Invariants:
//! - `MESH-1` Ranks are the row-major positions of the mesh, `pp` outermost and `tp` innermost.
//! - `MESH-2` The groups of one kind partition the world; the members of a group are in order of rank.

use serde::{Deserialize, Serialize};
use std::fmt;

/// An axis of the mesh, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Pipeline stages.
    Pp,
    /// Replicas of the data-parallel group.
    DpReplicate,
    /// Shards of the data-parallel group.
    DpShard,
    /// Context (sequence) shards.
    Cp,
    /// Tensor shards.
    Tp,
}

impl Axis {
    /// All axes, outermost first.
    pub const ALL: [Axis; 5] = [Axis::Pp, Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Tp];

    /// Its name in configurations and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Pp => "pp",
            Axis::DpReplicate => "dp_replicate",
            Axis::DpShard => "dp_shard",
            Axis::Cp => "cp",
            Axis::Tp => "tp",
        }
    }
}

/// A set of axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "u8", into = "u8")]
pub struct Axes(u8);

impl Axes {
    /// No axis.
    pub const NONE: Axes = Axes(0);

    /// These axes.
    pub const fn of(axes: &[Axis]) -> Axes {
        let (mut bits, mut i) = (0, 0);
        while i < axes.len() {
            bits |= 1 << axes[i] as u8;
            i += 1;
        }
        Axes(bits)
    }

    /// Whether `axis` is among them.
    pub const fn contains(self, axis: Axis) -> bool {
        self.0 & (1 << axis as u8) != 0
    }

    /// The axes, outermost first.
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().filter(move |a| self.contains(*a))
    }
}

/// The bit of an axis is its position, outermost first; unknown bits are ignored.
impl From<u8> for Axes {
    fn from(bits: u8) -> Axes {
        Axes(bits & ((1 << Axis::ALL.len()) - 1))
    }
}

impl From<Axes> for u8 {
    fn from(axes: Axes) -> u8 {
        axes.0
    }
}

impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.iter().map(Axis::name).collect();
        f.write_str(&names.join(" x "))
    }
}

/// A kind of group: ranks that differ in their coordinates on some axes only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group {
    /// The axes.
    pub axes: Axes,
    /// Splits the group into runs of this many neighbours, such as the tensor-parallel ranks that hold the same key/value
    /// head.
    pub run: Option<u32>,
}

impl Group {
    /// All ranks that differ on these axes only.
    pub const fn over(axes: &[Axis]) -> Group {
        Group { axes: Axes::of(axes), run: None }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.run {
            None => write!(f, "{}", self.axes),
            Some(run) => write!(f, "{} in runs of {run}", self.axes),
        }
    }
}

/// Sizes of the axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Mesh {
    /// Pipeline stages.
    pub pp: usize,
    /// Replicas.
    pub dp_replicate: usize,
    /// Data-parallel shards.
    pub dp_shard: usize,
    /// Context shards.
    pub cp: usize,
    /// Tensor shards.
    pub tp: usize,
}

/// Why a mesh does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// The product of the axes is not the number of ranks.
    #[error("the mesh {mesh} has {product} ranks, but the world has {world}")]
    Product {
        /// The mesh.
        mesh: Mesh,
        /// Its ranks.
        product: usize,
        /// Ranks of the world.
        world: usize,
    },
    /// `dp_shard_size: auto` cannot fill the world.
    #[error(
        "dp_shard_size: auto cannot fill the world: {world} ranks are not a multiple of {product}, the product of the other axes ({mesh})"
    )]
    Auto {
        /// The mesh with a `dp_shard` of 1.
        mesh: Mesh,
        /// Product of the other axes.
        product: usize,
        /// Ranks of the world.
        world: usize,
    },
}

impl Mesh {
    /// One rank.
    pub const ONE: Mesh = Mesh { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 1 };

    /// Number of ranks.
    pub const fn size(&self) -> usize {
        self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp
    }

    /// Number of ranks of an unchecked mesh; `None` if an axis is 0 or the product overflows.
    pub fn checked_size(&self) -> Option<usize> {
        let product = Axis::ALL.into_iter().try_fold(1usize, |n, axis| n.checked_mul(self.axis(axis)));
        product.filter(|n| *n > 0)
    }

    /// Size of an axis.
    pub const fn axis(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pp => self.pp,
            Axis::DpReplicate => self.dp_replicate,
            Axis::DpShard => self.dp_shard,
            Axis::Cp => self.cp,
            Axis::Tp => self.tp,
        }
    }

    /// The same mesh with another size of one axis.
    #[must_use]
    pub const fn with(mut self, axis: Axis, size: usize) -> Mesh {
        match axis {
            Axis::Pp => self.pp = size,
            Axis::DpReplicate => self.dp_replicate = size,
            Axis::DpShard => self.dp_shard = size,
            Axis::Cp => self.cp = size,
            Axis::Tp => self.tp = size,
        }
        self
    }

    /// Ranks that train on different rows.
    pub const fn data_ranks(&self) -> usize {
        self.dp_replicate * self.dp_shard
    }

    /// Checks the mesh against a number of ranks; with `auto`, `dp_shard` fills the world.
    ///
    /// # Errors
    /// See [`MeshError`].
    pub fn fit(self, world: usize, auto: bool) -> Result<Mesh, MeshError> {
        if auto {
            let mesh = self.with(Axis::DpShard, 1);
            let product = mesh.size();
            if product == 0 || !world.is_multiple_of(product) || world == 0 {
                return Err(MeshError::Auto { mesh, product, world });
            }
            return Ok(mesh.with(Axis::DpShard, world / product));
        }
        let product = self.size();
        if product == world { Ok(self) } else { Err(MeshError::Product { mesh: self, product, world }) }
    }

    /// The coordinates of a rank.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn coord(&self, rank: usize) -> Coord {
        assert!(rank < self.size(), "rank {rank} of a mesh of {}", self.size());
        let mut rest = rank;
        let mut at = Coord::default();
        for axis in Axis::ALL.into_iter().rev() {
            at.0[axis as usize] = rest % self.axis(axis);
            rest /= self.axis(axis);
        }
        at
    }

    /// The rank at these coordinates.
    pub fn rank(&self, at: Coord) -> usize {
        Axis::ALL.into_iter().fold(0, |rank, axis| rank * self.axis(axis) + at.on(axis))
    }

    /// Number of members of each group of this kind.
    pub fn group_size(&self, group: Group) -> usize {
        let all: usize = group.axes.iter().map(|a| self.axis(a)).product();
        group.run.map_or(all, |run| all.min(run as usize))
    }

    /// Ranks of the group to which `rank` belongs, in order.
    pub fn members(&self, group: Group, rank: usize) -> Vec<usize> {
        let (size, me) = (self.group_size(group), self.whole_position(group, rank));
        let first = me / size * size;
        (first..first + size).map(|i| self.member(group, rank, i)).collect()
    }

    /// Position of `rank` in its group.
    pub fn position(&self, group: Group, rank: usize) -> usize {
        self.whole_position(group, rank) % self.group_size(group)
    }

    fn whole_position(&self, group: Group, rank: usize) -> usize {
        let at = self.coord(rank);
        group.axes.iter().fold(0, |i, axis| i * self.axis(axis) + at.on(axis))
    }

    fn member(&self, group: Group, rank: usize, mut i: usize) -> usize {
        let mut at = self.coord(rank);
        for axis in Axis::ALL.into_iter().rev().filter(|a| group.axes.contains(*a)) {
            at.0[axis as usize] = i % self.axis(axis);
            i /= self.axis(axis);
        }
        self.rank(at)
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<String> = Axis::ALL.iter().map(|a| format!("{} {}", a.name(), self.axis(*a))).collect();
        f.write_str(&sizes.join(" x "))
    }
}

/// A rank of a mesh, for which a program is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MeshRank {
    /// The mesh.
    pub mesh: Mesh,
    /// The rank.
    pub rank: usize,
}

impl Default for MeshRank {
    /// The only rank.
    fn default() -> MeshRank {
        MeshRank { mesh: Mesh::ONE, rank: 0 }
    }
}

impl MeshRank {
    /// Its position on an axis.
    pub fn on(&self, axis: Axis) -> usize {
        self.mesh.coord(self.rank).on(axis)
    }

    /// Size of its group of this kind.
    pub fn group_size(&self, group: Group) -> usize {
        self.mesh.group_size(group)
    }

    /// Its position in that group.
    pub fn position(&self, group: Group) -> usize {
        self.mesh.position(group, self.rank)
    }

    /// Ranks of that group, in order.
    pub fn members(&self, group: Group) -> Vec<usize> {
        self.mesh.members(group, self.rank)
    }
}

/// The position of a rank on each axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Coord([usize; 5]);

impl Coord {
    /// Its position on an axis.
    pub const fn on(&self, axis: Axis) -> usize {
        self.0[axis as usize]
    }

    /// The same coordinates with another position on one axis.
    #[must_use]
    pub const fn with(mut self, axis: Axis, position: usize) -> Coord {
        self.0[axis as usize] = position;
        self
    }

    /// Its index among the ranks that train on different rows.
    pub const fn data_rank(&self, mesh: &Mesh) -> usize {
        self.on(Axis::DpReplicate) * mesh.dp_shard + self.on(Axis::DpShard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_mesh() -> impl Strategy<Value = Mesh> {
        (1usize..4, 1usize..4, 1usize..4, 1usize..4, 1usize..5).prop_map(|(pp, dp_replicate, dp_shard, cp, tp)| Mesh {
            pp,
            dp_replicate,
            dp_shard,
            cp,
            tp,
        })
    }

    proptest! {
        // MESH-1
        #[test]
        fn rank_and_coordinates_convert_both_ways(mesh in any_mesh()) {
            for rank in 0..mesh.size() {
                prop_assert_eq!(mesh.rank(mesh.coord(rank)), rank);
            }
        }

        // MESH-2
        #[test]
        fn groups_partition_the_world_in_order_of_rank(mesh in any_mesh(), bits in 1u8..32) {
            let group = Group { axes: Axes(bits), run: None };

            let mut seen = vec![0; mesh.size()];
            for rank in 0..mesh.size() {
                let members = mesh.members(group, rank);
                prop_assert!(members.windows(2).all(|w| w[0] < w[1]));
                prop_assert_eq!(members[mesh.position(group, rank)], rank);
                members.iter().for_each(|m| seen[*m] += 1);
            }

            prop_assert!(seen.iter().all(|n| *n == mesh.group_size(group)));
        }
    }

    #[test]
    fn tensor_parallel_neighbours_are_consecutive_ranks() {
        let mesh = Mesh { pp: 2, dp_replicate: 1, dp_shard: 2, cp: 1, tp: 4 };

        assert_eq!(mesh.members(Group::over(&[Axis::Tp]), 5), [4, 5, 6, 7]);
        assert_eq!(mesh.members(Group { axes: Axes::of(&[Axis::Tp]), run: Some(2) }, 5), [4, 5]);
        assert_eq!(mesh.members(Group::over(&[Axis::Pp]), 5), [5, 13]);
        assert_eq!(mesh.members(Group::over(&[Axis::DpShard, Axis::Cp]), 5), [1, 5]);
    }

    #[test]
    fn auto_fills_the_world_and_errors_print_the_impossible_product() {
        let mesh = Mesh { pp: 2, tp: 2, ..Mesh::ONE };

        assert_eq!(mesh.fit(16, true).unwrap().dp_shard, 4);
        let err = mesh.fit(6, true).unwrap_err().to_string();
        assert!(err.contains("6 ranks are not a multiple of 4"), "{err}");
        let err = mesh.fit(16, false).unwrap_err().to_string();
        assert!(err.contains("has 4 ranks, but the world has 16"), "{err}");
    }
}
