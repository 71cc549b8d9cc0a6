//! Low-rank adapters: train small matrices beside frozen weights.

use super::at::At;
use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{COUNT, POSITIVE, Range, Setting};
use fancy_regex::Regex;
use phalanx_strategies::program::Packing;
use serde_yaml_ng::Value;
use std::path::PathBuf;

/// With a larger share of zeros, the factor of the other elements loses its meaning.
const DROPOUT: Range = Range { fits: "a number between 0 and 0.99", holds: |x| (0.0..=0.99).contains(&x) };

section! {
    /// Low-rank adapters.
    pub struct AdapterSection {
        /// `lora` freezes the model and trains low-rank matrices beside its weights (Hu et al. 2021); `qlora` also stores the
        /// frozen weights as `load_in_4bit` does.
        pub adapter: Option<Adapter> = None;
        /// Rank of the matrices; if not set, 8.
        pub lora_r: Option<usize> = None => COUNT;
        /// The product of the matrices is scaled by `lora_alpha / lora_r`; if not set, 16.
        pub lora_alpha: Option<f64> = None => POSITIVE;
        /// Linear layers that get an adapter: a list of paths or ends of paths, such as q_proj, or one regular expression for
        /// whole paths, which may also be those of a model with images (model.language_model.…).
        pub lora_target_modules: Targets = Targets::default();
        /// Add an adapter to every linear layer of the blocks.
        pub lora_target_linear: bool = false;
        /// Indices of the blocks whose layers get adapters; empty for all.
        pub peft_layers_to_transform: Vec<usize> = Vec::new();
        /// Modules that are trained whole beside the adapters, such as embed_tokens and lm_head: ends of their paths, also within
        /// a component, as in PEFT, so that norm means every norm before a part of a block too.
        pub lora_modules_to_save: Vec<String> = Vec::new();
        /// Directory of an adapter from which training starts, as PEFT or an earlier run wrote it.
        pub lora_model_dir: Option<PathBuf> = None;
        /// Scale by `lora_alpha / sqrt(lora_r)` instead (rsLoRA, Kalajdzievski 2023).
        pub peft_use_rslora: bool = false;
        /// Without adapters, train only parameters whose names begin with a match of one of these regular expressions, in which
        /// dots are dots; empty for all.
        pub trained_parameters: Vec<String> = Vec::new();
        /// Train the lengths of the rows of the adapted weights too (DoRA, Liu et al. 2024); without dropout and tensor
        /// parallelism.
        pub peft_use_dora: bool = false;
        /// Probability with which an element of an adapter's input is zeroed in training.
        pub lora_dropout: f64 = 0.0 => DROPOUT;
        /// Learning rate of the matrices B over that of the matrices A (LoRA+, Hayou et al. 2024); if not set, 1.
        pub loraplus_lr_ratio: Option<f64> = None => POSITIVE;
        /// Store the frozen matrices of the blocks as nf4, 4.5 bits for each weight (QLoRA, Dettmers et al. 2023); if not set, with
        /// `qlora` only.
        pub load_in_4bit: Option<bool> = None;
        /// With nf4: round the scales as double quantisation does.
        pub bnb_4bit_use_double_quant: bool = true;
        /// Store the frozen matrices of the blocks as int8, 8.5 bits for each weight; products use the rounded weights.
        pub load_in_8bit: bool = false;
    }
}

choices! {
    /// The kind of adapter.
    pub enum Adapter {
        /// Low-rank matrices added to linear layers.
        Lora = "lora";
        /// Low-rank matrices beside weights of 4 bits.
        Qlora = "qlora";
    }
}

/// The value of `lora_target_modules`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// Modules with these paths or ends of paths.
    Named(Vec<String>),
    /// Modules whose whole path matches this regular expression.
    Matching(String),
}

impl Default for Targets {
    fn default() -> Targets {
        Targets::Named(Vec::new())
    }
}

/// PEFT's word for every linear layer of the blocks.
const ALL_LINEAR: &str = "all-linear";

impl Targets {
    fn is_empty(&self) -> bool {
        matches!(self, Targets::Named(names) if names.is_empty())
    }

    fn is_all_linear(&self) -> bool {
        matches!(self, Targets::Matching(word) if word == ALL_LINEAR)
    }
}

impl Setting for Targets {
    fn fits() -> String {
        format!("a list of strings, a regular expression, or {ALL_LINEAR}")
    }

    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            Value::String(pattern) if !pattern.is_empty() && whole(pattern).is_ok() => {
                Ok(Targets::Matching(pattern.clone()))
            }
            Value::Sequence(_) => Vec::read(value, at).map(Targets::Named),
            _ => Err(at.mismatch(value, Self::fits())),
        }
    }

    fn write(&self) -> Value {
        match self {
            Targets::Named(names) => names.write(),
            Targets::Matching(pattern) => pattern.write(),
        }
    }
}

impl Setting for Vec<usize> {
    fn fits() -> String {
        "a list of whole numbers".into()
    }

    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let items = value.as_sequence().ok_or_else(|| at.mismatch(value, Self::fits()))?;
        items.iter().enumerate().map(|(i, item)| usize::read(item, &at.item(i))).collect()
    }

    fn write(&self) -> Value {
        Value::Sequence(self.iter().map(Setting::write).collect())
    }
}

/// A regular expression for whole strings, as Python's `fullmatch`.
pub(crate) fn whole(pattern: &str) -> Result<Regex, Box<fancy_regex::Error>> {
    Regex::new(&format!(r"\A(?:{pattern})\z")).map_err(Box::new)
}

