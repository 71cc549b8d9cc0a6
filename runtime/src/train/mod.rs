//! Training: from a checked configuration to a trained model directory.
//!
//! - [`architecture`]: what computes a model.
//! - [`plan`]: the model of a run, resolved before a buffer exists; `step_plan`: how a step computes; `data_plan`: its data; `described`: a model of the configuration;
//!   [`run_plan`]: its length; `programs`: its compiled programs; `fit`: whether they
//!   fit in memory; `preparation`: the data; `quantised`: weights that cannot be read;
//!   `adapter_settings`: what an adapter computes; `initial_adapter`: the one that a run continues; `frozen`: parameters that are not trained.
//! - `weights`: parameters into and out of the machine; `row_lengths`: those that depend on other ones.
//! - `trainer`: the loop, on the device thread; `trainer::catching_up`: how a member catches up while others train.
//! - `team`: the ranks of a run and what they agree on; `links`: messages between two members, by way of `lane` and
//!   `catch_up_transfer`; `shadow`: a copy of another rank's state.
//! - `threads`: a run whose ranks are threads of this process; `event_sink`: the outputs for a rank's events.
//! - `evaluation`: the mean loss over rows; `subject`: a trained model that is evaluated by itself.
//! - [`best`]: the best evaluation of a run, and its early end.
//! - `run_files`: the names of a run's files beside its weights.
//! - `inputs`: digests of what a run trains on, which nodes and checkpoints compare.
//! - `located`: models and data sets in the Hub's cache.
//! - `output_lock`: one job at a time in a folder.
//! - `same_run`: whether a checkpoint is of the run that resumes.
//! - `saving`: checkpoints of a run, written beside training by `background`; `state_copy`: state on its way out of a device's
//!   memory meanwhile; `restoring`: its way back; `export`: the trained model; `recorded_generation`: whether a later world or
//!   another job saves now.
//! - [`model_source`]: a model to use; `merge`: adapters added into it; `reexport`: the model in other files;
//!   `gguf`: those of llama.cpp.
//! - `fingerprints` of state; `verification`: when copies of the state are compared, which `trainer` does.
//! - `planted`: faults for tests.
//! - `utilisation`: the share of a machine's peak that a step reaches; `step_line`: a step as text.
//! - `step_trace`: one step measured instruction by instruction.
//! - [`metrics`], [`tensorboard`], [`progress`]: measurements and their outputs; `taken_over`: a file that the leaders of worlds
//!   write one after the other.
//!
//! Deliberately absent: processes, supervisors and coordinators. They are layers above, which act through
//! `member::Member`.

pub(crate) mod adapter_settings;
pub mod architecture;
mod background;
pub mod best;
pub(crate) mod catch_up_transfer;
mod checkpoint_weights;
pub(crate) mod data_plan;
mod described;
pub(crate) mod evaluation;
pub(crate) mod event_sink;
pub mod export;
pub(crate) mod fingerprints;
pub(crate) mod fit;
mod frozen;
pub(crate) mod gguf;
mod grown_rows;
mod initial_adapter;
pub(crate) mod inputs;
mod kept_weights;
mod lane;
pub(crate) mod links;
pub(crate) mod located;
pub(crate) mod member;
pub(crate) mod merge;
pub mod metrics;
pub mod model_source;
mod new_token_rows;
pub(crate) mod output_lock;
mod packed_weights;
#[cfg(test)]
mod pair_texts_tests;
mod pattern;
pub mod plan;
pub(crate) mod planted;
pub(crate) mod preparation;
pub(crate) mod programs;
pub mod progress;
mod quantised;
pub(crate) mod recorded_generation;
pub mod reexport;
mod reference_file;
mod restoring;
mod row_lengths;
pub mod run_files;
pub(crate) mod run_folder;
pub mod run_plan;
pub(crate) mod same_run;
pub(crate) mod saving;
pub(crate) mod score_head;
pub(crate) mod shadow;
mod staging;
mod stalled;
mod state_copy;
pub(crate) mod step_line;
pub(crate) mod step_plan;
pub(crate) mod step_trace;
pub(crate) mod subject;
pub(crate) mod taken_over;
pub(crate) mod team;
pub mod tensorboard;
pub(crate) mod threads;
pub(crate) mod trainer;
mod utilisation;
pub(crate) mod verification;
pub(crate) mod vocabulary;
mod vote;
pub(crate) mod weights;
