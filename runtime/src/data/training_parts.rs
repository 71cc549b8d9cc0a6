//! Parts of a message that are trained on, by themselves: from offsets in a field of the message, or from flags of content parts.

use std::ops::Range;

use serde_json::Value;

use super::jinja::Origin;
use super::loss_weights;
use super::record_error::{RecordError, wrong_type};

/// A byte range that is trained on, and its weight if it has one of its own.
pub(super) type Span = (Range<usize>, Option<f32>);

/// Characters of a text, and whether they are trained on.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TrainingPart {
    chars: Range<usize>,
    is_trained: bool,
    /// How much they count; as the message if there is none.
    weight: Option<f32>,
}

impl TrainingPart {
    /// The parts in a field that lists them, from `begin_offset` to `end_offset` with both.
    pub(super) fn list(name: &str, value: &Value) -> Result<Vec<Self>, RecordError> {
        const WANTED: &str = "a list of objects with begin_offset, end_offset and train";
        let part = |part: &Value| {
            let begin = usize::try_from(part["begin_offset"].as_u64()?).ok()?;
            let last = usize::try_from(part["end_offset"].as_u64()?).ok()?;
            Some(Self { chars: begin..last.checked_add(1)?, is_trained: part["train"].as_bool()?, weight: None })
        };
        let parts = value.as_array().and_then(|parts| parts.iter().map(part).collect());
        parts.ok_or_else(|| wrong_type(name, WANTED, value))
    }

    /// The text of a list of content parts, if one of them has a flag `train` or `weight`, and the parts of it. A part without a
    /// flag is trained on if the message is.
    pub(super) fn of_content(parts: &[Value], message_is_trained: bool) -> Option<(String, Vec<Self>)> {
        let weight = |part: &Value| part["weight"].as_f64().map(|_| loss_weights::weight(&part["weight"], String::new));
        let weight = |part: &Value| weight(part).and_then(Result::ok);
        let flag = |part: &Value| part["train"].as_bool().or_else(|| Some(weight(part)? != 0.0));
        if !parts.iter().any(|part| flag(part).is_some()) {
            return None;
        }
        let (mut text, mut list, mut start) = (String::new(), Vec::new(), 0);
        for part in parts {
            let piece = ["text", "content", "value"].iter().find_map(|key| part[*key].as_str())?;
            let end = start + piece.chars().count();
            text += piece;
            let is_trained = flag(part).unwrap_or(message_is_trained) && weight(part) != Some(0.0);
            list.push(Self { chars: start..end, is_trained, weight: weight(part) });
            start = end;
        }
        Some((text, list))
    }

    /// All of a text.
    pub(super) fn whole(text: &str) -> Self {
        Self { chars: 0..text.chars().count(), is_trained: true, weight: None }
    }
}

/// The trained parts of a field of a message as byte ranges of the conversation, which has the pieces of it, and their weights.
pub(super) fn spans(of: &str, parts: &[TrainingPart], pieces: &[Origin]) -> Vec<Span> {
    let byte_of = |nth: usize| of.char_indices().nth(nth).map_or(of.len(), |(byte, _)| byte);
    let trained = parts.iter().filter(|part| part.is_trained);
    let trained: Vec<Span> =
        trained.map(|part| (byte_of(part.chars.start)..byte_of(part.chars.end), part.weight)).collect();
    let within = |piece: &Origin| {
        let of_part = |(part, weight): &Span| Some((piece.of_source(part)?, *weight));
        trained.iter().filter_map(of_part).collect::<Vec<_>>()
    };
    pieces.iter().flat_map(within).collect()
}
