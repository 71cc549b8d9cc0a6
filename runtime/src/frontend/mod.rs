//! Models that users write: their interface to a job ([`UserModel`]), and the front ends that create them.
//!
//! - [`user_model`]: parameter table, initial values, and the operation that computes loss and gradients.
//! - [`dfdx`]: models written in dfdx 0.13 (cargo feature `dfdx`).
//!
//! Deliberately absent: everything else of a run. Data, schedule, clipping, optimizer, metrics, checkpoints and export
//! work on the parameter table, independent of how gradients are computed.

#[cfg(feature = "dfdx")]
pub mod dfdx;
pub mod user_model;

pub use user_model::{UserModel, UserModelError, UserParam};
