//! Norm of each query and key head.

use super::rows::{blocks_for, vector_len};
use super::{Lowering, THREADS, type_name};
use crate::command::{Args, Buffer};
use crate::kernels::{HEAD_NORM, Instance};
use phalanx_strategies::program::{Attention, DType};

/// How heads are divided among threads.
struct Division {
    vector: usize,
    /// Threads of a head.
    lanes: usize,
    /// Vectors of each thread.
    items: usize,
}

impl Division {
    fn of(heads: &Attention, qkv: Buffer) -> Division {
        let vector = vector_len(&[qkv.dtype], &[heads.head_dim]);
        let lanes = (heads.head_dim / vector).next_power_of_two().min(32);
        Division { vector, lanes, items: heads.head_dim.div_ceil(vector * lanes) }
    }

    fn instance(&self, name: &'static str, dtype: DType) -> Instance {
        let typed = Instance::of(HEAD_NORM, name).with("X", type_name(dtype));
        typed.with("V", self.vector).with("LANES", self.lanes).with("ITEMS", self.items)
    }

    /// Blocks that hold `n` heads.
    fn blocks(&self, n: usize) -> usize {
        n.div_ceil(THREADS as usize / self.lanes)
    }
}

fn counts(args: Args, heads: &Attention, rows: usize) -> (Args, usize) {
    let n_heads = heads.n_heads + 2 * heads.n_kv_heads;
    let args = args.int(heads.head_dim).int(heads.n_heads).int(heads.n_kv_heads).int(n_heads).int(rows * n_heads);
    (args, rows * n_heads)
}

impl Lowering {
    /// A few threads per head, values included.
    pub(super) fn head_norm(&mut self, heads: &Attention, eps: f32) {
        let (qkv, [out, rstd]) = (self.reads[0], [self.writes[0], self.writes[1]]);
        let division = Division::of(heads, qkv);
        let args = Args::new().ptr(qkv).ptr(self.reads[1]).ptr(self.reads[2]).ptr(out).ptr(rstd);
        let (args, n) = counts(args, heads, qkv.rows);
        let kernel = division.instance("head_norm", qkv.dtype);
        self.launch(kernel, [division.blocks(n) as u32, 1, 1], THREADS, 0, args.float(eps));
    }

    /// Threads run over heads and keep their share of the gains' gradients; a second launch adds the shares.
    pub(super) fn head_norm_backward(&mut self, heads: &Attention, residual: bool) {
        let (qkv, [dqkv, dgain_q, dgain_k]) = (self.reads[0], [self.writes[0], self.writes[1], self.writes[2]]);
        let division = Division::of(heads, qkv);
        let n = qkv.rows * (heads.n_heads + 2 * heads.n_kv_heads);
        let blocks = blocks_for(division.blocks(n), THREADS as usize, 1024);
        let parts = self.take(blocks, 2 * heads.head_dim, DType::F32);
        let args = Args::new().ptr(qkv).ptr(self.reads[1]).ptr(self.reads[2]).ptr(self.reads[3]).ptr(self.reads[4]);
        let (args, _) = counts(args.ptr(dqkv).ptr(parts), heads, qkv.rows);
        let kernel = division.instance("head_norm_backward", qkv.dtype);
        self.launch(kernel, [blocks as u32, 1, 1], THREADS, 0, args);
        let base = |i: usize| residual.then(|| self.reads[i]);
        self.sum_parts(parts, &[(base(5), dgain_q), (base(6), dgain_k)]);
    }
}
