//! The CPU machine: element types, matrix products and fused kernels.
//!
//! Everything here works on raw row-major buffers whose shapes were checked by the compiler; no function allocates.

pub mod element;
pub mod kernels;
pub mod matmul;
