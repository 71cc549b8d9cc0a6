//! Models and data sets of the Hugging Face Hub: their names, the cache of this machine, downloads into it, and uploads of models.

mod answers;
pub mod cache;
mod connection;
pub mod error;
pub mod fetch;
mod hash;
mod listing;
pub mod name;
pub mod push;
