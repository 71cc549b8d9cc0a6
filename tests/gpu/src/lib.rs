//! Checks of the CUDA machine against the CPU machine: on a GPU, or on the software GPU.
//!
//! - [`case`]: one instruction with its operands, run on two devices. [`cases`]: the cases, one file per family of
//!   operations.
//! - [`step`]: whole training steps. [`measure`]: times of single instructions.
//! - [`stages`]: what `phalanx-gpu` runs.
//! - [`open`]: the GPU to check. `driver`: its libraries.

pub mod case;
pub mod cases;
mod driver;
pub mod measure;
pub mod open;
pub mod stages;
pub mod step;
