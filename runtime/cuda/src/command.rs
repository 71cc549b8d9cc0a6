//! What a machine enqueues for an instruction: a list of commands, made once and replayed in every step.

use crate::cudnn::{Call, PlannedCall};
use crate::gpu::Gpu;
use crate::kernels::{Instance, Loaded, PROGRESS};
use crate::product::{PlannedProduct, Product};
use phalanx_strategies::program::DType;

/// A value in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    pub(crate) address: u64,
    /// Product of all dims but the last.
    pub(crate) rows: usize,
    /// The last dim; 1 for a scalar.
    pub(crate) cols: usize,
    pub(crate) dtype: DType,
}

impl Buffer {
    /// Elements.
    pub(crate) const fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.len() * self.dtype.size_bytes()
    }

    /// The same memory from element `first` on, as one row of `len` elements.
    pub(crate) fn elements(&self, first: usize, len: usize) -> Buffer {
        assert!(first + len <= self.len(), "elements {first}..{} of {}", first + len, self.len());
        let address = self.address + (first * self.dtype.size_bytes()) as u64;
        Buffer { address, rows: 1, cols: len, dtype: self.dtype }
    }

    /// Whether both are the same memory.
    pub(crate) fn is(&self, other: &Buffer) -> bool {
        self.address == other.address
    }
}

/// Arguments of a kernel, in order, as `cuLaunchKernel` wants them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Args {
    /// The arguments, each from a multiple of 8 bytes on.
    words: Vec<u64>,
    /// First word of each argument.
    starts: Vec<usize>,
    /// What the first two arguments are, if they are a table of runs and its length.
    runs: Option<Runs>,
}

/// A table of runs of elements, each with blocks of its own (`kernels/runs.cuh`): launches of several runs can become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Runs {
    /// Words of a run. The last one is the first block behind those of the run.
    width: usize,
    /// Runs for which the table has room.
    capacity: usize,
    /// Runs in it.
    n: usize,
}

impl Args {
    pub(crate) fn new() -> Args {
        Args::default()
    }

    /// A table of `capacity` runs, with one run in it that has `n_blocks` blocks. `run` are its words without the last one.
    pub(crate) fn of_run(run: &[u64], n_blocks: usize, capacity: usize) -> Args {
        let width = run.len() + 1;
        let mut table = vec![0; width * capacity];
        table[..run.len()].copy_from_slice(run);
        table[run.len()] = n_blocks as u64;
        let args = Args::new().words(&table).int(1);
        Args { runs: Some(Runs { width, capacity, n: 1 }), ..args }
    }

    /// Appends the runs of `other` if all other arguments are equal and there is room; whether it did.
    fn absorb(&mut self, other: &Args) -> bool {
        let (Some(own), Some(more)) = (self.runs, other.runs) else { return false };
        let table_len = own.width * own.capacity;
        let is_same_kind = (own.width, own.capacity) == (more.width, more.capacity)
            && self.words[table_len + 1..] == other.words[table_len + 1..];
        if !is_same_kind || own.n + more.n > own.capacity {
            return false;
        }
        let (used, added) = (own.n * own.width, more.n * own.width);
        let n_blocks = self.words[used - 1];
        self.words[used..used + added].copy_from_slice(&other.words[..added]);
        self.words[used..used + added].chunks_mut(own.width).for_each(|run| run[own.width - 1] += n_blocks);
        let n = own.n + more.n;
        self.words[table_len] = n as u64;
        self.runs = Some(Runs { n, ..own });
        true
    }

    /// A pointer to a value.
    pub(crate) fn ptr(self, buffer: Buffer) -> Args {
        self.word(buffer.address)
    }

    /// A pointer to a value, or null.
    pub(crate) fn ptr_or_null(self, buffer: Option<Buffer>) -> Args {
        self.word(buffer.map_or(0, |b| b.address))
    }

    /// An `int` that holds a size or an index.
    ///
    /// # Panics
    /// If it has more than 31 bits: kernels take larger sizes as `long long`.
    pub(crate) fn int(self, value: usize) -> Args {
        let value = i32::try_from(value).expect("kernels take sizes above 2^31 as long long");
        self.word(u64::from(value as u32))
    }

