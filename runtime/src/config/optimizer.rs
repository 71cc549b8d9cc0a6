//! How gradients change the weights.

use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{BELOW_ONE, NOT_NEGATIVE, POSITIVE};

section! {
    /// The optimizer.
    pub struct OptimizerSection {
        /// The rule that turns gradients into changes of the weights.
        pub optimizer: OptimizerKind = OptimizerKind::AdamW;
        /// Decoupled weight decay (AdamW) or an L2 term in the gradient (SGD); biases and norms are exempt.
        pub weight_decay: f64 = 0.0 => NOT_NEGATIVE;
        /// AdamW: decay of the average of gradients.
        pub adam_beta1: f64 = 0.9 => BELOW_ONE;
        /// AdamW: decay of the average of squared gradients.
        pub adam_beta2: f64 = 0.999 => BELOW_ONE;
        /// AdamW: added to the denominator.
        pub adam_epsilon: f64 = 1e-8 => POSITIVE;
        /// SGD: share of the last change that is kept; 0 is plain gradient descent.
        pub momentum: f64 = 0.0 => BELOW_ONE;
        /// Keep the state of the optimizer outside the memory of the device: on a CPU, in a file below `output_dir`.
        pub offload_optimizer: bool = false;
        /// The norm of all gradients is cut to this; 0 or none leaves gradients as they are.
        pub max_grad_norm: Option<f64> = Some(1.0) => NOT_NEGATIVE;
    }
}

choices! {
    /// The rule that turns gradients into changes of the weights.
    pub enum OptimizerKind {
        /// Adam with decoupled weight decay (Loshchilov and Hutter 2019); all spellings are the same kernel here.
        AdamW = "adamw" | "adamw_torch" | "adamw_torch_fused";
        /// Stochastic gradient descent, with momentum if set.
        Sgd = "sgd";
    }
}

impl OptimizerSection {
    /// The norm to which gradients are cut, if they are.
    pub fn clip_norm(&self) -> Option<f64> {
        self.max_grad_norm.filter(|&norm| norm > 0.0)
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let default = Self::default();
        let changed = [
            ("adam_beta1", self.adam_beta1 != default.adam_beta1, OptimizerKind::AdamW),
            ("adam_beta2", self.adam_beta2 != default.adam_beta2, OptimizerKind::AdamW),
            ("adam_epsilon", self.adam_epsilon != default.adam_epsilon, OptimizerKind::AdamW),
            ("momentum", self.momentum != default.momentum, OptimizerKind::Sgd),
        ];
        match changed.iter().find(|(_, changed, owner)| *changed && *owner != self.optimizer) {
            Some((key, _, owner)) => Err(ConfigError::Conflict {
                first: (*key).into(),
                second: "optimizer".into(),
                why: format!("`{}` does not use it, `{}` does", self.optimizer.word(), owner.word()),
            }),
            None => Ok(()),
        }
    }
}
