//! Graphs: capture of streams, and the state of a launch.

use super::{Core, Engine, Op};
use crate::codes::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_MERGE, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD, CAPTURED_EVENT, Code, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, refuse,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::ThreadId;

/// A piece of work and the nodes that come before it.
#[derive(Clone)]
pub struct Node {
    pub op: Op,
    pub after: Vec<usize>,
}

/// A graph, perhaps still under capture.
#[derive(Default)]
pub struct Graph {
    pub nodes: Vec<Node>,
    session: Option<Session>,
}

/// A capture under way.
struct Session {
    mode: u32,
    thread: ThreadId,
    is_valid: bool,
}

/// A stream's part in a capture.
#[derive(Clone)]
pub struct Capture {
    pub graph: u64,
    is_origin: bool,
    /// The nodes behind which the stream's next comes.
    pub last: Vec<usize>,
}

/// A graph that can be launched. Its launches run one after another.
pub struct Exec {
    pub device: u32,
    pub nodes: Vec<Node>,
    launched: AtomicU64,
    finished: AtomicU64,
}

/// One launch.
#[derive(Clone)]
pub struct GraphRun {
    exec: Arc<Exec>,
    ticket: u64,
    done: Vec<bool>,
    /// Nodes that were begun and occupy their place.
    running: BTreeMap<usize, Op>,
}

impl GraphRun {
    pub fn new(exec: Arc<Exec>) -> GraphRun {
        let ticket = exec.launched.fetch_add(1, SeqCst);
        let done = vec![false; exec.nodes.len()];
        GraphRun { exec, ticket, done, running: BTreeMap::new() }
    }

    pub fn is_first_in_line(&self) -> bool {
        self.exec.finished.load(SeqCst) == self.ticket
    }

    pub fn finish(&self) {
        self.exec.finished.fetch_max(self.ticket + 1, SeqCst);
    }

    /// Nodes that may run now.
    pub fn ready(&self) -> Vec<usize> {
        let is_ready = |i: &usize| !self.done[*i] && self.exec.nodes[*i].after.iter().all(|d| self.done[*d]);
        (0..self.done.len()).filter(is_ready).collect()
    }

    /// Takes a node's work, as far as it has come.
    pub fn take(&mut self, node: usize) -> Op {
        self.running.remove(&node).unwrap_or_else(|| self.exec.nodes[node].op.clone())
    }

    pub fn put_back(&mut self, node: usize, op: Op) {
        self.running.insert(node, op);
    }

    pub fn set_done(&mut self, node: usize) {
        self.done[node] = true;
    }
}

impl Core {
    pub fn check_valid_capture(&self, graph: u64) -> Result<(), Code> {
        let session = self.graphs.get(&graph).and_then(|g| g.session.as_ref());
        session.filter(|s| s.is_valid).map(|_| ()).ok_or(CAPTURE_INVALIDATED)
    }

    /// Adds a node at the end of what the stream has captured.
    pub fn capture(&mut self, stream: u64, graph: u64, op: Op) -> Result<(), Code> {
        self.check_valid_capture(graph)?;
        if let Op::Graph(_) = op {
            let code = refuse(NOT_SUPPORTED, format_args!("the launch of a graph cannot be captured"));
            return Err(self.invalidate_capture_of(stream, code));
        }
        let nodes = &mut self.graphs.get_mut(&graph).ok_or(CAPTURE_INVALIDATED)?.nodes;
        let at = nodes.len();
        let capture = self.streams.get_mut(&stream).and_then(|s| s.capture.as_mut()).ok_or(CAPTURE_INVALIDATED)?;
        nodes.push(Node { op, after: std::mem::replace(&mut capture.last, vec![at]) });
        Ok(())
    }

    /// The stream waits for an event of a capture.
    pub fn join_capture(&mut self, stream: u64, graph: u64, last: &[usize]) -> Result<(), Code> {
        if self.graphs.get(&graph).is_none_or(|g| g.session.is_none()) {
            // The capture has ended: nothing was ever recorded that a stream could wait for.
            return Err(CAPTURED_EVENT);
        }
        self.check_valid_capture(graph)?;
        let s = self.stream(stream)?;
        match &mut s.capture {
            Some(own) if own.graph != graph => Err(self.invalidate_capture_of(stream, CAPTURE_MERGE)),
            Some(own) => {
                own.last.extend(last);
                own.last.sort_unstable();
                own.last.dedup();
                Ok(())
            }
            None => {
                s.capture = Some(Capture { graph, is_origin: false, last: last.to_vec() });
                Ok(())
            }
        }
    }

    /// Ends the capture that a stream takes part in, because of `code`.
    pub fn invalidate_capture_of(&mut self, stream: u64, code: Code) -> Code {
        let graph = self.streams.get(&stream).and_then(|s| s.capture.as_ref()).map(|c| c.graph);
        if let Some(session) = graph.and_then(|g| self.graphs.get_mut(&g)).and_then(|g| g.session.as_mut()) {
            session.is_valid = false;
        }
        code
    }

