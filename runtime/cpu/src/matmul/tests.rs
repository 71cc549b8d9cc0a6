//! Every engine against the same product in f64, over random shapes, layouts, storage types and epilogues.

use crate::isa::{Isa, isa};
use half::{bf16, f16};
use phalanx_needs::{Need, skip};
use proptest::prelude::*;

use super::driver::{self, Threads};
use super::operand::{Epilogue, Mat, MatMut, Slice, SliceMut, Storage};
use super::{Compute, Engine, plan, scratch_bytes};

/// An owned buffer of one of the storage types.
#[derive(Clone)]
enum Buffer {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Buffer {
    fn new(storage: Storage, values: impl Iterator<Item = f32>) -> Buffer {
        match storage {
            Storage::F32 => Buffer::F32(values.collect()),
            Storage::Bf16 => Buffer::Bf16(values.map(bf16::from_f32).collect()),
            Storage::F16 => Buffer::F16(values.map(f16::from_f32).collect()),
        }
    }

    fn get(&self, i: usize) -> f32 {
        match self {
            Buffer::F32(v) => v[i],
            Buffer::Bf16(v) => v[i].to_f32(),
            Buffer::F16(v) => v[i].to_f32(),
        }
    }

    fn bits(&self) -> Vec<u32> {
        match self {
            Buffer::F32(v) => v.iter().map(|x| x.to_bits()).collect(),
            Buffer::Bf16(v) => v.iter().map(|x| x.to_bits().into()).collect(),
            Buffer::F16(v) => v.iter().map(|x| x.to_bits().into()).collect(),
        }
    }

    fn mat(&self, ld: usize, transposed: bool) -> Mat<'_> {
        let data = match self {
            Buffer::F32(v) => Slice::F32(v),
            Buffer::Bf16(v) => Slice::Bf16(v),
            Buffer::F16(v) => Slice::F16(v),
        };
        Mat { data, ld, transposed }
    }

    fn mat_mut(&mut self, ld: usize) -> MatMut<'_> {
        let data = match self {
            Buffer::F32(v) => SliceMut::F32(v),
            Buffer::Bf16(v) => SliceMut::Bf16(v),
            Buffer::F16(v) => SliceMut::F16(v),
        };
        MatMut { data, ld }
    }
}

/// One product, its operands included.
#[derive(Clone, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    a: (Storage, bool),
    b: (Storage, bool),
    c: Storage,
    accumulate: bool,
    bias: bool,
    alpha: f32,
    gap: usize,
    seed: u64,
}

/// Value of padding: reading it poisons the result, and writing it is detected.
const PADDING: f32 = f32::NAN;

impl Case {
    fn plain(m: usize, n: usize, k: usize) -> Case {
        let f32s = (Storage::F32, false);
        let (c, alpha) = (Storage::F32, 1.0);
        Case { m, n, k, a: f32s, b: f32s, c, accumulate: false, bias: false, alpha, gap: 0, seed: 7 }
    }

