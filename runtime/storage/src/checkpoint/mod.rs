//! Checkpoints: tensor → n-dimensional box → bytes, so that any mesh saves and any other loads.
//!
//! ```text
//! <root>/step-0000001200.g0007/
//!   rank-00000-0000.safetensors    boxes of tensors; plain safetensors, payload at a page boundary
//!   rank-00000-extra-trainer.json  small files that belong to the state
//!   rank-00000-index.json          where every box of this writer lies, and hashes of its files
//!   rank-00001-0000.safetensors    … as many writers as there are ranks with something of their own to save
//!   rank-00001-index.json
//!   MANIFEST                       JSON: what it is of, and the hash of every index
//!   COMMIT                         one line with the hash of MANIFEST, written last
//! ```
//!
//! That directory lies in a folder, or has a URL in an object store; where `CLAIM` stands in it for the directory itself.
//! A save of one process is a save of one writer; there is no second format for it. Format 1, from before there were
//! indexes, is still read.
//!
//! Invariants, cited by the tests:
//! - **CHECKPOINT-1** A checkpoint exists if and only if its `COMMIT` verifies; what a crash leaves behind is never
//!   loaded.
//! - **CHECKPOINT-2** When a save returns, the checkpoint survives a power failure; until then the previous one does. A
//!   folder is synced for that; an object store has what it has acknowledged.
//! - **CHECKPOINT-3** Any bit that differs from what was saved is seen before it is used, and named; a checkpoint that
//!   is opened whole is then skipped, never loaded.
//! - **CHECKPOINT-4** A directory of a step is never written twice; a retry takes the next generation. Who may write is
//!   settled by creating the directory, or `CLAIM`, which fails where it exists; `COMMIT` is created in the same way.
//! - **CHECKPOINT-5** Retention never removes the newest valid checkpoint.
//! - **CHECKPOINT-6** Names in a manifest cannot leave the directory, and its numbers cannot overflow or exhaust
//!   memory.
//! - **CHECKPOINT-7** A save of many writers is committed only when the boxes of all tile every tensor exactly once; it
//!   succeeds for all of them or for none, except where their connection breaks at the very end.
//!
//! Map: [`writer`] saves, alone or with others, by way of [`pending`], a checkpoint without its marker,
//! or [`background`] beside training; [`reader`] verifies
//! and reads; [`catalog`] lists, finds the latest and removes old ones. [`index`] is what one writer says, [`contents`] what
//! all say together, [`manifest`] and [`commit`] make it final; the geometry is [`phalanx_strategies::boxes`];
//! [`store`] is the seam below which files lie: in a folder ([`disk`], which makes them durable by way of
//! [`volume`]) or in an object store ([`bucket`]).
//!
//! Deliberately absent: which tensors make up a training state, who holds which box, and when to save (the trainer knows).

pub mod background;
pub mod bucket;
pub mod catalog;
pub mod commit;
pub mod contents;
pub mod disk;
pub mod error;
pub mod index;
pub mod manifest;
pub mod pending;
mod pieces;
pub mod reader;
mod shard;
mod snapshot_memory;
pub mod store;
mod stored;
mod vendor;
pub mod volume;
pub mod writer;

#[cfg(test)]
mod tests;
