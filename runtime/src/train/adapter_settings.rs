//! The settings of a PEFT adapter, from `adapter_config.json`.
//!
//! Every key of PEFT's `LoraConfig` either is used here, or changes only training, or must be empty: an adapter that computes
//! something else than low-rank products is refused by the key and its value, as is a key that PEFT does not have today.
//! Absent keys have the defaults of PEFT. Checked against PEFT 0.21.

use crate::error::JobError;
use crate::error::merge::MergeError;
use fancy_regex::Regex;
use phalanx_storage::hf::adapter::ADAPTER_CONFIG;
use phalanx_storage::hf::error::HfError;
use phalanx_storage::hf::source::read_json;
use phalanx_strategies::passes::lora::is_saved;
use serde_json::{Map, Value};
use std::path::Path;

/// The settings of an adapter that determine what it computes.
#[derive(Debug)]
pub(crate) struct AdapterSettings {
    /// Directory or name of the model that it was trained on.
    pub(crate) base_model: Option<String>,
    /// Branch, tag or commit of that model.
    pub(crate) revision: Option<String>,
    /// Rank of modules that `rank_pattern` does not name.
    pub(crate) rank: usize,
    /// Numerator of the scale of modules that `alpha_pattern` does not name.
    pub(crate) alpha: f64,
    /// Scale by the root of the rank.
    pub(crate) use_rslora: bool,
    /// Rows of adapted weights have trained lengths.
    pub(crate) use_dora: bool,
    /// The model gives scores.
    pub(crate) is_classifier: bool,
    /// The matrices B have biases.
    pub(crate) lora_bias: bool,
    /// The value of `target_modules`, for people.
    pub(crate) target_modules: Value,
    /// Ends of the paths of modules that were trained whole.
    pub(crate) modules_to_save: Vec<String>,
    ranks: Vec<(Regex, f64)>,
    alphas: Vec<(Regex, f64)>,
    targets: Targets,
    excluded: Targets,
    layers: Vec<usize>,
    layers_patterns: Vec<Regex>,
}

/// Which modules a key names.
#[derive(Debug)]
enum Targets {
    /// The key is absent.
    Unknown,
    /// Modules with these paths or ends of paths.
    Named(Vec<String>),
    /// Modules whose whole path matches.
    Matching(Regex),
}

/// Keys without an effect on what a trained adapter computes.
const WITHOUT_EFFECT: [&str; 13] = [
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
];

/// Keys that are used.
const USED: [&str; 18] = [
    "alpha_pattern",
    "base_model_name_or_path",
    "bias",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
];

/// Initial values that leave the weights of the base model as they are. `pissa`, `olora`, `corda`, `loftq` and `lora_ga` subtract
/// from those, each time that PEFT loads the adapter.
const INITS: [&str; 4] = ["eva", "gaussian", "mica", "orthogonal"];

/// PEFT's word for models that continue texts.
pub(crate) const LANGUAGE: &str = "CAUSAL_LM";
/// PEFT's word for models that give scores.
pub(crate) const CLASSIFICATION: &str = "SEQ_CLS";
/// Tasks of supported models.
const TASKS: [&str; 3] = [LANGUAGE, "FEATURE_EXTRACTION", CLASSIFICATION];

/// The default of PEFT for `r` and `lora_alpha`.
const DEFAULT: f64 = 8.0;

impl AdapterSettings {
    /// Reads the settings of the adapter in a directory.
    ///
    /// # Errors
    /// When they cannot be read, or the adapter computes something else than this build does.
    pub(crate) fn read(dir: &Path) -> Result<AdapterSettings, JobError> {
        let path = dir.join(ADAPTER_CONFIG);
        match read_json(&path)? {
            Value::Object(keys) => Ok(Keys { dir, keys }.settings()?),
            _ => Err(HfError::BadJson { path, reason: "it is no object".into() }.into()),
        }
    }

