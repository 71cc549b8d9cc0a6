//! The optimizer and its hyperparameters.
//!
//! [`phalanx_strategies::optimizer`] registers the rules and the keys of their hyperparameters.

use super::at::At;
use super::error::{ConfigError, Errors};
use super::key_doc::KeyDoc;
use super::section::{Section, section, show};
use super::setting::{self, Setting};
use crate::config::described;
use phalanx_strategies::optimizer::{AdamW, OptimizerSpec, Range};
use serde_yaml_ng::{Mapping, Value};

/// The optimizer.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerSection {
    /// The rule that turns gradients into updates of the weights, with its hyperparameters.
    pub rule: OptimizerSpec,
    /// Keep the optimizer state outside device memory; on a CPU, in a file in `output_dir`.
    pub offload_optimizer: bool,
    /// Clip the norm of all gradients to this value; 0 or none disables clipping.
    pub max_grad_norm: Option<f64>,
}

section! {
    /// The keys that apply to every rule.
    pub struct AnyRule {
        /// Keep the optimizer state outside device memory; on a CPU, in a file in `output_dir`.
        pub offload_optimizer: bool = false;
        /// Clip the norm of all gradients to this value; 0 or none disables clipping.
        pub max_grad_norm: Option<f64> = Some(1.0) => setting::NOT_NEGATIVE;
    }
}

/// The key that names the rule.
const RULE: &str = "optimizer";

impl Default for OptimizerSection {
    fn default() -> Self {
        Self::with(OptimizerSpec::AdamW(AdamW::default()), AnyRule::default())
    }
}

impl OptimizerSection {
    /// The norm to which gradients are clipped, if any.
    pub fn clip_norm(&self) -> Option<f64> {
        self.max_grad_norm.filter(|&norm| norm > 0.0)
    }

    fn with(rule: OptimizerSpec, any_rule: AnyRule) -> Self {
        let AnyRule { offload_optimizer, max_grad_norm } = any_rule;
        Self { rule, offload_optimizer, max_grad_norm }
    }

    fn any_rule(&self) -> AnyRule {
        AnyRule { offload_optimizer: self.offload_optimizer, max_grad_norm: self.max_grad_norm }
    }
}

impl Section for OptimizerSection {
    fn keys() -> Vec<KeyDoc> {
        let default = Self::default().rule;
        let rules = OptimizerSpec::all();
        let choices: Vec<String> = rules.iter().map(|r| format!("`{}`, {}", r.name(), r.summary())).collect();
        let rule = KeyDoc {
            key: RULE,
            aliases: &[],
            doc: format!("Rule that turns gradients into updates of the weights: {}.", choices.join("; ")),
            default: default.name().into(),
            fits: words(),
        };
        let hyperparameters = Key::all().into_iter().map(|key| key.doc());
        std::iter::once(rule).chain(hyperparameters).chain(AnyRule::keys()).collect()
    }

    fn read_section(keys: &Mapping, at: &At<'_>) -> Result<Self, ConfigError> {
        let mut errors = Errors::default();
        let rule = match given(keys, RULE) {
            None => Some(Self::default().rule),
            Some(word) => {
                let named = word.as_str().and_then(OptimizerSpec::named);
                errors.keep(named.ok_or_else(|| at.key(RULE).mismatch(word, words())))
            }
        };
        // Which keys the rule uses is known only with the rule.
        let mut rule_or_default = rule.unwrap_or_else(|| Self::default().rule);
        for key in Key::all().into_iter().filter(|_| rule.is_some()) {
            let Some(value) = given(keys, key.name) else { continue };
            errors.keep(key.read_into(&mut rule_or_default, value, &at.key(key.name)));
        }
        let any_rule = errors.keep(AnyRule::read_section(keys, at)).unwrap_or_default();
        errors.end(Self::with(rule_or_default, any_rule))
    }

