//! Persistent state: checkpoints and model directories.
//!
//! - [`checkpoint`]: sharded checkpoints in a folder or an object store.
//! - [`hf`]: Hugging Face model directories, in and out. [`gguf`]: files of llama.cpp, out.
//! - [`hub`]: models and data sets of the Hugging Face Hub, in the cache and from the network.
//!
//! Deliberately absent: which tensors a training state has and when it is saved (the trainer decides).

pub mod checkpoint;
pub mod gguf;
pub mod hf;
pub mod hub;
