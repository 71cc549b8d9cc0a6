//! Requests of OpenAI's API, checked except for what only the model can tell.

use super::fields::{Fields, mismatch};
use super::refusal::Refusal;
use crate::api::completion::Completion;
use crate::api::sampling::Sampling;
use crate::data::chat_template::{Conversation, Message};
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};

/// What the server has, as far as requests depend on it.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    /// Name of the model.
    pub(super) name: String,
    /// Settings of requests that have none.
    pub(super) sampling: Sampling,
    /// Most tokens of a prompt and its continuation.
    pub(super) max_len: usize,
}

/// A request for continuations.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Request {
    pub(super) prompts: Vec<Prompt>,
    /// Continuations of each prompt.
    pub(super) n: usize,
    /// How a prompt continues; `max_new` is the room that `max_len` leaves if there is no `has_limit`.
    pub(super) completion: Completion,
    pub(super) has_limit: bool,
    /// Whether the prompt is a part of the answer.
    pub(super) echo: bool,
    /// Whether a template that does not show the conversation's tools to the model cannot be used.
    pub(super) needs_tools: bool,
    /// Whether the answer comes piece by piece.
    pub(super) stream: bool,
    /// Whether the stream ends with the numbers of tokens.
    pub(super) stream_usage: bool,
}

/// A text to continue.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Chat(Conversation),
}

impl Prompt {
    /// The field of the request that has it.
    pub(super) const fn field(&self) -> &'static str {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => "prompt",
            Prompt::Chat(..) => "messages",
        }
    }
}

/// Most prompts of a request, and most continuations of a prompt.
const PROMPTS_MAX: usize = 256;
const CHOICES_MAX: u64 = 16;
/// Most tokens reported in place of each token.
const TOP_MAX: u64 = 20;
/// Most stop texts, and most bytes of one.
const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1024;
/// Tokens of a completion without a limit, as OpenAI's.
const MAX_TOKENS_DEFAULT: usize = 16;

/// Fields of OpenAI's that only its own service uses.
pub(super) const WITHOUT_EFFECT: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
    "verbosity",
];

impl Request {
    /// The request in the body of `/v1/completions`.
    ///
    /// # Errors
    /// Names the first field that is unknown, has a wrong value, or asks for something that the server does not do.
    pub(super) fn completion(body: &[u8], offer: &Offer) -> Result<Request, Refusal> {
        let mut fields = Fields::of(body)?;
        let given = fields.take("prompt").ok_or_else(|| {
            Refusal::of_field(
                "prompt",
                "`prompt` is missing; it is a text, a list of texts, token ids, or a list of such lists",
            )
        })?;
        let prompts = prompts("prompt", &given)?;
        let limit = fields.whole("max_tokens", 0..=u64::MAX)?;
        let n_top = fields.whole("logprobs", 0..=TOP_MAX)?;
        let echo = fields.flag("echo")?;
        fields.refuse("suffix", "a continuation has no text behind it")?;
        let best_of = fields.whole("best_of", 1..=CHOICES_MAX)?;
        let mut request = Request::shared(&mut fields, prompts, offer)?;
        if best_of.is_some_and(|best_of| best_of as usize != request.n) {
            return Err(Refusal::of_field("best_of", "`best_of` is not supported unless it equals `n`"));
        }
        fields.finish()?;
        request.completion.max_new = limit.map_or(MAX_TOKENS_DEFAULT, |limit| limit as usize);
        request.completion.n_top = n_top.map(|n| n as usize);
        (request.has_limit, request.echo) = (true, echo);
        if request.completion.max_new == 0 && !echo {
            return Err(Refusal::of_field("max_tokens", "`max_tokens` is 0, but must be at least 1 without `echo`"));
        }
        Ok(request)
    }

    /// The request in the body of `/v1/chat/completions`.
    ///
    /// # Errors
    /// As [`Request::completion`].
    pub(super) fn chat(body: &[u8], offer: &Offer) -> Result<Request, Refusal> {
        let mut fields = Fields::of(body)?;
        let messages = messages(fields.take("messages"))?;
        let limits = [fields.whole("max_completion_tokens", 1..=u64::MAX)?, fields.whole("max_tokens", 1..=u64::MAX)?];
        let limit = limits.into_iter().flatten().min();
        let asks_logprobs = fields.flag("logprobs")?;
        let n_top = fields.whole("top_logprobs", 0..=TOP_MAX)?;
        if n_top.is_some() && !asks_logprobs {
            return Err(Refusal::of_field("top_logprobs", "`top_logprobs` needs `logprobs: true`"));
        }
        let variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
        let choice = fields.take("tool_choice");
        let tools = tools(fields.take("tools"), choice.as_ref())?;
        for name in ["functions", "function_call"] {
            fields.refuse(name, "use `tools`")?;
        }
        if let Some(format) = fields.object("response_format")?
            && format.get("type").and_then(Value::as_str) != Some("text")
        {
            return Err(Refusal::of_field(
                "response_format",
                "`response_format` is not supported unless its type is text",
            ));
        }
        for name in ["audio", "modalities", "prediction", "web_search_options", "reasoning_effort"] {
            fields.refuse(name, "the model continues text")?;
        }
        let prompts = vec![Prompt::Chat(Conversation { messages, tools, variables })];
        let mut request = Request::shared(&mut fields, prompts, offer)?;
        fields.finish()?;
        request.completion.max_new = limit.map_or(offer.max_len, |limit| limit as usize);
        request.completion.n_top = asks_logprobs.then_some(n_top.unwrap_or(0) as usize);
        request.has_limit = limit.is_some();
        request.needs_tools = choice.is_none_or(|choice| choice != "none");
        Ok(request)
    }

