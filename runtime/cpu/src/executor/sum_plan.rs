//! The order in which a tree sum adds the parts of ranks.

use crate::tasks::{Cut, Tasks};
use phalanx_strategies::passes::reproducible::plan_of_sum;
use phalanx_strategies::tree::Step;

/// The order of a sum over the nodes of a tree.
#[derive(Debug)]
pub(super) struct SumPlan {
    /// For each node: the rank that sends it, and the node's index among that rank's nodes.
    senders: Vec<(usize, usize)>,
    steps: Vec<Step>,
}

impl SumPlan {
    pub(super) fn new(n_leaves: usize, n_ranks: usize) -> SumPlan {
        let (senders, steps) = plan_of_sum(n_leaves, n_ranks);
        SumPlan { senders, steps }
    }

    /// Sums the parts of all nodes, a few cache lines at a time.
    ///
    /// # Shapes
    /// `sum: [n]`; each of `nodes: [n_ranks, n]`.
    pub(super) fn sum(&self, nodes: &[&[f32]], sum: &mut [f32]) {
        /// Elements of a task.
        const BLOCK: usize = 1 << 14;
        /// Elements of a partial sum.
        const LANE: usize = 256;
        /// Most partial sums at a time: the depth of a tree of 2^31 leaves.
        const DEPTH: usize = 32;
        let n_all = sum.len();
        sum.par_chunks_mut(BLOCK).enumerate().for_each(|(i, sum)| {
            let mut stack = [[0.0f32; LANE]; DEPTH];
            for (j, sum) in sum.chunks_mut(LANE).enumerate() {
                let (first, n) = (i * BLOCK + j * LANE, sum.len());
                let mut depth = 0;
                for step in &self.steps {
                    match *step {
                        Step::Push(node) => {
                            let (rank, k) = self.senders[node];
                            let at = rank * n_all + first;
                            stack[depth][..n].copy_from_slice(&nodes[k][at..at + n]);
                            depth += 1;
                        }
                        Step::Merge => {
                            depth -= 1;
                            let (left, right) = stack.split_at_mut(depth);
                            left[depth - 1][..n].iter_mut().zip(&right[0][..n]).for_each(|(l, r)| *l += r);
                        }
                    }
                }
                sum.copy_from_slice(&stack[0][..n]);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_sum_has_the_bits_of_a_sequential_tree_in_every_element() {
        // Longer than a task, and not a multiple of a partial sum.
        const N: usize = 9001;
        for (n_leaves, n_ranks) in [(1, 1), (2, 2), (8, 3), (13, 5), (64, 7)] {
            let plan = SumPlan::new(n_leaves, n_ranks);
            let n_nodes = 1 + plan.senders.iter().map(|(_, k)| *k).max().unwrap();
            // Values whose sum depends on the order.
            let value = |k: usize, i: usize| ((k * 7919 + i) as f32).sin() * 10f32.powi((i % 13) as i32 - 6);
            let nodes: Vec<Vec<f32>> = (0..n_nodes).map(|k| (0..n_ranks * N).map(|i| value(k, i)).collect()).collect();
            let nodes: Vec<&[f32]> = nodes.iter().map(Vec::as_slice).collect();

            let mut sum = vec![f32::NAN; N];
            plan.sum(&nodes, &mut sum);

            for i in 0..N {
                let mut stack: Vec<f32> = Vec::new();
                for step in &plan.steps {
                    match *step {
                        Step::Push(node) => {
                            let (rank, k) = plan.senders[node];
                            stack.push(nodes[k][rank * N + i]);
                        }
                        Step::Merge => {
                            let right = stack.pop().unwrap();
                            *stack.last_mut().unwrap() += right;
                        }
                    }
                }
                assert_eq!((stack.len(), sum[i].to_bits()), (1, stack[0].to_bits()), "{n_leaves} {n_ranks} {i}");
            }
        }
    }
}
