//! Models and data sets of the Hugging Face Hub: their names, the cache of this machine, and downloads into it.

pub mod cache;
pub mod error;
pub mod fetch;
mod hash;
mod listing;
pub mod name;
