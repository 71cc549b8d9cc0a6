//! Products against sums in f64.
#![allow(unsafe_code)]

mod support;

use std::time::Instant;
use support::{Gpu, P, cu};

const F32: u32 = 0;
const F16: u32 = 2;
const BF16: u32 = 14;
const E4M3: u32 = 28;
const COMPUTE_32F: u32 = 68;

/// A matrix of a test: type, rows, columns, leading dimension, by rows or not.
#[derive(Clone, Copy)]
struct Matrix {
    element: u32,
    rows: usize,
    cols: usize,
    ld: usize,
    by_rows: bool,
    batches: usize,
}

fn matrix(element: u32, rows: usize, cols: usize) -> Matrix {
    Matrix { element, rows, cols, ld: rows, by_rows: false, batches: 1 }
}

impl Matrix {
    fn stride(&self) -> usize {
        self.ld * if self.by_rows { self.rows } else { self.cols } + 8
    }

    fn len(&self) -> usize {
        self.stride() * self.batches
    }

    fn at(&self, batch: usize, i: usize, j: usize) -> usize {
        batch * self.stride() + if self.by_rows { i * self.ld + j } else { j * self.ld + i }
    }

    /// Numbers with few bits, exact in all types.
    fn values(&self, seed: usize) -> Vec<f32> {
        (0..self.len()).map(|i| ((i * 2_654_435_761 + seed * 97) >> 7 & 31) as f32 / 16.0 - 1.0).collect()
    }

    fn put(&self, gpu: &Gpu, values: &[f32]) -> u64 {
        match self.element {
            F32 => gpu.put(values),
            F16 => gpu.put(&values.iter().map(|v| to_f16(*v)).collect::<Vec<u16>>()),
            E4M3 => gpu.put(&values.iter().map(|v| to_e4m3(*v)).collect::<Vec<u8>>()),
            _ => gpu.put(&values.iter().map(|v| (v.to_bits() >> 16) as u16).collect::<Vec<u16>>()),
        }
    }

    fn get(&self, gpu: &Gpu, at: u64) -> Vec<f32> {
        match self.element {
            F32 => gpu.get(at, self.len()),
            F16 => gpu.get::<u16>(at, self.len()).into_iter().map(from_f16).collect(),
            _ => gpu.get::<u16>(at, self.len()).into_iter().map(|v| f32::from_bits(u32::from(v) << 16)).collect(),
        }
    }
}

/// Of numbers that f16 has.
fn to_f16(v: f32) -> u16 {
    let u = v.to_bits();
    if v == 0.0 {
        0
    } else {
        (u >> 16 & 0x8000) as u16 | ((u >> 13 & 0x3ff) as u16) | ((((u >> 23 & 0xff) as i32 - 112) as u16) << 10)
    }
}

/// Of multiples of 1/16 from -1 to 1.
fn to_e4m3(v: f32) -> u8 {
    let (u, sign) = (v.abs().to_bits(), if v < 0.0 { 0x80 } else { 0 });
    if v == 0.0 { 0 } else { sign | (((u >> 20) - (120 << 3)) as u8) }
}

fn from_f16(v: u16) -> f32 {
    let u = u32::from(v);
    if u & 0x7fff == 0 {
        0.0
    } else {
        f32::from_bits((u & 0x8000) << 16 | ((u >> 10 & 31) + 112) << 23 | (u & 0x3ff) << 13)
    }
}

struct Blas {
    gpu: Gpu,
    handle: P,
}

/// Descriptors of one product.
#[derive(Clone, Copy)]
struct Descriptors {
    desc: P,
    layouts: [P; 4],
    preference: P,
}

type Found = [u64; 12];

impl Blas {
    fn new() -> Blas {
        let gpu = Gpu::new();
        let mut handle = std::ptr::null_mut();
        assert_eq!(cu!(gpu, cublasLtCreate(&raw mut handle => *mut P)), 0);
        Blas { gpu, handle }
    }

