//! Converts a record of a data file to the documents to train on.
#![allow(clippy::single_range_in_vec_init)] // A list of trained spans often has one element.

use serde_json::Value;

use super::chat_template::{ChatTemplate, ChatTemplateError};
use super::config::{DatasetConfig, PairFields};
use super::conversation::{ConversationReader, MEDIA, refuse_media};
use super::document::{Document, Sample};
use super::labelled;
use super::preference;
use super::pretokenized;
use super::record_error::{RecordError, field_of, not_text, wrong_type};
use super::records::LeftOut;
use super::segments::segments;
use crate::config::datasets::DatasetType;
#[cfg(feature = "fuzzing")]
use crate::config::pair_form::PairForm;
use crate::config::prompts::{NamedPrompt, Prompt};

/// How the records of one data set are read.
#[derive(Debug)]
pub(crate) enum RecordReader {
    Completion { field: String },
    Instruction { prompt: Prompt, train_on_inputs: bool },
    Chat(Box<ChatReaders>),
    Segments { train_on_inputs: bool },
    Tokens { weighs: bool },
    Pairs { fields: PairFields, chat: Option<Box<ChatReaders>> },
}

/// How conversations are read: those with tools may have a template of their own.
#[derive(Debug)]
pub(crate) struct ChatReaders {
    plain: ConversationReader,
    with_tools: Option<ConversationReader>,
}

impl ChatReaders {
    fn new(dataset: &DatasetConfig, train_on_inputs: bool, (plain, with_tools): ChatTemplates) -> Self {
        let reader = |template| {
            ConversationReader::new(&dataset.conversation, template, train_on_inputs).weighing(dataset.loss_weights)
        };
        Self { plain: reader(plain), with_tools: with_tools.map(reader) }
    }

    fn of(&self, record: &Value) -> &ConversationReader {
        self.with_tools.as_ref().filter(|reader| reader.has_tools(record)).unwrap_or(&self.plain)
    }
}

/// The template of conversations, and that of conversations with tools if it is another one.
pub(crate) type ChatTemplates = (ChatTemplate, Option<ChatTemplate>);

impl RecordReader {
    /// The reader for `dataset`; `templates` is called only for records that may be conversations, and has none only where they need not be.
    pub(crate) fn new(
        dataset: &DatasetConfig,
        train_on_inputs: bool,
        templates: impl FnOnce() -> Result<Option<ChatTemplates>, ChatTemplateError>,
    ) -> Result<Self, ChatTemplateError> {
        Ok(match dataset.kind {
            DatasetType::Completion => {
                Self::Completion { field: dataset.field.clone().unwrap_or_else(|| "text".to_owned()) }
            }
            DatasetType::Alpaca => Self::Instruction { prompt: NamedPrompt::ALPACA.prompt(), train_on_inputs },
            DatasetType::Prompt(named) => Self::Instruction { prompt: named.prompt(), train_on_inputs },
            DatasetType::Custom => {
                let custom = dataset.prompt.as_ref().expect("a data set of this type has a prompt");
                Self::Instruction { prompt: custom.prompt(), train_on_inputs }
            }
            DatasetType::InputOutput => Self::Segments { train_on_inputs },
            DatasetType::Tokenized => Self::Tokens { weighs: dataset.loss_weights },
            DatasetType::ChatTemplate | DatasetType::Sharegpt => {
                let templates = templates()?.expect("conversations have a template");
                Self::Chat(Box::new(ChatReaders::new(dataset, train_on_inputs, templates)))
            }
            DatasetType::Preference(_) => Self::Pairs {
                fields: dataset.pair.clone().unwrap_or_default(),
                chat: templates()?.map(|templates| Box::new(ChatReaders::new(dataset, false, templates))),
            },
        })
    }

    /// The fields with the messages of conversations; none for other records.
    pub(super) fn fields_of_messages(&self) -> Vec<String> {
        match self {
            Self::Chat(readers) => readers.plain.fields_of_messages(),
            Self::Pairs { fields, .. } => {
                let columns = [&fields.prompt[..], &fields.chosen[..], &fields.rejected[..], "completion"];
                columns.map(str::to_owned).into()
            }
            _ => Vec::new(),
        }
    }

