//! Collectives between the ranks of one machine, in shared memory.
//!
//! Whoever starts the ranks makes a [`world::ShmWorld`] and passes it to them; each joins it as one rank and makes a
//! communicator per group that it is in. Tensors that lie in a rank's arena are read and written by its peers where they
//! are; others are staged.
//!
//! - [`layout`](self): where everything lies in the control memory. - [`control`]:
//!   abort, progress, whom to wake. - [`passing`]: handing a world to another process. - [`world`]: a world and its ranks.
//! - [`collective`]: the communicator, over `group` (operations of the group) and `pair` (messages); `ring` and `queue` are
//!   what members announce and what they have started; `plane` and `staging` where tensors are.

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
