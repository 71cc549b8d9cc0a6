//! Selects the device that trains. No other file outside a device's own crate names a device.

use crate::config::precision::DeviceChoice;
use crate::error::JobError;
use phalanx_cpu::CpuDevice;
use phalanx_device::Device;
use std::sync::Arc;

/// The device that a job requests.
///
/// # Errors
/// [`JobError::BackendUnavailable`] if this build cannot use it.
pub fn of(choice: DeviceChoice) -> Result<Arc<dyn Device>, JobError> {
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cpu => Ok(host()),
        DeviceChoice::Cuda => Err(JobError::BackendUnavailable { device: choice.word() }),
    }
}

/// The processors of this machine.
pub fn host() -> Arc<dyn Device> {
    Arc::new(CpuDevice)
}

#[cfg(test)]
pub(crate) mod remote;
