//! Length of the run, batch size, and schedule of the learning rate.

use super::error::{ConfigError, all};
use super::section::{choices, section};
use super::setting::{AT_LEAST_ONE, COUNT, NOT_NEGATIVE, POSITIVE, SHARE};
use super::steps::Steps;

section! {
    /// Length of the run, batch size and learning rate.
    pub struct ScheduleSection {
        /// Sequences per forward and backward pass.
        pub micro_batch_size: usize = 1 => COUNT;
        /// Passes whose gradients are summed before each update of the weights.
        pub gradient_accumulation_steps: usize = 1 => COUNT;
        /// Passes of all ranks together before each update of the weights, on any mesh; replaces
        /// `gradient_accumulation_steps`.
        pub microbatches_per_step: Option<usize> = None => COUNT;
        /// Passes over the data, 1 unless `max_steps` is set; if both are set, training ends at the first of the two limits. The last
        /// step is filled up with rows of a further pass.
        pub num_epochs: Option<f64> = None => POSITIVE;
        /// Updates of the weights; if `num_epochs` is set too, training ends at the first of the two limits.
        pub max_steps: Option<u64> = None => AT_LEAST_ONE;
        /// Peak learning rate.
        pub learning_rate: f64 = 5e-5 => NOT_NEGATIVE;
        /// Sequences per step for which `learning_rate` was chosen; the rate is scaled linearly to the actual number
        /// (Goyal et al. 2017).
        pub scale_learning_rate_with_batch: Option<usize> = None => AT_LEAST_ONE;
        /// Schedule of the learning rate after the warm-up.
        pub lr_scheduler: LrScheduler = LrScheduler::Cosine;
        /// Final learning rate of `cosine`, as a share of `learning_rate`.
        pub cosine_min_lr_ratio: f64 = 0.0 => SHARE;
        /// Steps over which the learning rate rises linearly from 0, or their share of all steps; set this or `warmup_ratio`.
        pub warmup_steps: Option<Steps> = None;
        /// The warm-up as a share of all steps.
        pub warmup_ratio: Option<f64> = None => SHARE;
        /// Share of all steps over which `wsd` decays to 0 at the end; if not set, 0.2.
        pub decay_ratio: Option<f64> = None => SHARE;
    }
}

choices! {
    /// Schedule of the learning rate after the warm-up.
    pub enum LrScheduler {
        /// Constant.
        Constant = "constant" | "constant_with_warmup";
        /// Linear decay to 0.
        Linear = "linear";
        /// Half a cosine, down to `cosine_min_lr_ratio`.
        Cosine = "cosine" | "cosine_with_min_lr";
        /// Warm-up, stable, decay: constant, then linear decay to 0 in the last `decay_ratio` of the steps.
        WarmupStableDecay = "wsd" | "warmup_stable_decay";
    }
}

/// Value of `decay_ratio` when it is not given.
const DECAY_RATIO_DEFAULT: f64 = 0.2;

impl ScheduleSection {
    /// Microbatches of a step over all ranks.
    pub fn microbatches(&self, data_ranks: usize) -> usize {
        self.microbatches_per_step.unwrap_or(self.gradient_accumulation_steps.saturating_mul(data_ranks))
    }

    /// The peak learning rate, scaled linearly from the reference batch to `sequences_per_step` if configured.
    ///
    /// Source: Goyal et al. 2017, Accurate, Large Minibatch SGD, §2.1 (arXiv:1706.02677).
    pub fn peak_learning_rate(&self, sequences_per_step: usize) -> f64 {
        let reference = self.scale_learning_rate_with_batch;
        self.learning_rate * reference.map_or(1.0, |reference| sequences_per_step as f64 / reference as f64)
    }

    /// Warm-up steps in a run of `total_steps`; a share is rounded up, as in Hugging Face's trainer.
    pub fn warmup_steps_of(&self, total_steps: u64) -> u64 {
        self.warmup_steps.or(self.warmup_ratio.map(Steps::Share)).map_or(0, |steps| steps.of(total_steps))
    }

    /// The same schedule with one spelling of each setting.
    pub(super) fn as_meant(&self) -> ScheduleSection {
        let warmup = self.warmup_steps.or(self.warmup_ratio.map(Steps::Share));
        let is_none =
            |steps: &Steps| matches!(steps, Steps::Count(0)) || matches!(steps, Steps::Share(share) if *share == 0.0);
        ScheduleSection {
            warmup_steps: warmup.filter(|steps| !is_none(steps)),
            warmup_ratio: None,
            decay_ratio: (self.lr_scheduler == LrScheduler::WarmupStableDecay).then(|| self.decay_share()),
            ..self.clone()
        }
    }

    /// The share of the steps over which `wsd` decays.
    pub fn decay_share(&self) -> f64 {
        self.decay_ratio.unwrap_or(DECAY_RATIO_DEFAULT)
    }

    /// A run that nothing else ends goes over the data once, as in Axolotl.
    pub(super) fn end_after_an_epoch(&mut self) {
        if self.max_steps.is_none() {
            self.num_epochs.get_or_insert(1.0);
        }
    }

    /// What the run does and the user may not expect.
    pub(super) fn notes(&self) -> Option<String> {
        let (Some(Steps::Count(warmup)), Some(max)) = (self.warmup_steps, self.max_steps) else { return None };
        (warmup >= max).then(|| {
            format!(
                "the warm-up of {warmup} steps does not end within `max_steps`, {max}: the learning rate only rises"
            )
        })
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let unless = |holds: bool, first: &str, second: &str, why: &str| {
            let conflict = || ConfigError::Conflict { first: first.into(), second: second.into(), why: why.into() };
            if holds { Ok(()) } else { Err(conflict()) }
        };
        let is_wsd = self.lr_scheduler == LrScheduler::WarmupStableDecay;
        all([
            unless(
                self.warmup_steps.is_none() || self.warmup_ratio.is_none(),
                "warmup_steps",
                "warmup_ratio",
                "both set the length of the warm-up; keep one",
            ),
            unless(
                self.cosine_min_lr_ratio == 0.0 || self.lr_scheduler == LrScheduler::Cosine,
                "cosine_min_lr_ratio",
                "lr_scheduler",
                "only `cosine` has a lowest learning rate; remove the first, or set the second to cosine",
            ),
            unless(
                self.decay_ratio.is_none() || is_wsd,
                "decay_ratio",
                "lr_scheduler",
                "only `wsd` has a decay at its end; remove the first, or set the second to wsd",
            ),
            unless(
                self.warmup_ratio.unwrap_or(0.0) + self.decay_ratio.unwrap_or(0.0) <= 1.0,
                "warmup_ratio",
                "decay_ratio",
                "their sum exceeds the whole run; reduce one",
            ),
        ])
    }
}
