//! Renders conversations by a Jinja template, and finds the parts of the text that a model is trained on.
//!
//! Rendering prefixes of the conversation locates an assistant's turn: it is the text that adding the turn appends. The
//! template only has to append text for a longer conversation, which is checked; guessing by marker strings would silently
//! train on the wrong turns of an unfamiliar template.

use std::ops::Range;

use minijinja::{Environment, ErrorKind, Value, context};
use thiserror::Error;

/// The template for tokenizers without one: ChatML, as in OpenAI's published chat format of 2023.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

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
    /// The template rewrites earlier turns when a later one is added, so no turn has a fixed position in the text.
    #[error(
        "the chat template changes earlier text when message {n_messages} is added, so assistant turns cannot be located; set chat_template: chatml or a template that only appends"
    )]
    NotPrefixStable { n_messages: usize },
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The role: `system`, `user`, `assistant`, …
    pub role: String,
    /// The text of the turn.
    pub content: String,
}

/// A conversation as text, and the byte ranges of it that are trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// The whole conversation.
    pub text: String,
    /// Content and end-of-turn marker of each trained turn, in order.
    pub trained: Vec<Range<usize>>,
}

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// Parses `source` as transformers does: blocks remove the line break after them and the blanks before them, Python's
    /// string methods are defined, and `raise_exception` refuses a conversation. `strftime_now` is deliberately undefined:
    /// with it, tokens would depend on the date; templates that use it fall back to a fixed date.
    ///
    /// `bos` and `eos` are the texts of those tokens, empty where the tokenizer has none.
    ///
    /// # Errors
    /// When the template is not valid Jinja.
    pub fn parse(source: &str, bos: &str, eos: &str) -> Result<Self, ChatTemplateError> {
        let mut environment = Environment::new();
        let mut syntax = environment.syntax().to_builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().expect("the delimiters are the default ones"));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, plain_blocks(source))
            .map_err(|error| ChatTemplateError::Syntax { reason: reason(&error) })?;
        Ok(Self { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The text of `messages`; with `add_generation_prompt` it ends where an assistant's answer would begin.
    ///
    /// # Errors
    /// When the template refuses the conversation.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatTemplateError> {
        let render_error = |error: &minijinja::Error| ChatTemplateError::Render { reason: reason(error) };
        let template = self.environment.get_template(NAME).map_err(|error| render_error(&error))?;
        let messages: Vec<Value> = messages
            .iter()
            .map(|turn| context! { role => turn.role.as_str(), content => turn.content.as_str() })
            .collect();
        template
            .render(context! { messages, add_generation_prompt, bos_token => self.bos.as_str(), eos_token => self.eos.as_str() })
            .map_err(|error| render_error(&error))
    }

    /// The text of `messages`, and the positions of the turns of `trained_roles` in it.
    ///
    /// The trained part of a turn starts after its opening and ends with its end-of-turn marker, without white space that
    /// only separates it from the next turn.
    ///
    /// # Errors
    /// When the template refuses the conversation or rewrites earlier turns.
    pub fn render_for_training(
        &self,
        messages: &[Message],
        trained_roles: &[String],
    ) -> Result<RenderedChat, ChatTemplateError> {
        let text = self.render(messages, false)?;
        let mut trained = Vec::new();
        for (idx, message) in messages.iter().enumerate() {
            if !trained_roles.contains(&message.role) {
                continue;
            }
            let unstable = || ChatTemplateError::NotPrefixStable { n_messages: idx + 1 };
            let upto = self.render(&messages[..=idx], false)?;
            // Many templates access the first message, so the empty conversation is never rendered.
            let (before, prompted) = match idx {
                0 => (String::new(), String::new()),
                _ => (self.render(&messages[..idx], false)?, self.render(&messages[..idx], true)?),
            };
            if !text.starts_with(&upto) || !upto.starts_with(&before) {
                return Err(unstable());
            }
            // A generation prompt may contain more than the opening of an earlier turn (an opened "think" block, say).
            let opened = match message.role.as_str() {
                "assistant" => common_prefix(&prompted, &upto).max(before.len()),
                _ => before.len(),
            };
            let content = message.content.trim();
            let start = match upto[opened..].find(content) {
                // Without a generation prompt, the opening of the turn ends where the content begins.
                Some(offset) if opened == before.len() => opened + offset,
                _ => opened,
            };
            // Most vocabularies join a space to the word after it; that token belongs to the word.
            let start = before.len() + upto[before.len()..start].trim_end_matches(' ').len();
            let content_end = upto[start..].find(content).map_or(start, |offset| start + offset + content.len());
            let marker = upto[content_end..].trim_end();
            let end = if marker.is_empty() { upto.len() } else { content_end + marker.len() };
            trained.push(start..end);
        }
        Ok(RenderedChat { text, trained })
    }
}