    /// Row-major `[rows, cols]` with `gap` elements of padding after each row.
    fn random(&self, stream: u64, storage: Storage, rows: usize, cols: usize) -> Buffer {
        let mut state = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03);
        let ld = cols + self.gap;
        let value = (0..rows * ld).map(|i| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let x = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            if i % ld < cols { x } else { PADDING }
        });
        Buffer::new(storage, value)
    }

    fn operand(&self, stream: u64, (storage, transposed): (Storage, bool), rows: usize, cols: usize) -> Buffer {
        let (rows, cols) = if transposed { (cols, rows) } else { (rows, cols) };
        self.random(stream, storage, rows, cols)
    }

    fn operands(&self) -> (Buffer, Buffer, Buffer, Vec<f32>) {
        let a = self.operand(1, self.a, self.m, self.k);
        let b = self.operand(2, self.b, self.k, self.n);
        let c = self.random(3, self.c, self.m, self.n);
        (a, b, c, (0..self.n).map(|j| (j % 13) as f32 / 4.0 - 1.5).collect())
    }

    fn ld(&self, transposed: bool, rows: usize, cols: usize) -> usize {
        self.gap + if transposed { rows } else { cols }
    }

    fn run(&self, engine: Engine, threads: Threads) -> Buffer {
        let (a, b, mut c, bias) = self.operands();
        let mut scratch = vec![0xff; plan::Plan::new(engine, self.m, self.n, self.k, self.c).scratch_bytes()];
        let epilogue =
            Epilogue { accumulate: self.accumulate, bias: self.bias.then_some(&bias[..]), alpha: self.alpha };
        let (m, n, k) = (self.m, self.n, self.k);
        let a = a.mat(self.ld(self.a.1, m, k), self.a.1).checked("a", m, k);
        let b = b.mat(self.ld(self.b.1, k, n), self.b.1).checked("b", k, n);
        let to = c.mat_mut(n + self.gap).checked("c", m, n);
        // SAFETY: the extents were checked, the buffers are ours, and `engines` lists the engines of this CPU.
        unsafe { driver::run(engine, threads, m, n, k, a, b, to, epilogue, &mut scratch) };
        c
    }

    /// The exact product of the kernel's (possibly rounded) operands, and for each element the sum of magnitudes, which
    /// scales its rounding error.
    fn reference(&self, round: bool) -> Vec<(f64, f64)> {
        let (a, b, c, bias) = self.operands();
        let (lda, ldb) = (self.ld(self.a.1, self.m, self.k), self.ld(self.b.1, self.k, self.n));
        let seen = |x: f32| f64::from(if round { bf16::from_f32(x).to_f32() } else { x });
        let mut out = Vec::with_capacity(self.m * self.n);
        for i in 0..self.m {
            for j in 0..self.n {
                let (mut sum, mut size) = (0.0, 0.0);
                for p in 0..self.k {
                    let x = seen(a.get(if self.a.1 { p * lda + i } else { i * lda + p }));
                    let y = seen(b.get(if self.b.1 { j * ldb + p } else { p * ldb + j }));
                    sum += x * y;
                    size += (x * y).abs();
                }
                (sum, size) = (sum * f64::from(self.alpha), size * f64::from(self.alpha.abs()));
                let mut add = |x: f32| {
                    sum += f64::from(x);
                    size += f64::from(x.abs());
                };
                if self.bias {
                    add(bias[j]);
                }
                if self.accumulate {
                    add(c.get(i * (self.n + self.gap) + j));
                }
                out.push((sum, size));
            }
        }
        out
    }

    /// Compares with the reference and checks that the padding of C is unchanged.
    fn check(&self, engine: Engine) -> Result<(), String> {
        let round = !matches!(
            engine,
            Engine::Avx512 { round: false } | Engine::Avx2 { round: false } | Engine::Portable { round: false }
        );
        let (got, want) = (self.run(engine, Threads::Pool), self.reference(round));
        // Summing k terms of f32 errs by at most about k ulps of the magnitudes, in practice by √k; the last term is
        // the one rounding of the inexact sum into C (half an ulp).
        let sums = f64::from(f32::EPSILON) * (4.0 + (self.k as f64).sqrt());
        let last = match self.c {
            Storage::F32 => 0.0,
            Storage::Bf16 => 1.01 / 256.0,
            Storage::F16 => 1.01 / 2048.0,
        };
        let ld = self.n + self.gap;
        for i in 0..self.m {
            for j in 0..ld {
                let x = got.get(i * ld + j);
                if j >= self.n {
                    if !x.is_nan() {
                        return Err(format!("{engine:?} wrote padding ({i}, {j})"));
                    }
                    continue;
                }
                let (sum, size) = want[i * self.n + j];
                let error = (f64::from(x) - sum).abs();
                // 1e-7 covers the absolute spacing of subnormal f16.
                if error.is_nan() || error > size * sums + sum.abs() * last + 1e-7 {
                    return Err(format!("{engine:?} at ({i}, {j}): {x} instead of {sum}, error {error:e}"));
                }
            }
        }
        Ok(())
    }
}

