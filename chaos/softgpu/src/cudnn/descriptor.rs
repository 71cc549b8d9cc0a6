//! Descriptors: created, given attributes, finalized, read, destroyed. They are numbers here, so a wrong one is refused.

use super::attributes::{self, Attributes, DESCRIPTOR, HANDLE, Value};
use super::graph::Graph;
use super::operation::{self, Matmul, Operation, Pointwise, Reduction};
use super::plan::{Config, Engine, Heuristics, Knob, Pack, Plan};
use super::status::{
    ATTRIBUTE_TYPE, BAD_PARAM, DESCRIPTOR_TYPE, NOT_FINALIZED, NOT_INITIALIZED, NOT_SUPPORTED, NULL_POINTER, Outcome,
    refuse, refuse_aloud,
};
use super::tensor::Tensor;
use super::{P, handle};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A `cudnnBackendDescriptorType_t`, of those that attention needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Pointwise = 0,
    Engine = 2,
    Config = 3,
    Heuristics = 4,
    Plan = 5,
    KnobChoice = 7,
    OperationPointwise = 13,
    Graph = 15,
    Pack = 16,
    Tensor = 17,
    Matmul = 18,
    OperationMatmul = 19,
    Reduction = 21,
    OperationReduction = 22,
    OperationReshape = 31,
    DeviceProperties = 38,
}

const KINDS: [Kind; 16] = [
    Kind::Pointwise,
    Kind::Engine,
    Kind::Config,
    Kind::Heuristics,
    Kind::Plan,
    Kind::KnobChoice,
    Kind::OperationPointwise,
    Kind::Graph,
    Kind::Pack,
    Kind::Tensor,
    Kind::Matmul,
    Kind::OperationMatmul,
    Kind::Reduction,
    Kind::OperationReduction,
    Kind::OperationReshape,
    Kind::DeviceProperties,
];

/// What a descriptor is once it is finalized. Other descriptors share it, so it outlives its own descriptor: whether cuDNN
/// copies too is not documented, hence programs should keep descriptors until the plan is finalized.
#[derive(Clone, Debug)]
pub enum Made {
    Tensor(Arc<Tensor>),
    Pointwise(Arc<Pointwise>),
    Matmul(Matmul),
    Reduction(Reduction),
    Operation(Arc<Operation>),
    Graph(Arc<Graph>),
    Heuristics(Arc<Heuristics>),
    Engine(Engine),
    Config(Config),
    Knob(Knob),
    Plan(Arc<Plan>),
    Pack(Arc<Pack>),
    DeviceProperties,
}

macro_rules! accessor {
    ($name:ident, $variant:ident, $ty:ty) => {
        pub fn $name(&self) -> Outcome<&$ty> {
            if let Made::$variant(made) = self { Ok(made) } else { wrong_kind(stringify!($name)) }
        }
    };
}

impl Made {
    accessor!(tensor, Tensor, Arc<Tensor>);
    accessor!(pointwise, Pointwise, Arc<Pointwise>);
    accessor!(matmul, Matmul, Matmul);
    accessor!(reduction, Reduction, Reduction);
    accessor!(operation, Operation, Arc<Operation>);
    accessor!(graph, Graph, Arc<Graph>);
    accessor!(engine, Engine, Engine);
    accessor!(config, Config, Config);
    accessor!(knob, Knob, Knob);
    accessor!(plan, Plan, Arc<Plan>);
    accessor!(pack, Pack, Arc<Pack>);

    fn new(kind: Kind, a: &Attributes) -> Outcome<Made> {
        Ok(match kind {
            Kind::Tensor => Made::Tensor(Arc::new(Tensor::new(a)?)),
            Kind::Pointwise => Made::Pointwise(Arc::new(Pointwise::new(a)?)),
            Kind::Matmul => Made::Matmul(Matmul::new(a)?),
            Kind::Reduction => Made::Reduction(Reduction::new(a)?),
            Kind::OperationPointwise => Made::Operation(Arc::new(operation::of_pointwise(a)?)),
            Kind::OperationMatmul => Made::Operation(Arc::new(operation::of_matmul(a)?)),
            Kind::OperationReduction => Made::Operation(Arc::new(operation::of_reduction(a)?)),
            Kind::OperationReshape => Made::Operation(Arc::new(operation::of_reshape(a)?)),
            Kind::Graph => Made::Graph(Arc::new(Graph::new(a)?)),
            Kind::Heuristics => Made::Heuristics(Arc::new(Heuristics::new(a)?)),
            Kind::Engine => Made::Engine(Engine::new(a)?),
            Kind::Config => Made::Config(Config::new(a)?),
            Kind::KnobChoice => Made::Knob(Knob::new(a)?),
            Kind::Plan => Made::Plan(Arc::new(Plan::new(a)?)),
            Kind::Pack => Made::Pack(Arc::new(Pack::new(a)?)),
            Kind::DeviceProperties => Made::DeviceProperties,
        })
    }

