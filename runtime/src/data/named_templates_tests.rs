//! Named templates give the texts that transformers gives with Axolotl's templates of the same names.

use crate::config::named_templates::NamedTemplate;
use crate::data::chat_spans::render_for_training;
use crate::data::chat_template::{ChatTemplate, Conversation, Message};
use serde_json::Value;

/// Made by `tests/peers/chat_templates.py --golden` with transformers 5.23 and the templates of Axolotl's repository in July 2026;
/// `null` where their template refuses the conversation.
const TEXTS: &str = include_str!("templates/texts.json");

fn conversation(case: &Value) -> Conversation {
    let messages = case["messages"].as_array().unwrap().iter();
    let messages = messages.map(|message| Message(message.as_object().unwrap().clone())).collect();
    Conversation {
        messages,
        tools: case.get("tools").filter(|tools| !tools.is_null()).cloned(),
        ..Conversation::default()
    }
}

fn cases() -> Vec<(NamedTemplate, Vec<Value>)> {
    let texts: Value = serde_json::from_str(TEXTS).unwrap();
    let of = |(name, cases): (&String, &Value)| (NamedTemplate::of(name).unwrap(), cases.as_array().unwrap().clone());
    texts.as_object().unwrap().iter().map(of).collect()
}

#[test]
fn every_template_gives_the_text_of_its_peer_or_refuses_what_the_peer_refuses() {
    let cases = cases();
    assert_eq!(cases.len(), NamedTemplate::names().count());

    for (named, cases) in cases {
        let template = ChatTemplate::parse(named.source(), "<s>", "</s>").unwrap();
        for case in cases {
            let text = |prompt| template.render(&conversation(&case), prompt).map_or(Value::Null, Value::from);

            assert_eq!(text(false), case["text"], "{}", named.name());
            if let Some(prompt) = case.get("prompt") {
                assert_eq!(text(true), *prompt, "{}", named.name());
            }
        }
    }
}

#[test]
fn answers_are_located_in_the_text_of_every_template() {
    for (named, cases) in cases() {
        let template = ChatTemplate::parse(named.source(), "<s>", "</s>").unwrap();
        for case in cases.iter().filter(|case| case["text"].is_string()) {
            let mut conversation = conversation(case);
            let answers: Vec<usize> = (0..conversation.messages.len())
                .filter(|&idx| conversation.messages[idx].role() == "assistant")
                .collect();

            let chat = render_for_training(&template, &mut conversation, &answers).unwrap();

            // A template may print nothing of a message that only calls a function.
            let is_printed = |&&idx: &&usize| {
                let Message(message) = &conversation.messages[idx];
                let call = &message.get("tool_calls").unwrap_or(&Value::Null)[0]["function"]["name"];
                call.as_str().is_none_or(|name| chat.text.contains(name))
            };
            let mut located: Vec<usize> = chat.turns.iter().map(|(idx, _)| *idx).collect();
            located.dedup();
            assert_eq!(located, answers.iter().filter(is_printed).copied().collect::<Vec<_>>(), "{}", named.name());
            for (idx, range) in chat.turns {
                let (trained, content) = (&chat.text[range], conversation.messages[idx].text().unwrap().trim());
                assert!(trained.contains(content), "{}: {trained:?} without {content:?}", named.name());
                assert!(!trained.contains("So?") && !trained.contains("Hi?"), "{}: {trained:?}", named.name());
            }
        }
    }
}
