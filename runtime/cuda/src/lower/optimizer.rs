//! Updates of parameters by rules that work element by element.

use super::{BLOCKS_MAX, Lowering, THREADS};
use crate::command::{Args, Buffer};
use crate::kernels::{Instance, OPTIMIZER};
use phalanx_strategies::optimizer::{AdamW, Lion, N_SCALARS, OptimizerSpec, Sgd};
use phalanx_strategies::program::{Hyper, Update};

/// Elements of a thread at a time.
const WIDTH: usize = 4;
/// Runs of one launch.
const RUNS: usize = 80;

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
        let p = self.writes[0].elements(update.first, g.len());
        match &update.rule {
            OptimizerSpec::AdamW(AdamW { beta1, beta2, eps, weight_decay }) => {
                let args = self.run_of(p, g).ptr(step.lr).ptr(step.scalars).ptr(step.coefficient);
                let args = averages(averages(args, *beta1), *beta2).float(*eps as f32).double(*weight_decay);
                self.launch_update("adamw", g.len(), args);
            }
            OptimizerSpec::Sgd(Sgd { momentum, weight_decay }) => {
                let args = self.run_of(p, g).ptr(step.lr).ptr(step.coefficient);
                self.launch_update("sgd", g.len(), args.float(*momentum as f32).float(*weight_decay as f32));
            }
            OptimizerSpec::Lion(Lion { beta1, beta2, weight_decay }) => {
                let args = self.run_of(p, g).ptr(step.lr).ptr(step.coefficient);
                self.launch_update("lion", g.len(), averages(averages(args, *beta1), *beta2).double(*weight_decay));
            }
            OptimizerSpec::Adafactor(rule) => self.adafactor(update, rule, p, step),
        }
    }

    /// `[p, state…, g, sums…, hyper, coefficient] -> [sums…]`.
    pub(super) fn update_sums(&mut self, update: &Update) {
        match &update.rule {
            OptimizerSpec::Adafactor(rule) => self.adafactor_sums(update, rule),
            rule => unreachable!("{} needs no sums over whole tensors", rule.name()),
        }
    }

    /// The kernels' table of runs.
    fn run_of(&self, p: Buffer, g: Buffer) -> Args {
        let state = |i: usize| self.writes.get(1 + i).map_or(0, |state| state.address);
        Args::of_run(&[p.address, state(0), state(1), g.address, g.len() as u64], n_blocks(g.len()), RUNS)
    }

    fn launch_update(&mut self, name: &'static str, n: usize, args: Args) {
        self.launch(Instance::of(OPTIMIZER, name), [n_blocks(n) as u32, 1, 1], THREADS, 0, args);
    }
}

/// Blocks for a run of `n` elements.
fn n_blocks(n: usize) -> usize {
    n.div_ceil(WIDTH * THREADS as usize).min(BLOCKS_MAX)
}

/// The weights of an exponential average, rounded as on the CPU.
fn averages(args: Args, beta: f64) -> Args {
    args.float(beta as f32).float((1.0 - beta) as f32)
}
