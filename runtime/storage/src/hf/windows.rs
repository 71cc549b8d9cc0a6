//! Groups runs of elements of a file into windows: bytes that are read at once, and destinations of their elements.

use super::dtype::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::ops::Range;

/// Bytes that one thread reads and widens at a time, so that they stay in the second-level cache. Whole pages.
pub(super) const WINDOW_BYTES: u64 = 512 << 10;

/// Bytes of a file that are read at once.
pub(super) struct Window<'a> {
    /// The bytes of its parts, or the whole pages that contain them.
    pub(super) bytes: Range<u64>,
    parts: Vec<Part<'a>>,
}

/// Consecutive elements of a tensor.
struct Part<'a> {
    /// Their first byte in the file.
    start: u64,
    /// Index of the first one in the tensor.
    index: usize,
    out: &'a mut [f32],
}

/// A value that is not finite: its index in the tensor, and itself.
pub(super) type Bad = (usize, f32);

/// Groups runs of elements; a run is the index of its first element in the tensor and a range of `out`, both ascending. The
/// tensor's elements start at byte `start`; `around` extends bytes to whole pages, counted from `origin`. Windows do not
/// overlap.
pub(super) fn windows<'a>(
    runs: impl Iterator<Item = (usize, Range<usize>)>,
    out: &'a mut [f32],
    (origin, start, element_bytes): (u64, u64, usize),
    around: impl Fn(Range<u64>) -> Range<u64>,
) -> Vec<Window<'a>> {
    let element_bytes = element_bytes as u64;
    let slot = |at: u64| (at - origin) / WINDOW_BYTES;
    let to_border = |at: u64| WINDOW_BYTES - (at - origin) % WINDOW_BYTES;
    let (mut rest, mut end) = (out, 0);
    let mut windows: Vec<Window<'a>> = Vec::new();
    for (mut index, at) in runs {
        let (_, behind) = std::mem::take(&mut rest).split_at_mut(at.start - end);
        let (mut run, behind) = behind.split_at_mut(at.len());
        (rest, end) = (behind, at.end);
        while !run.is_empty() {
            let start = start + index as u64 * element_bytes;
            let n = (to_border(start).div_ceil(element_bytes) as usize).min(run.len());
            let (now, later) = std::mem::take(&mut run).split_at_mut(n);
            let part = Part { start, index, out: now };
            let bytes = around(start..start + n as u64 * element_bytes);
            (run, index) = (later, index + n);
            match windows.last_mut() {
                // Runs that share a page, or follow without a gap up to the border, are read together.
                Some(window)
                    if bytes.start < window.bytes.end
                        || bytes.start == window.bytes.end && slot(bytes.start) == slot(window.bytes.start) =>
                {
                    window.bytes.end = bytes.end.max(window.bytes.end);
                    window.parts.push(part);
                }
                _ => windows.push(Window { bytes, parts: vec![part] }),
            }
        }
    }
    windows
}

impl Window<'_> {
    /// The destination of the elements, if their bytes can be read into it directly.
    pub(super) fn in_place(&mut self, dtype: Dtype) -> Option<&mut [u8]> {
        let [part] = self.parts.as_mut_slice() else { return None };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(part.out);
        (dtype == Dtype::F32 && bytes.len() as u64 == self.bytes.end - self.bytes.start).then_some(bytes)
    }

    /// Widens the elements from the bytes of the window into their destinations.
    pub(super) fn widen(&mut self, dtype: Dtype, bytes: &[u8]) {
        for part in &mut self.parts {
            let first = (part.start - self.bytes.start) as usize;
            widen(dtype, &bytes[first..first + part.out.len() * dtype.bytes()], part.out);
        }
    }

    /// The first value that is NaN or infinite.
    pub(super) fn first_bad(&self) -> Option<Bad> {
        self.parts.iter().find_map(|part| {
            // Two passes over cached values: the first has no branch per value.
            let any = part.out.iter().fold(false, |bad, x| bad | !x.is_finite());
            let at = any.then(|| part.out.iter().position(|x| !x.is_finite())).flatten()?;
            Some((part.index + at, part.out[at]))
        })
    }
}

fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
        Dtype::BF16 => match bytemuck::try_cast_slice::<u8, bf16>(bytes) {
            Ok(values) => values.convert_to_f32_slice(out),
            Err(_) => each(bytes, out, |bits| bf16::from_bits(bits).to_f32()),
        },
        _ => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
            Ok(values) => values.convert_to_f32_slice(out),
            Err(_) => each(bytes, out, |bits| f16::from_bits(bits).to_f32()),
        },
    }
}

/// Widens the values of tensors that begin at an odd byte.
fn each(bytes: &[u8], out: &mut [f32], widen: impl Fn(u16) -> f32) {
    let values = bytes.chunks_exact(2).map(|b| widen(u16::from_le_bytes([b[0], b[1]])));
    out.iter_mut().zip(values).for_each(|(out, x)| *out = x);
}
