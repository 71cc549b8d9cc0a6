//! A decoded kernel: flat code with numbered registers, together with the functions it calls.

use crate::alu::{Alu, Comparison, IntegerMode, WARP};
use crate::syntax::Loc;
use crate::types::{Space, Ty};
use std::collections::BTreeMap;

/// Number of a register. Constants and special registers have numbers too, so that every source operand is a register.
pub(crate) type Reg = u32;

/// A predicate, possibly negated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pred {
    pub(crate) index: u32,
    pub(crate) negated: bool,
}

/// The predicate that holds in every lane.
pub(crate) const ALWAYS: Pred = Pred { index: 0, negated: false };
/// The predicate that is written but never read.
pub(crate) const SINK: u32 = 1;

/// A decoded kernel.
#[derive(Default)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) instrs: Vec<Instr>,
    /// What a report shows for each instruction.
    pub(crate) text: Vec<String>,
    pub(crate) n_regs: usize,
    pub(crate) n_preds: usize,
    /// Registers with a value before the first instruction.
    pub(crate) initial: Vec<(Reg, Initial)>,
    pub(crate) params: Vec<Param>,
    pub(crate) param_bytes: usize,
    pub(crate) shared_static_bytes: usize,
    pub(crate) shared_align: usize,
    /// Names of shared variables with their first and last byte.
    pub(crate) shared_names: Vec<(usize, usize, String)>,
    pub(crate) local_bytes: usize,
    pub(crate) globals: Vec<GlobalVar>,
    pub(crate) locs: Vec<Loc>,
    pub(crate) files: BTreeMap<u32, String>,
    pub(crate) threads_max: Option<u64>,
}

/// A parameter of the kernel.
pub(crate) struct Param {
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// A variable of the module in global or constant memory.
#[derive(Clone)]
pub(crate) struct GlobalVar {
    pub(crate) name: String,
    pub(crate) bytes: usize,
    pub(crate) init: Vec<u8>,
}

/// The value of a register before the first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Initial {
    Bits(u64),
    Special(Special),
    /// Address of a global variable, by its position in [`Program::globals`], plus an offset.
    Global(usize, i64),
    /// Address of the dynamic shared memory, plus an offset.
    DynamicShared(i64),
}

/// A special register whose value does not change while a block runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    NWarpId,
    LaneMask(LaneMask),
    DynamicSharedBytes,
    TotalSharedBytes,
}

/// Masks of lanes by their position relative to the own lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LaneMask {
    Equal,
    Below,
    BelowOrEqual,
    Above,
    AboveOrEqual,
}

/// An instruction with its guard and its place in the source.
pub(crate) struct Instr {
    pub(crate) guard: Pred,
    pub(crate) op: Op,
    pub(crate) line: u32,
    pub(crate) loc: u32,
}

/// An address: register plus offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) base: Reg,
    pub(crate) offset: i64,
}

/// How a memory access takes part in synchronisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strength {
    Weak,
    /// Through the read-only cache: the bytes must not change during the launch.
    NonCoherent,
    /// Volatile or relaxed: such accesses do not race with each other.
    Strong,
    Acquire,
    Release,
}

/// A load or store of up to 32 bytes a lane.
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) address: Address,
    /// Bytes of an element.
    pub(crate) bytes: usize,
    /// Elements are sign-extended to this size, when loaded.
    pub(crate) extend_to: Option<usize>,
    pub(crate) regs: Vec<Reg>,
    pub(crate) strength: Strength,
}

/// What an atomic instruction does with the old value and its operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
    Increment,
    Decrement,
}

/// An atomic instruction.
pub(crate) struct Atom {
    pub(crate) op: AtomOp,
    pub(crate) ty: Ty,
    pub(crate) space: Space,
    pub(crate) address: Address,
    /// One register for each element of a vector.
    pub(crate) dst: Vec<Option<Reg>>,
    pub(crate) src: Vec<Reg>,
    /// The new value of a compare-and-swap.
    pub(crate) new: Reg,
    pub(crate) release: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierReduction {
    PopCount,
    And,
    Or,
}

/// A block-wide barrier instruction.
pub(crate) struct Barrier {
    pub(crate) id: Reg,
    /// Threads that take part; without it, all of the block.
    pub(crate) threads: Option<Reg>,
    pub(crate) arrive_only: bool,
    /// Whether all threads of a warp must execute it together.
    pub(crate) aligned: bool,
    pub(crate) reduction: Option<(BarrierReduction, Pred)>,
    pub(crate) dst: Option<Reg>,
    pub(crate) dst_pred: Option<u32>,
}

/// Element types of a matrix instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatrixType {
    F16,
    Bf16,
    Tf32,
    F64,
}

