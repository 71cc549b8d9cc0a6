//! NCCL, collectives between GPUs.

use super::binding::functions;
use cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// An `ncclComm_t`.
pub(crate) type Comm = *mut c_void;
/// An `ncclResult_t`: an integer, since newer libraries return codes that no header of today knows.
pub(crate) type Code = u32;

/// The state of a communicator that does not block.
pub(crate) const IN_PROGRESS: Code = 7;
/// The result for a failed call of CUDA, such as an allocation.
pub(crate) const UNHANDLED_CUDA_ERROR: Code = 1;
/// The result for a second rank on one GPU, among others.
pub(crate) const INVALID_USAGE: Code = 5;

/// An `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// An `ncclConfig_t` of 2.17. Later libraries take their defaults for later fields.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// The first field after those of 2.18, where the structure would have padding that newer libraries read.
    traffic_class: c_int,
}

impl Config {
    /// The configuration of communicators whose calls never wait.
    pub(crate) const fn not_blocking() -> Config {
        /// `NCCL_CONFIG_UNDEF_INT`.
        const UNDEFINED: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

functions! {
    /// Functions of libnccl, since 2.18.
    Nccl {
        fn ncclGetVersion(*mut c_int) -> Code;
        fn ncclGetUniqueId(*mut UniqueId) -> Code;
        fn ncclCommInitRankConfig(*mut Comm, c_int, UniqueId, c_int, *const Config) -> Code;
        fn ncclCommGetAsyncError(Comm, *mut Code) -> Code;
        fn ncclCommFinalize(Comm) -> Code;
        fn ncclCommAbort(Comm) -> Code;
        fn ncclGetErrorString(Code) -> *const c_char;
        fn ncclGetLastError(Comm) -> *const c_char;
        fn ncclGroupStart() -> Code;
        fn ncclGroupEnd() -> Code;
        fn ncclAllReduce(u64, u64, usize, c_int, c_int, Comm, CUstream) -> Code;
        fn ncclReduceScatter(u64, u64, usize, c_int, c_int, Comm, CUstream) -> Code;
        fn ncclReduce(u64, u64, usize, c_int, c_int, c_int, Comm, CUstream) -> Code;
        fn ncclAllGather(u64, u64, usize, c_int, Comm, CUstream) -> Code;
        fn ncclBroadcast(u64, u64, usize, c_int, c_int, Comm, CUstream) -> Code;
        fn ncclSend(u64, usize, c_int, c_int, Comm, CUstream) -> Code;
        fn ncclRecv(u64, usize, c_int, c_int, Comm, CUstream) -> Code;
    }
}

impl Nccl {
    /// The library's version, such as 22809 for 2.28.9; 0 if it gives none.
    pub(crate) fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: a pointer to a local.
        let code = unsafe { (self.ncclGetVersion)(&raw mut version) };
        if code == 0 { version } else { 0 }
    }

    /// The meaning of an error code.
    pub(crate) fn meaning(&self, code: Code) -> String {
        // SAFETY: takes any code.
        format!("{} ({code})", text(unsafe { (self.ncclGetErrorString)(code) }))
    }

    /// What the library tells about the last error of this process.
    pub(crate) fn last_error(&self) -> String {
        // SAFETY: takes no communicator.
        text(unsafe { (self.ncclGetLastError)(std::ptr::null_mut()) })
    }

    /// The meaning of an error code, and what the library tells about the last error of this process.
    pub(crate) fn text(&self, code: Code) -> String {
        let (meaning, last) = (self.meaning(code), self.last_error());
        if last.is_empty() { meaning } else { format!("{meaning}: {last}") }
    }
}

/// A text of the library; empty if there is none.
fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: a string of the library that ends in NUL and stays.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}
