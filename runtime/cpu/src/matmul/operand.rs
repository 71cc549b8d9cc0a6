//! Arguments of a matrix product: borrowed matrices, raw tiles, and the epilogue.

use std::any::TypeId;

use half::{bf16, f16};

use phalanx_device::float::Float;

/// The element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// 4 bytes.
    F32,
    /// 2 bytes, 8 bits of significand.
    Bf16,
    /// 2 bytes, 11 bits of significand.
    F16,
}

impl Storage {
    /// The storage of an element type.
    ///
    /// # Panics
    /// For a [`Float`] other than f32, bf16 and f16.
    pub fn of<T: Float>() -> Storage {
        let id = TypeId::of::<T>();
        if id == TypeId::of::<f32>() {
            Storage::F32
        } else if id == TypeId::of::<bf16>() {
            Storage::Bf16
        } else {
            assert!(id == TypeId::of::<f16>(), "matrix products support f32, bf16 and f16 only");
            Storage::F16
        }
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Storage::F32 => 4,
            Storage::Bf16 | Storage::F16 => 2,
        }
    }
}

/// Elements of an operand.
#[derive(Clone, Copy, Debug)]
pub enum Slice<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Brain floats.
    Bf16(&'a [bf16]),
    /// IEEE half precision.
    F16(&'a [f16]),
}

/// Elements of a result.
#[derive(Debug)]
pub enum SliceMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// Brain floats.
    Bf16(&'a mut [bf16]),
    /// IEEE half precision.
    F16(&'a mut [f16]),
}

/// An operand: logical `[rows, cols]`, stored row-major with `ld` elements from row to row, or, if `transposed`,
/// stored as the row-major `[cols, rows]`.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a> {
    /// The stored elements, from the first one on.
    pub data: Slice<'a>,
    /// Elements from one stored row to the next.
    pub ld: usize,
    /// Whether storage is the transpose of the logical matrix.
    pub transposed: bool,
}

/// A result: `[rows, cols]`, row-major with `ld` elements from row to row.
#[derive(Debug)]
pub struct MatMut<'a> {
    /// The stored elements, from the first one on.
    pub data: SliceMut<'a>,
    /// Elements from one row to the next.
    pub ld: usize,
}

/// The last step of a product: `C = alpha · A·B + bias + (C, if accumulate)`.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// Add to C instead of overwriting it.
    pub accumulate: bool,
    /// `[n]`, added to every row.
    pub bias: Option<&'a [f32]>,
    /// Factor of the product.
    pub alpha: f32,
}

impl Default for Epilogue<'_> {
    /// The plain product.
    fn default() -> Self {
        Epilogue { accumulate: false, bias: None, alpha: 1.0 }
    }
}

/// An operand given by address, for tiles of buffers that several threads share; see [`Mat`].
#[derive(Clone, Copy, Debug)]
pub struct TileRef {
    pub(super) ptr: *const u8,
    pub(super) storage: Storage,
    pub(super) ld: usize,
    pub(super) transposed: bool,
}

impl TileRef {
    /// A tile whose storage has the logical orientation. `ld` counts elements.
    pub fn new<T: Float>(first: *const T, ld: usize) -> TileRef {
        TileRef { ptr: first.cast(), storage: Storage::of::<T>(), ld, transposed: false }
    }

    /// The transpose of this tile, without a copy.
    pub fn t(self) -> TileRef {
        TileRef { transposed: !self.transposed, ..self }
    }
}

/// A result given by address; see [`MatMut`].
#[derive(Clone, Copy, Debug)]
pub struct TileMut {
    pub(super) ptr: *mut u8,
    pub(super) storage: Storage,
    pub(super) ld: usize,
}

impl TileMut {
    /// A tile to write. `ld` counts elements.
    pub fn new<T: Float>(first: *mut T, ld: usize) -> TileMut {
        TileMut { ptr: first.cast(), storage: Storage::of::<T>(), ld }
    }
}

impl<'a> Mat<'a> {
    /// A row-major operand `[rows, ld]`.
    pub fn new(data: Slice<'a>, ld: usize) -> Mat<'a> {
        Mat { data, ld, transposed: false }
    }

    /// The transpose of this matrix, without a copy.
    pub fn t(self) -> Mat<'a> {
        Mat { transposed: !self.transposed, ..self }
    }

    pub(super) fn checked(self, name: &str, rows: usize, cols: usize) -> TileRef {
        let (stored_rows, stored_cols) = if self.transposed { (cols, rows) } else { (rows, cols) };
        let (tile, len) = match self.data {
            Slice::F32(s) => (TileRef::new(s.as_ptr(), self.ld), s.len()),
            Slice::Bf16(s) => (TileRef::new(s.as_ptr(), self.ld), s.len()),
            Slice::F16(s) => (TileRef::new(s.as_ptr(), self.ld), s.len()),
        };
        check_extent(name, len, self.ld, stored_rows, stored_cols);
        TileRef { transposed: self.transposed, ..tile }
    }
}

impl MatMut<'_> {
    pub(super) fn checked(self, name: &str, rows: usize, cols: usize) -> TileMut {
        let (tile, len) = match self.data {
            SliceMut::F32(s) => (TileMut::new(s.as_mut_ptr(), self.ld), s.len()),
            SliceMut::Bf16(s) => (TileMut::new(s.as_mut_ptr(), self.ld), s.len()),
            SliceMut::F16(s) => (TileMut::new(s.as_mut_ptr(), self.ld), s.len()),
        };
        check_extent(name, len, self.ld, rows, cols);
        tile
    }
}

fn check_extent(name: &str, len: usize, ld: usize, rows: usize, cols: usize) {
    if rows == 0 || cols == 0 {
        return;
    }
    assert!(ld >= cols, "{name}: ld {ld} is shorter than a row of {cols}");
    let need = (rows - 1).checked_mul(ld).and_then(|x| x.checked_add(cols)).expect("extent of a buffer fits usize");
    assert!(len >= need, "{name}: {len} elements, [{rows}, {cols}] with ld {ld} needs {need}");
}