    /// What the library computes: numbers or descriptors. None if the attribute is one that was set, or none at all.
    fn computed(&self, name: u32) -> Option<Computed> {
        match self {
            Made::Graph(g) => g.computed(name),
            Made::Heuristics(h) => h.computed(name),
            Made::Engine(e) => e.computed(name),
            Made::Config(c) => c.computed(name),
            Made::Plan(p) => p.computed(name),
            _ => None,
        }
    }
}

/// The value of an attribute that the library computes.
pub enum Computed {
    Numbers(u32, Vec<i64>),
    /// And how many a call that asks for their number is told: more, perhaps.
    Descriptors(Vec<Made>, usize),
}

fn wrong_kind<T>(wanted: &str) -> Outcome<T> {
    refuse_aloud(DESCRIPTOR_TYPE, format_args!("a descriptor is not a {wanted}"))
}

struct Descriptor {
    kind: Kind,
    attributes: Attributes,
    made: Option<Made>,
}

#[derive(Default)]
struct Registry {
    last: usize,
    descriptors: BTreeMap<usize, Descriptor>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { last: 0xcd00_0000, descriptors: BTreeMap::new() });

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().expect("no panic while descriptors are held")
}

impl Registry {
    fn get(&mut self, at: P) -> Outcome<&mut Descriptor> {
        if at.is_null() {
            return refuse(NULL_POINTER, format_args!("a null descriptor"));
        }
        match self.descriptors.get_mut(&(at as usize)) {
            Some(d) => Ok(d),
            None => refuse_aloud(BAD_PARAM, format_args!("{at:p} is not a descriptor, or one that was destroyed")),
        }
    }
}

/// Number of descriptors that exist.
pub fn count() -> u64 {
    registry().descriptors.len() as u64
}

/// What a finalized descriptor is.
pub fn made(at: P) -> Outcome<Made> {
    match &registry().get(at)?.made {
        Some(made) => Ok(made.clone()),
        None => refuse(NOT_FINALIZED, format_args!("a descriptor is not finalized")),
    }
}

pub fn create(kind: u32, at: *mut P) -> Outcome {
    if at.is_null() {
        return refuse(NULL_POINTER, format_args!("no place for the descriptor"));
    }
    let Some(kind) = KINDS.into_iter().find(|k| *k as u32 == kind) else {
        return refuse_aloud(NOT_SUPPORTED, format_args!("descriptors of type {kind} are not imitated"));
    };
    let mut registry = registry();
    registry.last += 0x10;
    let id = registry.last;
    registry.descriptors.insert(id, Descriptor { kind, attributes: Attributes::default(), made: None });
    // SAFETY: by the caller.
    unsafe { at.write(id as P) };
    Ok(())
}

pub fn destroy(at: P) -> Outcome {
    let mut registry = registry();
    registry.get(at)?;
    registry.descriptors.remove(&(at as usize));
    Ok(())
}

pub fn set(at: P, name: u32, ty: u32, n: i64, from: *const u8) -> Outcome {
    let mut registry = registry();
    let d = registry.get(at)?;
    let kind = d.kind;
    if d.made.is_some() {
        return refuse(BAD_PARAM, format_args!("attribute {name} of a {kind:?} that is finalized already"));
    }
    let n = usize::try_from(n).unwrap_or(0);
    let kinds = attributes::check(kind, name, ty, n)?;
    if from.is_null() {
        return refuse(BAD_PARAM, format_args!("attribute {name} of {kind:?}: no values"));
    }
    // SAFETY: by the caller, `from` has `n` elements of the type, which need not be aligned.
    let bytes = unsafe { std::slice::from_raw_parts(from, n * attributes::bytes_of(ty)) }.to_vec();
    let addresses = || bytes.chunks_exact(8).map(|b| usize::from_ne_bytes(b.try_into().expect("eight bytes")) as P);
    if ty == HANDLE {
        addresses().try_for_each(|h| handle::get(h).map(|_| ()))?;
    }
    let mut children = Vec::new();
    if ty == DESCRIPTOR {
        for address in addresses() {
            let child = registry.get(address)?;
            if !kinds.contains(&child.kind) {
                return refuse(BAD_PARAM, format_args!("attribute {name} of {kind:?} cannot be a {:?}", child.kind));
            }
            match &child.made {
                Some(made) => children.push(made.clone()),
                None => {
                    return refuse(NOT_FINALIZED, format_args!("attribute {name} of {kind:?} is not finalized"));
                }
            }
        }
    }
    registry.get(at)?.attributes.values.insert(name, Value { ty, bytes, children });
    Ok(())
}

