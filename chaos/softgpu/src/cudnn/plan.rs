//! From a graph to work on a stream: heuristics, engines, configurations, plans, variant packs.

use super::attributes::{Attributes, BEHAVIOR_NOTE, INT64, NUMERICAL_NOTE};
use super::descriptor::{self, Computed, Made};
use super::graph::Graph;
use super::run::Run;
use super::status::{
    BAD_PARAM, DUPLICATED_ENTRIES, EXECUTION_FAILED, MISALIGNED_POINTER, NOT_SUPPORTED, NULL_POINTER, Outcome, refuse,
    refuse_aloud,
};
use super::support::{self, Support};
use super::tensor::Tensor;
use super::{P, handle};
use crate::engine::{Op, engine};
use crate::memory;
use crate::stats::{self, Stat, count};
use std::collections::BTreeMap;
use std::sync::Arc;

const MODE_FALLBACK: i64 = 2;
const MODES: i64 = 4;
/// How many configurations a call that asks for their number is told, however many there are.
const PROPOSALS_MAX: usize = 8;
/// `cudnnBackendNumericalNote_t`s and `cudnnBackendBehaviorNote_t`s.
const TENSOR_CORE: i64 = 0;
const RUNTIME_COMPILATION: i64 = 0;
const KNOB_TYPES: i64 = 44;
/// `CUDNN_KNOB_TYPE_STAGES` as NVIDIA's frontend sets it for reproducible gradients.
const ORDER: Knob = Knob { number: 14, value: 2 };

/// One of a graph's engines.
#[derive(Clone, Debug)]
pub struct Engine {
    graph: Arc<Graph>,
    index: usize,
    support: Support,
}

/// An engine with choices. Only the one for ordered sums changes anything.
#[derive(Clone, Debug)]
pub struct Config {
    engine: Engine,
    knobs: Vec<Knob>,
}

/// A choice of a knob.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Knob {
    number: i64,
    value: i64,
}

/// The configurations that are proposed for a graph.
#[derive(Debug)]
pub struct Heuristics(Vec<Config>);

/// An engine that is ready to be executed.
#[derive(Debug)]
pub struct Plan {
    config: Config,
    /// None if it was made for described devices.
    device: Option<u32>,
}

/// Addresses for one execution.
#[derive(Debug)]
pub struct Pack {
    pointers: BTreeMap<i64, usize>,
    workspace: usize,
}

impl Heuristics {
    pub fn new(a: &Attributes) -> Outcome<Heuristics> {
        let graph = a.require_child(201)?.graph()?;
        let mode = a.require(200)?;
        if !(0..MODES).contains(&mode) {
            return refuse(BAD_PARAM, format_args!("heuristic mode {mode}"));
        }
        // As cuDNN 9.19 (seen): a graph without engines gets no configurations, and no error here.
        let engines = support::engines(graph).map_or(Vec::new(), Vec::from).into_iter().enumerate();
        let engines = engines.skip(usize::from(mode == MODE_FALLBACK));
        let config =
            |(index, support)| Config { engine: Engine { graph: graph.clone(), index, support }, knobs: Vec::new() };
        Ok(Heuristics(engines.map(config).collect()))
    }

    pub fn computed(&self, name: u32) -> Option<Computed> {
        let configs = || self.0.iter().cloned().map(Made::Config).collect();
        (name == 202).then(|| Computed::Descriptors(configs(), PROPOSALS_MAX))
    }
}

impl Engine {
    pub fn new(a: &Attributes) -> Outcome<Engine> {
        let graph = a.require_child(1300)?.graph()?.clone();
        let index = a.require(1301)? as usize;
        let engines = support::engines(&graph)?;
        let place = if index == support::ORDERED && support::has_ordered(&graph) { 0 } else { index };
        match engines.get(place) {
            Some(support) => Ok(Engine { support: *support, graph, index }),
            None => refuse(NOT_SUPPORTED, format_args!("the graph has no engine {index}")),
        }
    }

