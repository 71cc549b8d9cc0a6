//! Sums of scalars, of squares and along trees. All have a fixed order.

use super::{Lowering, THREADS, type_name};
use crate::command::{Args, Buffer};
use crate::kernels::{Instance, SCALARS, SQUARES, TREE_SUM};
use phalanx_strategies::program::{DType, Hyper};
use std::collections::BTreeMap;

/// Scalars of one launch.
const TERMS: usize = 240;
/// Elements of a vector of f64 that one block sums; a longer one is summed by several blocks first.
const VALUES_OF_BLOCK: usize = 1 << 14;
const VALUE_THREADS: u32 = 1024;
/// Most blocks of a sum, and the elements of each at least.
const SUM_BLOCKS_MAX: usize = 1024;
const SQUARES_OF_BLOCK: usize = 1 << 13;
/// Runs of elements whose squares one launch sums, and the threads that add the sums of blocks.
const RUNS: usize = 120;
const SUM_THREADS: u32 = 1024;
/// Operands of a tree sum, and its threads.
const NODES: usize = 32;
const TREE_THREADS: u32 = 128;

impl Lowering {
    /// `[s…] -> [s]`, in order; a vector is summed first. Runs of several elements are summed one after the other.
    pub(super) fn sum(&mut self) {
        let (terms, out) = (self.reads.clone(), self.writes[0]);
        if out.len() == 1 {
            return self.sum_all(&terms, out);
        }
        if terms.is_empty() {
            self.zero(out);
        }
        for (i, term) in terms.into_iter().enumerate() {
            let args = Args::new().ptr(term).int(term.len() / out.len()).int(out.len());
            let args = args.ptr_or_null((i > 0).then_some(out)).ptr(out);
            self.launch_strided(Instance::of(SCALARS, "sum_runs"), out.len(), args);
        }
    }

    fn sum_all(&mut self, values: &[Buffer], out: Buffer) {
        if let [vector] = values
            && vector.len() > 1
        {
            return self.sum_values(*vector, None, out);
        }
        let mut terms = Vec::with_capacity(values.len());
        for value in values.iter().filter(|value| value.len() > 0) {
            let mut term = *value;
            if value.len() > 1 {
                term = self.take(1, 1, DType::F64);
                self.sum_values(*value, None, term);
            }
            terms.push(term.address);
        }
        let n_launches = terms.len().div_ceil(TERMS).max(1);
        for i in 0..n_launches {
            let these = &terms[i * TERMS..terms.len().min((i + 1) * TERMS)];
            let carried = (i > 0).then_some(out);
            let args = Args::new().words(&padded::<TERMS>(these)).int(these.len()).ptr_or_null(carried).ptr(out);
            self.launch(Instance::of(SCALARS, "sum_terms"), [1, 1, 1], 256, 0, args);
        }
    }

    /// `out = (carried) + the sum of a vector`; `out` may be what is carried.
    pub(super) fn sum_values(&mut self, x: Buffer, carried: Option<Buffer>, out: Buffer) {
        let kernel = || Instance::of(SCALARS, "sum_values");
        let n_blocks = x.len().div_ceil(VALUES_OF_BLOCK).min(SUM_BLOCKS_MAX);
        let mut last = x;
        if n_blocks > 1 {
            last = self.take(1, n_blocks, DType::F64);
            let args = Args::new().ptr(x).long(x.len()).ptr_or_null(None).ptr(last);
            self.launch(kernel(), [n_blocks as u32, 1, 1], VALUE_THREADS, 0, args);
        }
        let args = Args::new().ptr(last).long(last.len()).ptr_or_null(carried).ptr(out);
        let threads = last.len().next_multiple_of(32).clamp(32, VALUE_THREADS as usize) as u32;
        self.launch(kernel(), [1, 1, 1], threads, 0, args);
    }

