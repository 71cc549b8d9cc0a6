//! Jobs as users run them: by the `phalanx` binary, with files, processes, signals and machines that fail.
//!
//! One target, because each of these files would link the whole of Phalanx, and because tests that wait then overlap with
//! tests of other files.

mod bad_input;
mod bad_records;
mod catch_up;
mod cluster;
mod corruption;
mod early_stopping;
mod embed;
mod evaluation;
mod events;
mod fp8;
mod front_door;
mod frozen_weights;
mod given_up;
mod gpu;
mod gpu_corruption;
mod gpu_faults;
mod gpu_health;
mod gpu_refusals;
mod gpu_snapshots;
mod hub;
mod inputs;
mod meshes;
mod node_identity;
mod nodes;
mod object_store;
mod operators;
mod output;
mod partition;
mod plan;
mod preference;
mod ranks;
mod replacements;
mod reshape;
mod resume;
mod reward;
mod serve;
mod shared_store;
mod starved;
mod streaming;
mod support;
mod trained_model;
mod weights;
