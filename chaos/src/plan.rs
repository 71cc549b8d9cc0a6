//! A fault plan as data: faults with place and time. The same seed gives the same plan; a plan can be saved, edited and
//! replayed.

use crate::dice::Dice;
use crate::environment::EnvironmentFault;
use phalanx_strategies::elastic::coordinator::Activity;
use phalanx_strategies::elastic::identity::{MemberId, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A fault. A fault with a duration ends after it, or with the safety phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Fault {
    /// A rank process is killed.
    KillRank {
        /// The rank.
        member: MemberId,
    },
    /// The device of a rank fails, as reported by its driver; the machine has others that are free.
    FailDevice {
        /// The rank.
        member: MemberId,
    },
    /// A machine dies with all its processes, and restarts later.
    KillNode {
        /// The node.
        node: NodeId,
        /// Time until its restart.
        back_after_ms: u64,
    },
    /// All machines with a rank die and do not return, if the others are enough for a world.
    LoseWorld,
    /// All machines with a rank lose their connection to the coordinators, and train on, while others are ready.
    IsolateWorld {
        /// Duration.
        for_ms: u64,
    },
    /// The leading coordinator dies and loses all state that is not durable.
    KillCoordinator {
        /// Time until its restart.
        back_after_ms: u64,
    },
    /// The leading coordinator is stopped for a while and continues without noticing.
    PauseCoordinator {
        /// Duration.
        for_ms: u64,
    },
    /// A rank process is stopped (SIGSTOP) for a while.
    HangRank {
        /// The rank.
        member: MemberId,
        /// Duration.
        for_ms: u64,
    },
    /// A rank process gets no processor for a while.
    StarveRank {
        /// The rank.
        member: MemberId,
        /// Duration.
        for_ms: u64,
    },
    /// A rank computes more slowly for a while.
    SlowRank {
        /// The rank.
        member: MemberId,
        /// Slowdown.
        factor: u64,
        /// Duration.
        for_ms: u64,
    },
    /// All messages of a node to the coordinators are lost.
    DeafTo {
        /// The isolated sender.
        node: NodeId,
        /// Duration.
        for_ms: u64,
    },
    /// All messages of the coordinators to a node are lost.
    MuteTo {
        /// The isolated receiver.
        node: NodeId,
        /// Duration.
        for_ms: u64,
    },
    /// No tensors pass from one node to another.
    CutData {
        /// The sender.
        from: NodeId,
        /// The receiver.
        to: NodeId,
        /// Duration.
        for_ms: u64,
    },
    /// Control messages are lost, delayed and reordered.
    BadNetwork {
        /// Percentage of lost messages.
        loss: u64,
        /// Longest delay.
        delay_ms: u64,
        /// Duration.
        for_ms: u64,
    },
    /// No process of a node starts for a while: its program or its data is gone.
    FailStarts {
        /// The node.
        node: NodeId,
        /// Duration.
        for_ms: u64,
    },
    /// A node reports that its rank's world is broken, without a cause.
    Slander {
        /// The rank.
        member: MemberId,
    },
    /// Not a fault: the operator requests a checkpoint.
    Save,
    /// Not a fault: the operator requests another number of shards.
    Resize {
        /// Shards.
        dp_shard: usize,
    },
    /// Not a fault: the operator requests another mesh.
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
    /// A machine is drained, taken away half a second later, and restarted.
    Drain {
        /// The node.
        node: NodeId,
        /// Time from its removal to its restart.
        back_after_ms: u64,
    },
    /// A fault of storage, clocks or data, or strangers.
    #[serde(untagged)]
    Environment(EnvironmentFault),
}

/// A fault and when it is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// Earliest virtual time.
    pub at_ms: u64,
    /// Activity of the leading coordinator to wait for, to place failures in a recovery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub during: Option<Activity>,
    /// The fault.
    pub fault: Fault,
}

/// All faults of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Plan(pub Vec<Planned>);

/// Classes of faults. Each seed draws some of them (swarm testing), so that frequent combinations do not mask rare ones.
/// Source: Groce et al. 2012, "Swarm testing".
const CLASSES: u64 = 10;

