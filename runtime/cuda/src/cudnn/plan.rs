//! Execution plans: the first engine of the library's heuristics that supports a graph.

use super::descriptor::{Attribute, Descriptor, Kind, Library, Type};
use super::graph::{Direction, Graph, Shape};
use crate::error::CudaError;
use crate::library::{Handle, RawDescriptor};

/// `CUDNN_HEUR_MODE_A`, then `…_FALLBACK`.
const MODES: [u32; 2] = [3, 2];
/// Most engines that a mode proposes.
const ENGINES_MAX: usize = 64;
/// `CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC`.
const NONDETERMINISTIC: u32 = 4;
/// `CUDNN_KNOB_TYPE_STAGES`, `…_KERNEL_CFG`.
const STAGES: u32 = 14;
const KERNEL: u32 = 24;

/// Where plans are made for.
#[derive(Debug)]
pub(super) enum Place {
    /// The GPU of a handle, of this compute capability.
    Gpu { handle: Handle, capability: (i32, i32) },
    /// A GPU that is only described.
    #[cfg(test)]
    Described { properties: Descriptor, capability: (i32, i32) },
}

impl Place {
    fn capability(&self) -> (i32, i32) {
        match self {
            Place::Gpu { capability, .. } => *capability,
            #[cfg(test)]
            Place::Described { capability, .. } => *capability,
        }
    }
}

/// A graph and the engine that runs it.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) descriptor: Descriptor,
    /// Bytes of scratch that the engine takes.
    pub(super) workspace_bytes: usize,
    /// What the plan was made of, in case that the library refers to it.
    _made_of: Vec<Descriptor>,
}

