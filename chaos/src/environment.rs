//! Faults of what surrounds the processes: storage, clocks, the data of a machine, and messages of strangers.

use crate::dice::Dice;
use phalanx_strategies::elastic::coordinator::Activity;
use phalanx_strategies::elastic::identity::{MemberId, NodeId};
use serde::{Deserialize, Serialize};

/// A fault of the environment. None of them is a reason to blame a node, except a suspended one, one with other
/// data and one with a flipped bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum EnvironmentFault {
    /// A store fails for a while.
    FailStore {
        /// The store.
        store: StoreName,
        /// How it fails.
        how: Outage,
        /// Duration.
        for_ms: u64,
    },
    /// The clock of a machine runs at another rate for a while.
    SkewClock {
        /// The machine.
        machine: Machine,
        /// The rate, in percent of the right one, within [`RATES`].
        percent: u64,
        /// Duration.
        for_ms: u64,
    },
    /// The time of day of a machine is set to another one, and stays so.
    SetClock {
        /// The machine.
        machine: Machine,
        /// The difference.
        by_s: i64,
    },
    /// All processes of a machine are suspended for a while.
    Suspend {
        /// The machine.
        machine: Machine,
        /// Whether its clock stops as well.
        clock_stops: bool,
        /// Duration.
        for_ms: u64,
    },
    /// A machine restarts with another data set than the job's, and later with the right one.
    WrongData {
        /// The node.
        node: NodeId,
        /// Time until its restart.
        back_after_ms: u64,
        /// Time until it has the right data again.
        for_ms: u64,
    },
    /// Coordinators, nodes and ranks receive well-formed messages that are not for them: from another job, or old ones.
    Strangers {
        /// Number of messages.
        n_messages: u64,
        /// The time in which they arrive.
        for_ms: u64,
    },
    /// A bit flips in the memory of a rank: in its own shard or in a shadow. It has no effect while an earlier one may still be
    /// in some state, or if the shard has a single copy.
    FlipBit {
        /// The rank.
        member: MemberId,
        /// The piece, counted modulo the number of pieces that the rank holds.
        piece: u64,
        /// The bit, modulo 64.
        bit: u32,
    },
}

/// A store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreName {
    /// The lease and the record of the coordinators.
    Coordinators,
    /// The checkpoints.
    Checkpoints,
}

/// How a store fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outage {
    /// It refuses each operation.
    Refuses,
    /// Its answers are late; the caller may have given up, although the operation takes effect.
    Hangs,
    /// It does the work, and the answer is lost.
    LosesAnswers,
}

/// A machine with a clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Machine {
    /// The machine of a node.
    Node(NodeId),
    /// The machine of a coordinator, 0 or 1.
    Candidate(usize),
}

/// Number of coordinators of a simulated job.
pub const N_CANDIDATES: usize = 2;

/// Rates of clocks, in percent. The fastest is within [`CLOCK_RATIO_MAX`] of the slowest.
///
/// [`CLOCK_RATIO_MAX`]: phalanx_strategies::elastic::timing::CLOCK_RATIO_MAX
pub const RATES: std::ops::Range<u64> = 82..123;

impl EnvironmentFault {
    /// A fault drawn within a plan of this duration.
    pub fn random(dice: &mut Dice, n_nodes: u32) -> EnvironmentFault {
        let node = NodeId(dice.pick(0..u64::from(n_nodes)) as u32);
        let of_node = dice.percent(60);
        let candidate = Machine::Candidate(dice.pick(0..N_CANDIDATES as u64) as usize);
        let machine = if of_node { Machine::Node(node) } else { candidate };
        let for_ms = dice.pick(100..3_000);
        match dice.pick(0..100) {
            0..40 => {
                let store = if dice.percent(60) { StoreName::Coordinators } else { StoreName::Checkpoints };
                let how = [Outage::Refuses, Outage::Hangs, Outage::LosesAnswers][dice.pick(0..3) as usize];
                EnvironmentFault::FailStore { store, how, for_ms }
            }
            40..55 => EnvironmentFault::SkewClock { machine, percent: dice.pick(RATES), for_ms: for_ms * 2 },
            55..62 => EnvironmentFault::SetClock { machine, by_s: if dice.percent(50) { 3_600 } else { -3_600 } },
            62..77 => EnvironmentFault::Suspend { machine, clock_stops: dice.percent(50), for_ms },
            77..87 => {
                EnvironmentFault::WrongData { node, back_after_ms: dice.pick(10..800), for_ms: dice.pick(900..4_000) }
            }
            _ => EnvironmentFault::Strangers { n_messages: dice.pick(5..40), for_ms },
        }
    }

    /// A flipped bit, drawn for nodes with this many ranks.
    pub fn random_flip(dice: &mut Dice, n_nodes: u32, n_slots: u32) -> EnvironmentFault {
        let [node, slot] = [n_nodes, n_slots].map(|n| dice.pick(0..u64::from(n)) as u32);
        let member = MemberId { node: NodeId(node), slot };
        EnvironmentFault::FlipBit { member, piece: dice.pick(0..1 << 16), bit: dice.pick(0..64) as u32 }
    }

    /// What a coordinator may be doing when the fault begins.
    pub fn random_phase(dice: &mut Dice) -> Option<Activity> {
        let phases = [Activity::Stopping, Activity::Regrouping, Activity::Healing, Activity::TakingOver];
        dice.percent(25).then(|| phases[dice.pick(0..4) as usize])
    }

    /// How long it lasts; none if it is over at once.
    pub fn for_ms(self) -> Option<u64> {
        match self {
            EnvironmentFault::FailStore { for_ms, .. }
            | EnvironmentFault::SkewClock { for_ms, .. }
            | EnvironmentFault::Suspend { for_ms, .. }
            | EnvironmentFault::WrongData { for_ms, .. } => Some(for_ms),
            EnvironmentFault::SetClock { .. }
            | EnvironmentFault::Strangers { .. }
            | EnvironmentFault::FlipBit { .. } => None,
        }
    }
}
