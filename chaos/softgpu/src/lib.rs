//! A GPU in software: stand-ins for NVIDIA's libraries, for tests.
//!
//! One shared library holds the parts of libcuda, libnvrtc, libcublasLt, libcudnn, libnccl and libnvidia-ml that Phalanx
//! calls, by the names and semantics of NVIDIA's. An [`Installation`] is a folder with thin libraries of the names that programs
//! load. Kernels are the unchanged CUDA C++, compiled by the host's compiler behind the headers in `shim/`.
//!
//! | module | is |
//! |---|---|
//! | `install` | the folder of libraries; the only part that tests call as Rust |
//! | `environment`, `settings`, `stats` | environment variables, `softgpu_set`, `softgpu_stat` |
//! | `engine` | streams, events and graphs as queues that one thread works off in any legal order; planted faults |
//! | `memory` | poisoned allocations between guard pages, closed to the host; what ends a process that leaves them |
//! | `module`, `nvrtc` | kernels: their images, their compilation |
//! | `driver`, `cublaslt`, `cudnn`, `nccl`, `nvml` | the C functions |
//!
//! Deliberately absent: timing of a GPU, tensor-core rounding, memory pools, textures, cooperative launches, clusters,
//! IPC, peer access rules. README.md lists what is not imitated.
#![allow(unsafe_code)]

mod codes;
mod cublaslt;
#[allow(non_snake_case)] // The names of the C functions.
mod cudnn;
mod device;
mod driver;
mod engine;
mod environment;
mod install;
mod memory;
mod module;
#[allow(non_snake_case)] // The names of the C functions.
mod nccl;
#[allow(non_snake_case)] // The names of the C functions.
mod nvml;
mod nvrtc;
mod settings;
mod stats;

pub use environment::{SETTINGS, Setting};
pub use install::{InstallError, Installation, LIBRARIES};

/// A number from the settings of the collective and management libraries, which may have none.
#[allow(dead_code)]
fn setting(name: &str, otherwise: u64) -> u64 {
    environment::foreign(name, otherwise)
}
