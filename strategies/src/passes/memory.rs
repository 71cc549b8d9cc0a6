//! Static allocation: every value gets its location before the first step, so the hot loop has no allocator and the peak
//! memory is known before any buffer exists.
//!
//! State values get separate locations in table order, so programs over the same model (training, evaluation) agree on
//! the location of each parameter. All other values share one work region by liveness: a location becomes free after the
//! last instruction that reads it, and an operation may overwrite an operand that is no longer needed where
//! [`crate::program::Op::in_place_pairs`] permits. Placement is in program order, by best fit or by first fit, whichever needs less
//! memory for the program; free neighbours coalesce.

use crate::program::{Collective, CollectiveKind, DType, Instr, Kind, Op, Program, Stream, Value, ValueId, op};
use crate::target::{ALIGN_BYTES, Target};
use std::collections::BTreeMap;

/// A region of memory, allocated as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Region {
    /// Weights.
    Parameters,
    /// State of the optimizer.
    OptimizerState,
    /// State of the optimizer outside device memory.
    Offloaded,
    /// Tables.
    Constants,
    /// Keys and values of earlier tokens.
    Cache,
    /// Everything that lives within a step, and the scratch of the operations.
    Work,
}

impl Region {
    /// All regions.
    pub const ALL: [Region; 6] =
        [Region::Parameters, Region::OptimizerState, Region::Offloaded, Region::Constants, Region::Cache, Region::Work];
}

/// Location of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferLocation {
    /// Which memory.
    pub region: Region,
    /// Bytes from its start; a multiple of the target's alignment.
    pub offset: usize,
}

/// Bytes in use at the peak, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkPeak {
    /// Gradients of parameters.
    pub gradients: usize,
    /// Weights in full width that were gathered from other ranks.
    pub gathered_weights: usize,
    /// Half-width copies of weights, gathered ones included.
    pub half_weights: usize,
    /// Logits and their gradients.
    pub logits: usize,
    /// Values received from other ranks: messages of pipeline stages, gathered activations.
    pub received: usize,
    /// Other activations and their gradients.
    pub activations: usize,
    /// Inputs and outputs.
    pub inputs: usize,
    /// Gaps between buffers.
    pub fragmentation: usize,
    /// Working space of the operations.
    pub scratch: usize,
}

/// Locations of all values of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Location of each value, indexed by [`ValueId`]; `None` if no instruction touches it.
    pub locations: Vec<Option<BufferLocation>>,
    /// Size of each region.
    pub region_bytes: BTreeMap<Region, usize>,
    /// Where the scratch lies in the work region, and its size.
    pub scratch: (usize, usize),
    /// What the work region holds at its peak.
    pub work_peak: WorkPeak,
}

impl WorkPeak {
    fn live(&self) -> usize {
        let weights = self.gathered_weights + self.half_weights;
        self.gradients + weights + self.logits + self.received + self.activations + self.inputs
    }

    fn of(&mut self, purpose: Purpose) -> &mut usize {
        match purpose {
            Purpose::Gradient => &mut self.gradients,
            Purpose::GatheredWeight => &mut self.gathered_weights,
            Purpose::HalfWeight => &mut self.half_weights,
            Purpose::Logits => &mut self.logits,
            Purpose::Received => &mut self.received,
            Purpose::Activation => &mut self.activations,
            Purpose::Input => &mut self.inputs,
        }
    }
}

/// What a value of the work region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Gradient,
    GatheredWeight,
    HalfWeight,
    Logits,
    Received,
    Activation,
    Input,
}

impl Layout {
    /// Bytes of a region.
    pub fn bytes(&self, region: Region) -> usize {
        self.region_bytes.get(&region).copied().unwrap_or(0)
    }

    /// Bytes of all regions.
    pub fn total_bytes(&self) -> usize {
        self.region_bytes.values().sum()
    }
}

