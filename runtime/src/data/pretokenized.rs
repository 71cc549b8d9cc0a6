//! Rows that are tokens already: `input_ids` beside the columns that `datasets`, Trainer, TRL and Axolotl write for them.
//!
//! A row that was packed has several documents. Columns that tell where they begin divide it, so that no document sees another one.

use std::collections::BTreeSet;

use serde_json::Value;

use super::loss_weights::{self, Tokens};
use super::record_error::{RecordError, field_of, wrong_type};
use super::token_cache_format::{MARKS, TRAINED};

/// The label of a token that is not predicted, as in PyTorch's cross-entropy.
const IGNORED: i64 = -100;

/// Columns that are 0 where a token is not predicted.
const LOSS_MASKS: [&str; 3] = ["completion_mask", "assistant_masks", "loss_mask"];

/// Columns with a number for each token that say nothing of the loss.
const WITHOUT_EFFECT: [&str; 2] = ["token_type_ids", "special_tokens_mask"];

/// How much each token counts, as label.
const WEIGHTS: &str = "loss_weights";

/// The documents of a row; tokens to predict carry [`TRAINED`]. Padding, which the attention mask excludes, is left out. Weights of the loss are
/// read if it `weighs`.
pub(super) fn documents(record: &Value, weighs: bool) -> Result<Vec<Tokens>, RecordError> {
    let row = Row::of(record, weighs)?;
    let is_seen = |position: &usize| row.attention_mask[*position] != 0;
    let first = (0..row.ids.len()).find(is_seen).unwrap_or(row.ids.len());
    let end = (first..row.ids.len()).rev().find(is_seen).map_or(first, |last| last + 1);
    let starts = row.starts(first, end)?;
    let mut documents: Vec<(Vec<u32>, Vec<f32>)> = Vec::with_capacity(starts.len());
    for position in first..end {
        if starts.contains(&position) || documents.is_empty() {
            documents.push((Vec::new(), Vec::new()));
        }
        let (token, weight) = row.token(position)?;
        let (tokens, weights) = documents.last_mut().expect("one was begun");
        tokens.push(token);
        weights.push(weight);
    }
    Ok(documents.into_iter().map(|(tokens, weights)| Tokens::weighted(tokens, &weights)).collect())
}

/// The columns of a row, each with a number for each token.
struct Row {
    ids: Vec<i64>,
    labels: Vec<i64>,
    attention_mask: Vec<i64>,
    loss_masks: Vec<Vec<i64>>,
    loss_weights: Option<Vec<f32>>,
    position_ids: Option<Vec<i64>>,
    /// Lengths of the documents.
    lengths: Option<Vec<i64>>,
}

impl Row {
    fn of(record: &Value, weighs: bool) -> Result<Self, RecordError> {
        let ids = numbers(record, "input_ids")?.ok_or_else(|| missing(record))?;
        let column = |name: &'static str| match numbers(record, name)? {
            Some(list) if list.len() != ids.len() => {
                Err(RecordError::Lengths { name, found: list.len(), wanted: ids.len() })
            }
            list => Ok(list),
        };
        let loss_masks = LOSS_MASKS.into_iter().map(column).filter_map(Result::transpose).collect::<Result<_, _>>()?;
        let row = Self {
            labels: column("labels")?.unwrap_or_else(|| ids.clone()),
            attention_mask: column("attention_mask")?.unwrap_or_else(|| vec![1; ids.len()]),
            loss_masks,
            loss_weights: weights(record, ids.len(), weighs)?,
            position_ids: column("position_ids")?,
            lengths: numbers(record, "seq_lengths")?,
            ids,
        };
        refuse_unread(record, row.ids.len())?;
        Ok(row)
    }

    /// Where documents begin after the first one, between `first` and `end`.
    fn starts(&self, first: usize, end: usize) -> Result<BTreeSet<usize>, RecordError> {
        let mut starts = BTreeSet::new();
        // Axolotl numbers the documents of a packed row in its attention mask.
        starts.extend((first + 1..end).filter(|&at| self.attention_mask[at] != self.attention_mask[at - 1]));
        if let Some(positions) = &self.position_ids {
            for at in first..end {
                match positions[at] {
                    0 => drop(starts.insert(at)),
                    found if at > first && found == positions[at - 1] + 1 => {}
                    found => return Err(RecordError::PositionId { position: at, found }),
                }
            }
        }
        if let Some(lengths) = &self.lengths {
            let wanted = self.ids.len();
            let mut at = 0;
            for &length in lengths {
                starts.insert(at);
                at = usize::try_from(length).map_or(wanted + 1, |length| at.saturating_add(length).min(wanted + 1));
            }
            if at != wanted {
                return Err(RecordError::SumOfLengths {
                    found: lengths.iter().fold(0, |sum: i64, &n| sum.saturating_add(n)),
                    wanted,
                });
            }
        }
        Ok(starts)
    }

    /// A token, and how much it counts; one that is not predicted counts as any other.
    fn token(&self, position: usize) -> Result<(u32, f32), RecordError> {
        if self.attention_mask[position] == 0 {
            return Err(RecordError::Hole { position });
        }
        let (id, label) = (self.ids[position], self.labels[position]);
        let valid = u32::try_from(id).ok().filter(|id| id & MARKS == 0);
        let id = valid.ok_or(RecordError::TokenId { position, id })?;
        if label != IGNORED && label != i64::from(id) {
            return Err(RecordError::OtherLabel { position, label, id });
        }
        let weight = self.loss_weights.as_ref().map_or(1.0, |weights| weights[position]);
        let is_trained = label != IGNORED && weight > 0.0 && self.loss_masks.iter().all(|mask| mask[position] != 0);
        Ok(if is_trained { (id | TRAINED, weight) } else { (id, 1.0) })
    }
}

