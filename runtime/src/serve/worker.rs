//! The model's side: requests are answered one after the other, on the device thread.

use super::refusal::Refusal;
use super::request::{Prompt, Request};
use crate::api::completion::{Chosen, Finish, Likely, likelihoods};
use crate::api::generate::Generator;
use crate::data::chat_template::{ChatTemplate, Conversation};
use crate::data::end_of_turn::EndOfTurn;
use crate::data::text_stream::TextStream;
use crate::data::token_pieces::TokenPieces;
use crate::data::tokenizer::Tokenizer;
use crate::data::tokenizer_error::TokenizerError;
use crate::error::JobError;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender};

/// Most tokens of an answer, and tokens in their place: some 150 MB.
const PIECES_MAX: usize = 2 << 20;

/// A request, and where its answer goes.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) request: Request,
    pub(super) answer: Sender<Part>,
}

/// A part of an answer. The first one is `Accepted` or `Refused`; an answer without `Done` or `Refused` at its end was cut off.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Part {
    Refused(Refusal),
    /// All prompts fit, and have this many tokens in all.
    Accepted {
        prompt_tokens: usize,
    },
    /// More text of a continuation, and the tokens that it came from if likelihoods were asked for.
    Text {
        choice: usize,
        text: String,
        tokens: Vec<Token>,
    },
    /// The end of a continuation.
    Finished {
        choice: usize,
        is_at_limit: bool,
    },
    Done {
        completion_tokens: usize,
    },
}

/// A token of an answer, with its likelihood.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token {
    pub(super) piece: Piece,
    /// Characters of the answer before its text.
    pub(super) offset: usize,
    /// The first token of a text has none.
    pub(super) logprob: Option<f32>,
    /// The most likely tokens in its place, the most likely one first.
    pub(super) top: Vec<(Piece, f32)>,
}

/// The text of a token alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) bytes: Vec<u8>,
}

impl Piece {
    fn of(id: u32, pieces: &TokenPieces) -> Piece {
        Piece { bytes: pieces.bytes(id) }
    }

    /// Its text; bytes that are no text are written as OpenAI writes them, so that different tokens stay different.
    pub(super) fn text(&self) -> String {
        match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => self.bytes.iter().fold("bytes:".to_owned(), |text, byte| format!("{text}\\x{byte:02x}")),
        }
    }
}

/// The chat templates of a server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Templates {
    /// The template of conversations; `None` refuses them.
    pub(crate) plain: Option<String>,
    /// The template of conversations with tools, if it is another one.
    pub(crate) with_tools: Option<String>,
    /// What ends an answer in these templates.
    pub(crate) ends: Vec<EndOfTurn>,
}

impl Templates {
    fn render(&self, tokenizer: &Tokenizer, conversation: &Conversation, needs_tools: bool) -> Result<String, Refusal> {
        let template = self.of(tokenizer, conversation)?.for_answers();
        if needs_tools && conversation.tools.is_some() && !template.mentions("tools") {
            return Err(not_rendered("tools", "tools"));
        }
        check_calls(&template, conversation)?;
        template.render(conversation, true).map_err(|error| refused(&error))
    }

    /// The text of a conversation with its answer, as in training, unless the answer is still to come.
    pub(super) fn whole(
        &self,
        tokenizer: &Tokenizer,
        conversation: &Conversation,
        asks_for_answer: bool,
    ) -> Result<String, Refusal> {
        let template = self.of(tokenizer, conversation)?;
        check_calls(&template, conversation)?;
        template.render(conversation, asks_for_answer).map_err(|error| refused(&error))
    }

    fn of(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<ChatTemplate, Refusal> {
        let with_tools = self.with_tools.as_ref().filter(|_| conversation.tools.is_some());
        let Some(source) = with_tools.or(self.plain.as_ref()) else {
            return Err(refused(
                &"the model has no chat template; start the server with --chat-template, for example chatml",
            ));
        };
        tokenizer.parse_template(source).map_err(|error| refused(&error))
    }
}

fn refused(error: &dyn std::fmt::Display) -> Refusal {
    Refusal::of_field("messages", error.to_string())
}

/// Refuses calls that the template leaves out.
fn check_calls(template: &ChatTemplate, conversation: &Conversation) -> Result<(), Refusal> {
    let has_calls = conversation.messages.iter().any(|message| message.0.contains_key("tool_calls"));
    match has_calls && !template.renders("tool_calls") {
        true => Err(not_rendered("messages", "tool_calls")),
        false => Ok(()),
    }
}

/// Part of a conversation would be lost without a word.
fn not_rendered(field: &str, name: &str) -> Refusal {
    Refusal::of_field(
        field,
        format!("the chat template of the model does not render `{name}`; leave it out, or use another template"),
    )
}

/// Answers requests until the queue is closed. A request under way ends when the server stops or its client is gone.
pub(super) fn work(
    generator: &mut Generator,
    templates: &Templates,
    mut queue: Receiver<Work>,
    is_stopping: &AtomicBool,
) {
    generator.keep_prefix();
    let pieces = &TokenPieces::of(generator.tokenizer());
    while let Some(Work { request, answer }) = queue.blocking_recv() {
        if answer.is_closed() || is_stopping.load(Ordering::Acquire) {
            continue;
        }
        let outcome = Answering {
            generator: &mut *generator,
            pieces,
            templates,
            request: &request,
            answer: &answer,
            is_stopping,
        }
        .all();
        let last = match outcome {
            Ok(Some(completion_tokens)) => Part::Done { completion_tokens },
            Ok(None) => continue,
            Err(refusal) => Part::Refused(refusal),
        };
        // A client that has gone needs no end.
        let _ = answer.try_send(last);
    }
}

/// An answer in progress.
struct Answering<'a> {
    generator: &'a mut Generator,
    pieces: &'a TokenPieces,
    templates: &'a Templates,
    request: &'a Request,
    answer: &'a Sender<Part>,
    is_stopping: &'a AtomicBool,
}

