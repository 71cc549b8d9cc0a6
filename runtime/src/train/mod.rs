//! Training: from a checked configuration to a trained model directory.
//!
//! - [`architecture`]: what computes a model.
//! - [`plan`]: everything a run is made of, resolved before a buffer exists.
//! - `weights`: parameters into and out of the machine.
//! - `trainer`: the loop, on the device thread.
//! - `saving`: checkpoints of a run.
//! - [`metrics`], [`tensorboard`], [`progress`]: what is measured and where it goes.

pub mod architecture;
pub mod error;
pub mod export;
pub mod metrics;
pub mod plan;
pub mod progress;
pub(crate) mod saving;
pub(crate) mod session;
mod staging;
pub(crate) mod team;
pub mod tensorboard;
pub(crate) mod trainer;
pub(crate) mod weights;

pub use error::JobError;
