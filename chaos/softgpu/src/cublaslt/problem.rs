//! A product that descriptors describe: checked, and in strides.

use super::attributes::{Description, Layout};
use super::element::{Element, f32_of_f16};
use super::{INVALID_VALUE, NOT_SUPPORTED, Outcome, Status, is_reachable, refuse};
use crate::environment;
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};

const COMPUTE_16F: [u32; 2] = [64, 65];
const COMPUTE_TF32: u32 = 77;

/// A matrix as it is used: element (i, j) of a batch lies `i row_stride + j col_stride + batch batch_stride` elements behind
/// the first.
#[derive(Clone, Copy, Hash, Debug)]
pub struct View {
    pub element: Element,
    pub rows: usize,
    pub cols: usize,
    pub row_stride: usize,
    pub col_stride: usize,
    pub batch_stride: usize,
}

/// `D [m, n] = epilogue(alpha A [m, k] B [k, n] + beta C [m, n])`, for each batch.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub batches: usize,
    /// A, B, C, D.
    pub views: [View; 4],
    pub compute: u32,
    pub has_relu: bool,
    pub bias: Option<Bias>,
    /// Of e4m3 operands: addresses of one f32 for each row of A and of one for each column of B.
    pub scales: Option<[usize; 2]>,
}

/// One value for each row of D.
#[derive(Clone, Copy, Debug)]
pub struct Bias {
    pub at: usize,
    pub element: Element,
    pub stride: usize,
}

impl View {
    fn new(layout: &Layout, transposed: bool, name: char) -> Result<View, Status> {
        let wrong = |what: &str| refuse(INVALID_VALUE, format_args!("{name}: {what} ({layout:?})"));
        let (lines, length) = if layout.is_by_rows { (layout.rows, layout.cols) } else { (layout.cols, layout.rows) };
        if layout.rows == 0 || layout.cols == 0 || layout.batches < 1 {
            return Err(wrong("a matrix without elements"));
        }
        if layout.ld < length as i64 {
            return Err(wrong("the leading dimension is too small"));
        }
        let ld = layout.ld as usize;
        if layout.stride < 0
            || (layout.batches > 1 && layout.stride != 0 && (layout.stride as usize) < (lines - 1) * ld + length)
        {
            return Err(wrong("batches overlap"));
        }
        let (row_stride, col_stride) = if layout.is_by_rows { (ld, 1) } else { (1, ld) };
        let (rows, cols, row_stride, col_stride) = if transposed {
            (layout.cols, layout.rows, col_stride, row_stride)
        } else {
            (layout.rows, layout.cols, row_stride, col_stride)
        };
        Ok(View { element: layout.element, rows, cols, row_stride, col_stride, batch_stride: layout.stride as usize })
    }

    /// Bytes from its first element to behind its last.
    fn extent(&self, batches: usize) -> usize {
        let last = (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride;
        ((batches - 1) * self.batch_stride + last + 1) * self.element.bytes()
    }
}

impl Problem {
    /// # Errors
    /// `INVALID_VALUE` where shapes contradict each other, `NOT_SUPPORTED` for combinations of types.
    pub fn new(d: &Description, layouts: [&Layout; 4]) -> Result<Problem, Status> {
        let [a, b, c, to] = layouts;
        let views = [
            View::new(a, d.transposes[0], 'A')?,
            View::new(b, d.transposes[1], 'B')?,
            View::new(c, false, 'C')?,
            View::new(to, false, 'D')?,
        ];
        let [va, vb, vc, vd] = &views;
        let (m, n, k) = (vd.rows, vd.cols, va.cols);
        if (va.rows, vb.rows, vb.cols) != (m, k, n) || (vc.rows, vc.cols) != (m, n) {
            let what = format_args!("{}x{} times {}x{} is not {m}x{n}", va.rows, va.cols, vb.rows, vb.cols);
            return Err(refuse(INVALID_VALUE, what));
        }
        if layouts.iter().any(|l| l.batches != to.batches) {
            return Err(refuse(INVALID_VALUE, format_args!("numbers of batches differ")));
        }
        check_types(d, &views)?;
        let scales = (va.element == Element::E4m3).then_some(d.scales);
        if scales.is_some() {
            check_fp8(d, layouts, [m, k])?;
        }
        let bias_type = d.bias_type.unwrap_or(vd.element);
        let bias =
            d.has_bias().then_some(Bias { at: d.bias, element: bias_type, stride: d.bias_stride.max(0) as usize });
        Ok(Problem {
            m,
            n,
            k,
            batches: to.batches as usize,
            views,
            compute: d.compute,
            has_relu: d.has_relu(),
            bias,
            scales,
        })
    }

    /// What an algorithm depends on.
    pub fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let bias = self.bias.map(|b| b.element);
        let has_scales = self.scales.is_some();
        (self.m, self.n, self.k, self.batches, self.views, self.compute, self.has_relu, bias, has_scales)
            .hash(&mut hasher);
        hasher.finish()
    }

