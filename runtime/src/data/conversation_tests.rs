//! What of a conversation is trained on, and what is refused.

use super::*;
use crate::data::chat_template::CHATML;
use serde_json::json;

fn documents_of(source: &str, config: ConversationConfig, record: Value) -> Result<(String, Vec<String>), RecordError> {
    let template = ChatTemplate::parse(source, "<s>", "</s>")?;
    let document = ConversationReader::new(&config, template, false).document(&record)?.expect("the record has turns");
    let trained = document.trained.iter().map(|range| document.text[range.clone()].to_owned()).collect();
    Ok((document.text, trained))
}

fn trained(config: ConversationConfig, record: Value) -> Result<Vec<String>, RecordError> {
    documents_of(CHATML, config, record).map(|(_, trained)| trained)
}

fn with_markers(train_on_eot: EndTraining) -> ConversationConfig {
    let markers =
        MarkerConfig { eot: vec!["<|im_end|>".into()], train_on_eot: Some(train_on_eot), ..MarkerConfig::default() };
    ConversationConfig { markers, ..ConversationConfig::default() }
}

fn two_turns() -> Value {
    json!({ "messages": [
        { "role": "user", "content": "Hi" }, { "role": "assistant", "content": "Ho" },
        { "role": "user", "content": "So" }, { "role": "assistant", "content": "No" },
    ] })
}

#[test]
fn marks_at_the_ends_of_turns_are_trained_on_as_configured() {
    const END: &str = "<|im_end|>";

    assert_eq!(trained(with_markers(EndTraining::Turn), two_turns()).unwrap(), ["Ho<|im_end|>", "No<|im_end|>"]);
    assert_eq!(trained(with_markers(EndTraining::All), two_turns()).unwrap(), [END, "Ho", END, END, "No", END]);
    assert_eq!(trained(with_markers(EndTraining::Last), two_turns()).unwrap(), ["Ho", "No", END]);
    assert_eq!(trained(with_markers(EndTraining::Never), two_turns()).unwrap(), ["Ho", "No"]);
}

#[test]
fn roles_to_train_are_named_as_in_the_data() {
    let config = ConversationConfig {
        roles_to_train: TrainedRoles::Named(vec!["asker".into()]),
        roles: BTreeMap::from([("user".into(), vec!["asker".into()]), ("assistant".into(), vec!["bot".into()])]),
        ..ConversationConfig::sharegpt()
    };
    let record = json!({ "conversations": [{ "from": "asker", "value": "Hi" }, { "from": "bot", "value": "Ho" }] });

    let (text, trained) = documents_of(CHATML, config, record).unwrap();

    assert_eq!(trained, ["Hi<|im_end|>"]);
    assert!(text.contains("<|im_start|>assistant\nHo"), "{text}");
}

#[test]
fn flag_of_a_message_precedes_its_role() {
    let config = ConversationConfig { field_training: Some("train".into()), ..ConversationConfig::default() };
    let record = json!({ "messages": [
        { "role": "user", "content": "Hi", "train": true }, { "role": "assistant", "content": "Ho", "train": false },
        { "role": "assistant", "content": "Yes", "train": null },
    ] });

    assert_eq!(trained(config, record).unwrap(), ["Hi<|im_end|>", "Yes<|im_end|>"]);
}

#[test]
fn answer_of_weight_zero_is_left_out() {
    let mut record = two_turns();
    record["messages"][1]["weight"] = 0.into();
    record["messages"][3]["weight"] = 1.into();

    assert_eq!(trained(ConversationConfig::default(), record).unwrap(), ["No<|im_end|>"]);
}

#[test]
fn message_or_part_that_counts_in_part_is_refused() {
    let refused = |record| trained(ConversationConfig::default(), record).unwrap_err().to_string();
    let mut record = two_turns();
    record["messages"][1]["weight"] = 0.5.into();
    assert!(refused(record).contains("has the weight 0.5"));

    let mut record = two_turns();
    record["messages"][1]["content"] = json!([{ "type": "text", "text": "No", "weight": 2 }]);
    assert!(refused(record).contains("has the weight 2, and messages are trained on or not; set `loss_weights: true`"));
}

