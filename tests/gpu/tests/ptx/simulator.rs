//! One case in the PTX interpreter: the lowering's commands over memory in which each operand, each result and each buffer of
//! the scratch is an allocation of its own. Results and scratch are poisoned. Copies, zeros and matrix products, which
//! NVIDIA's libraries do on a GPU, are done here, and cuDNN's attention in [`super::library`].

use crate::compiler::Compiler;
use crate::elements::{decode, decode_one, encode, joined, split};
use crate::library;
use crate::programs::Gpu;
use phalanx_cuda::work::{
    KernelLaunch, Matrix, MatrixProduct, Work, WorkOfInstr, work_beside_cudnn, work_of, work_of_program,
};
use phalanx_gpu::case::Case;
use phalanx_ptxsim::{Arg, Device, Ptr};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::passes::commit::StepPhases;
use phalanx_strategies::passes::memory as pass;
use phalanx_strategies::program::{DType, Instr, Kind, Program, Value, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Where the lowering places its scratch: addresses that no argument has by chance, for buffers that are allocated elsewhere.
const SCRATCH: u64 = 1 << 60;

/// What a case left behind.
pub struct Outcome {
    /// The elements of every result.
    pub results: Vec<Vec<f64>>,
    /// Everything that is wrong besides results.
    pub findings: Vec<String>,
}

/// Runs a case. With `reuses`, results are in the memory of operands wherever the memory pass may place them there.
pub fn run(compiler: &mut Compiler, case: &Case, reuses: bool) -> Outcome {
    let lower = |p: &Program, place: &dyn Fn(ValueId) -> u64| Some(work_of(p, &p.instrs[0], place, SCRATCH));
    run_lowered(compiler, case, reuses, lower).expect("every case has kernels")
}

/// Runs a case through cuDNN, if it may have a plan.
pub fn run_beside_cudnn(compiler: &mut Compiler, case: &Case) -> Option<Outcome> {
    let doc_start: Vec<i32> = case.reads.get(1)?.elements.iter().map(|start| *start as i32).collect();
    let lower =
        |p: &Program, place: &dyn Fn(ValueId) -> u64| work_beside_cudnn(p, &p.instrs[0], &doc_start, place, SCRATCH);
    run_lowered(compiler, case, false, lower)
}

fn run_lowered(
    compiler: &mut Compiler,
    case: &Case,
    reuses: bool,
    lower: impl Fn(&Program, &dyn Fn(ValueId) -> u64) -> Option<WorkOfInstr>,
) -> Option<Outcome> {
    let (program, given, writes) = case.program(false);
    let (mut memory, mut places) = (Memory::default(), BTreeMap::new());
    let placed = Placed::new(case, &program, given, writes, reuses, &mut memory, &mut places);

    let work = lower(&program, &|v| places[&v].address())?;
    let mut run = Execution { memory, scratch: Scratch::new(work.scratch), findings: Vec::new() };
    work.work.iter().for_each(|work| run.work(compiler, work));

    let results = placed.results(&places, &mut run);
    Some(Outcome { results, findings: run.findings })
}

/// Runs cases as the instructions of one program, which share launches. Returns the outcomes, the first of them with all
/// findings; and the number of launches.
pub fn run_together(compiler: &mut Compiler, cases: &[Case]) -> (Vec<Outcome>, usize) {
    let (mut memory, mut places, mut all, mut placed) =
        (Memory::default(), BTreeMap::new(), Program::default(), Vec::new());
    let mut scalars = BTreeMap::new();
    for case in cases {
        let (program, given, writes) = case.program(false);
        let offset = all.values.len() as u32;
        let shifted = |ids: Vec<ValueId>| -> Vec<ValueId> { ids.into_iter().map(|v| ValueId(v.0 + offset)).collect() };
        all.values.extend(program.values.into_iter().map(|value| match value.kind {
            Kind::View(of) => Value { kind: Kind::View(ValueId(of.0 + offset)), ..value },
            _ => value,
        }));
        let instrs = program.instrs.into_iter();
        all.instrs.extend(instrs.map(|i| Instr { reads: shifted(i.reads), writes: shifted(i.writes), ..i }));
        let next = Placed::new(case, &all, shifted(given), shifted(writes), false, &mut memory, &mut places);
        // Instructions share launches only if they have the same scalars.
        for (v, operand) in next.given.iter().zip(&case.reads).filter(|(_, operand)| operand.dtype == DType::F64) {
            let first = scalars.entry(encode(operand.dtype, &operand.elements)).or_insert(places[v]);
            places.insert(*v, *first);
        }
        placed.push(next);
    }
    let (n, layout) = (all.instrs.len(), pass::memory(&all, &Gpu));
    let scratch = vec![(SCRATCH, layout.scratch.1)];
    let c = Compiled::new(all, layout, StepPhases { apply: 0, gather: 0, end: n });

    let work = work_of_program(&c, |v| places[&v].address(), SCRATCH);
    let mut run = Execution { memory, scratch: Scratch::new(scratch), findings: Vec::new() };
    work.iter().for_each(|work| run.work(compiler, work));

    let results: Vec<_> = placed.iter().map(|placed| placed.results(&places, &mut run)).collect();
    let mut findings = run.findings;
    let outcome = |results| Outcome { results, findings: std::mem::take(&mut findings) };
    (results.into_iter().map(outcome).collect(), work.len())
}

/// A case whose operands and results are in memory.
struct Placed<'a> {
    case: &'a Case,
    given: Vec<ValueId>,
    writes: Vec<ValueId>,
    /// Operands whose memory a result takes.
    reused: BTreeSet<usize>,
}

