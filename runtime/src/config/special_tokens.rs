//! Tokens that a job adds to its tokenizer, or gives a role.

use std::collections::BTreeMap;

use serde_yaml_ng::{Mapping, Value};

use super::at::At;
use super::described::is_empty;
use super::error::{ConfigError, Errors};
use super::setting::Setting;
use super::yaml_1_1::whole;

/// The roles that transformers knows for one token.
pub(crate) const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"];
/// The role that several tokens have.
const ADDITIONAL: &str = "additional_special_tokens";

/// The value of `special_tokens`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SpecialTokens {
    /// The token of each role that the file names.
    pub roles: BTreeMap<&'static str, String>,
    /// Special tokens without a role.
    pub additional: Vec<String>,
}

impl Setting for SpecialTokens {
    fn fits() -> String {
        format!("a section with tokens for {} or {ADDITIONAL}", ROLES.join(", "))
    }

    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let keys = value.as_mapping().ok_or_else(|| at.mismatch(value, Self::fits()))?;
        let (mut errors, mut tokens) = (Errors::default(), Self::default());
        errors.keep(at.refuse_unknown(keys, &[&ROLES[..], &[ADDITIONAL]].concat()));
        for role in ROLES {
            if let Some(value) = keys.get(role).filter(|value| !is_empty(value)) {
                errors.keep(String::read(value, &at.key(role))).map(|token| tokens.roles.insert(role, token));
            }
        }
        if let Some(value) = keys.get(ADDITIONAL).filter(|value| !is_empty(value)) {
            tokens.additional = errors.keep(Vec::read(value, &at.key(ADDITIONAL))).unwrap_or_default();
        }
        errors.end(tokens)
    }

    fn write(&self) -> Value {
        let mut keys: Mapping = self.roles.iter().map(|(role, token)| ((*role).into(), token.write())).collect();
        if !self.additional.is_empty() {
            keys.insert(ADDITIONAL.into(), self.additional.write());
        }
        Value::Mapping(keys)
    }
}

/// The value of `added_tokens_overrides`: new texts by token id.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TokenTexts(pub BTreeMap<u32, String>);

impl Setting for TokenTexts {
    fn fits() -> String {
        "a section of texts by token id, as in {128041: <|im_start|>}".into()
    }

    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let keys = value.as_mapping().ok_or_else(|| at.mismatch(value, Self::fits()))?;
        let id = |key: &Value| u32::try_from(whole(key)?).ok();
        let entry = |(key, value): (&Value, &Value)| {
            let id = id(key).ok_or_else(|| at.mismatch(key, "the id of a token".into()))?;
            Ok((id, String::read(value, &at.key(&id.to_string()))?))
        };
        keys.iter().map(entry).collect::<Result<_, _>>().map(Self)
    }

    fn write(&self) -> Value {
        Value::Mapping(self.0.iter().map(|(id, text)| ((*id).into(), text.write())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::JobConfig;

    fn of(keys: &str) -> Result<JobConfig, ConfigError> {
        let text = format!("base_model: m\nmax_steps: 1\ndatasets: [{{path: a, type: alpaca}}]\n{keys}\n");
        JobConfig::from_yaml_str(&text, &[])
    }

    #[test]
    fn tokens_are_read_and_written_back() {
        let keys = "special_tokens:\n  eos_token: <|im_end|>\n  pad_token:\n  additional_special_tokens: [<a>]\n\
                    added_tokens_overrides: {128041: <|x|>, '7': <|y|>}\ntokens: [<b>]";

        let job = of(keys).unwrap();

        assert_eq!(job.model.special_tokens.roles, BTreeMap::from([("eos_token", "<|im_end|>".to_owned())]));
        assert_eq!(job.model.special_tokens.additional, ["<a>"]);
        assert_eq!(job.model.added_tokens_overrides.0[&7], "<|y|>");
        assert_eq!(JobConfig::from_yaml_str(&job.to_yaml(), &[]).unwrap().model, job.model);
    }

    #[test]
    fn unknown_role_is_refused_with_the_nearest_one() {
        let error = of("special_tokens:\n  eos_tokn: x").unwrap_err().to_string();

        assert!(error.contains("`special_tokens.eos_tokn` (line 5)") && error.contains("`eos_token`"), "{error}");
        assert!(of("added_tokens_overrides: {a: b}").unwrap_err().to_string().contains("the id of a token"));
    }
}
