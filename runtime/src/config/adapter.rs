//! Low-rank adapters: train small matrices beside frozen weights.

use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{COUNT, POSITIVE};

section! {
    /// Low-rank adapters.
    pub struct AdapterSection {
        /// `lora` freezes the model and trains low-rank matrices beside its weights (Hu et al. 2021).
        pub adapter: Option<Adapter> = None;
        /// Rank of the matrices; if not set, 8.
        pub lora_r: Option<usize> = None => COUNT;
        /// The product of the matrices is scaled by `lora_alpha / lora_r`; if not set, 16.
        pub lora_alpha: Option<f64> = None => POSITIVE;
        /// Names of the linear layers that get an adapter, such as q_proj.
        pub lora_target_modules: Vec<String> = Vec::new();
        /// Add an adapter to every linear layer of the blocks.
        pub lora_target_linear: bool = false;
    }
}

choices! {
    /// The kind of adapter.
    pub enum Adapter {
        /// Low-rank matrices added to linear layers.
        Lora = "lora";
    }
}

/// What to adapt, with every default filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora<'a> {
    /// Rank of the matrices.
    pub rank: usize,
    /// Numerator of the scale: the product of the matrices is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// The layers that are adapted.
    pub targets: LoraTargets<'a>,
}

/// The layers that are adapted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraTargets<'a> {
    /// Every linear layer of the blocks.
    AllLinear,
    /// The layers with these names.
    Modules(&'a [String]),
}

/// Rank when `lora_r` is not given, the default of PEFT.
const RANK_DEFAULT: usize = 8;
/// Value of `lora_alpha` when it is not given: twice the default rank, the common choice.
const ALPHA_DEFAULT: f64 = 16.0;

impl AdapterSection {
    /// The adapters to train, or `None` if the whole model is trained.
    pub fn lora(&self) -> Option<Lora<'_>> {
        let Adapter::Lora = self.adapter?;
        let targets = match self.lora_target_modules.as_slice() {
            [] => LoraTargets::AllLinear,
            modules => LoraTargets::Modules(modules),
        };
        Some(Lora {
            rank: self.lora_r.unwrap_or(RANK_DEFAULT),
            alpha: self.lora_alpha.unwrap_or(ALPHA_DEFAULT),
            targets,
        })
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let conflict = |first: &str, second: &str, why: &str| {
            Err(ConfigError::Conflict { first: first.into(), second: second.into(), why: why.into() })
        };
        let given = [
            ("lora_r", self.lora_r.is_some()),
            ("lora_alpha", self.lora_alpha.is_some()),
            ("lora_target_modules", !self.lora_target_modules.is_empty()),
            ("lora_target_linear", self.lora_target_linear),
        ];
        match (self.adapter, given.iter().find(|(_, given)| *given)) {
            (None, Some((key, _))) => {
                conflict(key, "adapter", "no adapter is trained; add `adapter: lora` or remove the key")
            }
            (Some(_), _) if !self.lora_target_linear && self.lora_target_modules.is_empty() => {
                let why = "name the layers, or set `lora_target_linear: true` for all of them";
                Err(ConfigError::Missing { key: "lora_target_modules".into(), why: why.into() })
            }
            (Some(_), _) if self.lora_target_linear && !self.lora_target_modules.is_empty() => conflict(
                "lora_target_linear",
                "lora_target_modules",
                "the first selects all layers, the second only some; keep one",
            ),
            _ => Ok(()),
        }
    }
}
