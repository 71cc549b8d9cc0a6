//! Handles: a device and the stream that executions go to.

use super::P;
use super::status::{BAD_PARAM, NOT_INITIALIZED, NULL_POINTER, Outcome, Status, code, refuse, refuse_aloud};
use crate::driver;
use crate::engine::engine;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// One library context.
#[derive(Clone, Copy, Debug)]
pub struct Handle {
    pub device: u32,
    pub stream: u64,
}

#[derive(Default)]
struct Handles {
    last: usize,
    by_id: BTreeMap<usize, Handle>,
}

static HANDLES: Mutex<Handles> = Mutex::new(Handles { last: 0xcd11_0000, by_id: BTreeMap::new() });

fn handles() -> MutexGuard<'static, Handles> {
    HANDLES.lock().expect("no panic while handles are held")
}

/// Number of handles that exist.
pub fn count() -> u64 {
    handles().by_id.len() as u64
}

pub fn get(at: P) -> Outcome<Handle> {
    match handles().by_id.get(&(at as usize)) {
        Some(handle) => Ok(*handle),
        None => refuse_aloud(BAD_PARAM, format_args!("{at:p} is not a handle, or one that was destroyed")),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnCreate(at: *mut P) -> Status {
    if at.is_null() {
        return NULL_POINTER;
    }
    let Some(device) = driver::current_device() else { return NOT_INITIALIZED };
    let mut handles = handles();
    handles.last += 0x10;
    let id = handles.last;
    handles.by_id.insert(id, Handle { device, stream: 0 });
    // SAFETY: by the caller.
    unsafe { at.write(id as P) };
    super::status::OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnDestroy(handle: P) -> Status {
    code(get(handle).map(|_| {
        handles().by_id.remove(&(handle as usize));
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnSetStream(handle: P, stream: P) -> Status {
    let set = || {
        let device = get(handle)?.device;
        let is_of_device = stream.is_null() || engine().lock().stream(stream as u64).is_ok_and(|s| s.device == device);
        if !is_of_device {
            return refuse(BAD_PARAM, format_args!("{stream:p} is not a stream of the handle's device"));
        }
        handles().by_id.insert(handle as usize, Handle { device, stream: stream as u64 });
        Ok(())
    };
    code(set())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetStream(handle: P, at: *mut P) -> Status {
    if at.is_null() {
        return NULL_POINTER;
    }
    // SAFETY: by the caller.
    code(get(handle).map(|h| unsafe { at.write(h.stream as P) }))
}
