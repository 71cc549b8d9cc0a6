//! Collectives between CPU ranks: sums and copies of tensors over the groups of a mesh.
//!
//! A [`world::World`] names the ranks and their groups. A [`Collective`] is one group seen from one member: operations
//! are started, which never waits, and finished. Sums run over position 0, 1, 2, … for every element, so the result has
//! the same bits at every rank, in every run and in every implementation.
//!
//! - [`world`]: which ranks there are and which groups they form. - [`operation`]: what a member asks for. -
//!   [`element`], [`parts`]: element types; how a whole is cut among members. - [`communicator`]: the trait, and
//!   operations on slices. - [`descriptor`]: what a member says it is about to do, so that a disagreement is an error
//!   that names both sides. - [`error`]: what can go wrong. - [`reduce`]: the sums.
//! - [`shm`]: ranks of one machine, over shared memory; `bell` and `engine` are how they wait.
//! - [`tcp`]: ranks of different machines. - [`hierarchical`]: machines with several ranks each, over both. - `flat`: operations on few bytes, in both.
//! - [`local`]: threads of one process, for tests.
//!
//! Deliberately absent: deadlines (whoever watches the ranks decides when one is lost, and aborts), and restart after an
//! abort (a new generation builds a new world).

mod bell;
pub mod communicator;
pub mod descriptor;
pub mod element;
mod engine;
pub mod error;
mod flat;
pub mod hierarchical;
pub mod local;
pub mod operation;
pub mod parts;
mod reduce;
pub mod shm;
pub mod tcp;
#[cfg(test)]
mod tests;
pub mod world;

pub use communicator::{Collective, Progress, SliceOperations, Ticket};
pub use element::{Element, ElementType};
pub use error::CollectiveError;
pub use operation::{Operand, Operation, OperationKind, RawBuffer, Stream};
