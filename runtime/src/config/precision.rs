//! On which device and in which number formats a step computes, what it keeps for the backward pass, and with how many threads.

use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{AT_LEAST_ONE, POSITIVE};

section! {
    /// Number formats, device, memory and threads.
    pub struct PrecisionSection {
        /// Activations and matrix products in bfloat16, weights and sums in f32; auto: where the machine multiplies it fast.
        pub bf16: Bf16 = Bf16::Off;
        /// Activations in float16, weights and sums in f32, the loss scaled so that small gradients survive.
        pub fp16: bool = false;
        /// With `fp16`: a fixed factor for the loss; without it, the factor adapts.
        pub loss_scale: Option<f64> = None => POSITIVE;
        /// With `fp16`: the adaptive factor at the start.
        pub initial_loss_scale: f64 = 65536.0 => POSITIVE;
        /// With `fp16`: steps without overflow after which the adaptive factor doubles.
        pub loss_scale_window: u64 = 2000 => AT_LEAST_ONE;
        /// With `fp16`: the adaptive factor never falls below this; training stops with an error where it would.
        pub min_loss_scale: f64 = 1.0 => POSITIVE;
        /// Recompute activations in the backward pass: false keeps all, selective keeps the input of each layer and its attention output, true or full keeps the input only.
        pub gradient_checkpointing: GradientCheckpointing = GradientCheckpointing::Off;
        /// The device that computes: cpu, or auto for the fastest that this build can use.
        pub device: DeviceChoice = DeviceChoice::Auto;
        /// Threads that compute; without it, one per core.
        pub threads: Option<usize> = None => AT_LEAST_ONE;
    }
}

choices! {
    /// Whether activations are bfloat16.
    pub enum Bf16 {
        /// No.
        Off = "false";
        /// Yes.
        On = "true" | "full";
        /// Where the machine has fast bfloat16 matrix products.
        Auto = "auto";
    }
}

choices! {
    /// The device that computes.
    pub enum DeviceChoice {
        /// The fastest that this build can use.
        Auto = "auto";
        /// The processors of the machine.
        Cpu = "cpu";
        /// NVIDIA GPUs.
        Cuda = "cuda";
    }
}

choices! {
    /// What the forward pass keeps for the backward pass.
    pub enum GradientCheckpointing {
        /// Everything.
        Off = "false";
        /// The input of every layer; the rest is computed again.
        Full = "full" | "true";
        /// The input of every layer and its attention output, whose work is large and whose size is small.
        Selective = "selective";
    }
}

/// The number format of activations and of the operands of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 32-bit floats throughout.
    F32,
    /// bfloat16 operands, f32 sums.
    Bf16,
    /// float16 operands, f32 sums, scaled loss.
    Fp16,
}

impl PrecisionSection {
    /// The format for a machine that multiplies bfloat16 fast, or does not.
    pub fn precision(&self, machine_has_fast_bf16: bool) -> Precision {
        match (self.fp16, self.bf16) {
            (true, _) => Precision::Fp16,
            (false, Bf16::On) => Precision::Bf16,
            (false, Bf16::Auto) if machine_has_fast_bf16 => Precision::Bf16,
            (false, _) => Precision::F32,
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let conflict = |first: &str, second: &str, why: &str| {
            Err(ConfigError::Conflict { first: first.into(), second: second.into(), why: why.into() })
        };
        if self.fp16 && self.bf16 != Bf16::Off {
            return conflict("bf16", "fp16", "a run computes in one of the two formats");
        }
        let default = Self::default();
        let scale_keys = [
            ("loss_scale", self.loss_scale != default.loss_scale),
            ("initial_loss_scale", self.initial_loss_scale != default.initial_loss_scale),
            ("loss_scale_window", self.loss_scale_window != default.loss_scale_window),
            ("min_loss_scale", self.min_loss_scale != default.min_loss_scale),
        ];
        if let Some((key, _)) = scale_keys.iter().find(|(_, changed)| *changed && !self.fp16) {
            return conflict(key, "fp16", "the loss is scaled only where `fp16` is true");
        }
        if self.loss_scale.is_some() && scale_keys[1..].iter().any(|(_, changed)| *changed) {
            return conflict("loss_scale", "initial_loss_scale", "a fixed factor does not adapt");
        }
        if self.initial_loss_scale < self.min_loss_scale {
            return conflict("initial_loss_scale", "min_loss_scale", "the factor would start below its lowest value");
        }
        Ok(())
    }
}
