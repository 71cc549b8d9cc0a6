//! Streams, their host functions and memory operations.

use super::{Outcome, P, call_in_context, put};
use crate::codes::{Code, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, refuse};
use crate::engine::{HostFunction, Op, Poll, Scope, engine};
use crate::{environment, memory};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU32, Ordering::Acquire};
use std::sync::{Arc, Mutex};

const NON_BLOCKING: c_uint = 1;

fn create(at: *mut P, device: u32, flags: c_uint, priority: c_int) -> Outcome {
    if flags & !NON_BLOCKING != 0 {
        return Err(INVALID_VALUE);
    }
    put(at, engine().create_stream(device, flags & NON_BLOCKING == 0, priority.clamp(-5, 0)) as P)
}

/// Work goes to streams of the current context only.
pub fn check_of_device(stream: P, device: u32) -> Outcome {
    if engine().lock().stream(stream as u64)?.device == device { Ok(()) } else { Err(INVALID_HANDLE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(at: *mut P, flags: c_uint) -> Code {
    call_in_context(|device| create(at, device, flags, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(at: *mut P, flags: c_uint, priority: c_int) -> Code {
    call_in_context(|device| create(at, device, flags, priority))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetPriority(stream: P, at: *mut c_int) -> Code {
    call_in_context(|_| put(at, engine().lock().stream(stream as u64)?.priority))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetFlags(stream: P, at: *mut c_uint) -> Code {
    call_in_context(|_| put(at, c_uint::from(!engine().lock().stream(stream as u64)?.is_blocking)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: P) -> Code {
    call_in_context(|_| engine().destroy_stream(stream as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: P) -> Code {
    call_in_context(|_| engine().synchronize(Scope::Stream(stream as u64)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: P) -> Code {
    call_in_context(|_| engine().query(stream as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: P, event: P, flags: c_uint) -> Code {
    call_in_context(|_| {
        if flags != 0 {
            return Err(refuse(NOT_SUPPORTED, format_args!("cuStreamWaitEvent with flags {flags:#x}")));
        }
        engine().wait_event(stream as u64, event as u64)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(stream: P, function: Option<HostFunction>, data: P) -> Code {
    call_in_context(|_| {
        let call = function.ok_or(INVALID_VALUE)?;
        engine().enqueue(stream as u64, Op::Host { call, data: data as usize })
    })
}

fn check_word(at: u64) -> Outcome {
    if at.is_multiple_of(4) && memory::is_device_accessible(at as usize, 4) { Ok(()) } else { Err(INVALID_VALUE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWriteValue32_v2(stream: P, at: u64, value: u32, flags: c_uint) -> Code {
    call_in_context(|_| {
        if environment::number("SOFTGPU_STREAM_WRITES") == 0 {
            return Err(NOT_SUPPORTED);
        }
        check_word(at)?;
        if flags & !1 != 0 {
            return Err(INVALID_VALUE);
        }
        engine().enqueue(stream as u64, Op::Write32 { to: at as usize, value })
    })
}

/// `flags`: 0 at least (cyclically), 1 equal, 2 and, 3 nor.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitValue32_v2(stream: P, at: u64, value: u32, flags: c_uint) -> Code {
    call_in_context(|_| {
        check_word(at)?;
        let condition = flags & !(1 << 30);
        if condition > 3 {
            return Err(INVALID_VALUE);
        }
        let is_met = move || {
            // SAFETY: an aligned word that the device can reach, checked above.
            let word = unsafe { AtomicU32::from_ptr(at as *mut u32) }.load(Acquire);
            Ok(match condition {
                0 => word.wrapping_sub(value) as i32 >= 0,
                1 => word == value,
                2 => word & value != 0,
                _ => !(word | value) != 0,
            })
        };
        let begin = move || -> Poll { Arc::new(Mutex::new(is_met)) };
        engine().enqueue(stream as u64, Op::Begin(Arc::new(begin)))
    })
}
