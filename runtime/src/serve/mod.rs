//! A trained model behind OpenAI's HTTP API: models, completions with likelihoods, and chats; or a reward model behind vLLM's: scores.
//!
//! - `http`: routes, keys, limits. `connections`: who keeps a connection when there are too many. `request`, `fields`: what a client asks, checked. `refusal`: why not.
//! - `worker`: the model's side, one request after the other. `answer`: what a client gets. `scoring`: all of that for scores.
//!
//! Invariants:
//! - `SERVE-1` Nothing that a client sends is kept without a limit: bytes of heads and bodies, connections, waiting requests,
//!   prompts, tokens, and time for sending a request.
//! - `SERVE-2` A client that reads slowly or has gone delays no other one: the model never waits for a client.
//! - `SERVE-3` Whoever can reach the server from another machine needs its key; without one, only requests that name a loopback
//!   address are answered.
//! - `SERVE-4` A connection without an accepted request, or whose client does not read, keeps nobody out.
//!
//! Deliberately absent: batching of requests, TLS (a proxy in front has it), and parsing of calls of functions: an answer has them
//! as the model writes them.

mod answer;
mod connections;
mod fields;
mod http;
mod refusal;
mod request;
mod scoring;
mod worker;

use self::http::{Front, Queue};
use self::request::Offer;
pub(crate) use self::worker::Templates;
use crate::api::generate::Generator;
use crate::api::sampling::Sampling;
use crate::api::scores::Scorer;
use crate::error::command::CommandError;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::sync::{Notify, Semaphore, mpsc};

/// What a server offers.
pub(crate) struct Settings {
    /// Name of the model.
    pub(crate) name: String,
    /// Settings of requests that have none.
    pub(crate) sampling: Sampling,
    pub(crate) templates: Templates,
    /// The key that requests need.
    pub(crate) key: Option<String>,
    /// Most waiting requests.
    pub(crate) queue_len: usize,
}

/// The model of a server.
pub(crate) enum Served<'a> {
    /// One that continues texts.
    Texts(&'a mut Generator),
    /// One that gives them scores.
    Scores(&'a mut Scorer),
}

impl Served<'_> {
    fn max_len(&self) -> usize {
        match self {
            Served::Texts(generator) => generator.max_len(),
            Served::Scores(scorer) => scorer.max_len(),
        }
    }
}

/// Tells a server to stop.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    is_stopping: AtomicBool,
    told: Arc<Notify>,
}

impl Stop {
    /// Ends answers under way, and then the server.
    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.told.notify_one();
    }
}

/// Serves requests until told to stop; the model is used on this thread.
///
/// # Errors
/// When the system has no more sockets or threads.
pub(crate) fn serve(
    model: Served<'_>,
    listener: TcpListener,
    settings: Settings,
    stop: &Stop,
) -> Result<(), CommandError> {
    let Settings { name, sampling, templates, key, queue_len } = settings;
    let offer = Offer { name, sampling, max_len: model.max_len() };
    let front = |queue| Front {
        offer,
        key: key.map(|key| blake3::hash(key.as_bytes())),
        queue,
        queue_len,
        room: Arc::new(Semaphore::new(http::room_for(queue_len))),
        n_requests: AtomicU64::new(1),
    };
    let told = Arc::clone(&stop.told);
    let start = |front| {
        let http = move || http::serve(listener, front, &told);
        std::thread::Builder::new().name("http".into()).spawn(http).map_err(CommandError::Serve)
    };
    let http = match model {
        Served::Texts(generator) => {
            let (queue, waiting) = mpsc::channel(queue_len);
            let http = start(front(Queue::Texts(queue)))?;
            worker::work(generator, &templates, waiting, &stop.is_stopping);
            http
        }
        Served::Scores(scorer) => {
            let (queue, waiting) = mpsc::channel(queue_len);
            let http = start(front(Queue::Scores(queue)))?;
            scoring::work(scorer, &templates, waiting, &stop.is_stopping);
            http
        }
    };
    match http.join() {
        Ok(ended) => ended.map_err(CommandError::Serve),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// A body as a completion, as a chat and as texts to score, for fuzzing: its number of prompts, of continuations of each, and of stop texts, or the
/// answer that refuses it.
#[cfg(feature = "fuzzing")]
pub(crate) fn read_requests(body: &[u8]) -> [Result<[usize; 3], serde_json::Value>; 3] {
    use self::request::Request;
    let offer = Offer { name: "m".into(), sampling: Sampling::GREEDY, max_len: 64 };
    let [completion, chat] = [Request::completion(body, &offer), Request::chat(body, &offer)].map(|read| match read {
        Ok(request) => Ok([request.prompts.len(), request.n, request.completion.stop.len()]),
        Err(refusal) => Err(refusal.json()),
    });
    let scores = match scoring::ScoreRequest::of(body, "m") {
        Ok(request) => Ok([request.texts.len(), 1, 0]),
        Err(refusal) => Err(refusal.json()),
    };
    [completion, chat, scores]
}

#[cfg(test)]
mod tests;
