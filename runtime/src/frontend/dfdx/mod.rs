//! Models written in dfdx 0.13 train through the job API: [`DfdxModel`] turns a built module and a loss into a
//! [`UserModel`](super::UserModel).
//!
//! - `model`: the module and its loss; `tape`: what the loss reads ([`Batch`]) and records.
//! - `parameters`: the module's tensors as a parameter table, visited through `TensorCollection`.
//! - `tape_thread`: the only thread that handles tapes, because a tape is not `Send`.
//! - [`ops`]: our fused kernels as differentiable operations on dfdx's tape.
//!
//! Invariants:
//! - DFDX-1 A tape is made, recorded and run on the tape thread; only the module and finished gradients leave it.
//! - DFDX-2 The program's buffers are authoritative: the module's trained tensors are overwritten from them before every
//!   microbatch, so that checkpoints, clipping and optimizers do not depend on dfdx.
//! - DFDX-3 No unsafe code: tensors are read and written with dfdx's own copies. A view of the memory inside a tensor
//!   would save one memory pass per operand, but is available only from the address of its first element, which Rust's
//!   aliasing rules do not allow to be widened.
//!
//! Deliberately absent: random operations that survive a restart. A module with random numbers (dropout) draws them from
//! dfdx's device, whose state is in no checkpoint; only models without random numbers resume bit for bit.

mod grad_slot;
mod model;
pub mod ops;
mod parameters;
mod tape;
mod tape_thread;
#[cfg(test)]
mod test_models;
#[cfg(test)]
mod tests;

pub use model::{DfdxError, DfdxModel};
pub use tape::{Batch, Loss, Tape};
