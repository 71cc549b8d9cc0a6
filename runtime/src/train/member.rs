//! What a rank's device tells the control plane in each step, which decides which steps count.

use crate::error::JobError;
use phalanx_strategies::elastic::message::Requests;

/// The control plane of a rank whose worlds follow each other: it decides which steps count.
pub(crate) trait Member: Send {
    /// The device holds everything that the update to `step` needs.
    ///
    /// # Errors
    /// When the world has ended.
    fn computed(&mut self, step: u64) -> Result<(), JobError>;

    /// All members have voted for `step`.
    ///
    /// # Errors
    /// When the world has ended; the next world brings the outcome.
    fn committed(&mut self, step: u64, requests: Requests) -> Result<(), JobError>;

    /// All members have agreed to stop after `step`, which is committed.
    ///
    /// # Errors
    /// When the world has ended; the next one stops after its first step.
    fn stopped(&mut self, step: u64) -> Result<(), JobError>;

    /// All state of this rank has arrived, and is of `step`.
    ///
    /// # Errors
    /// When the world has ended.
    fn caught_up(&mut self, step: u64) -> Result<(), JobError>;

    /// The catching-up device has the gradients of `step`.
    ///
    /// # Errors
    /// When the world has ended.
    fn followed(&mut self, step: u64) -> Result<(), JobError>;

    /// The catching-up device has received the commit of `step`.
    ///
    /// # Errors
    /// When the world has ended; the next world brings the outcome.
    fn outcome(&mut self, step: u64) -> Result<(), JobError>;

    /// All copies agree after the repetition of `step`, at which they differed before; `suspect` is the rank whose copy was
    /// wrong, if that is known.
    ///
    /// # Errors
    /// When the world has ended.
    fn settled(&mut self, step: u64, suspect: Option<u32>) -> Result<(), JobError>;
}
