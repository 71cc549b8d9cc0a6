//! Whose copy was wrong, found by repeating the steps: copies differed, and there was no majority.
//!
//! A flipped bit in a weight changes the loss of its own replica in the next step, and through the summed gradients that of
//! all other replicas one step later. The state of a shadow takes part in no loss. The repeated steps are those of an
//! undisturbed run, so the copy that deviates from them first is the wrong one.
//!
//! Invariant:
//! - `DISPUTE-1` A rank is named only if every holder of the disputed box still knows what it computed first, and this rank's
//!   copy alone deviates first.

use super::identity::Step;
use crate::mesh::{Axis, Mesh};

/// What a rank knows about a dispute once its step is repeated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeated {
    /// The first step whose loss on this rank differs from the first time.
    pub loss: Option<Step>,
    /// Whether its own copy of the box is other than the first time, if it had one.
    pub own: Option<bool>,
    /// The same for the copies in its shadows.
    pub shadow: Option<bool>,
}

impl Repeated {
    /// Whole numbers below 2^53 that say the same, for an exchange between ranks.
    pub fn encode(self) -> [u64; 3] {
        let flag = |flag: Option<bool>| flag.map_or(0, |differs| 1 + u64::from(differs));
        [self.loss.map_or(0, |step| step.0), flag(self.own), flag(self.shadow)]
    }

    /// The inverse of [`Repeated::encode`].
    pub fn decode([loss, own, shadow]: [u64; 3]) -> Repeated {
        let flag = |flag: u64| (flag > 0).then_some(flag > 1);
        Repeated { loss: (loss > 0).then_some(Step(loss)), own: flag(own), shadow: flag(shadow) }
    }
}

/// The rank whose copy was wrong (`DISPUTE-1`): `holders` are the ranks that hold the box, `repeated` what each rank of the
/// mesh knows.
pub fn settle(mesh: &Mesh, step: Step, holders: &[u32], repeated: &[Repeated]) -> Option<u32> {
    let replica = |rank: usize| mesh.coord(rank).on(Axis::DpReplicate);
    let of_replica = |at: usize| {
        let own = repeated.iter().enumerate().filter(|(rank, _)| replica(*rank) == at);
        own.filter_map(|(_, repeated)| repeated.loss).min()
    };
    // A loss of the step comes before the state after it.
    let deviates = |rank: u32| -> Option<Option<(Step, bool)>> {
        let of_rank = repeated.get(rank as usize)?;
        let state = |differs: bool| differs.then_some((step, true));
        let own =
            of_rank.own.map(|differs| of_replica(replica(rank as usize)).map(|at| (at, false)).or(state(differs)));
        let shadow = of_rank.shadow.map(state);
        match (own, shadow) {
            (None, None) => None,
            (own, shadow) => Some(own.flatten().into_iter().chain(shadow.flatten()).min()),
        }
    };
    let all: Vec<(u32, Option<(Step, bool)>)> =
        holders.iter().map(|rank| deviates(*rank).map(|at| (*rank, at))).collect::<Option<_>>()?;
    let first = all.iter().filter_map(|(_, at)| *at).min()?;
    let mut earliest = all.iter().filter(|(_, at)| *at == Some(first));
    match (earliest.next(), earliest.next()) {
        (Some((rank, _)), None) => Some(*rank),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGREES: Repeated = Repeated { loss: None, own: Some(false), shadow: None };
    const DIFFERS: Repeated = Repeated { loss: None, own: Some(true), shadow: None };

    fn since(step: u64) -> Repeated {
        Repeated { loss: Some(Step(step)), ..DIFFERS }
    }

    fn replicas(repeated: [Repeated; 2]) -> Option<u32> {
        settle(&Mesh { dp_replicate: 2, ..Mesh::ONE }, Step(8), &[0, 1], &repeated)
    }

    #[test]
    fn replica_whose_copy_differs_alone_is_named() {
        assert_eq!(replicas([AGREES, DIFFERS]), Some(1));
        assert_eq!(replicas([DIFFERS, AGREES]), Some(0));
        assert_eq!(replicas([DIFFERS, DIFFERS]), None);
        assert_eq!(replicas([AGREES, AGREES]), None);
    }

    #[test]
    fn replica_whose_loss_differs_first_is_named() {
        assert_eq!(replicas([since(6), since(5)]), Some(1));
        assert_eq!(replicas([since(8), DIFFERS]), Some(0));
        assert_eq!(replicas([since(5), since(5)]), None);
    }

    #[test]
    fn owner_is_named_if_the_loss_differs_and_the_shadow_holder_otherwise() {
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let shadow = |differs| Repeated { loss: None, own: None, shadow: Some(differs) };

        // The loss of both ranks deviates, because both compute with the weights of rank 0.
        let polluted = Repeated { loss: Some(Step(5)), ..shadow(true) };
        assert_eq!(settle(&mesh, Step(8), &[0, 1], &[since(5), polluted]), Some(0));
        assert_eq!(settle(&mesh, Step(8), &[0, 1], &[AGREES, shadow(true)]), Some(1));
        assert_eq!(settle(&mesh, Step(8), &[0, 1], &[DIFFERS, shadow(false)]), Some(0));
    }

    #[test]
    fn loss_on_another_rank_of_the_replica_counts() {
        let mesh = Mesh { dp_replicate: 2, tp: 2, ..Mesh::ONE };
        let other = |loss| Repeated { loss, own: None, shadow: None };

        let repeated = [other(Some(Step(6))), DIFFERS, other(Some(Step(5))), DIFFERS];

        assert_eq!(settle(&mesh, Step(8), &[1, 3], &repeated), Some(3));
    }

    // DISPUTE-1
    #[test]
    fn nobody_is_named_if_a_holder_was_replaced() {
        assert_eq!(replicas([since(6), Repeated::default()]), None);
    }

    #[test]
    fn exchange_keeps_all_that_a_rank_knows() {
        for repeated in [AGREES, DIFFERS, since(5), Repeated { shadow: Some(false), ..Repeated::default() }] {
            assert_eq!(Repeated::decode(repeated.encode()), repeated);
        }
    }
}
