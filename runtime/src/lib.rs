//! The machine, and the front door: devices, kernels, data, checkpoints, the embedding API and the `phalanx` binary.
//!
//! Code map, in the direction data flows:
//! - [`config`]: the one YAML file, checked before anything starts.
//! - [`hf`]: Hugging Face model directories in and out.
//! - [`data`]: tokenizers, dataset formats, packing, the token cache, batches.
//! - [`cpu`]: element types, matrix products, fused kernels, and the executor that runs a compiled program.
//! - [`collective`]: sums and copies between CPU ranks, over shared memory or TCP; [`groups`]: those of one rank; [`pulse`]: how a device gets on.
//! - [`frontend`]: models that users write, in dfdx or otherwise.
//! - [`train`]: plan, loop, metrics, export of a run.
//! - [`checkpoint`]: safetensors parts, manifest, commit marker.
//! - [`launch`]: rank processes of one machine, started, spoken to and watched.
//! - [`job`]: a job on threads of this process; [`embed`]: elastic jobs inside another program; [`generate`]: text from a trained model; [`cli`]: the command line.
//!
//! Deliberately absent: any decision about *how* a step is split or ordered; that is `phalanx-strategies`.

pub mod checkpoint;
pub mod cli;
pub mod collective;
pub mod config;
pub mod cpu;
pub mod data;
pub mod embed;
pub mod frontend;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
pub mod groups;
pub mod hf;
pub mod job;
pub mod launch;
pub mod pulse;
pub mod train;

pub use embed::program::{RankProgram, rank_process};
pub use embed::running::{Resize, RunningJob};
pub use embed::{Machines, Runtime};
pub use job::{AskError, Control, Event, Job, JobBuilder, JobHandle, Report, Started};
pub use train::JobError;