/// transformers marks assistant turns with its own blocks, which are not Jinja; their content is plain template.
fn plain_blocks(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(close) = rest[open..].find("%}") else { break };
        let (before, block) = (&rest[..open], &rest[open..open + close + 2]);
        plain += before;
        plain += &match block.trim_matches(['{', '}', '%', '-', '+', ' ', '\n', '\t']) {
            "generation" => block.replace("generation", "if true"),
            "endgeneration" => block.replace("endgeneration", "endif"),
            _ => block.to_owned(),
        };
        rest = &rest[open + close + 2..];
    }
    plain + rest
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y).map_or(a.len().min(b.len()), |((at, _), _)| at)
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

    fn conversation(turns: &[(&str, &str)]) -> Vec<Message> {
        turns.iter().map(|&(role, content)| Message { role: role.to_owned(), content: content.to_owned() }).collect()
    }

    fn trained_texts(source: &str, turns: &[(&str, &str)]) -> Result<Vec<String>, ChatTemplateError> {
        let template = ChatTemplate::parse(source, "<s>", "</s>")?;
        let chat = template.render_for_training(&conversation(turns), &["assistant".to_owned()])?;
        Ok(chat.trained.iter().map(|range| chat.text[range.clone()].to_owned()).collect())
    }

    const TWO_TURNS: [(&str, &str); 5] =
        [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye"), ("assistant", "Goodbye.")];

    #[test]
    fn chatml_trains_on_assistant_content_and_end_of_turn_only() {
        let trained = trained_texts(CHATML, &TWO_TURNS).unwrap();

        assert_eq!(trained, ["Hello.<|im_end|>", "Goodbye.<|im_end|>"]);
    }

    #[test]
    fn template_without_generation_prompt_trains_from_the_content_on() {
        let source = "{% for m in messages %}### {{ m.role }}: {{ m.content.strip() }}{{ eos_token }}\n{% endfor %}";

        let trained = trained_texts(source, &TWO_TURNS).unwrap();

        assert_eq!(trained, [" Hello.</s>", " Goodbye.</s>"]);
    }

    #[test]
    fn turns_that_open_with_the_user_train_from_the_first_word_on() {
        let source = "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}";

        let trained = trained_texts(source, &TWO_TURNS[1..]).unwrap();

        assert_eq!(trained, [" Hello.</s>", " Goodbye.</s>"]);
    }

    #[test]
    fn template_with_headers_and_a_default_system_turn_trains_on_the_assistant() {
        let source = "{% if messages[0].role != 'system' %}{{ '<|h|>system<|/h|>Help.<|eot|>' }}{% endif %}\n{% for m in messages %}\n    {%- set text = '<|h|>' + m['role'] + '<|/h|>\n\n' + m['content'] | trim + '<|eot|>' %}\n    {%- if loop.first %}{% set text = bos_token + text %}{% endif %}\n    {{- text }}\n{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\n\n' }}{% endif %}";

        let trained = trained_texts(source, &TWO_TURNS[1..]).unwrap();

        assert_eq!(trained, ["Hello.<|eot|>", "Goodbye.<|eot|>"]);
    }

    #[test]
    fn line_break_that_is_the_only_end_of_turn_is_trained_on() {
        let source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

        let trained = trained_texts(source, &TWO_TURNS).unwrap();

        assert_eq!(trained, [" Hello.\n", " Goodbye.\n"]);
    }

    #[test]
    fn generation_prompt_that_opens_a_thought_still_finds_the_turn() {
        let source =
            CHATML.replace("<|im_start|>assistant\\n' }}{% endif", "<|im_start|>assistant\\n<think>\\n' }}{% endif");

        let trained = trained_texts(&source, &TWO_TURNS).unwrap();

        assert_eq!(trained, ["Hello.<|im_end|>", "Goodbye.<|im_end|>"]);
    }

    #[test]
    fn generation_blocks_of_transformers_are_accepted() {
        let source =
            "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{%- endgeneration -%}</>{% endfor %}";

        assert_eq!(trained_texts(source, &TWO_TURNS[1..3]).unwrap(), ["Hello.</>"]);
    }

    #[test]
    fn template_that_rewrites_earlier_turns_is_refused() {
        let source = "{{ messages|length }}{% for m in messages %}{{ m.content }};{% endfor %}";

        assert_eq!(trained_texts(source, &TWO_TURNS), Err(ChatTemplateError::NotPrefixStable { n_messages: 3 }));
    }

    #[test]
    fn template_refusal_carries_the_template_error() {
        let source = "{{ raise_exception('roles must alternate') }}";

        let error = trained_texts(source, &TWO_TURNS).unwrap_err();

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
}
