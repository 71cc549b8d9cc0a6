//! A rank among the others of its run: where it stands, and what they agree on between steps.

use super::error::JobError;
use super::plan::ModelPlan;
use super::trainer::Programs;
use crate::collective::shm::world::{Arena, ShmWorld};
use crate::collective::world::{World, WorldId};
use crate::collective::{Collective, CollectiveError, SliceOperations};
use crate::groups::{Groups, Wire, groups_of_world, wires};
use phalanx_strategies::mesh::{Axis, Coord, Mesh, Place};
use std::collections::BTreeSet;

/// The groups of all ranks of a run, the same list at every rank.
#[derive(Clone, Debug)]
pub(crate) struct TeamPlan {
    pub(crate) mesh: Mesh,
    groups: Vec<(Wire, Vec<u32>)>,
}

impl TeamPlan {
    /// Derives the groups from the programs: those of one rank of each pipeline stage tell all, since ranks that differ on
    /// other axes use the same kinds.
    pub(crate) fn new(plan: &ModelPlan, mesh: Mesh, evaluates: bool) -> Result<TeamPlan, JobError> {
        #[cfg(debug_assertions)]
        verify_ranks(plan, mesh, evaluates)?;
        let mut all: BTreeSet<Wire> = BTreeSet::new();
        for stage in 0..mesh.pp {
            let rank = mesh.rank(Coord::default().with(Axis::Pp, stage));
            let programs = Programs::compile(plan, Place { mesh, rank }, evaluates)?;
            programs.all().into_iter().for_each(|c| all.extend(wires(&c.program)));
        }
        Ok(TeamPlan { mesh, groups: groups_of_world(&mesh, &all) })
    }

    /// The world of these groups; the last one is everyone.
    pub(crate) fn world(&self, id: WorldId) -> Result<World, CollectiveError> {
        let n = self.mesh.size() as u32;
        let everyone = (0..n).collect();
        World::new(id, n, self.groups.iter().map(|(_, ranks)| ranks.clone()).chain([everyone]).collect())
    }

    /// Takes the place of `rank` in a world of these groups.
    pub(crate) fn join(&self, world: &ShmWorld, rank: u32) -> Result<Team, CollectiveError> {
        let place = Place { mesh: self.mesh, rank: rank as usize };
        let member = world.join(rank)?;
        let connect = |group| Ok(Box::new(member.communicator(group)?) as Box<dyn Collective>);
        let everyone = connect(self.groups.len())?;
        let groups = Groups::connect(&place, &self.groups, connect)?;
        Ok(Team { place, groups, everyone: Some(everyone), memory: Some(member.arena()) })
    }
}

/// Compiles every rank and checks that all of them together finish each of their programs. Which programs fit is
/// property-tested; this is for those who change a pass.
#[cfg(debug_assertions)]
fn verify_ranks(plan: &ModelPlan, mesh: Mesh, evaluates: bool) -> Result<(), JobError> {
    for index in 0..=usize::from(evaluates) {
        phalanx_strategies::trace::verify_world(mesh, |place| {
            let programs = Programs::compile(plan, place, evaluates)?;
            Ok::<_, JobError>(programs.all()[index].program.clone())
        })?;
    }
    Ok(())
}

/// One rank and its peers.
pub(crate) struct Team {
    pub(crate) place: Place,
    pub(crate) groups: Groups,
    everyone: Option<Box<dyn Collective>>,
    memory: Option<Arena>,
}

impl Team {
    /// A rank without peers.
    pub(crate) fn alone() -> Team {
        Team { place: Place::default(), groups: Groups::none(), everyone: None, memory: None }
    }

    /// Whether this rank speaks for all: it writes metrics, exports, and decides when to stop.
    pub(crate) const fn leads(&self) -> bool {
        self.place.rank == 0
    }

    pub(crate) const fn n_ranks(&self) -> usize {
        self.place.mesh.size()
    }

    /// Where operands of collectives lie, so that peers reach them.
    pub(crate) const fn memory(&self) -> Option<&Arena> {
        self.memory.as_ref()
    }

    /// The sum of what all ranks give, of whole numbers below 2^53.
    pub(crate) fn sum(&mut self, value: u64) -> Result<u64, CollectiveError> {
        let mut sum = [value as f64];
        self.add_up(&mut sum)?;
        Ok(sum[0] as u64)
    }

    /// What each rank gives, by rank, of whole numbers below 2^53.
    pub(crate) fn gather(&mut self, value: u64) -> Result<Vec<u64>, CollectiveError> {
        let mut all = vec![0.0; self.n_ranks()];
        all[self.place.rank] = value as f64;
        self.add_up(&mut all)?;
        Ok(all.into_iter().map(|of_rank| of_rank as u64).collect())
    }

    /// The text of each rank, by rank.
    pub(crate) fn gather_texts(&mut self, own: String) -> Result<Vec<String>, CollectiveError> {
        let lengths = self.gather(own.len() as u64)?;
        let Some(everyone) = &mut self.everyone else { return Ok(vec![own]) };
        let mut texts = Vec::new();
        for (rank, n_bytes) in lengths.into_iter().enumerate() {
            // Of the element types words are the ones that no sum touches here.
            let mut words = vec![0i32; (n_bytes as usize).div_ceil(size_of::<i32>())];
            if rank == self.place.rank {
                bytemuck::cast_slice_mut(&mut words)[..own.len()].copy_from_slice(own.as_bytes());
            }
            everyone.broadcast(&mut words, rank as u32)?;
            let bytes: &[u8] = bytemuck::cast_slice(&words);
            texts.push(String::from_utf8_lossy(&bytes[..n_bytes as usize]).into_owned());
        }
        Ok(texts)
    }

    fn add_up(&mut self, terms: &mut [f64]) -> Result<(), CollectiveError> {
        self.everyone.as_mut().map_or(Ok(()), |everyone| everyone.all_reduce(terms))
    }
}
