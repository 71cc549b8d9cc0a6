//! Parameters that a run trains while it leaves the others as they are, without adapters.
//!
//! A pattern is matched as Axolotl matches `unfrozen_parameters`: at the beginning of a parameter's name, with dots as dots unless
//! a plus follows.

use super::architecture::{Architecture, smallest};
use crate::config::adapter::AdapterSection;
use crate::error::JobError;
use crate::error::plan::PlanError;
use fancy_regex::Regex;
use phalanx_strategies::program::Param;
use std::collections::BTreeSet;

/// The names of the tensors that are trained; none if all are, or none but adapters.
///
/// # Errors
/// When a pattern is no regular expression, no name matches, or a pattern matches only part of a fused tensor.
pub(super) fn trained(section: &AdapterSection, model: &Architecture) -> Result<Option<BTreeSet<String>>, JobError> {
    if section.trained_parameters.is_empty() || section.adapter.is_some() {
        return Ok(None);
    }
    let patterns: Vec<Pattern> =
        section.trained_parameters.iter().map(|text| Pattern::new(text)).collect::<Result<_, _>>()?;
    let params = smallest(model)?.params;
    let mut trained = BTreeSet::new();
    for param in &params {
        let [mut own, mut others] = [Vec::new(), Vec::new()];
        for part in &param.parts {
            let is_trained =
                patterns.iter().map(|pattern| pattern.matches(&part.name)).collect::<Result<Vec<bool>, _>>()?;
            let names = if is_trained.contains(&true) { &mut own } else { &mut others };
            names.push(part.name.clone());
        }
        if let (Some(trained), Some(frozen)) = (own.first(), others.first()) {
            return Err(PlanError::TrainedApart { trained: trained.clone(), frozen: frozen.clone() }.into());
        }
        trained.extend(own);
    }
    let name = |param: &Param| param.parts.first().map(|part| part.name.clone());
    match trained.is_empty() {
        true => Err(PlanError::NoneTrained { example: params.first().and_then(name).unwrap_or_default() }.into()),
        false => Ok(Some(trained)),
    }
}

struct Pattern {
    text: String,
    regex: Regex,
}

impl Pattern {
    fn new(text: &str) -> Result<Pattern, PlanError> {
        let mut escaped = String::new();
        let mut rest = text.chars().peekable();
        while let Some(c) = rest.next() {
            if c == '.' && rest.peek() != Some(&'+') {
                escaped.push('\\');
            }
            escaped.push(c);
        }
        match Regex::new(&format!(r"\A(?:{escaped})")) {
            Ok(regex) => Ok(Pattern { text: text.into(), regex }),
            Err(source) => Err(PlanError::TrainedPattern { pattern: text.into(), source: Box::new(source) }),
        }
    }

    /// Whether it matches a name, or the name that the tensor has in a model with images.
    fn matches(&self, name: &str) -> Result<bool, PlanError> {
        let is_match = |name: &str| {
            let refused = |source| PlanError::TrainedPattern { pattern: self.text.clone(), source: Box::new(source) };
            self.regex.is_match(name).map_err(refused)
        };
        Ok(is_match(name)? || is_match(&path_beside_images(name))?)
    }
}

/// The path of a layer in a model that also reads images, where the language model is a part.
pub(super) fn path_beside_images(path: &str) -> String {
    path.replacen("model.", "model.language_model.", 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_at_the_beginning_of_names_with_dots_as_dots() {
        let matches = |pattern: &str, name: &str| Pattern::new(pattern).unwrap().matches(name).unwrap();

        assert!(matches("^lm_head.weight$", "lm_head.weight"));
        assert!(matches("model.layers.[12].mlp", "model.layers.2.mlp.up_proj.weight"));
        assert!(matches("model.language_model.layers.1.", "model.layers.1.mlp.up_proj.weight"));
        assert!(matches("model.+norm", "model.layers.0.input_layernorm.weight"));
        assert!(!matches("layers.1.", "model.layers.1.mlp.up_proj.weight"));
        assert!(!matches("model.layers.1.mlp", "model.layers.10mlp"));
        assert!(!matches("lm_head$", "lm_head.weight"));
        assert!(Pattern::new("model.(").is_err());
    }
}
