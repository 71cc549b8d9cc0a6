//! Selects the device that trains. No other file outside a device's own crate names a device.

use crate::config::precision::DeviceChoice;
use crate::error::JobError;
use phalanx_cpu::CpuDevice;
pub use phalanx_cuda::GpuInfo;
use phalanx_cuda::{CudaDevice, OpenError, Search};
use phalanx_device::Device;
use std::env::var_os;
use std::path::PathBuf;
use std::sync::Arc;

/// The device that a job requests. A GPU is not opened before its device thread starts.
///
/// # Errors
/// [`JobError::Gpu`] if the job requests a GPU and this machine has none that works.
pub fn of(choice: DeviceChoice) -> Result<Arc<dyn Device>, JobError> {
    Ok(match choice {
        DeviceChoice::Cpu => host(),
        DeviceChoice::Cuda => Arc::new(gpu()?),
        DeviceChoice::Auto => gpu().map_or_else(|_| host(), |gpu| Arc::new(gpu) as Arc<dyn Device>),
    })
}

/// The GPUs of this machine: names and bytes of memory.
///
/// # Errors
/// Why none can be used.
pub fn gpu() -> Result<CudaDevice, OpenError> {
    // Read here because every process of a job chooses its device: rank processes inherit the variables of their node.
    let search = Search::new(var_os("PHALANX_CUDA_LIBS").as_deref(), var_os("PATH").as_deref());
    let visible = var_os("CUDA_VISIBLE_DEVICES").map(|names| names.to_string_lossy().into_owned());
    CudaDevice::find(search, cache_folder().map(|cache| cache.join("kernels")), visible.as_deref())
}

/// The device for which a job is compiled when nothing runs: a job for GPUs needs none.
///
/// # Errors
/// As [`of`], unless the job requests a GPU.
pub fn planned(choice: DeviceChoice) -> Result<Arc<dyn Device>, JobError> {
    match choice {
        DeviceChoice::Cuda => Ok(gpu().map_or_else(|_| Arc::new(CudaDevice::planned()), Arc::new)),
        DeviceChoice::Auto | DeviceChoice::Cpu => of(choice),
    }
}

/// The folder in which this user's programs keep what they can make again.
pub fn cache_folder() -> Option<PathBuf> {
    let cache = var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    cache.map(|cache| cache.join("phalanx"))
}

/// The processors of this machine.
pub fn host() -> Arc<dyn Device> {
    Arc::new(CpuDevice)
}

#[cfg(test)]
pub(crate) mod remote;
