//! The form of a conversation that its template expects.
//!
//! Data and clients have the arguments of calls as objects or as JSON in a text, and contents as texts or as lists of texts; a template
//! reads one form of each, and prints nothing of another or refuses it. Training, `chat` and `serve` find the form by the same rules, so
//! that a model is asked what it was trained on.

use serde_json::{Map, Value, json};

use super::chat_template::{ChatTemplate, ChatTemplateError, Conversation, Message};
use super::exact_json;
use super::jinja::Rendered;

/// The text of the conversation, which takes the form that the template expects.
///
/// # Errors
/// When the template refuses every form.
pub(super) fn rendered_in_form(
    template: &ChatTemplate,
    conversation: &mut Conversation,
    add_generation_prompt: bool,
) -> Result<Rendered, ChatTemplateError> {
    let mut in_texts = conversation.clone();
    let mut texts = Vec::new();
    for (idx, message) in conversation.messages.iter_mut().enumerate() {
        texts.extend(parse_arguments(&mut message.0).into_iter().map(|text| (idx, text)));
    }
    if texts.is_empty() {
        return with_contents(template, conversation, add_generation_prompt);
    }
    // Some templates print a text as it is, as transformers does; others would quote it.
    let of_texts = with_contents(template, &mut in_texts, add_generation_prompt);
    if let Ok(rendered) = &of_texts
        && texts.iter().all(|(idx, text)| is_printed_as_it_is(rendered, *idx, text))
    {
        *conversation = in_texts;
        return of_texts;
    }
    match with_contents(template, conversation, add_generation_prompt) {
        Err(ChatTemplateError::Render { .. }) if of_texts.is_ok() => {
            *conversation = in_texts;
            of_texts
        }
        rendered => rendered,
    }
}

/// Whether the template prints this text of a call of a message, and not as a quoted text.
fn is_printed_as_it_is(rendered: &Rendered, idx: usize, text: &str) -> bool {
    let is_of_calls = |of: usize| rendered.fields[idx].get(of).is_some_and(|name| name == "tool_calls");
    let mut origins = rendered.origins.iter().filter(|origin| origin.of.message == idx && is_of_calls(origin.of.field));
    origins.any(|origin| {
        let (before, from) = rendered.text.split_at(origin.bytes.start);
        from.strip_prefix(text).is_some_and(|after| !(before.ends_with('"') && after.starts_with('"')))
    })
}

fn with_contents(
    template: &ChatTemplate,
    conversation: &mut Conversation,
    prompt: bool,
) -> Result<Rendered, ChatTemplateError> {
    let refused = match template.render_parts(conversation, prompt) {
        Ok(rendered) => return Ok(with_lost_texts(template, conversation, prompt, rendered)),
        Err(refused @ ChatTemplateError::Render { .. }) => refused,
        Err(error) => return Err(error),
    };
    // Templates of models without images often expect one text instead of a list of texts, others a list instead of a text.
    for change in [joined as fn(&Message) -> Option<Message>, in_parts] {
        let mut changed = conversation.clone();
        if !change_all(&mut changed, change, |_| true) {
            continue;
        }
        if let Ok(rendered) = template.render_parts(&changed, prompt) {
            *conversation = changed;
            return Ok(rendered);
        }
    }
    Err(refused)
}

/// Renders texts that the template has not printed again as lists of parts. Returns `rendered` if the template prints none of these
/// either.
fn with_lost_texts(
    template: &ChatTemplate,
    conversation: &mut Conversation,
    prompt: bool,
    rendered: Rendered,
) -> Rendered {
    let is_printed = |rendered: &Rendered, idx: usize| {
        let is_content = |of: usize| rendered.fields[idx].get(of).is_some_and(|name| name == "content");
        rendered.origins.iter().any(|origin| origin.of.message == idx && is_content(origin.of.field))
    };
    let is_lost = |idx: usize| {
        let text = conversation.messages[idx].text().unwrap_or_default();
        !text.trim().is_empty() && !is_printed(&rendered, idx)
    };
    let lost: Vec<usize> = (0..conversation.messages.len()).filter(|&idx| is_lost(idx)).collect();
    let in_parts_where = |which: &[usize]| {
        let mut changed = conversation.clone();
        change_all(&mut changed, in_parts, |idx| which.contains(&idx)).then_some(changed)
    };
    let all = in_parts_where(&lost).and_then(|changed| template.render_parts(&changed, prompt).ok());
    let Some(all) = all else { return rendered };
    // Templates leave out some messages in every form.
    let found: Vec<usize> = lost.into_iter().filter(|&idx| is_printed(&all, idx)).collect();
    let Some(changed) = in_parts_where(&found) else { return rendered };
    match template.render_parts(&changed, prompt) {
        Ok(better) => {
            *conversation = changed;
            better
        }
        Err(_) => rendered,
    }
}

