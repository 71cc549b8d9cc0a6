//! Turns of LLaMA-Factory in which the model calls functions, and how it describes them.
//!
//! Such a turn is an answer whose text is the calls as JSON, perhaps behind a thought in tags. Chat templates know calls as a field of
//! an assistant's message, and functions in a frame that names their type.

use serde_json::{Map, Value, json};

use super::exact_json;
use super::record_error::RecordError;
use super::thinking;

/// The role of these turns.
pub(super) const ROLE: &str = "function_call";

/// Makes an assistant's message of such a turn.
pub(super) fn into_answer(message: &mut Map<String, Value>, thinking_key: &str) -> Result<(), RecordError> {
    thinking::split(message, thinking_key);
    let content = message.get("content").unwrap_or(&Value::Null);
    let value = match content.as_str() {
        Some(text) => exact_json::value(text),
        None => Some(content.clone()),
    };
    let calls = match value {
        Some(Value::Array(calls)) => calls,
        Some(call) => vec![call],
        None => Vec::new(),
    };
    let is_call = |call: &Value| call["name"].is_string() && call.get("arguments").is_some();
    if calls.is_empty() || !calls.iter().all(is_call) {
        return Err(RecordError::NotCalls { role: ROLE.to_owned() });
    }
    let framed = |call: &Value| json!({ "type": "function", "function": { "name": call["name"], "arguments": call["arguments"] } });
    let calls: Vec<Value> = calls.iter().map(framed).collect();
    message.insert("role".to_owned(), "assistant".into());
    message.insert("content".to_owned(), "".into());
    message.insert("tool_calls".to_owned(), calls.into());
    Ok(())
}

/// The tools, each in a frame that says that it is a function.
pub(super) fn framed(tools: Value) -> Value {
    let Value::Array(tools) = tools else { return tools };
    let framed = |tool: Value| match tool.get("name") {
        Some(_) if tool.get("function").is_none() => json!({ "type": "function", "function": tool }),
        _ => tool,
    };
    tools.into_iter().map(framed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(content: Value) -> Result<Value, RecordError> {
        let mut message = Map::from_iter([("role".to_owned(), ROLE.into()), ("content".to_owned(), content)]);
        into_answer(&mut message, "reasoning_content")?;
        Ok(Value::Object(message))
    }

    #[test]
    fn call_in_a_text_becomes_one_of_an_answer() {
        let call = |n: u32| json!({ "type": "function", "function": { "name": "f", "arguments": { "b": n, "a": 1 } } });
        let one = r#"{"name": "f", "arguments": {"b": 2, "a": 1}}"#;

        assert_eq!(answer(one.into()).unwrap(), json!({ "role": "assistant", "content": "", "tool_calls": [call(2)] }));
        let two = format!("<think>\nHm\n</think>\n\n[{one}, {one}]");
        assert_eq!(
            answer(two.into()).unwrap(),
            json!({ "role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [call(2), call(2)] })
        );
    }

    #[test]
    fn text_that_is_no_call_is_refused() {
        for content in ["Hi", "{}", "[]", r#"{"name": "f"}"#, "3"] {
            assert_eq!(answer(content.into()), Err(RecordError::NotCalls { role: ROLE.to_owned() }), "{content}");
        }
    }

    #[test]
    fn description_without_a_frame_gets_one() {
        let function = json!({ "name": "f", "parameters": {} });
        let in_frame = json!({ "type": "function", "function": function });

        assert_eq!(framed(json!([function, in_frame])), json!([in_frame, in_frame]));
    }
}
