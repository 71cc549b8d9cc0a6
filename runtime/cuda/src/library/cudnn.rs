//! cuDNN, attention: the functions of its backend interface, since 9.0.

use super::binding::functions;
use cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_void};

/// A `cudnnHandle_t`.
pub(crate) type Handle = *mut c_void;
/// A `cudnnBackendDescriptor_t`.
pub(crate) type RawDescriptor = *mut c_void;
/// A `cudnnStatus_t`: an integer, since newer libraries return codes that no header of today knows.
pub(crate) type Status = u32;

functions! {
    /// Functions of libcudnn.
    Dnn {
        fn cudnnGetVersion() -> usize;
        fn cudnnGetErrorString(Status) -> *const c_char;
        fn cudnnGetLastErrorString(*mut c_char, usize) -> ();
        fn cudnnCreate(*mut Handle) -> Status;
        fn cudnnSetStream(Handle, CUstream) -> Status;
        fn cudnnBackendCreateDescriptor(u32, *mut RawDescriptor) -> Status;
        fn cudnnBackendDestroyDescriptor(RawDescriptor) -> Status;
        fn cudnnBackendSetAttribute(RawDescriptor, u32, u32, i64, *const c_void) -> Status;
        fn cudnnBackendGetAttribute(RawDescriptor, u32, u32, i64, *mut i64, *mut c_void) -> Status;
        fn cudnnBackendFinalize(RawDescriptor) -> Status;
        fn cudnnBackendExecute(Handle, RawDescriptor, RawDescriptor) -> Status;
    }
}

impl Dnn {
    /// The library's version, such as 91901 for 9.19.1.
    pub(crate) fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.cudnnGetVersion)() }
    }

    /// The text of an error code, and what the library tells about the last error.
    pub(crate) fn text(&self, status: Status) -> String {
        let mut last = [0 as c_char; 512];
        // SAFETY: the first takes any code and returns a string that stays; the second writes a string that ends in NUL
        // into as many bytes as the array has.
        let (what, last) = unsafe {
            let what = (self.cudnnGetErrorString)(status);
            (self.cudnnGetLastErrorString)(last.as_mut_ptr(), last.len());
            last[last.len() - 1] = 0;
            let what = if what.is_null() { c"an unknown status" } else { CStr::from_ptr(what) };
            (what.to_string_lossy().into_owned(), CStr::from_ptr(last.as_ptr()).to_string_lossy().into_owned())
        };
        if last.is_empty() { what } else { format!("{what}: {last}") }
    }
}
