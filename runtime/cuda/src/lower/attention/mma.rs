//! Which attention runs on tensor cores, and the sizes of its tiles. They mirror the constants of the kernels.

use super::Operands;
use phalanx_strategies::program::DType;

/// Threads of a block.
pub(super) const THREADS: u32 = 128;

/// Elements between the rows of a tile in shared memory.
const fn pitch(head_dim: usize) -> usize {
    let width = head_dim.next_multiple_of(16);
    if width.is_multiple_of(64) { width } else { width + 8 }
}

/// Whether the operands can be operands of tensor cores, loaded 16 bytes at a time.
fn is_half_width(x: &Operands) -> bool {
    matches!(x.q.dtype, DType::Bf16 | DType::F16) && x.part.heads.head_dim.is_multiple_of(8)
}

/// The forward kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct MmaForward {
    /// Queries of a tile.
    pub(super) queries: usize,
    pub(super) shared_bytes: usize,
}

impl MmaForward {
    /// None if the operation needs the kernel in f32 arithmetic.
    pub(super) fn of(x: &Operands) -> Option<MmaForward> {
        let head_dim = x.part.heads.head_dim;
        // The largest score is found before the scale is applied, which must keep the order.
        if !is_half_width(x) || head_dim > 256 || x.part.heads.scale <= 0.0 {
            return None;
        }
        let queries = if head_dim <= 128 { 128 } else { 64 };
        let keys = if head_dim <= 64 {
            64
        } else if head_dim <= 128 {
            32
        } else {
            16
        };
        // The queries, and two stages of keys and values.
        let shared_bytes = (queries + 4 * keys) * pitch(head_dim) * x.q.dtype.size_bytes();
        Some(MmaForward { queries, shared_bytes })
    }
}

/// The kernels of the adjoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct MmaBackward {
    /// Queries of a tile of `attention_mma_dq`.
    pub(super) queries: usize,
    /// Keys of a tile of `attention_mma_dkv`.
    pub(super) keys: usize,
    /// Queries of a stage of `attention_mma_dkv`.
    pub(super) stage_queries: usize,
    pub(super) dq_shared_bytes: usize,
    pub(super) dkv_shared_bytes: usize,
}

impl MmaBackward {
    /// None if the operation needs the kernels in f32 arithmetic.
    pub(super) fn of(x: &Operands) -> Option<MmaBackward> {
        let head_dim = x.part.heads.head_dim;
        // Gradients of wider heads do not fit in registers.
        if !is_half_width(x) || head_dim > 128 {
            return None;
        }
        let is_narrow = head_dim <= 64;
        let (queries, keys, stage) = if is_narrow { (128, 128, 64) } else { (128, 64, 32) };
        // Two operands of the block's own tile, and two of each of two stages.
        let shared_bytes = |own: usize| (2 * own + 4 * stage) * pitch(head_dim) * x.q.dtype.size_bytes();
        let (dq_shared_bytes, dkv_shared_bytes) = (shared_bytes(queries), shared_bytes(keys));
        Some(MmaBackward { queries, keys, stage_queries: stage, dq_shared_bytes, dkv_shared_bytes })
    }
}