    pub fn computed(&self, name: u32) -> Option<Computed> {
        Some(match name {
            1300 => Computed::Descriptors(vec![Made::Graph(self.graph.clone())], 1),
            1301 => Computed::Numbers(INT64, vec![self.index as i64]),
            1302 => Computed::Descriptors(Vec::new(), 0),
            // cuDNN 9.19 notes nothing else, also where bits depend on the order of atomic additions (seen).
            1303 => Computed::Numbers(NUMERICAL_NOTE, vec![TENSOR_CORE]),
            1305 => Computed::Numbers(BEHAVIOR_NOTE, vec![RUNTIME_COMPILATION]),
            _ => return None,
        })
    }
}

impl Knob {
    pub fn new(a: &Attributes) -> Outcome<Knob> {
        let (number, value) = (a.require(600)?, a.require(601)?);
        if !(0..KNOB_TYPES).contains(&number) || value < 0 {
            return refuse(BAD_PARAM, format_args!("knob {number} cannot be {value}"));
        }
        Ok(Knob { number, value })
    }
}

impl Config {
    pub fn new(a: &Attributes) -> Outcome<Config> {
        let knobs = a.children(302).iter().map(|k| k.knob().copied()).collect::<Outcome<_>>()?;
        Ok(Config { engine: a.require_child(300)?.engine()?.clone(), knobs })
    }

    fn is_unordered(&self) -> bool {
        let is_ordering = self.engine.index == support::ORDERED && self.knobs.contains(&ORDER);
        support::has_ordered(&self.engine.graph) && !is_ordering
    }

    pub fn computed(&self, name: u32) -> Option<Computed> {
        Some(match name {
            300 => Computed::Descriptors(vec![Made::Engine(self.engine.clone())], 1),
            303 => Computed::Numbers(INT64, vec![self.engine.support.workspace_bytes as i64]),
            _ => return None,
        })
    }
}

impl Plan {
    pub fn new(a: &Attributes) -> Outcome<Plan> {
        let config = a.require_child(401)?.config()?.clone();
        let device = match a.int(400) {
            Some(h) => Some(handle::get(h as P)?.device),
            None if a.child(407).is_some() => None,
            None => return refuse(BAD_PARAM, format_args!("a plan needs a handle or the properties of a device")),
        };
        if config.engine.index == 0 && support::is_refused("first") {
            return refuse(NOT_SUPPORTED, format_args!("no plan of the first engine, by SOFTGPU_CUDNN_REFUSE"));
        }
        Ok(Plan { config, device })
    }

    pub fn computed(&self, name: u32) -> Option<Computed> {
        Some(match name {
            401 => Computed::Descriptors(vec![Made::Config(self.config.clone())], 1),
            402 => Computed::Numbers(INT64, vec![self.config.engine.support.workspace_bytes as i64]),
            _ => return None,
        })
    }
}

impl Pack {
    pub fn new(a: &Attributes) -> Outcome<Pack> {
        let (ids, pointers) = (a.ints(1000), a.ints(1001));
        if ids.len() != pointers.len() {
            return refuse(BAD_PARAM, format_args!("{} ids with {} pointers", ids.len(), pointers.len()));
        }
        let by_id: BTreeMap<i64, usize> = ids.iter().copied().zip(pointers.iter().map(|p| *p as usize)).collect();
        if by_id.len() != ids.len() {
            return refuse(DUPLICATED_ENTRIES, format_args!("an id has two pointers: {ids:?}"));
        }
        Ok(Pack { pointers: by_id, workspace: a.int(1003).unwrap_or(0) as usize })
    }

