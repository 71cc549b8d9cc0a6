//! The loops of a product: blocks, then two parallel phases per block — pack both operands, multiply the tasks of C.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::tasks;

use super::operand::{Epilogue, Storage, TileMut, TileRef};
use super::plan::{DEPTH_INNER, Plan};
use super::tile::{Side, Strip, TileAt};
use super::{Engine, portable};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, avx512_bf16, pairs, store::Store};

/// Products of fewer multiplications run on the calling thread: distributing them takes as long (MATMUL-1 holds:
/// threads do not affect the arithmetic).
const MULTIPLICATIONS_SERIAL: usize = 1 << 19;
/// Least elements of a packing job.
const ELEMENTS_PER_JOB: usize = 1 << 14;
const JOBS_MAX: usize = 64;
/// Rows of strided storage that are read together: their pages fit the first-level TLB. A multiple of every depth unit.
const CHUNK_ROWS: usize = 32;
/// Columns of strided storage that a job reads in a row at least, where there are as many.
const CHUNK_COLS: usize = 512;

/// The threads of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Threads {
    /// Those of [`tasks::run`].
    Pool,
    /// The calling thread alone.
    Caller,
}

impl Threads {
    fn each(self, count: usize, work: impl Fn(usize) + Sync + Send) {
        match self {
            Threads::Pool => tasks::run(count, &work),
            Threads::Caller => (0..count).for_each(work),
        }
    }

    fn count(self) -> usize {
        match self {
            Threads::Pool => rayon::current_num_threads(),
            Threads::Caller => 1,
        }
    }
}

/// One block of a product: `rows × cols` sums over `depth`.
struct Block<'a> {
    engine: Engine,
    plan: &'a Plan,
    a: Strip,
    b: Strip,
    c: TileMut,
    /// The f32 sums until `last`.
    sums: TileMut,
    packed_a: *mut u8,
    packed_b: *mut u8,
    rows: usize,
    cols: usize,
    depth: usize,
    first: bool,
    last: bool,
    epilogue: Epilogue<'a>,
}

// SAFETY: the threads of a block share it read-only, and through its pointers each packing job writes its own panels
// and each task its own tile of C and of the sums; operands are only read.
unsafe impl Sync for Block<'_> {}

/// Runs a product; see [`super::tile_matmul`].
///
/// # Safety
/// As for [`super::tile_matmul`], and the CPU supports `engine`.
pub(super) unsafe fn run(
    engine: Engine,
    threads: Threads,
    m: usize,
    n: usize,
    k: usize,
    a: TileRef,
    b: TileRef,
    c: TileMut,
    epilogue: Epilogue<'_>,
    scratch: &mut [u8],
) {
    if let Some(bias) = epilogue.bias {
        assert!(bias.len() == n, "bias of {} elements for {n} columns", bias.len());
    }
    let plan = Plan::new(engine, m, n, k, c.storage);
    let [packed_a, packed_b, partial] = plan.split(scratch);
    if m == 0 || n == 0 {
        return;
    }
    let threads = if m * n * k < MULTIPLICATIONS_SERIAL { Threads::Caller } else { threads };
    let a = Strip { ptr: a.ptr, storage: a.storage, ld: a.ld, k_contiguous: !a.transposed };
    let b = Strip { ptr: b.ptr, storage: b.storage, ld: b.ld, k_contiguous: b.transposed };
    for j in (0..n).step_by(plan.cols) {
        for i in (0..m).step_by(plan.rows) {
            // With k == 0 there is still one block, which writes zeros, bias or C.
            for p in (0..k.max(1)).step_by(plan.depth.max(1)) {
                // SAFETY: (i, p), (j, p) and (i, j) lie inside the operands, whose extents the caller guarantees.
                let block = unsafe {
                    let c = TileMut { ptr: c.ptr.add((i * c.ld + j) * c.storage.bytes()), ..c };
                    let partial = TileMut { ptr: partial.as_mut_ptr(), storage: Storage::F32, ld: plan.cols };
                    Block {
                        engine,
                        plan: &plan,
                        a: a.at(i, p),
                        b: b.at(j, p),
                        c,
                        sums: if plan.has_partial() { partial } else { c },
                        packed_a: packed_a.as_mut_ptr(),
                        packed_b: packed_b.as_mut_ptr(),
                        rows: plan.rows.min(m - i),
                        cols: plan.cols.min(n - j),
                        depth: plan.depth.min(k - p),
                        first: p == 0,
                        last: p + plan.depth >= k,
                        epilogue: Epilogue { bias: epilogue.bias.map(|b| &b[j..]), ..epilogue },
                    }
                };
                // Panels of the previous block remain valid where k and m are unchanged.
                let whole_k = k <= plan.depth;
                block.pack(threads, !(whole_k && m <= plan.rows && j > 0), !(whole_k && i > 0));
                block.multiply(threads);
            }
        }
    }
}

