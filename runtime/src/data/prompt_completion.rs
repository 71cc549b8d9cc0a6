//! Conversations in two lists of messages, as TRL stores them: what the model is asked, and what it is to answer.
//!
//! As in TRL, all of the completion is trained on, with the headers of its later turns; `roles_to_train` limits that to turns of
//! these roles.

use std::borrow::Cow;

use serde_json::Value;

use super::exact_json;

/// The fields with the two lists.
pub(super) const FIELDS: [&str; 2] = ["prompt", "completion"];

/// The two lists, if the record has a conversation in them.
pub(super) fn of(record: &Value) -> Option<[&Value; 2]> {
    let [prompt, completion] = FIELDS.map(|field| record.get(field));
    let both = [prompt?, completion?];
    both.into_iter().any(are_messages).then_some(both)
}

/// Whether a value is a list of messages.
pub(super) fn are_messages(value: &Value) -> bool {
    let list = parsed(value);
    let first = list.as_array().and_then(|messages| messages.first());
    first.is_some_and(|message| ["role", "from"].iter().any(|name| parsed_object(message).get(name).is_some()))
}

/// A list that the data keeps as JSON in a text, because columns of tables cannot hold objects of different shapes.
pub(super) fn parsed(value: &Value) -> Cow<'_, Value> {
    match value.as_str().and_then(exact_json::list) {
        Some(list) => Cow::Owned(Value::Array(list)),
        None => Cow::Borrowed(value),
    }
}

/// An item of such a list, which may be kept as a text as well.
pub(super) fn parsed_object(value: &Value) -> Cow<'_, Value> {
    match value.as_str().and_then(exact_json::object) {
        Some(object) => Cow::Owned(Value::Object(object)),
        None => Cow::Borrowed(value),
    }
}
