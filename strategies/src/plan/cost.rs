//! Seconds of instructions and of collectives.
//!
//! Instructions: a roofline. Source: Williams et al. 2009, Roofline (CACM 52).
//!
//! Collectives: every step costs a hop plus bytes over bandwidth. A ring moves each byte the fewest times, a tree takes
//! the fewest steps; the faster one is taken, as libraries do. Source: Thakur, Rabenseifner and Gropp 2005,
//! "Optimization of collective communication operations in MPICH", §3 (IJHPCA 19). A group on several nodes works in
//! two levels: within nodes, and between nodes, where each member uses its own adapter to reach its counterparts.
//!
//! Legend: `n` members, `B` bytes of the whole, `a` seconds of a hop, `b` seconds of a byte.

use super::hardware::{Hardware, Link};
use crate::cost::instr_cost;
use crate::program::{Compute, Cost, Op, Program};
use crate::trace::Trace;
use crate::world::{Kind, Post};
use std::time::Duration;

/// Seconds of one instruction, whose kernel has this name.
pub fn instr_seconds(hardware: &Hardware, kernel: &str, cost: &Cost, compute: Compute) -> f64 {
    let attention = cost.attention_flops / hardware.attention(kernel, compute);
    let rounding = cost.rounded_bytes / hardware.streaming("cast");
    let arithmetic = hardware.matmul(compute).seconds(cost.matmul_flops) + attention + rounding;
    // Rates of attention count operations, not bytes.
    let streamed = if cost.attention_flops > 0.0 { 0.0 } else { cost.streamed_bytes / hardware.streaming(kernel) };
    // Launches run ahead of the device: a kernel that takes longer hides the launch of the next.
    arithmetic.max(streamed).max(hardware.launch_s)
}

/// The trace of a program on this hardware.
pub fn trace_on(hardware: &Hardware, program: &Program) -> Trace {
    Trace::timed(program, |instr| {
        let compute = match &instr.op {
            Op::MatMul(m) => m.compute,
            // Attention computes in the width of its operands.
            _ if program.value(*instr.reads.first()?).dtype.size_bytes() == 2 => Compute::Bf16,
            _ => Compute::F32,
        };
        let seconds = instr_seconds(hardware, instr.op.name(), &instr_cost(program, instr), compute);
        Some(Duration::from_secs_f64(seconds))
    })
}

/// How a group is spread over nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeSpan {
    /// Nodes that have members.
    pub n_nodes: u32,
    /// Members on the node with the fewest; each node communicates with the others through this many.
    pub per_node: u32,
}

impl NodeSpan {
    /// The span of members on these nodes.
    pub fn of(nodes: &[u32]) -> NodeSpan {
        // Members mostly come node by node, so sorting is fast; this runs for every collective.
        let mut nodes = nodes.to_vec();
        nodes.sort_unstable();
        let members = || nodes.chunk_by(|a, b| a == b).map(|node| node.len() as u32);
        NodeSpan { n_nodes: members().count() as u32, per_node: members().min().unwrap_or(0) }
    }

    fn size(self) -> u32 {
        self.n_nodes * self.per_node
    }
}

/// Seconds of a collective over whole tensors of `bytes`.
pub fn collective_seconds(hardware: &Hardware, kind: Kind, bytes: f64, at: NodeSpan) -> f64 {
    if at.size() <= 1 {
        return 0.0;
    }
    if let Some(bytes_per_s) = hardware.measured.get(kind.name()).filter(|_| at.n_nodes == 1) {
        return hardware.collective_start_s + bytes / bytes_per_s;
    }
    let within = Level { link: hardware.intra_node, n: f64::from(at.per_node) };
    let between = Level { link: hardware.inter_node, n: f64::from(at.n_nodes) };
    let share = bytes / f64::from(at.per_node);
    let moving = match kind {
        Kind::AllReduce => {
            let sum_between = between.all_reduce(share);
            // Scatter within, sum between, gather within; on one node the tree may be faster than that.
            if at.n_nodes == 1 { within.all_reduce(bytes) } else { 2.0 * within.ring(bytes) + sum_between }
        }
        Kind::AllGather | Kind::ReduceScatter => within.ring(bytes) + between.ring(share),
        Kind::Broadcast { .. } => within.broadcast(bytes) + between.broadcast(bytes),
        Kind::AllToAll => all_to_all(&within, &between, bytes),
        Kind::Send { .. } | Kind::Recv { .. } | Kind::Shift { .. } => {
            let link = if at.n_nodes == 1 { hardware.intra_node } else { hardware.inter_node };
            link.hop_s + bytes / link.best()
        }
    };
    hardware.collective_start_s + moving
}

/// Duration of a posted collective between members on these nodes; for [`crate::world::Links`].
///
/// ```
/// use phalanx_strategies::plan::Hardware;
/// use phalanx_strategies::plan::cost::post_duration;
/// use phalanx_strategies::world::{Links, Mover, WorldTraces};
///
/// let h200 = Hardware::named("h200").expect("it is shipped"); let node = |rank| h200.node(rank); let duration = |post:
/// &_, nodes: &[u32]| post_duration(&h200, post, nodes);
///
/// let timeline = WorldTraces::new().simulate(&Links { mover: Mover::Links, node: &node, duration: &duration }, false)?;
///
/// assert!(timeline.makespan.is_zero());
/// # Ok::<(), phalanx_strategies::world::WorldError>(())
/// ```
pub fn post_duration(hardware: &Hardware, post: &Post, nodes: &[u32]) -> Duration {
    let seconds = collective_seconds(hardware, post.collective.kind, post.size_bytes() as f64, NodeSpan::of(nodes));
    Duration::from_secs_f64(seconds)
}

/// Members connected by one kind of link.
struct Level {
    link: Link,
    n: f64,
}

impl Level {
    /// All-gather or reduce-scatter around a ring: `(n - 1) a + (n - 1) / n B b`.
    fn ring(&self, bytes: f64) -> f64 {
        (self.n - 1.0) * self.link.hop_s + (self.n - 1.0) / self.n * bytes / self.link.best()
    }

    /// Steps of a binary tree.
    fn depth(&self) -> f64 {
        self.n.log2().ceil()
    }

    /// One way along a tree: `log n (a + B b)`.
    fn tree(&self, bytes: f64) -> f64 {
        self.depth() * (self.link.hop_s + bytes / self.link.best())
    }

    /// Both halves of a ring, or up and down a tree.
    fn all_reduce(&self, bytes: f64) -> f64 {
        (2.0 * self.ring(bytes)).min(2.0 * self.tree(bytes))
    }

    /// Down a tree, or in many pieces along a chain: `(n - 1) a + B b`.
    fn broadcast(&self, bytes: f64) -> f64 {
        if self.n <= 1.0 {
            return 0.0;
        }
        self.tree(bytes).min((self.n - 1.0) * self.link.hop_s + bytes / self.link.best())
    }
}

/// Each member has a part for every other member; with many nodes, most parts cross nodes.
fn all_to_all(within: &Level, between: &Level, bytes: f64) -> f64 {
    let n = within.n * between.n;
    let near = (within.n - 1.0) / n * bytes / within.link.best();
    let far = (n - within.n) / n * bytes / between.link.best();
    let hops = (within.n - 1.0) * within.link.hop_s + (n - within.n) * between.link.hop_s;
    hops + near.max(far)
}