impl Block<'_> {
    /// Packs the operands that tasks share. Each job packs the same share of both operands, so that a thread later
    /// finds much of its input in its own cache.
    fn pack(&self, threads: Threads, pack_a: bool, pack_b: bool) {
        let g = &self.plan.geometry;
        let a_panels = if pack_a && !self.packs_a_late() { self.rows.div_ceil(g.mr) } else { 0 };
        let b_panels = if pack_b { self.cols.div_ceil(g.nr) } else { 0 };
        let elements = (a_panels * g.mr + b_panels * g.nr) * self.depth;
        let jobs = (elements / ELEMENTS_PER_JOB).clamp(1, JOBS_MAX);
        threads.each(jobs, |job| {
            self.pack_share(a_panels, Side::A, job, jobs);
            self.pack_share(b_panels, Side::B, job, jobs);
        });
    }

    /// Packs one of `jobs` shares of an operand, which are whole panels where their lines run along k. Otherwise rows of storage run
    /// across panels, and are read as far as possible, some rows at a time, because memory is fastest in order.
    fn pack_share(&self, panels: usize, side: Side, job: usize, jobs: usize) {
        let share = |n: usize| n * job / jobs..n * (job + 1) / jobs;
        let (strip, width) = match side {
            Side::A => (self.a, self.plan.geometry.mr),
            Side::B => (self.b, self.plan.geometry.nr),
        };
        if strip.k_contiguous || matches!(self.engine, Engine::Portable { .. }) {
            return self.pack_panels(share(panels), 0..self.depth, side);
        }
        let panels_at_once = (CHUNK_COLS / width).max(1);
        let across = panels.div_ceil(panels_at_once);
        for chunk in share(across * self.depth.div_ceil(CHUNK_ROWS)) {
            let (panel, p) = (chunk % across * panels_at_once, chunk / across * CHUNK_ROWS);
            let depth = CHUNK_ROWS.min(self.depth - p);
            self.pack_panels(panel..panels.min(panel + panels_at_once), p..p + depth, side);
        }
    }

    /// Whether tasks pack their rows of A themselves, a panel at a time. This saves a pass over memory, but repeats the
    /// packing for every task along n; for strided A the repetition takes too long.
    fn packs_a_late(&self) -> bool {
        self.a.k_contiguous
            && self.cols <= self.plan.geometry.late_cols
            && !matches!(self.engine, Engine::Portable { .. })
    }

    fn pack_panels(&self, panels: Range<usize>, depth: Range<usize>, side: Side) {
        let g = &self.plan.geometry;
        let (strip, width, extent) = match side {
            Side::A => (self.a, g.mr, self.rows),
            Side::B => (self.b, g.nr, self.cols),
        };
        for panel in panels {
            let x = panel * width;
            let filled = width.min(extent - x);
            // SAFETY: the strip covers `extent × depth`; only this job accesses this depth of the panel, which lies in its region
            // of scratch, sized by the plan for `extent` rounded up to whole panels.
            unsafe {
                let to = self.panel(panel, depth.start, side);
                self.pack_lines(to, strip.at(x, depth.start), filled, depth.len(), side);
            }
        }
    }

    /// # Safety
    /// `from` covers `filled × depth`; `to` has space for a panel of that depth, padded.
    unsafe fn pack_lines(&self, to: *mut u8, from: Strip, filled: usize, depth: usize, side: Side) {
        // SAFETY: by the caller; the CPU supports the engine.
        unsafe {
            match self.engine {
                #[cfg(target_arch = "x86_64")]
                Engine::Amx => pairs::pack::<2, 16>(to, from, filled, depth, side),
                #[cfg(target_arch = "x86_64")]
                Engine::Avx512Bf16 => match side {
                    Side::A => pairs::pack::<1, { avx512_bf16::MR }>(to, from, filled, depth, side),
                    Side::B => pairs::pack::<2, { avx512_bf16::NR / 2 }>(to, from, filled, depth, side),
                },
                #[cfg(target_arch = "x86_64")]
                Engine::Avx512 { round } => match side {
                    Side::A => avx512::pack::<{ avx512::MR }>(to.cast(), from, filled, depth, round),
                    Side::B => avx512::pack::<{ avx512::NR }>(to.cast(), from, filled, depth, round),
                },
                #[cfg(target_arch = "x86_64")]
                Engine::Avx2 { round } => match side {
                    Side::A => avx2::pack::<{ avx2::MR }>(to.cast(), from, filled, depth, round),
                    Side::B => avx2::pack::<{ avx2::NR }>(to.cast(), from, filled, depth, round),
                },
                #[cfg(not(target_arch = "x86_64"))]
                Engine::Amx | Engine::Avx512Bf16 | Engine::Avx512 { .. } | Engine::Avx2 { .. } => {
                    unreachable!("x86 engines are selected on x86 only")
                }
                Engine::Portable { round } => portable::pack(to.cast(), from, depth, round),
            }
        }
    }

    /// The address of a packed panel at depth `p`, a multiple of the depth unit.
    fn panel(&self, panel: usize, p: usize, side: Side) -> *mut u8 {
        let g = &self.plan.geometry;
        let padded = self.depth.next_multiple_of(g.k_unit);
        let (base, width) = match side {
            Side::A => (self.packed_a, g.mr),
            Side::B => (self.packed_b, g.nr),
        };
        base.wrapping_add((panel * padded + p) * width * g.element)
    }

    fn multiply(&self, threads: Threads) {
        let (task_rows, task_cols) = self.plan.task(self.rows, self.cols, threads.count());
        let down = self.rows.div_ceil(task_rows);
        let across = self.cols.div_ceil(task_cols);
        // Consecutive tasks share their columns, so that a thread keeps the panels of B in its cache.
        threads.each(down * across, |task| {
            let (i, j) = (task % down * task_rows, task / down * task_cols);
            let (rows, cols) = (task_rows.min(self.rows - i), task_cols.min(self.cols - j));
            // SAFETY: the tile lies inside the block and belongs to this task; the panels were packed before.
            unsafe { self.task(i, j, rows, cols) }
        });
    }

    /// Multiplies the `rows × cols` of C at `(i, j)`.
    ///
    /// # Safety
    /// The tile lies inside the block, its panels are packed, and no other thread touches it.
    unsafe fn task(&self, i: usize, j: usize, rows: usize, cols: usize) {
        let tile = TileAt { row: i, col: j, rows, cols };
        #[cfg(target_arch = "x86_64")]
        let mut late = LatePanel([const { MaybeUninit::uninit() }; LATE_PANEL_BYTES]);
        // SAFETY: passed on from the caller.
        unsafe {
            match self.engine {
                #[cfg(target_arch = "x86_64")]
                Engine::Amx => {
                    let tiles = amx::Tiles::configure();
                    self.stretches(|p, depth, store| {
                        self.tiles(tile, p, depth, &mut late, |a, b, at| amx::multiply(&tiles, depth, a, b, store, at));
                    });
                }
                #[cfg(target_arch = "x86_64")]
                Engine::Avx512Bf16 => self.stretches(|p, depth, store| {
                    self.tiles(tile, p, depth, &mut late, |a, b, at| avx512_bf16::multiply(depth, a, b, store, at));
                }),
                #[cfg(target_arch = "x86_64")]
                Engine::Avx512 { .. } => self.stretches(|p, depth, store| {
                    self.tiles(tile, p, depth, &mut late, |a, b, at| avx512::multiply(depth, a, b, store, at));
                }),
                #[cfg(target_arch = "x86_64")]
                Engine::Avx2 { .. } => self.stretches(|p, depth, store| {
                    self.tiles(tile, p, depth, &mut late, |a, b, at| avx2::multiply(depth, a, b, store, at));
                }),
                #[cfg(not(target_arch = "x86_64"))]
                Engine::Amx | Engine::Avx512Bf16 | Engine::Avx512 { .. } | Engine::Avx2 { .. } => {
                    unreachable!("x86 engines are selected on x86 only")
                }
                Engine::Portable { .. } => self.task_portable(tile),
            }
        }
    }

    /// Divides the depth of the block into stretches `(p, depth, store)`.
    #[cfg(target_arch = "x86_64")]
    fn stretches(&self, mut work: impl FnMut(usize, usize, &Store<'_>)) {
        let stretch = self.plan.geometry.depth_inner;
        for p in (0..self.depth.max(1)).step_by(stretch) {
            let depth = stretch.min(self.depth - p);
            let (first, last) = (self.first && p == 0, self.last && p + stretch >= self.depth);
            let before = if self.epilogue.accumulate { Some(self.c) } else { None };
            work(
                p,
                depth,
                &Store {
                    alpha: self.epilogue.alpha,
                    bias: if first { self.epilogue.bias } else { None },
                    from: if first { before } else { Some(self.sums) },
                    to: if last { self.c } else { self.sums },
                },
            );
        }
    }

    /// Visits the register tiles of a task: one panel of A stays in the L1 cache while the panels of B stream through.
    #[cfg(target_arch = "x86_64")]
    fn tiles(
        &self,
        tile: TileAt,
        p: usize,
        depth: usize,
        late: &mut LatePanel,
        work: impl Fn(*const u8, *const u8, TileAt),
    ) {
        let g = &self.plan.geometry;
        for i in (tile.row..tile.row + tile.rows).step_by(g.mr) {
            let rows = g.mr.min(self.rows - i);
            let a = if self.packs_a_late() {
                let to = late.0.as_mut_ptr().cast();
                // SAFETY: row i and depth p are inside the strip; `LatePanel` holds the largest panel of a stretch.
                unsafe { self.pack_lines(to, self.a.at(i, p), rows, depth, Side::A) };
                to
            } else {
                self.panel(i / g.mr, p, Side::A)
            };
            for j in (tile.col..tile.col + tile.cols).step_by(g.nr) {
                let b = self.panel(j / g.nr, p, Side::B);
                work(a, b, TileAt { row: i, col: j, rows, cols: g.nr.min(self.cols - j) });
            }
        }
    }

    /// # Safety
    /// As for [`Self::task`].
    unsafe fn task_portable(&self, at: TileAt) {
        let (a, b) = (self.panel(at.row, 0, Side::A), self.panel(at.col, 0, Side::B));
        // SAFETY: passed on from the caller; without partial sums C is f32.
        unsafe {
            if self.first {
                portable::start(self.sums, self.c, &self.epilogue, at);
            }
            portable::multiply(self.sums, a.cast(), b.cast(), self.depth, self.epilogue.alpha, at);
            if self.last && self.plan.has_partial() {
                portable::finish(self.sums, self.c, at);
            }
        }
    }
}

/// A panel of A that a task packs on its stack.
#[cfg(target_arch = "x86_64")]
#[repr(align(64))]
struct LatePanel([MaybeUninit<u8>; LATE_PANEL_BYTES]);

/// 32 rows of bf16 with AMX, or 14 of f32, or of bf16 twice as deep.
#[cfg(target_arch = "x86_64")]
const LATE_PANEL_BYTES: usize = 64 * DEPTH_INNER;