/// Places every value for the device that runs the program.
///
/// # Panics
/// If the target's alignment is not a power of two of at least [`ALIGN_BYTES`].
pub fn memory(program: &Program, target: &dyn Target) -> Layout {
    let align = target.align();
    assert!(align.is_power_of_two() && align >= ALIGN_BYTES, "buffers cannot be aligned to {align} bytes");
    let mut locations: Vec<Option<BufferLocation>> = vec![None; program.values.len()];
    let mut region_bytes = BTreeMap::new();
    for region in Region::ALL.into_iter().filter(|region| *region != Region::Work) {
        let mut offset = 0;
        for (i, value) in program.values.iter().enumerate().filter(|(_, v)| region_of(v) == region) {
            if !matches!(value.kind, Kind::View(_)) {
                locations[i] = Some(BufferLocation { region, offset });
                offset += padded(value, align);
            }
        }
        region_bytes.insert(region, offset);
    }
    // The first one of equals.
    let work = Fit::ALL.map(|fit| Work::placed(program, align, fit));
    let work = work.into_iter().min_by_key(|work| work.free.high_water).expect("there are ways to fit");
    for (location, offset) in locations.iter_mut().zip(&work.offsets) {
        *location = location.or(offset.map(|offset| BufferLocation { region: Region::Work, offset }));
    }
    for (i, value) in program.values.iter().enumerate() {
        if let Kind::View(of) = value.kind {
            locations[i] = locations[of.0 as usize];
        }
    }
    let scratch = program.instrs.iter().map(|i| target.scratch_bytes(program, i)).max().unwrap_or(0);
    let scratch = scratch.next_multiple_of(align);
    region_bytes.insert(Region::Work, work.free.high_water + scratch);
    let fragmentation = work.free.high_water - work.peak.live();
    let work_peak = WorkPeak { fragmentation, scratch, ..work.peak };
    Layout { locations, region_bytes, scratch: (work.free.high_water, scratch), work_peak }
}

fn region_of(value: &Value) -> Region {
    match value.kind {
        Kind::Parameter | Kind::View(_) => Region::Parameters,
        Kind::OptimizerState => Region::OptimizerState,
        Kind::OffloadedState => Region::Offloaded,
        Kind::Constant => Region::Constants,
        Kind::Cache => Region::Cache,
        Kind::Input | Kind::Gradient | Kind::Activation | Kind::Output => Region::Work,
    }
}

fn padded(value: &Value, align: usize) -> usize {
    value.size_bytes().max(1).next_multiple_of(align)
}

/// The purpose of each value.
fn purposes(program: &Program) -> Vec<Purpose> {
    let of_kind = |value: &Value| match value.kind {
        Kind::Gradient => Purpose::Gradient,
        Kind::Activation => Purpose::Activation,
        _ => Purpose::Input,
    };
    let mut purposes: Vec<Purpose> = program.values.iter().map(of_kind).collect();
    for instr in &program.instrs {
        let op = instr.op.operation();
        let logits = instr.reads.first().filter(|_| op.reads_logits());
        let gradient = op.gradient_of_logits().map(|at| &instr.writes[at]);
        logits.into_iter().chain(gradient).for_each(|v| purposes[v.0 as usize] = Purpose::Logits);
        for (i, to) in instr.writes.iter().enumerate() {
            let from = instr.reads.get(i).map(|v| (program.value(*v).kind, purposes[v.0 as usize]));
            let purpose = moved(&instr.op, from, program.value(*to));
            if let Some(purpose) = purpose.filter(|_| program.value(*to).kind == Kind::Activation) {
                purposes[to.0 as usize] = purpose;
            }
        }
    }
    purposes
}

/// The purpose of a value that is a copy of another one, or comes from other ranks.
fn moved(op: &Op, from: Option<(Kind, Purpose)>, to: &Value) -> Option<Purpose> {
    let is_weight = |(kind, purpose): &(Kind, Purpose)| {
        matches!(kind, Kind::Parameter | Kind::View(_))
            || matches!(purpose, Purpose::GatheredWeight | Purpose::HalfWeight)
    };
    let weight = if to.dtype == DType::F32 { Purpose::GatheredWeight } else { Purpose::HalfWeight };
    match op {
        Op::Cast(op::Cast) => from.and_then(|from| match from.1 {
            Purpose::Logits => Some(Purpose::Logits),
            _ => is_weight(&from).then_some(weight),
        }),
        Op::Unpack(_) => Some(weight),
        // Sums over ranks take the place of their terms.
        Op::Start(op::Start(Collective {
            kind: CollectiveKind::AllReduce | CollectiveKind::ReduceScatter, ..
        })) => None,
        Op::Start(_) => Some(if from.as_ref().is_some_and(is_weight) { weight } else { Purpose::Received }),
        _ => None,
    }
}