/// What is trained on, with how much it counts: what is in several ranges counts as the last of them.
fn weighed(config: ConversationConfig, record: &Value) -> Result<Vec<(String, f32)>, RecordError> {
    let template = ChatTemplate::parse(CHATML, "<s>", "</s>")?;
    let reader = ConversationReader::new(&config, template, false).weighing(true);
    let Document { text, trained, weights, .. } = reader.document(record)?.expect("the record has turns");
    let weight =
        |at: usize| weights.iter().rev().find(|(span, _)| span.contains(&at)).map_or(1.0, |(_, weight)| *weight);
    let mut runs: Vec<(String, f32)> = Vec::new();
    for (span, at) in trained.into_iter().flat_map(|span| span.clone().map(move |at| (span.clone(), at))) {
        match runs.last_mut().filter(|(_, last)| *last == weight(at) && at != span.start) {
            Some((run, _)) => run.push_str(&text[at..=at]),
            None => runs.push((text[at..=at].to_owned(), weight(at))),
        }
    }
    Ok(runs)
}

#[test]
fn messages_and_parts_count_as_much_as_their_weights_say() {
    let runs = |expected: &[(&str, f32)]| expected.iter().map(|(text, weight)| ((*text).to_owned(), *weight)).collect();
    let mut record = two_turns();
    record["messages"][0]["weight"] = 9.into();
    record["messages"][1]["weight"] = 0.5.into();
    record["messages"][3]["weight"] = Value::Null;
    let all: Vec<(String, f32)> = runs(&[("Ho<|im_end|>", 0.5), ("No<|im_end|>", 1.0)]);
    assert_eq!(weighed(ConversationConfig::default(), &record).unwrap(), all);

    let parts = json!([{ "text": "Hm", "weight": 0.25 }, { "text": " no", "weight": 0 }, { "text": " 4." }]);
    record["messages"][3] = json!({ "role": "assistant", "content": parts, "weight": 2 });
    record["messages"][1]["weight"] = 0.0.into();
    let all: Vec<(String, f32)> = runs(&[("Hm", 0.25), (" 4.", 2.0), ("<|im_end|>", 2.0)]);
    assert_eq!(weighed(ConversationConfig::default(), &record).unwrap(), all);

    let (hi, ho) =
        (json!({ "role": "user", "content": "Hi" }), json!({ "role": "assistant", "content": "Ho", "weight": 3 }));
    let pair = json!({ "prompt": [hi], "completion": [ho] });
    let all: Vec<(String, f32)> = runs(&[("Ho<|im_end|>\n", 3.0)]);
    assert_eq!(weighed(ConversationConfig::default(), &pair).unwrap(), all, "the end of line is of the last turn");
}

#[test]
fn weight_precedes_the_flag_of_a_message_and_one_that_is_none_is_refused() {
    let config = ConversationConfig { field_training: Some("train".into()), ..ConversationConfig::default() };
    let mut record = two_turns();
    record["messages"][1] = json!({ "role": "assistant", "content": "Ho", "weight": 0, "train": true });
    record["messages"][3]["weight"] = 2.into();
    let found = weighed(config, &record).unwrap();
    assert_eq!(found, [("No<|im_end|>".to_owned(), 2.0)]);

    for weight in [json!(-1), json!(2_000_000), json!("1")] {
        record["messages"][3]["weight"] = weight.clone();
        let refused = weighed(ConversationConfig::default(), &record).unwrap_err().to_string();
        assert!(refused.starts_with(&format!("`weight` of a message is {weight};")), "{refused}");
    }
    record["messages"][3] = json!({ "role": "assistant", "content": [{ "text": "No", "weight": -2 }] });
    let refused = weighed(ConversationConfig::default(), &record).unwrap_err().to_string();
    assert!(refused.starts_with("`weight` of a content part is -2;"), "{refused}");
}

