//! Checkpoints: tensor → n-dimensional box → bytes, so that any mesh saves and any other loads.
//!
//! ```text
//! <root>/step-0000001200.g0007/
//!   shard-0-0.safetensors    tensors, or boxes of them; plain safetensors, payload at a page boundary
//!   extra-trainer.json       small files that belong to the state
//!   MANIFEST                 JSON: where every box lies, and hashes of every file
//!   COMMIT                   one line with the hash of MANIFEST, written last
//! ```
//!
//! Invariants, cited by the tests:
//! - **C-1** A checkpoint exists if and only if its `COMMIT` verifies; what a crash leaves behind is never loaded.
//! - **C-2** When `save` returns, the checkpoint survives a power failure; until then the previous one does.
//! - **C-3** A checkpoint in which any bit differs from what was saved is skipped with the reason, never loaded.
//! - **C-4** A directory of a step is never written twice; a retry takes the next generation.
//! - **C-5** Retention never removes the newest valid checkpoint.
//! - **C-6** Names in a manifest cannot leave the directory, and its numbers cannot overflow or exhaust memory.
//!
//! Map: [`writer`] saves, [`reader`] verifies and reads, [`catalog`] lists, finds the latest and removes old ones;
//! [`manifest`], [`commit`] and [`region`] are the format; [`volume`] is the seam below which files are made durable.
//!
//! Deliberately absent: which tensors make up a training state, and when to save (the trainer knows).

pub mod catalog;
pub mod commit;
pub mod error;
pub mod manifest;
pub mod reader;
pub mod region;
mod shard;
pub mod volume;
pub mod writer;

#[cfg(test)]
mod tests;
