//! Log-probabilities of labels, their sums over rows, and formulas over these.

use super::cross_entropy::{per_thread, threads_of};
use super::{Lowering, THREADS, type_name};
use crate::command::{Args, Buffer};
use crate::kernels::{FORMULAS, Instance, LOG_PROBS};
use phalanx_strategies::program::formula::{Input, Step};
use phalanx_strategies::program::{DType, Op, VocabShard, op};

/// Most steps of a tape, formulas, operands of formulas and results: what the arguments and the shared memory of a launch hold.
const STEPS: usize = 144;
const SUMS: usize = 16;
const OPERANDS: usize = 8;
const RESULTS: usize = 40;

impl Lowering {
    /// An operation of an objective that compares sequences.
    pub(super) fn of_sequences(&mut self, op: &Op) {
        match op {
            Op::LogProbs(op::LogProbs { vocab }) => self.log_probs(*vocab),
            Op::LogProbsBackward(op::LogProbsBackward { first }) => self.log_probs_backward(*first),
            Op::RowSums(_) => {
                let (x, labels, sums) = (self.reads[0], self.reads[1], self.writes[0]);
                let args = Args::new().ptr(x).ptr(labels).ptr_or_null(self.reads.get(2).copied());
                let args = args.int(x.len() / sums.cols).int(sums.cols).ptr(sums);
                self.launch(Instance::of(FORMULAS, "row_sums"), [sums.cols as u32, 1, 1], THREADS, 0, args);
            }
            Op::RowSumsBackward(_) => {
                let (d, labels, dx) = (self.reads[0], self.reads[1], self.writes[0]);
                let args = Args::new().ptr(d).ptr(labels).ptr_or_null(self.reads.get(2).copied());
                let args = args.int(dx.len() / d.cols).int(dx.len()).ptr(dx);
                self.launch_strided(Instance::of(FORMULAS, "row_sums_backward"), dx.len(), args);
            }
            Op::Formulas(formulas) => self.formulas(formulas),
            other => unreachable!("{} compares no sequences", other.name()),
        }
    }

    /// `[logits, labels, (stats)] -> [log_probs, norms]`.
    fn log_probs(&mut self, vocab: Option<VocabShard>) {
        let (logits, labels) = (self.reads[0], self.reads[1]);
        let (found, norms) = (self.writes[0], self.writes[1]);
        let (n, v) = (labels.len(), logits.cols);
        match vocab {
            None => {
                let args = Args::new().ptr(logits).ptr(labels).int(v).ptr(found).ptr(norms);
                let threads = threads_of(v, logits.dtype);
                self.launch(kernel("log_probs_of_rows", logits.dtype), [n as u32, 1, 1], threads, 0, args);
            }
            Some(VocabShard { n_shards, .. }) => {
                let args = Args::new().ptr(labels).ptr(self.reads[2]).int(n_shards).int(n).ptr(found).ptr(norms);
                self.launch_strided(kernel("log_probs_of_statistics", logits.dtype), n, args);
            }
        }
    }

    /// `[logits, labels, norms, d] -> [dlogits]`.
    fn log_probs_backward(&mut self, first: usize) {
        let (logits, labels, dlogits) = (self.reads[0], self.reads[1], self.writes[0]);
        let (n, v) = (labels.len(), logits.cols);
        let args = Args::new().ptr(logits).ptr(labels).ptr(self.reads[2]).ptr(self.reads[3]);
        let args = args.int(v).int(first).ptr(dlogits);
        let runs = v.div_ceil(per_thread(logits.dtype) * THREADS as usize) as u32;
        self.launch(kernel("log_probs_gradient", logits.dtype), [n as u32, runs, 1], THREADS, 0, args);
    }

    /// `[x…, hyper, (given), (sums)] -> [sums, (dx…)]`.
    fn formulas(&mut self, formulas: &op::Formulas) {
        let tape = &formulas.tape;
        let n_operands = formulas.n_operands(self.reads.len());
        let sizes =
            [(tape.steps.len(), STEPS), (formulas.n_sums, SUMS), (n_operands, OPERANDS), (tape.results.len(), RESULTS)];
        assert!(sizes.iter().all(|(n, most)| n <= most), "a launch holds fewer formulas: {sizes:?}");
        let (mut codes, mut constants, mut results) = ([0; STEPS], [0; STEPS], [0; RESULTS]);
        for (i, step) in tape.steps.iter().enumerate() {
            (codes[i], constants[i]) = encoded(*step);
        }
        results.iter_mut().zip(&tape.results).for_each(|(to, result)| *to = u64::from(*result));
        let addresses = |buffers: &[Buffer]| {
            let mut all = [0; OPERANDS];
            all.iter_mut().zip(buffers).for_each(|(to, buffer)| *to = buffer.address);
            all
        };
        let args = Args::new().words(&codes).words(&constants).words(&results);
        let args = args.words(&addresses(&self.reads[..n_operands])).words(&addresses(&self.writes[1..]));
        let args = args.int(tape.steps.len()).int(formulas.n_sums).int(formulas.gradients.len()).int(formulas.group);
        let args = args.int(self.reads[0].cols).int(usize::from(formulas.counts));
        let given = formulas.given.then(|| self.reads[n_operands + 1]);
        let carried = formulas.residual.then(|| self.reads[self.reads.len() - 1]);
        let args = args.ptr(self.reads[n_operands]).ptr_or_null(given).ptr_or_null(carried).ptr(self.writes[0]);
        self.launch(Instance::of(FORMULAS, "formulas"), [1, 1, 1], 32, 0, args);
    }
}

fn kernel(name: &'static str, logits: DType) -> Instance {
    Instance::of(LOG_PROBS, name).with("X", type_name(logits))
}

/// A step as the kernel reads it: its number with what it reads, and its constant.
fn encoded(step: Step) -> (u64, u64) {
    let code = |number: u64, a: u32, b: u32| (number | u64::from(a) << 8 | u64::from(b) << 32, 0);
    match step {
        Step::Input(Input { operand, count, row }) => code(0, operand << 1 | u32::from(count), row),
        Step::Const(c) => (1, c.to_bits()),
        Step::Hyper(i) => code(12, i, 0),
        Step::Given(i) => code(13, i, 0),
        Step::Add(a, b) => code(2, a, b),
        Step::Sub(a, b) => code(3, a, b),
        Step::Mul(a, b) => code(4, a, b),
        Step::Div(a, b) => code(5, a, b),
        Step::Exp(a) => code(6, a, 0),
        Step::Ln(a) => code(7, a, 0),
        Step::LogSigmoid(a) => code(8, a, 0),
        Step::Sigmoid(a) => code(9, a, 0),
        Step::Relu(a) => code(10, a, 0),
        Step::Positive(a) => code(11, a, 0),
    }
}