    fn set<T>(&self, function: &str, of: P, attribute: u32, value: T) -> u32 {
        type Set = unsafe extern "C" fn(P, u32, P, usize) -> u32;
        // SAFETY: the functions' type.
        unsafe { (*self.gpu.symbol::<Set>(function))(of, attribute, (&raw const value) as P, size_of::<T>()) }
    }

    fn layout(&self, m: &Matrix) -> P {
        let mut layout = std::ptr::null_mut();
        assert_eq!(
            cu!(self.gpu, cublasLtMatrixLayoutCreate(&raw mut layout => *mut P, m.element => u32, m.rows as u64 => u64,
            m.cols as u64 => u64, m.ld as i64 => i64)),
            0
        );
        let set = |attribute, value: i32| self.set("cublasLtMatrixLayoutSetAttribute", layout, attribute, value);
        assert_eq!((set(1, m.by_rows.into()), set(5, m.batches as i32)), (0, 0));
        assert_eq!(self.set("cublasLtMatrixLayoutSetAttribute", layout, 6, m.stride() as i64), 0);
        layout
    }

    fn describe(&self, compute: u32, transposes: [bool; 2], matrices: [&Matrix; 4]) -> Descriptors {
        let (mut desc, mut preference) = (std::ptr::null_mut(), std::ptr::null_mut());
        assert_eq!(cu!(self.gpu, cublasLtMatmulDescCreate(&raw mut desc => *mut P, compute => u32, F32 => u32)), 0);
        for (attribute, transposed) in [3, 4].into_iter().zip(transposes) {
            assert_eq!(self.set("cublasLtMatmulDescSetAttribute", desc, attribute, i32::from(transposed)), 0);
        }
        assert_eq!(cu!(self.gpu, cublasLtMatmulPreferenceCreate(&raw mut preference => *mut P)), 0);
        Descriptors { desc, layouts: matrices.map(|m| self.layout(m)), preference }
    }

    fn heuristic(&self, d: Descriptors, room: usize) -> Result<Vec<Found>, u32> {
        let ([a, b, c, to], mut found, mut n) = (d.layouts, vec![[0u64; 12]; room], 0);
        let code = cu!(self.gpu, cublasLtMatmulAlgoGetHeuristic(self.handle => P, d.desc => P, a => P, b => P, c => P, to => P,
            d.preference => P, room as i32 => i32, found.as_mut_ptr() => *mut Found, &raw mut n => *mut i32));
        found.truncate(n as usize);
        if code == 0 { Ok(found) } else { Err(code) }
    }

    fn multiply(
        &self,
        d: Descriptors,
        scalars: [f32; 2],
        at: [u64; 4],
        algorithm: Option<&Found>,
        workspace: (u64, usize),
    ) -> u32 {
        let (algorithm, [a, b, c, to]) = (algorithm.map_or(std::ptr::null(), std::ptr::from_ref), d.layouts);
        let [alpha, beta] = &scalars;
        cu!(self.gpu, cublasLtMatmul(self.handle => P, d.desc => P, support::arg(alpha) => P, at[0] => u64, a => P, at[1] => u64, b => P,
            support::arg(beta) => P, at[2] => u64, c => P, at[3] => u64, to => P, algorithm => *const Found, workspace.0 => u64,
            workspace.1 => usize, self.gpu.stream => P))
    }
}

/// `alpha op(A) op(B) + beta C`, of one batch.
fn expected(
    m: [&Matrix; 4],
    v: [&[f32]; 3],
    transposes: [bool; 2],
    [alpha, beta]: [f32; 2],
    batch: usize,
    i: usize,
    j: usize,
) -> f64 {
    let k = if transposes[0] { m[0].rows } else { m[0].cols };
    let a = |p| f64::from(v[0][if transposes[0] { m[0].at(batch, p, i) } else { m[0].at(batch, i, p) }]);
    let b = |p| f64::from(v[1][if transposes[1] { m[1].at(batch, j, p) } else { m[1].at(batch, p, j) }]);
    let sum: f64 = (0..k).map(|p| a(p) * b(p)).sum();
    f64::from(alpha) * sum + if beta == 0.0 { 0.0 } else { f64::from(beta) * f64::from(v[2][m[2].at(batch, i, j)]) }
}