    /// The rank of a module's matrices.
    pub(crate) fn rank_of(&self, module: &str) -> usize {
        of_pattern(&self.ranks, module).map_or(self.rank, |rank| rank as usize)
    }

    /// The factor of the product of a module's matrices.
    pub(crate) fn scale_of(&self, module: &str) -> f64 {
        let rank = self.rank_of(module) as f64;
        of_pattern(&self.alphas, module).unwrap_or(self.alpha) / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// The first key that gives modules different ranks or scales, or biases.
    pub(crate) fn uneven(&self) -> Option<&'static str> {
        let keys = [
            ("rank_pattern", !self.ranks.is_empty()),
            ("alpha_pattern", !self.alphas.is_empty()),
            ("lora_bias", self.lora_bias),
        ];
        keys.into_iter().find(|(_, is_set)| *is_set).map(|(key, _)| key)
    }

    /// Whether a module is adapted; `None` if only the tensors tell.
    pub(crate) fn adapts(&self, module: &str) -> Option<bool> {
        let named = self.targets.name(module)?;
        let is_excluded = self.excluded.name(module) == Some(true) || self.saves_part_of(module);
        Some(named && !is_excluded && self.is_in_layers(module))
    }

    /// Whether a module is trained whole.
    pub(crate) fn saves(&self, module: &str) -> bool {
        is_saved(module, &self.modules_to_save)
    }

    /// Whether a module to save is a component of the path, in which case PEFT adapts nothing there.
    fn saves_part_of(&self, module: &str) -> bool {
        let bounded = format!(".{module}.");
        self.modules_to_save.iter().any(|name| bounded.contains(&format!(".{name}.")))
    }

    fn is_in_layers(&self, module: &str) -> bool {
        if self.layers.is_empty() {
            return true;
        }
        let first_number = || module.split('.').skip(2).find_map(|part| part.parse().ok());
        let in_pattern = |regex: &Regex| {
            let found = regex.captures(module).ok().flatten()?;
            found.name("idx")?.as_str().parse().ok()
        };
        let layer: Option<usize> = match self.layers_patterns.is_empty() {
            true => first_number(),
            false => self.layers_patterns.iter().find_map(in_pattern),
        };
        layer.is_some_and(|layer| self.layers.contains(&layer))
    }
}

impl Targets {
    fn name(&self, module: &str) -> Option<bool> {
        match self {
            Targets::Unknown => None,
            Targets::Named(names) => Some(names.iter().any(|name| {
                module.strip_suffix(name.as_str()).is_some_and(|before| before.is_empty() || before.ends_with('.'))
            })),
            Targets::Matching(regex) => Some(regex.is_match(module).unwrap_or(false)),
        }
    }
}

/// The value for the first pattern that matches the end of a module's path, as PEFT chooses it.
fn of_pattern(patterns: &[(Regex, f64)], module: &str) -> Option<f64> {
    patterns.iter().find(|(regex, _)| regex.is_match(module).unwrap_or(false)).map(|(_, value)| *value)
}

/// The keys of a file.
struct Keys<'a> {
    dir: &'a Path,
    keys: Map<String, Value>,
}

