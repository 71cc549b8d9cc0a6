//! Graphs: commands that are enqueued with one call.
//!
//! Commands are captured on a stream that runs nothing, so that other threads may use the compute stream meanwhile. Collectives
//! are never captured: an abort of NCCL waits until all graphs with its operations are destroyed.

use crate::error::CudaError;
use crate::gpu::{Gpu, Stream};
use cudarc::driver::sys::{CUgraph, CUgraphExec};
use std::sync::Arc;

/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: calls of other threads, such as allocations, do not disturb a capture.
const THREAD_LOCAL: u32 = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: a library may also load what it launches.
const RELAXED: u32 = 2;

/// A graph that can be launched any number of times.
#[derive(Debug)]
pub(crate) struct Graph {
    gpu: Arc<Gpu>,
    exec: CUgraphExec,
}

// SAFETY: graphs may be used from any thread to which the context is bound, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `enqueue` puts on `stream`, which has no work and is not otherwise used.
    ///
    /// # Errors
    /// Those of `enqueue`, or when the driver refuses a call within a capture; nothing has run then.
    pub(crate) fn capture(
        gpu: &Arc<Gpu>,
        stream: Stream,
        enqueue: impl FnOnce(Stream) -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        let driver = gpu.libraries.driver;
        let mut graph: CUgraph = std::ptr::null_mut();
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: the stream is alive; pointers to locals; the graph is destroyed once.
        unsafe {
            gpu.check("cuStreamBeginCapture", (driver.cuStreamBeginCapture_v2)(stream.0, THREAD_LOCAL))?;
            let enqueued = enqueue(stream);
            // A capture has to end even if it has failed: the stream takes no other work before.
            let ended = gpu.check("cuStreamEndCapture", (driver.cuStreamEndCapture)(stream.0, &raw mut graph));
            let made = enqueued.and(ended).and_then(|()| {
                gpu.check("cuGraphInstantiate", (driver.cuGraphInstantiateWithFlags)(&raw mut exec, graph, 0))
            });
            if !graph.is_null() {
                (driver.cuGraphDestroy)(graph);
            }
            made.map(|()| Graph { gpu: gpu.clone(), exec })
        }
    }

    /// Lets libraries load what `enqueue` launches, without running it: captures it and drops the graph.
    ///
    /// # Errors
    /// As [`Graph::capture`].
    pub(crate) fn rehearse(
        gpu: &Gpu,
        stream: Stream,
        enqueue: impl FnOnce(Stream) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let driver = gpu.libraries.driver;
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: as in `capture`.
        unsafe {
            gpu.check("cuStreamBeginCapture", (driver.cuStreamBeginCapture_v2)(stream.0, RELAXED))?;
            let enqueued = enqueue(stream);
            let ended = gpu.check("cuStreamEndCapture", (driver.cuStreamEndCapture)(stream.0, &raw mut graph));
            if !graph.is_null() {
                (driver.cuGraphDestroy)(graph);
            }
            enqueued.and(ended)
        }
    }

    /// Enqueues all its commands.
    ///
    /// # Errors
    /// When the GPU has failed.
    ///
    /// # Safety
    /// As for enqueueing each of the commands.
    pub(crate) unsafe fn launch(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive; the caller's contract.
        let code = unsafe { (self.gpu.libraries.driver.cuGraphLaunch)(self.exec, stream.0) };
        self.gpu.check("cuGraphLaunch", code)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created by this driver and destroyed once; launches under way go on to their end. A failure leaks it.
        let _ = self.gpu.bind().map(|()| unsafe { (self.gpu.libraries.driver.cuGraphExecDestroy)(self.exec) });
    }
}
