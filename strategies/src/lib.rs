//! The compiler: decides how work is split and how a job survives change. Pure.
//!
//! Code map, in the order in which a job passes through it:
//! - [`model`]: a Hugging Face configuration or the user's own builder calls become a forward [`program`].
//! - [`passes`]: rewrite it, one idea a file; [`compile`] applies them in order.
//! - [`optimizer`]: how gradients change the weights.
//! - [`mesh`]: how ranks are arranged, and which of them form groups.
//! - [`tree`]: the order in which reproducible runs sum.
//! - [`verify`]: refuses an ill-formed program before a buffer exists.
//! - [`cost`]: operations and bytes, read off the program.
//! - [`pipeline`]: the order in which pipeline stages run their microbatches.
//! - [`world`]: refuses ranks whose collectives do not fit or can deadlock, and simulates a step's time.
//! - [`boxes`]: boxes of tensors: the one index of checkpoints, ranks' memory and what travels between ranks.
//! - [`target`]: what the compiler asks of the device that runs a program.
//! - [`trace`]: the programs of all ranks become a world.
//! - [`plan`]: which of all arrangements trains a model fastest on given machines.
//! - [`elastic`]: how the job survives the loss and arrival of ranks, machines and coordinators.
//! - [`schedule`], [`sampler`], [`rng`], [`loss_scale`]: learning rates, sample order, random numbers and loss scales as
//!   functions of the step.
//!
//! Deliberately absent: clocks, threads, tasks, sockets, files, devices. Whatever depends on the machine (how much
//! working space a kernel needs, how it aligns buffers, how fast it is) is passed in.

pub mod boxes;
pub mod compile;
pub mod cost;
pub mod elastic;
pub mod loss_scale;
pub mod mesh;
pub mod model;
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
