//! Renders conversations by a Jinja template as transformers does.

use std::borrow::Cow;
use std::sync::OnceLock;

use serde_json::{Map, Value as Json};
use thiserror::Error;

use super::conversation_forms::rendered_in_form;
use super::jinja::{Clock, Rendered, Template};

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

    /// The fields as transformers gives them to a template: without null, unless `keeps_nulls`, and with the thought by both
    /// names that templates have for it.
    pub(super) fn fields(&self, keeps_nulls: bool) -> Cow<'_, Map<String, Json>> {
        let thought = THOUGHT_FIELDS.iter().find_map(|name| self.0.get(*name).filter(|thought| !thought.is_null()));
        let has_null = self.0.values().any(Json::is_null);
        if thought.is_none() && (keeps_nulls || !has_null) {
            return Cow::Borrowed(&self.0);
        }
        let mut fields = self.0.clone();
        if !keeps_nulls {
            fields.retain(|_, value| !value.is_null());
        }
        if let Some(thought) = thought {
            fields.entry("thinking").or_insert_with(|| thought.clone());
            fields.insert("reasoning_content".to_owned(), thought.clone());
        }
        Cow::Owned(fields)
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
    /// Values of variables of the template for this conversation; they precede those of [`ChatTemplate::with_variables`].
    pub variables: Map<String, Json>,
}

impl Conversation {
    /// The conversation up to and without message `end`.
    pub(super) fn upto(&self, end: usize) -> Self {
        Self { messages: self.messages[..end].to_vec(), ..self.clone() }
    }
}

/// Names of the field with the thought of an answer. transformers gives a thought to the template by the first two, whichever name the data has.
pub(super) const THOUGHT_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    template: Template,
    source: String,
    bos: Json,
    eos: Json,
    /// Values of variables that transformers does not define itself.
    variables: Map<String, Json>,
    prints_all_fields: OnceLock<bool>,
    clock: Clock,
}

impl ChatTemplate {
    /// Parses `source` as transformers does: blocks remove the line break after them and the blanks before them, Python's
    /// methods are defined, and `raise_exception` refuses a conversation. `strftime_now` gives a fixed date, because the tokens of
    /// a run must not depend on its day.
    ///
    /// `bos` and `eos` are the texts of those tokens, empty where the tokenizer has none.
    ///
    /// # Errors
    /// When the template is not valid Jinja.
    pub fn parse(source: &str, bos: &str, eos: &str) -> Result<Self, ChatTemplateError> {
        let template =
            Template::parse(source).map_err(|error| ChatTemplateError::Syntax { reason: error.to_string() })?;
        Ok(Self {
            template,
            source: source.to_owned(),
            bos: bos.into(),
            eos: eos.into(),
            variables: Map::new(),
            prints_all_fields: OnceLock::new(),
            clock: Clock::Fixed,
        })
    }

    /// The template with values of further variables, such as `enable_thinking`.
    pub fn with_variables(self, variables: Map<String, Json>) -> Self {
        Self { variables, ..self }
    }

    /// The template with today's date, as a model is asked.
    #[must_use]
    pub fn for_answers(self) -> Self {
        Self { clock: Clock::Local, ..self }
    }

    /// Whether the template mentions `name`, so that a field of that name may be in its text.
    pub fn mentions(&self, name: &str) -> bool {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        self.source.match_indices(name).any(|(at, _)| {
            !self.source[..at].ends_with(is_word) && !self.source[at + name.len()..].starts_with(is_word)
        })
    }

    /// Whether the template names this value, such as a role, in quotes.
    pub fn names(&self, value: &str) -> bool {
        ['\'', '"'].iter().any(|quote| self.source.contains(&format!("{quote}{value}{quote}")))
    }

    /// Whether the template may render the field `name` of a message, by this name or by another that it has there.
    pub fn renders(&self, name: &str) -> bool {
        self.mentions(name)
            || THOUGHT_FIELDS.contains(&name) && THOUGHT_FIELDS[..2].iter().any(|known| self.mentions(known))
            || *self.prints_all_fields.get_or_init(|| self.prints_unknown_field())
    }

    /// Whether the template prints a field that it cannot know: it prints messages as a whole, or loops over their fields.
    fn prints_unknown_field(&self) -> bool {
        const UNKNOWN: &str = "aspis4071";
        let message = |role: &str| {
            let mut message = Message::new(role, "Hi");
            message.0.insert(UNKNOWN.to_owned(), UNKNOWN.into());
            message
        };
        let conversation =
            Conversation { messages: vec![message("user"), message("assistant")], ..Conversation::default() };
        self.render(&conversation, false).is_ok_and(|text| text.contains(UNKNOWN))
    }

    /// The text of the token that ends a text.
    pub(super) fn eos(&self) -> &str {
        self.eos.as_str().unwrap_or_default()
    }

