//! Every combination of mesh and parallelism options on small models, compared with one rank: equal losses and gradient
//! norms, and checkpoints that resume in any other combination.
//!
//! | file | contents |
//! |---|---|
//! | `cell` | one combination of mesh and options; the list of all |
//! | `model` | the small models |
//! | `run` | trains a cell and compares it with one rank |
//! | `chain` | the order in which cells resume from each other's checkpoints |
//! | `pairs` | a small set of cells with every pair of choices |
//! | `table` | the outcomes as JSON lines and as the table of `tests/MATRIX.md` |

pub mod cell;
pub mod chain;
pub mod model;
pub mod pairs;
pub mod run;
pub mod table;
