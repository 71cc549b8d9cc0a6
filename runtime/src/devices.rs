//! Selects the device that trains. No other file outside a device's own crate names a device.

use crate::config::precision::{AttentionEngine, DeviceChoice, GpuCollectives, PrecisionSection};
use crate::error::JobError;
use phalanx_cpu::CpuDevice;
pub(crate) use phalanx_cpu::isa::isa as cpu_isa;
pub(crate) use phalanx_cpu::kernels::fingerprint::fingerprint;
pub use phalanx_cuda::GpuInfo;
use phalanx_cuda::{AttentionChoice, Choice, CudaDevice, OpenError, Search};
use phalanx_device::Device;
use std::env::var_os;
use std::path::PathBuf;
use std::sync::Arc;

/// A device, and why it is no GPU if a GPU would have been chosen.
pub type Chosen = (Arc<dyn Device>, Option<OpenError>);

/// The device of this choice, with the defaults of all else. A GPU is not opened before its device thread starts.
///
/// # Errors
/// As [`chosen`].
pub fn of(device: DeviceChoice) -> Result<Arc<dyn Device>, JobError> {
    Ok(chosen(&PrecisionSection { device, ..PrecisionSection::default() })?.0)
}

/// The device that a job requests, with the reason if `auto` cannot choose a GPU.
///
/// # Errors
/// [`JobError::Gpu`] if the job requests a GPU or cuDNN, and this machine has none that works; [`JobError::CpuIsa`].
pub fn chosen(config: &PrecisionSection) -> Result<Chosen, JobError> {
    phalanx_cpu::isa::limit().map_err(JobError::CpuIsa)?;
    // Both let ranks that share a GPU use NCCL; read here as those of `gpu`.
    let permits_sharing = ["NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"].map(var_os).iter().any(Option::is_some);
    let collectives = match config.gpu_collectives {
        GpuCollectives::Auto if permits_sharing => Choice::BestOfAny,
        GpuCollectives::Auto => Choice::Best,
        GpuCollectives::Nccl => Choice::Nccl,
        GpuCollectives::Staged => Choice::Staged,
    };
    let attention = match config.attention {
        AttentionEngine::Auto => AttentionChoice::Auto,
        AttentionEngine::Cudnn => AttentionChoice::Cudnn,
        AttentionEngine::Own => AttentionChoice::Own,
    };
    let configured = |gpu: CudaDevice| gpu.with_collectives(collectives).with_attention(attention);
    let shared = |gpu: CudaDevice| Arc::new(gpu) as Arc<dyn Device>;
    let requires_gpu = config.device == DeviceChoice::Cuda || attention == AttentionChoice::Cudnn;
    Ok(match config.device {
        DeviceChoice::Cpu => (host(), None),
        _ if requires_gpu => (shared(configured(tried(gpu()?)?)?), None),
        _ => match gpu().and_then(CudaDevice::free).and_then(tried).and_then(configured) {
            Ok(gpu) => (shared(gpu), None),
            Err(reason) => (host(), Some(reason)),
        },
    })
}

/// The same GPU, which works.
fn tried(gpu: CudaDevice) -> Result<CudaDevice, OpenError> {
    probe::gpu().map(|()| gpu)
}

/// The choice for processes of a node that uses this device: they must not choose another.
pub(crate) fn choice_of(device: &dyn Device) -> DeviceChoice {
    if device.name() == host().name() { DeviceChoice::Cpu } else { DeviceChoice::Cuda }
}

/// The GPUs of this machine: names and bytes of memory.
///
/// # Errors
/// Why none can be used.
pub fn gpu() -> Result<CudaDevice, OpenError> {
    // Read here because every process of a job chooses its device: rank processes inherit the variables of their node.
    let program = std::env::current_exe().ok();
    let search = Search::new(var_os("PHALANX_CUDA_LIBS").as_deref(), program.as_deref(), var_os("PATH").as_deref());
    let visible = var_os("CUDA_VISIBLE_DEVICES").map(|names| names.to_string_lossy().into_owned());
    CudaDevice::find(search, cache_folder().map(|cache| cache.join("kernels")), visible.as_deref())
}

/// The device for which a job is compiled when nothing runs: a job for GPUs needs none.
///
/// # Errors
/// As [`of`], unless the job requests a GPU.
pub fn planned(choice: DeviceChoice) -> Result<Chosen, JobError> {
    match choice {
        DeviceChoice::Cuda => Ok((gpu().map_or_else(|_| Arc::new(CudaDevice::planned()), Arc::new), None)),
        DeviceChoice::Auto | DeviceChoice::Cpu => Ok((of(choice)?, None)),
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

pub(crate) mod kept;
pub(crate) mod probe;
#[cfg(test)]
pub(crate) mod remote;
#[cfg(test)]
pub(crate) mod software_gpu;