impl<'a> Placed<'a> {
    fn new(
        case: &'a Case,
        program: &Program,
        given: Vec<ValueId>,
        writes: Vec<ValueId>,
        reuses: bool,
        memory: &mut Memory,
        places: &mut BTreeMap<ValueId, Ptr>,
    ) -> Placed<'a> {
        for (i, v) in given.iter().enumerate() {
            places.insert(*v, memory.written(&bytes_of(case, i)));
        }
        let mut reused: BTreeSet<usize> = case.in_place.iter().map(|(read, _)| *read).collect();
        for (i, v) in writes.iter().enumerate().filter(|(_, v)| !given.contains(v)) {
            let value = program.value(*v);
            let is_like = |read: usize| {
                let operand = program.value(given[read]);
                (operand.n_elements(), operand.dtype) == (value.n_elements(), value.dtype)
            };
            let pairs = case.op.in_place_pairs(given.len());
            let pair = pairs.iter().find(|(read, write)| *write == i && is_like(*read) && !reused.contains(read));
            let place = match pair.filter(|_| reuses) {
                Some((read, _)) => {
                    reused.insert(*read);
                    places[&given[*read]]
                }
                None => memory.poisoned(value.size_bytes()),
            };
            places.insert(*v, place);
        }
        Placed { case, given, writes, reused }
    }

    /// The results; reports what was not written, and operands that were.
    fn results(&self, places: &BTreeMap<ValueId, Ptr>, run: &mut Execution) -> Vec<Vec<f64>> {
        let Placed { case, given, writes, reused } = self;
        for i in (0..case.reads.len()).filter(|i| !reused.contains(i)) {
            if run.memory.device.bytes(places[&given[i]]) != bytes_of(case, i) {
                run.find(format!("operand {i} was overwritten"));
            }
        }
        let mut results = Vec::new();
        for (i, (v, (_, dtype))) in writes.iter().zip(&case.writes).enumerate() {
            if let Some(at) = run.memory.device.written(places[v]).iter().position(|written| !written) {
                run.find(format!("byte {at} of result {i} was not written"));
            }
            let bytes = run.memory.device.bytes(places[v]);
            let is_split = case.split.is_some_and(|read| given[read] == *v);
            results.push(if is_split { decode(*dtype, &joined(bytes)) } else { decode(*dtype, bytes) });
        }
        results
    }
}

/// The bytes of an operand in memory.
fn bytes_of(case: &Case, read: usize) -> Vec<u8> {
    let operand = &case.reads[read];
    let bytes = encode(operand.dtype, &operand.elements);
    if case.split == Some(read) { split(&bytes) } else { bytes }
}

