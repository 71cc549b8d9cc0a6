//! The CPU machine: matrix products, fused kernels, and the executor that runs a compiled program.
//!
//! Kernels work on raw row-major buffers, whose shapes the compiler has checked; they never allocate.

mod device;
mod executor;
pub mod isa;
pub mod kernels;
pub mod matmul;
mod prefetch;
mod tasks;
mod team;
mod thread;

pub use device::CpuDevice;
