//! Forecasts a step: compiles the programs of its ranks, lays out their memory and runs them in simulated time. Nothing
//! is allocated.

use crate::error::JobError;
use crate::train::programs::Programs;
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::plan::Hardware;
use phalanx_strategies::plan::cost::{post_duration, trace_on};
use phalanx_strategies::trace::{Ranks, world};
use phalanx_strategies::world::{Links, Timeline};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// A simulated step.
pub(super) struct Forecast {
    /// The simulated times.
    pub timeline: Timeline,
    /// The rank that needs the most memory.
    pub fullest: usize,
    /// Programs of that rank.
    pub programs: Programs,
}

impl Forecast {
    /// Compiles `ranks` of the mesh and simulates a step of all ranks; `spans` keeps every span of work.
    pub(super) fn of(
        mesh: Mesh,
        ranks: Ranks,
        hardware: &Hardware,
        spans: bool,
        compile: impl Fn(MeshRank) -> Result<Programs, JobError> + Sync,
    ) -> Result<Forecast, JobError> {
        let compiled =
            ranks.representatives(&mesh).into_par_iter().map(|rank| Ok((rank, compile(MeshRank { mesh, rank })?)));
        let mut compiled = compiled.collect::<Result<BTreeMap<usize, Programs>, JobError>>()?;
        let all = world(mesh, ranks, |mesh_rank| {
            Ok::<_, JobError>(trace_on(hardware, &compiled[&mesh_rank.rank].train.program))
        })?;
        let duration = |post: &_, nodes: &[u32]| post_duration(hardware, post, nodes);
        let links = Links { mover: hardware.mover, node: &|rank| hardware.node(rank), duration: &duration };
        let timeline = all.simulate(&links, spans)?;
        // On a tie, the lowest rank.
        let fullest = compiled.iter().rev().max_by_key(|(_, programs)| programs.bytes()).map_or(0, |(rank, _)| *rank);
        let programs = compiled.remove(&fullest).expect("it is one of them");
        Ok(Forecast { timeline, fullest, programs })
    }
}