    /// The fields of both kinds.
    fn shared(fields: &mut Fields, prompts: Vec<Prompt>, offer: &Offer) -> Result<Request, Refusal> {
        fields.check_model(&offer.name)?;
        fields.ignore(&WITHOUT_EFFECT);
        let n = fields.whole("n", 1..=CHOICES_MAX)?.unwrap_or(1) as usize;
        let stop = stops(fields.take("stop"))?;
        let sampling = sampling(fields, offer.sampling)?;
        for name in ["presence_penalty", "frequency_penalty"] {
            fields.refuse(name, "use `repetition_penalty`")?;
        }
        fields.refuse("logit_bias", "logits are sampled from as the model computes them")?;
        let ignore_eos = fields.flag("ignore_eos")?;
        let stream = fields.flag("stream")?;
        let options = fields.object("stream_options")?;
        if options.is_some() && !stream {
            return Err(Refusal::of_field("stream_options", "`stream_options` needs `stream: true`"));
        }
        let usage = options.as_ref().and_then(|options| options.get("include_usage")).and_then(Value::as_bool);
        Ok(Request {
            prompts,
            n,
            completion: Completion { max_new: 0, sampling, stop, stop_ids: Vec::new(), ignore_eos, n_top: None },
            has_limit: false,
            echo: false,
            needs_tools: false,
            stream,
            stream_usage: usage.unwrap_or(false),
        })
    }

    /// Continuations of all prompts.
    pub(super) fn n_choices(&self) -> usize {
        self.prompts.len() * self.n
    }
}

fn sampling(fields: &mut Fields, otherwise: Sampling) -> Result<Sampling, Refusal> {
    let top_k = match fields.take("top_k") {
        None => otherwise.top_k,
        // Some clients write -1 for all tokens.
        Some(value) if value.as_i64() == Some(-1) => 0,
        Some(value) => match value.as_u64() {
            Some(k) => usize::try_from(k).unwrap_or(0),
            None => return Err(mismatch("top_k", &value, "a whole number of at least 0")),
        },
    };
    let seed = match fields.take("seed") {
        // Two requests without a seed have different texts.
        None => RandomState::new().hash_one(0u8),
        Some(value) => match value.as_u64().or(value.as_i64().map(|seed| seed as u64)) {
            Some(seed) => seed,
            None => return Err(mismatch("seed", &value, "a whole number")),
        },
    };
    let sampling = Sampling {
        temperature: fields.number("temperature")?.unwrap_or(otherwise.temperature),
        top_k,
        top_p: fields.number("top_p")?.unwrap_or(otherwise.top_p),
        repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(otherwise.repetition_penalty),
        seed,
    };
    match sampling.out_of_range() {
        Some((name, found, fits)) => Err(Refusal::of_field(name, format!("`{name}` is {found}, but must be {fits}"))),
        None => Ok(sampling),
    }
}

fn stops(value: Option<Value>) -> Result<Vec<String>, Refusal> {
    let texts = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(one) => vec![one],
    };
    let wanted = "a text or a list of at most 16 texts of at most 1024 bytes, none of them empty";
    let text = |value: &Value| match value.as_str() {
        Some(text) if (1..=STOP_BYTES_MAX).contains(&text.len()) => Ok(text.to_owned()),
        _ => Err(mismatch("stop", value, wanted)),
    };
    if texts.len() > STOPS_MAX {
        return Err(Refusal::of_field("stop", format!("`stop` has {} texts, but must be {wanted}", texts.len())));
    }
    texts.iter().map(text).collect()
}

