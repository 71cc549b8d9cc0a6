//! The public API: jobs on threads of this process, elastic jobs inside another program, and text from a trained model.
//!
//! - [`job`]: a job from a file or from code; `start`: starts its ranks.
//! - [`embed`]: elastic jobs of a host program.
//! - [`generate`]: text from a trained model; [`completion`]: one request for it; [`sampling`]: the choice of its tokens.

pub mod completion;
pub mod embed;
pub mod generate;
pub mod job;
pub mod sampling;
pub mod scores;
pub(crate) mod start;
