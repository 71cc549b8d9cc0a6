//! Attention over whole rows and over the parts of context-parallel ranks, and the adjoints.

mod library;
mod mma;

use self::mma::{MmaBackward, MmaForward};
use super::{Lowering, type_name};
use crate::command::{Args, Buffer};
use crate::kernels::{ATTENTION, ATTENTION_MMA_BACKWARD, ATTENTION_MMA_FORWARD, ATTENTION_PREPARE, Instance, Source};
use phalanx_strategies::program::{Attention, AttentionPart, DType};

/// Threads of a block of all kernels but that of the bounds.
const THREADS: u32 = 256;
/// Widest head whose tiles fit in the shared memory of a block.
const HEAD_DIM_MAX: usize = 512;

/// Queries, keys and values, the tokens that they belong to, and the mask.
#[derive(Clone, Copy, Debug)]
struct Operands {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    doc_start: Buffer,
    part: AttentionPart,
    /// Tokens of this rank.
    n_tokens: usize,
    q_stride: usize,
    kv_stride: usize,
}

impl Operands {
    /// Of whole rows, from packed qkv.
    fn whole(a: &Attention, qkv: Buffer, doc_start: Buffer) -> Operands {
        let part = AttentionPart { heads: *a, n_ranks: 1, q_rank: 0, kv_rank: 0, n_kv_ranks: 1, carried: false };
        let [q, k, v] = packed(a, qkv);
        let columns = a.qkv_columns();
        Operands { q, k, v, doc_start, part, n_tokens: qkv.rows, q_stride: columns, kv_stride: columns }
    }

    /// Of a part, from queries, and keys and values.
    fn part(part: &AttentionPart, q: Buffer, kv: Buffer, doc_start: Buffer) -> Operands {
        let [k, v] = halves(kv);
        Operands { q, k, v, doc_start, part: *part, n_tokens: q.rows, q_stride: q.cols, kv_stride: kv.cols }
    }

    /// `Geometry` of the kernels.
    fn geometry(&self) -> [u64; 11] {
        let AttentionPart { heads: a, n_ranks, q_rank, kv_rank, n_kv_ranks, .. } = self.part;
        // Indexes within a row have 31 bits.
        let window = a.window.unwrap_or(usize::MAX).min(i32::MAX as usize);
        let words = [self.rows(), a.seq_len, a.n_heads, a.n_kv_heads, window, n_ranks, q_rank, kv_rank, n_kv_ranks];
        let strides = [self.q_stride, self.kv_stride];
        let mut all = words.into_iter().chain(strides).map(|word| word as u64);
        std::array::from_fn(|_| all.next().expect("as many words as the array has"))
    }

    /// Rows of the batch.
    fn rows(&self) -> usize {
        self.n_tokens / self.part.heads.seq_len
    }

    /// Runs of neighbouring tokens that a rank has of a row: see `passes::context_parallel::chunks`.
    fn runs_of_rank(&self) -> usize {
        if self.part.n_ranks == 1 { 1 } else { 2 }
    }

    /// Tiles of `tile` queries of a row.
    fn query_tiles(&self, tile: usize) -> usize {
        let runs = self.runs_of_rank();
        runs * (self.part.heads.seq_len / runs).div_ceil(tile)
    }

    /// Tiles of `tile` keys of a row.
    fn key_tiles(&self, tile: usize) -> usize {
        self.part.n_kv_ranks * self.query_tiles(tile)
    }

    /// Elements of prepared arrays that have one for each query; see `padded_queries` of the kernels.
    fn padded_queries(&self) -> usize {
        let runs = self.runs_of_rank();
        self.rows() * runs * (self.part.heads.seq_len / runs).next_multiple_of(4)
    }

    /// The kernel for these element types; `of_output` is the type of outputs and of gradients.
    fn kernel(&self, source: Source, name: &'static str, of_output: DType) -> Instance {
        Instance::of(source, name)
            .with("X", type_name(self.q.dtype))
            .with("Y", type_name(of_output))
            .with("HEAD_DIM", self.part.heads.head_dim)
    }
}

/// Queries, keys and values of packed qkv.
fn packed(a: &Attention, qkv: Buffer) -> [Buffer; 3] {
    let (q, k) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
    [0, q, q + k].map(|column| from_column(qkv, column))
}

