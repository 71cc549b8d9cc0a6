//! Patience with an object store: which failures pass, and for how long a request is repeated until they do.
//!
//! Vendors' clients repeat some requests, but not one that creates an object and whose answer was lost, because only the caller
//! can tell whether the object that it then finds is its own, and not one that was refused for expired credentials.

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use crate::certificates::{UNTRUSTED, with_causes};
use object_store::Error;
use tokio::time::{Instant, sleep};

/// What a failed request calls for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The store has answered; the same request gets the same answer.
    Answer,
    /// The store refuses the credentials. New ones may be in place since they were read.
    Credentials,
    /// The store is busy, silent or out of reach.
    Temporary,
}

/// Codes of S3 for credentials that were valid once. Some of them come with status 400.
const EXPIRED: [&str; 4] = ["ExpiredToken", "TokenRefreshRequired", "InvalidToken", "RequestTimeTooSkewed"];
/// Answers of a store that has no time for the request, unlike other answers with status 4xx.
const BUSY: [&str; 2] = ["status code: 408", "status code: 429"];
/// Clients refuse to make the request, or to trust the server.
const UNUSABLE: [&str; 2] = ["builder error", UNTRUSTED];
/// Machines ask this address for the credentials of their role. It answers at once or never.
const METADATA_SERVICE: &str = "169.254.169.254";

impl Failure {
    pub(super) fn of(error: &Error) -> Failure {
        match error {
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Failure::Credentials,
            Error::Generic { source, .. } => Failure::of_text(&with_causes(&**source)),
            Error::JoinError { .. } => Failure::Temporary,
            _ => Failure::Answer,
        }
    }

    /// Clients keep the status of an answer in the text of their errors only.
    pub(super) fn of_text(text: &str) -> Failure {
        let has = |signs: &[&str]| signs.iter().any(|sign| text.contains(sign));
        if has(&EXPIRED) || has(&[METADATA_SERVICE]) {
            Failure::Credentials
        } else if has(&["status code: 4", "redirect"]) && !has(&BUSY) || has(&UNUSABLE) {
            Failure::Answer
        } else {
            Failure::Temporary
        }
    }
}

/// For how long requests are repeated, and the pauses between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Patience {
    /// No request begins later than this after the first.
    pub(super) total: Duration,
    /// The first pause; each further one is twice as long, up to `pause_max`.
    pub(super) pause_min: Duration,
    /// The longest pause.
    pub(super) pause_max: Duration,
}

impl Patience {
    /// Object stores ask for growing pauses when they are busy; outages of tens of seconds are common.
    pub(super) const STORE: Patience = Patience {
        total: Duration::from_secs(60),
        pause_min: Duration::from_millis(100),
        pause_max: Duration::from_secs(5),
    };
    /// Requests are not repeated.
    pub(super) const NONE: Patience =
        Patience { total: Duration::ZERO, pause_min: Duration::ZERO, pause_max: Duration::ZERO };

    /// Repeats a request while its failure is temporary, and once more with new credentials when the store refuses them.
    pub(super) async fn repeat<T, R: Future<Output = object_store::Result<T>>>(
        self,
        mut request: impl FnMut() -> R,
        mut renew_credentials: impl FnMut(),
    ) -> object_store::Result<T> {
        let begin = Instant::now();
        let (mut pause, mut is_renewed) = (self.pause_min, self == Patience::NONE);
        loop {
            let error = match request().await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            match Failure::of(&error) {
                Failure::Credentials if !is_renewed => {
                    tracing::info!(%error, "the object store refuses the credentials; reading them again");
                    is_renewed = true;
                    renew_credentials();
                }
                Failure::Temporary if begin.elapsed() + pause < self.total => {
                    tracing::info!(%error, "the object store does not answer; repeating the request");
                    sleep(jittered(pause)).await;
                    pause = (2 * pause).min(self.pause_max);
                }
                Failure::Answer | Failure::Credentials | Failure::Temporary => return Err(error),
            }
        }
    }
}

