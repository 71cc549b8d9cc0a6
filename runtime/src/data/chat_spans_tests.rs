//! Where trained turns are found, for templates of every kind.

use super::*;
use crate::data::chat_template::CHATML;
use serde_json::json;

fn trained_of(source: &str, messages: Json) -> Result<Vec<String>, ChatTemplateError> {
    let template = ChatTemplate::parse(source, "<s>", "</s>")?;
    let messages: Vec<Message> =
        messages.as_array().unwrap().iter().map(|message| Message(message.as_object().unwrap().clone())).collect();
    let trained: Vec<usize> = (0..messages.len()).filter(|&idx| messages[idx].role() == "assistant").collect();
    let chat = render_for_training(&template, &Conversation { messages, tools: None }, &trained)?;
    Ok(chat.turns.iter().map(|(_, range)| chat.text[range.clone()].to_owned()).collect())
}

fn trained_texts(source: &str, turns: &[(&str, &str)]) -> Result<Vec<String>, ChatTemplateError> {
    trained_of(source, turns.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect())
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
fn generation_blocks_are_trained_on_exactly() {
    let source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}</>{% endfor %}";

    assert_eq!(trained_texts(source, &TWO_TURNS).unwrap(), ["Hello.!", "Goodbye.!"]);
}

/// A template that drops the reasoning of all turns but the last, and opens an empty one there, as that of Qwen3.
const REWRITES: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

#[test]
fn template_that_drops_earlier_reasoning_trains_on_every_answer() {
    let call = json!([{ "function": { "name": "time", "arguments": { "zone": "UTC" } } }]);
    let messages = json!([
        { "role": "user", "content": "Hi" },
        { "role": "assistant", "content": "Hello.", "reasoning_content": "Greet." },
        { "role": "user", "content": "Time?" },
        { "role": "assistant", "content": null, "tool_calls": call },
        { "role": "user", "content": "Hello." },
        { "role": "assistant", "content": "Bye.\n", "reasoning_content": "Part." },
    ]);

    let trained = trained_of(REWRITES, messages).unwrap();

    let call = "<call>{\"name\": \"time\", \"arguments\": {\"zone\": \"UTC\"}}</call><|im_end|>";
    assert_eq!(trained, ["Hello.<|im_end|>", call, "<think>\nPart.\n</think>\n\nBye.\n<|im_end|>"]);
}

#[test]
fn prompt_that_opens_a_thought_in_a_rewriting_template_finds_earlier_turns() {
    let source = REWRITES.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}");

    let trained = trained_texts(&source, &TWO_TURNS[1..]).unwrap();

    assert_eq!(trained, ["Hello.<|im_end|>", "\n</think>\n\nGoodbye.<|im_end|>"]);
}

#[test]
fn turn_that_repeats_its_own_opening_in_a_rewriting_template_is_refused() {
    let turns = [("user", "Hi"), ("assistant", "<|im_start|>assistant\nHo"), ("user", "So"), ("assistant", "No.")];

    assert_eq!(trained_texts(REWRITES, &turns), Err(ChatTemplateError::NotLocated { number: 2 }));
}

#[test]
fn template_that_rewrites_what_precedes_a_turn_is_refused() {
    let source = "{{ messages|length }}{% for m in messages %}{{ m.content }};{% endfor %}";

    assert_eq!(trained_texts(source, &TWO_TURNS), Err(ChatTemplateError::NotLocated { number: 3 }));
}
