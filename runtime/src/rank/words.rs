//! What a node and its rank processes say to each other, as frames of their channels.

use crate::events::{Event, Report};
use crate::launch::channel::FrameSender;
use crate::rank::excuse::Excuse;
use phalanx_strategies::elastic::identity::{JobId, Worker};
use phalanx_strategies::elastic::message::{MemberReport, Order};
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;

/// From a node to a rank process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToRank {
    /// Who it is; comes first, and once.
    Begin(Box<Begin>),
    /// What the coordinator wants.
    Order(Order),
}

/// Who a rank process is and what it will run.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) job: JobId,
    pub(crate) worker: Worker,
    pub(crate) n_threads: usize,
    /// The whole configuration, overrides applied.
    pub(crate) yaml: String,
    /// Where it listens for ranks of other nodes; nowhere if there are none.
    pub(crate) listen: Option<IpAddr>,
    /// What all ranks of the job know and nobody else does.
    pub(crate) secret: Vec<u8>,
    /// The machine's measured best, FLOP/s of a rank.
    pub(crate) peak_flops: f64,
    /// Where the checkpoint lies from which the job begins, if that is elsewhere: its step and its folder.
    pub(crate) start_from: Option<(u64, PathBuf)>,
    /// The seat that it will probably have: that of the process before it.
    pub(crate) seat: (Mesh, usize),
    /// Bytes that it shares with its peers there.
    pub(crate) seat_bytes: u64,
    /// How often it gives a sign of life, and when a machine counts as lost.
    pub(crate) timing: Timing,
}

impl std::fmt::Debug for Begin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Begin").field("job", &self.job).field("worker", &self.worker).finish_non_exhaustive()
    }
}

/// From a rank process to its node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FromRank {
    /// Where it is; also a sign of life.
    Word(MemberReport),
    /// Something happened in the world of this generation. Only the leader tells more than its steps.
    Event { generation: u64, rank: u32, event: Event },
    /// The leader has finished the run.
    Done(Report),
    /// It cannot go on, and no successor could.
    Failed(Excuse),
}

impl FromRank {
    /// Sends it to the node. A node that is gone misses nothing that its successor would not ask for, except how the run
    /// ended: that goes to the log.
    pub(crate) fn deliver(&self, sender: &mut FrameSender) {
        let Err(error) = sender.send(self) else { return };
        match self {
            FromRank::Done(report) => {
                tracing::error!(%error, ?report, "the run is finished, and the node cannot be told");
            }
            FromRank::Failed(excuse) => {
                tracing::error!(%error, ?excuse, "this rank failed, and the node cannot be told");
            }
            FromRank::Word(_) | FromRank::Event { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::{Arc, Mutex};

    /// What is logged, by a writer for each line.
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
    fn a_failure_that_reaches_no_node_is_logged_with_its_reason() {
        let (log, (socket, node)) = (Log::default(), UnixStream::pair().unwrap());
        drop(node);
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let excuse = Excuse { text: "the disk is full".into(), is_input: false, is_consequence: false };

        tracing::subscriber::with_default(subscriber, || {
            FromRank::Failed(excuse).deliver(&mut FrameSender::into_socket(socket));
        });

        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        assert!(text.contains("ERROR") && text.contains("the disk is full"), "{text}");
    }
}
