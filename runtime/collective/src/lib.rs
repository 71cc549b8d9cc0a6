//! Collectives between CPU ranks: sums and copies of tensors over the groups of a mesh.
//!
//! A [`World`](phalanx_device::world::World) names the ranks and their groups. A
//! [`Collective`](phalanx_device::Collective) is one group seen from one member: operations are started, which never
//! blocks, and finished. Sums run over position 0, 1, 2, … for every element, so the result has the same bits at every
//! rank, in every run and in every implementation.
//!
//! - `reduce`, `summand`: the sums.
//! - [`shm`]: ranks of one machine, over shared memory; `wakeup` and `engine` implement waiting.
//! - [`tcp`]: ranks of different machines. - [`hierarchical`]: machines with several ranks each, over both. - `flat`:
//!   small operations, in both.
//! - [`local`]: threads of one process, for tests.
//!
//! Deliberately absent: deadlines (the supervisor decides when a rank is lost, and aborts), and restart after an abort
//! (a new generation builds a new world).

mod engine;
mod flat;
pub mod hierarchical;
pub mod local;
mod reduce;
pub mod shm;
mod summand;
pub mod tcp;
#[cfg(test)]
mod tests;
mod wakeup;
