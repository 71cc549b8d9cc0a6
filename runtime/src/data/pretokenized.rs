//! Rows that are tokens already: `input_ids`, and perhaps `labels` and `attention_mask`, as `datasets` and Trainer have them.

use serde_json::Value;

use super::record::{RecordError, field_of, wrong_type};
use super::token_cache::TRAINED;

/// The label of a token that is not predicted, as in PyTorch's cross-entropy.
const IGNORED: i64 = -100;

/// The tokens of a row; those to predict carry [`TRAINED`]. Padding, which the attention mask excludes, is left out.
pub(super) fn tokens(record: &Value) -> Result<Vec<u32>, RecordError> {
    let ids = numbers(record, "input_ids")?.ok_or_else(|| missing(record))?;
    let labels = numbers(record, "labels")?.unwrap_or_else(|| ids.clone());
    let mask = numbers(record, "attention_mask")?.unwrap_or_else(|| vec![1; ids.len()]);
    for (name, list) in [("labels", &labels), ("attention_mask", &mask)] {
        if list.len() != ids.len() {
            return Err(RecordError::Lengths { name, found: list.len(), wanted: ids.len() });
        }
    }
    let is_seen = |position: &usize| mask[*position] != 0;
    let first = (0..ids.len()).find(is_seen).unwrap_or(ids.len());
    let end = (first..ids.len()).rev().find(is_seen).map_or(first, |last| last + 1);
    let token = |position: usize| {
        let (id, label) = (ids[position], labels[position]);
        if !is_seen(&position) {
            return Err(RecordError::Hole { position });
        }
        let valid = u32::try_from(id).ok().filter(|id| id & TRAINED == 0);
        let id = valid.ok_or(RecordError::TokenId { position, id })?;
        match label {
            IGNORED => Ok(id),
            label if label == i64::from(id) => Ok(id | TRAINED),
            label => Err(RecordError::OtherLabel { position, label, id }),
        }
    };
    (first..end).map(token).collect()
}

fn missing(record: &Value) -> RecordError {
    match field_of(record, "input_ids") {
        Ok(found) => wrong_type("input_ids", "a list of token ids", found),
        Err(error) => error,
    }
}

/// A field that is a list of whole numbers; `None` if it is absent or null.
fn numbers(record: &Value, name: &str) -> Result<Option<Vec<i64>>, RecordError> {
    let value = match record.get(name) {
        None | Some(Value::Null) => return Ok(None),
        Some(value) => value,
    };
    let wanted = || wrong_type(name, "a list of whole numbers", value);
    value
        .as_array()
        .ok_or_else(wanted)?
        .iter()
        .map(|number| number.as_i64().ok_or_else(wanted))
        .collect::<Result<_, _>>()
        .map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn labels_say_which_tokens_are_predicted() {
        let row = json!({ "input_ids": [271, 299, 99], "attention_mask": [1, 1, 1], "labels": [271, -100, 99] });

        assert_eq!(tokens(&row), Ok(vec![271 | TRAINED, 299, 99 | TRAINED]));
        assert_eq!(tokens(&json!({ "input_ids": [5, 6] })), Ok(vec![5 | TRAINED, 6 | TRAINED]));
    }

    #[test]
    fn padding_is_left_out() {
        let row = json!({ "input_ids": [0, 7, 8, 0, 0], "attention_mask": [0, 1, 1, 0, 0], "labels": [-100, -100, 8, -100, -100] });

        assert_eq!(tokens(&row), Ok(vec![7, 8 | TRAINED]));
    }

    #[test]
    fn row_that_contradicts_itself_is_refused_with_its_position() {
        let of = |row: Value| tokens(&row).unwrap_err().to_string();

        assert!(of(json!({ "text": "a" })).contains("\"input_ids\" is missing"));
        assert!(
            of(json!({ "input_ids": [1, 2], "labels": [1] })).contains("labels has 1 numbers, but input_ids has 2")
        );
        assert!(of(json!({ "input_ids": [1, 2], "labels": [1, 3] })).contains("label 3 at position 1"));
        assert!(of(json!({ "input_ids": [1, -4] })).contains("-4"));
        assert!(of(json!({ "input_ids": [1, 2, 3], "attention_mask": [1, 0, 1] })).contains("position 1"));
        assert!(of(json!({ "input_ids": [1, "a"] })).contains("list of whole numbers"));
    }
}