#[test]
fn products_of_all_types_transposes_and_orders_are_right() {
    let blas = Blas::new();
    let (m, n, k) = (37, 70, 290);
    let types = [(F32, F32), (BF16, F32), (F16, F32), (BF16, BF16), (F16, F16)];
    for (case, (input, output)) in types.into_iter().chain(types).enumerate() {
        let transposes = [case % 2 == 1, case / 2 % 2 == 1];
        let shape = |rows, cols, t: bool| if t { (cols, rows) } else { (rows, cols) };
        let of = |element, (rows, cols): (usize, usize), by_rows: bool, pad| Matrix {
            element,
            rows,
            cols,
            ld: if by_rows { cols } else { rows } + pad,
            by_rows,
            batches: 2,
        };
        let a = of(input, shape(m, k, transposes[0]), case >= 5, 3);
        let b = of(input, shape(k, n, transposes[1]), case >= 6, 0);
        let (c, d) = (of(output, (m, n), case >= 7, 1), of(output, (m, n), case >= 8, 2));
        let matrices = [&a, &b, &c, &d];
        let (va, vb, vc) = (a.values(1), b.values(2), c.values(3));
        let at = [
            a.put(&blas.gpu, &va),
            b.put(&blas.gpu, &vb),
            c.put(&blas.gpu, &vc),
            d.put(&blas.gpu, &vec![5.0; d.len()]),
        ];
        let scalars = [0.5, if case % 3 == 0 { 0.0 } else { 2.0 }];

        let descriptors = blas.describe(COMPUTE_32F, transposes, matrices);
        assert_eq!(blas.multiply(descriptors, scalars, at, None, (0, 0)), 0, "case {case}");

        let result = d.get(&blas.gpu, at[3]);
        let tolerance = if output == F32 {
            1e-4
        } else if output == F16 {
            0.04
        } else {
            0.3
        };
        for (batch, i, j) in (0..2 * m * n).map(|x| (x / (m * n), x % m, x / m % n)) {
            let exact = expected(matrices, [&va, &vb, &vc], transposes, scalars, batch, i, j);
            let found = f64::from(result[d.at(batch, i, j)]);
            assert!((found - exact).abs() <= tolerance, "case {case}: [{batch}, {i}, {j}] {found} {exact}");
        }
        assert_eq!(result[m], if d.by_rows { result[m] } else { 5.0 }, "what lies between columns is left alone");
    }
}

/// As on an H200.
#[test]
fn bf16_product_is_rounded_before_it_is_added_to_a_result_in_place() {
    let blas = Blas::new();
    let (a, d) = (matrix(BF16, 8, 8), matrix(BF16, 8, 8));
    let near_one = 1.0 + 2f32.powi(-7);
    let diagonal: Vec<f32> = (0..a.len()).map(|i| if i / 8 == i % 8 && i < 64 { near_one } else { 0.0 }).collect();
    let (factors, added) = (a.put(&blas.gpu, &diagonal), vec![-1.0 - 2f32.powi(-6); d.len()]);

    // The square is 1 + 2^-6 + 2^-14, which bf16 rounds to 1 + 2^-6.
    for (is_in_place, expected) in [(false, 2f32.powi(-14)), (true, 0.0)] {
        let c = d.put(&blas.gpu, &added);
        let to = if is_in_place { c } else { d.put(&blas.gpu, &added) };
        let descriptors = blas.describe(COMPUTE_32F, [false; 2], [&a, &a, &d, &d]);
        assert_eq!(blas.multiply(descriptors, [1.0, 1.0], [factors, factors, c, to], None, (0, 0)), 0);

        assert_eq!(d.get(&blas.gpu, to)[0], expected, "in place: {is_in_place}");
    }
}

