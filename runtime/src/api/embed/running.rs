//! A job that runs, as its host sees it.

use crate::api::embed::feed::{Events, Feed};
use crate::control::{AskError, Control};
use crate::error::JobError;
use crate::events::Report;
use phalanx_actors::operator::{Answer, Request};
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::mesh::Mesh;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;

/// How a job ended. The error is shared by all who wait for it.
pub type Outcome = Result<Report, Arc<JobError>>;

/// A job that runs. All clones are of the same job; without any it goes on, and [`Runtime::jobs`](crate::api::embed::Runtime::jobs)
/// still has it. None of its methods needs a particular event loop.
#[derive(Clone, Debug)]
#[must_use = "it is how the job is followed and stopped; the job goes on without it"]
pub struct RunningJob {
    pub(crate) output_dir: Arc<Path>,
    pub(crate) control: Arc<Control>,
    pub(crate) feed: Arc<Feed>,
    pub(crate) outcome: watch::Receiver<Option<Outcome>>,
    pub(crate) join: watch::Receiver<Option<String>>,
}

/// Another mesh for a job that runs: other sizes of some axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Resize {
    /// Copies of the model; as it is, if absent.
    pub dp_replicate_size: Option<usize>,
    /// Ranks that share the state of one copy; as it is, if absent.
    pub dp_shard_size: Option<usize>,
    /// Ranks that share each matrix product; as it is, if absent.
    pub tensor_parallel_size: Option<usize>,
    /// Ranks that share one sequence; as it is, if absent.
    pub context_parallel_size: Option<usize>,
    /// Ranks that share the layers; as it is, if absent.
    pub pipeline_parallel_size: Option<usize>,
}

impl Resize {
    /// The mesh that is wanted instead of this one.
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
    /// Where it writes.
    pub fn output_dir(&self) -> &Path {
        &self.output_dir
    }

    /// Events as they happen, to the end of the run; the first is the oldest that is kept. A slow reader holds up neither the
    /// run nor other readers: it misses events, and is told how many.
    pub fn events(&self) -> Events {
        self.feed.events()
    }

    /// With what other machines join, as in `phalanx node --join`; none if the job has this machine only.
    pub fn join_string(&self) -> Option<String> {
        self.join.borrow().clone()
    }

    /// Asks it to finish the step, save everything and end; [`RunningJob::wait`] says when it has. Whatever it is doing, this
    /// is heard: a job that is preparing its data ends before its first step.
    pub fn stop(&self) {
        self.control.stop();
    }

    /// Asks for a checkpoint after the step that runs; [`Event::Saved`](crate::Event::Saved) says when it is durable.
    ///
    /// # Errors
    /// When the job has no ranks yet, or has ended.
    pub async fn save(&self) -> Result<(), AskError> {
        self.request(Request::Save).await
    }

    /// Asks for another mesh. The state moves from memory to memory, and no step is lost or done twice. Steps go on until the new world is there; if ranks are lacking,
    /// [`Status::blocked`] says so.
    ///
    /// # Errors
    /// As [`RunningJob::save`], and when the model cannot be trained like that; then nothing has changed.
    pub async fn resize(&self, change: Resize) -> Result<(), AskError> {
        let mesh = change.of(self.status().await?.wanted);
        self.request(Request::Resize(mesh)).await
    }

    /// Asks to leave a node and release it once others have its state.
    ///
    /// # Errors
    /// As [`RunningJob::save`], and when the job has no such node, or no other.
    pub async fn drain(&self, node: NodeId) -> Result<(), AskError> {
        let nodes = self.status().await?.nodes;
        if !nodes.iter().any(|other| other.node == node) {
            let all: Vec<String> = nodes.iter().map(|other| other.node.0.to_string()).collect();
            return Err(AskError::Refused(format!("the job has no {node}; it has {}", all.join(", "))));
        }
        self.request(Request::Drain(node)).await
    }

    /// What it is doing: the value that `phalanx status --json` prints.
    ///
    /// # Errors
    /// When the job has no ranks yet, or has ended.
    pub async fn status(&self) -> Result<Box<Status>, AskError> {
        match self.ask(Request::Status).await? {
            Answer::Status(status) => Ok(status),
            Answer::Refused(why) => Err(AskError::Refused(why)),
            Answer::Done => Err(AskError::Refused("the coordinator sent no status".into())),
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// What it ended with.
    pub async fn wait(&self) -> Outcome {
        let mut outcome = self.outcome.clone();
        let end = outcome.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
        end.unwrap_or_else(|| Err(Arc::new(JobError::JobFailed("its thread ended without a word".into()))))
    }

    /// How it ended, if it has.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.borrow().clone()
    }

    async fn request(&self, request: Request) -> Result<(), AskError> {
        match self.ask(request).await? {
            Answer::Refused(why) => Err(AskError::Refused(why)),
            Answer::Done | Answer::Status(_) => Ok(()),
        }
    }

    async fn ask(&self, request: Request) -> Result<Answer, AskError> {
        self.control.ask(request)?.await.map_err(|_| AskError::Ended)
    }

    /// Whether it writes there.
    pub(crate) fn is_in(&self, output_dir: &Path) -> bool {
        self.outcome.borrow().is_none() && *self.output_dir == *output_dir
    }
}

/// The folder of a job as one value, however it was written.
pub(crate) fn folder(output_dir: &Path) -> PathBuf {
    std::path::absolute(output_dir).unwrap_or_else(|_| output_dir.to_owned())
}