    /// Also writes the keys that the rule does not use, with their defaults.
    fn write_section(&self, keys: &mut Mapping) {
        keys.insert(RULE.into(), self.rule.name().into());
        for key in Key::all() {
            let value = self.rule.get(key.name).unwrap_or(key.uses[0].default);
            keys.insert(key.name.into(), value.write());
        }
        self.any_rule().write_section(keys);
    }
}

/// A key of a hyperparameter, which several rules may use.
struct Key {
    name: &'static str,
    uses: Vec<Use>,
}

/// The use of a key by one rule.
struct Use {
    rule: &'static str,
    doc: &'static str,
    range: Range,
    default: f64,
}

impl Key {
    /// The keys of all rules, in the order of registration.
    fn all() -> Vec<Key> {
        let mut keys: Vec<Key> = Vec::new();
        for mut optimizer in OptimizerSpec::all() {
            let rule = optimizer.name();
            for h in optimizer.hyperparameters() {
                let used = Use { rule, doc: h.doc, range: h.range, default: *h.value };
                match keys.iter_mut().find(|key| key.name == h.key) {
                    Some(key) => key.uses.push(used),
                    None => keys.push(Key { name: h.key, uses: vec![used] }),
                }
            }
        }
        keys
    }

    /// Rules with the same meaning of the key share an entry. An entry names its default if it differs from the first
    /// rule's.
    fn doc(&self) -> KeyDoc {
        let first = &self.uses[0];
        let mut meanings: Vec<(String, Vec<String>)> = Vec::new();
        for used in &self.uses {
            let differs = used.default != first.default;
            let default = if differs { format!(", by default {}", show(&used.default.write())) } else { String::new() };
            let meaning = format!("{}{default}", used.doc);
            let rule = format!("`{}`", used.rule);
            match meanings.iter_mut().find(|(known, _)| *known == meaning) {
                Some((_, rules)) => rules.push(rule),
                None => meanings.push((meaning, vec![rule])),
            }
        }
        let entries: Vec<String> =
            meanings.into_iter().map(|(meaning, rules)| format!("{}: {meaning}", rules.join(", "))).collect();
        KeyDoc {
            key: self.name,
            aliases: &[],
            doc: format!("{}.", entries.join("; ")),
            default: show(&first.default.write()),
            fits: fits(first.range),
        }
    }

    /// Sets the hyperparameter of a rule. For a rule that does not use the key, only a default of the key is accepted.
    fn read_into(&self, rule: &mut OptimizerSpec, value: &Value, at: &At<'_>) -> Result<(), ConfigError> {
        let number = f64::read(value, at)?;
        let used = self.uses.iter().find(|used| used.rule == rule.name());
        let range = used.unwrap_or(&self.uses[0]).range;
        if !range.holds(number) {
            return Err(at.mismatch(value, fits(range)));
        }
        if rule.set(self.name, number) || self.uses.iter().any(|used| used.default == number) {
            return Ok(());
        }
        let users: Vec<String> = self.uses.iter().map(|used| format!("`{}`", used.rule)).collect();
        Err(ConfigError::Conflict {
            first: self.name.into(),
            second: RULE.into(),
            why: format!(
                "`{}` does not use this key, {} {}",
                rule.name(),
                users.join(" and "),
                if users.len() > 1 { "do" } else { "does" }
            ),
        })
    }
}

fn given<'a>(keys: &'a Mapping, key: &str) -> Option<&'a Value> {
    keys.get(key).filter(|value| !described::is_empty(value))
}

/// The words that name a rule, for messages and help.
fn words() -> String {
    let all: Vec<&str> = OptimizerSpec::all().iter().flat_map(OptimizerSpec::words).copied().collect();
    format!("one of {}", all.join(", "))
}

fn fits(range: Range) -> String {
    let range = match range {
        Range::NotNegative => setting::NOT_NEGATIVE,
        Range::NotPositive => setting::NOT_POSITIVE,
        Range::Positive => setting::POSITIVE,
        Range::BelowOne => setting::BELOW_ONE,
    };
    range.fits.into()
}
