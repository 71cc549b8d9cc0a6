//! Operands of products in FP8.
//!
//! Matrix units multiply e4m3 numbers whose rows run along the sums. Weights are stored that way for the forward pass; for gradients they
//! are transposed before each product, which takes less time than the product gains, and half of the memory of two copies. Where
//! cuBLASLt has no such products, the same numbers are multiplied in bf16, in which they are exact.

use super::rows::{threads_of_row, vector_len};
use super::{Lowering, type_name};
use crate::command::{Args, Buffer};
use crate::kernels::{FP8_ROWS, FP8_WEIGHTS, Instance, UNPACK};
use crate::product::Matrix;
use phalanx_strategies::program::packing::E4M3_STEP;
use phalanx_strategies::program::{DType, MatMul};

/// Edge of the tiles of a transposition.
const TILE: usize = 128;
/// Elements of a row that each thread holds, the longest rows for which it holds so few, and all that a block can hold.
const HELD: [(usize, usize); 3] = [(8, 4096), (16, 8192), (32, 32 * THREADS_MAX)];
/// Most threads of a block, and of one with a longer row than it can hold, whose threads need more registers.
const THREADS_MAX: usize = 1024;
const THREADS_MAX_LONG: usize = 512;
/// Elements of a thread in elementwise kernels.
const WIDTH: usize = 8;

/// The operands of a product, and the addresses of the scales of op(a)'s rows and of op(b)'s columns.
pub(super) struct Operands {
    pub(super) a: Matrix,
    pub(super) b: Matrix,
    pub(super) scales: Option<[u64; 2]>,
}

impl Lowering {
    /// The operands `a` and `b`, in bf16 unless `b` is stored as e4m3, as a product in FP8 multiplies them.
    pub(super) fn fp8_operands(&mut self, m: &MatMul, a: Buffer, b: Buffer) -> Operands {
        let (first, cols) = m.a_columns.map_or((0, a.cols), |columns| (columns.start, columns.len));
        if !self.engines.has_fp8 {
            let rounded = self.take(a.rows, cols, DType::Bf16);
            self.round_rows((a, first), rounded, None);
            let weight = self.take(b.rows, b.cols, DType::Bf16);
            self.round_weight(b, weight);
            let [a, b] = [(rounded, false), (weight, m.trans_b)].map(|(buffer, transposed)| matrix(buffer, transposed));
            return Operands { a, b, scales: None };
        }
        let n = if m.trans_b { b.rows } else { b.cols };
        let (rounded, scales) = (self.take(a.rows, cols, DType::E4m3), self.take(a.rows, 1, DType::F32));
        let steps = self.take(n, 1, DType::F32);
        self.round_rows((a, first), rounded, Some((scales, steps)));
        let weight = match (b.dtype, m.trans_b) {
            (DType::E4m3, true) => b,
            (_, true) => {
                let weight = self.take(b.rows, b.cols, DType::E4m3);
                self.round_weight(b, weight);
                weight
            }
            (_, false) => self.transposed_weight(b),
        };
        Operands { a: matrix(rounded, false), b: matrix(weight, true), scales: Some([scales.address, steps.address]) }
    }

    /// `y` = the columns of `x` from `first` on, rounded; and the scales of their rows, and those of the columns of a weight.
    fn round_rows(&mut self, (x, first): (Buffer, usize), y: Buffer, scales: Option<(Buffer, Buffer)>) {
        let vector = match vector_len(&[DType::Bf16], &[x.cols, first, y.cols]) {
            // Four numbers of a byte are stored at once.
            2 => 1,
            other => other,
        };
        let held = HELD.iter().find(|(_, longest)| y.cols <= *longest).map(|(elements, _)| *elements);
        let kernel = if held.is_some() { "round_rows" } else { "round_long_rows" };
        let items = held.map_or(1, |elements| elements / vector);
        let kernel =
            Instance::of(FP8_ROWS, kernel).with("Y", type_name(y.dtype)).with("V", vector).with("ITEMS", items);
        let threads_max = if held.is_some() { THREADS_MAX } else { THREADS_MAX_LONG };
        let threads = threads_of_row(y.cols.div_ceil(held.unwrap_or(vector)), threads_max);
        let from = Buffer { address: x.address + (first * x.dtype.size_bytes()) as u64, ..x };
        let (own, others) = (scales.map(|scales| scales.0), scales.map(|scales| scales.1));
        let args = Args::new().ptr(from).long(x.cols).ptr(y).ptr_or_null(own).int(y.cols);
        let args = args.ptr_or_null(others).int(others.map_or(0, |others| others.len())).float(E4M3_STEP);
        self.launch(kernel, [y.rows as u32, 1, 1], threads as u32, 0, args);
    }

    /// `y` = a weight in bf16 or e4m3, rounded, in the other type or in bf16.
    fn round_weight(&mut self, x: Buffer, y: Buffer) {
        let args = Args::new().ptr(x).ptr(y).long(y.len());
        let (kernel, of_thread) = match x.dtype {
            DType::E4m3 => (Instance::of(UNPACK, "unpack_e4m3"), 4),
            _ => (Instance::of(FP8_WEIGHTS, "round_weights").with("X", type_name(x.dtype)), WIDTH),
        };
        self.launch_strided(kernel.with("Y", type_name(y.dtype)), y.len() / of_thread, args);
    }

    /// The transpose of a weight, as e4m3.
    fn transposed_weight(&mut self, x: Buffer) -> Buffer {
        let y = self.take(x.cols, x.rows, DType::E4m3);
        let kernel = Instance::of(FP8_WEIGHTS, "transpose_weights");
        let kernel = kernel.with("X", type_name(x.dtype)).with("Y", type_name(y.dtype));
        let grid = [x.cols.div_ceil(TILE) as u32, x.rows.div_ceil(TILE) as u32, 1];
        self.launch(kernel, grid, 256, 0, Args::new().ptr(x).ptr(y).int(x.rows).int(x.cols));
        y
    }
}

fn matrix(buffer: Buffer, is_transposed: bool) -> Matrix {
    Matrix { address: buffer.address, stride: buffer.cols, dtype: buffer.dtype, is_transposed }
}
