//! Failed calls of NVIDIA's libraries.

use crate::library::LibraryError;
use std::path::PathBuf;

/// A call of a library failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed on {device}: {text} ({code})")]
pub struct CudaError {
    /// The function.
    pub call: &'static str,
    /// The GPU.
    pub device: String,
    /// The library's error code.
    pub code: u32,
    /// The library's name of the code.
    pub text: String,
}

impl CudaError {
    /// The code of the driver for "out of memory".
    pub const OUT_OF_MEMORY: u32 = 2;
    /// The code of the driver for "busy or unavailable": another process uses the GPU exclusively.
    pub const DEVICE_UNAVAILABLE: u32 = 46;
}

/// A GPU that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// A library is missing or too old.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The machine has no GPU.
    #[error("this machine has no GPU: the driver reports {text} ({code})")]
    NoGpu {
        /// The driver's error code.
        code: u32,
        /// Its name.
        text: String,
    },
    /// The machine has fewer GPUs.
    #[error("GPU {ordinal} does not exist: this machine has {n_gpus}")]
    NoSuchGpu {
        /// The requested GPU.
        ordinal: u32,
        /// Number of GPUs.
        n_gpus: u32,
    },
    /// The driver is older than the compiler's programs.
    #[error("the driver supports CUDA {found}; at least {needed} is required: update the NVIDIA driver")]
    OldDriver {
        /// The driver's version.
        found: String,
        /// The oldest version that works.
        needed: String,
    },
    /// The GPU is too old.
    #[error("{device} has compute capability {found}; at least 8.0 is required")]
    OldGpu {
        /// The GPU.
        device: String,
        /// Its compute capability.
        found: String,
    },
    /// Another process uses the GPU exclusively, or its mode forbids all use.
    #[error(
        "{device} is taken: its compute mode lets one process use it{users}; end that process, or let several share the GPU with `nvidia-smi -c DEFAULT`"
    )]
    Taken {
        /// The GPU.
        device: String,
        /// The processes that use it, as a clause; empty if unknown.
        users: String,
    },
    /// cuDNN is requested and cannot be used.
    #[error("attention through cuDNN is requested: {0}")]
    Cudnn(#[source] DnnError),
    /// A process that opened the GPU has failed.
    #[error("{reason}")]
    Probe {
        /// Why, as a sentence.
        reason: String,
    },
    /// The GPU refuses a kernel that was compiled for it.
    #[error("{device} does not run kernels that {compiler} compiles: {reason}")]
    Kernel {
        /// The GPU.
        device: String,
        /// The file of the compiler.
        compiler: String,
        /// The compiler's or the driver's reason.
        reason: String,
    },
    /// The driver fails before a GPU is opened.
    #[error("{0}")]
    Driver(CudaError),
    /// The GPU cannot be opened: it is lost, or other processes have taken its memory.
    #[error("{0}; `nvidia-smi` shows the state of the GPU and the processes that use it")]
    Context(CudaError),
}

/// The oldest cuDNN that is used, as the library numbers it: gradients of rows whose length is no multiple of 128 need a
/// workaround before.
pub(crate) const DNN_VERSION_MIN: usize = 91_600;

/// cuDNN cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DnnError {
    /// It is missing or has not all functions.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// It is too old.
    #[error("cuDNN {} is too old: at least {} is required (found in {})", dnn_version(*found), dnn_version(DNN_VERSION_MIN), path.display())]
    Old {
        /// Its version, as it numbers it.
        found: usize,
        /// The file.
        path: PathBuf,
    },
    /// It cannot be opened on the GPU.
    #[error(transparent)]
    Call(#[from] CudaError),
}

fn dnn_version(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
