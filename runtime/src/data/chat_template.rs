//! Renders conversations by a Jinja template as transformers does.

use std::ops::Range;

use minijinja::value::Serde;
use minijinja::{Environment, Value, context};
use serde_json::{Map, Value as Json};
use thiserror::Error;

use super::chat_python::{self, GENERATION};
use super::exact_json::{Exact, ExactFields};

/// ChatML, as in OpenAI's published chat format of 2023.
pub const CHATML: &str = include_str!("templates/chatml.jinja");

/// Why a conversation cannot be rendered.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ChatTemplateError {
    /// The template is not valid Jinja.
    #[error("the chat template cannot be read: {reason}")]
    Syntax { reason: String },
    /// The template refuses this conversation, or uses something undefined.
    #[error("the chat template refuses the conversation: {reason}")]
    Render { reason: String },
    /// The template rewrites a turn in a way that hides its position in the text.
    #[error(
        "message {number} cannot be located in the text of the conversation, because the chat template rewrites it; set chat_template: chatml or a template that keeps messages as they are"
    )]
    NotLocated { number: usize },
    /// A part of the conversation that would be lost without a word.
    #[error(
        "the conversation has {field:?}, which the chat template does not render; choose a template that does, or remove the field from the data"
    )]
    NotRendered { field: String },
}

/// One turn of a conversation: an object with `role`, usually `content`, and whatever else the template renders.
#[derive(Debug, Clone, PartialEq)]
pub struct Message(pub Map<String, Json>);

impl Message {
    /// A turn of plain text.
    pub fn new(role: &str, content: &str) -> Self {
        Self(Map::from_iter([("role", role), ("content", content)].map(|(key, text)| (key.to_owned(), text.into()))))
    }

    /// The role: `system`, `user`, `assistant`, …; empty if it has none.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Json::as_str).unwrap_or_default()
    }

    /// The content, if it is a plain text.
    pub fn text(&self) -> Option<&str> {
        self.0.get("content").and_then(Json::as_str)
    }
}

/// What a template renders.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Conversation {
    /// The turns.
    pub messages: Vec<Message>,
    /// Descriptions of the functions that the model may call, as JSON schemas.
    pub tools: Option<Json>,
}

