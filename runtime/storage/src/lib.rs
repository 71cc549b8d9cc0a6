//! Persistent state: checkpoints and model directories.
//!
//! - [`checkpoint`]: sharded checkpoints in a folder or an object store.
//! - [`hf`]: Hugging Face model directories, in and out. [`gguf`]: files of llama.cpp, out.
//! - [`foreign_file`]: files that others wrote, of a bounded length and never a pipe.
//! - [`home`]: paths that begin with `~`.
//! - [`sync_dir`]: durable names of files.
//! - [`hub`]: models and data sets of the Hugging Face Hub, in the cache and from the network.
//!
//! Deliberately absent: which tensors a training state has and when it is saved (the trainer decides).

mod certificates;
pub mod checkpoint;
pub mod foreign_file;
pub mod gguf;
pub mod hf;
pub mod home;
pub mod hub;
pub mod sync_dir;
