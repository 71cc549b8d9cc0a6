//! Training: from a checked configuration to a trained model directory.
//!
//! - [`architecture`]: what computes a model.
//! - [`plan`]: everything a run is made of, resolved before a buffer exists.
//! - `weights`: parameters into and out of the machine.
//! - `trainer`: the loop, on the device thread.
//! - `session`: from configuration to exported model, for one rank, for ranks that are threads, and for a rank process;
//!   `team`: the ranks of a run and what they agree on.
//! - `launcher`: ranks as processes; `orders`: what they and their launcher say; `chorus`: their events as one; `rank`:
//!   a rank process from its start to its exit code.
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
pub(crate) mod links;
pub mod metrics;
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