/// Keys and values of packed kv.
fn halves(kv: Buffer) -> [Buffer; 2] {
    [0, kv.cols / 2].map(|column| from_column(kv, column))
}

/// The memory from a column of the first row on; the rows have their distance still.
fn from_column(x: Buffer, column: usize) -> Buffer {
    if x.len() == 0 { x } else { x.elements(column, x.len() - column) }
}

/// The tiles of the kernels in f32: their edge, and the bytes of a tile of tokens and of a tile of weights. The kernels on tensor
/// cores take at most 99 KiB, which every GPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiles {
    edge: usize,
    of_tokens: usize,
    of_weights: usize,
}

/// Bytes of shared variables of the kernels, for tiles of this edge.
const fn static_bytes(edge: usize) -> usize {
    edge * (size_of::<i32>() + size_of::<[f32; 2]>())
}

impl Tiles {
    /// The largest tiles with which all kernels fit in the shared memory of a block.
    ///
    /// # Panics
    /// If heads are too wide for the GPU.
    fn of(head_dim: usize, shared_bytes_max: usize) -> Tiles {
        assert!(
            head_dim <= HEAD_DIM_MAX,
            "the CUDA machine has heads of at most {HEAD_DIM_MAX} columns, not {head_dim}"
        );
        // Sums of wider heads would not stay in registers.
        let largest = if head_dim <= 128 {
            64
        } else if head_dim <= 256 {
            32
        } else {
            16
        };
        let fits = |tiles: &Tiles| tiles.of_adjoint() + static_bytes(tiles.edge) <= shared_bytes_max;
        let found = [64, 32, 16].into_iter().filter(|edge| *edge <= largest).map(|edge| Tiles::with(edge, head_dim));
        found.into_iter().find(fits).unwrap_or_else(|| {
            panic!("heads of {head_dim} columns need more shared memory than the {shared_bytes_max} bytes of this GPU")
        })
    }

    fn with(edge: usize, head_dim: usize) -> Tiles {
        let pitch = head_dim.next_multiple_of(16) + 4;
        let f32s = size_of::<f32>();
        Tiles { edge, of_tokens: edge * pitch * f32s, of_weights: edge * (edge + 4) * f32s }
    }

    /// What the kernel with the most tiles takes.
    fn of_adjoint(&self) -> usize {
        4 * self.of_tokens + self.of_weights
    }

    /// A tile of tokens whose memory a tile of weights takes later.
    fn of_either(&self) -> usize {
        self.of_tokens.max(self.of_weights)
    }
}

/// Where the gradients go, and earlier ones that are added.
#[derive(Clone, Copy, Debug)]
struct Gradients {
    dq: Buffer,
    dq0: Option<Buffer>,
    dq_stride: usize,
    dk: Buffer,
    dv: Buffer,
    dk0: Option<Buffer>,
    dv0: Option<Buffer>,
    dkv_stride: usize,
}

impl Lowering {
    /// `[qkv, doc_start] -> [o, lse]`.
    pub(super) fn attention(&mut self, a: &Attention) {
        if let Some(shape) = self.engines.cudnn {
            return self.forward_by_library(a, shape);
        }
        let x = Operands::whole(a, self.reads[0], self.reads[1]);
        self.forward(&x, None);
    }

    /// `[q, kv, doc_start, (o0, lse0)] -> [o, lse]`.
    pub(super) fn attention_part(&mut self, part: &AttentionPart) {
        let x = Operands::part(part, self.reads[0], self.reads[1], self.reads[2]);
        let carried = part.carried.then(|| (self.reads[3], self.reads[4]));
        self.forward(&x, carried);
    }

    /// `[qkv, doc_start, o, lse, do] -> [dqkv]`.
    pub(super) fn attention_backward(&mut self, a: &Attention) {
        if let Some(shape) = self.engines.cudnn {
            return self.backward_by_library(a, shape);
        }
        let (qkv, dqkv) = (self.reads[0], self.writes[0]);
        let [dq, dk, dv] = packed(a, dqkv);
        let stride = a.qkv_columns();
        let to = Gradients { dq, dq0: None, dq_stride: stride, dk, dv, dk0: None, dv0: None, dkv_stride: stride };
        let known = [self.reads[2], self.reads[3], self.reads[4]];
        self.backward(&Operands::whole(a, qkv, self.reads[1]), known, &to);
    }

