//! Messages between a node and its rank processes, as frames of their channels.

use crate::events::{Event, Report};
use crate::launch::channel::FrameSender;
use crate::rank::failure_report::FailureReport;
use crate::train::inputs::RunInputs;
use phalanx_actors::wire::{self, WireError};
use phalanx_strategies::elastic::identity::{JobId, Worker};
use phalanx_strategies::elastic::message::{DesiredState, MemberReport};
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;

/// From a node to a rank process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToRank {
    /// Identity and configuration; the first message, sent once.
    Begin(Box<Begin>),
    /// A desired state from the coordinator.
    DesiredState(DesiredState),
}

/// Identity and configuration of a rank process.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) job: JobId,
    pub(crate) worker: Worker,
    pub(crate) n_threads: usize,
    /// The whole configuration, with overrides applied.
    pub(crate) yaml: String,
    /// Address on which the rank listens for ranks of other nodes, if any.
    pub(crate) listen: Option<IpAddr>,
    /// Shared secret of all ranks of the job.
    pub(crate) secret: Vec<u8>,
    /// Measured peak of the machine, FLOP/s per rank.
    pub(crate) peak_flops: f64,
    /// Step and folder of the checkpoint from which the job starts, if it is in another folder.
    pub(crate) start_from: Option<(u64, PathBuf)>,
    /// The token of the job's claim on the place of its checkpoints, if it has one.
    pub(crate) claim: Option<u64>,
    /// The rank that this process will probably get: that of its predecessor.
    pub(crate) assignment: (Mesh, usize),
    /// Size of the arena for that rank, in bytes.
    pub(crate) arena_bytes: u64,
    /// Whether an earlier process of the node has served this job, so that input and machine are good.
    pub(crate) is_successor: bool,
    /// Heartbeat interval and detection times.
    pub(crate) timing: Timing,
    /// Digest of the model, if it is user-defined.
    pub(crate) user_model: Option<String>,
    /// What the job trains on and with, which the node has found: a rank that replaces another must not read the base model
    /// for that.
    pub(crate) inputs: RunInputs,
}

impl std::fmt::Debug for Begin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Begin").field("job", &self.job).field("worker", &self.worker).finish_non_exhaustive()
    }
}

/// From a rank process to its node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FromRank {
    /// A status report, which is also a heartbeat. It is sent as a frame of [`wire`], the others as JSON.
    #[serde(skip)]
    StatusReport(MemberReport),
    /// An event in the world of this generation. Only the leader sends events other than steps.
    Event { generation: u64, rank: u32, event: Event },
    /// The leader has finished the run.
    Done(Report),
    /// A permanent failure; a restart would fail again.
    Failed(FailureReport),
}

/// Why a message of a rank cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InvalidMessage {
    #[error(transparent)]
    StatusReport(#[from] WireError),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

impl FromRank {
    /// Decodes the content of a frame from a rank.
    ///
    /// # Errors
    /// When no rank sends this.
    pub(crate) fn decode(content: &[u8]) -> Result<FromRank, InvalidMessage> {
        if wire::is_frame(content) {
            return Ok(FromRank::StatusReport(wire::decode(content)?));
        }
        Ok(serde_json::from_slice(content)?)
    }

    /// Sends the message to the node. If the node is gone, its successor will ask for everything except how the run ended, so
    /// that is logged.
    pub(crate) fn deliver(&self, sender: &mut FrameSender) {
        let sent = match self {
            // Sent many times a second by every rank.
            FromRank::StatusReport(status_report) => match wire::encode(status_report) {
                Ok(frame) => sender.send_bytes(&frame),
                Err(error) => return tracing::error!(%error, "cannot encode a status report"),
            },
            _ => sender.send(self),
        };
        let Err(error) = sent else { return };
        match self {
            FromRank::Done(report) => {
                tracing::error!(%error, ?report, "the run is finished, but the node cannot be notified");
            }
            FromRank::Failed(failure_report) => {
                tracing::error!(%error, ?failure_report, "this rank failed, but the node cannot be notified");
            }
            FromRank::StatusReport(_) | FromRank::Event { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::EvalMetrics;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::{Arc, Mutex};

    /// The log, with one writer per line.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn measurements_pass_to_the_node_with_every_bit() {
        // Each mantissa is used once: of such losses, a parser that is off by one digit changes some.
        let losses = (0..2_000_u64).map(|i| f64::from_bits(1.5f64.to_bits() + i * 0x9_e377_9b97));
        for eval_loss in losses {
            let scalars = [("rewards/margins".to_owned(), eval_loss)].into();
            let eval_perplexity = Some(eval_loss.exp());
            let metrics = EvalMetrics { step: 1, eval_loss, eval_perplexity, scalars, eval_ms: 1.0 };
            let message = FromRank::Event { generation: 1, rank: 0, event: Event::Eval(metrics.clone()) };

            let frame = serde_json::to_vec(&message).unwrap();

            let Ok(FromRank::Event { event: Event::Eval(read), .. }) = FromRank::decode(&frame) else { panic!() };
            assert_eq!(read, metrics);
        }
    }

    #[test]
    fn failure_that_cannot_be_sent_is_logged_with_its_reason() {
        let (log, (socket, node)) = (Log::default(), UnixStream::pair().unwrap());
        drop(node);
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let failure_report = FailureReport { text: "the disk is full".into(), is_input: false, is_consequence: false };

        tracing::subscriber::with_default(subscriber, || {
            FromRank::Failed(failure_report).deliver(&mut FrameSender::into_socket(socket));
        });

        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        assert!(text.contains("ERROR") && text.contains("the disk is full"), "{text}");
    }
}
