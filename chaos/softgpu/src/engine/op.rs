//! What streams and graphs consist of.

use super::event::EventState;
use super::graph::GraphRun;
use crate::codes::Code;
use crate::module::Launch;
use std::ffi::CStr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Something that is done when it returns `true`, and does not block meanwhile.
pub type Poll = Arc<Mutex<dyn FnMut() -> Result<bool, Code> + Send>>;

/// A function that `cuLaunchHostFunc` is given.
pub type HostFunction = unsafe extern "C" fn(*mut u8);

/// One piece of work.
#[derive(Clone)]
pub enum Op {
    Kernel(Arc<Launch>),
    Copy {
        to: usize,
        from: usize,
        bytes: usize,
    },
    /// A copy that takes longer by `SOFTGPU_COPY_US`, from when its turn came.
    SlowCopy {
        since: Instant,
        to: usize,
        from: usize,
        bytes: usize,
    },
    /// Pageable memory of the host is read at once, as the driver does.
    Bytes {
        to: usize,
        bytes: Arc<[u8]>,
    },
    /// `n` elements of `width` bytes.
    Fill {
        to: usize,
        pattern: u32,
        width: usize,
        n: usize,
    },
    Write32 {
        to: usize,
        value: u32,
    },
    Record {
        event: Arc<EventState>,
        version: u64,
    },
    Wait {
        event: Arc<EventState>,
        version: u64,
    },
    Host {
        call: HostFunction,
        data: usize,
    },
    /// A library's work that is done in one go.
    Work {
        name: &'static CStr,
        run: Arc<dyn Fn() -> Result<(), Code> + Send + Sync>,
    },
    /// A library's kernel, which faults and slowness strike as they do a launch. It is given a seed for what it leaves open.
    Execution {
        name: &'static CStr,
        run: Arc<dyn Fn(u64) -> Result<(), Code> + Send + Sync>,
    },
    /// `begin` is called when it becomes the head; each launch of a graph begins anew.
    Begin(Arc<dyn Fn() -> Poll + Send + Sync>),
    Poll(Poll),
    Graph(GraphRun),
}

impl Op {
    /// The kernel that it launches, by the name that faults are planned for.
    pub fn kernel(&self) -> Option<&str> {
        match self {
            Op::Kernel(launch) => Some(launch.kernel_name()),
            Op::Execution { name, .. } => name.to_str().ok(),
            _ => None,
        }
    }

    /// For the message when it leaves its memory.
    pub fn label(&self) -> &CStr {
        match self {
            Op::Kernel(launch) => launch.label(),
            Op::Copy { .. } | Op::SlowCopy { .. } | Op::Bytes { .. } => c"a copy",
            Op::Fill { .. } => c"a memory set",
            Op::Work { name, .. } | Op::Execution { name, .. } => name,
            Op::Begin(_) | Op::Poll(_) => c"a collective",
            Op::Host { .. } => c"a host function",
            Op::Write32 { .. } | Op::Record { .. } | Op::Wait { .. } | Op::Graph(_) => c"a stream operation",
        }
    }
}
