//! A tensor's elements as f32 in the order of indices, copied from memory of a device and back.

use super::tensor::{DataType, RANK_MAX, Tensor, last_offset};
use crate::codes::{Code, refuse};
use crate::memory;
use crate::memory::crash;

/// The code of an execution whose lengths or offsets contradict its tensors.
const ILLEGAL_ADDRESS: Code = 700;

/// Elements in the order of indices.
#[derive(Clone, Debug)]
pub struct Dense {
    pub dims: Vec<usize>,
    pub data: Vec<f32>,
}

impl Dense {
    pub fn filled(dims: &[usize], value: f32) -> Dense {
        Dense { dims: dims.to_vec(), data: vec![value; dims.iter().product()] }
    }

    /// Elements of the last dimension.
    pub fn row_len(&self) -> usize {
        self.dims[self.dims.len() - 1]
    }

    /// Rounds as a store to memory does.
    pub fn round_to(&mut self, dtype: DataType) {
        let Some(half) = dtype.half() else { return };
        let mut place = 0u16;
        let at = (&raw mut place) as usize;
        for value in &mut self.data {
            // SAFETY: `place` has room for a half.
            unsafe {
                half.store(at, *value);
                *value = half.load(at);
            }
        }
    }

    /// Dimension `j` of the result is dimension `axes[j]` of this.
    pub fn transposed(&self, axes: &[usize]) -> Dense {
        let mut strides = vec![1; self.dims.len()];
        for i in (1..self.dims.len()).rev() {
            strides[i - 1] = strides[i] * self.dims[i];
        }
        let dims: Vec<usize> = axes.iter().map(|a| self.dims[*a]).collect();
        let strides: Vec<usize> = axes.iter().map(|a| strides[*a]).collect();
        let mut data = Vec::with_capacity(self.data.len());
        let n = dims[dims.len() - 1];
        let stride = strides[dims.len() - 1];
        for_each_row(&dims, |row| {
            let start: usize = row.iter().zip(&strides).map(|(i, s)| i * s).sum();
            data.extend((0..n).map(|i| self.data[start + i * stride]));
        });
        Dense { dims, data }
    }
}

/// Calls `f` with the indices of each row (the last one is 0), in order.
pub fn for_each_row(dims: &[usize], mut f: impl FnMut(&[usize; RANK_MAX])) {
    let mut index = [0; RANK_MAX];
    let n_rows: usize = dims[..dims.len() - 1].iter().product();
    for _ in 0..n_rows {
        f(&index);
        for i in (0..dims.len() - 1).rev() {
            index[i] += 1;
            if index[i] < dims[i] {
                break;
            }
            index[i] = 0;
        }
    }
}

/// A tensor in memory of a device: where each batch begins, and how many tokens of it exist.
pub struct Place<'a> {
    tensor: &'a Tensor,
    /// Address and number of tokens of each batch.
    batches: Vec<(usize, usize)>,
}

impl<'a> Place<'a> {
    /// `offsets` is the address of a ragged tensor's offsets.
    ///
    /// # Errors
    /// When offsets decrease or cut a token. Offsets that lead out of the tensor's memory end the process.
    pub fn new(tensor: &'a Tensor, at: usize, offsets: usize) -> Result<Place<'a>, Code> {
        let bytes = tensor.dtype.bytes();
        let Some(ragged) = &tensor.ragged else {
            let batches = (0..tensor.dims[0]).map(|b| (at + b * tensor.strides[0] * bytes, usize::MAX)).collect();
            return Ok(Place { tensor, batches });
        };
        let stride = tensor.strides[tensor.token_axis()];
        let read = |b: usize| match ragged.dtype {
            // SAFETY: the offsets lie in memory of a device, which was checked.
            DataType::Int32 => i64::from(unsafe { *(offsets as *const i32).add(b) }),
            // SAFETY: as above.
            _ => unsafe { *(offsets as *const i64).add(b) },
        };
        let mut batches = Vec::new();
        for b in 0..tensor.dims[0] {
            let (from, to) = (read(b), read(b + 1));
            if from < 0 || to < from || !((to - from) as usize).is_multiple_of(stride) {
                let what = format_args!("cuDNN: tensor {}: batch {b} goes from offset {from} to {to}", tensor.id);
                return Err(refuse(ILLEGAL_ADDRESS, what));
            }
            let place = Place { tensor, batches: vec![(at + from as usize * bytes, (to - from) as usize / stride)] };
            place.check_batch(0);
            batches.extend(place.batches);
        }
        Ok(Place { tensor, batches })
    }

    /// Ends the process if a batch leaves its allocation.
    fn check_batch(&self, b: usize) {
        let (at, tokens) = self.batches[b];
        let mut dims = self.tensor.dims.clone();
        let axis = self.tensor.token_axis();
        dims[0] = 1;
        dims[axis] = dims[axis].min(tokens);
        if dims[axis] == 0 {
            return;
        }
        let bytes = (last_offset(&dims, &self.tensor.strides) + 1) * self.tensor.dtype.bytes();
        if !memory::is_device_accessible(at, bytes) {
            crash::end_for_range(at, bytes);
        }
    }

    /// Calls `f` with the address and the place in a [`Dense`] of each element that exists, of `lengths` rows of each batch.
    fn for_each(&self, lengths: Option<&Dense>, mut f: impl FnMut(usize, usize)) {
        let (t, bytes) = (self.tensor, self.tensor.dtype.bytes());
        let axis = t.token_axis();
        let last = t.dims.len() - 1;
        let mut place = 0;
        for_each_row(&t.dims, |row| {
            let (start, tokens) = self.batches[row[0]];
            let n = if axis == last { t.dims[last].min(tokens) } else { t.dims[last] };
            let is_beyond = lengths.is_some_and(|l| row[last - 1] as f32 >= l.data[row[0]]);
            if !is_beyond && (axis == last || row[axis] < tokens) {
                let offset: usize = (1..last).map(|i| row[i] * t.strides[i]).sum();
                for i in 0..n {
                    f(start + (offset + i * t.strides[last]) * bytes, place + i);
                }
            }
            place += t.dims[last];
        });
    }

    /// All elements; NaN where a ragged tensor has none.
    pub fn load(&self) -> Dense {
        let mut to = Dense::filled(&self.tensor.dims, f32::NAN);
        let dtype = self.tensor.dtype;
        // SAFETY: the tensor lies in memory of a device, which was checked.
        self.for_each(None, |at, place| to.data[place] = unsafe { dtype.load(at) });
        to
    }

    /// Rounds and writes the elements that exist, of at most `lengths` rows of each batch.
    pub fn store(&self, from: &Dense, lengths: Option<&Dense>) {
        let dtype = self.tensor.dtype;
        // SAFETY: the tensor lies in memory of a device, which was checked.
        self.for_each(lengths, |at, place| unsafe { dtype.store(at, from.data[place]) });
    }
}