#[test]
fn bias_is_added_to_each_row_and_relu_comes_last() {
    let blas = Blas::new();
    let (a, b, d) = (matrix(BF16, 16, 32), matrix(BF16, 32, 8), matrix(F32, 16, 8));
    let (va, vb) = (a.values(1), b.values(2));
    let at = [a.put(&blas.gpu, &va), b.put(&blas.gpu, &vb), 0, d.put(&blas.gpu, &vec![0.0; d.len()])];
    let bias: Vec<f32> = (0..16).map(|i| i as f32 / 4.0 - 3.0).collect();
    let places = [blas.gpu.put(&bias), matrix(BF16, 16, 1).put(&blas.gpu, &bias)];

    for (case, place) in places.into_iter().enumerate() {
        let descriptors = blas.describe(COMPUTE_32F, [false; 2], [&a, &b, &d, &d]);
        let set = |attribute, value: u64, bytes| {
            let code = if bytes == 8 {
                blas.set("cublasLtMatmulDescSetAttribute", descriptors.desc, attribute, value)
            } else {
                blas.set("cublasLtMatmulDescSetAttribute", descriptors.desc, attribute, value as u32)
            };
            assert_eq!(code, 0);
        };
        set(7, [4, 6][case], 4);
        set(8, place, 8);
        if case == 1 {
            set(26, u64::from(BF16), 4);
        }
        assert_eq!(blas.multiply(descriptors, [1.0, 0.0], [at[0], at[1], at[3], at[3]], None, (0, 0)), 0);

        let result = d.get(&blas.gpu, at[3]);
        for (i, j) in (0..128).map(|x| (x % 16, x / 16)) {
            let exact =
                expected([&a, &b, &d, &d], [&va, &vb, &[]], [false; 2], [1.0, 0.0], 0, i, j) + f64::from(bias[i]);
            let exact = if case == 1 { exact.max(0.0) } else { exact };
            assert!((f64::from(result[d.at(0, i, j)]) - exact).abs() < 1e-4);
        }
    }
}

#[test]
fn heuristic_honours_workspace_and_reduction_schemes() {
    let blas = Blas::new();
    let (a, b, d) = (matrix(F32, 64, 1024), matrix(F32, 1024, 64), matrix(F32, 64, 64));
    let descriptors = blas.describe(COMPUTE_32F, [false; 2], [&a, &b, &d, &d]);
    let set = |attribute, value: u64| match attribute {
        1 => blas.set("cublasLtMatmulPreferenceSetAttribute", descriptors.preference, attribute, value),
        _ => blas.set("cublasLtMatmulPreferenceSetAttribute", descriptors.preference, attribute, value as u32),
    };
    let splits = || {
        let of = |found: &Found| {
            let (mut split, mut n) = (0u32, 0usize);
            cu!(blas.gpu, cublasLtMatmulAlgoConfigGetAttribute(std::ptr::from_ref(found) => *const Found, 2 => u32,
                &raw mut split => *mut u32, 4 => usize, &raw mut n => *mut usize));
            (split, found[8])
        };
        blas.heuristic(descriptors, 4).unwrap().iter().map(of).collect::<Vec<_>>()
    };

    let without = splits();
    assert_eq!(set(1, 32 << 20), 0);
    let with = splits();
    assert_eq!(set(3, 0), 0);
    let no_scheme = splits();

    assert_eq!((without, with, no_scheme), (vec![(1, 0)], vec![(2, 32768), (1, 0)], vec![(1, 0)]));
    assert_eq!((set(99, 0), set(5, 3)), (7, 7), "unknown attribute, alignment that is no power of two");
}

