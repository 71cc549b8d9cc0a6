//! Collectives between the ranks of one machine, in shared memory.
//!
//! The process that starts the ranks makes a [`world::ShmWorld`] and passes it to them; each process joins it as one
//! rank and makes a communicator for each of its groups. Peers read and write tensors in a rank's arena in place; other
//! tensors are staged.
//!
//! - [`layout`](self): the layout of the control memory. - [`control`]: abort, progress, wake-ups. - [`passing`]:
//!   passing a world to another process. - [`world`]: a world and its ranks.
//! - [`collective`]: the communicator, over `group` (operations of the group) and `pair` (messages); `ring` holds the
//!   announcements of members, `queue` their operations in flight; `plane` and `staging` locate tensors.

pub mod collective;
pub mod control;
mod group;
mod layout;
mod pair;
pub mod passing;
mod plane;
mod queue;
mod ring;
mod staging;
#[cfg(test)]
mod tests;
pub mod world;
