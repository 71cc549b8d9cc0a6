//! Operator requests to a running job, and the answers.

use crate::coordinator::{Coordinator, Drain, GetStatus, RequestError, Resize, Save, Stop};
use crate::wire::{Kind, Message};
use actix::{Addr, Handler, MailboxError};
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::mesh::Mesh;
use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Status of the job.
    Status,
    /// Drain and release a node.
    Drain(NodeId),
    /// Change the mesh.
    Resize(Mesh),
    /// Write a checkpoint.
    Save,
    /// Stop after the current step, with a checkpoint.
    Stop,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// Status of the job.
    Status(Box<Status>),
    /// The request is durable and will be carried out.
    Done,
    /// The request was rejected, for this reason.
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
