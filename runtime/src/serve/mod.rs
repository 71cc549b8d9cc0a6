//! A trained model behind OpenAI's HTTP API: models, completions with likelihoods, and chats.
//!
//! - `http`: routes, keys, limits. `connections`: who keeps a connection when there are too many. `request`, `fields`: what a client asks, checked. `refusal`: why not.
//! - `worker`: the model's side, one request after the other. `answer`: what a client gets.
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
mod worker;

use self::http::Front;
use self::request::Offer;
pub(crate) use self::worker::Templates;
use crate::api::generate::Generator;
use crate::api::sampling::Sampling;
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
    generator: &mut Generator,
    listener: TcpListener,
    settings: Settings,
    stop: &Stop,
) -> Result<(), CommandError> {
    let Settings { name, sampling, templates, key, queue_len } = settings;
    let (queue, waiting) = mpsc::channel(queue_len);
    let front = Front {
        offer: Offer { name, sampling, max_len: generator.max_len() },
        key: key.map(|key| blake3::hash(key.as_bytes())),
        queue,
        queue_len,
        room: Arc::new(Semaphore::new(http::room_for(queue_len))),
        n_requests: AtomicU64::new(1),
    };
    let told = Arc::clone(&stop.told);
    let http = move || http::serve(listener, front, &told);
    let http = std::thread::Builder::new().name("http".into()).spawn(http).map_err(CommandError::Serve)?;
    worker::work(generator, &templates, waiting, &stop.is_stopping);
    match http.join() {
        Ok(ended) => ended.map_err(CommandError::Serve),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// A body as a completion and as a chat, for fuzzing: its number of prompts, of continuations of each, and of stop texts, or the
/// answer that refuses it.
#[cfg(feature = "fuzzing")]
pub(crate) fn read_requests(body: &[u8]) -> [Result<[usize; 3], serde_json::Value>; 2] {
    use self::request::Request;
    let offer = Offer { name: "m".into(), sampling: Sampling::GREEDY, max_len: 64 };
    [Request::completion(body, &offer), Request::chat(body, &offer)].map(|read| match read {
        Ok(request) => Ok([request.prompts.len(), request.n, request.completion.stop.len()]),
        Err(refusal) => Err(refusal.json()),
    })
}

#[cfg(test)]
mod tests;
