//! Phalanx trains and fine-tunes language models from one configuration, over many ranks and machines, and keeps going when
//! ranks or machines die. This crate has the library and the `phalanx` binary.
//!
//! # Quick start
//!
//! A job on threads of this process, which needs nothing else:
//!
//! ```no_run
//! use phalanx::{Event, Job};
//!
//! let job = Job::builder()
//!     .set("base_model", "models/SmolLM2-135M") // a directory with config.json, *.safetensors and tokenizer.json
//!     .set("datasets.0.path", "orders.jsonl")
//!     .set("datasets.0.type", "alpaca")
//!     .set("max_steps", 100)
//!     .build()?; // or Job::from_yaml("my.yaml")?
//! let handle = job.start()?;
//! for event in handle.events() {
//!     if let Event::Step(m) = event {
//!         println!("step {} of {}: loss {:.3}", m.step, m.total_steps, m.loss);
//!     }
//! }
//! println!("the model is in {:?}", handle.wait()?.model_dir);
//! # Ok::<(), phalanx::JobError>(())
//! ```
//!
//! An elastic job, whose ranks are processes that may die: `main` begins with [`rank_process`], because each rank is this program
//! again, and a [`Runtime`] starts jobs; see [`api::embed`].
//!
//! | to | call |
//! |---|---|
//! | train on threads of this process | [`Job::builder`], [`JobHandle`] |
//! | train on rank processes of this machine, or of several | [`Runtime`], with [`Machines`] |
//! | follow, save, resize, drain or stop a job | [`RunningJob`] |
//! | read or check a configuration | [`config::JobConfig`] |
//! | continue a text with a trained model | [`api::generate`] |
//! | train a model of your own | [`frontend`], [`rank_process_with`] |
//!
//! # Code map
//!
//! Devices, kernels, collectives and files are in crates below this one: `phalanx-device` defines the traits, `phalanx-cpu`
//! and `phalanx-collective` implement them, `phalanx-storage` has checkpoints and model directories.
//!
//! Code map, from the lowest layer up; no module imports from a higher layer:
//! - [`config`]: the YAML file of a job, checked before anything starts. [`data`]: tokenizers, dataset formats, packing, the
//!   token cache, batches. [`frontend`]: models that users write, in dfdx or otherwise. [`launch`]: starts,
//!   watches and talks to the rank processes of one machine.
//! - [`error`], [`events`], [`console`], `journal`, `control`, `control_place`, [`units`]: why a job fails, what it reports, where
//!   its output and its records go, which requests it takes, where its coordinators keep what their successors need.
//! - [`devices`]: which device trains.
//! - [`train`]: plan, loop, metrics, export of a run.
//! - `rank`: a rank process. `node`: a machine with its rank processes. `coordinate`: the coordinator of a job.
//! - [`api`]: jobs for other programs, and text from trained models. `serve`: that text over HTTP. [`cli`]: the command line.
//!
//! Deliberately absent: any decision about *how* a step is split or ordered; that is `phalanx-strategies`.

/// The program in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// So do those of the guide.
#[cfg(doctest)]
#[doc = include_str!("../book/src/embedding.md")]
struct Guide;

pub mod api;
pub(crate) mod checkpoint_claim;
pub mod cli;
pub mod config;
pub mod console;
pub(crate) mod control;
pub(crate) mod control_place;
pub(crate) mod coordinate;
pub mod data;
pub mod devices;
pub mod error;
pub mod events;
pub mod frontend;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub(crate) mod journal;
pub mod launch;
pub(crate) mod memory_limit;
pub(crate) mod node;
pub(crate) mod process_end;
mod process_limits;
pub(crate) mod rank;
pub(crate) mod serve;
pub(crate) mod shell;
pub mod train;
pub mod units;

pub use api::embed::program::{RankProgram, rank_process, rank_process_with};
pub use api::embed::running::{Resize, RunningJob};
pub use api::embed::{Machines, Runtime};
pub use api::job::{Job, JobBuilder, JobHandle};
pub use control::{Control, RequestError};
pub use error::JobError;
pub use events::{Event, Report, Started};
