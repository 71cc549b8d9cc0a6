//! NVML, the state of GPUs without a context on them.

use super::binding::functions;
use super::driver::Code;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

/// An `nvmlDevice_t`.
pub(crate) type Device = *mut c_void;
/// An `nvmlEventSet_t`.
pub(crate) type EventSet = *mut c_void;

/// `nvmlEventTypeXidCriticalError`.
pub(crate) const XID: u64 = 8;
/// `NVML_ERROR_TIMEOUT`.
pub(crate) const TIMEOUT: Code = 10;
/// `NVML_ERROR_GPU_IS_LOST`.
pub(crate) const GPU_IS_LOST: Code = 15;
/// `NVML_COMPUTEMODE_PROHIBITED`.
pub(crate) const COMPUTE_PROHIBITED: c_uint = 2;
/// `NVML_COMPUTEMODE_EXCLUSIVE_PROCESS`.
pub(crate) const EXCLUSIVE_PROCESS: c_uint = 3;

/// An `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Memory {
    pub(crate) total: c_ulonglong,
    pub(crate) free: c_ulonglong,
    pub(crate) used: c_ulonglong,
}

/// An `nvmlEventData_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct EventData {
    pub(crate) device: Device,
    pub(crate) kind: c_ulonglong,
    pub(crate) data: c_ulonglong,
    pub(crate) gpu_instance: c_uint,
    pub(crate) compute_instance: c_uint,
}

/// An `nvmlProcessInfo_t` of the third version.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ProcessInfo {
    pub(crate) pid: c_uint,
    pub(crate) used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

functions! {
    /// Functions of libnvidia-ml.
    Nvml {
        fn nvmlInit_v2() -> Code;
        fn nvmlErrorString(Code) -> *const c_char;
        fn nvmlDeviceGetHandleByUUID(*const c_char, *mut Device) -> Code;
        fn nvmlDeviceGetMemoryInfo(Device, *mut Memory) -> Code;
        fn nvmlDeviceGetTemperature(Device, c_uint, *mut c_uint) -> Code;
        fn nvmlDeviceGetTotalEccErrors(Device, c_uint, c_uint, *mut c_ulonglong) -> Code;
        fn nvmlDeviceGetComputeMode(Device, *mut c_uint) -> Code;
        fn nvmlEventSetCreate(*mut EventSet) -> Code;
        fn nvmlEventSetFree(EventSet) -> Code;
        fn nvmlDeviceRegisterEvents(Device, c_ulonglong, EventSet) -> Code;
    }
    optional {
        // Newer and older names of one function.
        fn nvmlDeviceGetCurrentClocksEventReasons(Device, *mut c_ulonglong) -> Code;
        fn nvmlDeviceGetCurrentClocksThrottleReasons(Device, *mut c_ulonglong) -> Code;
        fn nvmlEventSetWait_v2(EventSet, *mut EventData, c_uint) -> Code;
        fn nvmlDeviceGetComputeRunningProcesses_v3(Device, *mut c_uint, *mut ProcessInfo) -> Code;
    }
}

impl Nvml {
    /// Description of an error code.
    pub(crate) fn text(&self, code: Code) -> String {
        // SAFETY: the library returns a string of its own, for any code.
        let text = unsafe { (self.nvmlErrorString)(code) };
        if text.is_null() {
            return "an unknown error".to_owned();
        }
        // SAFETY: a null-terminated string that lives as long as the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// `NVML_TEMPERATURE_GPU`.
pub(crate) const GPU_SENSOR: c_uint = 0;
/// `NVML_MEMORY_ERROR_TYPE_UNCORRECTED` and `NVML_VOLATILE_ECC`.
pub(crate) const UNCORRECTED_SINCE_RESET: (c_uint, c_uint) = (1, 0);
/// A `c_int` and a `c_uint` are passed alike; enumerations of NVML are not negative.
const _: () = assert!(size_of::<c_int>() == size_of::<c_uint>());