/// Changes the messages at positions that `is_meant`; whether any changed.
fn change_all(
    conversation: &mut Conversation,
    change: fn(&Message) -> Option<Message>,
    is_meant: impl Fn(usize) -> bool,
) -> bool {
    let mut any = false;
    for (_, message) in conversation.messages.iter_mut().enumerate().filter(|(idx, _)| is_meant(*idx)) {
        if let Some(changed) = change(message) {
            *message = changed;
            any = true;
        }
    }
    any
}

/// The message with one text instead of a list of texts, which are joined as they are.
fn joined(message: &Message) -> Option<Message> {
    let parts = message.0.get("content")?.as_array()?;
    let text: Option<String> = parts.iter().map(|part| part["text"].as_str()).collect();
    Some(with_content(message, text?.into()))
}

/// The message with a list of one part instead of a text.
fn in_parts(message: &Message) -> Option<Message> {
    let text = message.text()?;
    Some(with_content(message, json!([{ "type": "text", "text": text }])))
}

fn with_content(message: &Message, content: Value) -> Message {
    let mut fields = message.0.clone();
    fields.insert("content".to_owned(), content);
    Message(fields)
}

/// Makes objects of arguments of calls that are JSON in a text, as recorded answers of servers have them; returns those texts.
fn parse_arguments(message: &mut Map<String, Value>) -> Vec<String> {
    let mut texts = Vec::new();
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) else {
            continue;
        };
        if let Some(parsed) = arguments.as_str().and_then(exact_json::object)
            && let Value::String(text) = std::mem::replace(arguments, Value::Object(parsed))
        {
            texts.push(text);
        }
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOP: &str = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}";

    fn text(source: &str, contents: &[Value]) -> Result<String, ChatTemplateError> {
        let message = |content: &Value| with_content(&Message::new("user", ""), content.clone());
        let conversation = Conversation { messages: contents.iter().map(message).collect(), ..Conversation::default() };
        ChatTemplate::parse(source, "", "")?.render(&conversation, false)
    }

    #[test]
    fn texts_reach_a_template_that_loops_over_parts() {
        let parts = json!([{ "type": "text", "text": "Hi " }, { "type": "text", "text": "there" }]);

        assert_eq!(text(LOOP, &["Why?".into(), parts, "".into()]).unwrap(), "<user>Why?<user>Hi there<user>");
        let strict = "{% for m in messages %}{{ m.content[0].text + '.' }}{% endfor %}";
        assert_eq!(text(strict, &["Why?".into(), "Who?".into()]).unwrap(), "Why?.Who?.");
    }

    #[test]
    fn parts_reach_a_template_that_prints_texts_joined_as_they_are() {
        let parts = json!([{ "type": "text", "text": "Hi " }, { "type": "text", "text": "there" }]);

        assert_eq!(text("{{ messages[0].content + '.' }}", &[parts]).unwrap(), "Hi there.");
    }

    #[test]
    fn argument_texts_are_printed_as_they_are_where_the_template_prints_texts() {
        let either = "{% for c in messages[0].tool_calls %}{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}";
        let of_objects = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}";
        let printed = |source: &str, arguments: &str| {
            let mut message = Message::new("assistant", "");
            message.0.insert("tool_calls".to_owned(), json!([{ "function": { "name": "f", "arguments": arguments } }]));
            let conversation = Conversation { messages: vec![message], ..Conversation::default() };
            ChatTemplate::parse(source, "", "").unwrap().render(&conversation, false).unwrap()
        };

        for text in [r#"{"a":1}"#, r#"{ "x": 1.50 }"#, "{}"] {
            assert_eq!(printed(either, text), text);
        }
        assert_eq!(printed(of_objects, r#"{"a":1}"#), r#"{"a": 1}"#);
        assert_eq!(printed(of_objects, "{}"), "{}");
    }

    #[test]
    fn messages_that_a_template_leaves_out_stay_out_and_the_others_as_they_are() {
        let last = "{{ messages[-1].content }}{{ messages[-1].content is string }}";

        assert_eq!(text(last, &["Why?".into(), "Who?".into()]).unwrap(), "Who?True");
    }
}