impl Answering<'_> {
    /// Answers all of it; returns the number of new tokens, or `None` if nobody waits for the rest.
    fn all(mut self) -> Result<Option<usize>, Refusal> {
        let request = self.request;
        let prompts = request.prompts.iter().map(|prompt| self.ids(prompt)).collect::<Result<Vec<_>, _>>()?;
        self.check_size(&prompts)?;
        let prompt_tokens = prompts.iter().map(Vec::len).sum();
        if !self.send(Part::Accepted { prompt_tokens }) {
            return Ok(None);
        }
        let mut completion_tokens = 0;
        for (at, (ids, prompt)) in prompts.iter().zip(&request.prompts).enumerate() {
            let failed = |error: JobError| Refusal::of_job(&error, prompt.field());
            let echoed = request.echo.then(|| self.echoed(ids)).transpose().map_err(failed)?;
            for nth in 0..request.n {
                let choice = at * request.n + nth;
                if let Some((text, tokens)) = &echoed
                    && !self.send(Part::Text { choice, text: text.clone(), tokens: tokens.clone() })
                {
                    return Ok(None);
                }
                let n_echoed = echoed.as_ref().map_or(0, |(text, _)| text.chars().count());
                match self.one(ids, n_echoed, choice, nth).map_err(failed)? {
                    Some(n_new) => completion_tokens += n_new,
                    None => return Ok(None),
                }
            }
        }
        Ok(Some(completion_tokens))
    }

    fn send(&self, part: Part) -> bool {
        send(self.answer, self.is_stopping, part)
    }

    /// Refuses a request whose answer may take too much memory.
    fn check_size(&self, prompts: &[Vec<u32>]) -> Result<(), Refusal> {
        let Request { completion, echo, n, .. } = self.request;
        let n_new = completion.max_new.min(self.generator.max_len());
        let n_tokens: usize = prompts.iter().map(|ids| n_new + if *echo { ids.len() } else { 0 }).sum();
        let n_pieces = n_tokens.saturating_mul(n * (1 + completion.n_top.unwrap_or(0)));
        if n_pieces <= PIECES_MAX {
            return Ok(());
        }
        let field = self.request.prompts.first().map_or("prompt", Prompt::field);
        Err(Refusal::of_field(
            field,
            format!(
                "the answer may have {n_pieces} tokens, those in place of each included, and this server takes {PIECES_MAX}: \
                 ask for fewer at once"
            ),
        ))
    }

    /// The tokens of a prompt, which leave room for what is asked for.
    fn ids(&self, prompt: &Prompt) -> Result<Vec<u32>, Refusal> {
        let (tokenizer, field) = (self.generator.tokenizer(), prompt.field());
        let encode = |text: &str| tokenizer.encode(text).map_err(|error| Refusal::of_field(field, error.to_string()));
        let ids = match prompt {
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Text(text) => {
                let mut ids: Vec<u32> = tokenizer.document_start().into_iter().collect();
                ids.extend(encode(text)?);
                ids
            }
            Prompt::Chat(conversation) => {
                let needs_tools = self.request.needs_tools;
                encode(&self.templates.render(tokenizer, conversation, needs_tools)?)?
            }
        };
        if ids.is_empty() {
            let message = "the prompt is empty, and the tokenizer has no beginning-of-text token";
            return Err(Refusal::of_field(field, message));
        }
        let (longest, n_tokens) = (self.generator.max_len(), ids.len());
        let n_new = if self.request.has_limit { self.request.completion.max_new } else { 1 };
        if n_tokens.saturating_add(n_new) > longest {
            let message = format!(
                "the prompt has {n_tokens} tokens and {n_new} more are asked for, but this server takes {longest} in all"
            );
            return Err(Refusal::too_long(field, message));
        }
        self.generator.check(&ids).map_err(|error| Refusal::of_field(field, error.to_string()))?;
        Ok(ids)
    }

    /// The text of a prompt, and its tokens if likelihoods are asked for.
    fn echoed(&mut self, ids: &[u32]) -> Result<(String, Vec<Token>), JobError> {
        let text = self.generator.tokenizer().decode(ids, true)?;
        let Some(n_top) = self.request.completion.n_top else { return Ok((text, Vec::new())) };
        let found = likelihoods(self.generator, ids, n_top)?;
        let offsets = offsets(self.generator.tokenizer(), ids)?;
        let token = |((id, found), offset): ((&u32, Option<Chosen>), usize)| match found {
            Some(chosen) => Token { offset, ..token(&chosen, self.pieces) },
            None => Token { piece: Piece::of(*id, self.pieces), offset, logprob: None, top: Vec::new() },
        };
        Ok((text, ids.iter().zip(found).zip(offsets).map(token).collect()))
    }

    /// One continuation of a prompt, of which the answer has `n_echoed` characters; returns the number of its tokens, or `None`
    /// if nobody waits for the rest.
    fn one(&mut self, ids: &[u32], n_echoed: usize, choice: usize, nth: usize) -> Result<Option<usize>, JobError> {
        let Answering { generator, pieces, templates, request, answer, is_stopping } = self;
        let mut completion = request.completion.clone();
        if request.prompts.iter().any(|prompt| matches!(prompt, Prompt::Chat(..))) {
            completion.stop_ids.extend(templates.ends.iter().filter_map(EndOfTurn::token));
            // Like tokens that end a text, they do not if the client says so.
            let texts = templates.ends.iter().filter_map(EndOfTurn::text).filter(|_| !completion.ignore_eos);
            completion.stop.extend(texts.map(str::to_owned));
        }
        completion.sampling.seed = completion.sampling.seed.wrapping_add(nth as u64);
        completion.max_new = completion.max_new.min(generator.max_len() - ids.len());
        let mut waiting = Waiting { tokens: VecDeque::new(), n_chars: n_echoed };
        let ended = completion.run(generator, ids, |text, chosen| {
            waiting.tokens.extend(chosen.iter().map(|chosen| {
                let token = token(chosen, pieces);
                Token { offset: n_echoed + token.offset, ..token }
            }));
            let part = Part::Text { choice, text: text.to_owned(), tokens: waiting.of_text(text) };
            send(answer, is_stopping, part)
        })?;
        // A stop text is no part of the answer, and neither are its tokens.
        let rest = if ended.finish == Finish::StopText { Vec::new() } else { waiting.tokens.into() };
        let is_whole = rest.is_empty() || self.send(Part::Text { choice, text: String::new(), tokens: rest });
        if ended.finish == Finish::Cancelled || !is_whole {
            return Ok(None);
        }
        let is_sent = self.send(Part::Finished { choice, is_at_limit: ended.finish == Finish::Length });
        Ok(is_sent.then_some(ended.n_new))
    }
}

