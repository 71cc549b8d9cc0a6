//! Models written in dfdx 0.13 train through the job API: [`DfdxModel`] turns a built module and a loss into a
//! [`UserModel`](super::UserModel).
//!
//! - `model`: the module, its loss, and what the loss is given ([`Batch`]).
//! - `parameters`: the module's tensors as a parameter table, visited through `TensorCollection`.
//! - `tape_thread`: the one thread on which tapes live, since a tape cannot be sent.
//! - [`ops`]: our fused kernels as differentiable operations on dfdx's tape.
//!
//! Invariants:
//! - DFDX-1 A tape is made, recorded and run on the tape thread; only the module and finished gradients leave it.
//! - DFDX-2 The program's buffers are the truth: the module's trained tensors are overwritten from them before every
//!   microbatch, so that checkpoints, clipping and optimizers need not know dfdx.
//! - DFDX-3 No unsafe code: tensors are read and written with dfdx's own copies. A view of the memory inside a tensor
//!   would save one memory pass an operand, but can be had only from the address of its first element, which Rust's
//!   aliasing rules do not allow to be widened.
//!
//! Deliberately absent: random operations that survive a restart. A module that draws random numbers (dropout) draws
//! them from dfdx's device, whose state no checkpoint holds; resuming is bit for bit for models that draw none.

mod grad_slot;
mod model;
pub mod ops;
mod parameters;
mod tape_thread;
#[cfg(test)]
mod test_models;
#[cfg(test)]
mod tests;

pub use model::{Batch, DfdxError, DfdxModel, Loss, Tape};
