//! Every way of sharing a small model, compared with one rank: the same losses, the same gradient norms, and checkpoints
//! that go on under any other way.
//!
//! | file | what |
//! |---|---|
//! | `cell` | one way of sharing: a mesh and what its axes do; all of them |
//! | `model` | the small models |
//! | `run` | trains a cell and compares |
//! | `chain` | in which order cells go on from each other's checkpoints |
//! | `pairs` | the fewest cells in which every pair of choices occurs |
//! | `table` | what came out, for people and for `tests/MATRIX.md` |

pub mod cell;
pub mod chain;
pub mod model;
pub mod pairs;
pub mod run;
pub mod table;
