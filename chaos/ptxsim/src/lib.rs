//! Executes the PTX that NVRTC produces, on the host, and reports what a GPU would leave unnoticed: races, reads of unwritten
//! memory, accesses out of bounds, barriers that not all reach.
//!
//! ```
//! use phalanx_ptxsim::{Arg, Device, Module};
//!
//! let ptx = r"
//! .version 8.0
//! .target sm_80
//! .address_size 64
//! .visible .entry double(.param .u64 values)
//! {
//!     .reg .b32 %r<2>;
//!     .reg .b64 %rd<4>;
//!     .reg .f32 %f<3>;
//!     ld.param.u64 %rd1, [values];
//!     mov.u32 %r1, %tid.x;
//!     mul.wide.u32 %rd2, %r1, 4;
//!     add.s64 %rd3, %rd1, %rd2;
//!     ld.global.f32 %f1, [%rd3];
//!     add.f32 %f2, %f1, %f1;
//!     st.global.f32 [%rd3], %f2;
//!     ret;
//! }";
//! let module = Module::parse(ptx)?;
//! let mut device = Device::new();
//! let values = device.alloc_written(&1.5f32.to_le_bytes());
//!
//! let run = module.kernel("double")?.launch(&mut device, [1, 1, 1], [1, 1, 1], 0, &[Arg::Ptr(values)])?;
//!
//! assert!(run.findings.is_empty());
//! assert_eq!(device.f32s(values), [3.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Code map: `syntax` (text to statements), `decode` (statements to a `Program`), `alu` (arithmetic, a function over 32 lanes
//! for each instruction), `memory` (bytes with shadows, vector clocks), `exec` (warps, barriers, copies, matrix instructions),
//! `report` (findings), [`nvrtc`] (the real compiler).
//!
//! Deliberately absent: time, caches, bank conflicts, textures, clusters of more than one block, blocks that wait for each
//! other, and the memory of `tcgen05`.

mod alu;
mod decode;
mod error;
mod exec;
mod launch;
mod memory;
pub mod nvrtc;
mod program;
mod report;
mod syntax;
mod types;

pub use error::{LaunchError, PtxError};
pub use exec::{Swizzle, TensorMap};
pub use launch::{Arg, Kernel, Module, Options, Run};
pub use memory::device::{Device, Ptr};
pub use report::{Finding, Kind, Other, Place, Site};