/// Whether the job of a seed has machines beside those that its mesh needs, whose world can be lost as a whole.
pub(crate) fn has_spare_nodes(seed: u64) -> bool {
    Dice::new(seed, "spare nodes").percent(12)
}

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
            // A second failure during the recovery from the first.
            if dice.percent(40) {
                let phases = [Activity::Stopping, Activity::Regrouping, Activity::Healing, Activity::TakingOver];
                let during = Some(phases[dice.pick(0..4) as usize]);
                let class = dice.pick(0..CLASSES);
                plan.push(Planned { at_ms, during, fault: one(&mut dice, class, n_nodes, n_slots) });
            }
        }
        // Drawn apart, so that the other faults of a seed stay the same.
        let mut dice = Dice::new(seed, "starts and reports");
        for _ in 0..dice.pick(0..12).saturating_sub(8) {
            let node = NodeId(dice.pick(0..u64::from(n_nodes)) as u32);
            let member = MemberId { node, slot: dice.pick(0..u64::from(n_slots)) as u32 };
            let (at_ms, for_ms) = (dice.pick(800..span_ms), dice.pick(100..FAILED_STARTS_MS_MAX));
            if dice.percent(50) {
                plan.push(Planned { at_ms, during: None, fault: Fault::Slander { member } });
            } else {
                plan.push(Planned { at_ms, during: None, fault: Fault::FailStarts { node, for_ms } });
                plan.push(Planned { at_ms, during: None, fault: Fault::KillRank { member } });
            }
        }
        // Likewise.
        let mut dice = Dice::new(seed, "environment");
        for _ in 0..dice.pick(0..8).saturating_sub(4) {
            let fault = Fault::Environment(EnvironmentFault::random(&mut dice, n_nodes));
            let during = EnvironmentFault::random_phase(&mut dice);
            plan.push(Planned { at_ms: dice.pick(800..span_ms), during, fault });
        }
        // Likewise. A third difference after the same step would end the job.
        let mut dice = Dice::new(seed, "flipped bits");
        for _ in 0..dice.pick(0..8).saturating_sub(5) {
            let fault = Fault::Environment(EnvironmentFault::random_flip(&mut dice, n_nodes, n_slots));
            plan.push(Planned { at_ms: dice.pick(800..span_ms), during: None, fault });
        }
        // Likewise. Another mesh might need the machines that do not return.
        let resizes = |planned: &Planned| matches!(planned.fault, Fault::Resize { .. } | Fault::Reshape { .. });
        if has_spare_nodes(seed) && !plan.iter().any(resizes) {
            let mut dice = Dice::new(seed, "lost worlds");
            let fault = if dice.percent(50) {
                Fault::LoseWorld
            } else {
                Fault::IsolateWorld { for_ms: dice.pick(4_000..10_000) }
            };
            plan.push(Planned { at_ms: dice.pick(800..span_ms / 2), during: None, fault });
        }
        plan.extend(starved(seed, n_nodes, n_slots, span_ms));
        plan.sort_by_key(|planned| planned.at_ms);
        Plan(plan)
    }
}

/// Ranks without a processor, drawn apart likewise.
fn starved(seed: u64, n_nodes: u32, n_slots: u32, span_ms: u64) -> Vec<Planned> {
    let mut dice = Dice::new(seed, "processors");
    let n = dice.pick(0..8).saturating_sub(5);
    let mut one = || {
        let node = NodeId(dice.pick(0..u64::from(n_nodes)) as u32);
        let member = MemberId { node, slot: dice.pick(0..u64::from(n_slots)) as u32 };
        let fault = Fault::StarveRank { member, for_ms: dice.pick(100..8_000) };
        Planned { at_ms: dice.pick(800..span_ms), during: None, fault }
    };
    (0..n).map(|_| one()).collect()
}

/// So short that the pauses between failed starts let fewer than [`INCIDENTS_MAX`] of them happen, which would end the job.
///
/// [`INCIDENTS_MAX`]: phalanx_strategies::elastic::mesh_choice::INCIDENTS_MAX
const FAILED_STARTS_MS_MAX: u64 = 2_000;

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
        8 => Fault::FailDevice { member },
        _ => Fault::BadNetwork { loss: dice.pick(1..40), delay_ms: dice.pick(1..150), for_ms: short },
    }
}
