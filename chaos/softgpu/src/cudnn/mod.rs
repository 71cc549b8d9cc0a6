//! libcudnn: the graph API, for the graphs that attention consists of.
//!
//! | module | is |
//! |---|---|
//! | `status`, `handle` | what calls return; library contexts |
//! | `descriptor`, `attributes` | descriptors, and which attributes they may have |
//! | `tensor`, `operation`, `graph` | what finalized descriptors are, and their rules |
//! | `support` | which graphs have an engine: the reading of cuDNN 9.19's rules, each with its source |
//! | `plan` | heuristics, engines, plans, and their execution as work of a stream |
//! | `run`, `dense`, `pointwise` | the arithmetic: operations one after another, over f32 copies of the tensors |
//!
//! Deliberately absent: convolutions, normalizations, dropout, FP8, paged caches, the nodes for whole attentions
//! (SDPA_FWD, SDPA_BWD), kernel caches, serialized plans, native CUDA graphs.
//!
//! SAFETY, for all functions here: arguments are what cudnn.h asks for. Handles and descriptors are numbers, so a wrong one
//! is refused.

mod attributes;
mod dense;
mod descriptor;
mod graph;
mod handle;
mod operation;
mod plan;
mod pointwise;
mod run;
mod status;
mod support;
mod tensor;

use crate::environment;
use status::{Status, code};
use std::ffi::c_void;

type P = *mut c_void;

/// The version of cuDNN that is imitated: 9.6.0 is 90600.
fn version() -> u64 {
    environment::number("SOFTGPU_CUDNN_VERSION")
}

/// Whether `SOFTGPU_CUDNN_REFUSE` may have this value.
pub fn is_known_refusal(text: &str) -> bool {
    support::refused(text).all(|r| support::REFUSALS.contains(&r))
}

/// Counters of what exists.
pub fn stat(name: &str) -> Option<u64> {
    match name {
        "cudnn_descriptors" => Some(descriptor::count()),
        "cudnn_handles" => Some(handle::count()),
        _ => None,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetVersion() -> usize {
    version() as usize
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetCudartVersion() -> usize {
    environment::number("SOFTGPU_DRIVER_VERSION") as usize
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendCreateDescriptor(kind: u32, at: *mut P) -> Status {
    code(descriptor::create(kind, at))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendDestroyDescriptor(descriptor: P) -> Status {
    code(descriptor::destroy(descriptor))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendSetAttribute(descriptor: P, name: u32, ty: u32, n: i64, from: *const u8) -> Status {
    code(descriptor::set(descriptor, name, ty, n, from))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendGetAttribute(
    descriptor: P,
    name: u32,
    ty: u32,
    room: i64,
    n: *mut i64,
    to: *mut u8,
) -> Status {
    code(descriptor::get(descriptor, name, ty, room, n, to))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendFinalize(descriptor: P) -> Status {
    code(descriptor::finalize(descriptor))
}

/// Puts the execution on the handle's stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnBackendExecute(handle: P, plan: P, pack: P) -> Status {
    code(plan::execute(handle, plan, pack))
}
