//! How much of its peak a machine reaches.

use phalanx_strategies::compile::Compiled;
use phalanx_strategies::cost::{instr_cost, program_cost};
use phalanx_strategies::program::{Cost, Phase};

/// The highest rate of arithmetic that is known of a machine, FLOP/s: the one measured before the first step, unless a step was
/// faster. Other programs may have run during the measurement, and no step exceeds what the machine can do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peak(f64);

impl Peak {
    /// A peak as measured.
    pub(crate) const fn measured(flops: f64) -> Peak {
        Peak(flops)
    }

    /// The share of the peak that a step reaches with this rate, percent.
    pub(crate) fn share_pct(&mut self, flops: f64) -> f64 {
        self.0 = self.0.max(flops);
        100.0 * flops / self.0
    }
}

/// Arithmetic of the model in a step: the forward and backward pass, without recomputation.
pub(super) fn model_flops(c: &Compiled) -> f64 {
    let flops = |cost: Cost| cost.matmul_flops + cost.attention_flops;
    let forward = c.program.instrs.iter().filter(|i| i.site.phase <= Phase::Forward);
    let forward: f64 = forward.map(|i| flops(instr_cost(&c.program, i))).sum();
    // The backward pass costs twice the forward pass when every weight is trained; with adapters less.
    flops(program_cost(&c.program)).min(3.0 * forward)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_faster_than_the_measured_peak_is_the_new_peak() {
        let mut peak = Peak::measured(100.0);

        assert_eq!([50.0, 125.0, 100.0].map(|flops| peak.share_pct(flops)), [50.0, 100.0, 80.0]);
    }
}