#[test]
fn parts_of_a_message_are_trained_on_by_their_characters() {
    let config = ConversationConfig { field_training_detail: Some("detail".into()), ..ConversationConfig::default() };
    let part =
        |begin: usize, end: usize, train: bool| json!({ "begin_offset": begin, "end_offset": end, "train": train });
    let detail = json!([part(0, 3, true), part(4, 8, false), part(9, 11, true)]);
    let record = json!({ "messages": [
        { "role": "user", "content": "Hi" }, { "role": "assistant", "content": " Às maybe yes", "detail": detail },
    ] });

    assert_eq!(trained(config, record).unwrap(), [" Às ", " ye", "<|im_end|>"]);
}

#[test]
fn system_message_is_dropped_if_so_configured() {
    let config = ConversationConfig { drop_system_message: true, ..ConversationConfig::default() };
    let record = json!({ "messages": [
        { "role": "system", "content": "Be brief." }, { "role": "user", "content": "Hi" }, { "role": "assistant", "content": "Ho" },
    ] });

    let (text, trained) = documents_of(CHATML, config, record).unwrap();

    assert_eq!(trained, ["Ho<|im_end|>"]);
    assert!(text.starts_with("<|im_start|>user\nHi"), "{text}");
}

#[test]
fn parts_of_text_are_joined_for_templates_of_plain_texts() {
    let parts = json!([{ "type": "text", "text": "He" }, { "type": "text", "text": "y" }]);
    let record =
        json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": parts }] });

    assert_eq!(trained(ConversationConfig::default(), record).unwrap(), ["Hey<|im_end|>"]);
}

#[test]
fn what_the_template_would_lose_is_refused_by_name() {
    let call = json!([{ "function": { "name": "f", "arguments": {} } }]);
    let image = json!([{ "type": "image", "url": "x" }]);
    let lost = [
        (
            "reasoning_content",
            json!({ "messages": [{ "role": "assistant", "content": "Ho", "reasoning_content": "Hm" }] }),
        ),
        ("tool_calls", json!({ "messages": [{ "role": "assistant", "content": null, "tool_calls": call }] })),
        ("tools", json!({ "messages": [{ "role": "assistant", "content": "Ho" }], "tools": "[{\"name\": \"f\"}]" })),
        ("image", json!({ "messages": [{ "role": "user", "content": image }] })),
        ("images", json!({ "messages": [{ "role": "assistant", "content": "A bus" }], "images": [{ "path": null }] })),
        ("audio", json!({ "messages": [{ "role": "assistant", "content": "A bus" }], "audio": "a.wav" })),
        ("content", json!({ "messages": [{ "role": "user", "content": null }] })),
        ("role", json!({ "messages": [{ "from": "user", "content": "Hi" }] })),
    ];
    for (named, record) in lost {
        let error = trained(ConversationConfig::default(), record).unwrap_err().to_string();

        assert!(error.contains(named), "{named}: {error}");
    }
}

#[test]
fn arguments_and_tools_in_texts_of_json_are_rendered_as_objects() {
    let source = "{{ tools[0].name }}{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    let call = json!([{ "function": { "name": "f", "arguments": "{\"b\":1,\"a\":2}" } }]);
    let messages = json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "tool_calls": call }]);
    let record = json!({ "messages": messages, "tools": "[{\"name\": \"f\"}]" });

    let (text, _) = documents_of(source, ConversationConfig::default(), record).unwrap();

    assert_eq!(text, r#"fuserassistant{"b": 1, "a": 2}"#);
}