/// Between half of a pause and all of it, so that the ranks of a job do not return to a busy store at the same moments.
fn jittered(pause: Duration) -> Duration {
    // The standard library seeds each hasher at random.
    let share = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
    pause.mul_f64(0.5 + share / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience {
        total: Duration::from_millis(300),
        pause_min: Duration::from_millis(1),
        pause_max: Duration::from_millis(8),
    };

    fn generic(text: &str) -> Error {
        Error::Generic { store: "S3", source: text.into() }
    }

    fn denied() -> Error {
        Error::PermissionDenied { path: "a".into(), source: "403".into() }
    }

    /// Runs requests with these outcomes, and then forever with the last one; returns the result and the numbers of requests and
    /// of renewals.
    fn repeated(
        patience: Patience,
        outcomes: &[fn() -> object_store::Result<u8>],
    ) -> (object_store::Result<u8>, usize, usize) {
        let (mut n_requests, mut n_renewals) = (0, 0);
        let request = || {
            n_requests += 1;
            std::future::ready(outcomes[(n_requests - 1).min(outcomes.len() - 1)]())
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let result = runtime.block_on(patience.repeat(request, || n_renewals += 1));
        (result, n_requests, n_renewals)
    }

    #[test]
    fn busy_or_silent_store_is_asked_again_until_it_answers() {
        let busy: fn() -> object_store::Result<u8> =
            || Err(generic("Server returned non-2xx status code: 503 Service Unavailable: SlowDown"));

        let (result, n_requests, n_renewals) =
            repeated(PATIENCE, &[busy, || Err(generic("operation timed out")), || Ok(7)]);

        assert_eq!((result.unwrap(), n_requests, n_renewals), (7, 3, 0));
    }

    #[test]
    fn patience_ends_with_the_error_of_the_last_request() {
        let begin = std::time::Instant::now();

        let (result, n_requests, _) = repeated(PATIENCE, &[|| Err(generic("connection refused"))]);

        assert!(result.unwrap_err().to_string().contains("connection refused"));
        assert!(n_requests > 2, "{n_requests} requests");
        assert!(begin.elapsed() >= PATIENCE.total / 2, "{:?}", begin.elapsed());
    }

    #[test]
    fn refused_credentials_are_read_again_once() {
        let (renewed, n_requests, n_renewals) = repeated(PATIENCE, &[|| Err(denied()), || Ok(1)]);
        assert_eq!((renewed.unwrap(), n_requests, n_renewals), (1, 2, 1));

        let (refused, n_requests, n_renewals) = repeated(PATIENCE, &[|| Err(denied())]);
        assert!(matches!(refused, Err(Error::PermissionDenied { .. })));
        assert_eq!((n_requests, n_renewals), (2, 1));
    }

    #[test]
    fn answers_are_told_from_outages_and_expired_credentials() {
        let status = |text: &str| Failure::of(&generic(&format!("Server returned non-2xx status code: {text}")));

        assert_eq!(status("500 Internal Server Error: "), Failure::Temporary);
        assert_eq!(status("429 Too Many Requests: "), Failure::Temporary);
        assert_eq!(status("400 Bad Request: <Code>InvalidBucketName</Code>"), Failure::Answer);
        assert_eq!(status("400 Bad Request: <Code>ExpiredToken</Code>"), Failure::Credentials);
        assert_eq!(Failure::of(&denied()), Failure::Credentials);
        assert_eq!(
            Failure::of(&generic("error sending request for http://169.254.169.254/latest")),
            Failure::Credentials
        );
        assert_eq!(Failure::of(&generic("HTTP error: builder error")), Failure::Answer);
        let untrusted = std::io::Error::other(std::io::Error::other("invalid peer certificate: UnknownIssuer"));
        assert_eq!(Failure::of(&Error::Generic { store: "S3", source: untrusted.into() }), Failure::Answer);
        let absent = Error::NotFound { path: "a".into(), source: "404".into() };
        assert_eq!(Failure::of(&absent), Failure::Answer);
    }

    #[test]
    fn request_without_patience_is_made_once() {
        assert_eq!(repeated(Patience::NONE, &[|| Err(denied())]).1, 1);
        assert_eq!(repeated(Patience::NONE, &[|| Err(generic("operation timed out"))]).1, 1);
    }
}
