//! Operation graphs: operations in an order in which each follows those that it needs, over numbered tensors.

use super::attributes::{Attributes, INT64};
use super::descriptor::{Computed, Made};
use super::operation::{Operation, Work};
use super::status::{BAD_PARAM, DUPLICATED_ENTRIES, Outcome, refuse};
use super::support;
use super::tensor::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An operation over tensors by their numbers.
#[derive(Clone, Debug)]
pub struct Node {
    pub work: Work,
    pub inputs: Vec<usize>,
    pub output: usize,
}

/// A finalized operation graph.
#[derive(Clone, Debug)]
pub struct Graph {
    pub tensors: Vec<Arc<Tensor>>,
    pub nodes: Vec<Node>,
    /// For each tensor the node that makes it.
    pub producers: Vec<Option<usize>>,
    /// For each tensor the nodes that read it.
    pub consumers: Vec<Vec<usize>>,
    /// For each tensor the one that holds how many of its rows exist in each batch.
    pub lengths: Vec<Option<usize>>,
}

impl Graph {
    /// # Errors
    /// Where one id means two tensors, a tensor has two producers, a virtual tensor has none or no consumer, or operations
    /// wait for each other. That cuDNN refuses these here is our reading.
    pub fn new(a: &Attributes) -> Outcome<Graph> {
        if a.flag(803) {
            return refuse(BAD_PARAM, format_args!("graphs of dynamic shape are not imitated"));
        }
        let operations: Vec<&Arc<Operation>> = a.children(801).iter().map(Made::operation).collect::<Outcome<_>>()?;
        if operations.is_empty() {
            return refuse(BAD_PARAM, format_args!("a graph without operations"));
        }
        let mut tensors = Numbering::default();
        let mut nodes = Vec::new();
        for o in operations {
            let inputs = o.inputs.iter().map(|t| tensors.number(t)).collect::<Outcome<_>>()?;
            nodes.push(Node { work: o.work.clone(), inputs, output: tensors.number(&o.output)? });
        }
        let tensors = tensors.tensors;
        let nodes = sorted(nodes, tensors.len())?;
        let (mut producers, mut consumers) = (vec![None; tensors.len()], vec![Vec::new(); tensors.len()]);
        for (i, node) in nodes.iter().enumerate() {
            producers[node.output] = Some(i);
            node.inputs.iter().for_each(|t| consumers[*t].push(i));
        }
        let lengths = lengths(&tensors, &nodes);
        let graph = Graph { tensors, nodes, producers, consumers, lengths };
        graph.check_tensors()?;
        Ok(graph)
    }

    fn check_tensors(&self) -> Outcome {
        for (i, t) in self.tensors.iter().enumerate() {
            let (is_made, is_read) = (self.producers[i].is_some(), !self.consumers[i].is_empty());
            let id = t.id;
            if t.is_virtual && !is_made {
                return refuse(BAD_PARAM, format_args!("virtual tensor {id} has no producer"));
            }
            if t.is_virtual && !is_read {
                return refuse(BAD_PARAM, format_args!("virtual tensor {id} has no consumer"));
            }
            if t.is_by_value && is_made {
                return refuse(BAD_PARAM, format_args!("tensor {id} is passed by value and has a producer"));
            }
        }
        Ok(())
    }

    /// Tensors that are made and read by the graph and live in memory of the program: its own workspaces.
    pub fn is_workspace(&self, tensor: usize) -> bool {
        !self.tensors[tensor].is_virtual && self.producers[tensor].is_some() && !self.consumers[tensor].is_empty()
    }

    /// Tensors in memory of the program, ragged offsets among them.
    pub fn in_memory(&self) -> impl Iterator<Item = &Arc<Tensor>> {
        let offsets = self.tensors.iter().filter(|t| !t.is_virtual).filter_map(|t| t.ragged.as_ref());
        self.tensors.iter().filter(|t| !t.is_virtual).chain(offsets)
    }

    pub fn computed(&self, name: u32) -> Option<Computed> {
        let n_engines = support::engines(self).map_or(0, |e| e.len() as i64);
        (name == 802).then(|| Computed::Numbers(INT64, vec![n_engines]))
    }
}

/// Rows (of the second last dimension) that a product has by its sizes, and what is computed of them row by row.
fn lengths(tensors: &[Arc<Tensor>], nodes: &[Node]) -> Vec<Option<usize>> {
    let (mut rows, mut columns) = (vec![None; tensors.len()], vec![None; tensors.len()]);
    for node in nodes {
        let inherited = |of: &[Option<usize>]| node.inputs.iter().find_map(|t| of[*t]);
        (rows[node.output], columns[node.output]) = match &node.work {
            Work::Matmul { overrides: [m, n, _], .. } => (m.map(|m| node.inputs[m]), n.map(|n| node.inputs[n])),
            Work::Reshape => (columns[node.inputs[0]], rows[node.inputs[0]]),
            Work::Pointwise { .. } | Work::Reduction(_) => (inherited(&rows), inherited(&columns)),
        };
    }
    rows
}

/// Numbers for tensors by their ids.
#[derive(Default)]
struct Numbering {
    tensors: Vec<Arc<Tensor>>,
    by_id: BTreeMap<i64, usize>,
}

impl Numbering {
    fn number(&mut self, tensor: &Arc<Tensor>) -> Outcome<usize> {
        let n = *self.by_id.entry(tensor.id).or_insert(self.tensors.len());
        if n == self.tensors.len() {
            self.tensors.push(tensor.clone());
        }
        if *self.tensors[n] != **tensor {
            return refuse(DUPLICATED_ENTRIES, format_args!("id {} means two different tensors", tensor.id));
        }
        Ok(n)
    }
}

/// The nodes in an order in which producers come first; the given one where it is such an order.
fn sorted(mut waiting: Vec<Node>, n_tensors: usize) -> Outcome<Vec<Node>> {
    let mut n_producers = vec![0; n_tensors];
    waiting.iter().for_each(|node| n_producers[node.output] += 1);
    if n_producers.iter().any(|n| *n > 1) {
        return refuse(BAD_PARAM, format_args!("a tensor is the output of two operations"));
    }
    let mut is_ready: Vec<bool> = n_producers.iter().map(|n| *n == 0).collect();
    let mut nodes = Vec::new();
    while !waiting.is_empty() {
        let Some(next) = waiting.iter().position(|node| node.inputs.iter().all(|t| is_ready[*t])) else {
            return refuse(BAD_PARAM, format_args!("operations wait for each other"));
        };
        let node = waiting.remove(next);
        is_ready[node.output] = true;
        nodes.push(node);
    }
    Ok(nodes)
}
