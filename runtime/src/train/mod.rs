//! Training: from a checked configuration to a trained model directory.
//!
//! - [`architecture`]: what computes a model.
//! - [`plan`]: everything a run is made of, resolved before a buffer exists.
//! - `weights`: parameters into and out of the machine.
//! - `trainer`: the loop, on the device thread; `trainer::learning`: how one catches up while others train.
//! - `session`: from configuration to exported model, for one rank and for ranks that are threads; `team`: the ranks of a
//!   run and what they agree on; `links`: messages between two of them, `lane` and
//!   `lesson` what passes there; `shadow`: a copy of another rank's state.
//! - `elastic`: ranks as processes, which may die; `chorus`: their events as one; `excuse`: why one cannot go on.
//! - `output_lock`: one job at a time in a folder.
//! - `saving`: checkpoints of a run.
//! - `step_trace`: one step measured instruction by instruction.
//! - [`metrics`], [`tensorboard`], [`progress`]: what is measured and where it goes.

pub mod architecture;
mod background;
mod chorus;
pub(crate) mod elastic;
pub mod error;
mod excuse;
pub mod export;
mod lane;
mod lesson;
pub(crate) mod links;
pub mod metrics;
mod output_lock;
pub mod plan;
pub mod progress;
pub(crate) mod saving;
pub(crate) mod session;
pub(crate) mod shadow;
mod staging;
pub(crate) mod step_trace;
pub(crate) mod team;
pub mod tensorboard;
pub(crate) mod trainer;
pub(crate) mod weights;

pub use error::JobError;
