//! Errors of starting the device thread, the thread on which programs run.

/// Why a device thread could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    /// The system refused a thread.
    #[error("cannot start the device thread")]
    Spawn(#[source] std::io::Error),
    /// The system refused the compute threads.
    #[error("cannot start {n_threads} compute threads")]
    Pool {
        /// The wanted number of threads.
        n_threads: usize,
        /// The reason.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The device cannot be used.
    #[error("{reason}")]
    Device {
        /// Why.
        reason: String,
    },
}