    /// A call that a capture does not allow, such as an allocation: it fails, and so does the capture.
    pub fn check_unsafe_call(&mut self, what: &str) -> Result<(), Code> {
        let me = std::thread::current().id();
        let forbids = |s: &&mut Session| s.is_valid && (s.mode == 0 || (s.mode == 1 && s.thread == me));
        let Some(session) = self.graphs.values_mut().filter_map(|g| g.session.as_mut()).find(forbids) else {
            return Ok(());
        };
        session.is_valid = false;
        Err(refuse(CAPTURE_UNSUPPORTED, format_args!("{what} during a capture")))
    }

    /// The legacy stream would wait for streams that are captured.
    pub fn check_legacy_call(&mut self, device: u32) -> Result<(), Code> {
        self.check_unsafe_call("a synchronous copy or set")?;
        let captured = |s: &&super::Stream| s.device == device && s.is_blocking && s.capture.is_some();
        if self.streams.values().any(|s| captured(&s)) { Err(CAPTURE_IMPLICIT) } else { Ok(()) }
    }

    /// 0: none, 1: active, 2: invalidated.
    pub fn capture_status(&mut self, stream: u64) -> Result<i32, Code> {
        let graph = self.stream(stream)?.capture.as_ref().map(|c| c.graph);
        Ok(graph.map_or(0, |g| if self.check_valid_capture(g).is_ok() { 1 } else { 2 }))
    }
}

impl Engine {
    pub fn begin_capture(&self, stream: u64, mode: u32) -> Result<(), Code> {
        let mut core = self.lock();
        if mode > 2 || core.stream(stream)?.capture.is_some() {
            return Err(if mode > 2 { INVALID_VALUE } else { CAPTURE_UNSUPPORTED });
        }
        let graph = core.new_id();
        let session = Session { mode, thread: std::thread::current().id(), is_valid: true };
        core.graphs.insert(graph, Graph { nodes: Vec::new(), session: Some(session) });
        core.stream(stream)?.capture = Some(Capture { graph, is_origin: true, last: Vec::new() });
        Ok(())
    }

    pub fn end_capture(&self, stream: u64) -> Result<u64, Code> {
        let mut core = self.lock();
        let capture = core.stream(stream)?.capture.clone().ok_or(CAPTURE_UNMATCHED)?;
        if !capture.is_origin {
            return Err(core.invalidate_capture_of(stream, CAPTURE_UNMATCHED));
        }
        let graph = core.graphs.get_mut(&capture.graph).ok_or(CAPTURE_INVALIDATED)?;
        let session = graph.session.take().ok_or(CAPTURE_INVALIDATED)?;
        if session.mode != 2 && session.thread != std::thread::current().id() {
            graph.session = Some(session);
            return Err(CAPTURE_WRONG_THREAD);
        }
        let is_joined = is_joined(&graph.nodes, capture.last);
        for s in core.streams.values_mut() {
            s.capture.take_if(|c| c.graph == capture.graph);
        }
        match (session.is_valid, is_joined) {
            (true, true) => Ok(capture.graph),
            (valid, _) => {
                core.graphs.remove(&capture.graph);
                Err(if valid { CAPTURE_UNJOINED } else { CAPTURE_INVALIDATED })
            }
        }
    }

    pub fn n_nodes(&self, graph: u64) -> Result<usize, Code> {
        self.lock().graphs.get(&graph).map(|g| g.nodes.len()).ok_or(INVALID_VALUE)
    }

    pub fn instantiate(&self, graph: u64, device: u32) -> Result<u64, Code> {
        let mut core = self.lock();
        let captured = core.graphs.get(&graph).filter(|g| g.session.is_none()).ok_or(INVALID_VALUE)?;
        let exec =
            Exec { device, nodes: captured.nodes.clone(), launched: AtomicU64::new(0), finished: AtomicU64::new(0) };
        let id = core.new_id();
        core.execs.insert(id, Arc::new(exec));
        Ok(id)
    }

    pub fn exec(&self, exec: u64) -> Result<Arc<Exec>, Code> {
        self.lock().execs.get(&exec).cloned().ok_or(INVALID_HANDLE)
    }

    pub fn destroy_graph(&self, graph: u64) -> Result<(), Code> {
        self.lock().graphs.remove(&graph).map(|_| ()).ok_or(INVALID_VALUE)
    }

    pub fn destroy_exec(&self, exec: u64) -> Result<(), Code> {
        self.lock().execs.remove(&exec).map(|_| ()).ok_or(INVALID_VALUE)
    }
}

/// Whether the origin's end comes behind all nodes.
fn is_joined(nodes: &[Node], mut stack: Vec<usize>) -> bool {
    let mut seen = vec![false; nodes.len()];
    while let Some(i) = stack.pop() {
        if !std::mem::replace(&mut seen[i], true) {
            stack.extend(&nodes[i].after);
        }
    }
    seen.iter().all(|s| *s)
}
