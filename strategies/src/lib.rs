//! The compiler: pure decisions on how work is split and how a job survives change.
//!
//! Code map, in the order in which a job passes through it:
//! - [`model`]: a Hugging Face configuration or the user's own builder calls become a forward [`program`].
//! - [`passes`]: rewrites of that program, one per file; [`compile`] applies them in order.
//! - [`optimizer`]: how gradients change the weights.
//! - [`mesh`]: how ranks are arranged, and which of them form groups.
//! - [`tree`]: the order in which reproducible runs sum.
//! - [`verify`]: rejects ill-formed programs before buffers are allocated.
//! - [`cost`]: operations and bytes of a program.
//! - [`pipeline`]: the order in which pipeline stages run their microbatches.
//! - [`world`]: rejects ranks whose collectives do not match or can deadlock, and simulates the time of a step.
//! - [`boxes`]: boxes of tensors: the common index of checkpoints, ranks' memory and transfers between ranks.
//! - [`target`]: what the compiler needs to know about the device that runs a program.
//! - [`trace`]: combines the programs of all ranks into a world.
//! - [`plan`]: searches for the arrangement that trains a model fastest on given machines.
//! - [`elastic`]: how the job survives the loss and arrival of ranks, machines and coordinators.
//! - [`schedule`], [`sampler`], [`rng`], [`loss_scale`]: learning rates, sample order, random numbers and loss scales as
//!   functions of the step.
//!
//! Deliberately absent: clocks, threads, tasks, sockets, files, devices. Machine properties (working space of a kernel,
//! alignment of buffers, speed) are passed in.

pub mod boxes;
pub mod compile;
pub mod cost;
pub mod elastic;
pub mod loss_scale;
pub mod mesh;
pub mod model;
pub mod objective;
pub mod optimizer;
pub mod passes;
pub mod pipeline;
pub mod plan;
pub mod program;
pub mod rng;
pub mod sampler;
pub mod schedule;
pub mod target;
pub mod trace;
pub mod tree;
pub mod verify;
pub mod world;
