//! Which template renders conversations.

use serde_yaml_ng::Value;

use super::at::At;
use super::described::describe;
use super::error::ConfigError;
use super::model::as_json;
use super::setting::Setting;
use crate::config::named_templates::NamedTemplate;

/// The value of `chat_template`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatTemplateChoice {
    /// The tokenizer's template.
    TokenizerDefault,
    /// The tokenizer's template, or this one if the tokenizer has none.
    Fallback(NamedTemplate),
    /// This template, regardless of the tokenizer.
    Named(NamedTemplate),
    /// The template in `chat_template_jinja`.
    Jinja,
}

const TOKENIZER: &str = "tokenizer_default";
const FALLBACK: &str = "tokenizer_default_fallback_";

impl Setting for ChatTemplateChoice {
    fn fits() -> String {
        let names: Vec<&str> = NamedTemplate::names().collect();
        format!("{TOKENIZER}, {FALLBACK}NAME, jinja, or one of {}", names.join(", "))
    }

    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let named = |name: &str| match (NamedTemplate::of(name), NamedTemplate::absent(name)) {
            (Some(template), _) => Ok(template),
            (None, Some(instead)) => Err(ConfigError::Refused {
                key: at.to_string().into(),
                found: describe(value),
                instead: instead.to_owned(),
            }),
            (None, None) => Err(at.mismatch(value, Self::fits())),
        };
        match value.as_str() {
            Some(TOKENIZER) => Ok(Self::TokenizerDefault),
            Some("jinja") => Ok(Self::Jinja),
            Some(word) => match word.strip_prefix(FALLBACK) {
                Some(name) => named(name).map(Self::Fallback),
                None => named(word).map(Self::Named),
            },
            None => Err(at.mismatch(value, Self::fits())),
        }
    }

    fn write(&self) -> Value {
        match self {
            Self::TokenizerDefault => TOKENIZER.into(),
            Self::Fallback(template) => format!("{FALLBACK}{}", template.name()).into(),
            Self::Named(template) => template.name().into(),
            Self::Jinja => "jinja".into(),
        }
    }
}

/// The value of `chat_template_kwargs`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TemplateVariables(pub serde_json::Map<String, serde_json::Value>);

impl Setting for TemplateVariables {
    fn fits() -> String {
        "a section of values, as in {enable_thinking: false}, whose whole numbers have at most 64 bits".into()
    }

    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match as_json(value) {
            Some(serde_json::Value::Object(variables)) => Ok(Self(variables)),
            _ => Err(at.mismatch(value, Self::fits())),
        }
    }

    fn write(&self) -> Value {
        serde_yaml_ng::to_value(&self.0).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::JobConfig;

    fn of(word: &str) -> Result<ChatTemplateChoice, ConfigError> {
        let text = format!(
            "base_model: m\nmax_steps: 1\ndatasets: [{{path: a, type: chat_template}}]\nchat_template: {word}\n"
        );
        JobConfig::from_yaml_str(&text, &[]).map(|job| job.data.chat_template)
    }

    #[test]
    fn every_word_is_written_as_it_was_read() {
        for word in NamedTemplate::names().chain([TOKENIZER, "tokenizer_default_fallback_gemma3", "jinja"]) {
            assert_eq!(of(word).unwrap().write(), Value::from(word));
        }
    }

    #[test]
    fn whole_number_beyond_64_bits_is_refused_and_a_text_of_digits_stays_a_text() {
        let of = |value: &str| {
            let text = format!(
                "base_model: m\nmax_steps: 1\ndatasets: [{{path: a, type: chat_template}}]\nchat_template_kwargs: {{n: {value}}}\n"
            );
            JobConfig::from_yaml_str(&text, &[]).map(|job| job.data.chat_template_kwargs.0["n"].clone())
        };

        for wide in ["18446744073709551616", "-9223372036854775809", "1000000000000000000000000000000000000000000"] {
            let error = of(wide).unwrap_err().to_string();
            assert!(error.contains("chat_template_kwargs") && error.contains("line 4"), "{wide}: {error}");
            assert!(error.contains("64 bits") && !error.contains("128"), "{wide}: {error}");
        }
        assert_eq!(of("18446744073709551615").unwrap(), u64::MAX);
        assert_eq!(of("-9223372036854775808").unwrap(), i64::MIN);
        assert_eq!(of("\"1000000000000000000000000000000\"").unwrap(), "1000000000000000000000000000000");
    }

    #[test]
    fn template_that_is_not_here_is_refused_with_a_way_out() {
        let error = of("llava").unwrap_err().to_string();
        assert!(error.contains("`chat_template` (line 4)") && error.contains("only text"), "{error}");
        assert!(of("tokenizer_default_fallback_command_a").unwrap_err().to_string().contains("tokenizer_default"));
        assert!(of("chatlm").unwrap_err().to_string().contains("must be tokenizer_default"));
    }
}
