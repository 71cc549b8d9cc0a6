//! Executes a graph: one operation after another in f32, on the engine's thread.
//!
//! What is rounded is what an engine rounds: operands of products to their 16-bit type (scores and their gradients too), and
//! what is stored. Rows beyond the length of a sequence are not written (our reading). The workspace is poisoned before and scrambled after.

use super::dense::{Dense, Place, for_each_row};
use super::graph::{Graph, Node};
use super::operation::{Matmul, Pointwise, Reduction, Work, transposition};
use super::pointwise::{Mode, max, min};
use super::support;
use super::tensor::{DataType, Tensor};
use crate::codes::{Code, refuse};
use crate::cublaslt::element::Element;
use crate::cublaslt::problem::{Problem, View};
use crate::cublaslt::product::Product;
use std::collections::BTreeMap;
use std::sync::Arc;

const COMPUTE_32F: u32 = 68;
/// The code of an execution whose lengths contradict its tensors.
const ILLEGAL_ADDRESS: Code = 700;
/// Columns of the scores that are added to an accumulator at once.
const BLOCK: usize = 32;
/// Since 9.6.0 engines set their accumulators to zero; before, the program did.
const ZEROING_VERSION: u64 = 90_600;

/// An execution as it was enqueued.
pub struct Run {
    pub graph: Arc<Graph>,
    /// Addresses by tensor, ragged offsets among them.
    pub pointers: BTreeMap<i64, usize>,
    pub scalars: BTreeMap<i64, f32>,
    /// What operands of products are rounded to that are f32 on both sides.
    pub half: Option<Element>,
    /// Whether gradients are sums in no fixed order.
    pub is_unordered: bool,
    /// Address and bytes.
    pub workspace: (usize, usize),
}

impl Run {
    /// `seed` decides the order of additions that an engine leaves open.
    pub fn run(&self, seed: u64) -> Result<(), Code> {
        self.fill_workspace(|_| 0xff);
        let graph = &*self.graph;
        let mut values: Vec<Option<Dense>> = vec![None; graph.tensors.len()];
        for (i, node) in graph.nodes.iter().enumerate() {
            for t in &node.inputs {
                if values[*t].is_none() {
                    values[*t] = Some(self.load(&graph.tensors[*t])?);
                }
            }
            let mut output = self.compute(node, &values, seed)?;
            let tensor = &graph.tensors[node.output];
            if !tensor.is_virtual {
                let lengths = graph.lengths[node.output].map(|t| self.load(&graph.tensors[t])).transpose()?;
                self.place(tensor)?.store(&output, lengths.as_ref());
                output.round_to(tensor.dtype);
            }
            values[node.output] = Some(output);
            for t in node.inputs.iter().filter(|t| graph.consumers[**t].last() == Some(&i)) {
                values[*t] = None;
            }
        }
        self.fill_workspace(|i| (i as u64).wrapping_mul(0x9e37_79b9).wrapping_add(seed).rotate_left(11) as u8);
        Ok(())
    }

    fn fill_workspace(&self, byte: impl Fn(usize) -> u8) {
        let (at, bytes) = self.workspace;
        for i in 0..bytes {
            // SAFETY: the workspace lies in memory of a device, which was checked.
            unsafe { *((at + i) as *mut u8) = byte(i) };
        }
    }

