//! Checks of the CUDA machine against the CPU machine: on a GPU, or on the software GPU.
//!
//! - [`case`]: one instruction with its operands, run on two devices. [`cases`]: the cases, one file per family of
//!   operations.
//! - [`step`]: whole training steps. [`measure`]: times of single instructions.
//! - [`stages`]: what `phalanx-gpu` runs. [`nccl_rank`]: a rank of the stage `nccl`; `apart`: how such processes meet.
//! - [`open`]: the GPU to check. `driver`: its libraries.

mod apart;
pub mod case;
pub mod cases;
mod driver;
pub mod measure;
pub mod nccl_rank;
pub mod open;
pub mod stages;
pub mod step;

/// The environment variable by which each process of this program takes itself for a machine of its own.
pub const APART: &str = "PHALANX_GPU_APART";