/// The engines that this CPU can run; the calling test counts as skipped if the CPU cannot run all engines.
fn engines() -> Vec<Engine> {
    let mut engines = vec![Engine::Portable { round: false }, Engine::Portable { round: true }];
    #[cfg(target_arch = "x86_64")]
    {
        if isa() >= Isa::Avx2 {
            engines.extend([Engine::Avx2 { round: false }, Engine::Avx2 { round: true }]);
        } else {
            skip(Need::Avx2, "this CPU has no AVX2");
        }
        if isa() >= Isa::Avx512 {
            engines.extend([Engine::Avx512 { round: false }, Engine::Avx512 { round: true }]);
        } else {
            skip(Need::Avx512, "this CPU has no AVX-512");
        }
        if isa() >= Isa::Amx {
            engines.push(Engine::Amx);
        } else {
            skip(Need::Amx, "this CPU has no AMX, or the kernel does not permit it");
        }
        if isa() >= Isa::Avx512Bf16 {
            engines.push(Engine::Avx512Bf16);
        } else {
            skip(Need::Avx512Bf16, "this CPU has no AVX-512 products of bf16 pairs");
        }
    }
    engines
}

fn storage() -> impl Strategy<Value = Storage> {
    prop_oneof![Just(Storage::F32), Just(Storage::Bf16), Just(Storage::F16)]
}

/// Sizes around the edges of tiles, and beyond one task.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1usize..70, 1 => 70usize..300]
}

fn depth() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0usize..100, 1 => 253usize..300, 1 => plan::DEPTH_INNER - 3..plan::DEPTH_INNER + 40, 1 => 1020usize..1100]
}