#[test]
fn arguments_in_a_text_stay_one_where_the_template_appends_them() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ 'f' + c.function.arguments }}{% endfor %}</>{% endfor %}";
    let call = json!([{ "function": { "name": "f", "arguments": "{\"b\":1}" } }]);
    let record =
        json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "tool_calls": call }] });

    let (text, trained) = documents_of(source, ConversationConfig::default(), record).unwrap();

    assert_eq!(text, "<user>Hi</><assistant>f{\"b\":1}</>");
    assert_eq!(trained, ["f{\"b\":1}</>"]);
}

#[test]
fn parts_of_a_content_that_the_end_of_turn_repeats_are_trained_where_the_content_is() {
    let config = ConversationConfig { field_training_detail: Some("detail".into()), ..ConversationConfig::default() };
    let detail = json!([{ "begin_offset": 0, "end_offset": 0, "train": true }]);
    let record = json!({ "messages": [
        { "role": "user", "content": "e" }, { "role": "assistant", "content": "e", "detail": detail },
    ] });

    assert_eq!(trained(config, record).unwrap(), ["e", "<|im_end|>"]);
}

#[test]
fn fields_that_nothing_uses_are_ignored_and_remembered() {
    let reader =
        ConversationReader::new(&ConversationConfig::default(), ChatTemplate::parse(CHATML, "", "").unwrap(), false);
    let record = json!({ "messages": [{ "role": "assistant", "content": "Ho", "mood": "glad", "weight": null }] });

    reader.document(&record).unwrap();

    assert_eq!(*reader.reported.lock().unwrap(), BTreeSet::from(["mood".to_owned()]));
}

#[test]
fn content_parts_are_trained_on_by_their_flags() {
    let parts = json!([{ "type": "text", "text": "Hm, 5?", "train": false }, { "type": "text", "text": " No: 4.", "weight": 1 }]);
    let record =
        json!({ "messages": [{ "role": "user", "content": "2+2?" }, { "role": "assistant", "content": parts }] });

    assert_eq!(trained(ConversationConfig::default(), record).unwrap(), [" No: 4.", "<|im_end|>"]);
}

const WITH_THOUGHTS: &str = "{% for m in messages %}<{{ m.role }}>{% if m.thought %}[{{ m.thought }}]{% endif %}{{ m.content }}</>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

#[test]
fn parts_of_a_thought_are_trained_on_beside_the_answer() {
    let config = ConversationConfig { thinking_key: "thought".into(), ..ConversationConfig::default() };
    let thought = json!([{ "text": "Maybe 5.", "train": false }, { "text": " No, 4.", "train": true }]);
    let record = json!({ "messages": [
        { "role": "user", "content": "2+2?" }, { "role": "assistant", "content": "It is 4.", "thought": thought },
    ] });

    let (text, trained) = documents_of(WITH_THOUGHTS, config, record).unwrap();

    assert_eq!(text, "<user>2+2?</>\n<assistant>[Maybe 5. No, 4.]It is 4.</>\n");
    assert_eq!(trained, [" No, 4.", "It is 4.", "</>"]);
}

#[test]
fn thought_in_tags_becomes_a_field_if_so_configured() {
    let config =
        ConversationConfig { thinking_key: "thought".into(), split_thinking: true, ..ConversationConfig::default() };
    let record = json!({ "messages": [
        { "role": "user", "content": "<think>x</think>" }, { "role": "assistant", "content": "<think>\nHm\n</think>\n4" },
    ] });

    let (text, trained) = documents_of(WITH_THOUGHTS, config, record).unwrap();

    assert_eq!(text, "<user><think>x</think></>\n<assistant>[Hm]4</>\n");
    assert_eq!(trained, ["[Hm]4</>"]);
}

#[test]
fn system_text_beside_the_turns_becomes_the_first_message() {
    let record = json!({ "system": "Be brief.", "messages": two_turns()["messages"] });

    let (text, trained) = documents_of(CHATML, ConversationConfig::default(), record).unwrap();

    assert!(text.starts_with("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi"), "{text}");
    assert_eq!(trained, ["Ho<|im_end|>", "No<|im_end|>"]);
}

