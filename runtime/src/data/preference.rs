//! Pairs of answers to one prompt, of which the first is preferred: TRL's columns `prompt`, `chosen` and `rejected`.
//!
//! Columns are texts, or lists of messages that a chat template renders. Without a prompt, it is what both answers begin with, as in
//! TRL. A pair becomes two documents, the preferred one first; only answers are trained on.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::config::PairFields;
use super::conversation::ConversationReader;
use super::document::{Document, Sample};
use super::prompt_completion::{are_messages, parsed};
use super::record_error::{RecordError, field_of, wrong_type};
use crate::config::pair_form::{Frame, PairForm, PairSection, Question, filled};

/// Documents of a pair.
pub(crate) const DOCUMENTS: usize = 2;

/// The two documents of a record; both are empty if an answer is null.
///
/// `chat` reads lists of messages as a prompt and its completion.
///
/// # Errors
/// When a column is missing, or has another type than the others.
pub(super) fn pair(
    record: &Value,
    fields: &PairFields,
    chat: Option<&ConversationReader>,
) -> Result<Vec<Sample>, RecordError> {
    let empty = || vec![Sample::Empty, Sample::Empty];
    match fields.form {
        PairForm::Framed(frame, question) => return Ok(framed(record, frame, question)?.unwrap_or_else(empty)),
        PairForm::Formats => return Ok(formatted(record, &fields.formats)?.unwrap_or_else(empty)),
        PairForm::Columns | PairForm::Messages | PairForm::Conversations | PairForm::Asked | PairForm::Answers => {}
    }
    let names = [&fields.chosen, &fields.rejected];
    let answers = [field_of(record, &fields.chosen)?, field_of(record, &fields.rejected)?];
    let is_readable =
        |answer: &Value| answer.is_null() || answer.is_string() || answer.is_array() || answer.is_object();
    if let Some((name, answer)) = names.into_iter().zip(answers).find(|(_, answer)| !is_readable(answer)) {
        return Err(wrong_type(name, "text or a list of messages", answer));
    }
    if answers.iter().any(|answer| answer.is_null()) {
        return Ok(empty());
    }
    match fields.form {
        PairForm::Messages => {
            return of_last_messages(record, field_of(record, &fields.prompt)?, answers, fields, chat);
        }
        PairForm::Conversations | PairForm::Asked => return of_conversations(record, answers, fields, chat),
        PairForm::Answers => return of_question(record, answers, fields, chat),
        PairForm::Columns | PairForm::Framed(..) | PairForm::Formats => {}
    }
    let prompt = record.get(&fields.prompt).filter(|prompt| !prompt.is_null());
    match answers.map(|answer| answer.as_str().filter(|_| !are_messages(answer))) {
        [Some(chosen), Some(rejected)] => of_texts(prompt, [chosen, rejected], fields),
        [Some(_), None] => Err(wrong_type(&fields.rejected, "text, as the other answer is", answers[1])),
        [None, Some(_)] => Err(wrong_type(&fields.chosen, "text, as the other answer is", answers[0])),
        [None, None] => of_messages(record, prompt, answers, fields, chat),
    }
}

