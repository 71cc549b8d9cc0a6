//! What an operator asks of a running job, and the answers.

use crate::coordinator::{Coordinator, Drain, GetStatus, RequestError, Resize, Save, Stop};
use crate::wire::{Kind, Message};
use actix::{Addr, Handler, MailboxError};
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::mesh::Mesh;
use serde::{Deserialize, Serialize};

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// What the job is doing.
    Status,
    /// To leave and release a node.
    Drain(NodeId),
    /// For another mesh.
    Resize(Mesh),
    /// For a checkpoint.
    Save,
    /// To end after a step, with a checkpoint.
    Stop,
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// What the job is doing.
    Status(Box<Status>),
    /// It is durable and will be done.
    Done,
    /// It has no effect, and why.
    Refused(String),
}

impl Message for Request {
    const KIND: Kind = Kind::Request;
}

impl Message for Answer {
    const KIND: Kind = Kind::Answer;
}

/// Passes a request on to a coordinator.
pub(crate) async fn answer(coordinator: &Addr<Coordinator>, request: Request) -> Answer {
    let done = match request {
        Request::Status => {
            return match coordinator.send(GetStatus).await {
                Ok(Ok(status)) => Answer::Status(Box::new(status)),
                Ok(Err(error)) => Answer::Refused(error.to_string()),
                Err(error) => Answer::Refused(error.to_string()),
            };
        }
        Request::Drain(node) => ask(coordinator, Drain(node)).await,
        Request::Resize(mesh) => ask(coordinator, Resize(mesh)).await,
        Request::Save => ask(coordinator, Save).await,
        Request::Stop => ask(coordinator, Stop).await,
    };
    match done {
        Ok(Ok(())) => Answer::Done,
        Ok(Err(error)) => Answer::Refused(error.to_string()),
        Err(error) => Answer::Refused(error.to_string()),
    }
}

async fn ask<M>(coordinator: &Addr<Coordinator>, message: M) -> Result<Result<(), RequestError>, MailboxError>
where
    M: actix::Message<Result = Result<(), RequestError>> + Send + 'static,
    Coordinator: Handler<M>,
{
    coordinator.send(message).await
}