/// `mma.sync`.
pub(crate) struct Mma {
    pub(crate) ty: MatrixType,
    pub(crate) k: usize,
    /// Whether C and D are f16 pairs.
    pub(crate) half_sums: bool,
    pub(crate) d: Vec<Reg>,
    pub(crate) a: Vec<Reg>,
    pub(crate) b: Vec<Reg>,
    pub(crate) c: Vec<Reg>,
}

/// `ldmatrix` or `stmatrix`.
pub(crate) struct MatrixAccess {
    pub(crate) store: bool,
    pub(crate) transposed: bool,
    pub(crate) space: Space,
    pub(crate) address: Address,
    pub(crate) regs: Vec<Reg>,
}

/// An instruction that copies asynchronously, or waits for such copies.
pub(crate) enum CopyOp {
    /// `cp.async` of `bytes` bytes: the instruction reads the first `source_bytes`, the others are zero.
    Small {
        to: Address,
        from: Address,
        bytes: usize,
        source_bytes: Option<Reg>,
        skip: Option<Pred>,
    },
    Commit,
    /// Waits until at most this number of groups is pending.
    Wait {
        pending: usize,
    },
    /// Waits for all copies of the thread, committed or not.
    WaitAll,
    /// Arrives at an mbarrier when the earlier copies of the thread are done.
    Arrive {
        barrier: Address,
        no_increment: bool,
    },
    /// `cp.async.bulk` from global to shared memory.
    BulkLoad {
        to: Address,
        from: Address,
        bytes: Reg,
        barrier: Address,
    },
    /// `cp.async.bulk` from shared to global memory.
    BulkStore {
        to: Address,
        from: Address,
        bytes: Reg,
        reduce: Option<Ty>,
    },
    /// `cp.async.bulk.tensor` with a tensor map.
    TensorLoad {
        to: Address,
        map: Address,
        coordinates: Vec<Reg>,
        barrier: Address,
    },
    TensorStore {
        map: Address,
        coordinates: Vec<Reg>,
        from: Address,
        reduce: bool,
    },
    BulkCommit,
    BulkWait {
        pending: usize,
    },
}

/// An instruction on an mbarrier.
pub(crate) enum MbarrierOp {
    Init {
        count: Reg,
    },
    Invalidate,
    Arrive {
        state: Option<Reg>,
        count: Option<Reg>,
        transaction_bytes: Option<Reg>,
        drop: bool,
    },
    ExpectTransaction {
        bytes: Reg,
    },
    /// Tests for the phase of a state token, or for the phase of a parity.
    Wait {
        result: u32,
        state: Option<Reg>,
        parity: Option<Reg>,
    },
}

/// `wgmma.mma_async`: one warp group, f32 or f16 sums.
pub(crate) struct Wgmma {
    pub(crate) ty: MatrixType,
    pub(crate) n: usize,
    pub(crate) half_sums: bool,
    pub(crate) d: Vec<Reg>,
    pub(crate) a: WgmmaA,
    pub(crate) b: Reg,
    /// Whether D is added to the product.
    pub(crate) accumulate: Pred,
    pub(crate) scale_a: i32,
    pub(crate) scale_b: i32,
    pub(crate) transpose_a: bool,
    pub(crate) transpose_b: bool,
}

/// Where the first operand of `wgmma` lies.
pub(crate) enum WgmmaA {
    Regs(Vec<Reg>),
    Descriptor(Reg),
}

