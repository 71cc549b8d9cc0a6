//! Texts without a template: a list of segments, each trained on or not. Nothing is added between or around them.

use serde_json::Value;

use super::record_error::{RecordError, field_of, wrong_type};

/// A part of a document, which is tokenised by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) text: String,
    pub(crate) is_trained: bool,
}

const SEGMENTS: &str = "segments";

/// The segments of a record.
pub(super) fn segments(record: &Value, train_on_inputs: bool) -> Result<Vec<Segment>, RecordError> {
    let list = field_of(record, SEGMENTS)?;
    let wanted = || wrong_type(SEGMENTS, "a list of objects with text and label", list);
    let segment = |part: &Value| {
        let (text, label) = (part.get("text")?.as_str()?.to_owned(), part.get("label")?.as_bool()?);
        Some(Segment { text, is_trained: label || train_on_inputs })
    };
    list.as_array().ok_or_else(wanted)?.iter().map(|part| segment(part).ok_or_else(wanted)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn segments_are_trained_on_by_their_labels() {
        let record = json!({ "segments": [{ "label": true, "text": "<s>Hi " }, { "label": false, "text": "there" }] });
        let trained =
            |all| segments(&record, all).unwrap().iter().map(|segment| segment.is_trained).collect::<Vec<_>>();

        assert_eq!(trained(false), [true, false]);
        assert_eq!(trained(true), [true, true]);
    }

    #[test]
    fn segment_without_a_label_is_refused() {
        for bad in [json!({ "segments": [{ "text": "a" }] }), json!({ "segments": "a" }), json!({ "text": "a" })] {
            assert!(segments(&bad, false).unwrap_err().to_string().contains("segments"), "{bad}");
        }
    }
}