    /// A `long long`.
    pub(crate) fn long(self, value: usize) -> Args {
        self.word(value as u64)
    }

    /// An `unsigned`.
    pub(crate) fn bits(self, value: u32) -> Args {
        self.word(u64::from(value))
    }

    /// A `float`.
    pub(crate) fn float(self, value: f32) -> Args {
        self.word(u64::from(value.to_bits()))
    }

    /// A `double`.
    pub(crate) fn double(self, value: f64) -> Args {
        self.word(value.to_bits())
    }

    /// A struct of 8-byte words, by value: pointers, `long long`s or `double`s.
    pub(crate) fn words(mut self, words: &[u64]) -> Args {
        self.starts.push(self.words.len());
        self.words.extend_from_slice(words);
        self
    }

    /// The words of each argument.
    pub(crate) fn each(&self) -> impl Iterator<Item = &[u64]> {
        let ends = self.starts.iter().skip(1).copied().chain([self.words.len()]);
        self.starts.iter().zip(ends).map(|(start, end)| &self.words[*start..end])
    }

    fn word(self, word: u64) -> Args {
        self.words(&[word])
    }

    /// Pointers to the arguments; valid while `self` is neither moved out of its memory nor changed.
    pub(crate) fn pointers(&mut self) -> Vec<*mut std::ffi::c_void> {
        let base = self.words.as_mut_ptr();
        // SAFETY: every start is an index of the vector.
        self.starts.iter().map(|start| unsafe { base.add(*start) }.cast()).collect()
    }
}

/// A kernel launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    /// The kernel.
    pub(crate) kernel: Instance,
    /// Blocks in each direction.
    pub(crate) grid: [u32; 3],
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared_bytes: u32,
    /// Its arguments.
    pub(crate) args: Args,
}

impl Launch {
    /// A command that writes `place` where the host reads it, as a sign of progress between marks. `place` differs from those of
    /// its neighbours. It is a kernel, since not every driver captures writes of words into graphs.
    pub(crate) fn of_place(gpu: &Gpu, place: u32) -> Launch {
        let args = Args::new().words(&[gpu.place_word()]).bits(place);
        Launch { kernel: Instance::of(PROGRESS, "mark_place"), grid: [1; 3], threads: 1, shared_bytes: 0, args }
    }

    /// Whether it covers runs of elements, so that it may absorb others.
    pub(crate) const fn has_runs(&self) -> bool {
        self.args.runs.is_some()
    }

    /// Takes over the runs of another launch of the same kernel, if everything else is equal and there is room; whether it did.
    pub(crate) fn absorb(&mut self, other: &Launch) -> bool {
        let is_same = (&self.kernel, self.threads, self.shared_bytes, self.grid[1..] == other.grid[1..])
            == (&other.kernel, other.threads, other.shared_bytes, true);
        if !is_same || !self.args.absorb(&other.args) {
            return false;
        }
        self.grid[0] += other.grid[0];
        true
    }
}

/// One command, before kernels are compiled and products planned.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Command {
    /// Launches a kernel.
    Launch(Launch),
    /// Copies between values on the device.
    Copy { from: u64, to: u64, bytes: usize },
    /// Fills memory with zeros.
    Zero { at: u64, bytes: usize },
    /// Multiplies matrices.
    Product(Product),
    /// Runs attention through cuDNN.
    Attention(Call),
}

/// A command that can be enqueued without preparation.
#[derive(Debug)]
pub(crate) enum Ready {
    Launch { kernel: Loaded, launch: Launch, pointers: Vec<*mut std::ffi::c_void> },
    Copy { from: u64, to: u64, bytes: usize },
    Zero { at: u64, bytes: usize },
    Product(PlannedProduct),
    Attention(PlannedCall),
}

// SAFETY: the pointers point into the launch's own arguments, on the heap; kernels are handles of the driver.
unsafe impl Send for Ready {}
