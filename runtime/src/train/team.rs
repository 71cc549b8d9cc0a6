//! A rank and its peers: its position, and what they agree on between steps.

use super::links::Links;
use super::plan::ModelPlan;
use crate::error::JobError;
use crate::train::programs::Programs;
use phalanx_collective::hierarchical::collective::HierarchicalRank;
use phalanx_collective::hierarchical::placement::Placement;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_collective::tcp::listener::Listener;
use phalanx_device::Device;
use phalanx_device::group_handle::{GroupOwner, owned};
use phalanx_device::groups::{GroupKey, Groups, group_keys, groups_of_world};
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_device::shared_memory::Arena;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{Collective, CollectiveError, SliceOperations};
use phalanx_strategies::elastic::progress::{At, Wait};
use phalanx_strategies::mesh::{Axes, Axis, Coord, Mesh, MeshRank};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// Bytes of the longest text that a rank sends to all: a line of measurements, or its trace of a step.
const TEXT_BYTES_MAX: u64 = 256 << 20;

/// The groups of all ranks of a run, the same list at every rank.
#[derive(Clone, Debug)]
pub(crate) struct TeamPlan {
    pub(crate) mesh: Mesh,
    groups: Vec<(GroupKey, Vec<u32>)>,
    /// Members besides the ranks, which help to begin or catch up; their numbers follow those of the ranks.
    n_others: u32,
    /// Pairs of members that exchange messages outside the programs.
    pairs: Vec<[u32; 2]>,
}

/// How members of a world over several machines reach each other.
#[derive(Debug)]
pub(crate) struct Site<'a> {
    pub(crate) listener: &'a Listener,
    /// Addresses by member.
    pub(crate) addresses: &'a [SocketAddr],
    pub(crate) config: &'a TcpConfig,
}

/// A member's part of a world that it has joined.
pub(crate) struct JoinedWorld {
    /// Its rank and groups, if it is a rank.
    pub(crate) team: Option<Team>,
    pub(crate) links: Links,
    /// Its own memory, which peers access.
    pub(crate) memory: Arena,
    /// All groups of the two, with their owning ends.
    pub(crate) connected: Vec<ConnectedGroup>,
}

/// A connected group, whose device end is in a team or in links.
pub(crate) struct ConnectedGroup {
    /// The axes that its members span; none for the group of all ranks, and for pairs.
    pub(crate) axes: Axes,
    /// Members by position.
    pub(crate) members: Vec<u32>,
    pub(crate) owner: GroupOwner,
}

impl TeamPlan {
    /// Derives the groups from the programs of one rank of each pipeline stage: ranks that differ only on other axes use
    /// the same kinds of groups.
    pub(crate) fn new(plan: &ModelPlan, mesh: Mesh, evaluates: bool) -> Result<TeamPlan, JobError> {
        #[cfg(debug_assertions)]
        verify_ranks(plan, mesh, evaluates)?;
        let mut all: BTreeSet<GroupKey> = BTreeSet::new();
        for stage in 0..mesh.pp {
            let rank = mesh.rank(Coord::default().with(Axis::Pp, stage));
            let programs = Programs::compile(plan, MeshRank { mesh, rank }, evaluates)?;
            programs.all().into_iter().for_each(|c| all.extend(group_keys(&c.program)));
        }
        Ok(TeamPlan { mesh, groups: groups_of_world(&mesh, &all), n_others: 0, pairs: Vec::new() })
    }

    /// The same ranks, with other members, and pairs of members that exchange messages.
    pub(crate) fn with_pairs(&self, n_others: u32, pairs: BTreeSet<[u32; 2]>) -> TeamPlan {
        TeamPlan { n_others, pairs: pairs.into_iter().collect(), ..self.clone() }
    }

