//! Hugging Face model directories, in and out.
//!
//! - [`dtype`]: element types as safetensors names them.
//! - [`layout`]: the header of a safetensors file, checked in both directions; checkpoints use it too.
//! - [`source`]: the tensors of a directory, one file or many, as f32; `windows` groups reads, and `pages` verifies them
//!   against the digests of exports. [`tensor_digests`]: which tensors differ between two directories.
//! - [`export`]: a directory that other tools load; [`adapter`]: the same for low-rank adapters.
//!
//! Deliberately absent: which tensors a model has and what they mean (the model families), and tokenizers (`data`).

pub mod adapter;
pub mod digest;
pub mod dtype;
pub mod error;
pub mod export;
pub mod layout;
mod pages;
pub mod source;
pub mod staging;
pub mod tensor_digests;
mod windows;
