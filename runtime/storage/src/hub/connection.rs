//! Requests to the Hub: with which token, which failures are repeated, and how long a server may be silent.

use std::time::Duration;

use reqwest::header::AUTHORIZATION;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use tokio::runtime::Builder;

use super::error::HubError;
use super::fetch::Hub;
use crate::certificates::UNTRUSTED;

/// Most repetitions of a request that failed for a passing reason, after 1, 2, 4, … seconds.
pub(super) const REPEATS: u32 = 5;

/// The longest time without a byte.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(60);

/// The longest time until a change is made, such as a commit of many files.
const ANSWER_MAX: Duration = Duration::from_secs(600);

/// A client of one Hub, and of the storage that the Hub names.
pub(super) struct Connection {
    client: Client,
    /// For uploads: without a limit to the time in which nothing is read, as it is the other side that reads.
    uploader: Client,
    endpoint: String,
    token: Option<String>,
    pause: Duration,
}

/// Why an attempt failed.
pub(super) enum Failure {
    /// It may succeed if it is repeated.
    Passing(HubError),
    Final(HubError),
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

impl Connection {
    /// Waits for what is done with a connection.
    pub(super) fn run<T>(hub: &Hub, work: impl AsyncFnOnce(Connection) -> Result<T, HubError>) -> Result<T, HubError> {
        // The HTTP client takes its cryptography from here; a second installation changes nothing.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| network(&hub.endpoint, error))?;
        runtime.block_on(async {
            let client = || {
                let client = Client::builder().connect_timeout(SILENCE_MAX / 2);
                client.user_agent(concat!("phalanx/", env!("CARGO_PKG_VERSION")))
            };
            let error = |error| network(&hub.endpoint, error);
            let uploader = client().build().map_err(error)?;
            let client = client().read_timeout(SILENCE_MAX).build().map_err(error)?;
            let (endpoint, token) = (hub.endpoint.clone(), hub.token.clone());
            work(Connection { client, uploader, endpoint, token, pause: hub.pause }).await
        })
    }

    /// A request for something of the Hub, with its token. The client drops the token when it follows a redirection to another host.
    pub(super) fn get(&self, url: &str) -> RequestBuilder {
        self.with_token(self.client.get(url))
    }

    /// A request to the Hub that changes something, with its token.
    pub(super) fn post(&self, url: &str) -> RequestBuilder {
        self.with_token(self.uploader.post(url).timeout(ANSWER_MAX))
    }

    /// The same to another server, which does not get the token.
    pub(super) fn post_elsewhere(&self, url: &str) -> RequestBuilder {
        self.uploader.post(url).timeout(ANSWER_MAX)
    }

    /// An upload to another server, which does not get the token.
    pub(super) fn put(&self, url: &str) -> RequestBuilder {
        self.uploader.put(url)
    }

    fn with_token(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.token {
            Some(token) => request.header(AUTHORIZATION, format!("Bearer {token}")),
            None => request,
        }
    }

    /// The answer, if it is one of success. `refused` is the error for a status that says that something is not there or not allowed.
    pub(super) async fn send(
        &self,
        request: RequestBuilder,
        refused: impl FnOnce(u16) -> HubError,
    ) -> Result<Response, Failure> {
        self.send_or(StatusCode::OK, request, refused).await
    }

    /// The same, and a further status is one of success.
    pub(super) async fn send_or(
        &self,
        further: StatusCode,
        request: RequestBuilder,
        refused: impl FnOnce(u16) -> HubError,
    ) -> Result<Response, Failure> {
        let response = request.send().await.map_err(|error| self.passing(error))?;
        let status = response.status();
        let of_status = || self.network(Status(status));
        match status {
            _ if status.is_success() || status == further => Ok(response),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND => {
                Err(refused(status.as_u16()).into())
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Err(Failure::Passing(of_status())),
            _ if status.is_server_error() => Err(Failure::Passing(of_status())),
            _ => Err(of_status().into()),
        }
    }

    /// The bytes of an answer.
    pub(super) async fn body(
        &self,
        mut response: Response,
        n_bytes_max: usize,
        too_large: impl FnOnce() -> HubError,
    ) -> Result<Vec<u8>, Failure> {
        let mut body = Vec::new();
        while let Some(bytes) = response.chunk().await.map_err(|error| self.passing(error))? {
            body.extend_from_slice(&bytes);
            if body.len() > n_bytes_max {
                return Err(too_large().into());
            }
        }
        Ok(body)
    }

    /// Repeats what fails for a passing reason.
    pub(super) async fn repeated<T>(
        &self,
        mut attempt: impl AsyncFnMut() -> Result<T, Failure>,
    ) -> Result<T, HubError> {
        let mut n = 0;
        loop {
            match attempt().await {
                Ok(found) => return Ok(found),
                Err(failure) => self.pause_or_fail(failure, &mut n).await?,
            }
        }
    }

    /// Waits before the next attempt.
    pub(super) async fn pause_or_fail(&self, failure: Failure, attempt: &mut u32) -> Result<(), HubError> {
        match failure {
            Failure::Passing(_) if *attempt < REPEATS => {
                tokio::time::sleep(self.pause * (1 << *attempt)).await;
                *attempt += 1;
                Ok(())
            }
            Failure::Passing(error) | Failure::Final(error) => Err(error),
        }
    }

    pub(super) fn passing(&self, error: reqwest::Error) -> Failure {
        let is_final = error.is_builder() || error.is_redirect();
        let error = self.network(error);
        if is_final || matches!(error, HubError::Untrusted { .. }) {
            Failure::Final(error)
        } else {
            Failure::Passing(error)
        }
    }

    pub(super) fn network(&self, error: impl std::error::Error) -> HubError {
        network(&self.endpoint, error)
    }

    /// The Hub's address.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }
}

fn network(endpoint: &str, error: impl std::error::Error) -> HubError {
    let mut reason = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        reason = cause.to_string();
        source = cause.source();
    }
    let endpoint = endpoint.to_owned();
    match reason.contains(UNTRUSTED) {
        true => HubError::Untrusted { endpoint, reason },
        false => HubError::Network { endpoint, reason },
    }
}

/// A status without a body of interest.
#[derive(Debug, thiserror::Error)]
#[error("it answers with status {0}")]
struct Status(StatusCode);
