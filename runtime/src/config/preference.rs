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
        /// Function of the difference of log-ratios that dpo minimises: sigmoid, hinge (Zhao et al. 2023) or ipo (Azar et al.
        /// 2023).
        pub dpo_loss_type: DpoLoss = DpoLoss::Sigmoid;
        /// Probability with which the answers of a pair are taken to be exchanged, with `dpo_loss_type: sigmoid`.
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
    /// The loss of direct preference optimisation.
    pub enum DpoLoss {
        /// `-ln sigmoid(beta x)`.
        Sigmoid = "sigmoid";
        /// `max(0, 1 - beta x)`.
        Hinge = "hinge";
        /// `(x - 1 / (2 beta))²`.
        Ipo = "ipo";
    }
}

impl PreferenceSection {
    /// What is minimised.
    pub fn objective(&self) -> Objective {
        let loss = match (self.rl, self.dpo_loss_type) {
            (None, _) => return Objective::Supervised,
            (Some(Rl::Ipo), _) | (_, DpoLoss::Ipo) => objective::DpoLoss::Ipo,
            (_, DpoLoss::Sigmoid) => objective::DpoLoss::Sigmoid,
            (_, DpoLoss::Hinge) => objective::DpoLoss::Hinge,
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
        let is_sigmoid = matches!(self.objective(), Objective::Dpo(Dpo { loss: objective::DpoLoss::Sigmoid, .. }));
        if self.dpo_label_smoothing > 0.0 && !is_sigmoid {
            let second = if self.rl == Some(Rl::Ipo) { "rl" } else { "dpo_loss_type" };
            let why = "only the loss sigmoid is smoothed; set `dpo_label_smoothing: 0`, or use `rl: dpo` with sigmoid";
            return Err(ConfigError::Conflict {
                first: "dpo_label_smoothing".into(),
                second: second.into(),
                why: why.into(),
            });
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
