//! Attributes of descriptors: their names, types and values.

use super::descriptor::{Kind, Made};
use super::status::{ATTRIBUTE_TYPE, BAD_PARAM, Outcome, refuse};
use std::collections::BTreeMap;

/// `cudnnBackendAttributeType_t`s.
pub const HANDLE: u32 = 0;
const DATA_TYPE: u32 = 1;
const BOOLEAN: u32 = 2;
pub const INT64: u32 = 3;
const FLOAT: u32 = 4;
const DOUBLE: u32 = 5;
const VOID_PTR: u32 = 6;
const HEUR_MODE: u32 = 8;
pub const KNOB_TYPE: u32 = 9;
const NAN_PROPAGATION: u32 = 10;
pub const NUMERICAL_NOTE: u32 = 11;
const POINTWISE_MODE: u32 = 14;
pub const DESCRIPTOR: u32 = 15;
const REDUCTION_OPERATOR: u32 = 18;
pub const BEHAVIOR_NOTE: u32 = 19;
const REORDERING_MODE: u32 = 20;
const INT32: u32 = 23;
const CHAR: u32 = 24;

/// Bytes of an element of an attribute type.
pub fn bytes_of(ty: u32) -> usize {
    match ty {
        BOOLEAN | CHAR => 1,
        HANDLE | INT64 | DOUBLE | VOID_PTR | DESCRIPTOR => 8,
        _ => 4,
    }
}

/// An attribute that may be set.
struct Rule {
    kind: Kind,
    name: u32,
    ty: u32,
    n_max: usize,
    /// The kinds that may be its value.
    children: &'static [Kind],
}

const fn rule(kind: Kind, name: u32, ty: u32, n_max: usize) -> Rule {
    Rule { kind, name, ty, n_max, children: &[] }
}

const fn child(kind: Kind, name: u32, n_max: usize, children: &'static [Kind]) -> Rule {
    Rule { kind, name, ty: DESCRIPTOR, n_max, children }
}

const MANY: usize = 4096;
const TENSOR: &[Kind] = &[Kind::Tensor];
const OPERATIONS: &[Kind] =
    &[Kind::OperationPointwise, Kind::OperationMatmul, Kind::OperationReduction, Kind::OperationReshape];

const RULES: [Rule; 68] = [
    rule(Kind::Pointwise, 0, POINTWISE_MODE, 1),
    rule(Kind::Pointwise, 1, DATA_TYPE, 1),
    rule(Kind::Pointwise, 2, NAN_PROPAGATION, 1),
    rule(Kind::Pointwise, 3, DOUBLE, 1),
    rule(Kind::Pointwise, 4, DOUBLE, 1),
    rule(Kind::Pointwise, 5, DOUBLE, 1),
    rule(Kind::Pointwise, 9, INT64, 1),
    rule(Kind::Heuristics, 200, HEUR_MODE, 1),
    child(Kind::Heuristics, 201, 1, &[Kind::Graph]),
    rule(Kind::Heuristics, 203, INT32, 1),
    child(Kind::Heuristics, 204, 1, &[Kind::DeviceProperties]),
    child(Kind::Config, 300, 1, &[Kind::Engine]),
    child(Kind::Config, 302, MANY, &[Kind::KnobChoice]),
    rule(Kind::Plan, 400, HANDLE, 1),
    child(Kind::Plan, 401, 1, &[Kind::Config]),
    child(Kind::Plan, 407, 1, &[Kind::DeviceProperties]),
    rule(Kind::KnobChoice, 600, KNOB_TYPE, 1),
    rule(Kind::KnobChoice, 601, INT64, 1),
    child(Kind::OperationPointwise, 750, 1, &[Kind::Pointwise]),
    child(Kind::OperationPointwise, 751, 1, TENSOR),
    child(Kind::OperationPointwise, 752, 1, TENSOR),
    child(Kind::OperationPointwise, 753, 1, TENSOR),
    rule(Kind::OperationPointwise, 754, FLOAT, 1),
    rule(Kind::OperationPointwise, 755, FLOAT, 1),
    rule(Kind::OperationPointwise, 754, DOUBLE, 1),
    rule(Kind::OperationPointwise, 755, DOUBLE, 1),
    child(Kind::OperationPointwise, 758, 1, TENSOR),
    rule(Kind::Graph, 800, HANDLE, 1),
    child(Kind::Graph, 801, MANY, OPERATIONS),
    rule(Kind::Graph, 803, BOOLEAN, 1),
    rule(Kind::Tensor, 900, INT64, 1),
    rule(Kind::Tensor, 901, DATA_TYPE, 1),
    rule(Kind::Tensor, 902, INT64, 64),
    rule(Kind::Tensor, 903, INT64, 64),
    rule(Kind::Tensor, 906, INT64, 1),
    rule(Kind::Tensor, 907, BOOLEAN, 1),
    rule(Kind::Tensor, 908, BOOLEAN, 1),
    rule(Kind::Tensor, 909, REORDERING_MODE, 1),
    child(Kind::Tensor, 913, 1, TENSOR),
    rule(Kind::Pack, 1000, INT64, MANY),
    rule(Kind::Pack, 1001, VOID_PTR, MANY),
    rule(Kind::Pack, 1003, VOID_PTR, 1),
    child(Kind::Engine, 1300, 1, &[Kind::Graph]),
    rule(Kind::Engine, 1301, INT64, 1),
    rule(Kind::Engine, 1306, INT32, 1),
    child(Kind::Engine, 1307, 1, &[Kind::DeviceProperties]),
    rule(Kind::Matmul, 1500, DATA_TYPE, 1),
    rule(Kind::Matmul, 1503, DOUBLE, 1),
    child(Kind::OperationMatmul, 1520, 1, TENSOR),
    child(Kind::OperationMatmul, 1521, 1, TENSOR),
    child(Kind::OperationMatmul, 1522, 1, TENSOR),
    child(Kind::OperationMatmul, 1523, 1, &[Kind::Matmul]),
    rule(Kind::OperationMatmul, 1524, INT64, 1),
    child(Kind::OperationMatmul, 1525, 1, TENSOR),
    child(Kind::OperationMatmul, 1526, 1, TENSOR),
    child(Kind::OperationMatmul, 1527, 1, TENSOR),
    rule(Kind::Reduction, 1600, REDUCTION_OPERATOR, 1),
    rule(Kind::Reduction, 1601, DATA_TYPE, 1),
    rule(Kind::Reduction, 1602, BOOLEAN, 1),
    child(Kind::OperationReduction, 1610, 1, TENSOR),
    child(Kind::OperationReduction, 1611, 1, TENSOR),
    child(Kind::OperationReduction, 1612, 1, &[Kind::Reduction]),
    child(Kind::OperationReshape, 2200, 1, TENSOR),
    child(Kind::OperationReshape, 2201, 1, TENSOR),
    rule(Kind::DeviceProperties, 2700, INT32, 1),
    rule(Kind::DeviceProperties, 2701, HANDLE, 1),
    rule(Kind::DeviceProperties, 2702, CHAR, 1 << 20),
    rule(Kind::KnobChoice, 601, INT32, 1),
];

