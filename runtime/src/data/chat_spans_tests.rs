//! Where trained turns are found, for templates of every kind.

use super::*;
use crate::data::chat_template::CHATML;
use serde_json::{Value as Json, json};

fn trained_of(source: &str, messages: Json) -> Result<Vec<String>, ChatTemplateError> {
    let template = ChatTemplate::parse(source, "<s>", "</s>")?;
    let messages: Vec<Message> =
        messages.as_array().unwrap().iter().map(|message| Message(message.as_object().unwrap().clone())).collect();
    let trained: Vec<usize> = (0..messages.len()).filter(|&idx| messages[idx].role() == "assistant").collect();
    let chat = render_for_training(&template, &mut Conversation { messages, ..Conversation::default() }, &trained)?;
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
fn answers_are_found_whatever_they_repeat_of_the_template() {
    let turns = [("user", "Hi"), ("assistant", "<|im_start|>assistant\nHo"), ("user", "So"), ("assistant", "No.")];

    let trained = trained_texts(REWRITES, &turns).unwrap();

    assert_eq!(trained, ["<|im_start|>assistant\nHo<|im_end|>", "<think>\n\n</think>\n\nNo.<|im_end|>"]);
}

#[test]
fn answers_are_found_in_a_template_that_counts_the_messages() {
    let source = "{{ messages|length }}{% for m in messages %}{{ m.content }};{% endfor %}";

    assert_eq!(trained_texts(source, &TWO_TURNS).unwrap(), ["Hello.;", "Goodbye.;"]);
}

/// The header of each turn is a line; the prompt opens a thought.
const OPENS_A_THOUGHT: &str = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}";

#[test]
fn answer_that_begins_like_the_opened_thought_is_trained_from_its_first_letter() {
    for answer in ["<answer>4</answer>", "<tool_call>{}</tool_call>", "<", "<think", "<think>\nHm</think>4"] {
        let trained = trained_texts(OPENS_A_THOUGHT, &[("user", "Hi"), ("assistant", answer)]).unwrap();

        assert_eq!(trained, [format!("{answer}</s>")]);
    }
}

#[test]
fn short_answers_and_those_named_like_roles_are_trained_without_headers() {
    let sources = [
        "{% for m in messages %}### {{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}",
        "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}{{ '<s>assistant\n' }}",
        "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}",
    ];
    for source in sources {
        for answer in ["A", "s", "t", ":", "#", "assistant", "user", "model"] {
            let turns = [("user", answer), ("assistant", answer), ("user", "assistant"), ("assistant", answer)];

            let trained = trained_texts(source, &turns).unwrap();

            let trained: Vec<&str> = trained.iter().map(|text| text.trim_start()).collect();
            assert_eq!(trained, [format!("{answer}</s>"), format!("{answer}</s>")], "{source}");
        }
    }
}

#[test]
fn user_turns_are_trained_from_their_first_letter_to_their_end() {
    let template = ChatTemplate::parse(CHATML, "", "").unwrap();
    let messages = [("user", "s"), ("assistant", "user"), ("user", "user")];
    let messages = messages.map(|(role, content)| Message::new(role, content)).to_vec();

    let chat =
        render_for_training(&template, &mut Conversation { messages, ..Conversation::default() }, &[0, 1, 2]).unwrap();

    let trained: Vec<&str> = chat.turns.iter().map(|(_, range)| &chat.text[range.clone()]).collect();
    assert_eq!(trained, ["s<|im_end|>", "user<|im_end|>", "user<|im_end|>"]);
}

#[test]
fn template_that_ends_with_eos_without_a_prompt_trains_on_every_answer() {
    let source = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}";

    let trained = trained_texts(source, &TWO_TURNS).unwrap();

    assert_eq!(trained, ["Hello.<|end|>", "Goodbye.<|end|>\n</s>"]);
}

#[test]
fn end_of_turn_is_found_where_the_loop_does_not_print_it() {
    for source in [
        // After the loop only.
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}{{ eos_token }}",
        // With the next turn.
        "{% for m in messages %}{% if loop.index > 1 %}{{ eos_token }}{% endif %}{{ '[' + m.role + ']' + m.content }}{% endfor %}{{ eos_token }}",
        // Without a loop over messages.
        "{% for i in range(messages | length) %}{{ '[' + messages[i].role + ']' + messages[i].content + eos_token }}{% endfor %}",
    ] {
        let trained = trained_texts(source, &TWO_TURNS).unwrap();

        assert_eq!(trained[1], "Goodbye.</s>", "{source}");
        let is_only_last = source.contains("}}{% endfor %}{{ eos") && !source.contains("index");
        assert_eq!(trained[0], if is_only_last { "Hello." } else { "Hello.</s>" }, "{source}");
    }
}

#[test]
fn blanks_that_a_template_leaves_between_turns_hide_no_opening() {
    let source = "{% for m in messages %}\n\n  {{ '<|' + m.role + '|>\n' + m.content | trim + '<|end|>' }}\n\n{% endfor %}\n{% if add_generation_prompt %}\n  {{ '<|assistant|>\n' }}\n{% endif %}";

    assert_eq!(trained_texts(source, &TWO_TURNS).unwrap(), ["Hello.<|end|>", "Goodbye.<|end|>"]);
}

#[test]
fn empty_answers_are_not_trained_on() {
    for source in [CHATML, REWRITES] {
        for empty in ["", "  ", "\n"] {
            let turns = [("user", "Hi"), ("assistant", empty), ("user", "Bye"), ("assistant", "Ciao.")];

            let trained = trained_texts(source, &turns).unwrap();

            assert_eq!(trained.len(), 1, "{source}");
            assert!(trained[0].ends_with("Ciao.<|im_end|>"), "{trained:?}");
        }
    }
}

#[test]
fn name_of_the_one_who_answers_is_part_of_the_opening() {
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} name={{ m.name }}{% endif %}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                  {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let template = ChatTemplate::parse(source, "", "").unwrap();
    let message = |role: &str| {
        let mut message = Message::new(role, "Hello");
        message.0.insert("name".to_owned(), "Ada".into());
        message
    };
    let messages = vec![message("user"), message("assistant"), message("user"), message("assistant")];

    let chat =
        render_for_training(&template, &mut Conversation { messages, ..Conversation::default() }, &[1, 2, 3]).unwrap();

    let trained: Vec<&str> = chat.turns.iter().map(|(_, range)| &chat.text[range.clone()]).collect();
    assert_eq!(trained, ["Hello<|im_end|>"; 3]);
}

#[test]
fn mark_behind_the_loop_ends_the_last_answer_as_those_before_it() {
    let source = "{% for m in messages %}{% if not loop.first %}<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ '' }}{{ m.content }}{% endfor %}<|im_end|>\n";
    let always_asks = "{% for m in messages %}<|{{ m.role }}|>\n{{ '' }}{{ m.content }}\n{% endfor %}<|assistant|>\n";
    let trained = |source: &str| {
        let template = ChatTemplate::parse(source, "", "").unwrap();
        let messages = ["user", "assistant", "user", "assistant"].map(|role| Message::new(role, "Yes.")).to_vec();
        let mut conversation = Conversation { messages, ..Conversation::default() };
        let chat = render_for_training(&template, &mut conversation, &[1, 3]).unwrap();
        chat.turns.iter().map(|(_, range)| chat.text[range.clone()].trim().to_owned()).collect::<Vec<_>>()
    };

    assert_eq!(trained(source), ["Yes.<|im_end|>"; 2]);
    assert_eq!(trained(always_asks), ["Yes."; 2]);
}
