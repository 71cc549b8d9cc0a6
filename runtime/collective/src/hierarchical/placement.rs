//! Which rank runs on which machine, and the smaller worlds that follow from it.

use phalanx_device::CollectiveError;
use phalanx_device::world::World;

/// A world spread over machines. All ranks compute the same from the same description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    world: World,
    /// By rank.
    machine_of: Vec<u32>,
    /// Groups of the world over TCP, in order, and what each is for.
    tcp_groups: Vec<(Purpose, Vec<u32>)>,
}

/// What a group over TCP is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// All members of a group that spans machines.
    All { group: usize },
    /// Of a group with equally many members on each of its machines: the members of one place on each.
    SamePosition { group: usize, position: usize },
}

impl Placement {
    /// Places rank `r` of `world` on machine `machine_of[r]`.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if there are not as many machines as ranks.
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
            let n_places = by_machine[0].len();
            if n_places > 1 && by_machine.iter().all(|members| members.len() == n_places) {
                for position in 0..n_places {
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

    /// The world of the ranks of one machine, in shared memory: of every group those members that run there.
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
    /// None that [`World::new`] did not report for the whole world, but for the number of groups.
    pub fn tcp_world(&self) -> Result<World, CollectiveError> {
        let groups = self.tcp_groups.iter().map(|(_, members)| members.clone()).collect();
        World::new(self.world.id(), self.world.n_ranks(), groups)
    }

    /// The machine and the number there of a rank.
    ///
    /// # Errors
    /// [`CollectiveError::NoSuchRank`].
    pub(super) fn local(&self, rank: u32) -> Result<(u32, u32), CollectiveError> {
        let no_such_rank = CollectiveError::NoSuchRank { rank, size: self.world.n_ranks() };
        let machine = *self.machine_of.get(rank as usize).ok_or(no_such_rank)?;
        let before = self.machine_of[..rank as usize].iter().filter(|other| **other == machine).count();
        Ok((machine, before as u32))
    }

    /// The number that a group has in the world of a machine on which it has members.
    pub fn machine_group(&self, group: usize, machine: u32) -> usize {
        let is_there = |members: &Vec<u32>| members.iter().any(|rank| self.machine_of[*rank as usize] == machine);
        self.world.groups()[..group].iter().filter(|members| is_there(members)).count()
    }

    /// The numbers that a group has in the world over TCP: that of all members, if it spans machines; and that of the
    /// members in the place of `rank`, if there are equally many on each machine.
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
    use phalanx_device::world::WorldId;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

    #[test]
    fn a_machine_sees_its_own_members_under_their_names() {
        let world = World::new(ID, 4, vec![vec![0, 1], vec![3, 2, 1], vec![2, 3]]).unwrap();
        let placement = Placement::new(world, vec![7, 7, 9, 9]).unwrap();

        let machine = placement.machine_world(9).unwrap();

        assert_eq!(machine.groups(), [vec![1, 0], vec![0, 1]]);
        assert_eq!([0, 1].map(|rank| machine.name_of(rank)), [2, 3]);
        assert_eq!((placement.machine_group(1, 9), placement.machine_group(2, 9)), (0, 1));
    }

    #[test]
    fn only_groups_that_span_machines_are_connected() {
        let world = World::new(ID, 4, vec![vec![0, 1], vec![0, 1, 2, 3], vec![1, 2, 3]]).unwrap();
        let placement = Placement::new(world, vec![0, 0, 1, 1]).unwrap();

        let groups = placement.tcp_world().unwrap().groups().to_vec();

        assert_eq!(groups, [vec![0, 1, 2, 3], vec![0, 2], vec![1, 3], vec![1, 2, 3]]);
        assert_eq!(placement.tcp_groups(1, 3), (Some(0), Some(2)));
        assert_eq!(placement.tcp_groups(0, 0), (None, None));
        assert_eq!(placement.tcp_groups(2, 1), (Some(3), None));
    }
}
