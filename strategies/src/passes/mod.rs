//! Passes: each rewrites a program into one that computes the same, or more. One file per pass.
//!
//! The order in which [`crate::compile`] applies them is part of their contract:
//! `context_parallel` (tokens), `fuse`, `fp8`, `lora`, `reference`, `tensor_parallel`, `context_parallel` (keys), `precision`, `pack`, `fp8` (cut weights), `pipeline`,
//! `backward`, `enter`, `recompute`, `again`, `head_chunks`, `accumulate`, `launch_order`, `fully_sharded`, `data_parallel`, `clip`,
//! `optimizer` (with `tensor_sums`), `unpack`, `offload`, `half_copies`, `overlap`, `commit`, `compact`, `memory`.
//!
//! A parallel pass changes nothing where its axis has one rank, and does not depend on the other axes: every combination
//! of axes is a composition of passes.
//!
//! `cache` follows `fully_sharded` in programs that generate text, which have no passes for gradients.
//!
//! `buckets` is no pass: it groups the tensors that one collective exchanges.
//!
//! `shadow` is outside this order: it derives from a step the program of a rank that keeps a copy of its state.

pub mod accumulate;
pub mod again;
pub mod backward;
pub mod buckets;
pub mod cache;
pub mod clip;
pub mod commit;
pub mod compact;
pub mod context_parallel;
pub mod data_parallel;
pub mod enter;
pub mod fp8;
pub mod fully_sharded;
pub mod fuse;
pub mod half_copies;
pub mod head_chunks;
pub mod launch_order;
pub mod lora;
pub mod memory;
pub mod offload;
pub mod optimizer;
pub mod overlap;
pub mod pack;
pub mod pipeline;
pub mod precision;
pub mod recompute;
pub mod reference;
pub mod reproducible;
pub mod shadow;
pub mod split_weights;
pub mod tensor_parallel;
pub mod tensor_sums;
