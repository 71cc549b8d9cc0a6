//! Events.

use super::{P, call_in_context, put};
use crate::codes::{Code, INVALID_VALUE, NOT_SUPPORTED, OK, refuse};
use crate::engine::engine;
use std::ffi::c_uint;

const BLOCKING_SYNC: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(at: *mut P, flags: c_uint) -> Code {
    call_in_context(|device| {
        if flags & !(BLOCKING_SYNC | DISABLE_TIMING) != 0 {
            return Err(refuse(INVALID_VALUE, format_args!("cuEventCreate with flags {flags:#x}")));
        }
        put(at, engine().create_event(device, flags & DISABLE_TIMING == 0) as P)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: P) -> Code {
    call_in_context(|_| engine().destroy_event(event as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: P, stream: P) -> Code {
    call_in_context(|_| engine().record(event as u64, stream as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecordWithFlags(event: P, stream: P, flags: c_uint) -> Code {
    call_in_context(|_| match flags {
        0 => engine().record(event as u64, stream as u64),
        _ => Err(refuse(NOT_SUPPORTED, format_args!("cuEventRecordWithFlags with flags {flags:#x}"))),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: P) -> Code {
    call_in_context(|_| as_result(engine().await_event(event as u64, false)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: P) -> Code {
    call_in_context(|_| as_result(engine().await_event(event as u64, true)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, from: P, to: P) -> Code {
    call_in_context(|_| put(milliseconds, engine().elapsed(from as u64, to as u64)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(milliseconds: *mut f32, from: P, to: P) -> Code {
    cuEventElapsedTime(milliseconds, from, to)
}

fn as_result(code: Code) -> Result<(), Code> {
    if code == OK { Ok(()) } else { Err(code) }
}
