//! Updates of parameters by rules that work element by element, or in blocks of elements.

use super::{BLOCKS_MAX, Lowering, THREADS};
use crate::command::{Args, Buffer};
use crate::kernels::{Instance, OPTIMIZER};
use phalanx_strategies::optimizer::{AdamW, Lion, N_SCALARS, OptimizerSpec, STATE_BLOCK, Sgd};
use phalanx_strategies::program::{Blocks, DType, Hyper, Update};

/// Elements of a thread at a time.
const WIDTH: usize = 4;
/// Runs of one launch.
const RUNS: usize = 70;

/// The elements of a weight that an update changes.
#[derive(Clone, Copy, Debug)]
struct Weights {
    /// All of each element; of a split weight, its bf16 number.
    first: Buffer,
    /// What the bf16 numbers of a split weight leave.
    rest: Option<Buffer>,
}

impl Weights {
    fn new(weight: Buffer, is_split: bool) -> Weights {
        if !is_split {
            return Weights { first: weight, rest: None };
        }
        let first = Buffer { dtype: DType::Bf16, ..weight };
        Weights { first, rest: Some(Buffer { address: weight.address + first.bytes() as u64, ..first }) }
    }

    fn elements(self, first: usize, len: usize) -> Weights {
        let part = |of: Buffer| of.elements(first, len);
        Weights { first: part(self.first), rest: self.rest.map(part) }
    }

    /// The two addresses, as kernels take them.
    fn addresses(self) -> [u64; 2] {
        [self.first.address, self.rest.map_or(0, |rest| rest.address)]
    }
}

/// The scalars of an update, which stay in device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) lr: Buffer,
    /// Scalars of the rule.
    pub(super) scalars: Buffer,
    /// Factor of the gradient.
    pub(super) coefficient: Buffer,
}

impl Step {
    pub(super) fn new(update: &Update, hyper: Buffer, coefficient: Buffer) -> Step {
        let (lr, scalars) = (hyper.elements(update.rate, 1), hyper.elements(Hyper::RULE, N_SCALARS));
        Step { lr, scalars, coefficient }
    }
}

impl Lowering {
    /// `[p, state…, g, sums…, hyper, coefficient] -> [p, state…]`.
    pub(super) fn update(&mut self, update: &Update) {
        let operands = update.operands(&self.reads);
        let (g, step) = (*operands.grad, Step::new(update, *operands.hyper, *operands.coefficient));
        let p = Weights::new(self.writes[0], self.is_split).elements(update.first, g.len());
        match &update.rule {
            OptimizerSpec::AdamW(rule) => {
                let args = adamw(self.run_of(p, g), rule, step);
                self.launch_update("adamw", g.len(), args);
            }
            OptimizerSpec::AdamW8bit(rule) => self.adamw_8bit(&update.blocks, &rule.0, p, g, step),
            OptimizerSpec::Sgd(Sgd { momentum, weight_decay }) => {
                let args = self.run_of(p, g).ptr(step.lr).ptr(step.coefficient);
                self.launch_update("sgd", g.len(), args.float(*momentum as f32).float(*weight_decay as f32));
            }
            OptimizerSpec::Lion(Lion { beta1, beta2, weight_decay }) => {
                let args = self.run_of(p, g).ptr(step.lr).ptr(step.coefficient);
                self.launch_update("lion", g.len(), averages(averages(args, *beta1), *beta2).double(*weight_decay));
            }
            OptimizerSpec::Adafactor(rule) => self.adafactor(update, rule, p.first, step),
        }
    }

    /// `[p, state…, g, sums…, hyper, coefficient] -> [sums…]`.
    pub(super) fn update_sums(&mut self, update: &Update) {
        match &update.rule {
            OptimizerSpec::Adafactor(rule) => self.adafactor_sums(update, rule),
            rule => unreachable!("{} needs no sums over whole tensors", rule.name()),
        }
    }

    /// Updates the elements `p`, whose state is stored in blocks.
    fn adamw_8bit(&mut self, blocks: &Blocks, rule: &AdamW, p: Weights, g: Buffer, step: Step) {
        let [m, v] = self.writes[1..] else { unreachable!("{} tensors of state", self.writes.len() - 1) };
        let (mut first, mut first_word) = (0, 0);
        for run in &blocks.runs {
            let (n, n_words) = (run.n_elements, run.n_words());
            let (p, g) = (p.elements(first, n), g.elements(first, n));
            let [at, rest] = p.addresses();
            let [m, v] = [m, v].map(|state| state.elements(first_word, n_words));
            if run.is_coded {
                let args = adamw(Args::new().words(&[at]).words(&[rest]).ptr(m).ptr(v).ptr(g).long(n), rule, step);
                // A warp updates a block of state.
                let grid = [n.div_ceil(THREADS as usize / 32 * STATE_BLOCK).min(BLOCKS_MAX) as u32, 1, 1];
                self.launch(Instance::of(OPTIMIZER, "adamw_blocks"), grid, THREADS, 0, args);
            } else {
                let run = [at, rest, m.address, v.address, g.address, n as u64];
                self.launch_update("adamw", n, adamw(Args::of_run(&run, n_blocks(n), RUNS), rule, step));
            }
            (first, first_word) = (first + n, first_word + n_words);
        }
    }

    /// The kernels' table of runs.
    fn run_of(&self, p: Weights, g: Buffer) -> Args {
        let state = |i: usize| self.writes.get(1 + i).map_or(0, |state| state.address);
        let [at, rest] = p.addresses();
        Args::of_run(&[at, rest, state(0), state(1), g.address, g.len() as u64], n_blocks(g.len()), RUNS)
    }

    fn launch_update(&mut self, name: &'static str, n: usize, args: Args) {
        self.launch(Instance::of(OPTIMIZER, name), [n_blocks(n) as u32, 1, 1], THREADS, 0, args);
    }
}

/// Blocks for a run of `n` elements.
fn n_blocks(n: usize) -> usize {
    n.div_ceil(WIDTH * THREADS as usize).min(BLOCKS_MAX)
}

/// Appends the step's scalars and the hyperparameters of AdamW.
fn adamw(args: Args, rule: &AdamW, step: Step) -> Args {
    let AdamW { beta1, beta2, eps, weight_decay } = *rule;
    let args = args.ptr(step.lr).ptr(step.scalars).ptr(step.coefficient);
    averages(averages(args, beta1), beta2).float(eps as f32).double(weight_decay)
}

/// The weights of an exponential average, rounded as on the CPU.
fn averages(args: Args, beta: f64) -> Args {
    args.float(beta as f32).float((1.0 - beta) as f32)
}