/// The weights of all tokens, if the record has some.
fn weights(record: &Value, n_tokens: usize, weighs: bool) -> Result<Option<Vec<f32>>, RecordError> {
    let value = match record.get(WEIGHTS) {
        None | Some(Value::Null) => return Ok(None),
        Some(_) if !weighs => return Err(RecordError::WeightsOff),
        Some(value) => value,
    };
    let items = value.as_array().ok_or_else(|| wrong_type(WEIGHTS, "a list of numbers", value))?;
    if items.len() != n_tokens {
        return Err(RecordError::Lengths { name: WEIGHTS, found: items.len(), wanted: n_tokens });
    }
    let weight = |(position, item)| loss_weights::weight(item, || format!("loss_weights at position {position}"));
    items.iter().enumerate().map(weight).collect::<Result<_, _>>().map(Some)
}

/// Refuses a column with a number for each token that nothing reads: it would change the loss.
fn refuse_unread(record: &Value, n_tokens: usize) -> Result<(), RecordError> {
    let read = ["input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", WEIGHTS];
    let is_known = |name: &str| [&read[..], &LOSS_MASKS, &WITHOUT_EFFECT].iter().any(|names| names.contains(&name));
    let is_per_token = |value: &Value| {
        value.as_array().is_some_and(|list| list.len() == n_tokens && n_tokens > 1 && list.iter().all(Value::is_number))
    };
    let unread = record.as_object().into_iter().flatten().find(|(name, value)| !is_known(name) && is_per_token(value));
    unread.map_or(Ok(()), |(name, _)| Err(RecordError::UnreadPerToken { name: name.clone() }))
}

fn missing(record: &Value) -> RecordError {
    match field_of(record, "input_ids") {
        Ok(found) => wrong_type("input_ids", "a list of token ids", found),
        Err(error) => error,
    }
}

/// Reads a list of whole numbers; truth values count as 1 and 0. `None` if the field is absent or null.
fn numbers(record: &Value, name: &str) -> Result<Option<Vec<i64>>, RecordError> {
    const WANTED: &str = "a list of whole numbers";
    let value = match record.get(name) {
        None | Some(Value::Null) => return Ok(None),
        Some(value) => value,
    };
    let number = |item: &Value| {
        let number = item.as_bool().map(i64::from).or_else(|| item.as_i64()).or_else(|| whole(item.as_f64()?));
        number.ok_or_else(|| RecordError::WrongItem { field: name.to_owned(), wanted: WANTED, found: item.to_string() })
    };
    let items = value.as_array().ok_or_else(|| wrong_type(name, WANTED, value))?;
    items.iter().map(number).collect::<Result<_, _>>().map(Some)
}

