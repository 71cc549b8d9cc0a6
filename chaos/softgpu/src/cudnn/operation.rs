//! Operations: what they compute from which tensors, and whether shapes agree.

use super::attributes::Attributes;
use super::descriptor::Made;
use super::pointwise::Mode;
use super::status::{BAD_PARAM, NOT_SUPPORTED, NOT_SUPPORTED_TYPE, Outcome, refuse};
use super::tensor::{DataType, Tensor};
use crate::cublaslt::element::Element;
use std::sync::Arc;

/// A pointwise rule: what is computed of each element.
#[derive(Clone, Copy, Debug)]
pub struct Pointwise {
    pub mode: Mode,
    /// The dimension whose index [`Mode::GenIndex`] gives.
    pub axis: Option<usize>,
}

/// A rule of products.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// What the product is outside of the overridden sizes.
    pub padding: f32,
}

/// How the elements of a group become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduction {
    Add,
    Mul,
    Min,
    Max,
}

/// What a node computes from its inputs.
#[derive(Clone, Debug)]
pub enum Work {
    /// Of x, and b, and the mask t, as many as the mode takes.
    Pointwise {
        rule: Pointwise,
        scales: [f32; 2],
    },
    /// Of a `[.., M, K]` and b `[.., K, N]`. `overrides` are the inputs that hold M, N and K of each batch.
    Matmul {
        rule: Matmul,
        overrides: [Option<usize>; 3],
    },
    Reduction(Reduction),
    /// The same elements in memory by other dimensions and strides.
    Reshape,
}

/// A finalized operation.
#[derive(Clone, Debug)]
pub struct Operation {
    pub work: Work,
    pub inputs: Vec<Arc<Tensor>>,
    pub output: Arc<Tensor>,
}

impl Pointwise {
    pub fn new(a: &Attributes) -> Outcome<Pointwise> {
        let mode = Mode::of(a.require(0)?)?;
        DataType::of(a.require(1)?)?;
        let axis = a.int(9).map(|axis| axis as usize);
        if mode == Mode::GenIndex && axis.is_none() {
            return refuse(BAD_PARAM, format_args!("GEN_INDEX without an axis"));
        }
        Ok(Pointwise { mode, axis })
    }
}

impl Matmul {
    pub fn new(a: &Attributes) -> Outcome<Matmul> {
        check_compute_type(a.require(1500)?)?;
        Ok(Matmul { padding: a.float(1503).unwrap_or(0.0) as f32 })
    }
}

impl Reduction {
    pub fn new(a: &Attributes) -> Outcome<Reduction> {
        check_compute_type(a.require(1601)?)?;
        Ok(match a.require(1600)? {
            0 => Reduction::Add,
            1 => Reduction::Mul,
            2 => Reduction::Min,
            3 => Reduction::Max,
            other => return refuse(NOT_SUPPORTED, format_args!("reduction operator {other} is not imitated")),
        })
    }
}

fn check_compute_type(number: i64) -> Outcome {
    match DataType::of(number)? {
        DataType::Float(Element::F32) => Ok(()),
        other => refuse(NOT_SUPPORTED_TYPE, format_args!("sums in {other:?}, where only FLOAT is imitated")),
    }
}

fn tensor(a: &Attributes, name: u32) -> Outcome<Arc<Tensor>> {
    a.require_child(name)?.tensor().cloned()
}

/// # Errors
/// cuDNN 9.19 compares ranks here and shapes later (seen); both are compared here.
pub fn of_pointwise(a: &Attributes) -> Outcome<Operation> {
    let rule = **a.require_child(750)?.pointwise()?;
    let mut inputs = vec![tensor(a, 751)?];
    for (i, name) in [752, 758].into_iter().enumerate() {
        match a.child(name).map(Made::tensor).transpose()? {
            Some(t) if i + 1 < rule.mode.n_inputs() => inputs.push(t.clone()),
            Some(_) => return refuse(BAD_PARAM, format_args!("{:?} has no attribute {name}", rule.mode)),
            None => {}
        }
    }
    if inputs.len() != rule.mode.n_inputs() {
        return refuse(BAD_PARAM, format_args!("{:?} needs {} inputs", rule.mode, rule.mode.n_inputs()));
    }
    let output = tensor(a, 753)?;
    for input in &inputs {
        let fits = |(x, y): (&usize, &usize)| x == y || *x == 1;
        if input.dims.len() != output.dims.len() || !input.dims.iter().zip(&output.dims).all(fits) {
            let (from, to) = (&input.dims, &output.dims);
            return refuse(BAD_PARAM, format_args!("{:?}: {from:?} cannot be broadcast to {to:?}", rule.mode));
        }
    }
    if rule.axis.is_some_and(|axis| axis >= output.dims.len()) {
        return refuse(BAD_PARAM, format_args!("GEN_INDEX: axis {:?} of {:?}", rule.axis, output.dims));
    }
    check_pointwise_types(rule.mode, &inputs, &output)?;
    let scales = [754, 755].map(|name| a.float(name).unwrap_or(1.0) as f32);
    Ok(Operation { work: Work::Pointwise { rule, scales }, inputs, output })
}