    /// `[q, kv, doc_start, o, lse, do, (dq0, dkv0)] -> [dq, dkv]`.
    pub(super) fn attention_part_backward(&mut self, part: &AttentionPart, carried_q: bool, carried_kv: bool) {
        let (dq, dkv) = (self.writes[0], self.writes[1]);
        let dq0 = carried_q.then(|| self.reads[6]);
        let dkv0 = carried_kv.then(|| halves(self.reads[6 + usize::from(carried_q)]));
        let [dk, dv] = halves(dkv);
        let (dk0, dv0) = (dkv0.map(|halves| halves[0]), dkv0.map(|halves| halves[1]));
        let to = Gradients { dq, dq0, dq_stride: dq.cols, dk, dv, dk0, dv0, dkv_stride: dkv.cols };
        let known = [self.reads[3], self.reads[4], self.reads[5]];
        self.backward(&Operands::part(part, self.reads[0], self.reads[1], self.reads[2]), known, &to);
    }

    fn forward(&mut self, x: &Operands, carried: Option<(Buffer, Buffer)>) {
        let (o, lse, heads) = (self.writes[0], self.writes[1], x.part.heads);
        let args = Args::new().ptr(x.q).ptr(x.k).ptr(x.v).ptr(x.doc_start);
        let args = args.ptr_or_null(carried.map(|(o, _)| o)).ptr_or_null(carried.map(|(_, lse)| lse));
        let args = args.ptr(o).ptr(lse).words(&x.geometry()).float(heads.scale);
        let (kernel, tile, threads, shared_bytes) = match MmaForward::of(x) {
            Some(mma) => {
                let kernel = x.kernel(ATTENTION_MMA_FORWARD, "attention_mma_forward", o.dtype);
                (kernel, mma.queries, mma::THREADS, mma.shared_bytes)
            }
            None => {
                let tiles = Tiles::of(heads.head_dim, self.engines.shared_bytes_max);
                let shared_bytes = 2 * tiles.of_tokens + tiles.of_either();
                let kernel = x.kernel(ATTENTION, "attention_forward", o.dtype).with("TILE", tiles.edge);
                (kernel, tiles.edge, THREADS, shared_bytes)
            }
        };
        let grid = [(x.rows() * heads.n_heads) as u32, x.query_tiles(tile) as u32, 1];
        self.launch(kernel, grid, threads, shared_bytes as u32, args);
    }

    fn backward(&mut self, x: &Operands, [o, lse, dout]: [Buffer; 3], to: &Gradients) {
        let heads = x.part.heads;
        let kernels = BackwardKernels::of(x, self.engines.shared_bytes_max);
        // Tensor cores want gradients of outputs in the type of the other operand.
        let rounded = (kernels.source == ATTENTION_MMA_BACKWARD && dout.dtype != x.q.dtype)
            .then(|| self.take(dout.rows, dout.cols, x.q.dtype));
        let Prepared { statistics, from, bounds } = self.prepare(x, [o, lse, dout], rounded, kernels.stage_queries);
        let dout = rounded.unwrap_or(dout);

        let args = Args::new().ptr(x.q).ptr(x.k).ptr(x.v).ptr(x.doc_start).ptr(statistics).ptr(dout);
        let args = args.ptr_or_null(to.dq0).ptr(to.dq).words(&x.geometry()).long(to.dq_stride).float(heads.scale);
        let grid = [(x.rows() * heads.n_heads) as u32, x.query_tiles(kernels.queries) as u32, 1];
        let kernel = kernels.kernel(x, kernels.dq, to.dq.dtype);
        self.launch(kernel, grid, kernels.threads, kernels.dq_shared_bytes as u32, args);

        let args = Args::new().ptr(x.q).ptr(x.k).ptr(x.v).ptr(from).ptr(bounds).ptr(statistics).ptr(dout);
        let args = args.ptr_or_null(to.dk0).ptr_or_null(to.dv0).ptr(to.dk).ptr(to.dv);
        let args = args.words(&x.geometry()).long(to.dkv_stride).float(heads.scale);
        let grid = [(x.rows() * heads.n_kv_heads) as u32, x.key_tiles(kernels.keys) as u32, 1];
        let kernel = kernels.kernel(x, kernels.dkv, to.dk.dtype);
        self.launch(kernel, grid, kernels.threads, kernels.dkv_shared_bytes as u32, args);
    }