impl Keys<'_> {
    fn settings(&self) -> Result<AdapterSettings, MergeError> {
        if self.keys.get("peft_type") != Some(&Value::from("LORA")) {
            return Err(self.refuse("peft_type", "and only adapters of type \"LORA\" are supported"));
        }
        self.check_task()?;
        self.check_init()?;
        self.check_bias()?;
        for key in
            self.keys.keys().filter(|key| !USED.contains(&key.as_str()) && !WITHOUT_EFFECT.contains(&key.as_str()))
        {
            if !self.is_empty(key) {
                return Err(self.refuse(key, why_unsupported(key)));
            }
        }
        Ok(AdapterSettings {
            base_model: self.text("base_model_name_or_path")?,
            revision: self.text("revision")?,
            rank: self.number("r", as_rank, "and must be a whole number of at least 1")? as usize,
            alpha: self.number("lora_alpha", as_number, "and must be a number")?,
            use_rslora: self.switch("use_rslora")?,
            use_dora: self.switch("use_dora")?,
            is_classifier: self.text("task_type")?.as_deref() == Some(CLASSIFICATION),
            lora_bias: self.switch("lora_bias")?,
            target_modules: self.keys.get("target_modules").cloned().unwrap_or_default(),
            modules_to_save: self.names("modules_to_save")?,
            ranks: self.patterns(
                "rank_pattern",
                as_rank,
                "and must map names of modules to whole numbers of at least 1",
            )?,
            alphas: self.patterns("alpha_pattern", as_number, "and must map names of modules to numbers")?,
            targets: self.targets("target_modules")?,
            excluded: match self.is_empty("exclude_modules") {
                true => Targets::Named(Vec::new()),
                false => self.targets("exclude_modules")?,
            },
            layers: self.layers()?,
            layers_patterns: self.layers_patterns()?,
        })
    }

    fn refuse(&self, key: &str, why: &'static str) -> MergeError {
        let found = match self.keys.get(key) {
            Some(value) => value.to_string().chars().take(60).collect(),
            None => "missing".into(),
        };
        MergeError::Setting { dir: self.dir.to_owned(), key: key.into(), found, wanted: why.into() }
    }

    /// Whether a key is absent, or has a value that PEFT takes for absent.
    fn is_empty(&self, key: &str) -> bool {
        match self.keys.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => true,
            Some(Value::String(text)) => text.is_empty(),
            Some(Value::Array(items)) => items.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            Some(Value::Bool(true) | Value::Number(_)) => false,
        }
    }

    fn number(&self, key: &'static str, read: Read, why: &'static str) -> Result<f64, MergeError> {
        match self.keys.get(key) {
            None => Ok(DEFAULT),
            Some(value) => read(value).ok_or_else(|| self.refuse(key, why)),
        }
    }

    fn switch(&self, key: &'static str) -> Result<bool, MergeError> {
        match self.keys.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(value)) => Ok(*value),
            Some(_) => Err(self.refuse(key, "and must be true or false")),
        }
    }

    fn text(&self, key: &'static str) -> Result<Option<String>, MergeError> {
        match self.keys.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone()).filter(|text| !text.is_empty())),
            Some(_) => Err(self.refuse(key, "and must be a text")),
        }
    }

    fn names(&self, key: &'static str) -> Result<Vec<String>, MergeError> {
        let items = match self.keys.get(key) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(value) => value.as_array().map(|items| items.iter().map(|item| item.as_str().map(str::to_owned))),
        };
        let names: Option<Vec<String>> = items.and_then(Iterator::collect);
        let names = names.filter(|names| names.iter().all(|name| !name.is_empty()));
        names.ok_or_else(|| self.refuse(key, "and must be a list of names of modules"))
    }

    fn patterns(&self, key: &'static str, read: Read, why: &'static str) -> Result<Vec<(Regex, f64)>, MergeError> {
        if self.is_empty(key) {
            return Ok(Vec::new());
        }
        let entry = |(pattern, value): (&String, &Value)| {
            Some((Regex::new(&format!(r"\A(?:.*\.)?(?:{pattern})\z")).ok()?, read(value)?))
        };
        let entries = self.keys[key].as_object().and_then(|map| map.iter().map(entry).collect());
        entries.ok_or_else(|| self.refuse(key, why))
    }

    fn targets(&self, key: &'static str) -> Result<Targets, MergeError> {
        match self.keys.get(key) {
            None | Some(Value::Null) => Ok(Targets::Unknown),
            // PEFT writes the names that it stands for.
            Some(Value::String(word)) if word.eq_ignore_ascii_case("all-linear") => Ok(Targets::Unknown),
            Some(Value::String(pattern)) => {
                let regex = Regex::new(&format!(r"\A(?:{pattern})\z"));
                regex.map(Targets::Matching).map_err(|_| self.refuse(key, "which is no regular expression"))
            }
            Some(_) => self.names(key).map(Targets::Named),
        }
    }

    fn layers(&self) -> Result<Vec<usize>, MergeError> {
        let key = "layers_to_transform";
        let index = |value: &Value| value.as_u64().and_then(|index| usize::try_from(index).ok());
        let layers = match self.keys.get(key) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(items)) => items.iter().map(index).collect(),
            Some(value) => index(value).map(|index| vec![index]),
        };
        layers.ok_or_else(|| self.refuse(key, "and must be the index of a layer, or a list of them"))
    }

    fn layers_patterns(&self) -> Result<Vec<Regex>, MergeError> {
        let key = "layers_pattern";
        let names = match self.keys.get(key) {
            Some(Value::String(name)) => vec![name.clone()].into_iter().filter(|name| !name.is_empty()).collect(),
            _ => self.names(key)?,
        };
        let regex = |name: &String| Regex::new(&format!(r"\A(?:.*?\.)?{name}\.(?P<idx>\d+)\.")).ok();
        let regexes: Option<Vec<Regex>> = names.iter().map(regex).collect();
        regexes.ok_or_else(|| self.refuse(key, "which is no regular expression"))
    }

    fn check_task(&self) -> Result<(), MergeError> {
        match self.text("task_type")? {
            Some(task) if !TASKS.contains(&task.as_str()) => Err(self.refuse(
                "task_type",
                "and only adapters of language models (\"CAUSAL_LM\") and of reward models (\"SEQ_CLS\") are supported",
            )),
            _ => Ok(()),
        }
    }

    fn check_init(&self) -> Result<(), MergeError> {
        let key = "init_lora_weights";
        match self.keys.get(key) {
            None | Some(Value::Null | Value::Bool(_)) => Ok(()),
            Some(Value::String(init)) if INITS.contains(&init.to_lowercase().as_str()) => Ok(()),
            Some(_) => Err(self.refuse(
                key,
                "so the adapter does not belong to the base model's own weights, or its kind is unknown; save it in PEFT with \
                 `path_initial_model_for_weight_conversion`, or merge it there",
            )),
        }
    }

    fn check_bias(&self) -> Result<(), MergeError> {
        match self.text("bias")?.as_deref() {
            None | Some("none" | "all" | "lora_only") => Ok(()),
            Some(_) => Err(self.refuse("bias", "and must be \"none\", \"all\" or \"lora_only\"")),
        }
    }
}

