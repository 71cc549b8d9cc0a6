//! Capture and launch of graphs.

use super::{P, call_in_context, put};
use crate::codes::{CAPTURE_UNSUPPORTED, Code, INVALID_HANDLE, NOT_SUPPORTED, refuse};
use crate::engine::graph::GraphRun;
use crate::engine::{Op, engine, faults};
use crate::settings;
use std::ffi::{c_int, c_uint};

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: P, mode: c_uint) -> Code {
    call_in_context(|_| {
        engine().begin_capture(stream as u64, mode)?;
        settings::reach("capture");
        std::thread::sleep(faults::capture_delay());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(stream: P, at: *mut P) -> Code {
    call_in_context(|_| match engine().end_capture(stream as u64) {
        Ok(graph) => put(at, graph as P),
        Err(code) => {
            put(at, std::ptr::null_mut())?;
            Err(code)
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: P, at: *mut c_int) -> Code {
    call_in_context(|_| put(at, engine().lock().capture_status(stream as u64)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCaptureInfo_v2(
    stream: P,
    status: *mut c_int,
    id: *mut u64,
    graph: *mut P,
    nodes: *mut P,
    n_nodes: *mut usize,
) -> Code {
    call_in_context(|_| {
        if !graph.is_null() || !nodes.is_null() || !n_nodes.is_null() {
            return Err(refuse(NOT_SUPPORTED, format_args!("cuStreamGetCaptureInfo of the graph or its nodes")));
        }
        let mut core = engine().lock();
        put(status, core.capture_status(stream as u64)?)?;
        let of = core.stream(stream as u64)?.capture.as_ref().map(|c| c.graph);
        if id.is_null() { Ok(()) } else { put(id, of.unwrap_or(0)) }
    })
}

/// The number of nodes; the nodes themselves are not given.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphGetNodes(graph: P, nodes: *mut P, n: *mut usize) -> Code {
    call_in_context(|_| {
        if !nodes.is_null() {
            return Err(refuse(NOT_SUPPORTED, format_args!("cuGraphGetNodes of the nodes")));
        }
        put(n, engine().n_nodes(graph as u64)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithFlags(at: *mut P, graph: P, flags: u64) -> Code {
    call_in_context(|device| {
        if flags != 0 {
            return Err(refuse(NOT_SUPPORTED, format_args!("cuGraphInstantiate with flags {flags:#x}")));
        }
        put(at, engine().instantiate(graph as u64, device)? as P)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphUpload(exec: P, stream: P) -> Code {
    call_in_context(|device| {
        super::streams::check_of_device(stream, device)?;
        engine().exec(exec as u64).map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(exec: P, stream: P) -> Code {
    call_in_context(|device| {
        let exec = engine().exec(exec as u64)?;
        if exec.device != device {
            return Err(INVALID_HANDLE);
        }
        super::streams::check_of_device(stream, device)?;
        if engine().lock().capture_status(stream as u64)? != 0 {
            let code = refuse(CAPTURE_UNSUPPORTED, format_args!("the launch of a graph cannot be captured"));
            return Err(engine().lock().invalidate_capture_of(stream as u64, code));
        }
        engine().enqueue(stream as u64, Op::Graph(GraphRun::new(exec)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: P) -> Code {
    call_in_context(|_| engine().destroy_graph(graph as u64))
}

/// Launches that were asked for go on to their end.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(exec: P) -> Code {
    call_in_context(|_| engine().destroy_exec(exec as u64))
}