    /// Fills the arrays of `attention_prepare.cu`; `rounded` gets `dout` in the type of queries.
    fn prepare(&mut self, x: &Operands, [o, lse, dout]: [Buffer; 3], rounded: Option<Buffer>, tile: usize) -> Prepared {
        let (heads, n) = (x.part.heads, x.padded_queries());
        let kernel = |name| x.kernel(ATTENTION_PREPARE, name, o.dtype).with("TILE", tile);
        let statistics = self.take(heads.n_heads * n, 2, DType::F32);
        // As many lanes as the kernel gives to a head.
        let vector = 16 / o.dtype.size_bytes();
        let parts = heads.head_dim / if heads.head_dim.is_multiple_of(vector) { vector } else { 1 };
        let lanes = parts.next_power_of_two().clamp(2, 32);
        let blocks = (n * heads.n_heads * lanes).div_ceil(THREADS as usize) as u32;
        let args = Args::new().ptr(o).ptr(lse).ptr(dout).ptr(statistics).ptr_or_null(rounded).words(&x.geometry());
        self.launch(kernel("attention_statistics"), [blocks, 1, 1], THREADS, 0, args);

        let tiles = x.query_tiles(tile);
        let (from, bounds) = (self.take(1, n, DType::I32), self.take(x.rows() * tiles, 2, DType::I32));
        let args = Args::new().ptr(x.doc_start).ptr(from).ptr(bounds).words(&x.geometry()).int(tiles);
        self.launch(kernel("attention_bounds"), [(x.rows() * tiles) as u32, 1, 1], 32, 0, args);
        Prepared { statistics, from, bounds }
    }
}

/// Scratch of the adjoint: see `attention_prepare.cu`.
#[derive(Clone, Copy, Debug)]
struct Prepared {
    statistics: Buffer,
    from: Buffer,
    bounds: Buffer,
}

/// The kernels of the adjoint, and the sizes of their tiles.
#[derive(Clone, Copy, Debug)]
struct BackwardKernels {
    source: Source,
    dq: &'static str,
    dkv: &'static str,
    threads: u32,
    /// Queries of a tile, and keys of a tile.
    queries: usize,
    keys: usize,
    /// Queries that the kernel of keys loads at a time.
    stage_queries: usize,
    dq_shared_bytes: usize,
    dkv_shared_bytes: usize,
}

impl BackwardKernels {
    /// One of the two kernels; those in f32 are compiled for the edge of their tiles.
    fn kernel(&self, x: &Operands, name: &'static str, of_output: DType) -> Instance {
        let kernel = x.kernel(self.source, name, of_output);
        if self.source == ATTENTION { kernel.with("TILE", self.queries) } else { kernel }
    }

    fn of(x: &Operands, shared_bytes_max: usize) -> BackwardKernels {
        if let Some(mma) = MmaBackward::of(x) {
            let MmaBackward { queries, keys, stage_queries, dq_shared_bytes, dkv_shared_bytes } = mma;
            let (dq, dkv) = ("attention_mma_dq", "attention_mma_dkv");
            let (source, threads) = (ATTENTION_MMA_BACKWARD, mma::THREADS);
            return BackwardKernels {
                source,
                dq,
                dkv,
                threads,
                queries,
                keys,
                stage_queries,
                dq_shared_bytes,
                dkv_shared_bytes,
            };
        }
        let tiles = Tiles::of(x.part.heads.head_dim, shared_bytes_max);
        BackwardKernels {
            source: ATTENTION,
            dq: "attention_dq",
            dkv: "attention_dkv",
            threads: THREADS,
            queries: tiles.edge,
            keys: tiles.edge,
            stage_queries: tiles.edge,
            dq_shared_bytes: 3 * tiles.of_tokens + tiles.of_either(),
            dkv_shared_bytes: tiles.of_adjoint(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_the_largest_that_fit_in_a_block_of_the_gpu() {
        let edges = |head_dim| [99, 163, 227].map(|kib| Tiles::of(head_dim, kib << 10).edge);

        assert_eq!(edges(64), [64, 64, 64]);
        assert_eq!([96, 128].map(edges), [[32, 64, 64]; 2]);
        assert_eq!([136, 256].map(edges), [[32; 3], [16, 32, 32]]);
        assert_eq!(edges(384), [16, 16, 16]);
    }
}