/// Checks that a kind has an attribute of this type. Gives the kinds that its values may have, if they are descriptors.
pub fn check(kind: Kind, name: u32, ty: u32, n: usize) -> Outcome<&'static [Kind]> {
    let mut named = RULES.iter().filter(|r| r.kind == kind && r.name == name).peekable();
    if named.peek().is_none() {
        return refuse(BAD_PARAM, format_args!("{kind:?} has no attribute {name} that may be set"));
    }
    let Some(rule) = named.find(|r| r.ty == ty) else {
        return refuse(ATTRIBUTE_TYPE, format_args!("attribute {name} of {kind:?} is not of type {ty}"));
    };
    if n == 0 || n > rule.n_max {
        return refuse(BAD_PARAM, format_args!("attribute {name} of {kind:?} cannot have {n} elements"));
    }
    Ok(rule.children)
}

/// A value as it was set.
#[derive(Clone, Debug)]
pub struct Value {
    pub ty: u32,
    pub bytes: Vec<u8>,
    pub children: Vec<Made>,
}

impl Value {
    pub fn len(&self) -> usize {
        if self.ty == DESCRIPTOR { self.children.len() } else { self.bytes.len() / bytes_of(self.ty) }
    }

    fn ints(&self) -> Vec<i64> {
        let number = |b: &[u8]| match b.len() {
            1 => i64::from(b[0]),
            4 => i64::from(i32::from_ne_bytes(b.try_into().expect("four bytes"))),
            _ => i64::from_ne_bytes(b.try_into().expect("eight bytes")),
        };
        self.bytes.chunks_exact(bytes_of(self.ty)).map(number).collect()
    }

    fn float(&self) -> f64 {
        match *self.bytes {
            [a, b, c, d] => f64::from(f32::from_ne_bytes([a, b, c, d])),
            _ => f64::from_ne_bytes(self.bytes[..8].try_into().expect("a double")),
        }
    }
}

/// The values of one descriptor.
#[derive(Clone, Default, Debug)]
pub struct Attributes {
    pub values: BTreeMap<u32, Value>,
}

impl Attributes {
    /// All numbers of an attribute; none where it is not set.
    pub fn ints(&self, name: u32) -> Vec<i64> {
        self.values.get(&name).map(Value::ints).unwrap_or_default()
    }

    pub fn int(&self, name: u32) -> Option<i64> {
        self.ints(name).first().copied()
    }

    pub fn require(&self, name: u32) -> Outcome<i64> {
        self.int(name).map_or_else(|| missing(name), Ok)
    }

    pub fn flag(&self, name: u32) -> bool {
        self.int(name).is_some_and(|f| f != 0)
    }

    pub fn float(&self, name: u32) -> Option<f64> {
        self.values.get(&name).map(Value::float)
    }

    pub fn children(&self, name: u32) -> &[Made] {
        self.values.get(&name).map_or(&[], |v| &v.children)
    }

    pub fn child(&self, name: u32) -> Option<&Made> {
        self.children(name).first()
    }

    pub fn require_child(&self, name: u32) -> Outcome<&Made> {
        self.child(name).map_or_else(|| missing(name), Ok)
    }
}

fn missing<T>(name: u32) -> Outcome<T> {
    refuse(BAD_PARAM, format_args!("attribute {name} is missing"))
}
