//! Initialisation, versions, errors, devices.

use super::{Outcome, P, call, code, put};
use crate::codes::{self, Code, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED, OK};
use crate::engine::engine;
use crate::{device, environment, memory, settings};
use std::ffi::{c_char, c_int, c_uint};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

static INITIALIZED: AtomicBool = AtomicBool::new(false);

pub fn check_initialized() -> Outcome {
    if INITIALIZED.load(SeqCst) { Ok(()) } else { Err(NOT_INITIALIZED) }
}

fn initialize(flags: u32) -> Outcome {
    let checks = [settings::check(), environment::number("SOFTGPU_INIT_CODE") as Code];
    if let Some(code) = checks.into_iter().find(|c| *c != OK) {
        return Err(code);
    }
    if flags != 0 {
        return Err(INVALID_VALUE);
    }
    if device::visible().is_empty() {
        return Err(NO_DEVICE);
    }
    engine();
    INITIALIZED.store(true, SeqCst);
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> Code {
    code(initialize(flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(at: *mut c_int) -> Code {
    code(put(at, environment::number("SOFTGPU_DRIVER_VERSION") as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(error: Code, at: *mut *const c_char) -> Code {
    let known = codes::describe(error);
    let written = put(at, known.map_or(std::ptr::null(), |(name, _)| name.as_ptr()));
    code(written.and(known.map(|_| ()).ok_or(INVALID_VALUE)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: Code, at: *mut *const c_char) -> Code {
    let known = codes::describe(error);
    let written = put(at, known.map_or(std::ptr::null(), |(_, text)| text.as_ptr()));
    code(written.and(known.map(|_| ()).ok_or(INVALID_VALUE)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(at: *mut c_int) -> Code {
    call(|| put(at, device::visible().len() as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(at: *mut c_int, ordinal: c_int) -> Code {
    call(|| put(at, device::check(ordinal)? as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetName(at: *mut c_char, room: c_int, ordinal: c_int) -> Code {
    call(|| {
        device::check(ordinal)?;
        put_text(at, room, &format!("softgpu sm_{}", device::capability()))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetPCIBusId(at: *mut c_char, room: c_int, ordinal: c_int) -> Code {
    call(|| put_text(at, room, &device::pci_bus_id(device::check(ordinal)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetByPCIBusId(at: *mut c_int, id: *const c_char) -> Code {
    call(|| {
        // SAFETY: see the module.
        let id = unsafe { std::ffi::CStr::from_ptr(id) }.to_string_lossy();
        let n = device::visible().len() as u32;
        let found = (0..n).find(|d| device::pci_bus_id(*d).eq_ignore_ascii_case(&id));
        put(at, found.ok_or(codes::INVALID_DEVICE)? as c_int)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(at: *mut [u8; 16], ordinal: c_int) -> Code {
    call(|| put(at, device::uuid(device::check(ordinal)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(at: *mut [u8; 16], ordinal: c_int) -> Code {
    cuDeviceGetUuid(at, ordinal)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(at: *mut c_int, attribute: c_int, ordinal: c_int) -> Code {
    call(|| put(at, device::attribute(attribute, device::check(ordinal)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(at: *mut usize, ordinal: c_int) -> Code {
    call(|| {
        device::check(ordinal)?;
        put(at, memory::total())
    })
}

/// Peers can reach each other's memory always.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceCanAccessPeer(at: *mut c_int, ordinal: c_int, peer: c_int) -> Code {
    call(|| put(at, c_int::from(device::check(ordinal)? != device::check(peer)?)))
}

/// As for all functions of the driver: this library has them under their own names.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetProcAddress_v2(name: *const c_char, at: *mut P, _: c_int, _: u64, status: *mut c_int) -> Code {
    // SAFETY: see the module; the library is loaded.
    let found = unsafe {
        let mut me: libc::Dl_info = std::mem::zeroed();
        libc::dladdr(cuInit as *const _, &raw mut me);
        let own = libc::dlopen(me.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let versioned = format!("{}_v2\0", std::ffi::CStr::from_ptr(name).to_string_lossy());
        let newest = libc::dlsym(own, versioned.as_ptr().cast());
        if newest.is_null() { libc::dlsym(own, name) } else { newest }
    };
    if !status.is_null() {
        // SAFETY: see the module.
        unsafe { status.write(c_int::from(found.is_null())) };
    }
    code(put(at, found).and(if found.is_null() { Err(codes::NOT_FOUND) } else { Ok(()) }))
}

/// As much of a text as there is room for, and a NUL.
fn put_text(at: *mut c_char, room: c_int, text: &str) -> Outcome {
    let room = usize::try_from(room).ok().filter(|r| *r > 0 && !at.is_null()).ok_or(INVALID_VALUE)?;
    let n = text.len().min(room - 1);
    // SAFETY: the caller has `room` bytes there.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), at, n);
        at.add(n).write(0);
    }
    Ok(())
}
