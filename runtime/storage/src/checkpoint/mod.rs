//! Checkpoints: tensor → n-dimensional box → bytes, so that any mesh can load what any other saved.
//!
//! ```text
//! <root>/step-0000001200.g0007/
//!   rank-00000-0000.safetensors    boxes of tensors; plain safetensors, payload at a page boundary
//!   rank-00000-extra-trainer.json  small files that belong to the state
//!   rank-00000-index.json          the position of every box of this writer, and hashes of its files
//!   rank-00001-0000.safetensors    … one writer per rank that has state of its own to save
//!   rank-00001-index.json
//!   MANIFEST                       JSON: job, step and mesh, and the hash of every index
//!   COMMIT                         one line with the hash of MANIFEST, written last
//! ```
//!
//! The directory is in a folder, or has a URL in an object store, where an object `CLAIM` represents the directory
//! itself. A single process saves as one writer in the same format. Format 1, which has no indexes, is still read.
//!
//! Invariants, cited by the tests:
//! - **CHECKPOINT-1** A checkpoint exists if and only if its `COMMIT` verifies; remains of a crash are never loaded.
//! - **CHECKPOINT-2** When a save returns, the checkpoint survives a power failure; until then the previous one does. A
//!   folder is synced for that; an object store keeps what it has acknowledged.
//! - **CHECKPOINT-3** Any bit that differs from what was saved is detected before use, and the error names its file; a
//!   checkpoint that is opened whole is then skipped, never loaded. One that cannot be read is an error, never skipped.
//! - **CHECKPOINT-4** A directory of a step is never written twice; a retry takes the next generation. The writer that
//!   creates the directory, or `CLAIM`, owns it; creation fails if it exists. `COMMIT` is created the same way.
//! - **CHECKPOINT-5** Retention never removes the newest valid checkpoint, nor one that it cannot read.
//! - **CHECKPOINT-6** Names in a manifest cannot leave the directory, and its numbers cannot overflow or exhaust
//!   memory.
//! - **CHECKPOINT-7** A save of many writers is committed only when all their boxes tile every tensor exactly once; it
//!   succeeds for all writers or for none, unless their connection breaks at the very end.
//! - **CHECKPOINT-8** Once a later world saves, or continues from a checkpoint, earlier worlds commit none, wherever their writers
//!   are suspended: the later world seals what they have begun, and they find it on record ([`fence`]). A world that has been
//!   replaced on record also removes none.
//! - **CHECKPOINT-9** Once a run that began again, or went back to an earlier checkpoint, has saved, no checkpoint that it gave up
//!   ([`given_up`]) is resumed from, unless it is named.
//!
//! Map: [`writer`] saves, alone or with others, through [`pending`] (a checkpoint without its marker), or through
//! [`background`] beside training; [`reader`] verifies and reads; [`catalog`] lists checkpoints, finds the latest and
//! removes old ones. [`index`] describes one writer's part, [`contents`] all parts; [`manifest`] and [`commit`] make them
//! final; [`format`](mod@format) has what all of them share. [`piece`], [`checkpoint_meta`] and [`checkpoint_id`]: what is saved, as what, and where. The
//! geometry is in [`phalanx_strategies::boxes`]. [`store`] is the storage interface, found by [`location`] and implemented for a folder
//! ([`disk`], which makes files durable through [`volume`]) and for object stores ([`bucket`], with `patience` and `credentials`). Beside them,
//! [`conditional`] replaces small objects for the coordinators of a job.
//!
//! Deliberately absent: which tensors make up a training state, which rank holds which box, and when to save (the trainer
//! decides).

pub mod background;
pub mod bucket;
pub mod catalog;
pub mod checkpoint_id;
pub mod checkpoint_meta;
pub mod commit;
pub mod conditional;
pub mod contents;
mod credentials;
pub mod disk;
pub mod error;
pub mod fence;
pub mod format;
pub mod given_up;
pub mod index;
pub mod location;
pub mod manifest;
mod patience;
pub mod pending;
pub mod piece;
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