    fn place<'a>(&self, tensor: &'a Tensor) -> Result<Place<'a>, Code> {
        let offsets = tensor.ragged.as_ref().map_or(0, |o| self.pointers[&o.id]);
        Place::new(tensor, self.pointers[&tensor.id], offsets)
    }

    fn load(&self, tensor: &Tensor) -> Result<Dense, Code> {
        match self.scalars.get(&tensor.id) {
            Some(scalar) => Ok(Dense::filled(&tensor.dims, *scalar)),
            None => Ok(self.place(tensor)?.load()),
        }
    }

    fn compute(&self, node: &Node, values: &[Option<Dense>], seed: u64) -> Result<Dense, Code> {
        let input = |i: usize| values[node.inputs[i]].as_ref().expect("producers come first");
        let tensor = |i: usize| &*self.graph.tensors[node.inputs[i]];
        let output = &*self.graph.tensors[node.output];
        Ok(match &node.work {
            Work::Pointwise { rule, scales } => {
                let inputs: Vec<&Dense> = (0..node.inputs.len()).map(input).collect();
                pointwise(*rule, *scales, &inputs, &output.dims)
            }
            Work::Reduction(rule) => reduce(*rule, input(0), &output.dims),
            Work::Reshape => {
                input(0).transposed(&transposition(tensor(0), output).expect("checked when it was finalized"))
            }
            Work::Matmul { rule, overrides } => {
                let sizes = overrides.map(|at| at.map(input));
                let operands = [0, 1].map(|i| {
                    let half = [tensor(i), tensor(0), tensor(1)].iter().find_map(|t| t.dtype.half()).or(self.half);
                    let mut operand = input(i).clone();
                    operand.round_to(half.map_or(DataType::F32, DataType::Float));
                    operand
                });
                // Scores come from two tensors in memory; gradients are made of them.
                let is_unordered = self.is_unordered && tensor(0).is_virtual;
                let into = self.accumulator(node)?;
                let seed = (is_unordered || into.is_some()).then_some(seed);
                multiply(rule, &operands, sizes, into, &output.dims, seed)?
            }
        })
    }

    /// What a product is added to, if it goes through atomic additions.
    fn accumulator(&self, node: &Node) -> Result<Option<Dense>, Code> {
        let tensor = &self.graph.tensors[node.output];
        if !support::is_accumulator(&self.graph, node.output) {
            return Ok(None);
        }
        let is_zeroed = super::version() >= ZEROING_VERSION;
        Ok(Some(if is_zeroed { Dense::filled(&tensor.dims, 0.0) } else { self.place(tensor)?.load() }))
    }
}

/// A row of an input, broadcast to the output's length.
fn row<'a>(input: &'a Dense, index: &[usize], n: usize, buffer: &'a mut Vec<f32>) -> &'a [f32] {
    let last = input.dims.len() - 1;
    let at = (0..last).fold(0, |at, i| at * input.dims[i] + if input.dims[i] == 1 { 0 } else { index[i] });
    let row = &input.data[at * input.dims[last]..][..input.dims[last]];
    if row.len() == n {
        return row;
    }
    buffer.clear();
    buffer.resize(n, row[0]);
    buffer
}

fn pointwise(rule: Pointwise, [alpha, beta]: [f32; 2], inputs: &[&Dense], dims: &[usize]) -> Dense {
    let mut out = Dense::filled(dims, 0.0);
    let (n, last) = (out.row_len(), dims.len() - 1);
    let mut buffers = [Vec::new(), Vec::new(), Vec::new()];
    let [bx, bb, bt] = &mut buffers;
    let mut rows = out.data.chunks_exact_mut(n);
    for_each_row(dims, |index| {
        let out = rows.next().expect("as many rows as indices");
        if rule.mode == Mode::GenIndex {
            let axis = rule.axis.expect("checked when it was finalized");
            out.iter_mut().enumerate().for_each(|(j, o)| *o = if axis == last { j } else { index[axis] } as f32);
            return;
        }
        let x = row(inputs[0], index, n, bx);
        let b = inputs.get(1).map_or(x, |b| row(b, index, n, bb));
        let scaled = out.iter_mut().zip(x.iter().map(|x| alpha * x)).zip(b.iter().map(|b| beta * b));
        match rule.mode {
            Mode::Unary(f) => scaled.for_each(|((o, x), _)| *o = f.apply(x)),
            Mode::Binary(f) => scaled.for_each(|((o, x), b)| *o = f.apply(x, b)),
            Mode::Compare(f) => scaled.for_each(|((o, x), b)| *o = f.apply(x, b)),
            Mode::And => scaled.for_each(|((o, x), b)| *o = f32::from(x != 0.0 && b != 0.0)),
            Mode::Or => scaled.for_each(|((o, x), b)| *o = f32::from(x != 0.0 || b != 0.0)),
            Mode::Not => scaled.for_each(|((o, x), _)| *o = f32::from(x == 0.0)),
            Mode::Select => {
                let mask = row(inputs[2], index, n, bt);
                scaled.zip(mask).for_each(|(((o, x), b), t)| *o = if *t == 0.0 { b } else { x });
            }
            Mode::GenIndex => unreachable!("it has no inputs' values"),
        }
    });
    out
}