#[test]
fn algorithm_decides_the_bits_and_needs_its_workspace() {
    let blas = Blas::new();
    let (a, b, d) = (matrix(F32, 64, 1024), matrix(F32, 1024, 64), matrix(F32, 64, 64));
    let descriptors = blas.describe(COMPUTE_32F, [false; 2], [&a, &b, &d, &d]);
    assert_eq!(blas.set("cublasLtMatmulPreferenceSetAttribute", descriptors.preference, 1, 32u64 << 20), 0);
    // Thirds are not exact, so the order of sums shows.
    let third = |v: Vec<f32>| v.into_iter().map(|x| x / 3.0).collect::<Vec<f32>>();
    let to = d.put(&blas.gpu, &vec![0.0; d.len()]);
    let at = [a.put(&blas.gpu, &third(a.values(1))), b.put(&blas.gpu, &third(b.values(2))), to, to];
    let (found, workspace) = (blas.heuristic(descriptors, 2).unwrap(), blas.gpu.alloc(32768 + 256));
    let run = |found, workspace| match blas.multiply(descriptors, [1.0, 0.0], at, found, workspace) {
        0 => Ok(d.get(&blas.gpu, to)[..64].iter().map(|v| v.to_bits()).collect::<Vec<_>>()),
        code => Err(code),
    };

    let split = run(Some(&found[0]), (workspace, 32768)).unwrap();
    blas.gpu.set("SOFTGPU_THREADS", "3");
    let (split_again, whole) = (run(Some(&found[0]), (workspace, 32768)), run(Some(&found[1]), (0, 0)).unwrap());
    let used = blas.gpu.get::<u32>(workspace, 8192 + 64);

    assert_ne!(split, whole);
    assert_eq!(Ok(split), split_again);
    assert!(
        used[..8192].iter().all(|w| *w != u32::MAX) && used[8192..].iter().all(|w| *w == u32::MAX),
        "it uses what it asked for"
    );
    assert_eq!(run(Some(&found[0]), (workspace, 32767)), Err(7));
    assert_eq!(run(Some(&found[0]), (workspace + 16, 32768)), Err(7));
    assert_eq!(run(Some(&found[0]), (0, 0)), Err(7));
}

#[test]
fn algorithm_of_another_problem_is_refused() {
    let blas = Blas::new();
    let (a, b, d) = (matrix(F32, 64, 32), matrix(F32, 32, 64), matrix(F32, 64, 64));
    let (other_a, other_b) = (matrix(F32, 64, 16), matrix(F32, 16, 64));
    let at = [&a, &b, &d, &d].map(|m| m.put(&blas.gpu, &m.values(1)));
    let one = blas.describe(COMPUTE_32F, [false; 2], [&a, &b, &d, &d]);
    let other = blas.describe(COMPUTE_32F, [false; 2], [&other_a, &other_b, &d, &d]);
    let found = blas.heuristic(one, 1).unwrap();
    let mut checked = [0u64; 12];
    let mut check = |d: Descriptors| {
        let [a, b, c, to] = d.layouts;
        cu!(blas.gpu, cublasLtMatmulAlgoCheck(blas.handle => P, d.desc => P, a => P, b => P, c => P, to => P, found.as_ptr() => *const Found,
            &raw mut checked => *mut Found))
    };

    let codes = [
        check(one),
        check(other),
        blas.multiply(one, [1.0, 0.0], at, Some(&found[0]), (0, 0)),
        blas.multiply(other, [1.0, 0.0], at, Some(&found[0]), (0, 0)),
        blas.multiply(one, [1.0, 0.0], at, Some(&[0; 12]), (0, 0)),
    ];

    assert_eq!(codes, [0, 15, 0, 15, 7]);
}

#[test]
fn contradicting_shapes_types_and_pointers_are_refused() {
    let blas = Blas::new();
    let (a, b, d) = (matrix(F32, 64, 32), matrix(F32, 32, 64), matrix(F32, 64, 64));
    let heuristic = |compute, a: &Matrix, b: &Matrix, d: &Matrix| {
        blas.heuristic(blas.describe(compute, [false; 2], [a, b, d, d]), 1).map(|_| ())
    };

    assert_eq!(heuristic(COMPUTE_32F, &a, &b, &d), Ok(()));
    assert_eq!(heuristic(COMPUTE_32F, &a, &a, &d), Err(7));
    assert_eq!(heuristic(COMPUTE_32F, &Matrix { ld: 63, ..a }, &b, &d), Err(7));
    assert_eq!(heuristic(COMPUTE_32F, &Matrix { batches: 2, ..a }, &b, &d), Err(7));
    assert_eq!(heuristic(COMPUTE_32F, &a, &Matrix { element: BF16, ..b }, &d), Err(15));
    assert_eq!(heuristic(77, &a, &b, &d), Ok(()));

    let descriptors = blas.describe(COMPUTE_32F, [false; 2], [&a, &b, &d, &d]);
    let found = blas.heuristic(descriptors, 1).unwrap();
    let at = [&a, &b, &d, &d].map(|m| m.put(&blas.gpu, &m.values(1)));
    let go = |at| blas.multiply(descriptors, [1.0, 0.0], at, Some(&found[0]), (0, 0));
    let small = blas.gpu.alloc(64 * 63 * 4);
    assert_eq!(
        [go(at), go([at[0] + 16, at[1], at[2], at[3]]), go([at[0], at[1], at[2], small]), go([8, at[1], at[2], at[3]])],
        [0, 7, 7, 7]
    );
    for (attribute, value, code) in [(7u32, 32u32, 15), (99, 0, 7), (2, 1, 7), (3, 9, 7)] {
        assert_eq!(blas.set("cublasLtMatmulDescSetAttribute", descriptors.desc, attribute, value), code, "{attribute}");
    }
}

