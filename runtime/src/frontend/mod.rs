//! Models that users write: what a job must know of one ([`UserModel`]), and the front ends that make one.
//!
//! - [`user_model`]: parameter table, first values, and the operation that computes loss and gradients.
//! - [`dfdx`]: models written in dfdx 0.13 (cargo feature `dfdx`).
//!
//! Deliberately absent: everything else of a run. Data, schedule, clipping, optimizer, metrics, checkpoints and export
//! work on the parameter table and do not know who computes the gradients.

#[cfg(feature = "dfdx")]
pub mod dfdx;
pub mod user_model;

pub use user_model::{UserModel, UserModelError, UserParam};
