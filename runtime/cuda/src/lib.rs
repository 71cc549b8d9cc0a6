//! The CUDA machine: NVIDIA's libraries, loaded at run time; kernels, compiled at run time; and the executor that runs a
//! compiled program on one GPU.
//!
//! - `library`: finds NVIDIA's libraries, and binds the functions that this crate calls.
//! - `gpu`: one GPU: its context, its streams and its memory; `gpu_info`: what is known of it before. `error`: failed calls.
//! - `kernels`: sources of the kernels, their compilation and their cache.
//! - `lower`: translates an instruction of a program into `command`s: kernel launches, matrix products, copies. The
//!   addresses of all values are known before the first step, so a machine lowers each program once (`lowered`) and replays
//!   it, between collectives as a `graph`. [`work`]: commands as plain data, for checks that run kernels elsewhere.
//! - `health`: the state of GPUs without a context on them; `xid`: the driver's error reports;
//!   `link_errors`: those of links between GPUs.
//! - `product`: matrix products through cuBLASLt; `algorithms`: the fastest ways to compute them. `cudnn`: attention through cuDNN.
//! - `rehearsal`: lets libraries load what a spare will launch.
//! - `nccl`: collectives of device operands over NCCL; `staged`: over a host communicator.
//! - `alike`: which GPUs and libraries may share a world.
//! - `ring`: copies beside programs, through pinned memory; `state_fence`: the order between them and updates. `split`: weights
//!   in two parts, which the host sees as f32.
//! - `machine`, `device`: the machine and the device behind the runtime's interface; `shared`: what machines share.
//!
//! Deliberately absent: allocation, locks and library calls other than launches in the hot loop; the legacy default
//! stream; any dependency on CUDA at build time.
#![allow(unsafe_code)] // Calls into NVIDIA's libraries, and raw addresses of device memory.

mod algorithms;
mod alike;
mod command;
mod cudnn;
mod device;
mod error;
mod estimate;
mod gpu;
mod gpu_info;
mod graph;
mod health;
mod kernels;
mod library;
mod link_errors;
mod lower;
mod lowered;
mod machine;
mod nccl;
mod product;
mod rehearsal;
mod ring;
mod shared;
mod split;
mod staged;
mod state_fence;
#[cfg(test)]
mod tests;
pub mod work;
mod xid;

pub use device::{AttentionChoice, CudaDevice};
pub use error::{CudaError, DnnError, OpenError};
pub use gpu_info::GpuInfo;
pub use kernels::{PRELUDE, SOURCES, Source};
pub use library::{CudaVersion, LibraryError, Search};
pub use nccl::Choice;
