//! Operator requests to a running job, and the answers.

use crate::coordinator::{Coordinator, DeclareGone, Drain, GetStatus, RequestError, Resize, Save, Stop};
use crate::wire::{Kind, Message};
use actix::{Addr, Handler, MailboxError};
use phalanx_strategies::elastic::coordinator::outlook::Outlook;
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
    /// Continue without a node, whose processes may not return.
    DeclareGone(NodeId),
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// Status of the job.
    Status(Box<Status>),
    /// The request is durable and is carried out.
    Done,
    /// The request was rejected, for this reason.
    Refused(String),
    /// The request is durable and will be carried out after what the text names.
    Later(String),
    /// The request is durable, but without effect unless something else changes, as the text says.
    NoEffect(String),
}

impl Answer {
    /// Whether the request is durable.
    pub fn is_durable(&self) -> bool {
        matches!(self, Answer::Done | Answer::Later(_) | Answer::NoEffect(_))
    }
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
        Request::DeclareGone(node) => ask(coordinator, DeclareGone(node)).await,
    };
    match done {
        Ok(Ok(Outlook::AtOnce)) => Answer::Done,
        Ok(Ok(Outlook::Later(text))) => Answer::Later(text),
        Ok(Ok(Outlook::NoEffect(text))) => Answer::NoEffect(text),
        Ok(Err(error)) => Answer::Refused(error.to_string()),
        Err(error) => Answer::Refused(error.to_string()),
    }
}

async fn ask<M>(coordinator: &Addr<Coordinator>, message: M) -> Result<Result<Outlook, RequestError>, MailboxError>
where
    M: actix::Message<Result = Result<Outlook, RequestError>> + Send + 'static,
    Coordinator: Handler<M>,
{
    coordinator.send(message).await
}
