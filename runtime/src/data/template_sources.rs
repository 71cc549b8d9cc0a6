//! The texts of the chat templates of a data set.

use super::config::TemplateConfig;
use super::prepare_error::PrepareError;
use super::tokenizer::Tokenizer;
use crate::config::chat_template::ChatTemplateChoice;
use phalanx_storage::{foreign_file, home};
use std::path::Path;

/// The longest template that is read; the longest known ones have some 20 kB.
pub(crate) const TEMPLATE_BYTES_MAX: u64 = 16 << 20;

/// The texts of the templates of a data set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct TemplateSources {
    pub(crate) plain: String,
    /// The template for conversations with tools, if it is another one.
    pub(crate) with_tools: Option<String>,
}

/// The templates for the conversations at `dataset`; only a tokenizer's own ones may be several.
pub(crate) fn template_sources(
    config: &TemplateConfig,
    tokenizer: &Tokenizer,
    dataset: &Path,
) -> Result<TemplateSources, PrepareError> {
    let plain = template_source(config, tokenizer, dataset)?;
    let is_own = config.jinja.is_none() && tokenizer.chat_template() == Some(&plain);
    Ok(TemplateSources { plain, with_tools: tokenizer.tool_template().filter(|_| is_own).map(str::to_owned) })
}

/// The text of the template for the conversations at `dataset`.
fn template_source(config: &TemplateConfig, tokenizer: &Tokenizer, dataset: &Path) -> Result<String, PrepareError> {
    match (config.choice, &config.jinja) {
        // A template without a choice is meant.
        (ChatTemplateChoice::Jinja | ChatTemplateChoice::TokenizerDefault, Some(template)) => read_template(template),
        (ChatTemplateChoice::Jinja, None) | (_, Some(_)) => Err(PrepareError::JinjaWithoutTemplate),
        (ChatTemplateChoice::Named(template), None) => Ok(template.source().to_owned()),
        (choice, None) => match (tokenizer.chat_template(), choice) {
            (Some(template), _) => Ok(template.to_owned()),
            (None, ChatTemplateChoice::Fallback(template)) => Ok(template.source().to_owned()),
            (None, _) => Err(PrepareError::NoTemplate { path: dataset.to_owned() }),
        },
    }
}

/// Text with a tag of Jinja is a template; anything else is the path of one.
pub(crate) fn read_template(template: &str) -> Result<String, PrepareError> {
    if template.contains("{{") || template.contains("{%") {
        return Ok(template.to_owned());
    }
    let path = home::expanded(template);
    foreign_file::read_text(&path, TEMPLATE_BYTES_MAX)
        .map_err(|error| PrepareError::TemplateFile { path, reason: error.to_string() })
}

impl TemplateSources {
    /// What the tokens depend on.
    pub(super) fn key(&self) -> String {
        match &self.with_tools {
            None => self.plain.clone(),
            Some(with_tools) => format!("{:?} {with_tools:?}", self.plain),
        }
    }
}
