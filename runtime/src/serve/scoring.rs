//! Scores of texts over HTTP, in the shape of vLLM's API of classifications: the request, the model's side, and the answer.

use super::fields::{Fields, mismatch};
use super::refusal::Refusal;
use super::request::{Prompt, WITHOUT_EFFECT, messages, prompts};
use super::worker::Templates;
use crate::api::scores::Scorer;
use crate::data::chat_template::Conversation;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::Receiver;
use tokio::sync::oneshot;

/// A request for scores.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ScoreRequest {
    pub(super) texts: Vec<Prompt>,
    /// Whether a score becomes a number from 0 to 1.
    pub(super) is_squashed: bool,
    /// Whether a text begins as the tokenizer begins texts.
    has_beginning: bool,
    /// Whether a conversation ends with the beginning of an answer.
    asks_for_answer: bool,
}

impl ScoreRequest {
    /// The request in the body of `/classify`, to the model of this name.
    ///
    /// # Errors
    /// Names the first field that is unknown, has a wrong value, or asks for something that the server does not do.
    pub(super) fn of(body: &[u8], name: &str) -> Result<ScoreRequest, Refusal> {
        let mut fields = Fields::of(body)?;
        fields.check_model(name)?;
        let (input, conversation) = (fields.take(INPUT), fields.take("messages"));
        let is_conversation = conversation.is_some();
        let texts = match (input, conversation) {
            (Some(input), None) => prompts(INPUT, &input)?,
            (None, Some(conversation)) => {
                let variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
                let messages = messages(Some(conversation))?;
                vec![Prompt::Chat(Conversation { messages, tools: None, variables })]
            }
            (given, _) => {
                let found = if given.is_some() { "both are" } else { "neither is" };
                return Err(Refusal::of_field(INPUT, format!("one of `input` and `messages` is needed; {found} here")));
            }
        };
        let has_beginning = fields.take("add_special_tokens").map(|value| flag("add_special_tokens", &value));
        let asks_for_answer = fields.flag("add_generation_prompt")?;
        // The newer name, and the older one; clients send both.
        let switches = ["use_activation", "activation"];
        let switches = switches.map(|name| fields.take(name).map(|value| flag(name, &value)).transpose());
        let [newer, older] = switches;
        fields.refuse("truncate_prompt_tokens", "a part of a text has another score")?;
        fields.ignore(&WITHOUT_EFFECT);
        fields.ignore(&["priority", "request_id"]);
        fields.finish()?;
        Ok(ScoreRequest {
            texts,
            is_squashed: newer?.or(older?).unwrap_or(true),
            has_beginning: has_beginning.transpose()?.unwrap_or(!is_conversation),
            asks_for_answer,
        })
    }
}

const INPUT: &str = "input";

fn flag(name: &str, value: &Value) -> Result<bool, Refusal> {
    value.as_bool().ok_or_else(|| mismatch(name, value, "true or false"))
}

/// A request, and where its scores go.
#[derive(Debug)]
pub(super) struct ScoreWork {
    pub(super) request: ScoreRequest,
    pub(super) answer: oneshot::Sender<Result<Scores, Refusal>>,
}

/// What the model gives.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scores {
    pub(super) scores: Vec<f32>,
    /// The model's name of its only label.
    pub(super) label: String,
    pub(super) n_tokens: usize,
}

