//! The machine, and the front door: data, training, elastic jobs, the embedding API and the `phalanx` binary.
//!
//! Devices, kernels, collectives and files lie a floor below, in crates of their own: `phalanx-device` is the seam,
//! `phalanx-cpu` and `phalanx-collective` stand behind it, `phalanx-storage` has checkpoints and model directories.
//!
//! Code map, in the direction data flows:
//! - [`config`]: the one YAML file, checked before anything starts.
//! - [`data`]: tokenizers, dataset formats, packing, the token cache, batches.
//! - [`frontend`]: models that users write, in dfdx or otherwise.
//! - [`train`]: plan, loop, metrics, export of a run.
//! - [`launch`]: rank processes of one machine, started, spoken to and watched.
//! - [`job`]: a job on threads of this process; [`embed`]: elastic jobs inside another program; [`generate`]: text from a trained model; [`cli`]: the command line.
//!
//! Deliberately absent: any decision about *how* a step is split or ordered; that is `phalanx-strategies`.

pub mod cli;
pub mod config;
pub mod data;
pub mod embed;
pub mod frontend;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
pub mod job;
pub mod launch;
pub mod train;

pub use embed::program::{RankProgram, rank_process};
pub use embed::running::{Resize, RunningJob};
pub use embed::{Machines, Runtime};
pub use job::{AskError, Control, Event, Job, JobBuilder, JobHandle, Report, Started};
pub use train::JobError;