/// The first of these columns that has a value, or the first one.
pub(super) fn first_of(record: &Value, names: &[&'static str]) -> &'static str {
    let found = names.iter().copied().find(|name| record.get(name).is_some_and(|value| !value.is_null()));
    found.unwrap_or(names[0])
}

/// The same documents; prompts count as much as answers.
pub(super) fn whole(documents: Vec<Sample>) -> Vec<Sample> {
    let of_all = |document: Document| {
        let trained = std::iter::once(0..document.text.len()).collect();
        Document { trained, ..document }
    };
    let whole = |sample| match sample {
        Sample::Text(document) => Sample::Text(of_all(document)),
        Sample::Answer { document, undesirable } => Sample::Answer { document: of_all(document), undesirable },
        other => other,
    };
    documents.into_iter().map(whole).collect()
}

/// Texts between markers; `None` if one is null.
fn framed(record: &Value, frame: Frame, question_form: Question) -> Result<Option<Vec<Sample>>, RecordError> {
    // The text of a message of a list, by its place.
    let of_list = |name: &str, at: usize| -> Result<Value, RecordError> {
        let list = messages(name, field_of(record, name)?)?;
        let content = list.get(at).and_then(|message| message.get("content"));
        content.cloned().ok_or_else(|| wrong_type(name, "a list of a question and its answer", &Value::Array(list)))
    };
    let column = |name: &str| field_of(record, name).cloned();
    let texts = match question_form {
        Question::First => [
            column(first_of(record, &["prompt", "input", "question", "instruction"]))?,
            column(first_of(record, &["chosen", "chosen_response"]))?,
            column(first_of(record, &["rejected", "rejected_response"]))?,
        ],
        Question::Column(name) => [column(name)?, column("chosen")?, column("rejected")?],
        Question::Ultra => [column("prompt")?, of_list("chosen", 1)?, of_list("rejected", 1)?],
        Question::ArgillaChat => [of_list("chosen", 0)?, of_list("chosen", 1)?, of_list("rejected", 1)?],
    };
    let [question, chosen, rejected] = match texts {
        [Value::String(question), Value::String(chosen), Value::String(rejected)] => [question, chosen, rejected],
        texts if texts.iter().any(Value::is_null) => return Ok(None),
        texts => {
            let other = texts.iter().find(|text| !text.is_string()).unwrap_or(&Value::Null);
            return Err(wrong_type("prompt, chosen and rejected", "texts", other));
        }
    };
    let has_system = question_form != Question::ArgillaChat;
    let system = record.get("system").and_then(Value::as_str).filter(|system| has_system && !system.is_empty());
    let prompt = frame.prompt(system, &question);
    let answers = [chosen, rejected].map(|answer| answer + frame.end());
    Ok(Some(answers.map(|answer| text_of(&prompt, &answer)).into()))
}

/// Texts in formats of the data set; `None` if one is null.
fn formatted(record: &Value, formats: &PairSection) -> Result<Option<Vec<Sample>>, RecordError> {
    let names = [&formats.field_prompt, &formats.field_chosen, &formats.field_rejected];
    let mut texts = [""; 3];
    for (name, text) in names.into_iter().zip(&mut texts) {
        let value = field_of(record, name)?;
        if value.is_null() {
            return Ok(None);
        }
        *text = value.as_str().ok_or_else(|| wrong_type(name, "text", value))?;
    }
    let system = record.get(&formats.field_system).and_then(Value::as_str).unwrap_or_default();
    let [prompt, chosen, rejected] = texts;
    let prompt = filled_by(&formats.prompt_format, &[("prompt", prompt), ("system", system)]);
    let answers = [
        filled_by(&formats.chosen_format, &[("chosen", chosen)]),
        filled_by(&formats.rejected_format, &[("rejected", rejected)]),
    ];
    Ok(Some(answers.map(|answer| text_of(&prompt, &answer)).into()))
}

/// A format of a checked configuration, with values.
pub(super) fn filled_by(format: &str, values: &[(&str, &str)]) -> String {
    filled(format, values).expect("the configuration is checked")
}

/// A document whose answer is trained on.
pub(super) fn text_of(prompt: &str, answer: &str) -> Sample {
    let text = format!("{prompt}{answer}");
    let trained = std::iter::once(prompt.len()..text.len()).collect();
    Sample::Answer { document: Document { trained, weights: Vec::new(), text, bounded: true }, undesirable: false }
}

/// Messages, and for each answer its message: a text of the assistant, a message, or a list that ends with it.
fn of_last_messages(
    record: &Value,
    prompt: &Value,
    answers: [&Value; 2],
    fields: &PairFields,
    chat: Option<&ConversationReader>,
) -> Result<Vec<Sample>, RecordError> {
    let chat = chat.ok_or_else(|| RecordError::NoTemplate { field: fields.chosen.clone() })?;
    let prompt = match prompt {
        Value::String(text) if !are_messages(prompt) => vec![chat.message_of("user", text)],
        other => messages(&fields.prompt, other)?,
    };
    let names = [&fields.chosen, &fields.rejected];
    let last = |(name, answer): (&String, &Value)| match answer {
        Value::String(text) if !are_messages(answer) => Ok(chat.message_of("assistant", text)),
        other => messages(name, other)?.pop().ok_or_else(|| wrong_type(name, "a list with a message", other)),
    };
    let answers = names.into_iter().zip(answers).map(last).collect::<Result<Vec<Value>, RecordError>>()?;
    answers.into_iter().map(|answer| document(record, &prompt, vec![answer], fields, chat)).collect()
}

/// A question as text, and a system text if there is one.
fn of_question(
    record: &Value,
    answers: [&Value; 2],
    fields: &PairFields,
    chat: Option<&ConversationReader>,
) -> Result<Vec<Sample>, RecordError> {
    let turn = |role: &str, name: &str, value: &Value| {
        let text = value.as_str().ok_or_else(|| wrong_type(name, "text", value))?;
        Ok::<_, RecordError>(chat.map(|chat| chat.message_of(role, text)))
    };
    // An empty system text is a system message, as in Axolotl.
    let system = record.get(SYSTEM).filter(|system| !system.is_null());
    let system = system.map(|system| turn("system", SYSTEM, system)).transpose()?.flatten();
    let question = turn("user", &fields.prompt, field_of(record, &fields.prompt)?)?;
    let prompt = Value::Array(system.into_iter().chain(question).collect());
    of_last_messages(record, &prompt, answers, fields, chat)
}

/// The column of a system text.
const SYSTEM: &str = "system";

/// Whole conversations: the prompt is the preferred one without its last message.
fn of_conversations(
    record: &Value,
    answers: [&Value; 2],
    fields: &PairFields,
    chat: Option<&ConversationReader>,
) -> Result<Vec<Sample>, RecordError> {
    let mut chosen = messages(&fields.chosen, answers[0])?;
    chosen.pop();
    let asked = record.get(&fields.prompt).and_then(Value::as_str).filter(|_| fields.form == PairForm::Asked);
    if let (Some(asked), Some(chat)) = (asked, chat) {
        let question = chat.message_of("user", asked);
        let has_its_role = |turn: &&mut Value| {
            let object = question.as_object().expect("a message is an object");
            object.iter().any(|(field, role)| role == "user" && turn.get(field) == Some(role))
        };
        chosen.iter_mut().filter(has_its_role).for_each(|turn| *turn = question.clone());
    }
    let prompt = Value::Array(chosen);
    of_last_messages(record, &prompt, answers, fields, chat)
}

fn of_texts(prompt: Option<&Value>, answers: [&str; 2], fields: &PairFields) -> Result<Vec<Sample>, RecordError> {
    let (prompt, answers) = match prompt {
        Some(prompt) => {
            (prompt.as_str().ok_or_else(|| wrong_type(&fields.prompt, "text, as the answers are", prompt))?, answers)
        }
        None => {
            let begin = common_text(answers);
            (&answers[0][..begin], answers.map(|answer| &answer[begin..]))
        }
    };
    Ok(answers.map(|answer| text_of(prompt, answer)).into())
}

/// Bytes of what two texts begin with. A blank in front of the first difference belongs to the answers, as tokens do.
fn common_text([a, b]: [&str; 2]) -> usize {
    let equal = a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b).map(|((at, _), _)| at);
    let begin = equal.unwrap_or(a.len().min(b.len()));
    if a[..begin].ends_with(' ') { begin - 1 } else { begin }
}

fn of_messages(
    record: &Value,
    prompt: Option<&Value>,
    answers: [&Value; 2],
    fields: &PairFields,
    chat: Option<&ConversationReader>,
) -> Result<Vec<Sample>, RecordError> {
    let chat = chat.ok_or_else(|| RecordError::NoTemplate { field: fields.chosen.clone() })?;
    let names = [&fields.chosen, &fields.rejected];
    let mut lists = Vec::with_capacity(DOCUMENTS);
    for (name, answer) in names.into_iter().zip(answers) {
        lists.push(messages(name, answer)?);
    }
    let n_shared = lists[0].iter().zip(&lists[1]).take_while(|(a, b)| a == b).count();
    // The last message of both is an answer, even if it is the same.
    let n_shared = n_shared.min(lists.iter().map(Vec::len).min().unwrap_or(0).saturating_sub(1));
    let prompt = match prompt {
        Some(prompt) if prompt.is_array() || are_messages(prompt) => messages(&fields.prompt, prompt)?,
        Some(Value::String(text)) if n_shared == 0 => vec![chat.message_of("user", text)],
        Some(other) if !other.is_string() => messages(&fields.prompt, other)?,
        // Conversations that begin alike have their question, even if there is a column with its text.
        _ => {
            lists[1].drain(..n_shared);
            lists[0].drain(..n_shared).collect()
        }
    };
    lists.into_iter().map(|answer| document(record, &prompt, answer, fields, chat)).collect()
}

/// A record in which a prompt has one of the answers.
pub(super) fn document(
    record: &Value,
    prompt: &[Value],
    answer: Vec<Value>,
    fields: &PairFields,
    chat: &ConversationReader,
) -> Result<Sample, RecordError> {
    // Of conversations in two columns, a column with the question is left out as well.
    let conversations = chat.fields_of_messages();
    let others = [&fields.prompt[..], &fields.chosen[..], &fields.rejected[..], "label"];
    let others: Vec<&str> = others.into_iter().chain(conversations.iter().map(String::as_str)).collect();
    // TRL reads no column of system messages, Axolotl's type does.
    let others: Vec<&str> = others.into_iter().chain((fields.form != PairForm::Asked).then_some("system")).collect();
    let rest = record.as_object().into_iter().flatten().filter(|(name, _)| !others.contains(&name.as_str()));
    let mut record: Map<String, Value> = rest.map(|(name, value)| (name.clone(), value.clone())).collect();
    record.insert("prompt".into(), Value::Array(prompt.to_vec()));
    record.insert("completion".into(), Value::Array(answer));
    let Some(mut document) = chat.document(&Value::Object(record))? else { return Ok(Sample::Empty) };
    document.bounded = fields.bounds_conversations;
    // As in Axolotl, nothing that a template prints behind the end of an answer is part of it.
    if matches!(fields.form, PairForm::Messages | PairForm::Conversations) {
        let end = document.text.trim_end().len();
        document.text.truncate(end);
        document.trained.iter_mut().for_each(|span| *span = span.start.min(end)..span.end.min(end));
    }
    Ok(Sample::Answer { document, undesirable: false })
}

/// The messages of a column: a list, a list as JSON in a text, or one message.
pub(super) fn messages(name: &str, value: &Value) -> Result<Vec<Value>, RecordError> {
    match parsed(value) {
        Cow::Owned(Value::Array(list)) => Ok(list),
        Cow::Borrowed(Value::Array(list)) => Ok(list.clone()),
        other if other.is_object() => Ok(vec![other.into_owned()]),
        other => Err(wrong_type(name, "a list of messages", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::datasets::DatasetType;
    use crate::data::chat_template::{CHATML, ChatTemplate};
    use crate::data::config::DatasetConfig;
    use crate::data::record::RecordReader;
    use serde_json::json;
    use std::ops::Range;

    fn samples(record: &Value, has_template: bool) -> Result<Vec<Sample>, RecordError> {
        let dataset = DatasetConfig {
            pair: Some(PairFields::default()),
            ..DatasetConfig::new("", DatasetType::Preference(PairForm::Columns))
        };
        let template = || has_template.then(|| Ok((ChatTemplate::parse(CHATML, "", "")?, None))).transpose();
        RecordReader::new(&dataset, false, template).unwrap().samples(record)
    }

    /// The text of each document, with what is trained on in brackets.
    fn marked(record: &Value) -> Vec<String> {
        let text = |sample| match sample {
            Sample::Answer { document: Document { mut text, trained, .. }, .. } => {
                for span in trained.iter().rev() {
                    text.insert(span.end, ']');
                    text.insert(span.start, '[');
                }
                text
            }
            other => panic!("{other:?} is no text"),
        };
        samples(record, true).unwrap().into_iter().map(text).collect()
    }

    #[test]
    fn answers_follow_their_prompt_and_are_all_that_is_trained_on() {
        let record = json!({ "prompt": "Sky?", "chosen": " Blue.", "rejected": " Green." });

        assert_eq!(marked(&record), ["Sky?[ Blue.]", "Sky?[ Green.]"]);
    }

    #[test]
    fn whole_texts_of_a_reward_model_count_and_its_pairs_have_no_margin() {
        let of = |record: &Value| {
            let pair = Some(PairFields { whole: true, ..PairFields::default() });
            let dataset = DatasetConfig { pair, ..DatasetConfig::new("", DatasetType::Preference(PairForm::Columns)) };
            RecordReader::new(&dataset, false, || Ok(None)).unwrap().samples(record)
        };
        let mut record = json!({ "prompt": "Sky?", "chosen": " Blue.", "rejected": " Green.", "margin": null });

        let samples = of(&record).unwrap();
        record["margin"] = json!(0.5);

        let Sample::Answer { document, .. } = &samples[0] else { panic!("{samples:?}") };
        assert_eq!(document.trained.iter().map(Range::len).collect::<Vec<_>>(), [document.text.len()]);
        assert_eq!(of(&record), Err(RecordError::Margin));
    }

    #[test]
    fn prompt_that_is_not_given_is_what_both_answers_begin_with() {
        let blank = json!({ "chosen": "The sky is blue", "rejected": "The sky is green" });
        let inside = json!({ "chosen": "It is été", "rejected": "It is étang" });
        let beginning = json!({ "chosen": "Yes", "rejected": "Yes, no", "prompt": null });

        assert_eq!(marked(&blank), ["The sky is[ blue]", "The sky is[ green]"]);
        assert_eq!(marked(&inside), ["It is ét[é]", "It is ét[ang]"]);
        assert_eq!(marked(&beginning), ["Yes[]", "Yes[, no]"]);
    }

    #[test]
    fn messages_are_rendered_and_shared_ones_are_the_prompt() {
        let (hi, ho, no) = (
            json!({ "role": "user", "content": "Hi" }),
            json!({ "role": "assistant", "content": "Ho" }),
            json!({ "role": "assistant", "content": "No" }),
        );
        let whole = json!({ "chosen": [hi, ho], "rejected": [hi, no] });
        let apart = json!({ "prompt": [hi], "chosen": [ho], "rejected": [no] });
        let one = json!({ "prompt": "Hi", "chosen": ho, "rejected": no });
        let expected = ["Ho", "No"]
            .map(|answer| format!("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[{answer}<|im_end|>]\n"));

        for record in [whole, apart, one] {
            let found: Vec<String> = marked(&record).iter().map(|text| text.replace("\n]", "]\n")).collect();
            assert_eq!(found, expected, "{record}");
        }
    }

    #[test]
    fn pair_with_an_empty_answer_or_without_a_column_is_left_out_or_refused() {
        let empty = json!({ "prompt": "a", "chosen": "b", "rejected": null });
        let missing = json!({ "prompt": "a", "chosen": "b" });
        let mixed = json!({ "prompt": "a", "chosen": "b", "rejected": 3 });

        assert_eq!(samples(&empty, true), Ok(vec![Sample::Empty, Sample::Empty]));
        assert!(samples(&missing, true).unwrap_err().to_string().contains("\"rejected\" is missing"));
        assert!(samples(&mixed, true).unwrap_err().to_string().contains("list of messages"));
    }

    #[test]
    fn columns_that_a_reader_of_conversations_knows_do_not_replace_answers() {
        let turns =
            |answer: &str| json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": answer }]);
        let plain = json!({ "chosen": turns("Ho"), "rejected": turns("No") });
        let mut beside = plain.clone();
        beside["messages"] = turns("Ho");
        beside["system"] = "You are a clock.".into();
        beside["completion"] = turns("Ho");

        assert_eq!(marked(&beside), marked(&plain));
    }

    #[test]
    fn question_of_conversations_is_their_prompt_even_beside_its_text() {
        let turns =
            |answer: &str| json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": answer }]);
        let plain = json!({ "chosen": turns("Ho"), "rejected": turns("No") });
        let mut beside = plain.clone();
        beside["prompt"] = "Hi".into();

        assert_eq!(marked(&beside), marked(&plain));
    }

    #[test]
    fn answers_of_other_types_and_pictures_are_refused_by_what_they_are() {
        let refused = |record: Value| samples(&record, false).unwrap_err().to_string();

        let number = refused(json!({ "prompt": "a", "chosen": 3, "rejected": 4 }));
        assert!(number.contains("text or a list of messages") && number.contains("\"chosen\""), "{number}");
        let mixed = refused(json!({ "prompt": "a", "chosen": "b", "rejected": ["c"] }));
        assert!(mixed.contains("\"rejected\"") && mixed.contains("as the other answer is"), "{mixed}");
        let picture = refused(json!({ "prompt": "a", "chosen": "b", "rejected": "c", "images": ["x.png"] }));
        assert!(picture.contains("\"images\""), "{picture}");
    }

    #[test]
    fn messages_without_a_template_say_what_is_missing() {
        let record = json!({ "chosen": [{ "role": "user", "content": "a" }], "rejected": [] });

        assert!(samples(&record, false).unwrap_err().to_string().contains("set `chat_template`"));
        assert!(samples(&json!({ "prompt": "a", "chosen": "b", "rejected": "c" }), false).is_ok());
    }
}
