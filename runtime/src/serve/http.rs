//! The HTTP side: connections, routes, keys, and limits of everything that a client can send.

use super::answer::{Events, Gathered, Header, Shape};
use super::connections::{Activity, Answering, Connections, Place, Watched};
use super::refusal::Refusal;
use super::request::{Offer, Request};
use super::scoring::{ScoreRequest, ScoreWork};
use super::worker::{Part, Work};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::{IpAddr, TcpListener};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpStream;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::task::JoinSet;

/// Most bytes of a request's body.
const BODY_BYTES_MAX: usize = 2 << 20;
/// Most bytes of a request's head.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Most open connections; see [`Connections`] for what happens to further ones.
const CONNECTIONS_MAX: usize = 128;
/// How long a client may take for the head of a request, and a connection may have no request.
const HEAD_PATIENCE: Duration = Duration::from_secs(10);
/// Answers that may wait in memory for clients that read slowly, besides those of waiting requests.
const UNREAD_MAX: usize = 8;
/// How long a client may take for the body of a request.
const BODY_PATIENCE: Duration = Duration::from_secs(30);
/// How long answers under way may take after the server was told to stop.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// Where requests wait for the model, and which ones it answers.
pub(super) enum Queue {
    Texts(Sender<Work>),
    Scores(Sender<ScoreWork>),
}

/// What all connections share.
pub(super) struct Front {
    pub(super) offer: Offer,
    /// Hash of the key that requests need, if they need one.
    pub(super) key: Option<blake3::Hash>,
    pub(super) queue: Queue,
    /// Most waiting requests.
    pub(super) queue_len: usize,
    /// Room for answers that are not read yet.
    pub(super) room: Arc<Semaphore>,
    pub(super) n_requests: AtomicU64,
}

/// Room for answers that wait in memory.
pub(super) const fn room_for(queue_len: usize) -> usize {
    queue_len + 1 + UNREAD_MAX
}

/// Serves connections until told to stop, then waits for answers under way, but not for long.
///
/// # Errors
/// When the system has no more sockets or threads.
pub(super) fn serve(listener: TcpListener, front: Front, stop: &Arc<Notify>) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (front, connections) = (Arc::new(front), Arc::new(Connections::default()));
        let mut tasks = JoinSet::new();
        let mut stopped = pin!(stop.notified());
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                Some(_) = tasks.join_next() => continue,
                () = &mut stopped => break,
            };
            match accepted {
                Ok((stream, peer)) => {
                    // Without a place, the connection is closed: all others have answers under way.
                    let Some(place) = connections.enter(peer.ip(), CONNECTIONS_MAX) else { continue };
                    let number = place.number();
                    let task = tasks.spawn(connection(stream, Arc::clone(&front), place));
                    Place::ends_with(&connections, number, task);
                }
                // A connection that ended before it was accepted, or too few file descriptors for now.
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        drop((listener, front));
        let all_ended = async { while tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(END_PATIENCE, all_ended).await;
        Ok(())
    })
}

async fn connection(stream: TcpStream, front: Arc<Front>, place: Place) {
    let activity = Arc::clone(place.activity());
    let stream = Watched::new(stream, Arc::clone(&activity));
    let answer = hyper::service::service_fn(|request| {
        let (front, activity) = (Arc::clone(&front), Arc::clone(&activity));
        async move { Ok::<_, Infallible>(front.answer(request, &activity).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), answer)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection ended early");
    }
    drop(place);
}

/// The body of an answer.
pub(super) enum Content {
    /// The second one is dropped with the answer.
    Whole(Option<Bytes>, Option<Answering>),
    /// Server-sent events, made from the parts as they come, after `head`.
    Stream {
        head: String,
        parts: Receiver<Part>,
        events: Events,
        is_done: bool,
        /// Dropped with the answer.
        _answering: Answering,
    },
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Content::Whole(bytes, _) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Stream { head, .. } if !head.is_empty() => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(head).into()))))
            }
            Content::Stream { is_done: true, .. } => Poll::Ready(None),
            Content::Stream { parts, events, is_done, .. } => loop {
                let part = match parts.poll_recv(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(part) => part.unwrap_or_else(|| Part::Refused(Refusal::stopping())),
                };
                *is_done = matches!(part, Part::Refused(_) | Part::Done { .. });
                let text = events.of(part);
                if !text.is_empty() {
                    return Poll::Ready(Some(Ok(Frame::data(text.into()))));
                }
            },
        }
    }
}