#[test]
fn turns_and_parameters_in_texts_of_json_are_read() {
    let source = "{{ tools[0].function.parameters.type }}|{% for m in messages %}{{ m.content }}{% endfor %}";
    let record = json!({
        "messages": "[{\"role\": \"assistant\", \"content\": \"Hi\"}]",
        "tools": [{ "function": { "name": "f", "parameters": "{\"type\": \"object\"}" } }],
    });

    assert_eq!(documents_of(source, ConversationConfig::default(), record).unwrap().0, "object|Hi");
}

#[test]
fn no_role_is_trained_on_if_none_is_named() {
    let config = ConversationConfig {
        roles_to_train: TrainedRoles::Named(Vec::new()),
        field_training: Some("train".into()),
        ..ConversationConfig::default()
    };
    let record = json!({ "messages": [
        { "role": "assistant", "content": "Ho" }, { "role": "assistant", "content": "Yes", "train": true },
    ] });

    assert_eq!(trained(config, record).unwrap(), ["Yes<|im_end|>"]);
}

#[test]
fn numbers_of_calls_and_tools_keep_every_digit_wherever_the_data_has_them() {
    let source = "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    const NUMBERS: &str = r#"{"wei": 1000000000000000000001, "rate": 1e-07}"#;
    let text = serde_json::to_string(NUMBERS).unwrap();
    let tool = format!(r#"{{"type": "function", "function": {{"name": "pay", "parameters": {text}}}}}"#);
    let tools = serde_json::to_string(&format!("[{tool}]")).unwrap();
    let items = serde_json::to_string(&tool).unwrap();
    for (arguments, tools) in [(NUMBERS, format!("[{tool}]")), (&text, tools), (NUMBERS, format!("[{items}]"))] {
        let record = format!(
            r#"{{"tools": {tools}, "messages": [{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": "", "tool_calls": [{{"function": {{"arguments": {arguments}}}}}]}}]}}"#
        );

        let (text, _) =
            documents_of(source, ConversationConfig::default(), exact_json::value(&record).unwrap()).unwrap();

        assert_eq!(text.matches(NUMBERS).count(), 2, "{text}");
    }
}

#[test]
fn every_turn_is_trained_on_with_the_inputs() {
    let template = ChatTemplate::parse(CHATML, "<s>", "</s>").unwrap();
    let roles = ["system", "developer", "user", "assistant", "tool", "assistant"];
    let turns: Vec<Value> = roles.iter().map(|role| json!({ "role": role, "content": format!("as {role}") })).collect();

    let reader = ConversationReader::new(&ConversationConfig::default(), template, true);
    let document = reader.document(&json!({ "messages": turns })).unwrap().unwrap();

    let trained: Vec<&str> = document.trained.iter().map(|range| &document.text[range.clone()]).collect();
    assert_eq!(trained, roles.map(|role| format!("as {role}<|im_end|>")));
}

#[test]
fn values_of_variables_in_a_record_are_those_of_its_text() {
    let source = "{% for m in messages %}{% if m.role == 'assistant' and not thinks %}(no thought) {% endif %}{{ m.content }}|{% endfor %}";
    let text = |variables: Value| {
        let messages = [json!({ "role": "user", "content": "Hi" }), json!({ "role": "assistant", "content": "Ho" })];
        let record = json!({ "messages": messages, "chat_template_kwargs": variables });
        documents_of(source, ConversationConfig::default(), record).map(|(text, _)| text)
    };

    assert_eq!(text(json!({ "thinks": true })).unwrap(), "Hi|Ho|");
    assert_eq!(text(json!("{\"thinks\": true}")).unwrap(), "Hi|Ho|");
    assert_eq!(text(json!({ "thinks": null })).unwrap(), "Hi|(no thought) Ho|");
    assert!(text(json!([1])).unwrap_err().to_string().contains("chat_template_kwargs"));
}

fn asked_and_answered() -> Value {
    json!({ "prompt": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "Ho" }, { "role": "user", "content": "So" }],
            "completion": [{ "role": "assistant", "content": "No" }, { "role": "user", "content": "Why" }, { "role": "assistant", "content": "I" }] })
}