    /// The world of these groups, followed by the pairs and the group of all ranks.
    pub(crate) fn world(&self, id: WorldId) -> Result<World, CollectiveError> {
        let n = self.mesh.size() as u32;
        let pairs = self.pairs.iter().map(|pair| pair.to_vec());
        let groups = self.groups.iter().map(|(_, ranks)| ranks.clone()).chain(pairs).chain([(0..n).collect()]);
        World::new(id, n + self.n_others, groups.collect())
    }

    /// Joins a world of these groups over several machines as `member`; `shm` is this machine's part of the world.
    pub(crate) fn join_at(
        &self,
        placement: &Placement,
        shm: &ShmWorld,
        member: u32,
        site: &Site<'_>,
        device: &dyn Device,
    ) -> Result<JoinedWorld, CollectiveError> {
        let rank = HierarchicalRank::join(placement, member, shm, site.listener, site.addresses, site.config)?;
        let mut connected = Vec::new();
        let mut connect = |group: usize, axes, device: Option<&dyn Device>| {
            let host = rank.communicator(group)?;
            let communicator = match device {
                Some(device) => device.communicator(host)?,
                None => host,
            };
            let (owner, handle) = owned(communicator);
            connected.push(ConnectedGroup { axes, members: placement.world().groups()[group].clone(), owner });
            Ok(Box::new(handle) as Box<dyn Collective>)
        };
        let mut peers = BTreeMap::new();
        for (i, pair) in self.pairs.iter().enumerate().filter(|(_, pair)| pair.contains(&member)) {
            let peer = if pair[0] == member { pair[1] } else { pair[0] };
            peers.insert(peer, connect(self.groups.len() + i, Axes::NONE, None)?);
        }
        let links = Links::new(peers);
        #[allow(unsafe_code)] // Clones of an arena alias the same memory.
        // SAFETY: one device thread owns all machines in this memory, and runs, reads and writes one at a time; the machines of
        // a world have ended before a world with other machines begins.
        let memory = unsafe { rank.arena() };
        if member as usize >= self.mesh.size() {
            return Ok(JoinedWorld { team: None, links, memory, connected });
        }
        let mesh_rank = MeshRank { mesh: self.mesh, rank: member as usize };
        let groups = Groups::connect(&mesh_rank, &self.groups, |i| connect(i, self.groups[i].0.0.axes, Some(device)))?;
        let everyone = connect(self.groups.len() + self.pairs.len(), Axes::NONE, None)?;
        let team = Team { mesh_rank, groups, everyone: Some(everyone), memory: Some(memory.clone()) };
        Ok(JoinedWorld { team: Some(team), links, memory, connected })
    }

    /// Joins a world of these groups as `rank`.
    pub(crate) fn join(&self, world: &ShmWorld, rank: u32, device: &dyn Device) -> Result<Team, CollectiveError> {
        let mesh_rank = MeshRank { mesh: self.mesh, rank: rank as usize };
        let member = world.join(rank)?;
        let connect =
            |group| -> Result<Box<dyn Collective>, CollectiveError> { Ok(Box::new(member.communicator(group)?)) };
        let everyone = connect(self.groups.len())?;
        let groups = Groups::connect(&mesh_rank, &self.groups, |group| device.communicator(connect(group)?))?;
        #[allow(unsafe_code)] // Clones of an arena alias the same memory.
        // SAFETY: a team has one machine, which is on the thread of its rank.
        let memory = unsafe { member.arena() };
        Ok(Team { mesh_rank, groups, everyone: Some(everyone), memory: Some(memory) })
    }
}

/// Compiles every rank and checks that all ranks together finish each program. Property tests cover this, too; the check
/// here helps authors of passes.
#[cfg(debug_assertions)]
fn verify_ranks(plan: &ModelPlan, mesh: Mesh, evaluates: bool) -> Result<(), JobError> {
    let n_programs = 1 + usize::from(evaluates) + usize::from(plan.objective.has_computed_reference());
    for index in 0..n_programs {
        phalanx_strategies::trace::verify_world(mesh, |mesh_rank| {
            let programs = Programs::compile(plan, mesh_rank, evaluates)?;
            Ok::<_, JobError>(programs.all()[index].program.clone())
        })?;
    }
    Ok(())
}