struct Work {
    align: usize,
    purposes: Vec<Purpose>,
    offsets: Vec<Option<usize>>,
    /// Index of the last instruction that touches each value; inputs and outputs stay to the end.
    last_use: Vec<usize>,
    /// Where each collective is awaited.
    awaited_at: BTreeMap<(Stream, u32), usize>,
    /// Operands of collectives in flight, which peers may still read, by the await that frees them.
    in_use: BTreeMap<usize, Vec<ValueId>>,
    free: FreeList,
    live: WorkPeak,
    peak: WorkPeak,
}

impl Work {
    /// Places all values of a program that live within a step.
    fn placed(program: &Program, align: usize, fit: Fit) -> Work {
        let mut work = Work::new(program, align, fit);
        for (i, instr) in program.instrs.iter().enumerate() {
            work.step(program, i, instr);
        }
        work
    }

    fn new(program: &Program, align: usize, fit: Fit) -> Work {
        let mut last_use = vec![0; program.values.len()];
        let mut awaited_at = BTreeMap::new();
        for (i, instr) in program.instrs.iter().enumerate() {
            instr.reads.iter().chain(&instr.writes).for_each(|v| last_use[program.storage(*v).0 as usize] = i);
            if let Op::Await(op::Await(c)) = instr.op {
                awaited_at.insert((c.stream(), c.sequence), i);
            }
        }
        let mut work = Work {
            align,
            purposes: purposes(program),
            offsets: vec![None; program.values.len()],
            last_use,
            awaited_at,
            in_use: BTreeMap::new(),
            free: FreeList { fit, runs: BTreeMap::new(), high_water: 0 },
            live: WorkPeak::default(),
            peak: WorkPeak::default(),
        };
        for b in &program.bindings {
            work.last_use[b.value.0 as usize] = usize::MAX;
            if program.value(b.value).kind == Kind::Input {
                work.allocate(program, b.value);
            }
        }
        work
    }

    fn step(&mut self, program: &Program, i: usize, instr: &Instr) {
        let mut taken_over: Vec<ValueId> = Vec::new();
        for (r, w) in instr.op.in_place_pairs(instr.reads.len()) {
            let (old, new) = (instr.reads[r], instr.writes[w]);
            if self.may_take_over(program, i, instr, old, new) && !taken_over.contains(&old) {
                self.offsets[new.0 as usize] = self.offsets[old.0 as usize];
                self.retag(old, new, padded(program.value(old), self.align));
                taken_over.push(old);
            }
        }
        for v in &instr.writes {
            if region_of(program.value(*v)) == Region::Work && self.offsets[v.0 as usize].is_none() {
                self.allocate(program, *v);
            }
        }
        if self.live.live() > self.peak.live() {
            self.peak = self.live;
        }
        if let Op::Start(op::Start(c)) = instr.op {
            self.keep_operands(program, instr, (c.stream(), c.sequence), &taken_over);
        }
        let freed = self.in_use.remove(&i).unwrap_or_default();
        let used = instr.reads.iter().chain(&instr.writes).map(|v| program.storage(*v));
        let mut touched: Vec<ValueId> = used.chain(freed).collect();
        touched.sort_unstable();
        touched.dedup();
        for v in touched {
            let value = program.value(v);
            let ends = self.last_use[v.0 as usize] == i && region_of(value) == Region::Work;
            if let Some(offset) = self.offsets[v.0 as usize].filter(|_| ends && !taken_over.contains(&v)) {
                self.free.release(offset, padded(value, self.align));
                *self.live.of(self.purposes[v.0 as usize]) -= padded(value, self.align);
            }
        }
    }

    /// Operands live at least until their collective is awaited, except those whose location the result took over.
    fn keep_operands(&mut self, program: &Program, instr: &Instr, collective: (Stream, u32), taken_over: &[ValueId]) {
        let Some(at) = self.awaited_at.get(&collective).copied() else { return };
        for v in instr.reads.iter().map(|v| program.storage(*v)).filter(|v| !taken_over.contains(v)) {
            if self.last_use[v.0 as usize] <= at {
                self.last_use[v.0 as usize] = at;
                self.in_use.entry(at).or_default().push(v);
            }
        }
    }

    fn may_take_over(&self, program: &Program, i: usize, instr: &Instr, old: ValueId, new: ValueId) -> bool {
        let (a, b) = (program.value(old), program.value(new));
        let transient = matches!(a.kind, Kind::Activation | Kind::Gradient) && region_of(b) == Region::Work;
        let once = instr.reads.iter().filter(|v| program.storage(**v) == old).count() == 1;
        let dies = self.last_use[old.0 as usize] == i;
        transient && once && dies && a.size_bytes() == b.size_bytes() && self.offsets[new.0 as usize].is_none()
    }

