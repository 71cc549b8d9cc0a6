//! Primary contexts, and which of them is a thread's.

use super::{Outcome, P, call, call_in_context, put};
use crate::codes::{CONTEXT_IS_DESTROYED, Code, INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED, refuse};
use crate::engine::{Scope, engine};
use crate::settings;
use crate::{device, environment};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::sync::Mutex;

/// How often each device's primary context is retained.
static RETAINED: Mutex<BTreeMap<u32, u32>> = Mutex::new(BTreeMap::new());
thread_local!(static STACK: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) });

/// Handles of contexts are recognisable, so that a stream or module in their place is refused.
const FIRST_HANDLE: usize = 0xc0de_0000;

fn handle(device: u32) -> P {
    (FIRST_HANDLE + 0x10 * device as usize) as P
}

fn device_of(context: P) -> Result<u32, Code> {
    let offset = (context as usize).wrapping_sub(FIRST_HANDLE);
    if !offset.is_multiple_of(0x10) {
        return Err(INVALID_CONTEXT);
    }
    i32::try_from(offset / 0x10).ok().and_then(|d| device::check(d).ok()).ok_or(INVALID_CONTEXT)
}

fn n_retained(device: u32) -> u32 {
    RETAINED.lock().expect("nothing panics here").get(&device).copied().unwrap_or(0)
}

/// The device of the calling thread's context.
pub fn current() -> Result<u32, Code> {
    let device = STACK.with_borrow(|s| s.last().copied()).ok_or(INVALID_CONTEXT)?;
    if n_retained(device) == 0 { Err(CONTEXT_IS_DESTROYED) } else { Ok(device) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(at: *mut P, ordinal: c_int) -> Code {
    call(|| {
        let device = device::check(ordinal)?;
        match environment::number("SOFTGPU_CONTEXT_CODE") {
            0 => {}
            planted => return Err(planted as Code),
        }
        settings::reach("context");
        put(at, handle(device))?;
        *RETAINED.lock().expect("nothing panics here").entry(device).or_default() += 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) -> Code {
    call(|| {
        let device = device::check(ordinal)?;
        let mut retained = RETAINED.lock().expect("nothing panics here");
        let n = retained.get_mut(&device).filter(|n| **n > 0).ok_or(INVALID_CONTEXT)?;
        *n -= 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(ordinal: c_int, flags: *mut c_uint, active: *mut c_int) -> Code {
    call(|| {
        let device = device::check(ordinal)?;
        put(flags, 0)?;
        put(active, c_int::from(n_retained(device) > 0))
    })
}

/// How threads wait makes no difference here.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxSetFlags_v2(ordinal: c_int, flags: c_uint) -> Code {
    call(|| {
        device::check(ordinal)?;
        if flags & !0x1f == 0 { Ok(()) } else { Err(INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: P) -> Code {
    call(|| {
        let device = if context.is_null() { None } else { Some(checked(context)?) };
        STACK.with_borrow_mut(|s| {
            s.pop();
            s.extend(device);
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: P) -> Code {
    call(|| {
        let device = checked(context)?;
        STACK.with_borrow_mut(|s| s.push(device));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(at: *mut P) -> Code {
    call(|| {
        let device = STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        if at.is_null() { Ok(()) } else { put(at, handle(device)) }
    })
}

fn checked(context: P) -> Result<u32, Code> {
    let device = device_of(context)?;
    if n_retained(device) == 0 { Err(CONTEXT_IS_DESTROYED) } else { Ok(device) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(at: *mut P) -> Code {
    call(|| put(at, STACK.with_borrow(|s| s.last().map_or(std::ptr::null_mut(), |d| handle(*d)))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(at: *mut c_int) -> Code {
    call_in_context(|device| put(at, device as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Code {
    call_in_context(|device| engine().synchronize(Scope::Device(device)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> Code {
    call_in_context(|_| {
        let mut written: Outcome = Ok(());
        for (at, value) in [(least, 0), (greatest, -5)] {
            if !at.is_null() {
                written = written.and(put(at, value));
            }
        }
        written
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetLimit(limit: c_int, _: usize) -> Code {
    call_in_context(|_| Err(refuse(NOT_SUPPORTED, format_args!("cuCtxSetLimit of limit {limit}"))))
}
