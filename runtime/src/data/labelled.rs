//! Answers that are labelled desirable or not, one by one: TRL's columns `prompt`, `completion` and `label`.
//!
//! Columns are read as those of pairs are. A record that is a pair becomes two answers, the preferred one desirable, as in TRL.

use serde_json::Value;

use super::config::PairFields;
use super::conversation::ConversationReader;
use super::document::Sample;
use super::preference::{document, filled_by, first_of, messages, pair, text_of};
use super::prompt_completion::are_messages;
use super::record_error::{RecordError, field_of, wrong_type};
use crate::config::pair_form::{Frame, PairForm, Question};

const COMPLETION: &str = "completion";
const LABEL: &str = "label";

/// The answers of a record; an empty one where an answer or its label is null.
///
/// # Errors
/// When a column is missing or has a type that does not fit.
pub(super) fn answers(
    record: &Value,
    fields: &PairFields,
    chat: Option<&ConversationReader>,
) -> Result<Vec<Sample>, RecordError> {
    let (completion, label) = match fields.form {
        PairForm::Formats => (&fields.formats.field_completion[..], &fields.formats.field_label[..]),
        _ => (COMPLETION, LABEL),
    };
    let has = |name: &str| record.get(name).is_some_and(|value| !value.is_null());
    if !has(completion) && has(&fields.chosen) && has(&fields.rejected) {
        let mut samples = pair(record, fields, chat)?;
        let rejected = samples.pop().map(|sample| labelled(sample, false));
        return Ok(samples.into_iter().chain(rejected).collect());
    }
    // The last message of a conversation may be what is labelled.
    let is_last = fields.form == PairForm::Messages && !has(completion) && has(&fields.prompt);
    let (answer, label) =
        (field_of(record, if is_last { &fields.prompt } else { completion })?, field_of(record, label)?);
    let is_desirable = match label {
        Value::Bool(label) => *label,
        Value::Number(n) if n.as_f64() == Some(1.0) => true,
        Value::Number(n) if n.as_f64() == Some(0.0) => false,
        Value::Null => return Ok(vec![Sample::Empty]),
        other => return Err(wrong_type(LABEL, "true or false", other)),
    };
    if answer.is_null() {
        return Ok(vec![Sample::Empty]);
    }
    let sample = match fields.form {
        PairForm::Framed(frame, question) => framed(record, answer, frame, question)?,
        PairForm::Formats => formatted(record, answer, fields)?,
        PairForm::Messages if is_last => last_message(record, answer, fields, chat)?,
        PairForm::Columns | PairForm::Messages | PairForm::Conversations | PairForm::Asked | PairForm::Answers => {
            column(record, answer, fields, chat)?
        }
    };
    Ok(vec![labelled(sample, is_desirable)])
}

fn labelled(sample: Sample, is_desirable: bool) -> Sample {
    match sample {
        Sample::Answer { document, .. } => Sample::Answer { document, undesirable: !is_desirable },
        other => other,
    }
}

fn text<'a>(name: &str, value: &'a Value) -> Result<&'a str, RecordError> {
    value.as_str().ok_or_else(|| wrong_type(name, "text", value))
}

/// Texts between markers. In the form of conversations, the answer is the last of them.
fn framed(record: &Value, answer: &Value, frame: Frame, form: Question) -> Result<Sample, RecordError> {
    let mut turns = Vec::new();
    let answer = match form {
        Question::ArgillaChat => {
            let mut list = messages(COMPLETION, answer)?;
            let last = list.pop().ok_or_else(|| wrong_type(COMPLETION, "a list with a message", answer))?;
            turns = list;
            last
        }
        _ => answer.clone(),
    };
    let of_turn = |turn: &Value, key: &'static str| {
        let found = turn.get(key).and_then(Value::as_str).map(str::to_owned);
        found.ok_or_else(|| wrong_type(COMPLETION, "a list of messages with role and content", turn))
    };
    let (prompt, answer) = if form == Question::ArgillaChat {
        let turns = turns.iter().map(|turn| Ok((of_turn(turn, "role")?, of_turn(turn, "content")?)));
        let turns = turns.collect::<Result<Vec<(String, String)>, RecordError>>()?;
        (frame.turns(turns.iter().map(|(role, text)| (&role[..], &text[..]))), of_turn(&answer, "content")?)
    } else {
        let column = match form {
            Question::First => first_of(record, &["prompt", "input", "question", "instruction"]),
            Question::Column(name) => name,
            Question::Ultra | Question::ArgillaChat => "prompt",
        };
        let question = field_of(record, column)?;
        if question.is_null() {
            return Ok(Sample::Empty);
        }
        let system = record.get("system").and_then(Value::as_str).filter(|system| !system.is_empty());
        (frame.prompt(system, text(column, question)?), text(COMPLETION, &answer)?.to_owned())
    };
    Ok(text_of(&prompt, &(answer + frame.end())))
}

fn formatted(record: &Value, answer: &Value, fields: &PairFields) -> Result<Sample, RecordError> {
    let formats = &fields.formats;
    let prompt = field_of(record, &formats.field_prompt)?;
    if prompt.is_null() {
        return Ok(Sample::Empty);
    }
    let prompt = text(&formats.field_prompt, prompt)?;
    let answer = text(&formats.field_completion, answer)?;
    let system = record.get(&formats.field_system).and_then(Value::as_str).unwrap_or_default();
    let prompt = filled_by(&formats.prompt_format, &[("prompt", prompt), ("system", system)]);
    Ok(text_of(&prompt, &filled_by(&formats.completion_format, &[("completion", answer)])))
}

