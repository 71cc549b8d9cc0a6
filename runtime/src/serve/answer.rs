//! Answers in the shapes of OpenAI's API: whole, or chunk by chunk.

use super::refusal::Refusal;
use super::request::Request;
use super::worker::{Part, Piece, Token};
use serde_json::{Map, Value, json};

/// Which of the two shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Completion,
    Chat,
}

/// What all chunks of an answer have in common.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub(super) shape: Shape,
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// Name of the model.
    pub(super) model: String,
}

impl Header {
    fn object(&self, is_chunk: bool) -> &'static str {
        match (self.shape, is_chunk) {
            (Shape::Completion, _) => "text_completion",
            (Shape::Chat, false) => "chat.completion",
            (Shape::Chat, true) => "chat.completion.chunk",
        }
    }

    fn body(&self, is_chunk: bool, choices: Vec<Value>) -> Value {
        let Header { id, created, model, .. } = self;
        json!({"id": id, "object": self.object(is_chunk), "created": created, "model": model, "choices": choices})
    }
}

/// A continuation as far as it is known.
#[derive(Clone, Debug, Default)]
struct Choice {
    text: String,
    tokens: Vec<Token>,
    is_at_limit: bool,
}

/// Gathers the parts of an answer.
#[derive(Debug)]
pub(super) struct Gathered {
    header: Header,
    has_likelihoods: bool,
    choices: Vec<Choice>,
    prompt_tokens: usize,
}

impl Gathered {
    pub(super) fn new(header: Header, request: &Request) -> Gathered {
        let choices = vec![Choice::default(); request.n_choices()];
        Gathered { header, has_likelihoods: request.completion.n_top.is_some(), choices, prompt_tokens: 0 }
    }

    /// Takes the next part; returns the whole answer with the last one.
    pub(super) fn take(&mut self, part: Part) -> Option<Result<Value, Refusal>> {
        match part {
            Part::Refused(refusal) => return Some(Err(refusal)),
            Part::Accepted { prompt_tokens } => self.prompt_tokens = prompt_tokens,
            Part::Text { choice, text, tokens } => {
                self.choices[choice].text += &text;
                self.choices[choice].tokens.extend(tokens);
            }
            Part::Finished { choice, is_at_limit } => self.choices[choice].is_at_limit = is_at_limit,
            Part::Done { completion_tokens } => return Some(Ok(self.whole(completion_tokens))),
        }
        None
    }

    fn whole(&self, completion_tokens: usize) -> Value {
        let choice = |(index, choice): (usize, &Choice)| {
            let finish = finish_reason(choice.is_at_limit);
            match self.header.shape {
                Shape::Completion => {
                    let logprobs = self.has_likelihoods.then(|| completion_logprobs(&choice.tokens));
                    json!({"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": finish})
                }
                Shape::Chat => {
                    let logprobs = self.has_likelihoods.then(|| chat_logprobs(&choice.tokens));
                    let message = json!({"role": "assistant", "content": choice.text});
                    json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
                }
            }
        };
        let mut body = self.header.body(false, self.choices.iter().enumerate().map(choice).collect());
        body["usage"] = usage(self.prompt_tokens, completion_tokens);
        body
    }
}

/// Writes the parts of an answer as server-sent events.
#[derive(Debug)]
pub(super) struct Events {
    header: Header,
    has_likelihoods: bool,
    /// Whether the stream ends with the numbers of tokens.
    has_usage: bool,
    prompt_tokens: usize,
    n_choices: usize,
}

impl Events {
    pub(super) fn new(header: Header, request: &Request) -> Events {
        let (has_likelihoods, has_usage) = (request.completion.n_top.is_some(), request.stream_usage);
        Events { header, has_likelihoods, has_usage, prompt_tokens: 0, n_choices: request.n_choices() }
    }

    /// The events of a part; may be empty.
    pub(super) fn of(&mut self, part: Part) -> String {
        match part {
            Part::Refused(refusal) => event(&refusal.json()) + DONE,
            Part::Accepted { prompt_tokens } => {
                self.prompt_tokens = prompt_tokens;
                match self.header.shape {
                    Shape::Completion => String::new(),
                    Shape::Chat => {
                        let delta = json!({"role": "assistant", "content": ""});
                        (0..self.n_choices).map(|i| self.chat_chunk(i, &delta, None, None)).collect()
                    }
                }
            }
            Part::Text { choice, text, tokens } => self.text(choice, &text, &tokens),
            Part::Finished { choice, is_at_limit } => {
                let finish = Some(finish_reason(is_at_limit));
                match self.header.shape {
                    Shape::Completion => self.completion_chunk(choice, "", None, finish),
                    Shape::Chat => self.chat_chunk(choice, &json!({}), None, finish),
                }
            }
            Part::Done { completion_tokens } => {
                let mut events = String::new();
                if self.has_usage {
                    let mut body = self.header.body(true, Vec::new());
                    body["usage"] = usage(self.prompt_tokens, completion_tokens);
                    events += &event(&body);
                }
                events + DONE
            }
        }
    }

    fn text(&self, choice: usize, text: &str, tokens: &[Token]) -> String {
        if text.is_empty() && tokens.is_empty() {
            return String::new();
        }
        match self.header.shape {
            Shape::Completion => {
                let logprobs = self.has_likelihoods.then(|| completion_logprobs(tokens));
                self.completion_chunk(choice, text, logprobs, None)
            }
            Shape::Chat => {
                let logprobs = self.has_likelihoods.then(|| chat_logprobs(tokens));
                self.chat_chunk(choice, &json!({"content": text}), logprobs, None)
            }
        }
    }

    fn completion_chunk(&self, index: usize, text: &str, logprobs: Option<Value>, finish: Option<&str>) -> String {
        let choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish});
        event(&self.header.body(true, vec![choice]))
    }

    fn chat_chunk(&self, index: usize, delta: &Value, logprobs: Option<Value>, finish: Option<&str>) -> String {
        let choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
        event(&self.header.body(true, vec![choice]))
    }
}

/// The event after the last one.
const DONE: &str = "data: [DONE]\n\n";

fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

const fn finish_reason(is_at_limit: bool) -> &'static str {
    if is_at_limit { "length" } else { "stop" }
}

fn usage(prompt_tokens: usize, completion_tokens: usize) -> Value {
    let total = prompt_tokens + completion_tokens;
    json!({"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total})
}

/// Likelihoods in the shape of completions.
fn completion_logprobs(tokens: &[Token]) -> Value {
    let top = |token: &Token| {
        let logprob = token.logprob?;
        let mut top = Map::new();
        for (piece, logprob) in
            token.top.iter().map(|(piece, logprob)| (piece, *logprob)).chain([(&token.piece, logprob)])
        {
            // The more likely one of two tokens with one text comes first.
            top.entry(piece.text()).or_insert_with(|| json!(logprob));
        }
        Some(top)
    };
    json!({
        "tokens": tokens.iter().map(|token| token.piece.text()).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": tokens.iter().map(|token| token.offset).collect::<Vec<_>>(),
    })
}

fn chat_logprobs(tokens: &[Token]) -> Value {
    let one =
        |piece: &Piece, logprob: Option<f32>| json!({"token": piece.text(), "logprob": logprob, "bytes": piece.bytes});
    let content = tokens.iter().map(|token| {
        let mut entry = one(&token.piece, token.logprob);
        entry["top_logprobs"] = token.top.iter().map(|(piece, logprob)| one(piece, Some(*logprob))).collect();
        entry
    });
    json!({"content": content.collect::<Vec<_>>()})
}
