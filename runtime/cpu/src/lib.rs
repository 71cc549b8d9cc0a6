//! The CPU machine: matrix products, fused kernels, and the executor that runs a compiled program.
//!
//! Kernels work on raw row-major buffers whose shapes were checked by the compiler; none allocates.

pub mod executor;
pub mod kernels;
pub mod matmul;
pub mod thread;

pub use executor::{AllocError, Backing, CpuMachine, ExecError, OpaqueModel, scratch_bytes};
pub use thread::{available_threads, on_device_thread};
