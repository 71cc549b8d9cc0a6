//! The handle of a running job.

use crate::api::embed::feed::{Events, Feed};
use crate::control::{Control, RequestError};
use crate::error::JobError;
use crate::events::Report;
use phalanx_actors::operator::{Answer, Request};
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::mesh::Mesh;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;

/// How a job ended. All callers that wait for the job share the error.
pub type Outcome = Result<Report, Arc<JobError>>;

/// A handle of a running job. Clones refer to the same job. The job continues without handles, and
/// [`Runtime::jobs`](crate::api::embed::Runtime::jobs) returns a new one. No method needs a particular event loop.
#[derive(Clone, Debug)]
#[must_use = "the handle follows and stops the job; the job continues without it"]
pub struct RunningJob {
    pub(crate) output_dir: Arc<Path>,
    pub(crate) control: Arc<Control>,
    pub(crate) feed: Arc<Feed>,
    pub(crate) outcome: watch::Receiver<Option<Outcome>>,
    pub(crate) join: watch::Receiver<Option<String>>,
}

/// New sizes of some axes of a running job's mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Resize {
    /// Copies of the model; unchanged if absent.
    pub dp_replicate_size: Option<usize>,
    /// Ranks that share the state of one copy; unchanged if absent.
    pub dp_shard_size: Option<usize>,
    /// Ranks that share each matrix product; unchanged if absent.
    pub tensor_parallel_size: Option<usize>,
    /// Ranks that share one sequence; unchanged if absent.
    pub context_parallel_size: Option<usize>,
    /// Ranks that share the layers; unchanged if absent.
    pub pipeline_parallel_size: Option<usize>,
}

impl Resize {
    /// The mesh with these sizes; the other axes are those of `now`.
    pub fn of(self, now: Mesh) -> Mesh {
        Mesh {
            dp_replicate: self.dp_replicate_size.unwrap_or(now.dp_replicate),
            dp_shard: self.dp_shard_size.unwrap_or(now.dp_shard),
            tp: self.tensor_parallel_size.unwrap_or(now.tp),
            cp: self.context_parallel_size.unwrap_or(now.cp),
            pp: self.pipeline_parallel_size.unwrap_or(now.pp),
        }
    }
}

impl RunningJob {
    /// The output folder of the job.
    pub fn output_dir(&self) -> &Path {
        &self.output_dir
    }

    /// Events as they happen, from the oldest kept event to the end of the run. A slow reader blocks neither the run nor other
    /// readers: it misses events and gets their number.
    pub fn events(&self) -> Events {
        self.feed.events()
    }

    /// The join string for other machines, as in `phalanx node --join`; `None` if the job runs on this machine only.
    pub fn join_string(&self) -> Option<String> {
        self.join.borrow().clone()
    }

    /// Requests a stop after the current step and a checkpoint; [`RunningJob::wait`] returns at the end. A job that is still
    /// preparing its data ends before its first step.
    pub fn stop(&self) {
        self.control.stop();
    }

    /// Requests a checkpoint after the current step; [`Event::Saved`](crate::Event::Saved) follows when it is durable, or
    /// [`Event::NotSaved`](crate::Event::NotSaved) if it cannot be.
    ///
    /// # Errors
    /// When the job has no ranks yet, or has ended.
    pub async fn save(&self) -> Result<(), RequestError> {
        self.request(Request::Save).await
    }

    /// Requests another mesh. The state moves from memory to memory, and no step is lost or repeated. Training continues until
    /// the new world is ready; if it has too few ranks, [`Status::blocked`] gives the reason.
    ///
    /// # Errors
    /// As [`RunningJob::save`], and when the model cannot train on that mesh; then nothing changes.
    pub async fn resize(&self, change: Resize) -> Result<(), RequestError> {
        let mesh = change.of(self.status().await?.wanted);
        self.request(Request::Resize(mesh)).await
    }

    /// Requests that a node be released once other nodes have its state.
    ///
    /// # Errors
    /// As [`RunningJob::save`], and when the job does not have this node, or has no other.
    pub async fn drain(&self, node: NodeId) -> Result<(), RequestError> {
        let nodes = self.status().await?.nodes;
        if !nodes.iter().any(|other| other.node == node) {
            let all: Vec<String> = nodes.iter().map(|other| other.node.0.to_string()).collect();
            return Err(RequestError::Refused(format!("the job has no {node}; its nodes are {}", all.join(", "))));
        }
        self.request(Request::Drain(node)).await
    }

    /// The status of the job, as printed by `phalanx status --json`.
    ///
    /// # Errors
    /// When the job has no ranks yet, or has ended.
    pub async fn status(&self) -> Result<Box<Status>, RequestError> {
        match self.ask(Request::Status).await? {
            Answer::Status(status) => Ok(status),
            Answer::Refused(why) => Err(RequestError::Refused(why)),
            Answer::Done | Answer::Later(_) | Answer::NoEffect(_) => {
                Err(RequestError::Refused("the coordinator sent no status".into()))
            }
        }
    }

    /// Waits for the end of the job. [`Report::finished`] tells a completed job from one that was stopped and saved.
    ///
    /// # Errors
    /// The error that ended the job.
    pub async fn wait(&self) -> Outcome {
        let mut outcome = self.outcome.clone();
        let end = outcome.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
        end.unwrap_or_else(|| Err(Arc::new(JobError::JobFailed("its thread ended without a result".into()))))
    }

    /// How the job ended; `None` while it runs.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.borrow().clone()
    }

    async fn request(&self, request: Request) -> Result<(), RequestError> {
        match self.ask(request).await? {
            Answer::Refused(why) => Err(RequestError::Refused(why)),
            Answer::NoEffect(why) => Err(RequestError::NoEffect(why)),
            Answer::Done | Answer::Later(_) | Answer::Status(_) => Ok(()),
        }
    }

    async fn ask(&self, request: Request) -> Result<Answer, RequestError> {
        self.control.ask(request)?.await.map_err(|_| RequestError::Ended)
    }

    /// Whether the job runs in this folder.
    pub(crate) fn is_in(&self, output_dir: &Path) -> bool {
        self.outcome.borrow().is_none() && *self.output_dir == *output_dir
    }
}

/// The absolute path of a job's folder.
pub(crate) fn folder(output_dir: &Path) -> PathBuf {
    std::path::absolute(output_dir).unwrap_or_else(|_| output_dir.to_owned())
}