/// The device, and the sizes of its allocations.
#[derive(Default)]
struct Memory {
    device: Device,
    allocations: BTreeMap<u64, (Ptr, usize)>,
}

impl Memory {
    fn written(&mut self, bytes: &[u8]) -> Ptr {
        let ptr = self.device.alloc_written(bytes);
        self.keep(ptr, bytes.len())
    }

    fn poisoned(&mut self, bytes: usize) -> Ptr {
        let ptr = self.device.alloc(bytes);
        self.keep(ptr, bytes)
    }

    fn keep(&mut self, ptr: Ptr, bytes: usize) -> Ptr {
        self.allocations.insert(ptr.address(), (ptr, bytes));
        ptr
    }

    /// A pointer to `bytes` bytes of one allocation.
    fn ptr(&self, address: u64, bytes: usize) -> Ptr {
        let (start, (ptr, size)) = self.allocations.range(..=address).next_back().expect("an address of an allocation");
        let offset = (address - start) as usize;
        assert!(offset + bytes <= *size, "bytes {offset}..{} of an allocation of {size}", offset + bytes);
        ptr.offset(offset)
    }
}

/// The buffers of the scratch; each is allocated when it is first used.
struct Scratch {
    /// First address of each as the lowering has it, bytes, and where it is.
    buffers: BTreeMap<u64, (usize, Option<Ptr>)>,
    end: u64,
}

impl Scratch {
    fn new(buffers: Vec<(u64, usize)>) -> Scratch {
        let end = buffers.iter().map(|(at, bytes)| at + *bytes as u64).max().unwrap_or(SCRATCH);
        // Of buffers at the same address, all but the last are empty.
        Scratch { buffers: buffers.into_iter().map(|(at, bytes)| (at, (bytes, None))).collect(), end }
    }

    /// Where an address of the scratch is; every other word is returned as it is.
    fn resolve(&mut self, word: u64, memory: &mut Memory) -> u64 {
        if !(SCRATCH..=self.end).contains(&word) {
            return word;
        }
        let (at, (bytes, ptr)) =
            self.buffers.range_mut(..=word).next_back().expect("the first buffer begins the scratch");
        let offset = (word - at) as usize;
        assert!(offset <= *bytes, "byte {offset} of a buffer of {bytes} in the scratch");
        ptr.get_or_insert_with(|| memory.poisoned(*bytes)).address() + offset as u64
    }
}

pub struct Execution {
    memory: Memory,
    scratch: Scratch,
    findings: Vec<String>,
}

impl Execution {
    fn work(&mut self, compiler: &mut Compiler, work: &Work) {
        match work {
            Work::Launch(launch) => self.launch(compiler, launch),
            Work::Copy { from, to, bytes } => {
                let (from, to) = (self.place(*from, *bytes), self.place(*to, *bytes));
                self.must_be_written("a copy", from, *bytes);
                let copied = self.memory.device.bytes(from)[..*bytes].to_vec();
                self.memory.device.write(to, &copied);
            }
            Work::Zero { at, bytes } => {
                let at = self.place(*at, *bytes);
                self.memory.device.write(at, &vec![0; *bytes]);
            }
            Work::Product(product) => self.product(product),
            Work::Attention(call) => library::attention(self, call),
        }
    }

    fn place(&mut self, address: u64, bytes: usize) -> Ptr {
        let address = self.scratch.resolve(address, &mut self.memory);
        self.memory.ptr(address, bytes)
    }

    fn must_be_written(&mut self, what: &str, at: Ptr, bytes: usize) {
        if let Some(byte) = self.memory.device.written(at)[..bytes].iter().position(|written| !written) {
            self.find(format!("{what} reads byte {byte}, which nothing has written"));
        }
    }