#[test]
fn all_of_a_completion_is_trained_on_and_nothing_of_its_prompt() {
    let turns = [&asked_and_answered()["prompt"], &asked_and_answered()["completion"]];
    let joined: Vec<Value> = turns.iter().flat_map(|turns| turns.as_array().unwrap().clone()).collect();
    let in_texts = json!({ "prompt": turns[0].to_string(), "completion": turns[1].to_string(), "messages": null });
    let beside = json!({ "system": "Be brief.", "prompt": turns[0], "completion": turns[1] });

    let (text, trained) = documents_of(CHATML, ConversationConfig::default(), asked_and_answered()).unwrap();

    const COMPLETION: &str = "No<|im_end|>\n<|im_start|>user\nWhy<|im_end|>\n<|im_start|>assistant\nI<|im_end|>\n";
    assert_eq!(trained, [COMPLETION]);
    let (whole, _) = documents_of(CHATML, ConversationConfig::default(), json!({ "messages": joined })).unwrap();
    assert_eq!(text, whole);
    for record in [in_texts, beside] {
        assert_eq!(documents_of(CHATML, ConversationConfig::default(), record).unwrap().1, [COMPLETION]);
    }
}

#[test]
fn completion_begins_where_the_text_differs_from_what_the_model_is_asked_with() {
    let source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}<think>\n\n</think>{{ m.content }}</>{% endgeneration %}{% else %}{{ m.content }}</>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}";
    let of = |answer: &str| {
        let record = json!({ "prompt": [{ "role": "user", "content": "Hi" }], "completion": [{ "role": "assistant", "content": answer }] });
        documents_of(source, ConversationConfig::default(), record).unwrap().1
    };

    assert_eq!(of("Ho"), ["\n</think>Ho</>"]);
    assert_eq!(of(""), ["\n</think></>"]);
}

#[test]
fn roles_flags_and_inputs_decide_in_prompts_with_completions_too() {
    let by_roles = ConversationConfig {
        roles_to_train: TrainedRoles::Named(vec!["assistant".into()]),
        ..ConversationConfig::default()
    };
    let by_flags = ConversationConfig { field_training: Some("train".into()), ..ConversationConfig::default() };
    let mut flagged = asked_and_answered();
    flagged["prompt"][1]["train"] = true.into();
    flagged["completion"][1]["train"] = false.into();

    assert_eq!(trained(by_roles, asked_and_answered()).unwrap(), ["No<|im_end|>", "I<|im_end|>"]);
    assert_eq!(
        trained(by_flags, flagged).unwrap(),
        ["Ho<|im_end|>", "No<|im_end|>\n<|im_start|>user\n", "\n<|im_start|>assistant\nI<|im_end|>\n"]
    );
    let all = ConversationConfig { roles_to_train: TrainedRoles::All, ..ConversationConfig::default() };
    let completion = trained(ConversationConfig::default(), asked_and_answered()).unwrap();
    assert_eq!(trained(all.clone(), asked_and_answered()).unwrap(), completion);
    assert_eq!(trained(all, two_turns()).unwrap().len(), 4);
    let template = ChatTemplate::parse(CHATML, "", "").unwrap();
    let reader = ConversationReader::new(&ConversationConfig::default(), template, true);
    let document = reader.document(&asked_and_answered()).unwrap().unwrap();
    assert_eq!(&document.text[document.trained[0].clone()], "Hi<|im_end|>");
    assert_eq!(document.trained.len(), 4);
}

