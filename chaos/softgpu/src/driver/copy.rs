//! Copies and memory sets.
//!
//! Pinned memory of the host is read and written when the copy's turn comes; until a copy to it was waited for, it holds
//! poison. Pageable memory is read at once, and a copy to it returns when it is done, as cuda.h documents.

use super::{Outcome, P, call_in_context};
use crate::codes::{Code, INVALID_VALUE, refuse};
use crate::engine::{Op, Scope, engine};
use crate::memory;
use std::ffi::{c_uchar, c_uint, c_ushort};

/// When a copy's caller goes on.
#[derive(Clone, Copy)]
enum Then {
    Stream(u64),
    Wait,
}

fn check_device(what: &str, address: u64, bytes: usize) -> Outcome {
    if memory::is_device(address as usize, bytes) {
        return Ok(());
    }
    Err(refuse(
        INVALID_VALUE,
        format_args!("{what}: {bytes} bytes at {address:#x} are not in one allocation of a device"),
    ))
}

fn submit(device: u32, op: Op, then: Then) -> Outcome {
    match then {
        Then::Stream(stream) => engine().enqueue(stream, op),
        Then::Wait => engine().run_synchronously(device, op),
    }
}

fn to_device(device: u32, to: u64, from: P, bytes: usize, then: Then) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    check_device("copy to the device", to, bytes)?;
    let (to, from) = (to as usize, from as usize);
    let is_captured = matches!(then, Then::Stream(s) if engine().lock().capture_status(s)? != 0);
    let op = if memory::is_pinned(from, bytes)? || is_captured {
        Op::Copy { to, from, bytes }
    } else {
        // SAFETY: see `driver`; the program's memory is read before the call returns.
        Op::Bytes { to, bytes: unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.into() }
    };
    submit(device, op, then)
}

fn to_host(device: u32, to: P, from: u64, bytes: usize, then: Then) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    check_device("copy from the device", from, bytes)?;
    from_accessible(device, to, from, bytes, then)
}

/// From memory that the device can reach to memory of the host.
fn from_accessible(device: u32, to: P, from: u64, bytes: usize, then: Then) -> Outcome {
    let is_pinned = memory::is_pinned(to as usize, bytes)?;
    let is_captured = matches!(then, Then::Stream(s) if engine().lock().capture_status(s)? != 0);
    if !is_captured {
        // SAFETY: see `driver`.
        unsafe { std::ptr::write_bytes(to.cast::<u8>(), 0xff, bytes) };
    }
    submit(device, Op::Copy { to: to as usize, from: from as usize, bytes }, then)?;
    match then {
        Then::Stream(stream) if !is_pinned && !is_captured => engine().synchronize(Scope::Stream(stream)),
        _ => Ok(()),
    }
}

fn on_device(device: u32, to: u64, from: u64, bytes: usize, then: Then) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    check_device("copy on the device", to, bytes)?;
    check_device("copy on the device", from, bytes)?;
    submit(device, Op::Copy { to: to as usize, from: from as usize, bytes }, then)
}

/// The kinds of both addresses tell the direction, as with unified addressing.
fn unified(device: u32, to: u64, from: u64, bytes: usize, then: Then) -> Outcome {
    let is_device = |address: u64| memory::is_device(address as usize, bytes);
    match (is_device(to), is_device(from)) {
        _ if bytes == 0 => Ok(()),
        (true, true) => on_device(device, to, from, bytes, then),
        (true, false) => to_device(device, to, from as P, bytes, then),
        (false, true) => to_host(device, to as P, from, bytes, then),
        (false, false) if memory::is_pinned(from as usize, bytes)? => {
            from_accessible(device, to as P, from, bytes, then)
        }
        (false, false) if memory::is_pinned(to as usize, bytes)? => {
            // SAFETY: see `driver`; the program's memory is read before the call returns.
            let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.into();
            submit(device, Op::Bytes { to: to as usize, bytes }, then)
        }
        (false, false) => Err(refuse(
            INVALID_VALUE,
            format_args!("copy of {bytes} bytes between two places that no device can reach"),
        )),
    }
}

fn set(device: u32, to: u64, pattern: u32, width: usize, n: usize, then: Then) -> Outcome {
    if n == 0 {
        return Ok(());
    }
    if !(to as usize).is_multiple_of(width) {
        return Err(refuse(INVALID_VALUE, format_args!("memory set at {to:#x}, which is not a multiple of {width}")));
    }
    let bytes = n.checked_mul(width).ok_or(INVALID_VALUE)?;
    // Pinned memory has an address on devices.
    if !memory::is_device_accessible(to as usize, bytes) {
        check_device("memory set", to, bytes)?;
    }
    submit(device, Op::Fill { to: to as usize, pattern, width, n }, then)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: P) -> Code {
    call_in_context(|device| unified(device, to, from, bytes, Then::Stream(stream as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: P, bytes: usize, stream: P) -> Code {
    call_in_context(|device| to_device(device, to, from, bytes, Then::Stream(stream as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(to: u64, from: P, bytes: usize) -> Code {
    call_in_context(|device| to_device(device, to, from, bytes, Then::Wait))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(to: P, from: u64, bytes: usize, stream: P) -> Code {
    call_in_context(|device| to_host(device, to, from, bytes, Then::Stream(stream as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(to: P, from: u64, bytes: usize) -> Code {
    call_in_context(|device| to_host(device, to, from, bytes, Then::Wait))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: P) -> Code {
    call_in_context(|device| on_device(device, to, from, bytes, Then::Stream(stream as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> Code {
    call_in_context(|device| on_device(device, to, from, bytes, Then::Wait))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: c_uchar, n: usize, stream: P) -> Code {
    call_in_context(|device| set(device, to, value.into(), 1, n, Then::Stream(stream as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16Async(to: u64, value: c_ushort, n: usize, stream: P) -> Code {
    call_in_context(|device| set(device, to, value.into(), 2, n, Then::Stream(stream as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, n: usize, stream: P) -> Code {
    call_in_context(|device| set(device, to, value, 4, n, Then::Stream(stream as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(to: u64, value: c_uchar, n: usize) -> Code {
    call_in_context(|device| set(device, to, value.into(), 1, n, Then::Wait))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16_v2(to: u64, value: c_ushort, n: usize) -> Code {
    call_in_context(|device| set(device, to, value.into(), 2, n, Then::Wait))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(to: u64, value: c_uint, n: usize) -> Code {
    call_in_context(|device| set(device, to, value, 4, n, Then::Wait))
}
