//! Passes: each takes a program and returns one that computes the same, or more. One file, one idea.
//!
//! The order in which [`crate::compile`] applies them is part of their contract:
//! `context_parallel` (tokens), `fuse`, `lora`, `tensor_parallel`, `context_parallel` (keys), `precision`, `pipeline`,
//! `backward`, `enter`, `recompute`, `accumulate`, `data_parallel`, `fully_sharded`, `clip`, `optimizer` (with `tensor_sums`),
//! `offload`, `overlap`, `commit`, `compact`, `memory`.
//!
//! Each parallel pass leaves a program as it is where its axis has one rank, and knows nothing of the other axes: every
//! combination is their composition.
//!
//! `shadow` stands beside this order: it derives from a step what another rank runs that keeps a copy of its state.

pub mod accumulate;
pub mod backward;
pub mod clip;
pub mod commit;
pub mod compact;
pub mod context_parallel;
pub mod data_parallel;
pub mod enter;
pub mod fully_sharded;
pub mod fuse;
pub mod lora;
pub mod memory;
pub mod offload;
pub mod optimizer;
pub mod overlap;
pub mod pipeline;
pub mod precision;
pub mod recompute;
pub mod reproducible;
pub mod shadow;
pub mod tensor_parallel;
pub mod tensor_sums;
