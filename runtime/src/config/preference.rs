//! Preference tuning: training on pairs of answers, and on answers that are labelled.

use super::JobConfig;
use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{NOT_NEGATIVE, POSITIVE, Range};
use phalanx_strategies::objective::{self, Cpo, Dpo, Kto, Objective, Orpo};

/// From a half on, the label says the opposite.
const SMOOTHING: Range = Range { fits: "a number from 0 to below 0.5", holds: |x| (0.0..0.5).contains(&x) };

section! {
    /// What is trained instead of the likelihood of texts.
    pub struct PreferenceSection {
        /// Training on pairs of a preferred and a rejected answer. Relative to the model that it begins with: dpo (Rafailov et al.
        /// 2023), or ipo, the same with `dpo_loss_type: ipo`. Without: cpo (Xu et al. 2024), simpo (Meng et al. 2024), orpo (Hong et
        /// al. 2024). On answers that are labelled one by one: kto (Ethayarajh et al. 2024). If not set, the likelihood of texts is
        /// trained.
        pub rl: Option<Rl> = None;
        /// How closely the model stays to the one that it begins with; of cpo and simpo, the scale of differences.
        pub rl_beta ["dpo_beta"]: f64 = 0.1 => POSITIVE;
        /// Function of the log-ratios of both answers that dpo minimises, by TRL's names.
        pub dpo_loss_type: DpoLoss = DpoLoss::Sigmoid;
        /// Probability with which the answers of a pair are taken to be exchanged, for the losses sigmoid, robust and exo_pair.
        pub dpo_label_smoothing: f64 = 0.0 => SMOOTHING;
        /// With dpo and ipo: weight of the likelihood of preferred answers beside the loss (RPO, Pang et al. 2024).
        pub rpo_alpha: Option<f64> = None => NOT_NEGATIVE;
        /// With dpo and ipo: the log-probabilities of the frozen model are computed once, before the first step, and kept in checkpoints. A
        /// step then takes less time, and without adapters no copy of the model stays in memory.
        pub precompute_ref_log_probs: bool = false;
        /// Keep the copy of the model that it begins with outside device memory: in host memory, or, on a CPU, in a file in `output_dir`. Each
        /// microbatch copies it to the device layer by layer. Adapters need no copy.
        pub offload_reference: bool = false;
        /// With cpo and simpo: weight of the likelihood of preferred answers; if not set, 1.
        pub cpo_alpha: Option<f64> = None => NOT_NEGATIVE;
        /// With simpo: margin by which the preferred answer wins; if not set, 0.5.
        pub simpo_gamma: Option<f64> = None => NOT_NEGATIVE;
        /// With orpo: weight of the odds beside the likelihood of preferred answers; if not set, 0.1.
        pub orpo_alpha: Option<f64> = None => POSITIVE;
        /// With kto: weight of desirable answers; if not set, 1.
        pub kto_desirable_weight: Option<f64> = None => NOT_NEGATIVE;
        /// With kto: weight of undesirable answers; if not set, 1.
        pub kto_undesirable_weight: Option<f64> = None => NOT_NEGATIVE;
    }
}

