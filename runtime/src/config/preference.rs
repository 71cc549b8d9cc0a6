//! Preference tuning: training on pairs of answers.

use super::adapter::AdapterSection;
use super::datasets::DataSection;
use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{POSITIVE, Range};
use crate::config::dataset_type::DatasetType;
use phalanx_strategies::objective::{self, Dpo, Objective};

/// From a half on, the label says the opposite.
const SMOOTHING: Range = Range { fits: "a number from 0 to below 0.5", holds: |x| (0.0..0.5).contains(&x) };

section! {
    /// What is trained instead of the likelihood of texts.
    pub struct PreferenceSection {
        /// Training on pairs of a preferred and a rejected answer: dpo (Rafailov et al. 2023), or ipo, the same with
        /// `dpo_loss_type: ipo`. If not set, the likelihood of texts is trained.
        pub rl: Option<Rl> = None;
        /// How closely the model stays to the one that it begins with.
        pub rl_beta: f64 = 0.1 => POSITIVE;
        /// Function of the log-ratios of both answers that dpo minimises, by TRL's names.
        pub dpo_loss_type: DpoLoss = DpoLoss::Sigmoid;
        /// Probability with which the answers of a pair are taken to be exchanged, for the losses sigmoid, robust and exo_pair.
        pub dpo_label_smoothing: f64 = 0.0 => SMOOTHING;
    }
}

choices! {
    /// An objective over pairs.
    pub enum Rl {
        /// Direct preference optimisation.
        Dpo = "dpo";
        /// Identity preference optimisation.
        Ipo = "ipo";
    }
}

choices! {
    /// The loss of direct preference optimisation, as TRL names it.
    pub enum DpoLoss {
        /// `-ln sigmoid(beta x)`.
        Sigmoid = "sigmoid";
        /// `max(0, 1 - beta x)`.
        Hinge = "hinge";
        /// `(x - 1 / (2 beta))²`, of average tokens.
        Ipo = "ipo";
        /// Divergence from the distribution of uncertain labels.
        ExoPair = "exo_pair";
        /// Each answer against a constant.
        NcaPair = "nca_pair";
        /// Unbiased if labels are uncertain.
        Robust = "robust";
        /// The answers classified one by one.
        BcoPair = "bco_pair";
        /// Squared distances to constants.
        SppoHard = "sppo_hard";
        /// Preferred answers become more likely, rejected ones less.
        ApoZero = "apo_zero";
        /// Both become less likely.
        ApoDown = "apo_down";
        /// A mixture of two losses, found by search.
        Discopop = "discopop";
        /// As sigmoid, of average tokens.
        SigmoidNorm = "sigmoid_norm";
    }
}

impl DpoLoss {
    fn objective(self) -> objective::DpoLoss {
        match self {
            DpoLoss::Sigmoid => objective::DpoLoss::Sigmoid,
            DpoLoss::Hinge => objective::DpoLoss::Hinge,
            DpoLoss::Ipo => objective::DpoLoss::Ipo,
            DpoLoss::ExoPair => objective::DpoLoss::ExoPair,
            DpoLoss::NcaPair => objective::DpoLoss::NcaPair,
            DpoLoss::Robust => objective::DpoLoss::Robust,
            DpoLoss::BcoPair => objective::DpoLoss::BcoPair,
            DpoLoss::SppoHard => objective::DpoLoss::SppoHard,
            DpoLoss::ApoZero => objective::DpoLoss::ApoZero,
            DpoLoss::ApoDown => objective::DpoLoss::ApoDown,
            DpoLoss::Discopop => objective::DpoLoss::Discopop,
            DpoLoss::SigmoidNorm => objective::DpoLoss::SigmoidNorm,
        }
    }
}

impl PreferenceSection {
    /// What is minimised.
    pub fn objective(&self) -> Objective {
        let loss = match self.rl {
            None => return Objective::Supervised,
            Some(Rl::Ipo) => objective::DpoLoss::Ipo,
            Some(Rl::Dpo) => self.dpo_loss_type.objective(),
        };
        Objective::Dpo(Dpo { beta: self.rl_beta, loss, label_smoothing: self.dpo_label_smoothing })
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let default = PreferenceSection::default();
        let given = [
            ("rl_beta", self.rl_beta != default.rl_beta),
            ("dpo_loss_type", self.dpo_loss_type != default.dpo_loss_type),
            ("dpo_label_smoothing", self.dpo_label_smoothing > 0.0),
        ];
        if let (None, Some((key, _))) = (self.rl, given.iter().find(|(_, given)| *given)) {
            let why = "texts are trained, not pairs; add `rl: dpo` or remove the key";
            return Err(ConfigError::Conflict { first: (*key).into(), second: "rl".into(), why: why.into() });
        }
        let Objective::Dpo(dpo) = self.objective() else { return Ok(()) };
        let key = if self.rl == Some(Rl::Ipo) { "rl" } else { "dpo_loss_type" };
        if self.dpo_label_smoothing > 0.0 && !dpo.loss.is_smoothed() {
            let why = "only the losses sigmoid, robust and exo_pair are smoothed; remove one of the two";
            return Err(ConfigError::Conflict {
                first: "dpo_label_smoothing".into(),
                second: key.into(),
                why: why.into(),
            });
        }
        if self.dpo_label_smoothing == 0.0 && dpo.loss == objective::DpoLoss::ExoPair {
            let why = "the loss exo_pair needs a label smoothing above 0, as in `dpo_label_smoothing: 0.001`";
            return Err(ConfigError::Missing { key: "dpo_label_smoothing".into(), why: why.into() });
        }
        Ok(())
    }

    /// Checks what pairs need of data and adapters.
    pub(super) fn check(&self, data: &DataSection, adapter: &AdapterSection) -> Result<(), ConfigError> {
        let sets = || data.datasets.iter().chain(&data.test_datasets);
        let Some(rl) = self.rl else {
            return match sets().any(|set| set.r#type == DatasetType::Preference) {
                true => Err(ConfigError::Missing {
                    key: "rl".into(),
                    why: "a data set of the type preference has pairs of answers; set `rl: dpo` to train on them"
                        .into(),
                }),
                false => Ok(()),
            };
        };
        let conflict = |first: &'static str, why: &str| {
            Err(ConfigError::Conflict { first: first.into(), second: "rl".into(), why: why.into() })
        };
        if sets().any(|set| set.r#type != DatasetType::Preference) {
            let why = format!("`rl: {}` trains on pairs; use `type: preference` for every data set", rl.word());
            return conflict("datasets", &why);
        }
        if adapter.adapter.is_none() {
            let why = "the model is compared with the one that it begins with, which adapters leave as it is";
            return Err(ConfigError::Missing { key: "adapter".into(), why: format!("{why}; set `adapter: lora`") });
        }
        if !adapter.lora_modules_to_save.is_empty() {
            return conflict(
                "lora_modules_to_save",
                "modules that are trained whole are no part of the frozen model that it compares with; remove them",
            );
        }
        if adapter.lora_model_dir.is_some() {
            return conflict(
                "lora_model_dir",
                "it compares with the model without adapters; merge this adapter with `phalanx export` and train from the result",
            );
        }
        if data.sample_packing {
            return conflict("sample_packing", "each answer of a pair has a row of its own; remove one of the two");
        }
        if data.train_on_inputs {
            return conflict("train_on_inputs", "only answers are compared; remove one of the two");
        }
        Ok(())
    }
}
