//! Renders conversations for `tests/peers/chat_templates.py`: a JSON object per line of standard input gives one of standard output.
//!
//! Input: `template`, `bos`, `eos`, `messages` and perhaps `tools`. Output: `text` with `generation_prompt`, and `trained` and `spans`, the texts
//! and byte ranges of the assistant's turns, or `error`.

use std::io::{BufRead, Write};

use phalanx::data::chat_spans::render_for_training;
use phalanx::data::chat_template::{ChatTemplate, ChatTemplateError, Conversation, Message};
use serde_json::{Value, json};

fn main() -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let input: Value = serde_json::from_str(&line?)?;
        let output = rendered(&input).unwrap_or_else(|error| json!({ "error": error.to_string() }));
        writeln!(out, "{output}")?;
    }
    Ok(())
}

fn rendered(input: &Value) -> Result<Value, ChatTemplateError> {
    let text = |key: &str| input[key].as_str().unwrap_or_default();
    let template = ChatTemplate::parse(text("template"), text("bos"), text("eos"))?;
    let messages = input["messages"].as_array().into_iter().flatten();
    let messages: Vec<Message> = messages.filter_map(|message| Some(Message(message.as_object()?.clone()))).collect();
    let mut conversation = Conversation {
        messages,
        tools: input.get("tools").filter(|tools| !tools.is_null()).cloned(),
        ..Conversation::default()
    };
    let prompt = template.render(&conversation, true)?;
    let trained: Vec<usize> =
        (0..conversation.messages.len()).filter(|&idx| conversation.messages[idx].role() == "assistant").collect();
    let chat = render_for_training(&template, &mut conversation, &trained);
    let spans: Vec<Value> = match &chat {
        Ok(chat) => chat.turns.iter().map(|(_, range)| json!([range.start, range.end])).collect(),
        Err(_) => Vec::new(),
    };
    let trained = match &chat {
        Ok(chat) => chat.turns.iter().map(|(_, range)| chat.text[range.clone()].into()).collect::<Vec<Value>>().into(),
        Err(error) => json!({ "error": error.to_string() }),
    };
    Ok(json!({ "text": template.render(&conversation, false)?, "prompt": prompt, "trained": trained, "spans": spans }))
}
