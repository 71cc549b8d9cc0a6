//! The arithmetic: f32 sums in the order of k, the same bits on every processor and number of threads.
//!
//! Legend: panels of `MR` rows of A and groups of `NR` columns of B are packed as f32; a tile is their product over `KC`
//! of k. No multiplication is fused with an addition.

use super::element::{Element, bf16_of_f32};
use super::problem::{Problem, View};
use crate::engine::pool;
use crate::environment;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const MR: usize = 16;
const NR: usize = 4;
const KC: usize = 256;
/// Columns that a thread takes at once.
const COLUMNS: usize = 64;
/// Smaller products are not worth a second thread.
const PARALLEL_FROM: usize = 1 << 21;

/// One call.
#[derive(Clone, Copy)]
pub struct Product {
    pub problem: Problem,
    pub alpha: f32,
    pub beta: f32,
    /// A, B, C, D.
    pub pointers: [usize; 4],
    pub split: usize,
    pub workspace: usize,
}

struct Job<'a> {
    product: &'a Product,
    next: AtomicUsize,
}

impl Product {
    pub fn run(&self) {
        let p = &self.problem;
        let job = Job { product: self, next: AtomicUsize::new(0) };
        let data = (&raw const job).cast_mut().cast::<c_void>();
        let threads = environment::number("SOFTGPU_THREADS").clamp(1, 64) as u32;
        if p.m * p.n * p.k * p.batches >= PARALLEL_FROM && threads > 1 {
            pool::parallel(take_chunks, data, threads);
        } else {
            // SAFETY: the job lives until the call returns.
            unsafe { take_chunks(data) };
        }
    }

    /// Whether products are rounded to the type of D before C is added. Seen with cuBLASLt 13.1 on an H200: bf16 results differ
    /// between a C that is D and one that is not.
    fn rounds_twice(&self) -> bool {
        self.pointers[2] == self.pointers[3] && self.problem.views[3].element == Element::Bf16
    }

    fn n_chunks(&self) -> usize {
        self.problem.n.div_ceil(COLUMNS) * self.problem.batches
    }

    fn chunk(&self, i: usize) {
        let p = &self.problem;
        let per_batch = p.n.div_ceil(COLUMNS);
        let (batch, first) = (i / per_batch, i % per_batch * COLUMNS);
        let cols = first..p.n.min(first + COLUMNS);
        let k_part = p.k.div_ceil(self.split);
        let mut total = vec![0f32; p.m * cols.len()];
        for part in 0..self.split {
            let ks = part * k_part..p.k.min((part + 1) * k_part);
            let mut sums = vec![0f32; p.m * cols.len()];
            self.sum(batch, cols.clone(), ks, &mut sums);
            if self.split == 1 {
                total = sums;
                break;
            }
            let at = self.workspace + 4 * ((part * p.batches + batch) * p.n + cols.start) * p.m;
            // SAFETY: the algorithm asked for a workspace of this size.
            let place = unsafe { std::slice::from_raw_parts_mut(at as *mut f32, sums.len()) };
            place.copy_from_slice(&sums);
            total.iter_mut().zip(&*place).for_each(|(t, s)| *t += s);
        }
        self.finish(batch, cols, &total);
    }

    /// Sums over `ks` for all rows and some columns, by columns.
    fn sum(&self, batch: usize, cols: std::ops::Range<usize>, ks: std::ops::Range<usize>, sums: &mut [f32]) {
        let m = self.problem.m;
        let (mut a, mut b) = (vec![0f32; m.next_multiple_of(MR) * KC], vec![0f32; COLUMNS * KC]);
        for k0 in ks.clone().step_by(KC) {
            let kc = KC.min(ks.end - k0);
            self.pack_a(batch, k0, kc, &mut a);
            self.pack_b(batch, cols.clone(), k0, kc, &mut b);
            for j in (0..cols.len()).step_by(NR) {
                for i in (0..m).step_by(MR) {
                    let (panel, group) = (&a[i * kc..][..MR * kc], &b[j * kc..][..NR * kc]);
                    let (rows, columns) = (MR.min(m - i), NR.min(cols.len() - j));
                    let mut tile = [[0f32; MR]; NR];
                    for c in 0..columns {
                        tile[c][..rows].copy_from_slice(&sums[(j + c) * m + i..][..rows]);
                    }
                    multiply(panel, group, kc, &mut tile);
                    for c in 0..columns {
                        sums[(j + c) * m + i..][..rows].copy_from_slice(&tile[c][..rows]);
                    }
                }
            }
        }
    }

    /// Packs all rows of A.
    fn pack_a(&self, batch: usize, k0: usize, kc: usize, to: &mut [f32]) {
        let view = &self.problem.views[0];
        self.pack_from(
            view,
            self.pointers[0],
            [view.row_stride, view.col_stride],
            batch,
            self.problem.m,
            k0,
            kc,
            MR,
            to,
        );
    }

    /// Packs some columns of B.
    fn pack_b(&self, batch: usize, cols: std::ops::Range<usize>, k0: usize, kc: usize, to: &mut [f32]) {
        let view = &self.problem.views[1];
        let start = self.pointers[1] + cols.start * view.col_stride * view.element.bytes();
        self.pack_from(view, start, [view.col_stride, view.row_stride], batch, cols.len(), k0, kc, NR, to);
    }

