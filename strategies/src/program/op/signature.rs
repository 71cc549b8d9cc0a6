//! Operands and results of an instruction, and the checks that the signatures of operations consist of.

use super::columns::Columns;
use crate::mesh::MeshRank;
use crate::program::{DType, Hyper, Value};

/// The values of an instruction.
pub(crate) struct Signature<'a> {
    /// Operands.
    pub(crate) reads: &'a [&'a Value],
    /// Results.
    pub(crate) writes: &'a [&'a Value],
    /// The rank that runs the instruction.
    pub(crate) mesh_rank: &'a MeshRank,
}

impl Signature<'_> {
    pub(super) fn count(&self, n_reads: usize, n_writes: usize) -> Result<(), String> {
        if self.reads.len() == n_reads && self.writes.len() == n_writes {
            return Ok(());
        }
        let found = (self.reads.len(), self.writes.len());
        Err(format!("found {} operands and {} results, expected {n_reads} and {n_writes}", found.0, found.1))
    }

    /// Checks a shape and an element type; any floating-point type of activations without `dtype`.
    pub(super) fn shape(&self, value: &Value, shape: &[usize], dtype: Option<DType>) -> Result<(), String> {
        let dtype_fits = dtype.map_or(value.dtype.is_activation(), |d| d == value.dtype);
        if value.shape == shape && dtype_fits {
            return Ok(());
        }
        let expected = dtype.map_or("f32, bf16 or f16 ".into(), |d| d.to_string());
        Err(format!("`{}` is {}{:?}, expected {expected}{shape:?}", value.name, value.dtype, value.shape))
    }

    /// Checks that a value has the shape and the element type of another one.
    pub(super) fn like(&self, value: &Value, other: &Value) -> Result<(), String> {
        self.shape(value, &other.shape, Some(other.dtype))
    }

    pub(super) fn scalar(&self, value: &Value) -> Result<(), String> {
        self.shape(value, &[], Some(DType::F64))
    }

    pub(super) fn hyper(&self, value: &Value) -> Result<(), String> {
        self.shape(value, &[Hyper::LEN], Some(DType::F64))
    }

    /// Checks that all values have the shape of the first one, and floating-point types of activations.
    pub(super) fn same_shape(&self, values: &[&Value]) -> Result<(), String> {
        values.iter().try_for_each(|v| self.shape(v, &values[0].shape, None))
    }

    /// Rows and columns of a matrix.
    pub(super) fn matrix(&self, value: &Value) -> Result<(usize, usize), String> {
        match value.shape[..] {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(format!("`{}` has shape {:?}, expected a matrix", value.name, value.shape)),
        }
    }

    /// Checks that a value has the elements `start..start + len`.
    pub(super) fn run(&self, value: &Value, start: usize, len: usize) -> Result<(), String> {
        if start + len <= value.n_elements() {
            return Ok(());
        }
        Err(format!("elements {start}..{} of `{}`, which has {}", start + len, value.name, value.n_elements()))
    }

    /// Checks that a matrix consists of two others: the left and the right columns.
    pub(super) fn split(&self, whole: Option<&&Value>, parts: &[&Value]) -> Result<(), String> {
        let (Some(whole), [left, right]) = (whole, parts) else {
            return Err("expected a matrix and its left and right columns".into());
        };
        let (n, c) = self.matrix(whole)?;
        let (_, a) = self.matrix(left)?;
        self.shape(left, &[n, a], None)?;
        self.shape(right, &[n, c.saturating_sub(a)], None)
    }
}

/// Number of columns of a matrix with `stored` ones that are used.
pub(super) fn columns(part: Option<Columns>, stored: usize) -> Result<usize, String> {
    match part {
        None => Ok(stored),
        Some(c) if c.start.checked_add(c.len).is_some_and(|end| end <= stored) => Ok(c.len),
        Some(c) => Err(format!("columns {}..{} of a matrix with {stored}", c.start, c.start.saturating_add(c.len))),
    }
}