    /// Whether the answers of a pair begin at the same token.
    pub(super) fn aligns_answers(&self) -> bool {
        matches!(self, Self::Pairs { fields, .. } if fields.aligned && !fields.labelled)
    }

    /// Refuses columns of media beside conversations, which records lack because no value of theirs has such a type.
    pub(super) fn check_columns(&self, left_out: &[LeftOut]) -> Result<(), RecordError> {
        let is_media = |column: &&LeftOut| MEDIA.contains(&column.name.as_str());
        match left_out.iter().find(is_media).filter(|_| matches!(self, Self::Chat(_) | Self::Pairs { .. })) {
            Some(column) => Err(RecordError::Media { field: column.name.clone() }),
            None => Ok(()),
        }
    }

    /// A reader for each type of data set. For fuzz targets.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn of_all_types() -> [Self; 6] {
        [
            DatasetType::Completion,
            DatasetType::Alpaca,
            DatasetType::ChatTemplate,
            DatasetType::InputOutput,
            DatasetType::Tokenized,
            DatasetType::Preference(PairForm::Columns),
        ]
        .map(|kind| {
            let templates = || Ok(Some((ChatTemplate::parse(super::chat_template::CHATML, "", "")?, None)));
            Self::new(&DatasetConfig::new("", kind), false, templates).expect("our own template is valid")
        })
    }

    /// The samples of one record: one, or one per instance of an instruction, or two of a pair.
    pub(crate) fn samples(&self, record: &Value) -> Result<Vec<Sample>, RecordError> {
        Ok(vec![match self {
            Self::Instruction { prompt, train_on_inputs } => return instructions(prompt, record, *train_on_inputs),
            Self::Completion { field } => match field_of(record, field)? {
                Value::Null => Sample::Empty,
                _ => {
                    let text = text_of(record, field)?.to_owned();
                    Sample::Text(Document { trained: vec![0..text.len()], weights: Vec::new(), text, bounded: true })
                }
            },
            Self::Chat(readers) => match readers.of(record).document(record)? {
                Some(document) => Sample::Text(document),
                None => Sample::Empty,
            },
            Self::Pairs { fields, chat } => {
                refuse_media(record)?;
                let chat = chat.as_deref().map(|readers| readers.of(record));
                if fields.labelled {
                    return labelled::answers(record, fields, chat);
                }
                if fields.whole && record.get("margin").is_some_and(|margin| !margin.is_null()) {
                    return Err(RecordError::Margin);
                }
                let pair = preference::pair(record, fields, chat)?;
                return Ok(if fields.whole { preference::whole(pair) } else { pair });
            }
            Self::Segments { train_on_inputs } => Sample::Segments(segments(record, *train_on_inputs)?),
            Self::Tokens { weighs } => {
                return Ok(pretokenized::documents(record, *weighs)?.into_iter().map(Sample::Tokens).collect());
            }
        }])
    }
}

/// The documents of an instruction, which may have several instances.
fn instructions(prompt: &Prompt, record: &Value, train_on_inputs: bool) -> Result<Vec<Sample>, RecordError> {
    let instances = match record.get("instances") {
        Some(Value::Array(instances)) => instances.as_slice(),
        Some(Value::Null) | None => std::slice::from_ref(record),
        Some(other) => return Err(wrong_type("instances", "a list of inputs and outputs", other)),
    };
    let sample = |instance: &Value| {
        let Some((mut text, answer)) = prompt.texts(record, instance)? else { return Ok(Sample::Empty) };
        let trained_from = if train_on_inputs { 0 } else { text.len() };
        text += &answer;
        Ok(Sample::Text(Document { trained: vec![trained_from..text.len()], weights: Vec::new(), text, bounded: true }))
    };
    instances.iter().map(sample).collect()
}

