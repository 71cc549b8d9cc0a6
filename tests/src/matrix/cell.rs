//! A cell of the matrix: one combination of mesh and parallelism options.

use phalanx_strategies::mesh::Mesh;
use std::fmt;

/// One combination of mesh and parallelism options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cell {
    /// How ranks are arranged.
    pub mesh: Mesh,
    /// ZeRO stage; 3 if nothing is sharded.
    pub zero: usize,
    /// Pipeline schedule; `1f1b` without a pipeline.
    pub schedule: &'static str,
    /// Whether tensor-parallel ranks share the tokens.
    pub sequence_parallel: bool,
    /// `cp_comm_strategy`; `ring` without context parallelism.
    pub cp_comm: &'static str,
}

/// The pipeline schedules.
pub const SCHEDULES: [&str; 4] = ["1f1b", "gpipe", "interleaved", "zero_bubble"];

impl Cell {
    /// One rank.
    pub const ALONE: Cell =
        Cell { mesh: Mesh::ONE, zero: 3, schedule: "1f1b", sequence_parallel: false, cp_comm: "ring" };

    /// The cell's keys in a job's YAML, except for the microbatches of a step.
    pub fn keys(&self) -> Vec<(&'static str, String)> {
        let m = self.mesh;
        vec![
            ("pipeline_parallel_size", m.pp.to_string()),
            ("dp_replicate_size", m.dp_replicate.to_string()),
            ("dp_shard_size", m.dp_shard.to_string()),
            ("context_parallel_size", m.cp.to_string()),
            ("tensor_parallel_size", m.tp.to_string()),
            ("zero_stage", self.zero.to_string()),
            ("pipeline_schedule", self.schedule.to_string()),
            ("sequence_parallel", self.sequence_parallel.to_string()),
            ("cp_comm_strategy", self.cp_comm.to_string()),
        ]
    }

    /// Number of mesh axes in which two cells differ.
    pub fn axes_apart(&self, other: &Cell) -> usize {
        let sizes = |m: Mesh| [m.pp, m.dp_replicate, m.dp_shard, m.cp, m.tp];
        sizes(self.mesh).iter().zip(sizes(other.mesh)).filter(|(a, b)| **a != *b).count()
    }

    /// Number of options besides the mesh in which two cells differ.
    pub fn choices_apart(&self, other: &Cell) -> usize {
        let differ = [
            self.zero != other.zero,
            self.schedule != other.schedule,
            self.sequence_parallel != other.sequence_parallel,
            self.cp_comm != other.cp_comm,
        ];
        differ.into_iter().filter(|d| *d).count()
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = self.mesh;
        write!(
            f,
            "pp {} x dp_replicate {} x dp_shard {} x cp {} x tp {}",
            m.pp, m.dp_replicate, m.dp_shard, m.cp, m.tp
        )?;
        if m.dp_shard * m.cp > 1 {
            write!(f, ", ZeRO-{}", self.zero)?;
        }
        if m.pp > 1 {
            write!(f, ", {}", self.schedule)?;
        }
        if m.tp > 1 && self.sequence_parallel {
            write!(f, ", sequence parallel")?;
        }
        if m.cp > 1 {
            write!(f, ", {}", self.cp_comm)?;
        }
        Ok(())
    }
}

/// All meshes whose axes have 1, 2 or 4 ranks and whose product is at most `max`.
pub fn meshes(max: usize) -> Vec<Mesh> {
    let sizes = [1, 2, 4];
    let mut meshes = Vec::new();
    for pp in sizes {
        for dp_replicate in sizes {
            for dp_shard in sizes {
                for cp in sizes {
                    for tp in sizes {
                        meshes.push(Mesh { pp, dp_replicate, dp_shard, cp, tp });
                    }
                }
            }
        }
    }
    meshes.retain(|m| m.size() <= max);
    meshes
}

/// Every cell: each mesh with all applicable ZeRO stages, schedules and options.
pub fn cells(max: usize) -> Vec<Cell> {
    meshes(max).into_iter().flat_map(variants).collect()
}

fn variants(mesh: Mesh) -> Vec<Cell> {
    let stages: &[usize] = if mesh.dp_shard * mesh.cp > 1 { &[1, 2, 3] } else { &[3] };
    let schedules: &[&str] = if mesh.pp > 1 { &SCHEDULES } else { &["1f1b"] };
    let sequence: &[bool] = if mesh.tp > 1 { &[false, true] } else { &[false] };
    let comms: &[&str] = if mesh.cp > 1 { &["ring", "allgather"] } else { &["ring"] };
    let mut cells = Vec::new();
    for &zero in stages {
        for &schedule in schedules {
            for &sequence_parallel in sequence {
                for &cp_comm in comms {
                    cells.push(Cell { mesh, zero, schedule, sequence_parallel, cp_comm });
                }
            }
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn meshes_of_at_most_8_ranks_are_51_and_cell_names_are_unique() {
        let cells = cells(8);
        let names: BTreeSet<String> = cells.iter().map(Cell::to_string).collect();
        let meshes: BTreeSet<Mesh> = cells.iter().map(|c| c.mesh).collect();

        assert_eq!(meshes.len(), 51);
        assert_eq!((cells.len(), names.len()), (458, 458));
    }
}