    fn pack_from(
        &self,
        view: &View,
        start: usize,
        [along, k_stride]: [usize; 2],
        batch: usize,
        n: usize,
        k0: usize,
        kc: usize,
        width: usize,
        to: &mut [f32],
    ) {
        let start = start + (batch * view.batch_stride + k0 * k_stride) * view.element.bytes();
        match view.element {
            // SAFETY: the views lie in memory of a device, which was checked.
            Element::F32 => unsafe { pack(start as *const f32, along, k_stride, n, kc, width, to, |x| x) },
            Element::Bf16 => {
                let wide = |x: u16| f32::from_bits(u32::from(x) << 16);
                // SAFETY: as above.
                unsafe { pack(start as *const u16, along, k_stride, n, kc, width, to, wide) }
            }
            // SAFETY: as above.
            Element::E4m3 => unsafe {
                pack(start as *const u8, along, k_stride, n, kc, width, to, super::element::f32_of_e4m3)
            },
            // SAFETY: as above.
            Element::F16 => unsafe {
                pack(start as *const u16, along, k_stride, n, kc, width, to, super::element::f32_of_f16)
            },
        }
        if self.problem.rounds_to_tf32() {
            to.iter_mut().for_each(|x| *x = f32::from_bits(x.to_bits().wrapping_add(0x1000) & !0x1fff));
        }
    }

    /// Of an element of D.
    fn scale(&self, i: usize, j: usize) -> f32 {
        let Some([of_rows, of_columns]) = self.problem.scales else { return 1.0 };
        // SAFETY: they lie in memory of a device, which was checked.
        unsafe { *((of_rows + 4 * i) as *const f32) * *((of_columns + 4 * j) as *const f32) }
    }

    fn finish(&self, batch: usize, cols: std::ops::Range<usize>, sums: &[f32]) {
        let p = &self.problem;
        let [_, _, c, d] = &p.views;
        let place = |view: &View, start: usize, i: usize, j: usize| {
            start + (batch * view.batch_stride + i * view.row_stride + j * view.col_stride) * view.element.bytes()
        };
        for (n, j) in cols.enumerate() {
            for i in 0..p.m {
                let mut value = self.alpha * self.scale(i, j) * sums[n * p.m + i];
                // SAFETY: the views and the bias lie in memory of a device, which was checked.
                unsafe {
                    if self.beta != 0.0 {
                        if self.rounds_twice() {
                            value = f32::from_bits(u32::from(bf16_of_f32(value)) << 16);
                        }
                        value += self.beta * c.element.load(place(c, self.pointers[2], i, j));
                    }
                    if let Some(bias) = &p.bias {
                        value += bias.element.load(bias.at + (batch * bias.stride + i) * bias.element.bytes());
                    }
                    let value = if p.has_relu && value < 0.0 { 0.0 } else { value };
                    d.element.store(place(d, self.pointers[3], i, j), value);
                }
            }
        }
    }
}

unsafe extern "C" fn take_chunks(data: *mut c_void) {
    // SAFETY: `Product::run` gives its job.
    let job = unsafe { &*data.cast::<Job<'_>>() };
    loop {
        let i = job.next.fetch_add(1, Relaxed);
        if i >= job.product.n_chunks() {
            return;
        }
        job.product.chunk(i);
    }
}

/// `to[(i / width) * width * kc + k * width + i % width] = from[i * along + k * k_stride]`, zeros where a panel has no row.
unsafe fn pack<T: Copy>(
    from: *const T,
    along: usize,
    k_stride: usize,
    n: usize,
    kc: usize,
    width: usize,
    to: &mut [f32],
    wide: impl Fn(T) -> f32,
) {
    for (panel, to) in (0..n).step_by(width).zip(to.chunks_mut(width * kc)) {
        let rows = width.min(n - panel);
        for i in 0..width {
            for k in 0..kc {
                // SAFETY: by the caller, for `i < rows`.
                to[k * width + i] =
                    if i < rows { wide(unsafe { *from.add((panel + i) * along + k * k_stride) }) } else { 0.0 };
            }
        }
    }
}

/// Adds the products of a panel and a group to a tile.
fn multiply(panel: &[f32], group: &[f32], kc: usize, tile: &mut [[f32; MR]; NR]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        return unsafe { multiply_avx2(panel, group, kc, tile) };
    }
    multiply_any(panel, group, kc, tile);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn multiply_avx2(panel: &[f32], group: &[f32], kc: usize, tile: &mut [[f32; MR]; NR]) {
    multiply_any(panel, group, kc, tile);
}

#[inline(always)]
fn multiply_any(panel: &[f32], group: &[f32], kc: usize, tile: &mut [[f32; MR]; NR]) {
    let mut sums = *tile;
    for (a, b) in panel.chunks_exact(MR).zip(group.chunks_exact(NR)).take(kc) {
        let (a, b): (&[f32; MR], &[f32; NR]) = (a.try_into().expect("a chunk"), b.try_into().expect("a chunk"));
        for c in 0..NR {
            for r in 0..MR {
                sums[c][r] += a[r] * b[c];
            }
        }
    }
    *tile = sums;
}