    fn allocate(&mut self, program: &Program, v: ValueId) {
        let value = program.value(v);
        if self.offsets[v.0 as usize].is_none() {
            self.offsets[v.0 as usize] = Some(self.free.take(padded(value, self.align)));
            *self.live.of(self.purposes[v.0 as usize]) += padded(value, self.align);
        }
    }

    fn retag(&mut self, old: ValueId, new: ValueId, bytes: usize) {
        *self.live.of(self.purposes[old.0 as usize]) -= bytes;
        *self.live.of(self.purposes[new.0 as usize]) += bytes;
    }
}

/// Which of the free runs that are long enough a value gets.
#[derive(Clone, Copy, Debug)]
enum Fit {
    /// The shortest.
    Best,
    /// The first.
    First,
}

impl Fit {
    const ALL: [Fit; 2] = [Fit::Best, Fit::First];
}

/// Free runs below the high-water mark: offset → length.
struct FreeList {
    fit: Fit,
    runs: BTreeMap<usize, usize>,
    high_water: usize,
}

impl FreeList {
    fn take(&mut self, bytes: usize) -> usize {
        let mut fitting = self.runs.iter().filter(|(_, len)| **len >= bytes);
        let chosen = match self.fit {
            Fit::Best => fitting.min_by_key(|(_, len)| **len),
            Fit::First => fitting.next(),
        };
        if let Some((&offset, &len)) = chosen {
            self.runs.remove(&offset);
            if len > bytes {
                self.runs.insert(offset + bytes, len - bytes);
            }
            return offset;
        }
        // Grow from the last free run if it reaches the end.
        let tail = self.runs.iter().next_back().map(|(o, l)| (*o, *l)).filter(|(o, l)| o + l == self.high_water);
        let offset = tail.map_or(self.high_water, |(o, _)| o);
        self.runs.remove(&offset);
        self.high_water = offset + bytes;
        offset
    }

    fn release(&mut self, offset: usize, bytes: usize) {
        let (mut start, mut len) = (offset, bytes);
        if let Some((&o, &l)) = self.runs.range(..offset).next_back().filter(|(o, l)| **o + **l == offset) {
            self.runs.remove(&o);
            (start, len) = (o, l + bytes);
        }
        if let Some(l) = self.runs.remove(&(offset + bytes)) {
            len += l;
        }
        self.runs.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Phase, Site};
    use crate::target::Nowhere;

    /// A program from a script: `(name, units)` writes a value of `64 * units` bytes, and `(name, 0)` is the last instruction that reads
    /// it.
    fn program(script: &[(&str, usize)]) -> Program {
        let (mut p, site) = (Program::default(), Site { phase: Phase::Forward, block: None, microbatch: 0 });
        let [from, to] = ["from", "to"].map(|name| p.add_value(name, &[1], DType::F32, Kind::Parameter));
        let mut values: BTreeMap<&str, ValueId> = BTreeMap::new();
        for (name, units) in script {
            if *units == 0 {
                p.push(Op::Cast(op::Cast), vec![values[name]], vec![to], site);
                continue;
            }
            let value = p.add_value(*name, &[16 * units], DType::F32, Kind::Activation);
            p.push(Op::Cast(op::Cast), vec![from], vec![value], site);
            values.insert(name, value);
        }
        // All that is not freed lives to the end.
        let rest = values.iter().filter(|(name, _)| !script.contains(&(**name, 0))).map(|(_, v)| *v).collect();
        p.push(Op::Sum(op::Sum), rest, vec![to], site);
        p
    }

    #[test]
    fn values_are_placed_by_the_fit_that_needs_less_memory() {
        // `x` has the length of the second gap. Best fit puts it there and keeps the first for `y`.
        let best = program(&[("a", 3), ("b", 1), ("c", 2), ("d", 1), ("a", 0), ("c", 0), ("x", 2), ("y", 3)]);
        // The second gap is at the end, where `y` could grow from it.
        let first = program(&[("a", 3), ("b", 1), ("c", 2), ("a", 0), ("c", 0), ("x", 2), ("y", 4)]);
        let units = |p: &Program| {
            let of = |fit| Work::placed(p, 64, fit).free.high_water / 64;
            (Fit::ALL.map(of), memory(p, &Nowhere::default()).bytes(Region::Work) / 64)
        };

        assert_eq!((units(&best), units(&first)), (([7, 10], 7), ([10, 8], 8)));
    }
}
