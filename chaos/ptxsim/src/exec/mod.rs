//! Execution: a block at a time, its warps interleaved by a seed.

mod access;
mod atomic;
mod barrier;
mod block;
mod collective;
mod copy;
mod flow;
mod matrix;
mod mbarrier;
mod mma;
mod pending;
mod scalar;
mod step;
mod swizzle;
mod tensor;
mod warp;
mod wgmma;

pub(crate) use block::{Block, Launch, Limits};
pub use swizzle::Swizzle;
pub use tensor::TensorMap;