/// cuDNN 9.19 lets other types pass here (seen), and has no engine for them (our reading): comparisons give BOOLEAN,
/// logic and masks take it.
fn check_pointwise_types(mode: Mode, inputs: &[Arc<Tensor>], output: &Tensor) -> Outcome {
    let is_boolean = |t: &Tensor| t.dtype == DataType::Boolean;
    let is_right = match mode {
        Mode::Compare(_) => is_boolean(output),
        Mode::And | Mode::Or | Mode::Not => is_boolean(output) && inputs.iter().all(|t| is_boolean(t)),
        Mode::Select => is_boolean(&inputs[2]) && !is_boolean(output),
        _ => !is_boolean(output) && inputs.iter().all(|t| !is_boolean(t)),
    };
    if is_right {
        return Ok(());
    }
    let types: Vec<DataType> = inputs.iter().map(|t| t.dtype).collect();
    refuse(NOT_SUPPORTED_TYPE, format_args!("{mode:?} of {types:?} that gives {:?}", output.dtype))
}

/// # Errors
/// As cuDNN 9.19 (seen).
pub fn of_matmul(a: &Attributes) -> Outcome<Operation> {
    let rule = *a.require_child(1523)?.matmul()?;
    let (left, right, output) = (tensor(a, 1520)?, tensor(a, 1521)?, tensor(a, 1522)?);
    let rank = output.dims.len();
    let wrong = |what: &str| {
        let dims = (&left.dims, &right.dims, &output.dims);
        refuse(BAD_PARAM, format_args!("product of {:?} and {:?} to {:?}: {what}", dims.0, dims.1, dims.2))
    };
    if rank < 3 || left.dims.len() != rank || right.dims.len() != rank {
        return wrong("ranks differ or are below 3");
    }
    let [rows, columns] = [rank - 2, rank - 1];
    let agrees = left.dims[columns] == right.dims[rows]
        && left.dims[rows] == output.dims[rows]
        && right.dims[columns] == output.dims[columns];
    if !agrees {
        return wrong("sizes do not agree");
    }
    for i in 0..rows {
        let (l, r, o) = (left.dims[i], right.dims[i], output.dims[i]);
        if l.max(r) != o || (l % r != 0 && r % l != 0) {
            return wrong("batches do not agree");
        }
    }
    let mut inputs = vec![left.clone(), right.clone()];
    let mut overrides = [None; 3];
    for (place, name) in overrides.iter_mut().zip([1525, 1526, 1527]) {
        let Some(sizes) = a.child(name).map(Made::tensor).transpose()? else { continue };
        let is_shape = sizes.dims[0] == output.dims[0] && sizes.dims[1..].iter().all(|d| *d == 1);
        if !is_shape || sizes.dims.len() != rank || sizes.dtype != DataType::Int32 {
            return refuse(NOT_SUPPORTED, format_args!("sizes of batches must be INT32 [batches, 1, 1, 1]: {sizes:?}"));
        }
        *place = Some(inputs.len());
        inputs.push(sizes.clone());
    }
    Ok(Operation { work: Work::Matmul { rule, overrides }, inputs, output })
}

/// # Errors
/// As cuDNN 9.19 (seen): each dimension of x must be a multiple of that of y.
pub fn of_reduction(a: &Attributes) -> Outcome<Operation> {
    let rule = *a.require_child(1612)?.reduction()?;
    let (x, y) = (tensor(a, 1610)?, tensor(a, 1611)?);
    let is_multiple = |(x, y): (&usize, &usize)| x.is_multiple_of(*y);
    if x.dims.len() != y.dims.len() || !x.dims.iter().zip(&y.dims).all(is_multiple) {
        return refuse(BAD_PARAM, format_args!("reduction of {:?} to {:?}", x.dims, y.dims));
    }
    Ok(Operation { work: Work::Reduction(rule), inputs: vec![x], output: y })
}

/// # Errors
/// As cuDNN 9.19 where numbers of elements differ (seen). Of all reshapes only transposes are imitated: dimensions and
/// strides of y are those of x in another order.
pub fn of_reshape(a: &Attributes) -> Outcome<Operation> {
    let (x, y) = (tensor(a, 2200)?, tensor(a, 2201)?);
    if x.len() != y.len() {
        return refuse(BAD_PARAM, format_args!("reshape of {:?} to {:?}: numbers of elements differ", x.dims, y.dims));
    }
    if transposition(&x, &y).is_none() {
        let what = format_args!("a reshape that is no transpose: {x:?} to {y:?}");
        return refuse(NOT_SUPPORTED, what);
    }
    Ok(Operation { work: Work::Reshape, inputs: vec![x], output: y })
}

/// For each dimension of y the dimension of x that it is.
pub fn transposition(x: &Tensor, y: &Tensor) -> Option<Vec<usize>> {
    let mut taken = vec![false; x.dims.len()];
    let axis_of = |j: usize| {
        let is_same =
            |i: &usize| !taken[*i] && x.dims[*i] == y.dims[j] && (x.dims[*i] == 1 || x.strides[*i] == y.strides[j]);
        // The same place first: of two dimensions of size 1 any would do.
        let found = std::iter::once(j).chain(0..x.dims.len()).find(is_same)?;
        taken[found] = true;
        Some(found)
    };
    if x.dims.len() != y.dims.len() {
        return None;
    }
    (0..y.dims.len()).map(axis_of).collect()
}