prop_compose! {
    fn cases()(
        (m, n, k) in (size(), size(), depth()),
        (a, b, c) in ((storage(), any::<bool>()), (storage(), any::<bool>()), storage()),
        (accumulate, bias) in any::<(bool, bool)>(),
        alpha in prop_oneof![Just(1.0f32), Just(0.125), Just(-1.7)],
        gap in 0usize..20,
        seed in any::<u64>(),
    ) -> Case {
        Case { m, n, k, a, b, c, accumulate, bias, alpha, gap, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn every_engine_agrees_with_the_product_in_f64(case in cases()) {
        for engine in engines() {
            case.check(engine).map_err(TestCaseError::fail)?;
        }
    }
}

#[test]
fn product_of_several_blocks_in_every_dimension_is_whole() {
    let c = Storage::Bf16;
    for engine in engines() {
        let long = Case { a: (Storage::F32, true), c, accumulate: true, gap: 3, ..Case::plain(33, 40, 9000) };
        let wide = Case { b: (Storage::Bf16, true), bias: true, ..Case::plain(5, 8200, 40) };
        let tall = Case { a: (Storage::Bf16, false), c, bias: true, ..Case::plain(4100, 7, 600) };
        let all = Case { c, bias: true, accumulate: true, ..Case::plain(2100, 4100, 3) };

        for case in [long, wide, tall, all] {
            case.check(engine).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for engine in engines() {
        for c in [Storage::F32, Storage::Bf16] {
            let case = Case { c, b: (Storage::F32, true), accumulate: true, bias: true, ..Case::plain(391, 530, 1111) };
            let alone = case.run(engine, Threads::Caller).bits();
            for threads in 1..=3 {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();

                let bits = pool.install(|| case.run(engine, Threads::Pool)).bits();

                assert!(bits == alone, "{engine:?} with {threads} threads, C {c:?}");
            }
        }
    }
}

#[test]
fn nan_and_infinity_reach_the_result() {
    for engine in engines() {
        for poison in [f32::NAN, f32::INFINITY] {
            let (m, n, k) = (40, 50, 70);
            let (mut a, b) = (vec![1.0f32; m * k], vec![0.5f32; k * n]);
            a[17 * k + 69] = poison;
            let mut c = vec![0.0f32; m * n];
            let mut scratch = vec![0; plan::Plan::new(engine, m, n, k, Storage::F32).scratch_bytes()];
            let to = MatMut { data: SliceMut::F32(&mut c), ld: n }.checked("c", m, n);
            let (a, b) =
                (Mat::new(Slice::F32(&a), k).checked("a", m, k), Mat::new(Slice::F32(&b), n).checked("b", k, n));

            // SAFETY: the extents were checked and the buffers are ours.
            unsafe { driver::run(engine, Threads::Pool, m, n, k, a, b, to, Epilogue::default(), &mut scratch) };

            for i in 0..m {
                for j in 0..n {
                    let x = c[i * n + j];
                    let right = if i != 17 { x == 35.0 } else { x.is_nan() == poison.is_nan() && !x.is_finite() };
                    assert!(right, "{engine:?}: ({i}, {j}) is {x}");
                }
            }
        }
    }
}

#[test]
fn nan_stays_a_nan_when_rounded_into_a_narrow_result() {
    for engine in engines() {
        for c in [Storage::Bf16, Storage::F16] {
            // Only mantissa bits that bf16 drops are set: truncation would give infinity.
            let a = [f32::from_bits(0x7f80_0001); 3];
            let b = [1.0f32; 5];
            let mut out = Buffer::new(c, [0.0; 15].into_iter());
            let mut scratch = vec![0; plan::Plan::new(engine, 3, 5, 1, c).scratch_bytes()];
            let to = out.mat_mut(5).checked("c", 3, 5);
            let (a, b) =
                (Mat::new(Slice::F32(&a), 1).checked("a", 3, 1), Mat::new(Slice::F32(&b), 5).checked("b", 1, 5));

            // SAFETY: the extents were checked and the buffers are ours.
            unsafe { driver::run(engine, Threads::Caller, 3, 5, 1, a, b, to, Epilogue::default(), &mut scratch) };

            assert!((0..15).all(|i| out.get(i).is_nan()), "{engine:?} {c:?}");
        }
    }
}

/// Pages of memory between two that fault on any access.
#[cfg(target_os = "linux")]
struct Fenced {
    map: *mut u8,
    bytes: usize,
}

#[cfg(target_os = "linux")]
impl Fenced {
    const PAGE: usize = 4096;

    fn new(bytes: usize) -> Fenced {
        let bytes = bytes.next_multiple_of(Self::PAGE);
        // SAFETY: a fresh anonymous mapping; only its inner pages are made accessible.
        let map = unsafe {
            let (whole, anonymous) = (bytes + 2 * Self::PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let map = libc::mmap(std::ptr::null_mut(), whole, libc::PROT_NONE, anonymous, -1, 0);
            assert!(map != libc::MAP_FAILED);
            let map = map.cast::<u8>();
            assert_eq!(libc::mprotect(map.add(Self::PAGE).cast(), bytes, libc::PROT_READ | libc::PROT_WRITE), 0);
            map
        };
        Fenced { map, bytes }
    }

    /// Space for `len` elements: directly before the fence behind, or directly after the fence in front.
    fn room<T>(&mut self, len: usize, behind: bool) -> &mut [T] {
        let offset = if behind { self.bytes - len * size_of::<T>() } else { 0 };
        // SAFETY: inside the accessible pages, zeroed by the kernel; the borrow excludes other slices.
        unsafe { std::slice::from_raw_parts_mut(self.map.add(Self::PAGE + offset).cast(), len) }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Fenced {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no slice of it outlives us.
        unsafe { libc::munmap(self.map.cast(), self.bytes + 2 * Self::PAGE) };
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ragged_edges_touch_nothing_outside_the_operands() {
    let shapes = [(1, 1, 1), (15, 33, 17), (31, 47, 63), (29, 65, 515)];
    for (engine, (m, n, k)) in engines().into_iter().flat_map(|e| shapes.map(|s| (e, s))) {
        for (ta, tb, behind) in
            [(false, false, true), (false, true, true), (true, false, true), (true, true, false), (false, false, false)]
        {
            let need = plan::Plan::new(engine, m, n, k, Storage::Bf16).scratch_bytes();
            let [mut for_a, mut for_b, mut for_c, mut for_scratch] =
                [m * k * 4, k * n * 2, m * n * 2, need].map(Fenced::new);
            let a = Mat { data: Slice::F32(for_a.room(m * k, behind)), ld: if ta { m } else { k }, transposed: ta };
            let b = Mat { data: Slice::Bf16(for_b.room(k * n, behind)), ld: if tb { k } else { n }, transposed: tb };
            let c = MatMut { data: SliceMut::Bf16(for_c.room(m * n, behind)), ld: n };
            let (a, b, c) = (a.checked("a", m, k), b.checked("b", k, n), c.checked("c", m, n));

            // SAFETY: the extents were checked and the buffers are ours; a touch outside ends the process.
            unsafe {
                let scratch = for_scratch.room(need, behind);
                driver::run(engine, Threads::Pool, m, n, k, a, b, c, Epilogue::default(), scratch);
            }
        }
    }
}

#[test]
fn tiles_of_a_wider_buffer_multiply_in_place() {
    // Two heads of width 16 inside rows of 48: scores = Q Kᵀ / 4 for head 1, written into columns 32.. of a wider C.
    let (t, wide) = (20, 48);
    let case = Case { gap: 0, ..Case::plain(t, wide, 1) };
    let Buffer::F32(qkv) = case.random(9, Storage::F32, t, wide) else { panic!("f32 was requested") };
    let mut scores = vec![7.0f32; t * 64];
    let mut scratch = vec![0; scratch_bytes(Compute::F32, t, t, 16, Storage::F32)];
    let (q, k) = (super::TileRef::new(&raw const qkv[16], wide), super::TileRef::new(&raw const qkv[32], wide).t());
    let epilogue = Epilogue { alpha: 0.25, ..Epilogue::default() };

    // SAFETY: rows of 16 inside rows of 48 and of 20 inside rows of 64; the buffers are ours.
    unsafe {
        let to = super::TileMut::new(&raw mut scores[32], 64);
        super::tile_matmul(Compute::F32, t, t, 16, q, k, to, epilogue, &mut scratch);
    }

    for i in 0..t {
        for j in 0..64 {
            let want = match j {
                32..52 => (0..16).map(|p| qkv[i * wide + 16 + p] * qkv[(j - 32) * wide + 32 + p] / 4.0).sum(),
                _ => 7.0,
            };
            assert!((scores[i * 64 + j] - want).abs() < 1e-5, "({i}, {j})");
        }
    }
}

#[test]
fn matmul_runs_with_exactly_the_requested_scratch() {
    let (a, b) = ([1.0f32, 2.0, 3.0, 4.0], [bf16::from_f32(0.5), bf16::from_f32(-1.0)]);
    for compute in [Compute::F32, Compute::Bf16] {
        let mut c = [f16::ZERO; 2];
        let mut scratch = vec![0; scratch_bytes(compute, 2, 1, 2, Storage::F16)];
        let (a, b) = (Mat::new(Slice::F32(&a), 2), Mat::new(Slice::Bf16(&b), 2).t());

        super::matmul(
            compute,
            2,
            1,
            2,
            a,
            b,
            MatMut { data: SliceMut::F16(&mut c), ld: 1 },
            Epilogue { bias: Some(&[10.0]), ..Epilogue::default() },
            &mut scratch,
        );

        assert_eq!(c.map(f16::to_f32), [8.5, 7.5]);
    }
}
