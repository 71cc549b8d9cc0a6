//! The device thread: the one thread on which programs run.

/// Why a device thread could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    /// The system refused a thread.
    #[error("cannot start the device thread")]
    Spawn(#[source] std::io::Error),
    /// The system refused the threads that compute.
    #[error("cannot start {n_threads} compute threads")]
    Pool {
        /// How many were wanted.
        n_threads: usize,
        /// The reason.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