    /// `[s…] -> [v]`. Of several scalars with the same place, the last one counts, as on the CPU: threads that write to the
    /// same place have no order.
    pub(super) fn assemble(&mut self, places: &[usize]) {
        let out = self.writes[0];
        self.zero(out);
        // Elements of vectors are terms like any other.
        let elements = |(place, term): (&usize, &Buffer)| {
            let (first, n, at) = (place * term.len(), term.len(), term.address);
            (0..n as u64).map(move |i| (first as u64 + i, at + i * size_of::<f64>() as u64))
        };
        let term_of: BTreeMap<u64, u64> = places.iter().zip(&self.reads).flat_map(elements).collect();
        let (places, addresses): (Vec<u64>, Vec<u64>) = term_of.into_iter().unzip();
        for (addresses, places) in addresses.chunks(TERMS).zip(places.chunks(TERMS)) {
            let args = Args::new().words(&padded::<TERMS>(addresses)).words(&padded::<TERMS>(places));
            let args = args.int(places.len()).ptr(out);
            self.launch(Instance::of(SCALARS, "place_terms"), [1, 1, 1], 256, 0, args);
        }
    }

    /// `[s…, hyper] -> [norm, coefficient]`.
    pub(super) fn clip_coefficient(&mut self, max_norm: Option<f64>) {
        let (sums, hyper) = (self.reads[..self.reads.len() - 1].to_vec(), self.reads[self.reads.len() - 1]);
        let total = self.take(1, 1, DType::F64);
        self.sum_all(&sums, total);
        let args = Args::new().ptr(total).ptr(hyper.elements(Hyper::LOSS_SCALE, 1));
        let args = args.double(max_norm.unwrap_or(f64::INFINITY)).ptr(self.writes[0]).ptr(self.writes[1]);
        self.launch(Instance::of(SCALARS, "clip_coefficient"), [1, 1, 1], 32, 0, args);
    }

    /// `[g] -> [s]`.
    pub(super) fn sum_squares(&mut self, elements: Option<(usize, usize)>) {
        let (g, out) = (self.reads[0], self.writes[0]);
        let (first, len) = elements.unwrap_or((0, g.len()));
        let g = g.elements(first, len);
        let n_blocks = len.div_ceil(SQUARES_OF_BLOCK).clamp(1, SUM_BLOCKS_MAX);
        let parts = if n_blocks == 1 { out } else { self.take(1, n_blocks, DType::F64) };
        let kernel = |name| Instance::of(SQUARES, name).with("X", type_name(g.dtype));
        let args = Args::of_run(&[g.address, len as u64, parts.address], n_blocks, RUNS);
        self.launch(kernel("sum_squares"), [n_blocks as u32, 1, 1], THREADS, 0, args);
        if n_blocks > 1 {
            let args = Args::of_run(&[parts.address, n_blocks as u64, out.address], 1, RUNS);
            self.launch(kernel("sum_of_blocks"), [1, 1, 1], SUM_THREADS, 0, args);
        }
    }

    /// `[g] -> [s]`, a warp for each block of elements.
    pub(super) fn sum_squares_blocks(&mut self, block: usize) {
        let (g, out) = (self.reads[0], self.writes[0]);
        let kernel = Instance::of(SQUARES, "sum_squares_blocks").with("X", type_name(g.dtype));
        self.launch_strided(kernel, out.len() * 32, Args::new().ptr(g).long(g.len()).long(block).ptr(out));
    }

    /// `[nodes…] -> [sum]`.
    pub(super) fn tree_sum(&mut self, n_leaves: usize, n_ranks: usize) {
        let (sum, n) = (self.writes[0], self.writes[0].len());
        let nodes: Vec<u64> = self.reads.iter().map(|node| node.address).collect();
        let width = if n.is_multiple_of(4) { 4 } else { 1 };
        // A partial sum for each bit of the number of leaves.
        let shared_bytes = (n_leaves.ilog2() + 1) * TREE_THREADS * (width * size_of::<f32>()) as u32;
        let blocks = (n / width).div_ceil(TREE_THREADS as usize).min(2 * SUM_BLOCKS_MAX) as u32;
        let args = Args::new().words(&padded::<NODES>(&nodes)).ptr(sum).long(n).int(n_leaves).int(n_ranks);
        self.launch(Instance::of(TREE_SUM, "tree_sum"), [blocks, 1, 1], TREE_THREADS, shared_bytes, args);
    }
}

/// An array in a kernel's arguments; the kernel uses its first elements.
fn padded<const N: usize>(words: &[u64]) -> [u64; N] {
    let mut all = [0; N];
    all[..words.len()].copy_from_slice(words);
    all
}
