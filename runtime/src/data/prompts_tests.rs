//! Prompts of instruction formats.

use super::*;
use crate::config::prompts::*;
use serde_json::json;

fn texts(word: &str, record: Value) -> (String, String) {
    NamedPrompt::of(word).unwrap().prompt().texts(&record, &record).unwrap().unwrap()
}

#[test]
fn style_of_a_format_can_be_chosen() {
    let record = json!({ "instruction": "Add.", "input": "1 2", "output": "3" });

    let (chat, answer) = texts("alpaca:chat", record.clone());
    let (phi, _) = texts("alpaca:phi", record);

    assert!(chat.starts_with("SYSTEM: Below is an instruction"), "{chat}");
    assert!(chat.ends_with("appropriately completes the request.\nUSER: Add.\n1 2\nASSISTANT:"), "{chat}");
    assert!(phi.ends_with("<|end|>\n<|user|>\nAdd.<|end|>1 2<|assistant|>"), "{phi}");
    assert_eq!(answer, "3");
}

#[test]
fn every_format_fills_its_fields() {
    let fields = [
        "instruction",
        "input",
        "output",
        "question",
        "answer",
        "message_1",
        "message_2",
        "system",
        "system_prompt",
        "response",
        "prompt",
        "category",
        "INSTRUCTION",
        "RESPONSE",
        "article",
        "summary",
        "context",
    ];
    let record =
        Value::Object(fields.map(|field| (field.to_owned(), json!(format!("<{field}>")))).into_iter().collect());

    for word in NamedPrompt::names() {
        let (prompt, answer) = texts(word, record.clone());

        assert!(prompt.contains('<') && answer.contains('<'), "{word}: {prompt} {answer}");
        assert!(!prompt.contains(['{', '}']) && !answer.contains(['{', '}']), "{word}: {prompt} {answer}");
    }
    assert_eq!(
        texts("context_qa", record.clone()).0,
        "SYSTEM: Use the following contextual information to concisely answer the question.\n\n\
         USER: <article>\n===\n<question>\nASSISTANT:"
    );
    assert_eq!(
        texts("alpaca_w_system.load_open_orca", record.clone()).0,
        "### System:\n<system_prompt>\n### Human:\n<question>\n### Assistant:\n"
    );
    assert_eq!(texts("jeopardy", record).1, "what is <answer>");
}

#[test]
fn system_text_of_a_record_goes_before_the_default() {
    let custom = CustomPrompt {
        system_prompt: "Be kind.".into(),
        system_format: "<<{system}>>".into(),
        field_system: "sys".into(),
        field_instruction: "q".into(),
        field_input: "in".into(),
        field_output: "a".into(),
        format: "[{instruction}|{input}]".into(),
        no_input_format: "[{instruction}] {{x}}".into(),
    };
    let of = |record: Value| custom.prompt().texts(&record, &record).unwrap().unwrap();

    assert_eq!(of(json!({ "q": "Hi {input}", "a": "Ho" })), ("<<Be kind.>>[Hi {input}] {x}".into(), "Ho".into()));
    assert_eq!(of(json!({ "q": "Hi", "in": "1", "sys": "Be brief.", "a": "Ho" })).0, "<<Be brief.>>[Hi|1]");
}

#[test]
fn record_of_another_shape_is_an_error_even_without_an_answer() {
    let prompt = NamedPrompt::ALPACA.prompt();
    let error = |record: Value| prompt.texts(&record, &record).unwrap_err().to_string();

    assert!(error(json!({ "output": null })).contains("\"instruction\" is missing"));
    assert!(error(json!({ "instruction": "Add." })).contains("\"output\" is missing"));
    assert!(error(json!({ "instruction": "Add.", "output": 3 })).contains("must be text"));
}
