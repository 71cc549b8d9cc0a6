//! What the machines of a GPU share: its context, and the libraries' handles.

use crate::cudnn::Cudnn;
use crate::gpu::Gpu;
use crate::kernels::Kernels;
use crate::library::{LibraryError, Nccl};
use crate::product::Products;
use crate::ring::GpuMemory;
use std::sync::{Arc, OnceLock};

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) memory: Arc<GpuMemory>,
    pub(crate) kernels: Kernels,
    pub(crate) products: Products,
    /// Whether kernels may start before the ones before them have ended; they wait for that end themselves.
    pub(crate) launches_early: bool,
    /// cuDNN, if it is used.
    pub(crate) cudnn: Option<Cudnn>,
    /// NCCL, once a communicator was requested.
    pub(crate) nccl: OnceLock<Result<&'static Nccl, LibraryError>>,
}
