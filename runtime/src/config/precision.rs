//! Device, number formats, activation memory and threads of a step.

use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{AT_LEAST_ONE, POSITIVE, THREADS};

section! {
    /// Number formats, device, memory and threads.
    pub struct PrecisionSection {
        /// Activations and matrix products in bfloat16, sums and weights in f32, except frozen matrices beside adapters that only
        /// products read; auto: only if the machine has fast bfloat16 products; full: as true, and the matrices that DoRA adapts are
        /// stored in bfloat16 too.
        pub bf16: Bf16 = Bf16::Off;
        /// With `bf16`: linear layers of the blocks multiply 8-bit floats, forward and for the gradients of activations, which GPUs of
        /// compute capability 9.0 do faster; other devices multiply the same numbers in bfloat16. Frozen matrices beside adapters are
        /// stored in this form. Models with weights beyond 28 there are refused.
        pub fp8: bool = false;
        /// Activations in float16, weights and sums in f32; the loss is scaled so that small gradients do not
        /// underflow.
        pub fp16: bool = false;
        /// With `fp16`: fixed factor for the loss; if not set, the factor adapts.
        pub loss_scale: Option<f64> = None => POSITIVE;
        /// With `fp16`: initial value of the adaptive factor.
        pub initial_loss_scale: f64 = 65536.0 => POSITIVE;
        /// With `fp16`: steps without overflow after which the adaptive factor doubles.
        pub loss_scale_window: u64 = 2000 => AT_LEAST_ONE;
        /// With `fp16`: lower limit of the adaptive factor; training stops with an error if the factor would fall below
        /// it.
        pub min_loss_scale: f64 = 1.0 => POSITIVE;
        /// Recompute activations in the backward pass: false keeps all but the results of norms, activation functions and
        /// dropout, selective keeps the input and the attention output of each layer, true or full keeps only the input.
        pub gradient_checkpointing: GradientCheckpointing = GradientCheckpointing::Off;
        /// Device that computes: cuda for NVIDIA GPUs, cpu, or auto for a GPU if this machine has one that works, else the CPU.
        pub device: DeviceChoice = DeviceChoice::Auto;
        /// How GPU ranks exchange tensors: nccl, staged for copies in host memory, or auto for NCCL where it can be used.
        /// Between nodes NCCL opens sockets without authentication or encryption, on the interfaces in `NCCL_SOCKET_IFNAME`: name one of a
        /// private network.
        pub gpu_collectives: GpuCollectives = GpuCollectives::Auto;
        /// Attention on GPUs: cudnn, own for the kernels of Phalanx, or auto for cuDNN where it is present and has a plan.
        pub attention: AttentionEngine = AttentionEngine::Auto;
        /// Compute threads; if not set, one per core.
        pub threads: Option<usize> = None => THREADS;
    }
}

choices! {
    /// Whether activations are bfloat16.
    pub enum Bf16 {
        /// No.
        Off = "false";
        /// Yes.
        On = "true";
        /// Yes, and so are frozen matrices that DoRA adapts, whose lengths change.
        Full = "full";
        /// Only if the machine has fast bfloat16 matrix products.
        Auto = "auto";
    }
}

choices! {
    /// The device that computes.
    pub enum DeviceChoice {
        /// A GPU if this machine has one that works, else the processors.
        Auto = "auto";
        /// The processors of the machine.
        Cpu = "cpu";
        /// NVIDIA GPUs.
        Cuda = "cuda";
    }
}

choices! {
    /// How GPU ranks exchange tensors.
    pub enum GpuCollectives {
        /// NCCL where all ranks have it and a GPU of their own, else copies in host memory.
        Auto = "auto";
        /// NCCL, or an error.
        Nccl = "nccl";
        /// Copies in host memory.
        Staged = "staged";
    }
}

choices! {
    /// What attention runs through on a GPU.
    pub enum AttentionEngine {
        /// cuDNN where it is present and has a plan, else the kernels of Phalanx.
        Auto = "auto";
        /// cuDNN, which must be present.
        Cudnn = "cudnn";
        /// The kernels of Phalanx.
        Own = "own";
    }
}

choices! {
    /// The activations that the forward pass keeps for the backward pass.
    pub enum GradientCheckpointing {
        /// Everything that takes more than one pass over memory to compute again.
        Off = "false";
        /// The input of every layer; all other activations are recomputed.
        Full = "full" | "true";
        /// The input and the attention output of every layer; the latter is expensive to compute and small.
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
    /// The same, and 8-bit operands in linear layers.
    Fp8,
    /// float16 operands, f32 sums, scaled loss.
    Fp16,
}

impl PrecisionSection {
    /// The format for a machine with or without fast bfloat16 products.
    pub fn precision(&self, machine_has_fast_bf16: bool) -> Precision {
        match (self.fp16, self.bf16) {
            (true, _) => Precision::Fp16,
            // Who asks for it asks for bfloat16 too.
            _ if self.fp8 => Precision::Fp8,
            (false, Bf16::On | Bf16::Full) => Precision::Bf16,
            (false, Bf16::Auto) if machine_has_fast_bf16 => Precision::Bf16,
            (false, _) => Precision::F32,
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let conflict = |first: &str, second: &str, why: &str| {
            Err(ConfigError::Conflict { first: first.into(), second: second.into(), why: why.into() })
        };
        if self.fp16 && self.bf16 != Bf16::Off {
            return conflict("bf16", "fp16", "a run uses only one of the two formats");
        }
        if self.fp8 && self.bf16 == Bf16::Off {
            return conflict("fp8", "bf16", "activations beside 8-bit products are bfloat16: set `bf16: true`");
        }
        let default = Self::default();
        let scale_keys = [
            ("loss_scale", self.loss_scale != default.loss_scale),
            ("initial_loss_scale", self.initial_loss_scale != default.initial_loss_scale),
            ("loss_scale_window", self.loss_scale_window != default.loss_scale_window),
            ("min_loss_scale", self.min_loss_scale != default.min_loss_scale),
        ];
        if let Some((key, _)) = scale_keys.iter().find(|(_, changed)| *changed && !self.fp16) {
            return conflict(key, "fp16", "the loss is scaled only if `fp16` is true");
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