impl Plan {
    /// Plans a graph, with at most `workspace_max` bytes of scratch.
    ///
    /// # Errors
    /// The reason of the last engine, when none supports the graph.
    pub(super) fn new(
        library: &Library,
        place: &Place,
        shape: &Shape,
        direction: Direction,
        workspace_max: usize,
    ) -> Result<Plan, CudaError> {
        // Source: NVIDIA's cudnn-frontend, which refuses them; the library plans them.
        let is_broken = direction == Direction::Backward && shape.has_documents;
        if is_broken && [8, 12].contains(&place.capability().0) {
            return Err(unsupported(library, "no gradients of documents on this architecture"));
        }
        let (graph, operations) = operation_graph(library, place, shape, direction)?;
        let needs_order = direction == Direction::Backward && shape.is_deterministic;
        let mut last = unsupported(library, "no engine");
        for config in configs(library, place, &graph, needs_order)? {
            if needs_order && is_nondeterministic(library, &config)? {
                continue;
            }
            match Plan::with(library, place, &config) {
                Ok((_, bytes)) if bytes > workspace_max => last = unsupported(library, "more scratch than planned"),
                Ok((descriptor, workspace_bytes)) => {
                    let _made_of = operations.into_iter().chain([graph, config]).collect();
                    return Ok(Plan { descriptor, workspace_bytes, _made_of });
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn with(library: &Library, place: &Place, config: &Descriptor) -> Result<(Descriptor, usize), CudaError> {
        let mut plan = Descriptor::new(library, Kind::Plan)?;
        plan.refer(library, Attribute::PlanConfig, &[config])?;
        match place {
            Place::Gpu { handle, .. } => plan.set(library, Attribute::PlanHandle, Type::Handle, &[*handle])?,
            #[cfg(test)]
            Place::Described { properties, .. } => plan.refer(library, Attribute::PlanDevice, &[properties])?,
        }
        plan.finalize(library)?;
        let mut bytes = [0i64];
        plan.get(library, Attribute::PlanWorkspaceBytes, Type::Int64, &mut bytes)?;
        Ok((plan, bytes[0].max(0) as usize))
    }
}

fn unsupported(library: &Library, text: &str) -> CudaError {
    /// `CUDNN_STATUS_NOT_SUPPORTED`.
    const CODE: u32 = 3000;
    CudaError { call: "planning attention", device: library.device.clone(), code: CODE, text: text.to_owned() }
}

/// The graph, and the descriptors that it was made of.
fn operation_graph(
    library: &Library,
    place: &Place,
    shape: &Shape,
    direction: Direction,
) -> Result<(Descriptor, Vec<Descriptor>), CudaError> {
    let operations = match direction {
        Direction::Forward => Graph::forward(library, shape)?,
        Direction::Backward => Graph::backward(library, shape)?,
    };
    let mut graph = Descriptor::new(library, Kind::OperationGraph)?;
    let all: Vec<&Descriptor> = operations.operations.iter().collect();
    graph.refer(library, Attribute::GraphOperations, &all)?;
    match place {
        Place::Gpu { handle, .. } => graph.set(library, Attribute::GraphHandle, Type::Handle, &[*handle])?,
        #[cfg(test)]
        Place::Described { .. } => {}
    }
    graph.finalize(library)?;
    Ok((graph, operations.into_descriptors()))
}

/// Engines for a graph, the best ones first.
fn configs(
    library: &Library,
    place: &Place,
    graph: &Descriptor,
    needs_order: bool,
) -> Result<Vec<Descriptor>, CudaError> {
    // The heuristics for compute capability 10 propose engines that add up gradients in no order; one has a mode with one.
    if needs_order && place.capability().0 == 10 {
        return Ok(engine(library, place, graph, 5, &[(KERNEL, 31), (STAGES, 2)]).into_iter().collect());
    }
    let mut all = Vec::new();
    for mode in MODES {
        let mut heuristics = Descriptor::new(library, Kind::EngineHeuristics)?;
        heuristics.refer(library, Attribute::HeuristicsGraph, &[graph])?;
        heuristics.set(library, Attribute::HeuristicsMode, Type::HeuristicsMode, &[mode])?;
        #[cfg(test)]
        if let Place::Described { properties, .. } = place {
            heuristics.refer(library, Attribute::HeuristicsDevice, &[properties])?;
        }
        // A mode without a proposal reports that it does not support the graph.
        if heuristics.finalize(library).is_err() {
            continue;
        }
        let name = Attribute::HeuristicsResults;
        let Ok(n) = heuristics.get::<RawDescriptor>(library, name, Type::Descriptor, &mut []) else { continue };
        let room = n.min(ENGINES_MAX);
        let found: Result<Vec<Descriptor>, CudaError> =
            (0..room).map(|_| Descriptor::new(library, Kind::EngineConfig)).collect();
        let found = found?;
        let mut raw: Vec<RawDescriptor> = found.iter().map(Descriptor::raw).collect();
        let n = heuristics.get(library, name, Type::Descriptor, &mut raw)?;
        all.extend(found.into_iter().take(n));
    }
    Ok(all)
}

/// An engine by its number, with knobs and their values; none if it does not support the graph.
fn engine(
    library: &Library,
    #[cfg_attr(not(test), allow(unused_variables))] place: &Place,
    graph: &Descriptor,
    index: i64,
    knobs: &[(u32, i64)],
) -> Option<Descriptor> {
    let engine = || -> Result<Descriptor, CudaError> {
        let mut engine = Descriptor::new(library, Kind::Engine)?;
        engine.refer(library, Attribute::EngineGraph, &[graph])?;
        engine.set(library, Attribute::EngineIndex, Type::Int64, &[index])?;
        #[cfg(test)]
        if let Place::Described { properties, .. } = place {
            engine.refer(library, Attribute::EngineDevice, &[properties])?;
        }
        engine.finalize(library)?;
        let mut choices = Vec::new();
        for (knob, value) in knobs {
            let mut choice = Descriptor::new(library, Kind::KnobChoice)?;
            choice.set(library, Attribute::KnobType, Type::Knob, &[*knob])?;
            choice.set(library, Attribute::KnobValue, Type::Int64, &[*value])?;
            choice.finalize(library)?;
            choices.push(choice);
        }
        let mut config = Descriptor::new(library, Kind::EngineConfig)?;
        config.refer(library, Attribute::ConfigEngine, &[&engine])?;
        config.refer(library, Attribute::ConfigKnobs, &choices.iter().collect::<Vec<_>>())?;
        config.finalize(library)?;
        Ok(config)
    };
    engine().ok()
}

/// Whether an engine's results may have other bits in another run.
fn is_nondeterministic(library: &Library, config: &Descriptor) -> Result<bool, CudaError> {
    let engine = Descriptor::new(library, Kind::Engine)?;
    config.get(library, Attribute::ConfigEngine, Type::Descriptor, &mut [engine.raw()])?;
    let mut notes = [0u32; 16];
    let n = engine.get(library, Attribute::EngineNumericalNotes, Type::NumericalNote, &mut notes)?;
    Ok(notes[..n.min(notes.len())].contains(&NONDETERMINISTIC))
}
