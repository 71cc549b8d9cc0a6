//! How long training goes on and how the learning rate moves meanwhile.

use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE};

section! {
    /// Length of the run, batch size and learning rate.
    pub struct ScheduleSection {
        /// Sequences that one forward and backward pass takes.
        pub micro_batch_size: usize = 1 => AT_LEAST_ONE;
        /// Passes whose gradients are summed before the weights are changed.
        pub gradient_accumulation_steps: usize = 1 => AT_LEAST_ONE;
        /// Passes of all ranks together before the weights are changed, whatever the mesh; instead of `gradient_accumulation_steps`.
        pub microbatches_per_step: Option<usize> = None => AT_LEAST_ONE;
        /// Passes over the data; with `max_steps` too, whichever ends first.
        pub num_epochs: Option<f64> = None => POSITIVE;
        /// Changes of the weights; with `num_epochs` too, whichever ends first.
        pub max_steps: Option<u64> = None => AT_LEAST_ONE;
        /// The highest learning rate of the run.
        pub learning_rate: f64 = 5e-5 => NOT_NEGATIVE;
        /// Sequences per step for which `learning_rate` was chosen; it is then scaled linearly to the actual number (Goyal et al. 2017).
        pub scale_learning_rate_with_batch: Option<usize> = None => AT_LEAST_ONE;
        /// How the learning rate moves after the warm-up.
        pub lr_scheduler: LrScheduler = LrScheduler::Cosine;
        /// The share of `learning_rate` at which the cosine ends.
        pub cosine_min_lr_ratio: f64 = 0.0 => SHARE;
        /// Steps in which the learning rate rises linearly from 0; give this or `warmup_ratio`.
        pub warmup_steps: Option<u64> = None;
        /// The warm-up as a share of all steps.
        pub warmup_ratio: Option<f64> = None => SHARE;
        /// The share of all steps in which `wsd` falls to 0 at the end; without it, 0.2.
        pub decay_ratio: Option<f64> = None => SHARE;
    }
}

choices! {
    /// How the learning rate moves after the warm-up.
    pub enum LrScheduler {
        /// Stays.
        Constant = "constant" | "constant_with_warmup";
        /// Falls linearly to 0.
        Linear = "linear";
        /// Half a cosine down to `cosine_min_lr_ratio`.
        Cosine = "cosine" | "cosine_with_min_lr";
        /// Warm-up, stable, decay: stays, then falls linearly to 0 in the last `decay_ratio` of the steps.
        WarmupStableDecay = "wsd" | "warmup_stable_decay";
    }
}

/// The last part of a `wsd` run when `decay_ratio` is not given.
const DECAY_RATIO_DEFAULT: f64 = 0.2;

impl ScheduleSection {
    /// Microbatches of a step over all ranks.
    pub fn microbatches(&self, data_ranks: usize) -> usize {
        self.microbatches_per_step.unwrap_or(self.gradient_accumulation_steps.saturating_mul(data_ranks))
    }

    /// The highest learning rate, scaled linearly from the reference batch to `sequences_per_step` where asked for.
    ///
    /// Source: Goyal et al. 2017, Accurate, Large Minibatch SGD, §2.1 (arXiv:1706.02677).
    pub fn peak_learning_rate(&self, sequences_per_step: usize) -> f64 {
        let reference = self.scale_learning_rate_with_batch;
        self.learning_rate * reference.map_or(1.0, |reference| sequences_per_step as f64 / reference as f64)
    }

    /// Steps of warm-up in a run of `total_steps`; a share is rounded up, as in Hugging Face's trainer.
    pub fn warmup_steps_of(&self, total_steps: u64) -> u64 {
        let from_ratio = self.warmup_ratio.map(|ratio| (total_steps as f64 * ratio).ceil() as u64);
        self.warmup_steps.or(from_ratio).unwrap_or(0)
    }

    /// The share of the steps in which `wsd` falls.
    pub fn decay_share(&self) -> f64 {
        self.decay_ratio.unwrap_or(DECAY_RATIO_DEFAULT)
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let conflict = |first: &str, second: &str, why: &str| {
            Err(ConfigError::Conflict { first: first.into(), second: second.into(), why: why.into() })
        };
        if self.num_epochs.is_none() && self.max_steps.is_none() {
            return Err(ConfigError::Missing {
                key: "num_epochs".into(),
                why: "say when training ends, with `num_epochs` or `max_steps`".into(),
            });
        }
        if self.warmup_steps.is_some() && self.warmup_ratio.is_some() {
            return conflict("warmup_steps", "warmup_ratio", "both say how long the warm-up is; keep one");
        }
        if let (Some(warmup), Some(max)) = (self.warmup_steps, self.max_steps)
            && warmup > max
        {
            return conflict("warmup_steps", "max_steps", &format!("a warm-up of {warmup} never ends in {max} steps"));
        }
        if self.cosine_min_lr_ratio != 0.0 && self.lr_scheduler != LrScheduler::Cosine {
            return conflict("cosine_min_lr_ratio", "lr_scheduler", "only `cosine` has a lowest learning rate");
        }
        if self.decay_ratio.is_some() && self.lr_scheduler != LrScheduler::WarmupStableDecay {
            return conflict("decay_ratio", "lr_scheduler", "only `wsd` has a decay at its end");
        }
        if self.warmup_ratio.unwrap_or(0.0) + self.decay_ratio.unwrap_or(0.0) > 1.0 {
            return conflict("warmup_ratio", "decay_ratio", "together they are more than the whole run");
        }
        Ok(())
    }
}