/// Each element of the result is that of `x.dims[i] / dims[i]` neighbours in each dimension, in the order of indices.
fn reduce(rule: Reduction, x: &Dense, dims: &[usize]) -> Dense {
    let (first, f): (f32, fn(f32, f32) -> f32) = match rule {
        Reduction::Add => (0.0, |a, b| a + b),
        Reduction::Mul => (1.0, |a, b| a * b),
        Reduction::Min => (f32::INFINITY, min),
        Reduction::Max => (f32::NEG_INFINITY, max),
    };
    let mut out = Dense::filled(dims, first);
    let last = dims.len() - 1;
    let group: Vec<usize> = x.dims.iter().zip(dims).map(|(x, y)| x / y).collect();
    let mut rows = x.data.chunks_exact(x.row_len());
    for_each_row(&x.dims, |index| {
        let start = (0..last).fold(0, |at, i| at * dims[i] + index[i] / group[i]) * dims[last];
        for (j, value) in rows.next().expect("as many rows as indices").iter().enumerate() {
            let place = &mut out.data[start + j / group[last]];
            *place = f(*place, *value);
        }
    });
    out
}

/// Products of all batches, with M, N and K of each; heads of the smaller operand serve groups of the larger one's.
fn multiply(
    rule: &Matmul,
    [a, b]: &[Dense; 2],
    sizes: [Option<&Dense>; 3],
    into: Option<Dense>,
    dims: &[usize],
    seed: Option<u64>,
) -> Result<Dense, Code> {
    let rows = dims.len() - 2;
    let full = [dims[rows], dims[rows + 1], a.dims[rows + 1]];
    let is_fresh = into.is_none();
    let mut out = into.unwrap_or_else(|| Dense::filled(dims, rule.padding));
    let batch_dims: Vec<usize> = dims[..rows].iter().copied().chain([1]).collect();
    let mut refused = Ok(());
    let mut batch = 0;
    for_each_row(&batch_dims, |index| {
        let part = |d: &Dense| {
            let n = (0..rows).fold(0, |at, i| at * d.dims[i] + index[i] * d.dims[i] / dims[i]);
            n * d.dims[rows] * d.dims[rows + 1]
        };
        let size = |i: usize| sizes[i].map_or(full[i] as f32, |s| s.data[index[0]]);
        let [m, n, k] = [0, 1, 2].map(size);
        if [m, n, k].iter().zip(full).any(|(size, most)| !(0.0..=most as f32).contains(size)) {
            let what = format_args!("cuDNN: batch {} has sizes {m} x {n} x {k} in a product of {full:?}", index[0]);
            refused = Err(refuse(ILLEGAL_ADDRESS, what));
            return;
        }
        let shape = [m, n, k].map(|s| s as usize);
        let at = [&a.data[part(a)..], &b.data[part(b)..]].map(|d| d.as_ptr() as usize);
        let to = &mut out.data[batch * full[0] * full[1]..][..full[0] * full[1]];
        if is_fresh {
            to.chunks_mut(full[1]).take(shape[0]).for_each(|row| row[..shape[1]].fill(0.0));
        }
        add_product(at, to, shape, full, seed);
        batch += 1;
    });
    refused.map(|()| out)
}

/// `to [m, n] += a [m, k] b [k, n]`; with a seed by blocks of k, in an order that follows from it.
fn add_product(at: [usize; 2], to: &mut [f32], [m, n, k]: [usize; 3], full: [usize; 3], seed: Option<u64>) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    let view = |rows: usize, cols: usize, stride: usize| View {
        element: Element::F32,
        rows,
        cols,
        row_stride: stride,
        col_stride: 1,
        batch_stride: 0,
    };
    let block = if seed.is_some() { BLOCK } else { k };
    let n_blocks = k.div_ceil(block);
    let first = seed.unwrap_or(0) as usize % n_blocks;
    for i in 0..n_blocks {
        let from = (first + i) % n_blocks * block;
        let k = block.min(k - from);
        let views = [view(m, k, full[2]), view(k, n, full[1]), view(m, n, full[1]), view(m, n, full[1])];
        let (compute, has_relu, bias, scales) = (COMPUTE_32F, false, None, None);
        let problem = Problem { m, n, k, batches: 1, views, compute, has_relu, bias, scales };
        let pointers = [at[0] + 4 * from, at[1] + 4 * from * full[1], to.as_ptr() as usize, to.as_mut_ptr() as usize];
        Product { problem, alpha: 1.0, beta: 1.0, pointers, split: 1, workspace: 0 }.run();
        if seed.is_some() {
            to.chunks_mut(full[1]).take(m).flat_map(|row| &mut row[..n]).for_each(|sum| *sum = without_last_bits(*sum));
        }
    }
}

/// Sums of bf16 products are nearly exact in f32, and their order would seldom show once they are bf16: sums without an order
/// keep 14 bits behind the leading one.
fn without_last_bits(sum: f32) -> f32 {
    if sum.is_finite() { f32::from_bits((sum.to_bits() + 0x100) & !0x1ff) } else { sum }
}
