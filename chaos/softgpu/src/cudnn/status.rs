//! What calls return, and the sentence about the last refusal.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};

/// A `cudnnStatus_t`.
pub type Status = u32;
pub type Outcome<T = ()> = Result<T, Status>;

pub const OK: Status = 0;
pub const NOT_INITIALIZED: Status = 1001;
pub const BAD_PARAM: Status = 2000;
pub const NULL_POINTER: Status = 2002;
pub const MISALIGNED_POINTER: Status = 2003;
pub const NOT_FINALIZED: Status = 2004;
pub const SHAPE_MISMATCH: Status = 2008;
pub const DUPLICATED_ENTRIES: Status = 2009;
pub const ATTRIBUTE_TYPE: Status = 2010;
pub const DESCRIPTOR_TYPE: Status = 2012;
pub const NOT_SUPPORTED: Status = 3000;
pub const NOT_SUPPORTED_PATTERN: Status = 3001;
pub const NOT_SUPPORTED_SHAPE: Status = 3002;
pub const NOT_SUPPORTED_TYPE: Status = 3003;
pub const NOT_SUPPORTED_LAYOUT: Status = 3004;
pub const NOT_SUPPORTED_ARCH: Status = 3007;
pub const EXECUTION_FAILED: Status = 5000;

const NAMES: [(Status, &CStr); 17] = [
    (OK, c"CUDNN_STATUS_SUCCESS"),
    (NOT_INITIALIZED, c"CUDNN_STATUS_NOT_INITIALIZED"),
    (BAD_PARAM, c"CUDNN_STATUS_BAD_PARAM"),
    (NULL_POINTER, c"CUDNN_STATUS_BAD_PARAM_NULL_POINTER"),
    (MISALIGNED_POINTER, c"CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER"),
    (NOT_FINALIZED, c"CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED"),
    (SHAPE_MISMATCH, c"CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH"),
    (DUPLICATED_ENTRIES, c"CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES"),
    (ATTRIBUTE_TYPE, c"CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE"),
    (DESCRIPTOR_TYPE, c"CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE"),
    (NOT_SUPPORTED, c"CUDNN_STATUS_NOT_SUPPORTED"),
    (NOT_SUPPORTED_PATTERN, c"CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN"),
    (NOT_SUPPORTED_SHAPE, c"CUDNN_STATUS_NOT_SUPPORTED_SHAPE"),
    (NOT_SUPPORTED_TYPE, c"CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE"),
    (NOT_SUPPORTED_LAYOUT, c"CUDNN_STATUS_NOT_SUPPORTED_LAYOUT"),
    (NOT_SUPPORTED_ARCH, c"CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH"),
    (EXECUTION_FAILED, c"CUDNN_STATUS_EXECUTION_FAILED"),
];

thread_local!(static LAST: RefCell<String> = const { RefCell::new(String::new()) });

/// Keeps the sentence for cudnnGetLastErrorString, and returns the status. A program may try graphs until one is supported,
/// so the sentence does not go to stderr.
pub fn refuse<T>(status: Status, what: std::fmt::Arguments<'_>) -> Outcome<T> {
    LAST.with_borrow_mut(|last| *last = what.to_string());
    Err(status)
}

/// A refusal that no correct program meets: the sentence goes to stderr too.
pub fn refuse_aloud<T>(status: Status, what: std::fmt::Arguments<'_>) -> Outcome<T> {
    crate::codes::refuse(status, format_args!("cuDNN: {what}"));
    refuse(status, what)
}

pub fn code(outcome: Outcome) -> Status {
    outcome.err().unwrap_or(OK)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetErrorString(status: Status) -> *const c_char {
    NAMES.iter().find(|(s, _)| *s == status).map_or(c"CUDNN_UNKNOWN_STATUS", |(_, name)| name).as_ptr()
}

/// Gives the calling thread's last refusal once.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetLastErrorString(to: *mut c_char, bytes: usize) {
    if to.is_null() || bytes == 0 {
        return;
    }
    let last = LAST.take();
    let n = last.len().min(bytes - 1);
    // SAFETY: by the caller, `to` has room for `bytes`.
    unsafe {
        std::ptr::copy_nonoverlapping(last.as_ptr().cast(), to, n);
        to.add(n).write(0);
    }
}
