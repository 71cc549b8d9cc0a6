//! Division of a product: block sizes for each engine, and the layout of its scratch.
//!
//! A product is a loop over blocks of at most `rows × cols × depth`. The operands of one block are packed completely,
//! then its C is divided into tasks of `task_rows × task_cols`. The bounds keep scratch finite for any shape; typical
//! training shapes are one block, or a few along k.

use super::Engine;
use super::operand::Storage;
use crate::isa::second_level_cache;

/// Alignment of every region of scratch: one cache line, one vector.
const ALIGN: usize = 64;
/// The depth of a stretch in f32, and with AMX.
pub(super) const DEPTH_INNER: usize = 512;
const DEPTH_BLOCK: usize = 8 * DEPTH_INNER;
/// Columns of the register tile with AVX2.
const AVX2_NR: usize = 16;
const COLS_BLOCK: usize = 4096;
const TASKS_PER_THREAD: usize = 2;

/// Sizes of an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    /// Rows and columns of the tile that the kernel keeps in registers.
    pub mr: usize,
    pub nr: usize,
    /// Packed depth is padded to a multiple of this.
    pub k_unit: usize,
    /// Depth of a stretch, the k loop of a kernel call: a panel of A of this depth stays in the L1 cache (28 KiB, with AMX
    /// 32 KiB, with AVX2 12 KiB). Depends on the engine alone, because sums do.
    pub depth_inner: usize,
    /// Bytes of a packed element.
    pub element: usize,
    /// Largest C of one task: its sums in f32 and the panels of B of one stretch fit the L2 cache together.
    pub task_rows: usize,
    pub task_cols: usize,
    /// Up to this many columns, tasks pack A themselves.
    pub late_cols: usize,
    /// Rows of a block.
    pub rows_block: usize,
}

impl Geometry {
    fn of(engine: Engine) -> Geometry {
        match engine {
            Engine::Amx => Geometry {
                mr: 32,
                nr: 32,
                k_unit: 32,
                depth_inner: DEPTH_INNER,
                element: 2,
                task_rows: 256,
                task_cols: 512,
                late_cols: 1024,
                rows_block: 2048,
            },
            Engine::Avx512Bf16 => Geometry {
                mr: 14,
                nr: 32,
                k_unit: 32,
                depth_inner: 2 * DEPTH_INNER,
                element: 2,
                task_rows: 224,
                task_cols: 256,
                late_cols: 1024,
                rows_block: 2016,
            },
            Engine::Avx512 { .. } => Geometry {
                mr: 14,
                nr: 32,
                k_unit: 1,
                depth_inner: DEPTH_INNER,
                element: 4,
                task_rows: 224,
                task_cols: 512,
                late_cols: 1024,
                rows_block: 2016,
            },
            Engine::Avx2 { .. } => Geometry {
                mr: 6,
                nr: AVX2_NR,
                k_unit: 1,
                depth_inner: DEPTH_INNER,
                element: 4,
                task_rows: 192,
                task_cols: avx2_task_cols(second_level_cache()),
                late_cols: 1024,
                rows_block: 2016,
            },
            Engine::Portable { .. } => Geometry {
                mr: 1,
                nr: 1,
                k_unit: 1,
                depth_inner: DEPTH_INNER,
                element: 4,
                task_rows: 128,
                task_cols: 256,
                late_cols: 0,
                rows_block: 2048,
            },
        }
    }
}

/// Columns of a task with AVX2, whose processors differ in the size of the cache: the panels of B of one stretch take half of it. More
/// columns repeat the packing of A less often.
fn avx2_task_cols(cache: usize) -> usize {
    let cols = cache / 2 / (4 * DEPTH_INNER);
    (cols / AVX2_NR * AVX2_NR).clamp(128, 512)
}

/// The division of one product. What decides the order of a sum is a function of its sizes and the engine only (MATMUL-1).
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub geometry: Geometry,
    pub rows: usize,
    pub cols: usize,
    pub depth: usize,
    packed_a: usize,
    packed_b: usize,
    partial: usize,
}