/// A conversation whose last message is the answer.
fn last_message(
    record: &Value,
    conversation: &Value,
    fields: &PairFields,
    chat: Option<&ConversationReader>,
) -> Result<Sample, RecordError> {
    let chat = chat.ok_or_else(|| RecordError::NoTemplate { field: fields.prompt.clone() })?;
    let mut prompt = messages(&fields.prompt, conversation)?;
    let answer = prompt.pop().ok_or_else(|| wrong_type(&fields.prompt, "a list with a message", conversation))?;
    document(record, &prompt, vec![answer], fields, chat)
}

/// A prompt and its answer, as texts or as messages.
fn column(
    record: &Value,
    answer: &Value,
    fields: &PairFields,
    chat: Option<&ConversationReader>,
) -> Result<Sample, RecordError> {
    let prompt = field_of(record, &fields.prompt)?;
    if prompt.is_null() {
        return Ok(Sample::Empty);
    }
    let is_text = |value: &Value| value.is_string() && !are_messages(value);
    if is_text(prompt) && is_text(answer) {
        return Ok(text_of(text(&fields.prompt, prompt)?, text(COMPLETION, answer)?));
    }
    let chat = chat.ok_or_else(|| RecordError::NoTemplate { field: COMPLETION.into() })?;
    let of = |name: &str, role: &str, value: &Value| match value {
        Value::String(text) if is_text(value) => Ok(vec![chat.message_of(role, text)]),
        other => messages(name, other),
    };
    let prompt = of(&fields.prompt, "user", prompt)?;
    document(record, &prompt, of(COMPLETION, "assistant", answer)?, fields, chat)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::datasets::DatasetType;
    use crate::data::chat_template::{CHATML, ChatTemplate};
    use crate::data::config::DatasetConfig;
    use crate::data::record::RecordReader;
    use serde_json::json;

    fn samples(form: &str, record: &Value) -> Result<Vec<Sample>, RecordError> {
        let form = PairForm::of(form).unwrap();
        let fields = PairFields { form, labelled: true, ..PairFields::default() };
        let dataset = DatasetConfig { pair: Some(fields), ..DatasetConfig::new("", DatasetType::Preference(form)) };
        RecordReader::new(&dataset, false, || Ok(Some((ChatTemplate::parse(CHATML, "", "")?, None))))
            .unwrap()
            .samples(record)
    }

    /// The texts with their answers in brackets, in braces if they are undesirable.
    fn marked(form: &str, record: &Value) -> Vec<String> {
        let text = |sample| {
            let ([open, close], document) = match sample {
                Sample::Answer { document, undesirable: false } => (['[', ']'], document),
                Sample::Answer { document, undesirable: true } => (['{', '}'], document),
                other => panic!("{other:?} is no text"),
            };
            let (mut text, [span]) = (document.text, &document.trained[..]) else { panic!("one answer") };
            text.insert(span.end, close);
            text.insert(span.start, open);
            text
        };
        samples(form, record).unwrap().into_iter().map(text).collect()
    }

    #[test]
    fn answers_are_desirable_or_not_by_their_label() {
        let of = |label: Value| json!({ "prompt": "Sky?", "completion": " Blue.", "label": label });

        for yes in [json!(true), json!(1), json!(1.0)] {
            assert_eq!(marked("preference", &of(yes)), ["Sky?[ Blue.]"]);
        }
        assert_eq!(marked("preference", &of(json!(false))), ["Sky?{ Blue.}"]);
        assert_eq!(samples("preference", &of(Value::Null)), Ok(vec![Sample::Empty]));
        assert!(samples("preference", &of(json!("yes"))).unwrap_err().to_string().contains("true or false"));
        let unlabelled = json!({ "prompt": "Sky?", "completion": " Blue." });
        assert!(samples("preference", &unlabelled).unwrap_err().to_string().contains("\"label\" is missing"));
    }

    #[test]
    fn pair_is_a_desirable_and_an_undesirable_answer() {
        let record = json!({ "prompt": "Sky?", "chosen": " Blue.", "rejected": " Green." });

        assert_eq!(marked("preference", &record), ["Sky?[ Blue.]", "Sky?{ Green.}"]);
    }

    #[test]
    fn messages_are_rendered() {
        let (hi, ho) = (json!({ "role": "user", "content": "Hi" }), json!({ "role": "assistant", "content": "Ho" }));
        let record = json!({ "prompt": [hi], "completion": [ho], "label": false });

        let found = marked("preference", &record)[0].replace("\n}", "}\n");

        assert_eq!(found, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{Ho<|im_end|>}\n");
    }

    #[test]
    fn last_message_of_a_conversation_may_be_what_is_labelled() {
        let turns = [("user", "Hi"), ("assistant", "Ho")].map(|(role, text)| json!({ "role": role, "content": text }));
        let record = json!({ "prompt": turns, "label": true });

        let expected = ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Ho<|im_end|>]"];
        assert_eq!(marked("chat_template.default", &record), expected);
        assert!(samples("chat_template.default", &json!({ "prompt": [], "label": true })).is_err());
    }

    #[test]
    fn formats_of_axolotl_frame_question_and_answer() {
        let expected = ["<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n{A<|im_end|>}"];
        for (form, question) in
            [("argilla", "instruction"), ("intel", "question"), ("prompt_pairs", "prompt"), ("ultra", "prompt")]
        {
            let record = json!({ question: "Q", "completion": "A", "label": false });
            assert_eq!(marked(&format!("chatml.{form}"), &record), expected, "{form}");
        }
        let turns = [("user", "Q"), ("assistant", "A")].map(|(role, text)| json!({ "role": role, "content": text }));
        let record = json!({ "completion": turns, "label": false });
        assert_eq!(marked("chatml.argilla_chat", &record), expected);
    }
}
