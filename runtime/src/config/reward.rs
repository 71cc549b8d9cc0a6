//! Reward models: scores of answers, trained on pairs.

use super::JobConfig;
use super::error::ConfigError;
use super::section::section;
use super::setting::NOT_NEGATIVE;
use phalanx_strategies::objective::{Objective, Reward};

section! {
    /// Training of a model that gives scores.
    pub struct RewardSection {
        /// Train a model that gives texts a score, so that the preferred answer of a pair has the greater one (Bradley and Terry 1952). Its
        /// head `score` is new if the base model has none.
        pub reward_model: bool = false;
        /// Weight of the square of the sum of both scores of a pair, which keeps scores around 0 (Eisenstein et al. 2023); if not set, 0.
        pub center_rewards_coefficient: Option<f64> = None => NOT_NEGATIVE;
    }
}

impl RewardSection {
    /// What is minimised, if it is a model of scores.
    pub fn objective(&self) -> Option<Objective> {
        let center = self.center_rewards_coefficient.unwrap_or(0.0);
        self.reward_model.then_some(Objective::Reward(Reward { center }))
    }

    /// Checks that nothing belongs to a model of scores that is not asked for.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        match self.center_rewards_coefficient {
            Some(_) if !self.reward_model => Err(ConfigError::Missing {
                key: "reward_model".into(),
                why: "center_rewards_coefficient belongs to a reward model; set `reward_model: true`, or remove it"
                    .into(),
            }),
            _ => Ok(()),
        }
    }

    /// Checks what a reward model needs of data and other keys.
    pub(super) fn check(&self, job: &JobConfig) -> Result<(), ConfigError> {
        let data = &job.data;
        let sets = || data.datasets.iter().chain(&data.test_datasets);
        let conflicts = [
            ("rl", job.preference.rl.is_some(), "a reward model has an objective of its own; remove one of the two"),
            (
                "datasets",
                sets().any(|set| !set.r#type.is_pair()),
                "a reward model is trained on pairs; use `type: preference` for every data set",
            ),
            (
                "sample_packing",
                data.sample_packing,
                "each answer of a pair has a row of its own; remove one of the two",
            ),
            (
                "loss_weights",
                data.loss_weights,
                "a score has no tokens that count more than others; remove one of the two",
            ),
            ("train_on_inputs", data.train_on_inputs, "the score is that of the whole text; remove one of the two"),
        ];
        if let Some((first, _, why)) = conflicts.into_iter().find(|(_, is_set, _)| *is_set) {
            let (first, second) = (first.into(), "reward_model".into());
            return Err(ConfigError::Conflict { first, second, why: why.into() });
        }
        match job.adapter.lora_modules_to_save.iter().any(|name| name == "lm_head") {
            true => Err(ConfigError::Conflict {
                first: "lora_modules_to_save".into(),
                second: "reward_model".into(),
                why: "a reward model has the head `score`, which is always trained, and no lm_head; remove the name"
                    .into(),
            }),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: &str, keys: &str) -> Result<JobConfig, ConfigError> {
        let text = format!("base_model: m\nmax_steps: 1\ndatasets:\n  - path: a.jsonl\n    type: {kind}\n{keys}");
        JobConfig::from_yaml_str(&text, &[])
    }

    #[test]
    fn objective_has_the_numbers_of_the_file() {
        let objective = |keys: &str| of("preference", keys).unwrap().objective();

        assert_eq!(objective("reward_model: true\n"), Objective::Reward(Reward { center: 0.0 }));
        let centered = "reward_model: true\ncenter_rewards_coefficient: 0.01\n";
        assert_eq!(objective(centered), Objective::Reward(Reward { center: 0.01 }));
        assert!(of("bradley_terry.chat_template", "reward_model: true\n").is_ok());
    }

    #[test]
    fn nothing_is_dropped_while_scores_are_compared() {
        let keys = "adapter: lora\nlora_target_linear: true\nlora_dropout: 0.1\nreward_model: true\n";

        let job = of("preference", keys).unwrap();

        assert_eq!(job.adapter.lora_dropout, 0.0);
        assert!(job.notes.iter().any(|note| note.contains("`lora_dropout` is not applied")), "{:?}", job.notes);
    }

    #[test]
    fn what_does_not_fit_a_reward_model_is_refused_with_what_would() {
        for (kind, keys, expected) in [
            ("preference", "", "set `rl: dpo` or `reward_model: true`"),
            ("preference", "rl: orpo\ncenter_rewards_coefficient: 0.1\n", "set `reward_model: true`"),
            ("preference", "rl: orpo\nreward_model: true\n", "an objective of its own"),
            ("alpaca", "reward_model: true\n", "use `type: preference` for every data set"),
            ("preference", "reward_model: true\nsample_packing: true\n", "a row of its own"),
            ("preference", "reward_model: true\ntrain_on_inputs: true\n", "that of the whole text"),
            ("preference", "reward_model: true\nprocess_reward_model: true\n", "process_reward_model"),
            ("preference", "reward_model: true\nloss_weights: true\n", "no tokens that count more than others"),
            (
                "preference",
                "reward_model: true\nadapter: lora\nlora_target_linear: true\nlora_modules_to_save: [lm_head]\n",
                "no lm_head; remove the name",
            ),
            ("preference", "reward_model: true\nnum_labels: 2\n", "a reward model has one label"),
        ] {
            let refused = of(kind, keys).unwrap_err().to_string();

            assert!(refused.contains(expected), "{keys}: {refused}");
        }
    }

    #[test]
    fn class_and_labels_of_an_example_of_axolotl_are_read() {
        let keys = "model_type: AutoModelForSequenceClassification\nnum_labels: 1\nreward_model: true\n";

        let job = of("bradley_terry.chat_template", keys).unwrap();

        assert!(job.reward.reward_model);
        let refused = of("alpaca", "model_type: AutoModelForSequenceClassification\n").unwrap_err().to_string();
        assert!(refused.contains("set `reward_model: true`"), "{refused}");
    }
}
