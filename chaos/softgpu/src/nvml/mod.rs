//! libnvidia-ml: facts of the devices and planted Xid events, without a context.
//!
//! A process sees the use of memory of its own allocations only; temperature and use are fixed.
//!
//! | setting | meaning |
//! |---|---|
//! | `SOFTGPU_NVML_XID` | `<code>@<milliseconds>`: an Xid event of the first device, so long after the first event set was made |
//! | `SOFTGPU_NVML_XID_FILE` | a file of lines `<code> <device>`; each line that is added is an event, in every process |
//! | `SOFTGPU_NVML_CLOCKS` | the reasons for which clocks are lowered; 0 |
//! | `SOFTGPU_NVML_ECC` | uncorrected memory errors of each device; 0 |
//! | `SOFTGPU_NVML_COMPUTE_MODE` | the mode of each device: 3 is exclusive to one process; 0 |
//! | `SOFTGPU_NVML_PROCESSES` | processes on each device: `<pid>:<bytes>`, several separated by commas |
//! | `SOFTGPU_NVML_INIT_CODE` | what `nvmlInit_v2` returns; 0 |

mod api;
mod events;

/// An `nvmlReturn_t`.
pub type Code = u32;

pub const SUCCESS: Code = 0;
pub const UNINITIALIZED: Code = 1;
pub const INVALID_ARGUMENT: Code = 2;
pub const NOT_SUPPORTED: Code = 3;
pub const NOT_FOUND: Code = 6;
pub const INSUFFICIENT_SIZE: Code = 7;
pub const TIMEOUT: Code = 10;

/// The kind of event that is imitated: `nvmlEventTypeXidCriticalError`.
pub const XID: u64 = 8;