/// A text, a list of texts, token ids, or a list of such lists.
pub(super) fn prompts(field: &str, value: &Value) -> Result<Vec<Prompt>, Refusal> {
    let wanted = "a text, a list of texts, token ids, or a list of such lists, and not empty";
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let one = |value: &Value| match value {
        Value::String(text) => Some(Prompt::Text(text.clone())),
        Value::Array(ids) if !ids.is_empty() => ids.iter().map(id).collect::<Option<_>>().map(Prompt::Ids),
        _ => None,
    };
    let all = match value {
        Value::Array(items) if items.first().is_some_and(|item| !item.is_number()) => {
            if items.len() > PROMPTS_MAX {
                let n = items.len();
                let message = format!("`{field}` has {n} texts, but may have at most {PROMPTS_MAX}");
                return Err(Refusal::of_field(field, message));
            }
            items.iter().map(one).collect::<Option<_>>()
        }
        value => one(value).map(|prompt| vec![prompt]),
    };
    all.ok_or_else(|| mismatch(field, value, wanted))
}

/// Descriptions of functions, which the chat template shows to the model. A call of one is text of the answer: nothing parses it, so
/// that no request can demand one.
fn tools(tools: Option<Value>, choice: Option<&Value>) -> Result<Option<Value>, Refusal> {
    match choice {
        None => {}
        Some(Value::String(choice)) if choice == "auto" || choice == "none" => {}
        Some(other) => {
            let message = format!(
                "`tool_choice` is {other}, but must be auto or none: calls are not parsed, and an answer has them as the model writes them"
            );
            return Err(Refusal::of_field("tool_choice", message));
        }
    }
    let Some(tools) = tools else { return Ok(None) };
    let wanted = "a list of functions, each with a name";
    let Some(items) = tools.as_array() else { return Err(mismatch("tools", &tools, wanted)) };
    for (i, item) in items.iter().enumerate() {
        if item["type"] != "function" || item["function"]["name"].as_str().is_none_or(str::is_empty) {
            return Err(mismatch(&format!("tools[{i}]"), item, "an object of type function with the name of one"));
        }
    }
    Ok((!items.is_empty()).then_some(tools))
}

pub(super) fn messages(value: Option<Value>) -> Result<Vec<Message>, Refusal> {
    let wanted = "a list of at least one message, each with a role and a content";
    let missing = || Refusal::of_field("messages", format!("`messages` is missing; it is {wanted}"));
    let value = value.ok_or_else(missing)?;
    let Some(items) = value.as_array().filter(|items| !items.is_empty()) else {
        return Err(mismatch("messages", &value, wanted));
    };
    items.iter().enumerate().map(|(i, item)| message(item, &format!("messages[{i}]"))).collect()
}

fn message(value: &Value, at: &str) -> Result<Message, Refusal> {
    let Some(fields) = value.as_object() else {
        return Err(mismatch(at, value, "an object with a role and a content"));
    };
    let role = fields.get("role").unwrap_or(&Value::Null);
    if role.as_str().is_none_or(str::is_empty) {
        return Err(mismatch(&format!("{at}.role"), role, "a role such as system, user or assistant"));
    }
    let mut fields = fields.clone();
    // Clients send back what they got, with the keys that it does not have.
    let is_nothing = |name: &str, value: &Value| name != "content" && value.as_array().is_some_and(Vec::is_empty);
    fields.retain(|name, value| !(value.is_null() || is_nothing(name, value)));
    let calls = fields.get("tool_calls").map(|calls| calls_in(calls, at)).transpose()?;
    let content = match fields.get("content") {
        // An answer that is all calls.
        None if calls.is_some() => {
            fields.insert("content".into(), Value::Null);
            return Ok(Message(fields));
        }
        Some(Value::String(text)) => text.as_str().into(),
        Some(Value::Array(parts)) => {
            let parts = parts.iter().enumerate().map(|(i, part)| text_part(part, &format!("{at}.content[{i}]")));
            Value::Array(parts.collect::<Result<_, _>>()?)
        }
        other => {
            let found = other.unwrap_or(&Value::Null);
            return Err(mismatch(&format!("{at}.content"), found, "a text or a list of parts of type text"));
        }
    };
    fields.insert("content".into(), content);
    Ok(Message(fields))
}

/// Checks the calls of a message.
fn calls_in(calls: &Value, at: &str) -> Result<(), Refusal> {
    let wanted = "a list of calls, each of a function with a name";
    let Some(items) = calls.as_array() else { return Err(mismatch(&format!("{at}.tool_calls"), calls, wanted)) };
    let is_call = |call: &Value| call["function"]["name"].as_str().is_some_and(|name| !name.is_empty());
    match items.iter().position(|call| !is_call(call)) {
        None => Ok(()),
        Some(i) => Err(mismatch(&format!("{at}.tool_calls[{i}]"), &items[i], "a call of a function with a name")),
    }
}

fn text_part(part: &Value, at: &str) -> Result<Value, Refusal> {
    match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(json!({ "type": "text", "text": text })),
        _ => Err(mismatch(at, part, "a part of type text; the model reads nothing else")),
    }
}