impl Scores {
    /// The answer.
    pub(super) fn json(&self, id: &str, created: u64, model: &str) -> Value {
        let label = &self.label;
        let one = |(i, score)| json!({"index": i, "label": label, "probs": [score], "num_classes": 1});
        let data: Vec<Value> = self.scores.iter().enumerate().map(one).collect();
        let usage = json!({"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens, "completion_tokens": 0});
        json!({"id": id, "object": "list", "created": created, "model": model, "data": data, "usage": usage})
    }
}

/// Answers requests until the queue is closed. A request under way ends when the server stops or its client is gone.
pub(super) fn work(
    scorer: &mut Scorer,
    templates: &Templates,
    mut queue: Receiver<ScoreWork>,
    is_stopping: &AtomicBool,
) {
    while let Some(ScoreWork { request, answer }) = queue.blocking_recv() {
        let is_over = || answer.is_closed() || is_stopping.load(Ordering::Acquire);
        // An answer that is dropped tells that the server stops.
        if let Some(found) = all(scorer, templates, &request, is_over).transpose() {
            let _ = answer.send(found);
        }
    }
}

/// All scores, or none if nobody waits for them.
fn all(
    scorer: &mut Scorer,
    templates: &Templates,
    request: &ScoreRequest,
    is_over: impl Fn() -> bool,
) -> Result<Option<Scores>, Refusal> {
    let ids = |text| ids(scorer, templates, request, text);
    let rows = request.texts.iter().map(ids).collect::<Result<Vec<_>, _>>()?;
    let n_tokens = rows.iter().map(Vec::len).sum();
    let mut scores = Vec::with_capacity(rows.len());
    for (row, text) in rows.iter().zip(&request.texts) {
        if is_over() {
            return Ok(None);
        }
        let score = scorer.score(row).map_err(|error| Refusal::of_job(&error, field(text)))?;
        scores.push(if request.is_squashed { 1.0 / (1.0 + (-score).exp()) } else { score });
    }
    Ok(Some(Scores { scores, label: scorer.label().to_owned(), n_tokens }))
}

/// The tokens of a text.
fn ids(scorer: &Scorer, templates: &Templates, request: &ScoreRequest, text: &Prompt) -> Result<Vec<u32>, Refusal> {
    let (tokenizer, field) = (scorer.tokenizer(), field(text));
    let text = match text {
        Prompt::Ids(ids) => return checked(scorer, ids.clone(), field),
        Prompt::Text(text) => text.clone(),
        Prompt::Chat(conversation) => templates.whole(tokenizer, conversation, request.asks_for_answer)?,
    };
    let start = tokenizer.document_start().filter(|_| request.has_beginning);
    let encoded = tokenizer.encode(&text).map_err(|error| Refusal::of_field(field, error.to_string()))?;
    checked(scorer, start.into_iter().chain(encoded).collect(), field)
}

/// Refuses tokens that the model does not take.
fn checked(scorer: &Scorer, ids: Vec<u32>, field: &str) -> Result<Vec<u32>, Refusal> {
    let (n_tokens, longest) = (ids.len(), scorer.max_len());
    if n_tokens > longest {
        let message = format!("the text has {n_tokens} tokens, but this server takes {longest}");
        return Err(Refusal::too_long(field, message));
    }
    scorer.check(&ids).map_err(|error| Refusal::of_job(&error, field))?;
    Ok(ids)
}

/// The field of the request that has a text.
const fn field(text: &Prompt) -> &'static str {
    match text {
        Prompt::Text(_) | Prompt::Ids(_) => INPUT,
        Prompt::Chat(_) => "messages",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &Value) -> Result<ScoreRequest, Refusal> {
        ScoreRequest::of(body.to_string().as_bytes(), "m")
    }

    #[test]
    fn texts_ids_and_conversations_are_read_as_vllm_reads_them() {
        let texts = |body: Value| of(&body).unwrap().texts;

        assert_eq!(texts(json!({"input": "a", "model": "m"})), [Prompt::Text("a".into())]);
        assert_eq!(texts(json!({"input": ["a", "b"]})).len(), 2);
        assert_eq!(texts(json!({"input": [[1, 2], [3]]})), [Prompt::Ids(vec![1, 2]), Prompt::Ids(vec![3])]);
        let conversation = json!({"messages": [{"role": "user", "content": "a"}]});
        let [plain, asked] = [of(&json!({"input": "a"})).unwrap(), of(&conversation).unwrap()];
        assert!(matches!(&asked.texts[..], [Prompt::Chat(_)]));
        assert_eq!((plain.has_beginning, asked.has_beginning), (true, false), "a template writes BOS itself");
    }

    #[test]
    fn scores_are_squashed_unless_either_name_of_the_switch_is_off() {
        let is_squashed = |keys: Value| {
            let mut body = json!({"input": "a"});
            body.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            of(&body).unwrap().is_squashed
        };

        assert!(is_squashed(json!({})) && is_squashed(json!({"use_activation": true})));
        assert!(!is_squashed(json!({"activation": false})));
        assert!(!is_squashed(json!({"use_activation": false, "activation": false})));
    }

    #[test]
    fn refusal_names_the_field_at_fault() {
        let message = json!([{"role": "user", "content": "a"}]);
        for (param, body) in [
            ("input", json!({})),
            ("input", json!({"input": "a", "messages": message})),
            ("input", json!({"input": []})),
            ("input", json!({"input": vec!["a"; 300]})),
            ("input", json!({"input": 1.5})),
            ("messages", json!({"messages": []})),
            ("messages[0].content", json!({"messages": [{"role": "user"}]})),
            ("model", json!({"input": "a", "model": "other"})),
            ("use_activation", json!({"input": "a", "use_activation": "no"})),
            ("add_special_tokens", json!({"input": "a", "add_special_tokens": 1})),
            ("truncate_prompt_tokens", json!({"input": "a", "truncate_prompt_tokens": 8})),
            ("max_tokens", json!({"input": "a", "max_tokens": 8})),
            // They belong to conversations.
            ("chat_template_kwargs", json!({"input": "a", "chat_template_kwargs": {"x": 1}})),
        ] {
            let refused = of(&body).unwrap_err().json();
            let message = refused["error"]["message"].as_str().unwrap();
            let name = param.split(['[', '.']).next().unwrap();
            assert!(refused["error"]["param"] == param && message.contains(name), "{body}: {refused}");
        }
    }
}