impl Plan {
    pub fn new(engine: Engine, m: usize, n: usize, k: usize, c: Storage) -> Plan {
        let g = Geometry::of(engine);
        let (rows, cols, depth) = (m.min(g.rows_block), n.min(COLS_BLOCK), k.min(DEPTH_BLOCK));
        let padded = depth.next_multiple_of(g.k_unit);
        // f32 sums live in C itself; a narrower C needs separate space for them while k is unfinished. `gemm` writes
        // f32 only.
        let portable = matches!(engine, Engine::Portable { .. });
        let partial = c != Storage::F32 && (portable || k > g.depth_inner);
        Plan {
            geometry: g,
            rows,
            cols,
            depth,
            packed_a: (rows.next_multiple_of(g.mr) * padded * g.element).next_multiple_of(ALIGN),
            packed_b: (cols.next_multiple_of(g.nr) * padded * g.element).next_multiple_of(ALIGN),
            partial: if partial { (rows * cols * 4).next_multiple_of(ALIGN) } else { 0 },
        }
    }

    pub fn scratch_bytes(&self) -> usize {
        self.packed_a + self.packed_b + self.partial + ALIGN - 1
    }

    /// Packed A, packed B and the f32 partial sums (empty where C holds them), each on a cache line.
    pub fn split<'s>(&self, scratch: &'s mut [u8]) -> [&'s mut [u8]; 3] {
        assert!(
            scratch.len() >= self.scratch_bytes(),
            "scratch of {} bytes, {} needed",
            scratch.len(),
            self.scratch_bytes()
        );
        let start = scratch.as_ptr().align_offset(ALIGN);
        let (a, rest) = scratch[start..].split_at_mut(self.packed_a);
        let (b, rest) = rest.split_at_mut(self.packed_b);
        [a, b, &mut rest[..self.partial]]
    }

    /// Rows and columns of a task for `n_threads` threads: enough tasks that a slow thread delays the others little.
    /// May depend on the number of threads, because it changes no sum (MATMUL-1).
    pub fn task(&self, rows: usize, cols: usize, threads: usize) -> (usize, usize) {
        let g = &self.geometry;
        let (down_max, across_max) = (rows.div_ceil(g.mr), cols.div_ceil(g.nr));
        let wanted = if threads > 1 { TASKS_PER_THREAD * threads } else { 1 };
        let across = cols.div_ceil(g.task_cols).max(wanted.div_ceil(down_max)).min(across_max);
        let enough = rows.div_ceil(g.task_rows).max(wanted.div_ceil(across));
        // Equal shares: a multiple of the number of threads, if one exists before tasks get too small.
        let even = (enough..enough + threads).find(|down| (down * across).is_multiple_of(threads));
        let down = even.unwrap_or(enough).min(down_max);
        (down_max.div_ceil(down) * g.mr, across_max.div_ceil(across) * g.nr)
    }

    /// Whether unfinished sums have their own buffer.
    pub fn has_partial(&self) -> bool {
        self.partial > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_get_equal_shares_of_the_benchmark_shapes() {
        for (m, n) in [(1024, 512), (1024, 1536), (512, 512), (512, 1408), (4096, 512)] {
            for engine in
                [Engine::Amx, Engine::Avx512Bf16, Engine::Avx512 { round: false }, Engine::Avx2 { round: false }]
            {
                for threads in [1, 2, 4] {
                    let plan = Plan::new(engine, m, n, 512, Storage::F32);
                    let (rows, cols) = (m.min(plan.rows), n.min(plan.cols));

                    let (task_rows, task_cols) = plan.task(rows, cols, threads);

                    let count = rows.div_ceil(task_rows) * cols.div_ceil(task_cols);
                    assert!(count.is_multiple_of(threads), "{engine:?} [{m}, {n}]: {count} tasks, {threads} threads");
                    assert!(task_rows.is_multiple_of(plan.geometry.mr) && task_cols.is_multiple_of(plan.geometry.nr));
                }
            }
        }
    }

    #[test]
    fn tasks_with_avx2_leave_half_of_a_small_cache_and_grow_with_a_large_one() {
        let cols = [256, 512, 1024, 1280, 2048, 4096].map(|kib| avx2_task_cols(kib << 10));

        assert_eq!(cols, [128, 128, 256, 320, 512, 512]);
    }

    #[test]
    fn scratch_stays_bounded_for_huge_products() {
        let huge = Plan::new(Engine::Avx512 { round: false }, 1 << 20, 1 << 20, 1 << 20, Storage::Bf16);

        assert!(huge.scratch_bytes() < 160 << 20, "{} bytes", huge.scratch_bytes());
    }
}
