//! Operations on a few f64 numbers: sums, vectors of terms, formulas of objectives.

use super::CpuMachine;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::formula::{Input, Known};
use phalanx_strategies::program::{Instr, op};

impl CpuMachine {
    pub(super) fn sum(&mut self, c: &Compiled, instr: &Instr) {
        let to = instr.writes[0];
        let run = self.read::<f64>(c, to).len();
        for i in 0..run {
            let total = instr.reads.iter().flat_map(|s| self.read::<f64>(c, *s)[i..].iter().step_by(run)).sum();
            self.write::<f64>(c, to)[i] = total;
        }
    }

    pub(super) fn assemble(&mut self, c: &Compiled, instr: &Instr, places: &[usize]) {
        let to = instr.writes[0];
        self.write::<f64>(c, to).fill(0.0);
        for (place, term) in places.iter().zip(&instr.reads) {
            for i in 0..self.read::<f64>(c, *term).len() {
                let (n, x) = (self.read::<f64>(c, *term).len(), self.read::<f64>(c, *term)[i]);
                self.write::<f64>(c, to)[place * n + i] = x;
            }
        }
    }

    pub(super) fn formulas(&mut self, c: &Compiled, instr: &Instr, formulas: &op::Formulas) {
        let n_operands = formulas.n_operands(instr.reads.len());
        let hyper = self.read::<f64>(c, instr.reads[n_operands]).to_vec();
        let mut sums = match formulas.residual {
            true => self.read::<f64>(c, instr.reads[instr.reads.len() - 1]).to_vec(),
            false => vec![0.0; formulas.n_sums],
        };
        let given = if formulas.given { self.read::<f64>(c, instr.reads[n_operands + 1]).to_vec() } else { Vec::new() };
        let n_rows = self.read::<f64>(c, instr.reads[0]).len() / 2;
        let mut done = Vec::new();
        instr.writes[1..].iter().for_each(|dx| self.write::<f64>(c, *dx).fill(0.0));
        for first in (0..n_rows).step_by(formulas.group) {
            let counts = &self.read::<f64>(c, instr.reads[0])[n_rows + first..][..formulas.group];
            if counts.iter().all(|n| *n == 0.0) {
                continue;
            }
            let input = |input: Input| {
                let at = usize::from(input.count) * n_rows + first + input.row as usize;
                self.read::<f64>(c, instr.reads[input.operand as usize])[at]
            };
            formulas.tape.run(Known { hyper: &hyper, given: &given }, input, &mut done);
            let mut results = formulas.tape.results.iter().map(|i| done[*i as usize]);
            let values = results.by_ref().take(formulas.n_sums);
            if formulas.counts {
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            } else {
                values.for_each(drop);
            }
            for dx in &instr.writes[1..] {
                let dx = &mut self.write::<f64>(c, *dx)[first..][..formulas.group];
                dx.iter_mut().zip(results.by_ref()).for_each(|(dx, d)| *dx = d);
            }
        }
        self.write::<f64>(c, instr.writes[0]).copy_from_slice(&sums);
    }
}
