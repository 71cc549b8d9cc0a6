//! The C functions, by the names and signatures of nvml.h.

use super::{Code, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, SUCCESS, UNINITIALIZED, XID, events};
use crate::{device, environment, memory};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

type P = *mut c_void;

/// How often the library was initialised and not shut down.
static USERS: AtomicU32 = AtomicU32::new(0);

/// Handles of devices are recognisable.
const FIRST_HANDLE: usize = 0xde7_0000;

const MEBI: u64 = 1 << 20;
/// Bytes of each device that the driver keeps.
const RESERVED_BYTES: u64 = 600 * MEBI;
const CELSIUS: c_uint = 41;

#[repr(C)]
pub struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
pub struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
pub struct PciInfo {
    bus_id_legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [u8; 32],
}

#[repr(C)]
pub struct EventData {
    device: P,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Does a call if the library is initialised.
fn call(body: impl FnOnce() -> Result<(), Code>) -> Code {
    if USERS.load(SeqCst) == 0 {
        return UNINITIALIZED;
    }
    body().err().unwrap_or(SUCCESS)
}

fn put<T>(at: *mut T, value: T) -> Result<(), Code> {
    if at.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller gives a place for a result of this type.
    unsafe { at.write(value) };
    Ok(())
}

fn put_text(at: *mut c_char, length: c_uint, text: &str) -> Result<(), Code> {
    if text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    for (i, byte) in text.bytes().chain([0]).enumerate() {
        put(at.wrapping_add(i), byte as c_char)?;
    }
    Ok(())
}

fn handle(device: u32) -> P {
    (FIRST_HANDLE + 0x10 * device as usize) as P
}

fn device_of(handle: P) -> Result<u32, Code> {
    let offset = (handle as usize).wrapping_sub(FIRST_HANDLE);
    if !offset.is_multiple_of(0x10) {
        return Err(INVALID_ARGUMENT);
    }
    i32::try_from(offset / 0x10).ok().and_then(|d| device::check(d).ok()).ok_or(INVALID_ARGUMENT)
}

fn copied<const N: usize>(text: &str) -> [u8; N] {
    std::array::from_fn(|i| text.as_bytes().get(i).copied().filter(|_| i + 1 < N).unwrap_or(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> Code {
    match environment::foreign("SOFTGPU_NVML_INIT_CODE", 0) {
        0 => {
            USERS.fetch_add(1, SeqCst);
            SUCCESS
        }
        code => code as Code,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> Code {
    match USERS.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)) {
        Ok(_) => SUCCESS,
        Err(_) => UNINITIALIZED,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: Code) -> *const c_char {
    let text = match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        18 => c"Driver/library version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetDriverVersion(at: *mut c_char, length: c_uint) -> Code {
    call(|| put_text(at, length, "580.00.00"))
}

/// Devices of the machine: unlike the driver, NVML ignores `CUDA_VISIBLE_DEVICES`, but here both number alike.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(at: *mut c_uint) -> Code {
    call(|| put(at, device::visible().len() as c_uint))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, at: *mut P) -> Code {
    call(|| {
        let device = device::check(index as i32).map_err(|_| INVALID_ARGUMENT)?;
        put(at, handle(device))
    })
}

/// # Safety
/// `wanted` is a string that ends in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(wanted: *const c_char, at: *mut P) -> Code {
    call(|| {
        if wanted.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller's contract.
        let wanted = unsafe { CStr::from_ptr(wanted) }.to_string_lossy();
        let found = (0..device::visible().len() as u32).find(|device| device::uuid_name(*device) == wanted);
        put(at, handle(found.ok_or(NOT_FOUND)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetIndex(of: P, at: *mut c_uint) -> Code {
    call(|| put(at, device_of(of)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(of: P, at: *mut c_char, length: c_uint) -> Code {
    call(|| device_of(of).and_then(|_| put_text(at, length, &format!("softgpu sm_{}", device::capability()))))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(of: P, at: *mut c_char, length: c_uint) -> Code {
    call(|| put_text(at, length, &device::uuid_name(device_of(of)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo(of: P, at: *mut Memory) -> Code {
    call(|| {
        let used = (memory::used(device_of(of)?) + memory::taken()) as u64 + RESERVED_BYTES;
        let total = memory::total() as u64 + RESERVED_BYTES;
        put(at, Memory { total, free: total.saturating_sub(used), used })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUtilizationRates(of: P, at: *mut Utilization) -> Code {
    call(|| device_of(of).and_then(|_| put(at, Utilization { gpu: 0, memory: 0 })))
}

/// `sensor`: 0 is the GPU's, and the only one.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperature(of: P, sensor: c_int, at: *mut c_uint) -> Code {
    call(|| device_of(of).and_then(|_| if sensor == 0 { put(at, CELSIUS) } else { Err(INVALID_ARGUMENT) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCurrentClocksEventReasons(of: P, at: *mut c_ulonglong) -> Code {
    call(|| device_of(of).and_then(|_| put(at, environment::foreign("SOFTGPU_NVML_CLOCKS", 0))))
}

/// Errors of memory. `kind`: 0 corrected, 1 uncorrected; `counter`: 0 since the last reset, 1 since the device was made.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTotalEccErrors(of: P, kind: c_int, counter: c_int, at: *mut c_ulonglong) -> Code {
    call(|| {
        device_of(of)?;
        if !(0..2).contains(&kind) || !(0..2).contains(&counter) {
            return Err(INVALID_ARGUMENT);
        }
        put(at, if kind == 1 { environment::foreign("SOFTGPU_NVML_ECC", 0) } else { 0 })
    })
}

/// As `nvmlDeviceGetTotalEccErrors`, for one place; all errors are in the device's memory (2).
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryErrorCounter(
    of: P,
    kind: c_int,
    counter: c_int,
    location: c_int,
    at: *mut c_ulonglong,
) -> Code {
    if location == 2 {
        return nvmlDeviceGetTotalEccErrors(of, kind, counter, at);
    }
    call(|| device_of(of).and_then(|_| if (0..8).contains(&location) { put(at, 0) } else { Err(NOT_SUPPORTED) }))
}

#[repr(C)]
pub struct ProcessInfo {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeMode(of: P, at: *mut c_uint) -> Code {
    call(|| device_of(of).and_then(|_| put(at, environment::foreign("SOFTGPU_NVML_COMPUTE_MODE", 0) as c_uint)))
}

/// The planted processes. `count` holds the room for them, then their number.
///
/// # Safety
/// `count` points to the number of places at `at`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    of: P,
    count: *mut c_uint,
    at: *mut ProcessInfo,
) -> Code {
    call(|| {
        device_of(of)?;
        let text = environment::text("SOFTGPU_NVML_PROCESSES");
        let parsed = text.split(',').filter_map(|one| one.split_once(':'));
        let parsed: Vec<(c_uint, u64)> =
            parsed.filter_map(|(pid, bytes)| Some((pid.parse().ok()?, bytes.parse().ok()?))).collect();
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller's contract.
        let room = unsafe { *count } as usize;
        put(count, parsed.len() as c_uint)?;
        if parsed.len() > room {
            return Err(INSUFFICIENT_SIZE);
        }
        for (i, (pid, used)) in parsed.into_iter().enumerate() {
            let none = c_uint::MAX;
            put(at.wrapping_add(i), ProcessInfo { pid, used, gpu_instance: none, compute_instance: none })?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(of: P, at: *mut PciInfo) -> Code {
    call(|| {
        let id = device::pci_bus_id(device_of(of)?);
        let bus = id.get(5..7).and_then(|bus| u32::from_str_radix(bus, 16).ok()).unwrap_or(0);
        let info = PciInfo {
            bus_id_legacy: copied(&id),
            domain: 0,
            bus,
            device: 0,
            pci_device_id: 0x2330_10de,
            pci_subsystem_id: 0x16c1_10de,
            bus_id: copied(&format!("0000{id}")),
        };
        put(at, info)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetSupportedEventTypes(of: P, at: *mut c_ulonglong) -> Code {
    call(|| device_of(of).and_then(|_| put(at, XID)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetCreate(at: *mut P) -> Code {
    call(|| put(at, events::create() as P))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(set: P) -> Code {
    call(|| match events::free(set as usize) {
        SUCCESS => Ok(()),
        code => Err(code),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(of: P, kinds: c_ulonglong, set: P) -> Code {
    call(|| match events::register(set as usize, device_of(of)?, kinds) {
        SUCCESS => Ok(()),
        code => Err(code),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait_v2(set: P, at: *mut EventData, milliseconds: c_uint) -> Code {
    call(|| {
        let event = events::wait(set as usize, Duration::from_millis(u64::from(milliseconds)))?;
        let none = c_uint::MAX;
        let device = handle(event.device);
        put(at, EventData { device, kind: XID, data: event.xid, gpu_instance: none, compute_instance: none })
    })
}
