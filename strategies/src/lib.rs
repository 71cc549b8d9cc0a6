//! The compiler: how work is split and how a job survives change. Pure.

pub mod sampler;
