//! Selects the device that trains. No other file outside a device's own crate names a device.

use crate::config::precision::{AttentionEngine, DeviceChoice};
use crate::error::JobError;
use phalanx_cpu::CpuDevice;
pub use phalanx_cuda::GpuInfo;
use phalanx_cuda::{AttentionChoice, CudaDevice, OpenError, Search};
use phalanx_device::Device;
use std::env::var_os;
use std::path::PathBuf;
use std::sync::Arc;

/// The device that a job requests, and what attention runs through if it is a GPU. A GPU is not opened before its device thread
/// starts.
///
/// # Errors
/// [`JobError::Gpu`] if the job requests a GPU or cuDNN and this machine has none that works.
pub fn of(choice: DeviceChoice, attention: AttentionEngine) -> Result<Arc<dyn Device>, JobError> {
    let gpu = || {
        gpu()?.with_attention(match attention {
            AttentionEngine::Auto => AttentionChoice::Auto,
            AttentionEngine::Cudnn => AttentionChoice::Cudnn,
            AttentionEngine::Own => AttentionChoice::Own,
        })
    };
    Ok(match (choice, attention) {
        (DeviceChoice::Cpu, _) => host(),
        (DeviceChoice::Cuda, _) | (DeviceChoice::Auto, AttentionEngine::Cudnn) => Arc::new(gpu()?),
        (DeviceChoice::Auto, _) => gpu().map_or_else(|_| host(), |gpu| Arc::new(gpu) as Arc<dyn Device>),
    })
}

/// The GPUs of this machine: names and bytes of memory.
///
/// # Errors
/// Why none can be used.
pub fn gpu() -> Result<CudaDevice, OpenError> {
    // Read here because every process of a job chooses its device: rank processes inherit the variables of their node.
    let search = Search::new(var_os("PHALANX_CUDA_LIBS").as_deref(), var_os("PATH").as_deref());
    let cache = var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    let visible = var_os("CUDA_VISIBLE_DEVICES").map(|names| names.to_string_lossy().into_owned());
    CudaDevice::find(search, cache.map(|cache| cache.join("phalanx/kernels")), visible.as_deref())
}

/// The processors of this machine.
pub fn host() -> Arc<dyn Device> {
    Arc::new(CpuDevice)
}

#[cfg(test)]
pub(crate) mod remote;
