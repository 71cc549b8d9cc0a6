//! What a data set is for, by the columns of its first record.

use serde_json::Value;

use super::config::DatasetConfig;
use super::data_file::DataFile;
use super::prompt_completion::are_messages;
use super::records::{Content, RecordFile};
use super::sources::{Purpose, files_of};
use crate::config::datasets::{DatasetType, FileFormat};
use crate::config::pair_form::PairForm;
use crate::config::preference::Rl;

/// A type that fits a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recognised {
    pub(crate) kind: DatasetType,
    /// What is trained on such answers.
    pub(crate) rl: Option<Rl>,
    /// Whether a chat template renders its records.
    pub(crate) has_messages: bool,
}

const PAIRS: DatasetType = DatasetType::Preference(PairForm::Columns);

/// Columns that a record has, with the type of such records. The first row that fits holds: pairs often have their conversation too.
const KNOWN: [(&[&str], DatasetType, Option<Rl>); 7] = [
    (&["chosen", "rejected"], PAIRS, Some(Rl::Dpo)),
    (&["completion", "label"], PAIRS, Some(Rl::Kto)),
    (&["messages"], DatasetType::ChatTemplate, None),
    (&["conversations"], DatasetType::Sharegpt, None),
    (&["prompt", "completion"], DatasetType::ChatTemplate, None),
    (&["instruction", "output"], DatasetType::Alpaca, None),
    (&["text"], DatasetType::Completion, None),
];

impl Recognised {
    /// The type of a data set whose files can be read, if it is one of those that are known by their columns.
    pub(crate) fn of(dataset: &DatasetConfig) -> Option<Self> {
        Self::of_record(&first_record(dataset)?)
    }

    fn of_record(record: &Value) -> Option<Self> {
        let fits = |columns: &[&str], kind: DatasetType| {
            let values: Option<Vec<&Value>> = columns.iter().map(|name| record.get(name)).collect();
            values.is_some_and(|values| !kind.is_conversation() || values.into_iter().all(are_messages))
        };
        let (columns, kind, rl) = KNOWN.iter().copied().find(|(columns, kind, _)| fits(columns, *kind))?;
        let has_messages = columns.iter().any(|name| are_messages(&record[name]));
        Some(Self { kind, rl, has_messages })
    }
}

/// Whether a chat template renders the records of a data set.
pub(crate) fn has_messages(dataset: &DatasetConfig) -> bool {
    match dataset.kind {
        DatasetType::Preference(PairForm::Columns) => first_record(dataset).is_some_and(|record| {
            let chosen = dataset.pair.as_ref().map_or("chosen", |pair| &pair.chosen);
            [chosen, "completion"].iter().any(|name| are_messages(&record[*name]))
        }),
        DatasetType::Preference(form) => form.is_conversation(),
        kind => kind.is_conversation(),
    }
}

/// The names of the columns of the first record of a data set, if it can be read and has columns.
pub(crate) fn columns(dataset: &DatasetConfig) -> Option<Vec<String>> {
    Some(first_record(dataset)?.as_object()?.keys().cloned().collect())
}

fn first_record(dataset: &DatasetConfig) -> Option<Value> {
    let source = files_of(dataset, Purpose::Training, 0).ok()?.into_iter().next()?;
    if source.format == FileFormat::Text {
        return None;
    }
    let file = DataFile::open(&source.path).ok()?;
    let batch = RecordFile::open(&file, source.format, &[]).ok()?.next_batch().ok()?;
    let read = |content| match content {
        Content::Json { bytes, .. } => serde_json::from_slice(&bytes).ok(),
        Content::Fields(record) => Some(record),
        Content::Refused(_) => None,
    };
    // Bad records before it may be left out.
    batch.into_iter().find_map(|numbered| read(numbered.content))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn columns_tell_the_type_and_pairs_go_before_their_conversation() {
        let turn = |role: &str| json!([{"role": role, "content": "a"}]);
        for (record, word, rl, has_messages) in [
            (json!({"prompt": "a", "chosen": "b", "rejected": "c"}), "preference", Some(Rl::Dpo), false),
            (
                json!({"chosen": turn("user"), "rejected": turn("user"), "messages": turn("user")}),
                "preference",
                Some(Rl::Dpo),
                true,
            ),
            (json!({"prompt": "a", "completion": "b", "label": true}), "preference", Some(Rl::Kto), false),
            (json!({"messages": turn("user")}), "chat_template", None, true),
            (json!({"conversations": [{"from": "human", "value": "a"}]}), "sharegpt", None, true),
            (json!({"prompt": turn("user"), "completion": turn("assistant")}), "chat_template", None, true),
            (json!({"instruction": "a", "input": "", "output": "b"}), "alpaca", None, false),
            (json!({"text": "a", "label": 1}), "completion", None, false),
        ] {
            let found = Recognised::of_record(&record).unwrap();

            assert_eq!((&found.kind.word()[..], found.rl, found.has_messages), (word, rl, has_messages), "{record}");
        }
        for other in
            [json!({"prompt": "a", "completion": "b"}), json!({"messages": "a"}), json!(["chosen", "rejected"])]
        {
            assert_eq!(Recognised::of_record(&other), None, "{other}");
        }
    }
}
