//! The fixed binary tree along which reproducible runs sum gradients: which sums a rank can make alone, and how the sums
//! of all ranks combine.
//!
//! Leaves are the microbatches of a step, in order. A node of level `l` covers up to `2^l` existing leaves from a multiple
//! of `2^l` on; its value is the value of its left half plus the value of its right half, if the right half has leaves.
//! Any run of leaves consists of few whole nodes, so ranks exchange nodes and the result has the bits of one rank's sum.
//! Source: Demmel and Nguyen 2013, Fast Reproducible Floating-Point Summation, §1, on fixed reduction trees.

use std::ops::Range;

/// A node of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its first leaf.
    pub first: usize,
    /// Its level; leaves have 0.
    pub level: u32,
}

/// A step on a stack of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Push the value of the node with this index.
    Push(usize),
    /// Replace the top two values by their sum, the lower value first.
    Merge,
}

/// Leaves of a rank; their numbers differ by at most one among ranks.
pub fn leaves_of(n_leaves: usize, n_ranks: usize, rank: usize) -> Range<usize> {
    rank * n_leaves / n_ranks..(rank + 1) * n_leaves / n_ranks
}

/// The fewest whole nodes that a run of leaves consists of, in order.
pub fn nodes_of(leaves: Range<usize>) -> Vec<Node> {
    let mut nodes = Vec::new();
    let mut first = leaves.start;
    while first < leaves.end {
        let aligned = if first == 0 { usize::BITS - 1 } else { first.trailing_zeros() };
        let fits = (leaves.end - first).ilog2();
        let level = aligned.min(fits);
        nodes.push(Node { first, level });
        first += 1 << level;
    }
    nodes
}

/// The steps that combine consecutive nodes into one value; the nodes cover leaves from 0 on.
pub fn steps(nodes: &[Node]) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut stack: Vec<Node> = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        steps.push(Step::Push(i));
        stack.push(*node);
        while let [.., left, right] = stack[..] {
            if left.level != right.level || !left.first.is_multiple_of(2 << left.level) {
                break;
            }
            steps.push(Step::Merge);
            stack.truncate(stack.len() - 2);
            stack.push(Node { first: left.first, level: left.level + 1 });
        }
    }
    // The remaining values have no right neighbour.
    steps.extend(std::iter::repeat_n(Step::Merge, stack.len().saturating_sub(1)));
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The tree as text; different orders of additions give different texts.
    fn by_definition(leaves: Range<usize>) -> String {
        if leaves.len() == 1 {
            return leaves.start.to_string();
        }
        let half = leaves.len().next_power_of_two() / 2;
        let middle = leaves.start + half;
        format!("({}+{})", by_definition(leaves.start..middle), by_definition(middle..leaves.end))
    }

    fn run(nodes: &[Node], n_leaves: usize) -> String {
        let mut stack: Vec<String> = Vec::new();
        for step in steps(nodes) {
            match step {
                Step::Push(i) => {
                    let node = nodes[i];
                    stack.push(by_definition(node.first..(node.first + (1 << node.level)).min(n_leaves)));
                }
                Step::Merge => {
                    let (right, left) = (stack.pop().unwrap(), stack.pop().unwrap());
                    stack.push(format!("({left}+{right})"));
                }
            }
        }
        assert_eq!(stack.len(), 1);
        stack.remove(0)
    }

    proptest! {
        #[test]
        fn any_number_of_ranks_makes_the_same_additions(n_leaves in 1usize..40, n_ranks in 1usize..12) {
            let of_rank = |rank| nodes_of(leaves_of(n_leaves, n_ranks, rank));
            let nodes: Vec<Node> = (0..n_ranks).flat_map(of_rank).collect();

            prop_assert_eq!(run(&nodes, n_leaves), by_definition(0..n_leaves));
        }
    }
}
