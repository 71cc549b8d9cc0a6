//! The placement of ranks on machines, and the worlds within and between machines that follow from it.

use phalanx_device::CollectiveError;
use phalanx_device::world::World;

/// A world spread over machines. All ranks derive the same placement from the same description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    world: World,
    /// By rank.
    machine_of: Vec<u32>,
    /// Groups of the world over TCP, in order, with their purposes.
    tcp_groups: Vec<(Purpose, Vec<u32>)>,
}

/// The purpose of a group over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// All members of a group that spans machines.
    All { group: usize },
    /// The members at the same local position on every machine, for a group with equally many members per machine.
    SamePosition { group: usize, position: usize },
}

impl Placement {
    /// Places rank `r` of `world` on machine `machine_of[r]`.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if the length of `machine_of` differs from the number of ranks.
    pub fn new(world: World, machine_of: Vec<u32>) -> Result<Placement, CollectiveError> {
        if machine_of.len() != world.n_ranks() as usize {
            let (expected, found) = (world.n_ranks().to_string(), machine_of.len() as u64);
            return Err(CollectiveError::Shape { field: "machines of ranks", expected, found });
        }
        let mut placement = Placement { world, machine_of, tcp_groups: Vec::new() };
        for group in 0..placement.world.groups().len() {
            let by_machine = placement.by_machine(group);
            if by_machine.len() == 1 {
                continue;
            }
            let members = placement.world.groups()[group].clone();
            placement.tcp_groups.push((Purpose::All { group }, members));
            let n_positions = by_machine[0].len();
            if n_positions > 1 && by_machine.iter().all(|members| members.len() == n_positions) {
                for position in 0..n_positions {
                    let members = by_machine.iter().map(|members| members[position]).collect();
                    placement.tcp_groups.push((Purpose::SamePosition { group, position }, members));
                }
            }
        }
        Ok(placement)
    }

    /// The whole world.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The ranks of a machine, in order: rank `i` of its own world is the `i`-th of these.
    pub fn ranks_of(&self, machine: u32) -> Vec<u32> {
        (0..self.world.n_ranks()).filter(|rank| self.machine_of[*rank as usize] == machine).collect()
    }

    /// The shared-memory world of one machine: its ranks, and of every group the members on this machine.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if no rank runs there.
    pub fn machine_world(&self, machine: u32) -> Result<World, CollectiveError> {
        let ranks = self.ranks_of(machine);
        let local = |rank: &u32| ranks.binary_search(rank).ok().map(|i| i as u32);
        let groups = self.world.groups().iter().map(|group| group.iter().filter_map(local).collect::<Vec<u32>>());
        let groups = groups.filter(|group| !group.is_empty()).collect();
        World::new(self.world.id(), ranks.len() as u32, groups)?.with_names(ranks)
    }

    /// The world over TCP: groups that span machines.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if there are too many groups.
    pub fn tcp_world(&self) -> Result<World, CollectiveError> {
        let groups = self.tcp_groups.iter().map(|(_, members)| members.clone()).collect();
        World::new(self.world.id(), self.world.n_ranks(), groups)
    }

    /// The machine of a rank, and its rank in the world of that machine.
    ///
    /// # Errors
    /// [`CollectiveError::NoSuchRank`].
    pub(super) fn local(&self, rank: u32) -> Result<(u32, u32), CollectiveError> {
        let no_such_rank = CollectiveError::NoSuchRank { rank, size: self.world.n_ranks() };
        let machine = *self.machine_of.get(rank as usize).ok_or(no_such_rank)?;
        let before = self.machine_of[..rank as usize].iter().filter(|other| **other == machine).count();
        Ok((machine, before as u32))
    }

    /// The number of a group in the world of a machine that runs some of its members.
    pub fn machine_group(&self, group: usize, machine: u32) -> usize {
        let is_there = |members: &Vec<u32>| members.iter().any(|rank| self.machine_of[*rank as usize] == machine);
        self.world.groups()[..group].iter().filter(|members| is_there(members)).count()
    }

    /// The numbers of a group in the world over TCP: all members, if the group spans machines; and the members at the
    /// local position of `rank`, if every machine has equally many.
    pub(super) fn tcp_groups(&self, group: usize, rank: u32) -> (Option<usize>, Option<usize>) {
        let all = self.tcp_groups.iter().position(|(purpose, _)| *purpose == Purpose::All { group });
        let same = self.tcp_groups.iter().position(|(purpose, members)| {
            matches!(purpose, Purpose::SamePosition { group: other, .. } if *other == group) && members.contains(&rank)
        });
        (all, same)
    }

    /// Members of a group by machine: machines in the order of their first member, members in order of position.
    fn by_machine(&self, group: usize) -> Vec<Vec<u32>> {
        let mut machines: Vec<(u32, Vec<u32>)> = Vec::new();
        for rank in &self.world.groups()[group] {
            let machine = self.machine_of[*rank as usize];
            match machines.iter_mut().find(|(other, _)| *other == machine) {
                Some((_, members)) => members.push(*rank),
                None => machines.push((machine, vec![*rank])),
            }
        }
        machines.into_iter().map(|(_, members)| members).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_device::world_id::WorldId;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

    #[test]
    fn machine_world_has_the_local_members_with_their_global_names() {
        let world = World::new(ID, 4, vec![vec![0, 1], vec![3, 2, 1], vec![2, 3]]).unwrap();
        let placement = Placement::new(world, vec![7, 7, 9, 9]).unwrap();

        let machine = placement.machine_world(9).unwrap();

        assert_eq!(machine.groups(), [vec![1, 0], vec![0, 1]]);
        assert_eq!([0, 1].map(|rank| machine.name_of(rank)), [2, 3]);
        assert_eq!((placement.machine_group(1, 9), placement.machine_group(2, 9)), (0, 1));
    }

    #[test]
    fn tcp_world_has_only_groups_that_span_machines() {
        let world = World::new(ID, 4, vec![vec![0, 1], vec![0, 1, 2, 3], vec![1, 2, 3]]).unwrap();
        let placement = Placement::new(world, vec![0, 0, 1, 1]).unwrap();

        let groups = placement.tcp_world().unwrap().groups().to_vec();

        assert_eq!(groups, [vec![0, 1, 2, 3], vec![0, 2], vec![1, 3], vec![1, 2, 3]]);
        assert_eq!(placement.tcp_groups(1, 3), (Some(0), Some(2)));
        assert_eq!(placement.tcp_groups(0, 0), (None, None));
        assert_eq!(placement.tcp_groups(2, 1), (Some(3), None));
    }
}
