//! What NCCL uses of the rest of the software GPU.

use crate::engine::{Op, Poll, engine};
use crate::{device, memory};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

pub use crate::engine::Code;

/// The error of a device whose operation failed: `CUDA_ERROR_LAUNCH_FAILED`.
pub const FAILED: Code = 719;

unsafe extern "C" {
    fn cuStreamIsCapturing(stream: *mut c_void, at: *mut c_int) -> Code;
    fn cuCtxGetDevice(at: *mut c_int) -> Code;
}

/// Adds work to a stream, or to the graph that it is being captured into.
pub fn submit(stream: u64, begin: Arc<dyn Fn() -> Poll + Send + Sync>) -> Result<(), Code> {
    match engine().submit(stream, Op::Begin(begin)) {
        0 => Ok(()),
        code => Err(code),
    }
}

/// Whether the stream is being captured.
pub fn is_capturing(stream: u64) -> Result<bool, Code> {
    let mut capturing = 0;
    // SAFETY: a pointer to a local; the driver checks the stream.
    match unsafe { cuStreamIsCapturing(stream as *mut c_void, &raw mut capturing) } {
        0 => Ok(capturing != 0),
        code => Err(code),
    }
}

/// The device of the calling thread.
pub fn current_device() -> Result<u32, Code> {
    let mut ordinal = 0;
    // SAFETY: a pointer to a local.
    match unsafe { cuCtxGetDevice(&raw mut ordinal) } {
        0 => Ok(ordinal as u32),
        code => Err(code),
    }
}

/// The number of a device on the machine, whatever its number is in this process.
pub fn physical(ordinal: u32) -> u64 {
    u64::from(device::uuid(ordinal)[15])
}

/// Whether a device can read and write these bytes.
pub fn is_accessible(address: usize, bytes: usize) -> bool {
    bytes == 0 || memory::is_device_accessible(address, bytes)
}

/// The library's version, as it numbers it: 2.28.9 unless the settings say otherwise.
pub fn version() -> u64 {
    setting("SOFTGPU_NCCL_VERSION", 22_809)
}

/// A number from the settings.
pub fn setting(name: &str, otherwise: u64) -> u64 {
    crate::setting(name, otherwise)
}