#[test]
fn conversation_without_a_completion_is_left_out_and_a_text_beside_messages_refused() {
    let [mut empty, mut text] = [asked_and_answered(), asked_and_answered()];
    empty["completion"] = Value::Null;
    text["completion"] = "No".into();

    let template = ChatTemplate::parse(CHATML, "", "").unwrap();
    let reader = ConversationReader::new(&ConversationConfig::default(), template, false);
    assert_eq!(reader.document(&empty).unwrap(), None);
    assert_eq!(
        reader.document(&text).unwrap_err().to_string(),
        "field \"completion\" must be a list of turns, found text"
    );
}

#[test]
fn role_that_may_be_an_answerer_is_refused_by_name() {
    let record =
        |role: &str| json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": role, "content": "Ho" }] });
    let config = |roles: &[(&str, &str)]| ConversationConfig {
        roles: roles.iter().map(|(role, name)| ((*role).into(), vec![(*name).into()])).collect(),
        ..ConversationConfig::default()
    };

    for role in ["bot", "Assistant", "model", "function_response"] {
        let error = trained(config(&[]), record(role)).unwrap_err();
        assert_eq!(error, RecordError::UnknownRole { role: role.into() });
        assert!(error.to_string().contains(&format!("`roles: {{assistant: [{role}]}}`")), "{error}");
    }
    assert_eq!(trained(config(&[("assistant", "bot")]), record("bot")).unwrap(), ["Ho<|im_end|>"]);
    assert!(trained(config(&[("bot", "bot")]), record("bot")).unwrap().is_empty());
    assert_eq!(trained(config(&[("user", "asker")]), record("gpt")).unwrap(), ["Ho<|im_end|>"]);
    let names =
        ConversationConfig { roles_to_train: TrainedRoles::Named(vec!["bot".into()]), ..ConversationConfig::default() };
    assert_eq!(trained(names, record("bot")).unwrap(), ["Ho<|im_end|>"]);
    let source = "{% for m in messages %}{% if m.role == 'critic' %}?{% endif %}{{ m.content }}{% endfor %}";
    assert!(documents_of(source, config(&[]), record("critic")).unwrap().1.is_empty());
}

const WITH_CALLS: &str = "{% for t in tools or [] %}{{ t.type }} {{ t.function.name }};{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}</>{% endfor %}";

#[test]
fn turns_with_calls_of_functions_are_answers() {
    let call = r#"{"name": "f", "arguments": {"b": 1}}"#;
    let record = json!({ "tools": r#"[{"name": "f", "parameters": {}}]"#, "conversations": [
        { "from": "human", "value": "Hi" }, { "from": "function_call", "value": call },
        { "from": "observation", "value": "3" }, { "from": "gpt", "value": "Ho" },
    ] });

    let (text, trained) = documents_of(WITH_CALLS, ConversationConfig::sharegpt(), record.clone()).unwrap();

    assert_eq!(text, "function f;<user>Hi</><assistant>f({\"b\": 1})</><tool>3</><assistant>Ho</>");
    assert_eq!(trained, ["f({\"b\": 1})</>", "Ho</>"]);
    let refused =
        |source: &str, record: Value| documents_of(source, ConversationConfig::sharegpt(), record).unwrap_err();
    let mut no_call = record.clone();
    no_call["conversations"][1]["value"] = "f(1)".into();
    assert_eq!(refused(WITH_CALLS, no_call), RecordError::NotCalls { role: "function_call".into() });
    let mut alone = record;
    alone.as_object_mut().unwrap().remove("tools");
    assert!(refused(CHATML, alone).to_string().contains("function_call"));
}

#[test]
fn call_in_the_older_field_of_a_message_is_not_lost() {
    let call = json!({ "name": "f", "arguments": "{}" });
    let record = json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "", "function_call": call }] });

    let error = trained(ConversationConfig::default(), record).unwrap_err().to_string();

    assert!(error.contains("\"function_call\""), "{error}");
}