/// Reads a number of a kind.
type Read = fn(&Value) -> Option<f64>;

fn as_number(value: &Value) -> Option<f64> {
    value.as_f64().filter(|x| x.is_finite())
}

fn as_rank(value: &Value) -> Option<f64> {
    let rank = value.as_u64().and_then(|rank| u32::try_from(rank).ok());
    rank.filter(|rank| *rank >= 1).map(f64::from)
}

/// Why a key of another kind of adapter is refused.
fn why_unsupported(key: &str) -> &'static str {
    match key {
        "layer_replication" => "and models with repeated layers are not supported",
        "alora_invocation_tokens" => "and adapters that are active at some tokens only are not supported",
        "arrow_config" => "and adapters that are chosen by their input are not supported",
        "trainable_token_indices" => "and trained rows of embeddings are not supported; merge the adapter in PEFT",
        "target_parameters" => "and adapters of parameters that are no modules are not supported",
        "megatron_config" => "and adapters of Megatron's layers are not supported",
        "kasa_config" | "monteclora_config" | "use_bdlora" | "use_qalora" | "velora_config" => {
            "and such adapters compute something else than low-rank products; merge the adapter in PEFT"
        }
        _ => "a key that this build does not know; remove it if it does not change what the adapter computes",
    }
}

#[cfg(test)]
#[path = "adapter_settings_tests.rs"]
mod tests;
