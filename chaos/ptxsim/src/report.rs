//! Findings: what a kernel did wrong, and where.

use crate::program::{BlockPlace, Program};
use std::collections::BTreeMap;
use std::fmt;

/// Findings kept for a launch; later ones of new kinds or places are only counted.
const FINDINGS_MAX: usize = 256;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// An access outside of every allocation, or beyond shared, local or parameter memory.
    OutOfBounds,
    /// A read of global bytes that nothing has written.
    UnwrittenGlobal,
    /// A read of shared bytes that nothing has written.
    UnwrittenShared,
    /// Two accesses to shared bytes in one block, at least one a write, that nothing orders.
    SharedRace,
    /// Two accesses to global bytes, at least one a write that is not atomic, that nothing orders.
    GlobalRace,
    /// An access to shared bytes while an asynchronous copy may still write or read them.
    CopyInFlight,
    /// A read through the read-only cache of bytes that the same launch writes.
    NonCoherentRead,
    /// The address is no multiple of the size of the access.
    Misaligned,
    /// Some threads wait at a barrier that others never reach.
    BarrierDivergence,
    /// All threads wait for each other, or for a phase of an mbarrier that no one completes.
    Deadlock,
    /// A warp executed more instructions than the launch allows.
    InstructionLimit,
    /// A warp-wide instruction whose mask differs from the lanes that execute it.
    LaneMask,
    /// Misuse of an mbarrier.
    Mbarrier,
    /// The asynchronous proxy reads shared bytes without `fence.proxy.async` after their write.
    ProxyFence,
    /// A register is used although a `wgmma` that was not waited for still writes it.
    PendingRegister,
    /// No tensor map lies at the address that a tensor copy names.
    TensorMap,
    /// The kernel executed `trap`.
    Trap,
}

/// A place in the source and in the PTX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Name of the source file; empty if the PTX has no line information.
    pub file: String,
    /// Line of the source, from 1; 0 if unknown.
    pub line: u32,
    /// File and line of the call, if the code was inlined.
    pub inlined_at: Option<(String, u32)>,
    /// Line of the PTX.
    pub ptx_line: u32,
    /// Opcode with its modifiers.
    pub instruction: String,
}

/// Where in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory that a kernel argument points to.
    Argument {
        /// Position of the argument.
        index: usize,
        /// Offset from the start of the allocation, bytes.
        byte: i64,
        /// Size of the allocation, bytes.
        bytes: usize,
    },
    /// Memory of the device to which no argument points directly.
    Allocation {
        /// Which allocation, in the order of their creation.
        index: usize,
        /// Offset from its start, bytes.
        byte: i64,
        /// Its size, bytes.
        bytes: usize,
    },
    /// Shared memory of the block.
    Shared {
        /// Offset, bytes.
        byte: usize,
        /// The variable and the offset in it.
        variable: Option<(String, usize)>,
    },
    /// Memory of the thread: arrays and spilled registers.
    Local {
        /// Offset, bytes.
        byte: u64,
    },
    /// Parameters of the kernel.
    Param {
        /// Offset, bytes.
        byte: u64,
    },
    /// An address that belongs to nothing.
    Unmapped {
        /// The address.
        address: u64,
    },
}

/// The other access of a race.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Other {
    /// Where it was executed, if known.
    pub site: Option<Site>,
    /// Its block.
    pub block: [u32; 3],
    /// Its thread.
    pub thread: [u32; 3],
    /// Whether it was a write.
    pub is_write: bool,
}

/// One kind of error at one instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What is wrong.
    pub kind: Kind,
    /// The kernel.
    pub kernel: String,
    /// The instruction.
    pub site: Site,
    /// Block of the first occurrence.
    pub block: [u32; 3],
    /// Thread of the first occurrence.
    pub thread: [u32; 3],
    /// Memory that it concerns.
    pub place: Option<Place>,
    /// The other access of a race.
    pub other: Option<Other>,
    /// Details.
    pub note: String,
    /// How often it happened, in all threads and blocks.
    pub count: u64,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "{}:{}", self.file, self.line)?;
            if let Some((file, line)) = &self.inlined_at {
                write!(f, " (inlined at {file}:{line})")?;
            }
            write!(f, ", ")?;
        }
        write!(f, "PTX line {} `{}`", self.ptx_line, self.instruction)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Argument { index, byte, bytes } => write!(f, "argument {index}, byte {byte} of {bytes}"),
            Place::Allocation { index, byte, bytes } => write!(f, "allocation {index}, byte {byte} of {bytes}"),
            Place::Shared { byte, variable: Some((name, at)) } => write!(f, "shared byte {byte} ({name} + {at})"),
            Place::Shared { byte, variable: None } => write!(f, "shared byte {byte}"),
            Place::Local { byte } => write!(f, "local byte {byte}"),
            Place::Param { byte } => write!(f, "parameter byte {byte}"),
            Place::Unmapped { address } => write!(f, "address {address:#x}, which belongs to no allocation"),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { kind, kernel, site, block, thread, note, .. } = self;
        write!(f, "{kernel}: {kind:?} at {site}: thread {thread:?} of block {block:?}")?;
        if let Some(place) = &self.place {
            write!(f, ", {place}")?;
        }
        if let Some(other) = &self.other {
            let verb = if other.is_write { "written" } else { "read" };
            write!(f, "; {verb} by thread {:?} of block {:?}", other.thread, other.block)?;
            if let Some(site) = &other.site {
                write!(f, " at {site}")?;
            }
        }
        if !note.is_empty() {
            write!(f, "; {note}")?;
        }
        write!(f, " ({} times)", self.count)
    }
}

