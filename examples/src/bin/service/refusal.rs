//! The reason for refusing a request, as an HTTP status and one sentence.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use phalanx::{JobError, RequestError};
use std::sync::Arc;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("`{0}` is not the name of a YAML file of this service")]
    NotAConfig(String),
    #[error("there is no job {0}")]
    NoSuchJob(u64),
    #[error("{0} jobs are running, the maximum; stop one or wait until one ends")]
    Busy(usize),
    #[error(transparent)]
    Job(#[from] Arc<JobError>),
    #[error(transparent)]
    Ask(#[from] RequestError),
    #[error("the request failed: {0}")]
    Panicked(String),
}

impl Refusal {
    pub(crate) fn panicked(error: tokio::task::JoinError) -> Refusal {
        Refusal::Panicked(error.to_string())
    }

    fn status(&self) -> StatusCode {
        match self {
            Refusal::NotAConfig(_) => StatusCode::BAD_REQUEST,
            Refusal::NoSuchJob(_) => StatusCode::NOT_FOUND,
            Refusal::Busy(_) | Refusal::Ask(RequestError::Busy(_)) => StatusCode::TOO_MANY_REQUESTS,
            Refusal::Job(error) if matches!(**error, JobError::InUse { .. }) => StatusCode::CONFLICT,
            Refusal::Job(error) if error.is_input() => StatusCode::UNPROCESSABLE_ENTITY,
            Refusal::Ask(RequestError::NotYet | RequestError::Ended | RequestError::NoEffect(_)) => {
                StatusCode::CONFLICT
            }
            Refusal::Ask(RequestError::Refused(_)) => StatusCode::UNPROCESSABLE_ENTITY,
            Refusal::Job(_) | Refusal::Panicked(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl From<JobError> for Refusal {
    fn from(error: JobError) -> Refusal {
        Refusal::Job(Arc::new(error))
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status(), Json(serde_json::json!({ "error": self.to_string() }))).into_response()
    }
}