    /// The pointer for a tensor, which device or host can reach; what is captured may never run.
    fn pointer(&self, t: &Tensor, is_captured: bool) -> Outcome<usize> {
        let at = match self.pointers.get(&t.id) {
            Some(0) => return refuse(NULL_POINTER, format_args!("the pointer for tensor {} is null", t.id)),
            Some(at) => *at,
            None => return refuse(BAD_PARAM, format_args!("no pointer for tensor {}", t.id)),
        };
        if t.is_by_value {
            return Ok(at);
        }
        if !at.is_multiple_of(t.alignment) {
            let what = format_args!("the pointer for tensor {} is not aligned to {} bytes", t.id, t.alignment);
            return refuse(MISALIGNED_POINTER, what);
        }
        let bytes = if t.ragged.is_some() { t.dtype.bytes() } else { t.extent() };
        if !is_captured && !memory::is_device_accessible(at, bytes) {
            let what = format_args!("tensor {}: {bytes} bytes at {at:#x} are not in one allocation", t.id);
            return refuse_aloud(BAD_PARAM, what);
        }
        Ok(at)
    }

    fn check_workspace(&self, bytes: usize, graph: &Graph, is_captured: bool) -> Outcome {
        if bytes == 0 {
            return Ok(());
        }
        let at = self.workspace;
        if at == 0 {
            return refuse(NULL_POINTER, format_args!("a workspace of {bytes} bytes is needed"));
        }
        if !at.is_multiple_of(16) || !is_captured && !memory::is_device_accessible(at, bytes) {
            let what = format_args!("the workspace: {bytes} bytes at {at:#x} are not in one allocation, aligned to 16");
            return refuse_aloud(BAD_PARAM, what);
        }
        for t in graph.in_memory().filter(|t| !t.is_by_value && t.ragged.is_none()) {
            let start = self.pointers[&t.id];
            if start < at + bytes && at < start + t.extent() {
                return refuse_aloud(BAD_PARAM, format_args!("the workspace overlaps tensor {}", t.id));
            }
        }
        Ok(())
    }
}

/// Checks addresses, reads what is passed by value, and enqueues.
pub fn execute(at: P, plan: P, pack: P) -> Outcome {
    let handle = handle::get(at)?;
    let (plan, pack) = (descriptor::made(plan)?.plan()?.clone(), descriptor::made(pack)?.pack()?.clone());
    if plan.device.is_some_and(|device| device != handle.device) {
        return refuse_aloud(
            BAD_PARAM,
            format_args!("the plan is for device {:?}, not {}", plan.device, handle.device),
        );
    }
    let Engine { graph, support, .. } = &plan.config.engine;
    let (half, is_unordered) = (support.half, plan.config.is_unordered());
    stats::load(format!("{:?} {half:?}", support.pattern.kernel()));
    let status = engine().lock().capture_status(handle.stream);
    let is_captured = status.map_err(|_| EXECUTION_FAILED)? != 0;
    let (mut pointers, mut scalars) = (BTreeMap::new(), BTreeMap::new());
    for t in graph.in_memory() {
        let at = pack.pointer(t, is_captured)?;
        if t.is_by_value {
            // SAFETY: by the caller, the address is that of a value of the host.
            scalars.insert(t.id, unsafe { t.dtype.load(at) });
        } else {
            pointers.insert(t.id, at);
        }
    }
    if let Some(id) = pack.pointers.keys().find(|id| !pointers.contains_key(id) && !scalars.contains_key(id)) {
        return refuse_aloud(BAD_PARAM, format_args!("a pointer for tensor {id}, which the graph does not have"));
    }
    pack.check_workspace(support.workspace_bytes, graph, is_captured)?;
    let workspace = (pack.workspace, support.workspace_bytes);
    let run = Run { graph: graph.clone(), pointers, scalars, half, is_unordered, workspace };
    let run = move |seed| {
        count(Stat::Executions);
        run.run(seed)
    };
    let op = Op::Execution { name: support.pattern.kernel(), run: Arc::new(run) };
    engine().enqueue(handle.stream, op).or_else(|code| refuse(EXECUTION_FAILED, format_args!("the device gave {code}")))
}