    /// alpha or beta.
    ///
    /// # Safety
    /// `at` has a value of the scale type.
    pub unsafe fn scalar(&self, at: *const c_void) -> f32 {
        // SAFETY: by the caller.
        unsafe { if COMPUTE_16F.contains(&self.compute) { f32_of_f16(*at.cast()) } else { *at.cast() } }
    }

    pub fn rounds_to_tf32(&self) -> bool {
        self.compute == COMPUTE_TF32 && self.views[0].element == Element::F32
    }

    /// All that is read or written must be memory of a device.
    pub fn check_pointers(&self, pointers: [usize; 4], reads_c: bool) -> Outcome {
        for (i, name) in ['A', 'B', 'C', 'D'].into_iter().enumerate().filter(|(i, _)| *i != 2 || reads_c) {
            let bytes = self.views[i].extent(self.batches);
            if !pointers[i].is_multiple_of(self.views[i].element.bytes()) || !is_reachable(pointers[i], bytes) {
                let what =
                    format_args!("{name}: {bytes} bytes at {:#x} are not in one allocation of a device", pointers[i]);
                return Err(refuse(INVALID_VALUE, what));
            }
        }
        for (at, n) in self.scales.into_iter().flatten().zip([self.m, self.n]) {
            if at == 0 || !at.is_multiple_of(16) || !is_reachable(at, 4 * n) {
                return Err(refuse(INVALID_VALUE, format_args!("{n} scales at {at:#x} are not memory of a device")));
            }
        }
        let is_aligned = |i: &usize| pointers[*i].is_multiple_of(16);
        if self.scales.is_some() && !(0..4).filter(|i| *i != 2 || reads_c).all(|i| is_aligned(&i)) {
            return Err(refuse(
                NOT_SUPPORTED,
                format_args!("matrices of FP8 that do not begin at multiples of 16 bytes"),
            ));
        }
        let Some(bias) = self.bias else { return Ok(()) };
        let bytes = ((self.batches - 1) * bias.stride + self.m) * bias.element.bytes();
        if bias.at == 0 || !is_reachable(bias.at, bytes) {
            return Err(refuse(INVALID_VALUE, format_args!("the bias at {:#x} is not memory of a device", bias.at)));
        }
        Ok(())
    }
}

fn check_types(d: &Description, views: &[View; 4]) -> Outcome {
    let [a, b, c, to] = views.map(|v| v.element);
    let is_half = COMPUTE_16F.contains(&d.compute);
    let is_known = a == b
        && c == to
        && match a {
            Element::F32 => to == Element::F32 && !is_half,
            Element::F16 => to != Element::Bf16 && (!is_half || to == Element::F16),
            Element::Bf16 => to != Element::F16 && !is_half,
            Element::E4m3 => to != Element::E4m3 && !is_half,
        };
    // Beside e4m3, a bias is bf16.
    let is_bias_of_fp8 = a != Element::E4m3 || !d.has_bias() || d.bias_type.unwrap_or(to) == Element::Bf16;
    let is_bias_known =
        is_bias_of_fp8 && d.bias_type.is_none_or(|bias| bias == to || (to == Element::F32 && bias == a));
    if is_known && is_bias_known {
        return Ok(());
    }
    let what =
        format_args!("compute type {} with A {a:?}, B {b:?}, C {c:?}, D {to:?}, bias {:?}", d.compute, d.bias_type);
    Err(refuse(NOT_SUPPORTED, what))
}

/// `CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F`.
const OF_ROWS: u32 = 3;

/// What products of e4m3 ask for: both operands along the sums ("TN"), 16 bytes at a time, and an f32 for each row of A and for each
/// column of B, which only Hopper multiplies with. Source: NVIDIA, cuBLAS documentation, `cublasLtMatmul()`, CUDA 13.0. Other scale modes
/// exist, and are refused here. An H200 refused to propose algorithms for scales without an address.
fn check_fp8(d: &Description, layouts: [&Layout; 4], [m, k]: [usize; 2]) -> Outcome {
    let arch = environment::number("SOFTGPU_ARCH");
    let is_by_columns = layouts.iter().all(|layout| !layout.is_by_rows);
    if d.scale_modes != [OF_ROWS; 2] || arch != 90 {
        let what = format_args!("scales of modes {:?} on sm_{arch}", d.scale_modes);
        return Err(refuse(NOT_SUPPORTED, what));
    }
    if d.scales.contains(&0) {
        return Err(refuse(INVALID_VALUE, format_args!("scales of rows without an address")));
    }
    if d.transposes != [true, false] || !is_by_columns {
        return Err(refuse(NOT_SUPPORTED, format_args!("e4m3 with transposes {:?}, expected TN", d.transposes)));
    }
    let bytes = |layout: &Layout| layout.ld as usize * layout.element.bytes();
    if !m.is_multiple_of(16) || !k.is_multiple_of(16) || !layouts.iter().all(|layout| bytes(layout).is_multiple_of(16))
    {
        return Err(refuse(
            NOT_SUPPORTED,
            format_args!("e4m3 with {m} rows and sums of {k}, expected multiples of 16"),
        ));
    }
    Ok(())
}