/// Descriptors of a product of e4m3 with these modes of scales.
fn describe_fp8(blas: &Blas, transposes: [bool; 2], m: [&Matrix; 4], scales: [u64; 2], modes: [i32; 2]) -> Descriptors {
    let d = blas.describe(COMPUTE_32F, transposes, m);
    for ((pointer, mode), (scales, value)) in [(17, 31), (18, 32)].into_iter().zip(scales.into_iter().zip(modes)) {
        assert_eq!(blas.set("cublasLtMatmulDescSetAttribute", d.desc, pointer, scales), 0);
        assert_eq!(blas.set("cublasLtMatmulDescSetAttribute", d.desc, mode, value), 0);
    }
    assert_eq!(blas.set("cublasLtMatmulDescSetAttribute", d.desc, 25, 1i8), 0);
    d
}

#[test]
fn products_of_e4m3_multiply_rows_and_columns_by_their_scales() {
    let blas = Blas::new();
    let (m, n, k) = (48, 7, 32);
    let of_rows: Vec<f32> = (0..m).map(|i| 2f32.powi(i as i32 % 5)).collect();
    let of_columns: Vec<f32> = (0..n).map(|j| 1.0 + j as f32).collect();
    let scales = [blas.gpu.put(&of_rows), blas.gpu.put(&of_columns)];
    for to in [F32, BF16] {
        let (a, b, d) = (matrix(E4M3, k, m), matrix(E4M3, k, n), matrix(to, m, n));
        let (va, vb, vc) = (a.values(1), b.values(2), d.values(3));
        let at_d = d.put(&blas.gpu, &vc);
        let at = [a.put(&blas.gpu, &va), b.put(&blas.gpu, &vb), at_d, at_d];
        let descriptors = describe_fp8(&blas, [true, false], [&a, &b, &d, &d], scales, [3; 2]);

        assert_eq!(blas.multiply(descriptors, [0.5, 1.0], at, None, (0, 0)), 0);

        let found = d.get(&blas.gpu, at_d);
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let sum = expected([&a, &b, &d, &d], [&va, &vb, &vc], [true, false], [0.5, 0.0], 0, i, j);
            let y = sum * f64::from(of_rows[i] * of_columns[j]) + f64::from(vc[d.at(0, i, j)]);
            let (x, unit) = (f64::from(found[d.at(0, i, j)]), if to == BF16 { 1.0 / 64.0 } else { 1e-6 });
            assert!((x - y).abs() <= unit * y.abs().max(4.0), "{i} {j}: {x}, expected {y}");
        }
    }
}

