//! The bf16 engine: 32 × 32 sums in four of the eight tile registers, fed from packed tiles.
//!
//! A step of the kernel covers 32 of k, see [`super::pairs`]. Its operand tiles are 16 rows of 64 bytes.
//! Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX.

use std::arch::asm;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::operand::Storage;
use super::pairs::{STEP, store_narrow};
use super::store::{Store, address};
use super::tile::TileAt;

/// The operand of `ldtilecfg`: eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static FULL_TILES: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// The configured tile registers of this thread; dropping it releases them, so that a context switch need not save 8
/// KiB.
pub(super) struct Tiles(PhantomData<*mut ()>);

impl Tiles {
    /// # Safety
    /// The CPU has [`Isa::Amx`](crate::isa::Isa).
    pub unsafe fn configure() -> Tiles {
        // SAFETY: the operand is a valid configuration of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &FULL_TILES, options(nostack, readonly)) };
        Tiles(PhantomData)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: valid whenever `configure` was.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Sums of one kernel call.
#[repr(C, align(64))]
struct Sums([f32; 32 * 32]);

/// Multiplies a panel of A by a panel of B over `depth` and stores the tile.
///
/// # Safety
/// The panels were packed by [`super::pairs::pack`] and hold `depth`; the tile may be stored, see [`Store::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c")]
pub(super) unsafe fn multiply(_tiles: &Tiles, depth: usize, a: *const u8, b: *const u8, store: &Store<'_>, at: TileAt) {
    let mut sums = MaybeUninit::<Sums>::uninit();
    // SAFETY: `pack` wrote two tiles of each panel per step. The sums hold 32 × 32, and so does C where `direct`
    // returns its address. The rest is by the caller.
    unsafe {
        if let Some((c, ld, add)) = direct(store, at) {
            products(depth, a, b, c, ld, add);
            return;
        }
        products(depth, a, b, sums.as_mut_ptr().cast(), 32, false);
        if store.to.storage == Storage::Bf16 && store.bias.is_none() {
            store_narrow(sums.as_ptr().cast(), store, at);
        } else {
            store.tile(sums.as_ptr().cast(), at.row, at.col, at.rows, at.cols);
        }
    }
}

/// Destination of a whole tile of plain f32 sums, if it can be stored directly: address, row distance, whether to add.
///
/// # Safety
/// As for [`Store::tile`].
#[inline]
unsafe fn direct(store: &Store<'_>, at: TileAt) -> Option<(*mut f32, usize, bool)> {
    let same = store.from.is_none_or(|from| from.ptr == store.to.ptr);
    let plain = store.to.storage == Storage::F32 && store.bias.is_none() && store.alpha == 1.0;
    if !(same && plain && at.rows == 32 && at.cols == 32) {
        return None;
    }
    // SAFETY: the tile lies inside the destination.
    Some((unsafe { address(store.to, at.row, at.col).cast() }, store.to.ld, store.from.is_some()))
}

/// The kernel: writes 32 × 32 sums to `c` with `ld` elements from row to row, or adds them if `add`.
///
/// The panel of A stays in the L1 cache for many calls while B passes once: B is loaded with a hint that keeps it from
/// evicting A, which speeds up a step from 135 cycles to 100.
///
/// # Safety
/// The tiles are configured, the panels hold `depth` rounded up to whole steps, and the 32 × 32 of `c` are writable.
#[inline]
unsafe fn products(depth: usize, a: *const u8, b: *const u8, c: *mut f32, ld: usize, add: bool) {
    // SAFETY: by the caller.
    unsafe {
        asm!(
            "test {add:e}, {add:e}",
            "jnz 4f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 5f",
            "4:",
            "tileloadd tmm0, [{c} + {ld}]",
            "tileloadd tmm1, [{c} + {ld} + 64]",
            "tileloadd tmm2, [{low} + {ld}]",
            "tileloadd tmm3, [{low} + {ld} + 64]",
            "5:",
            "test {steps}, {steps}",
            "jz 3f",
            "2:",
            "tileloadd tmm4, [{a} + {row}]",
            "tileloaddt1 tmm6, [{b} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a} + {row} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloaddt1 tmm7, [{b} + {row} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tilestored [{c} + {ld}], tmm0",
            "tilestored [{c} + {ld} + 64], tmm1",
            "tilestored [{low} + {ld}], tmm2",
            "tilestored [{low} + {ld} + 64], tmm3",
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            steps = inout(reg) depth.div_ceil(STEP) => _,
            row = in(reg) 64usize,
            c = in(reg) c,
            low = in(reg) c.add(16 * ld),
            ld = in(reg) 4 * ld,
            add = in(reg) u32::from(add),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