/// One rank and its peers.
pub(crate) struct Team {
    pub(crate) mesh_rank: MeshRank,
    pub(crate) groups: Groups,
    everyone: Option<Box<dyn Collective>>,
    memory: Option<Arena>,
}

impl Team {
    /// The same team on a device with this progress counter.
    pub(crate) fn with_progress_counter(self, progress_counter: ProgressCounter) -> Team {
        Team { groups: self.groups.with_progress_counter(progress_counter), ..self }
    }

    /// A rank without peers.
    pub(crate) fn alone() -> Team {
        Team { mesh_rank: MeshRank::default(), groups: Groups::none(), everyone: None, memory: None }
    }

    /// A team without peers, for a trainer that will later have this rank.
    pub(crate) fn beside(mesh_rank: MeshRank, memory: Arena) -> Team {
        Team { mesh_rank, groups: Groups::none(), everyone: None, memory: Some(memory) }
    }

    /// Whether this rank is the leader, which writes metrics, exports, and decides when to stop.
    pub(crate) const fn leads(&self) -> bool {
        self.mesh_rank.rank == 0
    }

    pub(crate) const fn n_ranks(&self) -> usize {
        self.mesh_rank.mesh.size()
    }

    /// The memory of collectives' operands, which peers access.
    pub(crate) const fn memory(&self) -> Option<&Arena> {
        self.memory.as_ref()
    }

    /// The sum of all ranks' values, whole numbers below 2^53.
    pub(crate) fn sum(&mut self, value: u64) -> Result<u64, CollectiveError> {
        self.sums([value]).map(|[sum]| sum)
    }

    /// Several such sums at once.
    pub(crate) fn sums<const N: usize>(&mut self, values: [u64; N]) -> Result<[u64; N], CollectiveError> {
        let mut sums = values.map(|value| value as f64);
        self.add_up(&mut sums)?;
        Ok(sums.map(|sum| sum as u64))
    }

    /// The value of each rank, by rank; whole numbers below 2^53.
    pub(crate) fn gather(&mut self, value: u64) -> Result<Vec<u64>, CollectiveError> {
        let mut all = vec![0.0; self.n_ranks()];
        all[self.mesh_rank.rank] = value as f64;
        self.add_up(&mut all)?;
        Ok(all.into_iter().map(|of_rank| of_rank as u64).collect())
    }

    /// The text of each rank, by rank.
    pub(crate) fn gather_texts(&mut self, own: String) -> Result<Vec<String>, CollectiveError> {
        let lengths = self.gather(own.len() as u64)?;
        let Some(everyone) = &mut self.everyone else { return Ok(vec![own]) };
        let mut texts = Vec::new();
        for (rank, n_bytes) in lengths.into_iter().enumerate() {
            if n_bytes > TEXT_BYTES_MAX {
                let (field, expected) = ("bytes of a text of a rank", TEXT_BYTES_MAX);
                return Err(CollectiveError::Invalid { field, expected, found: n_bytes });
            }
            // Words of an element type that no sum uses here.
            let mut words = vec![0i32; (n_bytes as usize).div_ceil(size_of::<i32>())];
            if rank == self.mesh_rank.rank {
                bytemuck::cast_slice_mut(&mut words)[..own.len()].copy_from_slice(own.as_bytes());
            }
            everyone.broadcast(&mut words, rank as u32)?;
            let bytes: &[u8] = bytemuck::cast_slice(&words);
            texts.push(String::from_utf8_lossy(&bytes[..n_bytes as usize]).into_owned());
        }
        Ok(texts)
    }

    /// Replaces each number with its sum over all ranks.
    pub(crate) fn add_up(&mut self, terms: &mut [f64]) -> Result<(), CollectiveError> {
        let _waits = self.groups.progress_counter().during(At::Waits(Wait::default()));
        self.everyone.as_mut().map_or(Ok(()), |everyone| everyone.all_reduce(terms))
    }
}