    /// The text of a conversation in the form that the template expects; with `add_generation_prompt` it ends where an assistant's
    /// answer would begin.
    ///
    /// # Errors
    /// When the template refuses the conversation.
    pub fn render(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<String, ChatTemplateError> {
        Ok(rendered_in_form(self, &mut conversation.clone(), add_generation_prompt)?.text)
    }

    /// The text of a conversation, and where its messages are.
    ///
    /// transformers leaves out fields that are null. Templates that ask whether a content is none were written for its earlier
    /// versions, which did not; what they refuse without the fields is rendered with them.
    pub(super) fn render_parts(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<Rendered, ChatTemplateError> {
        let messages = conversation.messages.iter().map(|message| message.fields(false)).collect();
        let rendered = self.render_messages(messages, conversation, add_generation_prompt);
        let has_null = |message: &Message| message.0.values().any(Json::is_null);
        if rendered.is_err() && conversation.messages.iter().any(has_null) {
            let messages = conversation.messages.iter().map(|message| message.fields(true)).collect();
            return self.render_messages(messages, conversation, add_generation_prompt).or(rendered);
        }
        rendered
    }

    fn render_messages(
        &self,
        messages: Vec<Cow<'_, Map<String, Json>>>,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<Rendered, ChatTemplateError> {
        // transformers defines both, as None where there are none.
        let tools = conversation.tools.as_ref().unwrap_or(&Json::Null);
        let prompts = Json::Bool(add_generation_prompt);
        let mut variables = vec![
            ("tools", tools),
            ("documents", &Json::Null),
            ("add_generation_prompt", &prompts),
            ("bos_token", &self.bos),
            ("eos_token", &self.eos),
        ];
        // Of two values of a name, the later one counts.
        let more = self.variables.iter().chain(&conversation.variables);
        variables.extend(more.map(|(name, value)| (name.as_str(), value)));
        let messages: Vec<&Map<String, Json>> = messages.iter().map(AsRef::as_ref).collect();
        self.template
            .render(&messages, &variables, self.clock)
            .map_err(|error| ChatTemplateError::Render { reason: error.to_string() })
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
        ChatTemplate::parse(source, "<s>", "</s>")?
            .render(&Conversation { messages, tools, ..Conversation::default() }, false)
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
            let conversation = Conversation { messages: vec![Message(message)], ..Conversation::default() };
            ChatTemplate::parse(source, "", "").unwrap().render(&conversation, false)
        };

        let arguments = r#"{"wei": 1000000000000000000001, "least": -9223372036854775809, "rate": 1e-07, "nan": NaN}"#;
        assert_eq!(rendered(arguments).unwrap(), format!("{arguments} 1000000000000000000001"));
        let long = "9".repeat(60);
        assert_eq!(rendered(&format!(r#"{{"wei": {long}}}"#)).unwrap(), format!(r#"{{"wei": {long}}} {long}"#));
    }

    #[test]
    fn fields_that_are_null_are_absent_unless_the_template_refuses_that() {
        let message = json!({ "messages": [{ "role": "user", "content": null, "name": null }] });

        let printed = rendered("{{ messages[0].content }}|{{ messages[0].name is defined }}", message.clone());
        let guarded = "{% if messages[0].content is not none %}{{ messages[0].content + 'x' }}{% endif %}-";

        assert_eq!(printed.unwrap(), "|False");
        assert_eq!(rendered(guarded, message).unwrap(), "-");
    }

    #[test]
    fn thought_reaches_the_template_by_each_of_its_names() {
        for name in THOUGHT_FIELDS {
            let message = json!({ "messages": [{ "role": "assistant", "content": "4", name: "Hm." }] });

            let text = rendered("{{ messages[0].thinking }}{{ messages[0].reasoning_content }}", message);

            assert_eq!(text.unwrap(), "Hm.Hm.");
        }
        let template = ChatTemplate::parse("{{ messages[0].thinking }}", "", "").unwrap();
        assert!(template.renders("reasoning_content") && !template.renders("tool_calls"));
    }

    #[test]
    fn template_that_prints_messages_as_a_whole_renders_every_field() {
        for (source, prints_all) in [
            ("{% for m in messages %}{{ m | tojson }}{% endfor %}", true),
            ("{% for m in messages %}{% for key, value in m.items() %}{{ value }}{% endfor %}{% endfor %}", true),
            ("{% for m in messages %}{{ m.content }}{% endfor %}", false),
        ] {
            let template = ChatTemplate::parse(source, "", "").unwrap();

            assert_eq!(template.renders("tool_calls"), prints_all, "{source}");
        }
    }

    #[test]
    fn line_breaks_of_every_kind_are_line_feeds() {
        let text = rendered("a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc\r\n", json!({ "messages": [] }));

        assert_eq!(text.unwrap(), "a\nb\nc");
    }

    #[test]
    fn only_whole_words_of_the_template_count_as_mentioned() {
        let template = ChatTemplate::parse("{{ my_tools }}{{ message.name }}", "", "").unwrap();

        assert!(template.mentions("name") && template.mentions("my_tools"));
        assert!(!template.mentions("tools") && !template.mentions("nam"));
    }
}