/// The whole number that a column of floats holds exactly.
fn whole(x: f64) -> Option<i64> {
    (x.fract() == 0.0 && x.abs() < (1u64 << 53) as f64).then_some(x as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The documents of a row without weights.
    fn documents(record: &Value) -> Result<Vec<Vec<u32>>, RecordError> {
        Ok(super::documents(record, false)?.into_iter().map(|tokens| tokens.ids).collect())
    }

    #[test]
    fn labels_say_which_tokens_are_predicted() {
        let row = json!({ "input_ids": [271, 299, 99], "attention_mask": [1, 1, 1], "labels": [271, -100, 99] });

        assert_eq!(documents(&row), Ok(vec![vec![271 | TRAINED, 299, 99 | TRAINED]]));
        assert_eq!(documents(&json!({ "input_ids": [5, 6] })), Ok(vec![vec![5 | TRAINED, 6 | TRAINED]]));
    }

    #[test]
    fn padding_is_left_out() {
        let row = json!({ "input_ids": [0, 7, 8, 0, 0], "attention_mask": [0, 1, 1, 0, 0], "labels": [-100, -100, 8, -100, -100] });

        assert_eq!(documents(&row), Ok(vec![vec![7, 8 | TRAINED]]));
    }

    #[test]
    fn masks_of_trl_say_which_tokens_are_predicted() {
        for name in LOSS_MASKS {
            let row = json!({ "input_ids": [5, 6, 7], name: [0, 1, 0] });

            assert_eq!(documents(&row), Ok(vec![vec![5, 6 | TRAINED, 7]]), "{name}");
        }
        let row =
            json!({ "input_ids": [5, 6], "labels": [-100, 6], "completion_mask": [1, 1], "assistant_masks": null });
        assert_eq!(documents(&row), Ok(vec![vec![5, 6 | TRAINED]]));
    }

    #[test]
    fn truth_values_and_whole_floats_are_numbers() {
        let row = json!({ "input_ids": [5.0, 6.0, 7.0], "attention_mask": [true, true, false] });

        assert_eq!(documents(&row), Ok(vec![vec![5 | TRAINED, 6 | TRAINED]]));
    }

    #[test]
    fn packed_row_is_divided_into_its_documents() {
        for (name, value) in [
            ("seq_lengths", json!([2, 3])),
            ("position_ids", json!([0, 1, 0, 1, 2])),
            ("attention_mask", json!([1, 1, 2, 2, 2])),
        ] {
            let row = json!({ "input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, -100, -100, -100], name: value });

            assert_eq!(documents(&row), Ok(vec![vec![5, 6], vec![7, 8, 9]]), "{name}");
        }
    }

    #[test]
    fn row_that_contradicts_itself_is_refused_with_its_position() {
        let of = |row: Value| documents(&row).unwrap_err().to_string();

        assert!(of(json!({ "text": "a" })).contains("\"input_ids\" is missing"));
        assert!(
            of(json!({ "input_ids": [1, 2], "labels": [1] })).contains("labels has 1 numbers, but input_ids has 2")
        );
        assert!(of(json!({ "input_ids": [1, 2], "labels": [1, 3] })).contains("label 3 at position 1"));
        assert!(of(json!({ "input_ids": [1, -4] })).contains("-4"));
        assert!(of(json!({ "input_ids": [1, 2, 3], "attention_mask": [1, 0, 1] })).contains("position 1"));
        assert!(of(json!({ "input_ids": [1, "a"] })).contains(r#"a list of whole numbers, found "a" in it"#));
        assert!(of(json!({ "input_ids": [1, 2.5] })).contains("found 2.5 in it"));
        assert!(of(json!({ "input_ids": [1, 2], "seq_lengths": [1, 2] })).contains("3 tokens"));
        assert!(of(json!({ "input_ids": [1, 2], "seq_lengths": [1, -1] })).contains("seq_lengths"));
        assert!(of(json!({ "input_ids": [1, 2], "position_ids": [0, 2] })).contains("position_ids is 2 at position 1"));
        assert!(of(json!({ "input_ids": [1, 2], "advantages": [0.5, 1.0] })).contains("advantages"));
    }

    #[test]
    fn weights_belong_to_tokens_as_labels_and_weight_zero_is_no_label() {
        let row = json!({ "input_ids": [0, 5, 6, 7, 8, 9], "attention_mask": [0, 1, 1, 1, 1, 1], "labels": [0, 5, 6, -100, 8, 9],
            "loss_weights": [7, 0.5, 0, 2, 1, 0.25], "seq_lengths": [4, 2] });
        let weights = |weights: &[f32]| weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();

        let found = super::documents(&row, true).unwrap();

        assert_eq!(found[0], Tokens { ids: vec![5 | TRAINED, 6, 7], weights: weights(&[0.5, 1.0, 1.0]) });
        assert_eq!(found[1], Tokens { ids: vec![8 | TRAINED, 9 | TRAINED], weights: weights(&[1.0, 0.25]) });
        let ones = json!({ "input_ids": [5, 6], "loss_weights": [1, 1.0] });
        assert_eq!(super::documents(&ones, true), Ok(vec![Tokens::from(vec![5 | TRAINED, 6 | TRAINED])]));
    }

    #[test]
    fn weights_that_do_not_fit_are_refused() {
        let of = |weights: Value, weighs| {
            super::documents(&json!({ "input_ids": [1, 2], "loss_weights": weights }), weighs).unwrap_err().to_string()
        };

        assert!(of(json!([0.5, 1.0]), false).contains("`loss_weights: true`"));
        assert!(of(json!([0.5]), true).contains("loss_weights has 1 numbers, but input_ids has 2"));
        assert!(of(json!([1, -1]), true).contains("loss_weights at position 1 is -1"));
        assert!(of(json!(0.5), true).contains("a list of numbers"));
    }
}
