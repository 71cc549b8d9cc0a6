//! The parameter update: one fused instruction for each trainable parameter.

use crate::program::{Binding, DType, Hyper, Kind, Op, Phase, Program, Role, Site, ValueId};
use serde::{Deserialize, Serialize};

/// Optimizer and its fixed hyperparameters; the learning rate comes with each step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "name")]
pub enum OptimizerSpec {
    /// Adam with decoupled weight decay. Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
        /// Weight decay of parameters with two or more dims.
        weight_decay: f64,
    },
    /// Stochastic gradient descent with momentum, in PyTorch's form.
    Sgd {
        /// Decay of the momentum buffer.
        momentum: f64,
        /// L2 penalty of parameters with two or more dims.
        weight_decay: f64,
    },
}

impl OptimizerSpec {
    /// Names of the state tensors it keeps for each parameter.
    pub const fn state_names(&self) -> &'static [&'static str] {
        match self {
            OptimizerSpec::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            OptimizerSpec::Sgd { .. } => &["momentum_buffer"],
        }
    }

    /// `(1 - beta1^t, 1 - beta2^t)` at update `t`, counted from 1.
    pub fn bias_corrections(&self, t: u64) -> (f64, f64) {
        match self {
            OptimizerSpec::AdamW { beta1, beta2, .. } => (1.0 - beta1.powf(t as f64), 1.0 - beta2.powf(t as f64)),
            OptimizerSpec::Sgd { .. } => (1.0, 1.0),
        }
    }
}

/// Appends the update of every parameter in `grads`.
pub fn optimizer(program: &mut Program, grads: &[(usize, ValueId)], coefficient: ValueId, spec: &OptimizerSpec) {
    let site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
    let hyper = hyper(program);
    for (index, grad) in grads {
        let param = program.params[*index].clone();
        let name = program.value(param.value).name.clone();
        // Sharded state is a run of elements; whole state keeps the shape of its parameter.
        let (held, updated) = (param.held.clone(), param.updated.clone());
        let whole = updated.len() == param.shape.iter().product::<usize>();
        let shape = if whole { param.shape.clone() } else { vec![updated.len()] };
        let mut state = vec![param.value];
        for slot in spec.state_names() {
            state.push(program.add_value(format!("{slot}.{name}"), &shape, DType::F32, Kind::OptimizerState));
        }
        let reads = state.iter().copied().chain([*grad, hyper, coefficient]).collect();
        program.push(update(spec, param.decay, updated.start - held.start), reads, state, site);
    }
}

fn update(spec: &OptimizerSpec, decay: bool, first: usize) -> Op {
    let factor = if decay { 1.0 } else { 0.0 };
    match *spec {
        OptimizerSpec::AdamW { beta1, beta2, eps, weight_decay } => {
            Op::AdamW { first, beta1, beta2, eps, weight_decay: weight_decay * factor }
        }
        OptimizerSpec::Sgd { momentum, weight_decay } => {
            Op::Sgd { first, momentum, weight_decay: weight_decay * factor }
        }
    }
}

/// The input of the step's scalars, made if the program has none.
pub(super) fn hyper(program: &mut Program) -> ValueId {
    if let Some(value) = program.bound(Role::Hyper).next() {
        return value;
    }
    let value = program.add_value("hyper", &[Hyper::LEN], DType::F64, Kind::Input);
    program.bindings.push(Binding::new(Role::Hyper, value));
    value
}