choices! {
    /// An objective over pairs.
    pub enum Rl {
        /// Direct preference optimisation.
        Dpo = "dpo";
        /// Identity preference optimisation.
        Ipo = "ipo";
        /// Contrastive preference optimisation.
        Cpo = "cpo";
        /// Simple preference optimisation.
        Simpo = "simpo";
        /// Odds-ratio preference optimisation.
        Orpo = "orpo";
        /// Kahneman-Tversky optimisation.
        Kto = "kto";
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
        let (beta, label_smoothing) = (self.rl_beta, self.dpo_label_smoothing);
        let dpo = |loss| {
            let (alpha, computed_before) = (self.rpo_alpha.unwrap_or(0.0), self.precompute_ref_log_probs);
            Objective::Dpo(Dpo { beta, loss, label_smoothing, alpha, computed_before })
        };
        let cpo =
            |margin| Objective::Cpo(Cpo { beta, margin, alpha: self.cpo_alpha.unwrap_or(1.0), label_smoothing: 0.0 });
        match self.rl {
            None => Objective::Supervised,
            Some(Rl::Dpo) => dpo(self.dpo_loss_type.objective()),
            Some(Rl::Ipo) => dpo(objective::DpoLoss::Ipo),
            Some(Rl::Cpo) => cpo(None),
            Some(Rl::Simpo) => cpo(Some(self.simpo_gamma.unwrap_or(0.5))),
            Some(Rl::Orpo) => Objective::Orpo(Orpo { beta: self.orpo_alpha.unwrap_or(0.1) }),
            Some(Rl::Kto) => Objective::Kto(Kto {
                beta,
                desirable_weight: self.kto_desirable_weight.unwrap_or(1.0),
                undesirable_weight: self.kto_undesirable_weight.unwrap_or(1.0),
            }),
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let default = PreferenceSection::default();
        let of_dpo: &[Rl] = &[Rl::Dpo, Rl::Ipo];
        let given: [(&str, bool, &[Rl]); 11] = [
            ("rl_beta", self.rl_beta != default.rl_beta, &[Rl::Dpo, Rl::Ipo, Rl::Cpo, Rl::Simpo, Rl::Kto]),
            ("dpo_loss_type", self.dpo_loss_type != default.dpo_loss_type, &[Rl::Dpo]),
            ("dpo_label_smoothing", self.dpo_label_smoothing > 0.0, of_dpo),
            ("rpo_alpha", self.rpo_alpha.is_some(), of_dpo),
            ("precompute_ref_log_probs", self.precompute_ref_log_probs, of_dpo),
            ("offload_reference", self.offload_reference, &[Rl::Dpo, Rl::Ipo, Rl::Kto]),
            ("cpo_alpha", self.cpo_alpha.is_some(), &[Rl::Cpo, Rl::Simpo]),
            ("simpo_gamma", self.simpo_gamma.is_some(), &[Rl::Simpo]),
            ("orpo_alpha", self.orpo_alpha.is_some(), &[Rl::Orpo]),
            ("kto_desirable_weight", self.kto_desirable_weight.is_some(), &[Rl::Kto]),
            ("kto_undesirable_weight", self.kto_undesirable_weight.is_some(), &[Rl::Kto]),
        ];
        let is_unused = |fits: &[Rl]| self.rl.is_none_or(|rl| !fits.contains(&rl));
        if let Some((key, _, fits)) = given.iter().find(|(_, given, fits)| *given && is_unused(fits)) {
            let why = match fits {
                [first @ .., last] if !first.is_empty() => {
                    let first: Vec<&str> = first.iter().map(|rl| rl.word()).collect();
                    let last = last.word();
                    format!(
                        "the key belongs to `rl: {}` or `{last}`; set one of them, or remove the key",
                        first.join("`, `")
                    )
                }
                only => {
                    let word = only.first().map_or("", |rl| rl.word());
                    format!("the key belongs to `rl: {word}`; set it, or remove the key")
                }
            };
            return Err(ConfigError::Conflict { first: (*key).into(), second: "rl".into(), why });
        }
        if self.offload_reference && self.precompute_ref_log_probs {
            return Err(ConfigError::Conflict {
                first: "offload_reference".into(),
                second: "precompute_ref_log_probs".into(),
                why: "no copy is kept once its log-probabilities are computed; remove the first".into(),
            });
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

    /// What the user should know of a rate that is a default.
    pub(super) fn note_of_rate(&self, is_rate_set: bool) -> Option<String> {
        let rl = self.rl.filter(|_| !is_rate_set)?;
        Some(format!(
            "`learning_rate` is not set, and its default is for texts; with `rl: {}`, rates between 1e-6 and 5e-6 are usual",
            rl.word()
        ))
    }

    /// Checks what pairs need of data and adapters.
    pub(super) fn check(&self, job: &JobConfig) -> Result<(), ConfigError> {
        let (data, adapter) = (&job.data, &job.adapter);
        let sets = || data.datasets.iter().chain(&data.test_datasets);
        let Some(rl) = self.rl else {
            return match sets().any(|set| set.r#type.is_pair()) {
                true => Err(ConfigError::Missing {
                    key: "rl".into(),
                    why: "a data set of the type preference has pairs of answers; set `rl: dpo` or `reward_model: true` to train on them"
                        .into(),
                }),
                false => Ok(()),
            };
        };
        let conflict = |first: &'static str, why: &str| {
            Err(ConfigError::Conflict { first: first.into(), second: "rl".into(), why: why.into() })
        };
        if sets().any(|set| !set.r#type.is_pair()) {
            let why = format!("`rl: {}` trains on pairs; use `type: preference` for every data set", rl.word());
            return conflict("datasets", &why);
        }
        if self.objective().has_reference() && adapter.lora_model_dir.is_some() {
            return conflict(
                "lora_model_dir",
                "it compares with the model without adapters; merge this adapter with `phalanx export` and train from the result",
            );
        }
        if rl == Rl::Kto && job.schedule.micro_batch_size < 2 {
            return conflict(
                "micro_batch_size",
                "it estimates a divergence from the answers of several samples; set `micro_batch_size: 2` or more",
            );
        }
        if data.sample_packing {
            return conflict("sample_packing", "each answer of a pair has a row of its own; remove one of the two");
        }
        if data.loss_weights {
            return conflict("loss_weights", "answers are compared as a whole; remove one of the two");
        }
        if data.train_on_inputs {
            return conflict("train_on_inputs", "only answers are compared; remove one of the two");
        }
        self.check_stream(data.streaming)
    }

    fn check_stream(&self, streaming: bool) -> Result<(), ConfigError> {
        if !(self.precompute_ref_log_probs && streaming) {
            return Ok(());
        }
        Err(ConfigError::Conflict {
            first: "precompute_ref_log_probs".into(),
            second: "streaming".into(),
            why: "it reads all data before the first step, and a stream is read while the run trains; remove one of the two"
                .into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(keys: &str) -> Result<JobConfig, ConfigError> {
        let text = format!("base_model: m\nmax_steps: 1\ndatasets:\n  - path: a.jsonl\n    type: preference\n{keys}");
        JobConfig::from_yaml_str(&text, &[])
    }

    const LORA: &str = "adapter: lora\nlora_target_linear: true\n";

    #[test]
    fn objective_has_the_numbers_of_the_file_and_the_defaults_of_trl() {
        let objective = |keys: &str| of(keys).unwrap().preference.objective();
        let dpo = Dpo {
            beta: 0.1,
            loss: objective::DpoLoss::Sigmoid,
            label_smoothing: 0.0,
            alpha: 0.0,
            computed_before: false,
        };

        assert_eq!(objective(&format!("{LORA}rl: dpo\n")), Objective::Dpo(dpo));
        let ipo = Dpo { beta: 0.3, loss: objective::DpoLoss::Ipo, alpha: 0.2, ..dpo };
        assert_eq!(objective(&format!("{LORA}rl: ipo\nrl_beta: 0.3\nrpo_alpha: 0.2\n")), Objective::Dpo(ipo));
        let computed = Dpo { computed_before: true, ..dpo };
        assert_eq!(objective(&format!("{LORA}rl: dpo\nprecompute_ref_log_probs: true\n")), Objective::Dpo(computed));
        let simpo = Cpo { beta: 0.1, margin: Some(0.5), alpha: 1.0, label_smoothing: 0.0 };
        assert_eq!(objective("rl: simpo\n"), Objective::Cpo(simpo));
        assert_eq!(objective("rl: orpo\norpo_alpha: 0.7\n"), Objective::Orpo(Orpo { beta: 0.7 }));
        let kto = Kto { beta: 0.1, desirable_weight: 0.2, undesirable_weight: 1.0 };
        let keys = "rl: kto\nmicro_batch_size: 2\nkto_desirable_weight: 0.2\n";
        assert_eq!(objective(keys), Objective::Kto(kto));
    }

    #[test]
    fn what_does_not_fit_pairs_is_refused_with_what_would() {
        for (keys, expected) in [
            ("", "set `rl: dpo` or `reward_model: true` to train on them"),
            (
                "rl: orpo\nrl_beta: 0.5\n",
                "the key belongs to `rl: dpo`, `ipo`, `cpo`, `simpo` or `kto`; set one of them, or remove the key",
            ),
            ("rl: orpo\ndpo_beta: 0.5\n", "`rl_beta` (line 7) conflicts"),
            ("rl: simpo\nsample_packing: true\n", "each answer of a pair has a row of its own"),
            ("rl: simpo\ntrain_on_inputs: true\n", "only answers are compared"),
            (
                "rl: simpo\nloss_weights: true\n",
                "`loss_weights` (line 7) conflicts with `rl` (line 6): answers are compared as a whole",
            ),
            ("rl: kto\nmicro_batch_size: 1\n", "set `micro_batch_size: 2` or more"),
            ("rl: orpo\nkto_desirable_weight: 2\n", "the key belongs to `rl: kto`"),
            ("rl: orpo\noffload_reference: true\n", "the key belongs to `rl: dpo`, `ipo` or `kto`"),
            ("rl: dpo\nprecompute_ref_log_probs: true\noffload_reference: true\n", "no copy is kept"),
            ("rl: kto\nprecompute_ref_log_probs: true\n", "the key belongs to `rl: dpo` or `ipo`"),
            ("rl: dpo\nprecompute_ref_log_probs: true\nstreaming: true\n", "it reads all data before the first step"),
            ("rl: dpo\nlora_model_dir: a\n", "compares with the model without adapters"),
            (
                "rl: dpo\ndpo_loss_type: hinge\ndpo_label_smoothing: 0.1\n",
                "only the losses sigmoid, robust and exo_pair",
            ),
            ("rl: dpo\ndpo_loss_type: exo_pair\n", "needs a label smoothing above 0"),
            ("rl: dpo\ndpo_label_smoothing: 0.5\n", "a number from 0 to below 0.5"),
        ] {
            let with_adapter = keys.starts_with("rl: dpo\n") && keys != "rl: dpo\n";
            let keys = if with_adapter { format!("{LORA}{keys}") } else { keys.to_owned() };

            let refused = of(&keys).unwrap_err().to_string();

            assert!(refused.contains(expected), "{keys}: {refused}");
        }
    }

    #[test]
    fn losses_in_the_words_of_axolotl_and_trl_are_one_loss_and_a_likelihood() {
        let of = |keys: &str| of(&format!("{LORA}rl: dpo\n{keys}"));
        for (keys, loss, alpha) in [
            ("dpo_loss_type: [ipo]\n", DpoLoss::Ipo, None),
            ("dpo_loss_type: [hinge]\ndpo_loss_weights: [1]\n", DpoLoss::Hinge, None),
            ("dpo_loss_type: [sigmoid, sft]\n", DpoLoss::Sigmoid, Some(1.0)),
            ("dpo_loss_weights: [0.5, 1.0]\ndpo_loss_type: [sft, robust]\n", DpoLoss::Robust, Some(0.5)),
            ("dpo_loss_weights: [1.0]\n", DpoLoss::Sigmoid, None),
        ] {
            let job = of(keys).unwrap();

            assert_eq!((job.preference.dpo_loss_type, job.preference.rpo_alpha), (loss, alpha), "{keys}");
            let key = keys.split(':').next().unwrap();
            assert!(job.notes.iter().any(|note| note.contains(key)), "{keys}: {:?}", job.notes);
        }
        for (keys, expected) in [
            ("dpo_loss_type: [sigmoid, hinge]\n", "name one loss"),
            ("dpo_loss_type: [sft]\n", "name one loss"),
            ("dpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [1]\n", "a number for each of the 2 losses"),
            ("dpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [0.5, 1]\n", "the loss has the weight 1"),
            ("dpo_loss_type: [sigmoid, sft]\nrpo_alpha: 0.1\n", "keep one of the two"),
            ("dpo_loss_type: [aot]\n", "must be one of sigmoid, hinge"),
        ] {
            let refused = of(keys).unwrap_err().to_string();

            assert!(refused.contains(expected), "{keys}: {refused}");
        }
    }

    #[test]
    fn scale_of_differences_has_the_names_of_axolotl() {
        for (keys, beta) in [("rl: dpo\ndpo_beta: 0.3\n", 0.3), ("rl: dpo\ntrl: {beta: 0.4}\n", 0.4)] {
            assert_eq!(of(keys).unwrap().preference.rl_beta, beta, "{keys}");
        }
        assert_eq!(of("rl: orpo\ntrl: {beta: 0.4}\n").unwrap().preference.orpo_alpha, Some(0.4));
        for keys in ["trl: {beta: 0.4}\nrl_beta: 0.5\n", "trl: {beta: 0.4, use_vllm: true}\n"] {
            assert!(of(&format!("rl: dpo\n{keys}")).unwrap_err().to_string().contains("`trl` (line"), "{keys}");
        }
    }

    #[test]
    fn rate_that_is_not_set_is_told() {
        let is_told =
            |keys: &str| of(keys).unwrap().notes.iter().any(|note| note.starts_with("`learning_rate` is not"));

        assert!(is_told("rl: orpo\n") && !is_told("rl: orpo\nlearning_rate: 5e-5\n"));
    }

    #[test]
    fn pairs_in_a_list_of_texts_are_refused_by_its_name() {
        for keys in ["rl: orpo\npretraining_dataset: a\n", "pretraining_dataset: [{path: a, type: preference}]\n"] {
            let refused = JobConfig::from_yaml_str(&format!("base_model: m\nmax_steps: 1\n{keys}"), &[]).unwrap_err();

            assert!(refused.to_string().contains("`pretraining_dataset` (line"), "{refused}");
            assert!(refused.to_string().contains("in `datasets`, with `streaming: true`"), "{refused}");
        }
    }

    #[test]
    fn unknown_type_with_rl_names_those_of_pairs_only() {
        let text = "base_model: m\nmax_steps: 1\nrl: dpo\ndatasets: [{path: a, type: zephyr.nectar}]\n";

        let refused = JobConfig::from_yaml_str(text, &[]).unwrap_err().to_string();

        assert!(refused.contains("field_chosen") && refused.contains("preference"), "{refused}");
        assert!(!refused.contains("alpaca") && !refused.contains("field_instruction"), "{refused}");
    }

    #[test]
    fn pairs_and_texts_are_not_mixed() {
        let text = "base_model: m\nmax_steps: 1\nrl: orpo\ndatasets:\n  - path: a.jsonl\n    type: alpaca\n";

        let refused = JobConfig::from_yaml_str(text, &[]).unwrap_err().to_string();

        assert!(refused.contains("use `type: preference` for every data set"), "{refused}");
    }
}