/// An access that breaks a rule, as the memory sees it.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) kind: Kind,
    pub(crate) place: Option<Place>,
    pub(crate) other: Option<Party>,
    pub(crate) note: &'static str,
}

impl Violation {
    pub(crate) fn new(kind: Kind, note: &'static str) -> Violation {
        Violation { kind, place: None, other: None, note }
    }

    pub(crate) fn at(self, place: Place) -> Violation {
        Violation { place: Some(place), ..self }
    }
}

/// The other party of a race.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Party {
    pub(crate) block: u32,
    pub(crate) thread: u32,
    pub(crate) pc: Option<u32>,
    pub(crate) is_write: bool,
}

/// Collects the findings of a launch.
pub(crate) struct Report<'a> {
    program: &'a Program,
    /// Allocation of each argument that is a pointer.
    arguments: Vec<(usize, usize)>,
    findings: Vec<Finding>,
    index: BTreeMap<(Kind, u32, Option<u32>), usize>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(program: &'a Program, arguments: Vec<(usize, usize)>) -> Report<'a> {
        Report { program, arguments, findings: Vec::new(), index: BTreeMap::new() }
    }

    pub(crate) fn into_findings(self) -> Vec<Finding> {
        self.findings
    }

    /// Records a violation of a thread at an instruction.
    pub(crate) fn add(&mut self, violation: Violation, pc: u32, place: &BlockPlace, thread: u32) {
        let Violation { kind, place: memory, other, note } = violation;
        let key = (kind, pc, other.and_then(|o| o.pc));
        if let Some(at) = self.index.get(&key) {
            self.findings[*at].count += 1;
            return;
        }
        if self.findings.len() == FINDINGS_MAX {
            return;
        }
        self.index.insert(key, self.findings.len());
        let other = other.map(|party| Other {
            site: party.pc.map(|pc| self.site(pc)),
            block: coordinates(party.block, place.grid),
            thread: coordinates(party.thread, place.block),
            is_write: party.is_write,
        });
        self.findings.push(Finding {
            kind,
            kernel: self.program.name.clone(),
            site: self.site(pc),
            block: place.index,
            thread: coordinates(thread, place.block),
            place: memory.map(|m| self.name(m)),
            other,
            note: note.to_owned(),
            count: 1,
        });
    }

    fn site(&self, pc: u32) -> Site {
        let instr = &self.program.instrs[pc as usize];
        let loc = self.program.locs[instr.loc as usize];
        Site {
            file: self.file(loc.file),
            line: loc.line,
            inlined_at: loc.inlined_at.map(|(file, line)| (self.file(file), line)),
            ptx_line: instr.line,
            instruction: self.program.text[pc as usize].clone(),
        }
    }

    /// The name of a file without its folder, which is that of the compiling process.
    fn file(&self, number: u32) -> String {
        let path = self.program.files.get(&number).map_or("", String::as_str);
        path.rsplit('/').next().unwrap_or_default().to_owned()
    }

    /// Replaces allocations by arguments, and shared bytes by variables.
    fn name(&self, place: Place) -> Place {
        match place {
            Place::Allocation { index, byte, bytes } => {
                match self.arguments.iter().find(|(allocation, _)| *allocation == index) {
                    Some((_, argument)) => Place::Argument { index: *argument, byte, bytes },
                    None => Place::Allocation { index, byte, bytes },
                }
            }
            Place::Shared { byte, .. } => {
                let named = self.program.shared_names.iter().find(|(from, to, _)| (*from..*to).contains(&byte));
                Place::Shared { byte, variable: named.map(|(from, _, name)| (name.clone(), byte - from)) }
            }
            other => other,
        }
    }
}

/// Three coordinates of a linear index.
pub(crate) fn coordinates(index: u32, shape: [u32; 3]) -> [u32; 3] {
    let [x, y, _] = shape;
    [index % x, index / x % y, index / x / y]
}
