//! Collectives over machines with several ranks each: shared memory inside, TCP between.
//!
//! - [`placement`]: the machine of each rank, and the worlds within and between machines. - `staged`: a sum in three
//!   steps, and its order. - [`collective`]: the rank and its communicators.

pub mod collective;
pub mod placement;
mod staged;
#[cfg(test)]
mod tests;
