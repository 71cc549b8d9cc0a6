//! NVRTC, the run-time compiler of CUDA C++.

use super::binding::functions;
use cudarc::nvrtc::sys::nvrtcProgram;
use std::ffi::{c_char, c_int};

functions! {
    /// Functions of libnvrtc.
    Nvrtc {
        fn nvrtcVersion(*mut c_int, *mut c_int) -> u32;
        fn nvrtcCreateProgram(*mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> u32;
        fn nvrtcDestroyProgram(*mut nvrtcProgram) -> u32;
        fn nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char) -> u32;
        fn nvrtcGetProgramLogSize(nvrtcProgram, *mut usize) -> u32;
        fn nvrtcGetProgramLog(nvrtcProgram, *mut c_char) -> u32;
        fn nvrtcGetCUBINSize(nvrtcProgram, *mut usize) -> u32;
        fn nvrtcGetCUBIN(nvrtcProgram, *mut c_char) -> u32;
    }
}
