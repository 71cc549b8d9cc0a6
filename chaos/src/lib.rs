//! Fault injection: a deterministic simulator of a whole job, and what must hold in it.
//!
//! - [`sim`]: the machines of `phalanx_strategies::elastic` on a simulated network, store and clock, from one seed.
//! - [`plan`]: what goes wrong, as data; drawn from the seed, or read from a file.
//! - [`invariants`]: what must hold, one a file.
//! - [`state`]: a stand-in for weights.
//! - [`shrink`]: makes a failing plan small.
//! - [`mutation`]: deliberately broken shells, each of which the simulator must catch.
//!
//! To come: faults on real processes and machines, in the same vocabulary.
//!
//! Deliberately absent: hooks in production code beyond the seams it has anyway.

pub mod dice;
pub mod invariants;
pub mod mutation;
pub mod plan;
pub mod shrink;
pub mod sim;
pub mod state;