/// A descriptor that is refused keeps its attributes, and may be finalized once more.
pub fn finalize(at: P) -> Outcome {
    let (kind, attributes) = {
        let mut registry = registry();
        let d = registry.get(at)?;
        if d.made.is_some() {
            return refuse(BAD_PARAM, format_args!("a {:?} that is finalized already", d.kind));
        }
        (d.kind, d.attributes.clone())
    };
    let made = Made::new(kind, &attributes)?;
    registry().get(at)?.made = Some(made);
    Ok(())
}

/// Writes at most `room` elements; `n` is given their number, or how many there may be where `to` is null.
pub fn get(at: P, name: u32, ty: u32, room: i64, n: *mut i64, to: *mut u8) -> Outcome {
    let mut registry = registry();
    let d = registry.get(at)?;
    let Some(made) = &d.made else {
        return refuse(NOT_INITIALIZED, format_args!("attribute {name} of a {:?} that is not finalized", d.kind));
    };
    let (value, announced) = match made.computed(name) {
        Some(Computed::Numbers(ty, n)) => (Value { ty, bytes: bytes(ty, &n), children: Vec::new() }, n.len()),
        Some(Computed::Descriptors(children, n)) => (Value { ty: DESCRIPTOR, bytes: Vec::new(), children }, n),
        None => match d.attributes.values.get(&name) {
            Some(value) => (value.clone(), value.len()),
            None => return refuse(BAD_PARAM, format_args!("{:?} has no attribute {name}", d.kind)),
        },
    };
    if value.ty != ty {
        return refuse(ATTRIBUTE_TYPE, format_args!("attribute {name} is of type {}, not {ty}", value.ty));
    }
    let room = if to.is_null() { 0 } else { usize::try_from(room).unwrap_or(0) };
    let written = value.len().min(room);
    if !n.is_null() {
        // SAFETY: by the caller.
        unsafe { n.write(if room == 0 { announced } else { written } as i64) };
    }
    if ty != DESCRIPTOR {
        // SAFETY: by the caller, `to` has room for `room` elements.
        unsafe { std::ptr::copy_nonoverlapping(value.bytes.as_ptr(), to, written * attributes::bytes_of(ty)) };
        return Ok(());
    }
    for (i, made) in value.children.into_iter().take(written).enumerate() {
        // SAFETY: by the caller, `to` has room for `room` descriptors, which the caller created.
        let child = registry.get(unsafe { to.cast::<P>().add(i).read_unaligned() })?;
        if child.made.is_some() || !made.is(child.kind) {
            return refuse(BAD_PARAM, format_args!("the descriptor for attribute {name} must be new and of its type"));
        }
        child.made = Some(made);
    }
    Ok(())
}

impl Made {
    /// Whether it can become the contents of a descriptor of this kind.
    fn is(&self, kind: Kind) -> bool {
        matches!(
            (self, kind),
            (Made::Tensor(_), Kind::Tensor)
                | (Made::Graph(_), Kind::Graph)
                | (Made::Engine(_), Kind::Engine)
                | (Made::Config(_), Kind::Config)
                | (Made::Knob(_), Kind::KnobChoice)
                | (Made::Pointwise(_), Kind::Pointwise)
                | (Made::Matmul(_), Kind::Matmul)
                | (Made::Reduction(_), Kind::Reduction)
        )
    }
}

fn bytes(ty: u32, numbers: &[i64]) -> Vec<u8> {
    match attributes::bytes_of(ty) {
        8 => numbers.iter().flat_map(|n| n.to_ne_bytes()).collect(),
        4 => numbers.iter().flat_map(|n| (*n as i32).to_ne_bytes()).collect(),
        _ => numbers.iter().map(|n| *n as u8).collect(),
    }
}