/// Tokens whose text is not sent yet, because it may be the beginning of a stop text or of a character.
struct Waiting {
    tokens: VecDeque<Token>,
    /// Characters that were sent.
    n_chars: usize,
}

impl Waiting {
    /// The tokens that go with the next text.
    fn of_text(&mut self, text: &str) -> Vec<Token> {
        self.n_chars += text.chars().count();
        let n = self.tokens.iter().take_while(|token| token.offset < self.n_chars).count();
        self.tokens.drain(..n).collect()
    }
}

/// Where the text of each token begins in the text of all of them, in characters. Tokens without text of their own, such as special
/// ones, are where the next text begins.
fn offsets(tokenizer: &Tokenizer, ids: &[u32]) -> Result<Vec<usize>, TokenizerError> {
    let (mut stream, mut n_chars) = (TextStream::new(tokenizer), 0);
    let offset = |id: &u32| {
        let before = n_chars;
        n_chars += stream.push(*id)?.chars().count();
        Ok(before)
    };
    ids.iter().map(offset).collect()
}

/// Sends a part; returns whether somebody waits for more.
fn send(answer: &Sender<Part>, is_stopping: &AtomicBool, part: Part) -> bool {
    if is_stopping.load(Ordering::Acquire) {
        return false;
    }
    let sent = answer.try_send(part);
    // The channel has room for every part of an answer.
    debug_assert!(!matches!(sent, Err(TrySendError::Full(_))));
    sent.is_ok()
}

fn token(chosen: &Chosen, pieces: &TokenPieces) -> Token {
    let top = |likely: &Likely| (Piece::of(likely.id, pieces), likely.logprob);
    Token {
        piece: Piece::of(chosen.token.id, pieces),
        offset: chosen.offset,
        logprob: Some(chosen.token.logprob),
        top: chosen.top.iter().map(top).collect(),
    }
}
