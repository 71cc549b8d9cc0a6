//! libnccl of the software GPU, through its C functions.
#![allow(unsafe_code)]

mod api;
mod failures;
mod operations;