impl Front {
    async fn answer(&self, request: hyper::Request<Incoming>, activity: &Arc<Activity>) -> Response<Content> {
        match self.route(request, activity).await {
            Ok(answer) => answer,
            Err(refusal) => {
                let mut answer = of_json(&refusal.json());
                *answer.status_mut() = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::BAD_REQUEST);
                if refusal.status == 429 {
                    answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
                }
                answer
            }
        }
    }

    async fn route(
        &self,
        request: hyper::Request<Incoming>,
        activity: &Arc<Activity>,
    ) -> Result<Response<Content>, Refusal> {
        self.authorise(request.headers(), request.uri().host())?;
        let path = request.uri().path().to_owned();
        let wanted = match path.as_str() {
            "/v1/completions" | "/v1/chat/completions" | CLASSIFY => Method::POST,
            "/v1/models" | "/health" => Method::GET,
            path if path.starts_with("/v1/models/") => Method::GET,
            _ => {
                let path: String = path.chars().take(80).collect();
                return Err(Refusal::of_path(
                    404,
                    format!("there is no {path}; see /v1/models, /v1/completions, /v1/chat/completions and {CLASSIFY}"),
                ));
            }
        };
        // Probes ask with HEAD; the server leaves the content out.
        let is_probe = wanted == Method::GET && *request.method() == Method::HEAD;
        if *request.method() != wanted && !is_probe {
            return Err(Refusal::of_path(405, format!("{path} takes {wanted} only")));
        }
        match path.as_str() {
            "/health" => Ok(of_json(&json!({"status": "ok"}))),
            "/v1/models" => Ok(of_json(&json!({"object": "list", "data": [self.model()]}))),
            "/v1/completions" => self.complete(request, Shape::Completion, activity).await,
            "/v1/chat/completions" => self.complete(request, Shape::Chat, activity).await,
            CLASSIFY => self.classify(request, activity).await,
            path => {
                let given = path.strip_prefix("/v1/models/").unwrap_or_default();
                // Clients write the slashes of a name as %2F.
                let name = percent_decoded(given);
                match [given.as_bytes(), &name].contains(&self.offer.name.as_bytes()) {
                    true => Ok(of_json(&self.model())),
                    false => Err(Refusal::unknown_model(&String::from_utf8_lossy(&name), &self.offer.name)),
                }
            }
        }
    }

    /// Without a key, a page of another site in a browser of this machine could use the server: it can send no JSON without
    /// asking, and its name for this machine is another one.
    fn authorise(&self, headers: &HeaderMap, host_of_target: Option<&str>) -> Result<(), Refusal> {
        let Some(key) = &self.key else {
            return match names_this_machine(headers, host_of_target) {
                true => Ok(()),
                false => Err(Refusal::foreign_host()),
            };
        };
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        // Hashes are compared in constant time.
        match given.is_some_and(|given| blake3::hash(given.trim_ascii()) == *key) {
            true => Ok(()),
            false => Err(Refusal::unauthorised()),
        }
    }

    fn model(&self) -> Value {
        let Offer { name, max_len, .. } = &self.offer;
        json!({"id": name, "object": "model", "created": 0, "owned_by": "phalanx", "max_model_len": max_len})
    }

    async fn complete(
        &self,
        request: hyper::Request<Incoming>,
        shape: Shape,
        activity: &Arc<Activity>,
    ) -> Result<Response<Content>, Refusal> {
        let Queue::Texts(queue) = &self.queue else {
            return Err(Refusal::other_task("this model gives scores and no texts; ask /classify for scores"));
        };
        let body = json_body(request).await?;
        let request = match shape {
            Shape::Completion => Request::completion(&body, &self.offer)?,
            Shape::Chat => Request::chat(&body, &self.offer)?,
        };
        drop(body);
        let header = self.header(shape);
        let (answer, mut parts) = channel(self.n_parts_max(&request));
        let answering = self.enqueue(queue, Work { request: request.clone(), answer }, activity)?;
        if request.stream {
            let first = parts.recv().await.ok_or_else(Refusal::stopping)?;
            if let Part::Refused(refusal) = first {
                return Err(refusal);
            }
            return Ok(streamed(parts, Events::new(header, &request), first, answering));
        }
        let mut gathered = Gathered::new(header, &request);
        loop {
            let part = parts.recv().await.ok_or_else(Refusal::stopping)?;
            if let Some(whole) = gathered.take(part) {
                return Ok(whole_answer(&whole?, answering));
            }
        }
    }

    async fn classify(
        &self,
        request: hyper::Request<Incoming>,
        activity: &Arc<Activity>,
    ) -> Result<Response<Content>, Refusal> {
        let Queue::Scores(queue) = &self.queue else {
            return Err(Refusal::other_task(
                "this model gives texts and no scores; serve a model that was trained with `reward_model: true`",
            ));
        };
        let request = ScoreRequest::of(&json_body(request).await?, &self.offer.name)?;
        let (answer, scores) = oneshot::channel();
        let answering = self.enqueue(queue, ScoreWork { request, answer }, activity)?;
        let scores = scores.await.map_err(|_| Refusal::stopping())??;
        let (created, id) = self.stamp("classify");
        Ok(whole_answer(&scores.json(&id, created, &self.offer.name), answering))
    }

    /// Hands a request over to the model, if there is room for it and for its answer.
    fn enqueue<T>(&self, queue: &Sender<T>, work: T, activity: &Arc<Activity>) -> Result<Answering, Refusal> {
        let room = Arc::clone(&self.room).try_acquire_owned().map_err(|_| Refusal::busy(self.queue_len))?;
        queue.try_send(work).map_err(|error| match error {
            TrySendError::Full(_) => Refusal::busy(self.queue_len),
            TrySendError::Closed(_) => Refusal::stopping(),
        })?;
        Ok(activity.answering(room))
    }

    /// The answer waits in memory if its client reads slowly: every part has a place, and there are few tokens in all.
    fn n_parts_max(&self, request: &Request) -> usize {
        let of_choice = request.completion.max_new.min(self.offer.max_len) + 4;
        2 + request.n_choices() * of_choice
    }

    fn header(&self, shape: Shape) -> Header {
        let (created, id) = self.stamp(if shape == Shape::Chat { "chatcmpl" } else { "cmpl" });
        Header { shape, id, created, model: self.offer.name.clone() }
    }

    /// The time, and a name for the next answer.
    fn stamp(&self, prefix: &str) -> (u64, String) {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let number = self.n_requests.fetch_add(1, Ordering::Relaxed);
        (created, format!("{prefix}-{created:x}-{number:x}"))
    }
}

