//! Fault injection: a deterministic simulator of a whole job, and its invariants.
//!
//! - [`sim`]: the machines of `phalanx_strategies::elastic` on a simulated network, store and clock, from one seed.
//! - [`plan`]: the faults, as data; drawn from the seed, or read from a file.
//! - [`environment`]: the faults of storage, clocks and data, and strangers; [`help`]: all faults in one table.
//! - [`invariants`]: the invariants of a run, one per file.
//! - [`state`]: a stand-in for weights.
//! - [`shrink`]: minimizes a failing plan.
//! - [`mutation`]: deliberately broken shells; the simulator must catch every one.
//!
//! Future work: the same faults on real processes and machines.
//!
//! Deliberately absent: hooks in production code. The simulator uses only the interfaces of the machines.

pub mod dice;
pub mod environment;
pub mod help;
pub mod invariants;
pub mod mutation;
pub mod plan;
pub mod shrink;
pub mod sim;
pub mod state;
