//! A fault plan as data: what goes wrong, where and when. The same seed gives the same plan; a plan can be saved,
//! edited and replayed.

use crate::dice::Dice;
use phalanx_strategies::elastic::coordinator::Activity;
use phalanx_strategies::elastic::identity::{MemberId, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Something that goes wrong. What has a duration ends by itself, or with the safety phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Fault {
    /// A rank process is killed.
    KillRank {
        /// Which.
        member: MemberId,
    },
    /// A machine is gone with all its processes, and starts again later.
    KillNode {
        /// Which.
        node: NodeId,
        /// When it starts again.
        back_after_ms: u64,
    },
    /// The leading coordinator is gone with all that it has not made durable.
    KillCoordinator {
        /// When it starts again.
        back_after_ms: u64,
    },
    /// The leading coordinator does nothing for a while, and does not know that it did nothing.
    PauseCoordinator {
        /// For how long.
        for_ms: u64,
    },
    /// A rank process is stopped (SIGSTOP) for a while.
    HangRank {
        /// Which.
        member: MemberId,
        /// For how long.
        for_ms: u64,
    },
    /// A rank computes more slowly for a while.
    SlowRank {
        /// Which.
        member: MemberId,
        /// How many times.
        factor: u64,
        /// For how long.
        for_ms: u64,
    },
    /// Nothing that a node sends arrives at the coordinators.
    DeafTo {
        /// Which node is not heard.
        node: NodeId,
        /// For how long.
        for_ms: u64,
    },
    /// Nothing that the coordinators send arrives at a node.
    MuteTo {
        /// The isolated node.
        node: NodeId,
        /// For how long.
        for_ms: u64,
    },
    /// Tensors do not get from one node to another.
    CutData {
        /// From.
        from: NodeId,
        /// To.
        to: NodeId,
        /// For how long.
        for_ms: u64,
    },
    /// Control messages are lost, late and out of order.
    BadNetwork {
        /// Percentage of lost messages.
        loss: u64,
        /// Longest delay.
        delay_ms: u64,
        /// For how long.
        for_ms: u64,
    },
    /// Not a fault: the operator asks for a checkpoint.
    Save,
    /// Not a fault: the operator asks for this many shards.
    Resize {
        /// How many.
        dp_shard: usize,
    },
    /// Not a fault: the operator asks for another mesh.
    Reshape {
        /// Stages.
        pp: usize,
        /// Replicas.
        dp_replicate: usize,
        /// Shards.
        dp_shard: usize,
        /// Tensor shards.
        tp: usize,
    },
    /// A machine is announced to be taken away, is taken away half a second later, and comes back.
    Drain {
        /// Which.
        node: NodeId,
        /// When it starts again after it was taken away.
        back_after_ms: u64,
    },
}

/// A fault and when it is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// Not before this virtual time.
    pub at_ms: u64,
    /// Not before the leading coordinator does this; for failures during a recovery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub during: Option<Activity>,
    /// What.
    pub fault: Fault,
}

/// All that goes wrong in a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Plan(pub Vec<Planned>);

/// Classes of faults; each seed draws some (swarm testing), so that rare combinations are not drowned by frequent ones.
/// Source: Groce et al. 2012, "Swarm testing".
const CLASSES: u64 = 9;

impl Plan {
    /// The fault plan of a seed, for a number of nodes and ranks per node, within a duration.
    pub fn random(seed: u64, n_nodes: u32, n_slots: u32, span_ms: u64) -> Plan {
        let mut dice = Dice::new(seed, "plan");
        let classes: Vec<u64> = (0..CLASSES).filter(|_| dice.percent(45)).collect();
        let n_faults = dice.pick(1..9);
        let mut plan = vec![];
        for _ in 0..n_faults {
            let class = if classes.is_empty() { 0 } else { classes[dice.pick(0..classes.len() as u64) as usize] };
            let fault = one(&mut dice, class, n_nodes, n_slots);
            let at_ms = dice.pick(800..span_ms);
            plan.push(Planned { at_ms, during: None, fault });
            // The second failure, in the middle of the recovery from the first.
            if dice.percent(40) {
                let phases = [Activity::Stopping, Activity::Regrouping, Activity::Healing, Activity::TakingOver];
                let during = Some(phases[dice.pick(0..4) as usize]);
                let class = dice.pick(0..CLASSES);
                plan.push(Planned { at_ms, during, fault: one(&mut dice, class, n_nodes, n_slots) });
            }
        }
        plan.sort_by_key(|planned| planned.at_ms);
        Plan(plan)
    }
}

impl Plan {
    /// `n` rank processes, drawn from the seed, are killed within a millisecond.
    pub fn mass_failure(seed: u64, n_nodes: u32, n_slots: u32, n: u32) -> Plan {
        let mut dice = Dice::new(seed, "mass failure");
        let mut members = BTreeSet::new();
        while members.len() < n.min(n_nodes * n_slots) as usize {
            let node = NodeId(dice.pick(0..u64::from(n_nodes)) as u32);
            members.insert(MemberId { node, slot: dice.pick(0..u64::from(n_slots)) as u32 });
        }
        let kill = |member| Planned { at_ms: 2_000, during: None, fault: Fault::KillRank { member } };
        Plan(members.into_iter().map(kill).collect())
    }
}

fn one(dice: &mut Dice, class: u64, n_nodes: u32, n_slots: u32) -> Fault {
    let node = NodeId(dice.pick(0..u64::from(n_nodes)) as u32);
    let other = NodeId(dice.pick(0..u64::from(n_nodes)) as u32);
    let member = MemberId { node, slot: dice.pick(0..u64::from(n_slots)) as u32 };
    let short = dice.pick(100..3_000);
    match class {
        0 => Fault::KillRank { member },
        1 => Fault::KillNode { node, back_after_ms: short },
        2 => Fault::KillCoordinator { back_after_ms: short },
        3 => Fault::PauseCoordinator { for_ms: short },
        4 => Fault::HangRank { member, for_ms: short },
        5 if dice.percent(50) => Fault::SlowRank { member, factor: dice.pick(2..100), for_ms: short * 4 },
        5 => Fault::Drain { node, back_after_ms: short },
        6 if dice.percent(30) => Fault::CutData { from: node, to: other, for_ms: short * 3 },
        6 if dice.percent(50) => Fault::DeafTo { node, for_ms: short },
        6 => Fault::MuteTo { node, for_ms: short },
        7 if dice.percent(70) => Fault::Save,
        7 if dice.percent(50) => {
            let [pp, dp_replicate, dp_shard, tp] = [3, 3, 4, 3].map(|end| dice.pick(1..end) as usize);
            Fault::Reshape { pp, dp_replicate, dp_shard, tp }
        }
        7 => Fault::Resize { dp_shard: dice.pick(1..5) as usize },
        _ => Fault::BadNetwork { loss: dice.pick(1..40), delay_ms: dice.pick(1..150), for_ms: short },
    }
}
