//! Passes: each takes a program and returns one that computes the same, or more. One file, one idea.
//!
//! The order in which [`crate::compile`] applies them is part of their contract:
//! `fuse`, `lora`, `precision`, `backward`, `recompute`, `accumulate`, `clip`, `optimizer`, `memory`.

pub mod accumulate;
pub mod backward;
pub mod clip;
pub mod fuse;
pub mod lora;
pub mod memory;
pub mod optimizer;
pub mod precision;
pub mod recompute;
