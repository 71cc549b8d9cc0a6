//! Allocations of devices, pinned memory of the host.

use super::{P, call_in_context, put};
use crate::codes::{Code, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, refuse};
use crate::engine::{Scope, engine};
use crate::memory::{self, Kind};
use std::ffi::{c_int, c_uint, c_void};

const PORTABLE: c_uint = 1;
const DEVICE_MAP: c_uint = 2;
const WRITE_COMBINED: c_uint = 4;

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(at: *mut u64, bytes: usize) -> Code {
    call_in_context(|device| {
        crate::settings::take_changes();
        let mut core = engine().lock();
        core.check_unsafe_call("cuMemAlloc")?;
        let fails = core.faults.fails_allocation();
        drop(core);
        if fails { Err(OUT_OF_MEMORY) } else { put(at, memory::alloc(bytes, Kind::Device(device))? as u64) }
    })
}

/// As the driver, waits for all work before.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(at: u64) -> Code {
    call_in_context(|device| {
        if at == 0 {
            return Ok(());
        }
        engine().lock().check_unsafe_call("cuMemFree")?;
        engine().synchronize(Scope::Device(device))?;
        memory::free(at as usize, true)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    call_in_context(|device| {
        put(total, memory::total())?;
        put(free, memory::total().saturating_sub(memory::used(device) + memory::taken()))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, at: u64) -> Code {
    call_in_context(|_| {
        let (first, n, _) = memory::find(at as usize).ok_or(crate::codes::NOT_FOUND)?;
        if !start.is_null() {
            put(start, first as u64)?;
        }
        if bytes.is_null() { Ok(()) } else { put(bytes, n) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(at: *mut P, bytes: usize, flags: c_uint) -> Code {
    call_in_context(|_| {
        if flags & !(PORTABLE | DEVICE_MAP | WRITE_COMBINED) != 0 {
            return Err(refuse(INVALID_VALUE, format_args!("cuMemHostAlloc with flags {flags:#x}")));
        }
        engine().lock().check_unsafe_call("cuMemHostAlloc")?;
        put(at, memory::alloc(bytes, Kind::Pinned)? as P)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(at: *mut P, bytes: usize) -> Code {
    cuMemHostAlloc(at, bytes, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(at: P) -> Code {
    call_in_context(|device| {
        engine().lock().check_unsafe_call("cuMemFreeHost")?;
        engine().synchronize(Scope::Device(device))?;
        memory::free(at as usize, false)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetDevicePointer_v2(at: *mut u64, host: P, flags: c_uint) -> Code {
    call_in_context(|_| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        match memory::find(host as usize) {
            Some((_, _, Kind::Pinned | Kind::Registered { mapped: true })) => put(at, host as u64),
            _ => Err(INVALID_VALUE),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(host: P, bytes: usize, flags: c_uint) -> Code {
    call_in_context(|_| {
        if flags & !(PORTABLE | DEVICE_MAP) != 0 {
            return Err(refuse(NOT_SUPPORTED, format_args!("cuMemHostRegister with flags {flags:#x}")));
        }
        if host.is_null() || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        memory::register(host as usize, bytes, flags & DEVICE_MAP != 0)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(host: P) -> Code {
    call_in_context(|device| {
        engine().synchronize(Scope::Device(device))?;
        memory::unregister(host as usize)
    })
}

/// The memory's type (1 host, 2 device), its device, its addresses, its allocation's range.
#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttribute(at: *mut c_void, attribute: c_int, address: u64) -> Code {
    call_in_context(|_| {
        let (start, bytes, kind) = memory::find(address as usize).ok_or(INVALID_VALUE)?;
        match (attribute, kind) {
            (2, Kind::Device(_)) => put(at.cast(), 2u32),
            (2, _) => put(at.cast(), 1u32),
            (3, _) => put(at.cast(), address),
            (4, Kind::Pinned | Kind::Registered { .. }) => put(at.cast(), address),
            (9, Kind::Device(device)) => put(at.cast(), device as c_int),
            (11, _) => put(at.cast(), start as u64),
            (12, _) => put(at.cast(), bytes),
            _ => Err(refuse(INVALID_VALUE, format_args!("cuPointerGetAttribute: attribute {attribute} of {kind:?}"))),
        }
    })
}
