//! The ranks of a world and the groups that they form: the same description at every rank.

use super::descriptor::digest;
use super::error::CollectiveError;
use super::world_id::WorldId;

/// Most ranks of one world.
pub const RANKS_MAX: u32 = 4096;
/// Most ranks of one machine.
pub const LOCAL_RANKS_MAX: u32 = 64;
/// Most groups of one world.
pub const GROUPS_MAX: usize = 1 << 16;

/// The ranks of a world and its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    id: WorldId,
    n_ranks: u32,
    groups: Vec<Vec<u32>>,
    /// Names of the ranks in errors, if they differ from the ranks' numbers.
    names: Vec<u32>,
}

impl World {
    /// A world of `n_ranks` with `groups`, each a list of different ranks in order of position. A group is named by its
    /// index in this list, so the list is the same at every rank.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`], [`CollectiveError::NoSuchRank`].
    pub fn new(id: WorldId, n_ranks: u32, groups: Vec<Vec<u32>>) -> Result<World, CollectiveError> {
        let shape = |field, expected: String, found| Err(CollectiveError::Shape { field, expected, found });
        if n_ranks == 0 || n_ranks > RANKS_MAX {
            return shape("number of ranks", format!("1 to {RANKS_MAX}"), u64::from(n_ranks));
        }
        if groups.len() > GROUPS_MAX {
            return shape("number of groups", format!("at most {GROUPS_MAX}"), groups.len() as u64);
        }
        for group in &groups {
            if group.is_empty() {
                return shape("number of members of a group", "at least 1".to_owned(), 0);
            }
            if let Some(rank) = group.iter().find(|rank| **rank >= n_ranks) {
                return Err(CollectiveError::NoSuchRank { rank: *rank, size: n_ranks });
            }
            let mut sorted = group.clone();
            sorted.sort_unstable();
            if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                return shape("a member of a group", "named once".to_owned(), u64::from(twice[0]));
            }
        }
        Ok(World { id, n_ranks, groups, names: Vec::new() })
    }

    /// A world with one group of all ranks, in order.
    ///
    /// # Errors
    /// As [`World::new`].
    pub fn of_one_group(id: WorldId, n_ranks: u32) -> Result<World, CollectiveError> {
        World::new(id, n_ranks, vec![(0..n_ranks.min(RANKS_MAX)).collect()])
    }

    /// The same world as a part of a larger world, where rank `i` has the number `names[i]`.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if the number of names differs from the number of ranks.
    pub fn with_names(self, names: Vec<u32>) -> Result<World, CollectiveError> {
        if names.len() != self.n_ranks as usize {
            let (expected, found) = (self.n_ranks.to_string(), names.len() as u64);
            return Err(CollectiveError::Shape { field: "names of ranks", expected, found });
        }
        Ok(World { names, ..self })
    }

    /// The name of a rank in errors.
    pub fn name_of(&self, rank: u32) -> u32 {
        self.names.get(rank as usize).copied().unwrap_or(rank)
    }

    /// Its id.
    pub fn id(&self) -> WorldId {
        self.id
    }

    /// Ranks.
    pub fn n_ranks(&self) -> u32 {
        self.n_ranks
    }

    /// Groups, each in order of position.
    pub fn groups(&self) -> &[Vec<u32>] {
        &self.groups
    }

    /// A hash of the ranks and groups.
    pub fn digest(&self) -> u64 {
        let words = self
            .groups
            .iter()
            .flat_map(|group| std::iter::once(group.len() as u64).chain(group.iter().map(|rank| u64::from(*rank))));
        digest(std::iter::once(u64::from(self.n_ranks)).chain(words))
    }

    /// Members of a group and the position of `rank` in it.
    ///
    /// # Errors
    /// [`CollectiveError::NotAMember`].
    pub fn membership(&self, group: usize, rank: u32) -> Result<(&[u32], u32), CollectiveError> {
        let not_a_member = CollectiveError::NotAMember { rank, group, n_groups: self.groups.len() };
        let members = self.groups.get(group).ok_or(not_a_member.clone())?;
        let position = members.iter().position(|member| *member == rank).ok_or(not_a_member)?;
        Ok((members, position as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

    #[test]
    fn world_refuses_groups_with_unknown_missing_or_repeated_ranks() {
        let new = |groups| World::new(ID, 4, groups).unwrap_err();

        assert_eq!(new(vec![vec![0, 4]]), CollectiveError::NoSuchRank { rank: 4, size: 4 });
        assert!(matches!(new(vec![vec![0], vec![]]), CollectiveError::Shape { found: 0, .. }));
        assert!(matches!(new(vec![vec![2, 1, 2]]), CollectiveError::Shape { found: 2, .. }));
    }

    #[test]
    fn position_is_the_index_in_the_group() {
        let world = World::new(ID, 4, vec![vec![3, 1]]).unwrap();

        assert_eq!(world.membership(0, 1), Ok((&[3, 1][..], 1)));
        assert_eq!(world.membership(0, 0), Err(CollectiveError::NotAMember { rank: 0, group: 0, n_groups: 1 }));
    }
}
