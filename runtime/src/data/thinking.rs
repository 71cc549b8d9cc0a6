//! Splits the thought of an answer from the rest of it, where the data has both in one text.

use serde_json::{Map, Value};

/// Tags around a thought.
const THOUGHTS: [(&str, &str); 3] =
    [("<think>", "</think>"), ("<reasoning>", "</reasoning>"), ("<|begin_of_thought|>", "<|end_of_thought|>")];
/// Tags around the answer that follows.
const SOLUTION: (&str, &str) = ("<|begin_of_solution|>", "<|end_of_solution|>");

/// Moves the thought at the beginning of the content to the field `key`; a message without one stays as it is.
pub(super) fn split(message: &mut Map<String, Value>, key: &str) {
    let Some(content) = message.get("content").and_then(Value::as_str) else { return };
    let Some((thought, rest)) = THOUGHTS.iter().find_map(|tags| between(content, *tags)) else { return };
    let answer = match between(rest, SOLUTION) {
        Some((solution, _)) => solution.trim(),
        None => rest.trim_start(),
    };
    let (thought, answer) = (thought.trim().to_owned(), answer.to_owned());
    message.insert(key.to_owned(), thought.into());
    message.insert("content".to_owned(), answer.into());
}

/// The text between a pair of tags, and the text after it.
fn between<'a>(text: &'a str, (open, close): (&str, &str)) -> Option<(&'a str, &'a str)> {
    text.split_once(open)?.1.split_once(close)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(content: &str) -> Value {
        let mut message = json!({ "role": "assistant", "content": content }).as_object().unwrap().clone();
        split(&mut message, "thought");
        Value::Object(message)
    }

    #[test]
    fn thought_is_split_from_the_answer() {
        let split = json!({ "role": "assistant", "content": "So.\n", "thought": "Hm" });

        assert_eq!(of("<think>\nHm\n</think>\n\nSo.\n"), split);
        assert_eq!(
            of("<|begin_of_thought|> Hm <|end_of_thought|> <|begin_of_solution|> So.<|end_of_solution|>")["content"],
            "So."
        );
    }

    #[test]
    fn answer_without_a_whole_thought_stays_as_it_is() {
        for content in ["So.", "<think>So."] {
            assert_eq!(of(content), json!({ "role": "assistant", "content": content }));
        }
    }
}
