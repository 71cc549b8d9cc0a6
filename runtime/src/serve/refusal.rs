//! Why a request is refused, as OpenAI's clients expect it: a status and a JSON object.

use crate::error::JobError;
use crate::error::generate::GenerateError;
use serde_json::{Value, json};

/// A refused request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// HTTP status.
    pub(super) status: u16,
    /// OpenAI's class of the error.
    kind: &'static str,
    /// OpenAI's name of the error, if it has one.
    code: Option<&'static str>,
    /// The field of the request that is at fault.
    param: Option<String>,
    message: String,
}

impl Refusal {
    fn new(status: u16, kind: &'static str, message: String) -> Refusal {
        Refusal { status, kind, code: None, param: None, message }
    }

    /// A field of the request is at fault.
    pub(super) fn of_field(field: &str, message: impl Into<String>) -> Refusal {
        let param = Some(field.to_owned());
        Refusal { param, ..Refusal::new(400, "invalid_request_error", message.into()) }
    }

    /// The text has more tokens than the server takes.
    pub(super) fn too_long(field: &str, message: String) -> Refusal {
        Refusal { code: Some("context_length_exceeded"), ..Refusal::of_field(field, message) }
    }

    /// The body as a whole is at fault.
    pub(super) fn of_body(status: u16, message: impl Into<String>) -> Refusal {
        Refusal::new(status, "invalid_request_error", message.into())
    }

    /// There is no such path, or not with this method.
    pub(super) fn of_path(status: u16, message: String) -> Refusal {
        Refusal::new(status, "invalid_request_error", message)
    }

    /// Scores are asked for, but the model gives texts, or the other way round.
    pub(super) fn other_task(message: &'static str) -> Refusal {
        Refusal::of_path(400, message.into())
    }

    /// The server has another model.
    pub(super) fn unknown_model(found: &str, name: &str) -> Refusal {
        let found: String = found.chars().take(80).collect();
        let message = format!("there is no model {found:?}; this server has {name:?}");
        let refusal = Refusal::of_field("model", message);
        Refusal { status: 404, code: Some("model_not_found"), ..refusal }
    }

    /// The key is missing or wrong.
    pub(super) fn unauthorised() -> Refusal {
        let message = "this server needs its API key in the header `Authorization: Bearer KEY`".into();
        Refusal { code: Some("invalid_api_key"), ..Refusal::new(401, "authentication_error", message) }
    }

    /// The request may come from a web page of another site.
    pub(super) fn foreign_host() -> Refusal {
        let message = "without an API key, this server answers only requests to localhost or a loopback address";
        Refusal::new(403, "permission_error", message.into())
    }

    /// As many requests wait as may wait.
    pub(super) fn busy(n_waiting: usize) -> Refusal {
        let message = format!("{n_waiting} requests wait already; try again later");
        Refusal { code: Some("rate_limit_exceeded"), ..Refusal::new(429, "rate_limit_error", message) }
    }

    /// The server ends.
    pub(super) fn stopping() -> Refusal {
        Refusal::new(503, "server_error", "the server is stopping".into())
    }

    /// The model cannot answer, for a reason that `field` may have.
    pub(super) fn of_job(error: &JobError, field: &str) -> Refusal {
        match error {
            JobError::Generate(GenerateError::Sampling { name, .. }) => Refusal::of_field(name, error.to_string()),
            JobError::Generate(_) | JobError::Tokenizer(_) => Refusal::of_field(field, error.to_string()),
            error => {
                tracing::error!(%error, "a request failed");
                Refusal::new(500, "server_error", format!("the model failed: {error}"))
            }
        }
    }

    /// The body of the answer.
    pub(super) fn json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}
