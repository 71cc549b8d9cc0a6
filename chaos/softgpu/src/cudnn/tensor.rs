//! Tensors: shapes, strides and types, and their elements in memory of a device.

use super::attributes::Attributes;
use super::descriptor::Made;
use super::status::{BAD_PARAM, NOT_SUPPORTED_TYPE, Outcome, refuse};
use crate::cublaslt::element::Element;
use std::sync::Arc;

pub const ALIGNMENT: u32 = 900;
pub const DATA_TYPE: u32 = 901;
pub const DIMENSIONS: u32 = 902;
pub const STRIDES: u32 = 903;
pub const UNIQUE_ID: u32 = 906;
pub const IS_VIRTUAL: u32 = 907;
pub const IS_BY_VALUE: u32 = 908;
pub const REORDERING: u32 = 909;
pub const RAGGED_OFFSET: u32 = 913;

pub const RANK_MAX: usize = 8;

/// A `cudnnDataType_t` that graphs may use. Arithmetic is in f32, which holds every index of a tensor that fits in tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataType {
    Float(Element),
    Int32,
    Int64,
    Boolean,
}

impl DataType {
    pub fn of(number: i64) -> Outcome<DataType> {
        Ok(match number {
            0 => DataType::Float(Element::F32),
            2 => DataType::Float(Element::F16),
            9 => DataType::Float(Element::Bf16),
            4 => DataType::Int32,
            10 => DataType::Int64,
            11 => DataType::Boolean,
            _ => return refuse(NOT_SUPPORTED_TYPE, format_args!("data type {number}")),
        })
    }

    pub const F32: DataType = DataType::Float(Element::F32);

    /// The type of 16 bits that this is.
    pub fn half(self) -> Option<Element> {
        match self {
            DataType::Float(e) if e != Element::F32 => Some(e),
            _ => None,
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            DataType::Float(e) => e.bytes(),
            DataType::Int32 => 4,
            DataType::Int64 => 8,
            DataType::Boolean => 1,
        }
    }

    /// # Safety
    /// The address is that of an element.
    pub unsafe fn load(self, at: usize) -> f32 {
        // SAFETY: by the caller.
        unsafe {
            match self {
                DataType::Float(e) => e.load(at),
                DataType::Int32 => *(at as *const i32) as f32,
                DataType::Int64 => *(at as *const i64) as f32,
                DataType::Boolean => f32::from(*(at as *const u8)),
            }
        }
    }

    /// # Safety
    /// The address is that of an element.
    pub unsafe fn store(self, at: usize, value: f32) {
        // SAFETY: by the caller.
        unsafe {
            match self {
                DataType::Float(e) => e.store(at, value),
                DataType::Int32 => *(at as *mut i32) = value as i32,
                DataType::Int64 => *(at as *mut i64) = value as i64,
                DataType::Boolean => *(at as *mut u8) = u8::from(value != 0.0),
            }
        }
    }
}

/// A finalized tensor descriptor.
#[derive(Clone, PartialEq, Debug)]
pub struct Tensor {
    pub id: i64,
    pub dtype: DataType,
    pub dims: Vec<usize>,
    pub strides: Vec<usize>,
    /// It lives inside of the graph only.
    pub is_virtual: bool,
    /// Its only element lies in memory of the host, and is read when the graph is executed.
    pub is_by_value: bool,
    pub alignment: usize,
    /// Where each batch begins, in elements, and where the last one ends.
    pub ragged: Option<Arc<Tensor>>,
}

impl Tensor {
    /// # Errors
    /// As cuDNN 9.19 where it refuses too (seen). Dimensions of 0, missing ids and types, which it lets pass, are refused here.
    pub fn new(a: &Attributes) -> Outcome<Tensor> {
        let (dims, strides) = (a.ints(DIMENSIONS), a.ints(STRIDES));
        let id = a.require(UNIQUE_ID)?;
        let wrong = |what: &str| refuse(BAD_PARAM, format_args!("tensor {id}: {what} ({dims:?}, {strides:?})"));
        if dims.len() != strides.len() || dims.is_empty() || dims.len() > RANK_MAX {
            return wrong("dimensions and strides must be as many, from 1 to 8");
        }
        if dims.iter().any(|d| *d < 1) || strides.iter().any(|s| *s < 0) {
            return wrong("a dimension below 1 or a negative stride");
        }
        let dtype = DataType::of(a.require(DATA_TYPE)?)?;
        let alignment = a.require(ALIGNMENT)?;
        if alignment < dtype.bytes() as i64 || !(alignment as u64).is_power_of_two() {
            return wrong("the alignment must be a power of two and at least an element");
        }
        let (is_virtual, is_by_value) = (a.flag(IS_VIRTUAL), a.flag(IS_BY_VALUE));
        if is_by_value && (is_virtual || dims.iter().any(|d| *d != 1)) {
            return wrong("a tensor by value has one element and is not virtual");
        }
        if a.int(REORDERING).is_some_and(|r| r != 0) {
            return wrong("reordered tensors are not imitated");
        }
        let ragged = a.children(RAGGED_OFFSET).first().map(Made::tensor).transpose()?.cloned();
        let size = |v: &[i64]| v.iter().map(|x| *x as usize).collect::<Vec<_>>();
        let (dims, strides) = (size(&dims), size(&strides));
        if let Some(offsets) = &ragged {
            check_offsets(&dims, offsets)?;
        }
        Ok(Tensor { id, dtype, dims, strides, is_virtual, is_by_value, alignment: alignment as usize, ragged })
    }

    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Bytes from its first element to behind its last, if it is not ragged.
    pub fn extent(&self) -> usize {
        (last_offset(&self.dims, &self.strides) + 1) * self.dtype.bytes()
    }

    /// Whether elements follow one another in the order of indices.
    pub fn is_packed(&self) -> bool {
        let mut next = 1;
        self.dims.iter().zip(&self.strides).rev().all(|(d, s)| {
            let is_next = *d == 1 || *s == next;
            next *= d;
            is_next
        })
    }

    /// The dimension whose elements lie farthest apart, batches aside: tokens, in a ragged tensor.
    pub fn token_axis(&self) -> usize {
        let farthest = (1..self.dims.len()).max_by_key(|i| if self.dims[*i] == 1 { 0 } else { self.strides[*i] });
        farthest.unwrap_or(0)
    }
}

/// Offset of the last element, in elements.
pub fn last_offset(dims: &[usize], strides: &[usize]) -> usize {
    dims.iter().zip(strides).map(|(d, s)| (d - 1) * s).sum()
}

fn check_offsets(dims: &[usize], offsets: &Tensor) -> Outcome {
    let is_shape = offsets.dims[0] == dims[0] + 1 && offsets.dims[1..].iter().all(|d| *d == 1);
    let is_type = dims.len() >= 3 && matches!(offsets.dtype, DataType::Int32 | DataType::Int64);
    if is_shape && is_type && offsets.strides[0] == 1 && !offsets.is_virtual && !offsets.is_by_value {
        return Ok(());
    }
    let what = format_args!("ragged offsets must be {} numbers of type INT32 or INT64, not {offsets:?}", dims[0] + 1);
    refuse(BAD_PARAM, what)
}
