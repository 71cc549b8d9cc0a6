//! The machine, and the front door: data, training, elastic jobs, the embedding API and the `phalanx` binary.
//!
//! Devices, kernels, collectives and files lie a floor below, in crates of their own: `phalanx-device` is the seam,
//! `phalanx-cpu` and `phalanx-collective` stand behind it, `phalanx-storage` has checkpoints and model directories.
//!
//! Code map, from the ground floor up; nothing imports from a higher floor:
//! - [`config`]: the one YAML file, checked before anything starts. [`data`]: tokenizers, dataset formats, packing, the
//!   token cache, batches. [`frontend`]: models that users write, in dfdx or otherwise. [`launch`]: rank processes of one
//!   machine, started, spoken to and watched.
//! - [`error`], [`events`], `control`, [`units`]: why a job cannot go on, what it reports, what can be asked of it.
//! - [`devices`]: which device trains.
//! - [`train`]: plan, loop, metrics, export of a run.
//! - `rank`: a rank process. `node`: a machine with its rank processes. `coordinate`: the coordinator of a job.
//! - [`api`]: jobs for other programs. [`cli`]: the command line.
//!
//! Deliberately absent: any decision about *how* a step is split or ordered; that is `phalanx-strategies`.

pub mod api;
pub mod cli;
pub mod config;
pub(crate) mod control;
pub(crate) mod coordinate;
pub mod data;
pub mod devices;
pub mod error;
pub mod events;
pub mod frontend;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod launch;
pub(crate) mod node;
pub(crate) mod rank;
pub mod train;
pub mod units;

pub use api::embed::program::{RankProgram, rank_process, rank_process_with};
pub use api::embed::running::{Resize, RunningJob};
pub use api::embed::{Machines, Runtime};
pub use api::job::{Job, JobBuilder, JobHandle};
pub use control::{AskError, Control};
pub use error::JobError;
pub use events::{Event, Report, Started};
