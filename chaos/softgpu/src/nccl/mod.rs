//! libnccl between the processes and threads of one machine, with the semantics of NCCL 2.28.
//!
//! - An operation occupies its stream until all its peers come. A dead peer is not noticed.
//! - `ncclCommAbort` ends a communicator's operations at once, but returns only when every graph that captured the
//!   communicator is destroyed and the device has no NCCL operation left that was launched before; calls outside of a group
//!   wait for each other. `ncclCommRevoke` ends what is under way and refuses further operations.
//! - Operations of a group: collectives of a communicator run in their order, then all its sends and receives at once.
//! - Communicators that do not block launch some operations a little later, as NCCL does while it connects peers; their
//!   state is `ncclInProgress` until then. `ncclGroupEnd` gives `ncclInProgress` for them in any case.
//! - A group of calls on such communicators has a job, which the next look at their state completes. `ncclCommRevoke` and
//!   `ncclCommAbort` before it free the job and keep the pointer, as NCCL does: the second of them uses freed memory, which
//!   ends the process with exit code 88.
//! - Sums run over ranks in order, in f32 for narrower floats, which are rounded once: the result has the same bits at every
//!   rank. NCCL's order depends on the topology.
//! - Members that issue different operations get an error that names both, on stderr and as a failure of the device; NCCL
//!   would hang, or corrupt memory.
//!
//! | setting | meaning |
//! |---|---|
//! | `SOFTGPU_NCCL_INIT_MS` | milliseconds that a communicator takes longer to initialise |
//! | `SOFTGPU_NCCL_VERSION` | what `ncclGetVersion` gives; 22809; before 22600 `NCCL_LAUNCH_ORDER_IMPLICIT` is unknown, before 23000 only the ranks that share a device notice it |
//! | `SOFTGPU_NCCL_LATE` | every which launch of a communicator that does not block is late, the first one always; 16; 0: none |
//! | `SOFTGPU_NCCL_ORDER` | 1: a device runs one operation at a time, as it may when they fill it; ranks that wait for each other because their devices run operations of two communicators in different orders get an error. Operations run in the order of their launches if `NCCL_LAUNCH_ORDER_IMPLICIT` is 1, else in any order that streams allow |
//! | `SOFTGPU_NCCL_FAULT` | number of a launch of this process, from 1, from which on its communicator reports `ncclRemoteError` |
//! | `SOFTGPU_NCCL_FAIL` | 1: communicators that are initialised report `ncclRemoteError`, as after a failure of the network |
//! | `SOFTGPU_NCCL_ALLOC_FAIL` | number of an allocation of NCCL's own in this process, from 1, that fails for lack of memory; a communicator makes one when it is initialised and one with its first launch; 0: none |
//!
//! | module | is |
//! |---|---|
//! | `api` | the C functions |
//! | `communicator` | communicators, and their initialisation |
//! | `group` | operations between `ncclGroupStart` and `ncclGroupEnd` |
//! | `batch`, `collective`, `transfer`, `arithmetic` | the operations, as the engine runs them |
//! | `abort` | abort, revoke, finalize, destroy |
//! | `job` | the thread behind a group of calls that do not block |
//! | `order` | what is launched, and in which order it runs |
//! | `shared` | the memory between the ranks |
//! | `host` | what the rest of the software GPU offers |
//!
//! Deliberately absent: `ncclCommSplit`, `ncclCommShrink`, registration of buffers, user-defined reductions, devices of other
//! machines.

mod abort;
mod api;
mod arithmetic;
mod batch;
mod collective;
mod communicator;
mod group;
mod host;
mod job;
mod order;
mod shared;
mod transfer;

use std::ffi::{CStr, CString};
use std::sync::Mutex;

/// An `ncclResult_t` other than success.
pub type Code = u32;

pub const SUCCESS: Code = 0;
pub const UNHANDLED_CUDA_ERROR: Code = 1;
pub const SYSTEM_ERROR: Code = 2;
pub const INVALID_ARGUMENT: Code = 4;
pub const INVALID_USAGE: Code = 5;
pub const REMOTE_ERROR: Code = 6;
pub const IN_PROGRESS: Code = 7;

/// Takes over a setting that has changed.
pub fn setting_changed(name: &str) {
    match name {
        "SOFTGPU_NCCL_FAULT" => batch::restart_count(),
        "SOFTGPU_NCCL_ALLOC_FAIL" => communicator::restart_count(),
        _ => {}
    }
}

/// The text of `ncclGetLastError`.
static LAST: Mutex<&'static CStr> = Mutex::new(c"");

/// Reports an error on stderr and as the last error.
pub fn report(text: &str) {
    eprintln!("softgpu: NCCL: {text}");
    let text = CString::new(text).unwrap_or_default();
    // Callers may keep the pointer until the process ends, so it is never freed.
    *LAST.lock().expect("nothing panics here") = Box::leak(text.into_boxed_c_str());
}

/// As [`report`]; gives the code back.
pub fn refuse(code: Code, text: &str) -> Code {
    report(text);
    code
}
