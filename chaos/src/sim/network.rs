//! The control network between nodes and coordinators: delay, loss, duplication, reordering and one-way partitions; and the
//! connectivity of the data plane.

use crate::dice::Dice;
use phalanx_strategies::elastic::identity::NodeId;
use std::collections::BTreeMap;

/// See the [module](self). Partitions are counted, since several faults may cause the same one at the same time.
#[derive(Debug)]
pub struct Network {
    dice: Dice,
    /// (loss in percent, longest delay in ms) of each lasting fault.
    pub bad: Vec<(u64, u64)>,
    /// Nodes without a connection to the coordinators.
    pub deaf_to: BTreeMap<NodeId, u32>,
    /// Nodes without a connection from the coordinators.
    pub mute_to: BTreeMap<NodeId, u32>,
    /// Pairs (sender, receiver) between which no tensors pass.
    pub cut: BTreeMap<(NodeId, NodeId), u32>,
}

impl Network {
    /// A network without faults.
    pub fn new(seed: u64) -> Network {
        Network {
            dice: Dice::new(seed, "network"),
            bad: vec![],
            deaf_to: BTreeMap::new(),
            mute_to: BTreeMap::new(),
            cut: BTreeMap::new(),
        }
    }

    /// Delays in microseconds after which a message of this node arrives at a coordinator: none if it is lost, two if it is
    /// duplicated.
    pub fn delays_to_coordinators(&mut self, node: NodeId) -> Vec<u64> {
        if self.deaf_to.contains_key(&node) { vec![] } else { self.arrivals() }
    }

    /// Delays of a message of a coordinator to this node; see [`Network::delays_to_coordinators`].
    pub fn delays_to_node(&mut self, node: NodeId) -> Vec<u64> {
        if self.mute_to.contains_key(&node) { vec![] } else { self.arrivals() }
    }

    /// Whether tensors pass in both directions.
    pub fn connects(&self, a: NodeId, b: NodeId) -> bool {
        !self.cut.contains_key(&(a, b)) && !self.cut.contains_key(&(b, a))
    }

    fn arrivals(&mut self) -> Vec<u64> {
        let loss = self.bad.iter().map(|(loss, _)| *loss).max().unwrap_or(0);
        let slowest = self.bad.iter().map(|(_, delay)| *delay).max().unwrap_or(0) * 1_000;
        if self.dice.percent(loss) {
            return vec![];
        }
        let n_copies = 1 + u64::from(self.dice.percent(loss / 2));
        (0..n_copies).map(|_| self.dice.pick(100..800 + slowest)).collect()
    }
}

/// Counts another cause of a partition.
pub fn begin<K: Ord>(partitions: &mut BTreeMap<K, u32>, key: K) {
    *partitions.entry(key).or_default() += 1;
}

/// Removes one cause of a partition.
pub fn end<K: Ord>(partitions: &mut BTreeMap<K, u32>, key: K) {
    let left = partitions.get(&key).map_or(0, |n| n - 1);
    if left == 0 {
        partitions.remove(&key);
    } else {
        partitions.insert(key, left);
    }
}