/// What to adapt, with every default filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora<'a> {
    /// Rank of the matrices.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// The layers that are adapted.
    pub targets: LoraTargets<'a>,
    /// The configuration, for what has no default to fill in.
    pub section: &'a AdapterSection,
}

impl Lora<'_> {
    /// Factor of the product of the matrices.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.section.peft_use_rslora { rank.sqrt() } else { rank }
    }
}

/// The layers that are adapted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraTargets<'a> {
    /// Every linear layer of the blocks.
    pub all_linear: bool,
    /// The layers with these paths or ends of paths.
    pub named: &'a [String],
    /// The layers whose paths match this regular expression.
    pub matching: Option<&'a str>,
}

/// Rank when `lora_r` is not given, the default of PEFT.
const RANK_DEFAULT: usize = 8;
/// Value of `lora_alpha` when it is not given: twice the default rank, the common choice.
const ALPHA_DEFAULT: f64 = 16.0;

impl AdapterSection {
    /// The adapters to train, or `None` if the whole model is trained.
    pub fn lora(&self) -> Option<Lora<'_>> {
        self.adapter?;
        let all_linear = self.lora_target_linear || self.lora_target_modules.is_all_linear();
        let (named, matching): (&[String], _) = match &self.lora_target_modules {
            Targets::Named(names) => (names, None),
            Targets::Matching(pattern) => (&[], Some(pattern.as_str()).filter(|pattern| *pattern != ALL_LINEAR)),
        };
        Some(Lora {
            rank: self.lora_r.unwrap_or(RANK_DEFAULT),
            alpha: self.lora_alpha.unwrap_or(ALPHA_DEFAULT),
            targets: LoraTargets { all_linear, named, matching },
            section: self,
        })
    }

    /// How the frozen matrices of blocks are stored, if not as f32.
    pub fn packing(&self) -> Option<Packing> {
        if self.load_in_4bit == Some(true) || self.adapter == Some(Adapter::Qlora) {
            return Some(Packing::Nf4 { double: self.bnb_4bit_use_double_quant });
        }
        self.load_in_8bit.then_some(Packing::Int8)
    }

    /// The same adapters with one spelling of each setting.
    pub(super) fn as_meant(&self) -> AdapterSection {
        let is_in_4_bits = matches!(self.packing(), Some(Packing::Nf4 { .. }));
        let lora = self.lora().map(|lora| (lora.rank, lora.alpha));
        AdapterSection {
            adapter: self.adapter.map(|_| Adapter::Lora),
            load_in_4bit: is_in_4_bits.then_some(true),
            lora_r: lora.map(|(rank, _)| rank),
            lora_alpha: lora.map(|(_, alpha)| alpha),
            loraplus_lr_ratio: self.loraplus_lr_ratio.filter(|&ratio| ratio != 1.0),
            ..self.clone()
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let given = [
            ("lora_r", self.lora_r.is_some()),
            ("lora_alpha", self.lora_alpha.is_some()),
            ("lora_target_modules", !self.lora_target_modules.is_empty()),
            ("lora_target_linear", self.lora_target_linear),
            ("peft_layers_to_transform", !self.peft_layers_to_transform.is_empty()),
            ("lora_modules_to_save", !self.lora_modules_to_save.is_empty()),
            ("lora_model_dir", self.lora_model_dir.is_some()),
            ("peft_use_rslora", self.peft_use_rslora),
            ("peft_use_dora", self.peft_use_dora),
            ("lora_dropout", self.lora_dropout > 0.0),
            ("loraplus_lr_ratio", self.loraplus_lr_ratio.is_some()),
            ("load_in_4bit", self.load_in_4bit == Some(true)),
            ("load_in_8bit", self.load_in_8bit),
        ];
        if (self.adapter, self.load_in_4bit) == (Some(Adapter::Qlora), Some(false)) {
            return Err(ConfigError::Conflict {
                first: "load_in_4bit".into(),
                second: "adapter".into(),
                why: "`qlora` stores the frozen weights in 4 bits; use `adapter: lora`, or remove the first".into(),
            });
        }
        if let (true, Some(Packing::Nf4 { .. })) = (self.load_in_8bit, self.packing()) {
            return Err(ConfigError::Conflict {
                first: "load_in_8bit".into(),
                second: if self.load_in_4bit == Some(true) { "load_in_4bit" } else { "adapter" }.into(),
                why: "the frozen weights have either 8 bits or 4; remove one of the two, or use `adapter: lora`".into(),
            });
        }
        if self.adapter.is_some() && !self.trained_parameters.is_empty() {
            return Err(ConfigError::Conflict {
                first: "trained_parameters".into(),
                second: "adapter".into(),
                why: "adapters leave all other parameters frozen; name modules to train whole in `lora_modules_to_save`, or remove one of the two".into(),
            });
        }
        if self.peft_use_dora && self.lora_dropout > 0.0 {
            return Err(ConfigError::Conflict {
                first: "peft_use_dora".into(),
                second: "lora_dropout".into(),
                why: "DoRA is trained without dropout; set `lora_dropout: 0`, or remove one of the two".into(),
            });
        }
        match (self.adapter, given.iter().find(|(_, given)| *given)) {
            (None, Some((key, _))) => Err(ConfigError::Conflict {
                first: (*key).into(),
                second: "adapter".into(),
                why: "no adapter is trained; add `adapter: lora` or remove the key".into(),
            }),
            (Some(_), _) if !self.lora_target_linear && self.lora_target_modules.is_empty() => {
                let why = "name the layers, or set `lora_target_linear: true` for all of them";
                Err(ConfigError::Missing { key: "lora_target_modules".into(), why: why.into() })
            }
            _ => Ok(()),
        }
    }
}