#[test]
fn products_of_e4m3_that_hopper_does_not_multiply_are_refused() {
    let blas = Blas::new();
    let scales = [blas.gpu.put(&[1f32; 48]), blas.gpu.put(&[1f32; 48])];
    let code = |transposes, a: Matrix, b: Matrix, to: Matrix, modes| {
        blas.heuristic(describe_fp8(&blas, transposes, [&a, &b, &to, &to], scales, modes), 1).err().unwrap_or(0)
    };
    let (a, b, to) = (matrix(E4M3, 32, 48), matrix(E4M3, 32, 16), matrix(F32, 48, 16));

    assert_eq!(code([true, false], a, b, to, [3; 2]), 0);
    assert_eq!(code([true, false], a, b, to, [0; 2]), 15, "scales of whole matrices");
    assert_eq!(code([true, false], a, b, matrix(E4M3, 48, 16), [3; 2]), 15, "results in e4m3");
    assert_eq!(code([true, false], a, Matrix { element: BF16, ..b }, to, [3; 2]), 15, "operands of two types");
    let (by_rows, short) = (matrix(E4M3, 48, 32), matrix(E4M3, 24, 48));
    assert_eq!(code([false, false], by_rows, b, to, [3; 2]), 15, "an operand that is not along the sums");
    assert_eq!(code([true, false], short, matrix(E4M3, 24, 16), to, [3; 2]), 15, "sums of 24");
    assert_eq!(code([true, false], Matrix { ld: 40, ..a }, b, to, [3; 2]), 15, "columns that begin within 16 bytes");
    let without = describe_fp8(&blas, [true, false], [&a, &b, &to, &to], [scales[0], 0], [3; 2]);
    assert_eq!(blas.heuristic(without, 1).err(), Some(7), "scales without an address");
}

#[test]
fn tf32_rounds_its_operands_and_half_scalars_are_halves() {
    let blas = Blas::new();
    let (a, b, d) = (matrix(F32, 16, 16), matrix(F32, 16, 16), matrix(F32, 16, 16));
    let mut values = vec![0f32; a.len()];
    values[0] = 1.0 + f32::EPSILON;
    let at = [a.put(&blas.gpu, &values), b.put(&blas.gpu, &values), 0, d.put(&blas.gpu, &vec![0.0; d.len()])];
    let first = |compute| {
        let descriptors = blas.describe(compute, [false; 2], [&a, &b, &d, &d]);
        assert_eq!(blas.multiply(descriptors, [1.0, 0.0], [at[0], at[1], at[3], at[3]], None, (0, 0)), 0);
        d.get(&blas.gpu, at[3])[0]
    };
    let (full, tf32) = (first(COMPUTE_32F), first(77));

    let h = matrix(F16, 16, 16);
    let mut ones = vec![0f32; h.len()];
    ones[0] = 1.0;
    let place = h.put(&blas.gpu, &ones);
    let descriptors = blas.describe(COMPUTE_32F, [false; 2], [&h, &h, &h, &h]);
    let mut desc = std::ptr::null_mut();
    assert_eq!(cu!(blas.gpu, cublasLtMatmulDescCreate(&raw mut desc => *mut P, 64 => u32, F32 => u32)), 15);
    assert_eq!(cu!(blas.gpu, cublasLtMatmulDescCreate(&raw mut desc => *mut P, 64 => u32, F16 => u32)), 0);
    let scalars = [f32::from_bits(0x3800), 0.0]; // half of one, as f16
    let to = h.put(&blas.gpu, &ones);
    assert_eq!(blas.multiply(Descriptors { desc, ..descriptors }, scalars, [place, place, to, to], None, (0, 0)), 0);

    assert_eq!((full, tf32, h.get(&blas.gpu, to)[0]), ((1.0 + f32::EPSILON) * (1.0 + f32::EPSILON), 1.0, 0.5));
}

#[test]
fn large_product_is_fast_enough_for_tests() {
    let blas = Blas::new();
    let (a, b, d) = (matrix(BF16, 512, 512), matrix(BF16, 512, 512), matrix(F32, 512, 512));
    let descriptors = blas.describe(COMPUTE_32F, [true, false], [&a, &b, &d, &d]);
    let at = [&a, &b, &d, &d].map(|m| m.put(&blas.gpu, &m.values(1)));
    blas.gpu.sync();
    let mut best = f64::INFINITY;

    for _ in 0..5 {
        let start = Instant::now();
        assert_eq!(blas.multiply(descriptors, [1.0, 0.0], at, None, (0, 0)), 0);
        blas.gpu.sync();
        best = best.min(start.elapsed().as_secs_f64());
    }

    let gflops = 2.0 * 512f64.powi(3) / best / 1e9;
    println!("{gflops:.1} GFLOP/s");
    assert!(gflops > 2.0, "{gflops:.1} GFLOP/s");
}