fn text_of<'a>(record: &'a Value, name: &str) -> Result<&'a str, RecordError> {
    let value = field_of(record, name)?;
    value.as_str().ok_or_else(|| not_text(name, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::chat_template::CHATML;
    use crate::data::config::ConversationConfig;
    use serde_json::json;

    fn reader(dataset: DatasetConfig) -> RecordReader {
        RecordReader::new(&dataset, false, || Ok(Some((ChatTemplate::parse(CHATML, "", "")?, None)))).unwrap()
    }

    fn documents(reader: &RecordReader, record: &Value) -> Result<Vec<Document>, RecordError> {
        let text = |sample| match sample {
            Sample::Text(document) => document,
            other => panic!("{other:?} is no text"),
        };
        Ok(reader.samples(record)?.into_iter().map(text).collect())
    }

    fn trained(documents: &[Document]) -> Vec<String> {
        documents.iter().map(|d| d.trained.iter().map(|range| &d.text[range.clone()]).collect()).collect()
    }

    #[test]
    fn completion_trains_on_all_of_the_named_field() {
        let dataset = DatasetConfig { field: Some("story".into()), ..DatasetConfig::new("", DatasetType::Completion) };

        let documents = documents(&reader(dataset), &json!({ "id": 1, "story": "Once." })).unwrap();

        assert_eq!(trained(&documents), ["Once."]);
        assert!(documents[0].bounded);
    }

    #[test]
    fn error_for_a_missing_field_lists_the_fields_of_the_record() {
        let reader = reader(DatasetConfig::new("", DatasetType::Completion));
        let error = documents(&reader, &json!({ "story": "Once.", "id": 1 })).unwrap_err();

        assert_eq!(error.to_string(), "field \"text\" is missing; the record has story, id");
    }

    #[test]
    fn alpaca_trains_on_the_output_only() {
        let record = json!({ "instruction": "Add.", "input": "1 2", "output": "3" });

        let documents = documents(&reader(DatasetConfig::new("", DatasetType::Alpaca)), &record).unwrap();

        assert_eq!(trained(&documents), ["3"]);
        assert!(documents[0].text.contains("### Input:\n1 2\n\n### Response:\n3"), "{}", documents[0].text);
    }

    #[test]
    fn alpaca_trains_on_everything_with_train_on_inputs() {
        let dataset = DatasetConfig::new("", DatasetType::Alpaca);
        let reader =
            RecordReader::new(&dataset, true, || Ok(Some((ChatTemplate::parse(CHATML, "", "")?, None)))).unwrap();

        let documents = documents(&reader, &json!({ "instruction": "Sing.", "output": "La." })).unwrap();

        assert_eq!(trained(&documents), [documents[0].text.clone()]);
        assert!(!documents[0].text.contains("### Input"));
    }

    #[test]
    fn each_alpaca_instance_is_a_document() {
        let record = json!({ "instruction": "Double.", "instances": [
            { "input": "2", "output": "4" }, { "input": "", "output": "nothing" }] });

        let documents = documents(&reader(DatasetConfig::new("", DatasetType::Alpaca)), &record).unwrap();

        assert_eq!(trained(&documents), ["4", "nothing"]);
    }

    #[test]
    fn conversation_with_other_field_names_trains_on_the_assistant() {
        let dataset = DatasetConfig {
            conversation: ConversationConfig::sharegpt(),
            ..DatasetConfig::new("", DatasetType::Sharegpt)
        };
        let record = json!({ "conversations": [{ "from": "human", "value": "Hi" }, { "from": "gpt", "value": "Ho" }] });

        let documents = documents(&reader(dataset), &record).unwrap();

        assert_eq!(trained(&documents), ["Ho<|im_end|>"]);
        assert!(!documents[0].bounded);
    }

    #[test]
    fn field_of_another_type_is_refused_by_name() {
        let error =
            documents(&reader(DatasetConfig::new("", DatasetType::Completion)), &json!({ "text": 3 })).unwrap_err();

        assert_eq!(error.to_string(), "field \"text\" must be text, found a number");
    }

    #[test]
    fn record_without_an_answer_or_text_is_left_out() {
        let empty =
            |kind, record: Value| reader(DatasetConfig::new("", kind)).samples(&record).unwrap() == [Sample::Empty];

        assert!(empty(DatasetType::Alpaca, json!({ "instruction": "Add.", "output": null })));
        assert!(empty(DatasetType::Completion, json!({ "text": null })));
        assert!(empty(DatasetType::ChatTemplate, json!({ "messages": null })));
    }

    #[test]
    fn record_that_is_a_list_is_refused() {
        let error = documents(&reader(DatasetConfig::new("", DatasetType::Completion)), &json!(["a"])).unwrap_err();

        assert_eq!(error, RecordError::NotAnObject { found: "a list" });
    }
}