impl Conversation {
    /// The conversation up to and without message `end`.
    pub(super) fn upto(&self, end: usize) -> Self {
        Self { messages: self.messages[..end].to_vec(), tools: self.tools.clone() }
    }
}

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    has_blocks: bool,
    bos: String,
    eos: String,
    /// Values of variables that transformers does not define itself.
    variables: Map<String, Json>,
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// Parses `source` as transformers does: blocks remove the line break after them and the blanks before them, Python's
    /// string methods are defined, and `raise_exception` refuses a conversation. `strftime_now` gives a fixed date, because
    /// tokens must not depend on the day of a run.
    ///
    /// `bos` and `eos` are the texts of those tokens, empty where the tokenizer has none.
    ///
    /// # Errors
    /// When the template is not valid Jinja.
    pub fn parse(source: &str, bos: &str, eos: &str) -> Result<Self, ChatTemplateError> {
        let mut environment = chat_python::environment(source);
        let plain = chat_python::with_generation_filter(source);
        let has_blocks = plain != source;
        environment
            .add_template_owned(NAME, plain)
            .map_err(|error| ChatTemplateError::Syntax { reason: reason(&error) })?;
        Ok(Self {
            environment,
            source: source.to_owned(),
            has_blocks,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            variables: Map::new(),
        })
    }

    /// The template with values of further variables, such as `enable_thinking`.
    pub fn with_variables(self, variables: Map<String, Json>) -> Self {
        Self { variables, ..self }
    }

    /// Whether the template mentions `name`, so that a field of that name may be in its text.
    pub fn mentions(&self, name: &str) -> bool {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        self.source.match_indices(name).any(|(at, _)| {
            !self.source[..at].ends_with(is_word) && !self.source[at + name.len()..].starts_with(is_word)
        })
    }

    /// The text of a conversation; with `add_generation_prompt` it ends where an assistant's answer would begin.
    ///
    /// # Errors
    /// When the template refuses the conversation.
    pub fn render(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<String, ChatTemplateError> {
        Ok(self.render_blocks(conversation, add_generation_prompt)?.0)
    }

    /// The text of a conversation, and the byte ranges of it that the template's `generation` blocks printed.
    pub(super) fn render_blocks(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<(String, Vec<Range<usize>>), ChatTemplateError> {
        let render_error = |error: &minijinja::Error| ChatTemplateError::Render { reason: reason(error) };
        let template = self.environment.get_template(NAME).map_err(|error| render_error(&error))?;
        let messages: Vec<&Map<String, Json>> = conversation.messages.iter().map(|message| &message.0).collect();
        let variables = context! {
            messages => messages.iter().map(|message| Value::from(Serde(ExactFields(message)))).collect::<Value>(),
            // transformers defines both, as None where there are none.
            tools => Value::from(Serde(conversation.tools.as_ref().map(Exact))),
            documents => Value::from(()),
            add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            ..Value::from(Serde(ExactFields(&self.variables))),
        };
        let text = template.render(variables).map_err(|error| render_error(&error))?;
        if !self.has_blocks {
            return Ok((text, Vec::new()));
        }
        if messages.iter().any(|message| message.values().any(contains_mark)) {
            let reason = "a message has the character U+FDD0 or U+FDD1, which Unicode reserves for programs".to_owned();
            return Err(ChatTemplateError::Render { reason });
        }
        Ok(without_marks(&text))
    }
}

fn contains_mark(value: &Json) -> bool {
    match value {
        Json::String(text) => text.contains(GENERATION),
        Json::Array(items) => items.iter().any(contains_mark),
        Json::Object(fields) => fields.values().any(contains_mark),
        _ => false,
    }
}

/// The text without the marks of generation blocks, and the ranges between them.
fn without_marks(text: &str) -> (String, Vec<Range<usize>>) {
    let (mut plain, mut blocks, mut open) = (String::with_capacity(text.len()), Vec::new(), None);
    for c in text.chars() {
        match c {
            _ if c == GENERATION[0] => open = Some(plain.len()),
            _ if c == GENERATION[1] => blocks.extend(open.take().map(|start| start..plain.len())),
            _ => plain.push(c),
        }
    }
    (plain, blocks)
}

/// The message of a template error with the line it points to; its `Display` adds debugging frames that span lines.
fn reason(error: &minijinja::Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (template line {line})"),
        None => what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::exact_json;
    use serde_json::json;

    fn rendered(source: &str, conversation: Json) -> Result<String, ChatTemplateError> {
        let messages = conversation["messages"].as_array().unwrap().iter();
        let messages = messages.map(|message| Message(message.as_object().unwrap().clone())).collect();
        let tools = conversation.get("tools").cloned();
        ChatTemplate::parse(source, "<s>", "</s>")?.render(&Conversation { messages, tools }, false)
    }

    #[test]
    fn template_refusal_carries_the_template_error() {
        let error = rendered("{{ raise_exception('roles must alternate') }}", json!({ "messages": [] })).unwrap_err();

        assert!(
            matches!(&error, ChatTemplateError::Render { reason } if reason.contains("roles must alternate")),
            "{error}"
        );
    }

    #[test]
    fn malformed_template_is_refused_with_its_line() {
        let error = ChatTemplate::parse("\n{% for %}", "", "").unwrap_err();

        assert!(matches!(&error, ChatTemplateError::Syntax { reason } if reason.contains("line 2")), "{error}");
    }

    #[test]
    fn tools_and_fields_of_messages_reach_the_template_in_their_order() {
        let source = "{{ tools | tojson }}{% for m in messages %}{{ m.reasoning_content }}|{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}";
        let call = json!({ "function": { "name": "f", "arguments": { "z": 1, "a": "é" } } });
        let message = json!({ "role": "assistant", "content": null, "reasoning_content": "Hm.", "tool_calls": [call] });

        let text = rendered(source, json!({ "messages": [message], "tools": [{ "name": "f", "description": "g" }] }));

        assert_eq!(text.unwrap(), r#"[{"name": "f", "description": "g"}]Hm.|{"z": 1, "a": "é"}"#);
    }

    #[test]
    fn numbers_of_calls_are_printed_as_python_prints_them() {
        let source = "{% for m in messages %}{{ m.arguments | tojson }} {{ m.arguments.wei }}{% endfor %}";
        let rendered = |arguments: &str| {
            let message = exact_json::object(&format!(r#"{{"role": "user", "arguments": {arguments}}}"#)).unwrap();
            let conversation = Conversation { messages: vec![Message(message)], tools: None };
            ChatTemplate::parse(source, "", "").unwrap().render(&conversation, false)
        };

        let arguments = r#"{"wei": 1000000000000000000001, "least": -9223372036854775809, "rate": 1e-07, "nan": NaN}"#;
        assert_eq!(rendered(arguments).unwrap(), format!("{arguments} 1000000000000000000001"));
        let error = rendered(&format!(r#"{{"wei": {}}}"#, "9".repeat(60))).unwrap_err().to_string();
        assert!(error.contains(&"9".repeat(60)) && error.contains("128 bits"), "{error}");
    }

    #[test]
    fn content_that_the_template_cannot_print_is_refused() {
        let source = "{% for m in messages %}{{ m.content }}{% endfor %}";
        for content in [json!(null), json!([{ "type": "text", "text": "Hi" }])] {
            let error = rendered(source, json!({ "messages": [{ "role": "user", "content": content }] })).unwrap_err();

            assert!(matches!(error, ChatTemplateError::Render { .. }), "{error}");
        }
    }

    #[test]
    fn only_whole_words_of_the_template_count_as_mentioned() {
        let template = ChatTemplate::parse("{{ my_tools }}{{ message.name }}", "", "").unwrap();

        assert!(template.mentions("name") && template.mentions("my_tools"));
        assert!(!template.mentions("tools") && !template.mentions("nam"));
    }
}
