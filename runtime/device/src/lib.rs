//! The interface between the runtime and its devices, and the groups through which devices sum and exchange tensors.
//!
//! - [`device`], [`machine`]: a device, and the machines that it makes: buffers and the execution of programs over
//!   them. [`span`]: borrowed runs of their memory; [`staging`]: the buffers through which they pass; [`thread`]: errors of
//!   starting a device thread.
//! - [`element`], [`float`]: element types of operands, and the floats that buffers of activations hold. [`packed`]: weights in
//!   fewer bits; [`e4m3`]: the numbers of products in FP8.
//! - [`world`] with its [`world_id`], [`operation`] with its [`operation_check`], [`communicator`]: the ranks of a world, the
//!   operations of a group, and the trait that runs them. [`parts`] divides a tensor among members; [`descriptor`] describes an operation, so that members that
//!   disagree get an [`error`] naming both sides.
//! - [`group_handle`]: a communicator divided between the actor that owns it and the device that uses it.
//! - [`groups`]: the communicators of one rank, and the collectives in flight.
//! - [`shared_memory`]: memory that the ranks of a machine map. [`huge_pages`]: a request for them.
//! - [`progress_counter`]: the progress of a device, readable from any thread.
//!
//! Deliberately absent: kernels and transports, which are in crates of their own.

pub mod communicator;
pub mod descriptor;
pub mod device;
pub mod e4m3;
pub mod element;
pub mod error;
pub mod float;
pub mod group_handle;
pub mod groups;
pub mod huge_pages;
pub mod machine;
pub mod operation;
pub mod operation_check;
pub mod packed;
pub mod parts;
pub mod progress_counter;
pub mod shared_memory;
pub mod span;
pub mod staging;
pub mod thread;
pub mod world;
pub mod world_id;

pub use communicator::{Collective, CollectiveControl, Progress, SliceOperations, Ticket};
pub use device::{Activity, Device, HealthWatch};
pub use element::{Element, ElementType};
pub use error::CollectiveError;
pub use machine::{AllocError, Backing, ExecError, Machine, OpaqueModel, Run, Timings};
pub use operation::{Operand, Operation, OperationKind, RawBuffer, Space, Stream};
pub use thread::ThreadError;
