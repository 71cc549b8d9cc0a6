//! libcudnn of the software GPU, through its C functions: graphs built by hand against f64.
#![allow(unsafe_code)]

mod attention;
mod builder;
mod execution;
mod graphs;
mod reference;
mod refusals;
#[path = "../support/mod.rs"]
mod support;