/// What an instruction does.
pub(crate) enum Op {
    Nop,
    Alu {
        f: Alu,
        dst: Reg,
        src: [Reg; 3],
    },
    Carry {
        op: &'static str,
        ty: Ty,
        mode: IntegerMode,
        takes: bool,
        gives: bool,
        dst: Reg,
        src: [Reg; 3],
    },
    BitInsert {
        ty: Ty,
        dst: Reg,
        src: [Reg; 4],
    },
    Lop3 {
        dst: Reg,
        src: [Reg; 3],
        table: u8,
    },
    SetPredicate {
        test: Comparison,
        a: Reg,
        b: Reg,
        with: Option<(Logic, Pred)>,
        p: u32,
        q: Option<u32>,
    },
    /// `set`: all ones or 1.0 where the comparison holds.
    Set {
        test: Comparison,
        a: Reg,
        b: Reg,
        with: Option<(Logic, Pred)>,
        dst: Reg,
        holds: u64,
    },
    PredicateLogic {
        op: Logic,
        dst: u32,
        a: Pred,
        b: Pred,
    },
    Select {
        dst: Reg,
        a: Reg,
        b: Reg,
        by: Pred,
        mask: u64,
    },
    Pack {
        dst: Reg,
        parts: Vec<Reg>,
        bytes: usize,
    },
    Unpack {
        parts: Vec<Option<Reg>>,
        src: Reg,
        bytes: usize,
    },
    Clock {
        dst: Reg,
    },
    Load(Access),
    Store(Access),
    Atom(Atom),
    /// Adds the base of a window to an address in it, or subtracts it.
    ConvertAddress {
        dst: Reg,
        src: Reg,
        space: Space,
        to_space: bool,
    },
    IsSpace {
        dst: u32,
        src: Reg,
        space: Space,
    },
    Branch {
        target: u32,
    },
    BranchIndexed {
        targets: Vec<u32>,
        index: Reg,
    },
    Call {
        target: u32,
    },
    Return,
    Exit,
    Trap,
    Shuffle {
        mode: ShuffleMode,
        dst: Reg,
        valid: u32,
        src: Reg,
        by: Reg,
        clamp: Reg,
        mask: Reg,
    },
    Vote {
        vote: Vote,
        dst: Reg,
        dst_pred: u32,
        src: Pred,
        mask: Reg,
    },
    Match {
        all: bool,
        dst: Reg,
        valid: u32,
        src: Reg,
        bytes: usize,
        mask: Reg,
    },
    Redux {
        op: AtomOp,
        ty: Ty,
        dst: Reg,
        src: Reg,
        mask: Reg,
    },
    Elect {
        dst: Reg,
        pred: u32,
        mask: Reg,
    },
    ActiveMask {
        dst: Reg,
    },
    WarpBarrier {
        mask: Reg,
    },
    Barrier(Barrier),
    Fence {
        releases: bool,
    },
    ProxyFence,
    Yield,
    Mma(Mma),
    Matrix(MatrixAccess),
    Copy(CopyOp),
    Mbarrier(MbarrierOp, Address),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait {
        pending: usize,
    },
    Wgmma(Box<Wgmma>),
}

impl Special {
    /// The value in each lane.
    pub(crate) fn lanes(self, place: &BlockPlace, warp: usize) -> [u64; WARP] {
        std::array::from_fn(|lane| {
            let thread = warp * WARP + lane;
            let [x, y, _] = place.block.map(u64::from);
            let below = (1u64 << lane) - 1;
            match self {
                Special::Tid(0) => thread as u64 % x,
                Special::Tid(1) => thread as u64 / x % y,
                Special::Tid(_) => thread as u64 / (x * y),
                Special::Ntid(axis) => u64::from(place.block[usize::from(axis)]),
                Special::Ctaid(axis) => u64::from(place.index[usize::from(axis)]),
                Special::Nctaid(axis) => u64::from(place.grid[usize::from(axis)]),
                Special::LaneId => lane as u64,
                Special::WarpId => warp as u64,
                Special::NWarpId => place.block.iter().map(|n| u64::from(*n)).product::<u64>().div_ceil(WARP as u64),
                Special::LaneMask(LaneMask::Equal) => 1 << lane,
                Special::LaneMask(LaneMask::Below) => below,
                Special::LaneMask(LaneMask::BelowOrEqual) => below | 1 << lane,
                Special::LaneMask(LaneMask::Above) => !below & 0xffff_ffff & !(1 << lane),
                Special::LaneMask(LaneMask::AboveOrEqual) => !below & 0xffff_ffff,
                Special::DynamicSharedBytes => place.dynamic_shared_bytes as u64,
                Special::TotalSharedBytes => place.shared_bytes as u64,
            }
        })
    }
}

/// Where a block lies in its grid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockPlace {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) index: [u32; 3],
    pub(crate) dynamic_shared_bytes: usize,
    pub(crate) shared_bytes: usize,
}