    /// Reports each finding once: a product reads its operands element by element.
    fn find(&mut self, finding: String) {
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    fn launch(&mut self, compiler: &mut Compiler, launch: &KernelLaunch) {
        let kernel = compiler.kernel(launch);
        let sizes: Vec<usize> = kernel.param_bytes().collect();
        assert_eq!(sizes.len(), launch.args.len(), "{}: parameters and arguments", launch.kernel);
        let mut args = Vec::with_capacity(sizes.len());
        for (i, (words, size)) in launch.args.iter().zip(sizes).enumerate() {
            assert_eq!(
                words.len(),
                size.div_ceil(8),
                "{}: words of argument {i}, whose parameter has {size} bytes",
                launch.kernel
            );
            let words = words.iter().map(|word| self.scratch.resolve(*word, &mut self.memory));
            let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            assert!(
                bytes[size..].iter().all(|byte| *byte == 0),
                "{}: argument {i} has more than {size} bytes",
                launch.kernel
            );
            bytes.truncate(size);
            args.push(Arg::Bytes(bytes));
        }
        let (threads, shared_bytes) = ([launch.threads, 1, 1], launch.shared_bytes as usize);
        let run = kernel.launch(&mut self.memory.device, launch.grid, threads, shared_bytes, &args);
        let run = run.unwrap_or_else(|e| panic!("{}: {e}", launch.kernel));
        self.findings.extend(run.findings.iter().map(ToString::to_string));
    }

    fn product(&mut self, product: &MatrixProduct) {
        let MatrixProduct { m, n, k, a, b, scales, c, alpha, added, bias } = *product;
        let (mut a, mut b) = (self.matrix(&a, m, k), self.matrix(&b, k, n));
        if let Some([of_rows, of_columns]) = scales {
            let vector = |address| Matrix { address, stride: m.max(n), dtype: DType::F32, is_transposed: false };
            let (rows, columns) = (self.matrix(&vector(of_rows), 1, m), self.matrix(&vector(of_columns), 1, n));
            a.chunks_mut(k).zip(rows).for_each(|(row, scale)| row.iter_mut().for_each(|x| *x *= scale));
            b.chunks_mut(n).for_each(|row| row.iter_mut().zip(&columns).for_each(|(x, scale)| *x *= scale));
        }
        let row_of =
            |first: u64, i: usize| Matrix { address: first + (i * c.stride * c.dtype.size_bytes()) as u64, ..c };
        let bias = bias.map(|address| self.matrix(&Matrix { address, dtype: DType::F32, ..c }, 1, n));
        for i in 0..m {
            let before = added.map(|first| self.matrix(&row_of(first, i), 1, n));
            let plus = |row: &Option<Vec<f64>>, j: usize| row.as_ref().map_or(0.0, |row| row[j]);
            let sum = |j: usize| (0..k).map(|x| a[i * k + x] * b[x * n + j]).sum::<f64>();
            let value = |j: usize| f64::from(alpha) * sum(j) + plus(&before, j) + plus(&bias, j);
            self.write(row_of(c.address, i).address, c.dtype, &(0..n).map(value).collect::<Vec<f64>>());
        }
    }

    /// Writes elements one after the other.
    pub fn write(&mut self, address: u64, dtype: DType, elements: &[f64]) {
        let bytes = encode(dtype, elements);
        let to = self.place(address, bytes.len());
        self.memory.device.write(to, &bytes);
    }

    /// Numbers of 8 bytes.
    pub fn longs(&mut self, address: u64, n: usize) -> Vec<i64> {
        let at = self.place(address, 8 * n);
        self.must_be_written("a library", at, 8 * n);
        let bytes = self.memory.device.bytes(at)[..8 * n].chunks_exact(8);
        bytes.map(|bytes| i64::from_le_bytes(bytes.try_into().expect("8 bytes"))).collect()
    }

    /// The elements of `op(matrix)`, which is [rows, cols].
    pub fn matrix(&mut self, matrix: &Matrix, rows: usize, cols: usize) -> Vec<f64> {
        let size = matrix.dtype.size_bytes();
        let mut elements = Vec::with_capacity(rows * cols);
        for (i, j) in (0..rows).flat_map(|i| (0..cols).map(move |j| (i, j))) {
            let (row, col) = if matrix.is_transposed { (j, i) } else { (i, j) };
            let at = self.place(matrix.address + ((row * matrix.stride + col) * size) as u64, size);
            self.must_be_written("a library", at, size);
            elements.push(decode_one(matrix.dtype, self.memory.device.bytes(at)));
        }
        elements
    }
}