/// The path of scores, which is vLLM's.
const CLASSIFY: &str = "/classify";

/// The body of a request that says that it is JSON.
async fn json_body(request: hyper::Request<Incoming>) -> Result<Bytes, Refusal> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
        return Err(Refusal::of_body(415, "the request needs the header `Content-Type: application/json`"));
    }
    body(request.into_body()).await
}

/// The body of a request, within its limits.
async fn body(body: Incoming) -> Result<Bytes, Refusal> {
    let collected = tokio::time::timeout(BODY_PATIENCE, Limited::new(body, BODY_BYTES_MAX).collect());
    match collected.await {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(Refusal::of_body(413, format!("the body has more than {BODY_BYTES_MAX} bytes, the most that are read")))
        }
        Ok(Err(error)) => Err(Refusal::of_body(400, format!("the body cannot be read: {error}"))),
        Err(_) => Err(Refusal::of_body(408, format!("the body did not come within {} s", BODY_PATIENCE.as_secs()))),
    }
}

fn of_json(value: &Value) -> Response<Content> {
    let mut answer = Response::new(Content::Whole(Some(value.to_string().into()), None));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// An answer that is complete.
fn whole_answer(value: &Value, answering: Answering) -> Response<Content> {
    let mut answer = of_json(value);
    if let Content::Whole(_, to_drop) = answer.body_mut() {
        *to_drop = Some(answering);
    }
    answer
}

/// A stream whose first part has come already.
fn streamed(parts: Receiver<Part>, mut events: Events, first: Part, answering: Answering) -> Response<Content> {
    let head = events.of(first);
    let mut answer = Response::new(Content::Stream { head, parts, events, is_done: false, _answering: answering });
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

/// The bytes of a path, in which `%2F` stands for a slash.
fn percent_decoded(path: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(path.len()), path.as_bytes());
    while let [first, after @ ..] = rest {
        let digit = |at: usize| after.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((16 * high + low) as u8);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

/// Whether a request is for this machine by all the names that it gives: no name can be hidden behind another one, or behind bytes
/// that are no text.
fn names_this_machine(headers: &HeaderMap, host_of_target: Option<&str>) -> bool {
    let hosts = || headers.get_all(header::HOST).iter();
    let is_one = hosts().count() <= 1;
    is_one && hosts().all(|host| host.to_str().is_ok_and(is_loopback)) && host_of_target.is_none_or(is_loopback)
}

/// Whether the value of a `Host` header names this machine for itself.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    // SERVE-3
    #[test]
    fn request_with_several_names_or_one_that_is_no_text_is_not_for_this_machine() {
        let named = |hosts: &[&[u8]], target: Option<&str>| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(header::HOST, HeaderValue::from_bytes(host).unwrap());
            }
            names_this_machine(&headers, target)
        };

        assert!(named(&[b"localhost:8000"], None) && named(&[], None) && named(&[b"[::1]"], Some("127.0.0.1")));
        for hosts in [&[&b"localhost"[..], b"evil.example"][..], &[b"localhost", b"localhost"], &[b"evil\xe9.example"]]
        {
            assert!(!named(hosts, None), "{hosts:?}");
        }
        assert!(!named(&[b"localhost"], Some("evil.example")));
    }

    #[test]
    fn escaped_characters_of_a_path_are_read() {
        for (path, name) in [("out%2Fmodel", "out/model"), ("a%2", "a%2"), ("%c3%A9%", "é%"), ("%zz", "%zz"), ("", "")]
        {
            assert_eq!(percent_decoded(path), name.as_bytes(), "{path}");
        }
    }

    // SERVE-3
    #[test]
    fn names_of_other_machines_are_no_loopback_addresses() {
        for host in ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::1]"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.example:8000", "10.0.0.1:8000", "127.0.0.1.evil.example", "[::2]:80", ""]
        {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
