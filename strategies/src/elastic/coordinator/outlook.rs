//! What a request of the operator leads to, for the answer to it.

use super::super::identity::NodeId;
use super::super::quorum::Blocked;
use super::{Coordinator, Phase};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A request that has become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// A checkpoint, another mesh, or that a node is gone.
    Change,
    /// That the job stop.
    Stop,
    /// That a node drain.
    Drain(NodeId),
}

/// What a durable request leads to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outlook {
    /// It takes effect at once.
    AtOnce,
    /// It takes effect later, after what the text names.
    Later(String),
    /// It has no effect unless something else changes, as the text says.
    NoEffect(String),
}

/// Why a node cannot be drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotDrained {
    /// No such node has reported.
    #[error("{0} has not reported to this job")]
    Unknown(NodeId),
    /// It does not report.
    #[error(
        "{0} does not report, so nothing can be moved from it; if it will not return, `phalanx drain --gone` lets the job \
         continue without it"
    )]
    Silent(NodeId),
}

impl Coordinator {
    /// Checks that a node can be drained.
    ///
    /// # Errors
    /// When it is silent or unknown.
    pub(super) fn check_drain(&self, node: NodeId) -> Result<(), NotDrained> {
        match self.membership.boot(node) {
            None => Err(NotDrained::Unknown(node)),
            Some(_) if self.membership.is_silent(node) => Err(NotDrained::Silent(node)),
            Some(_) => Ok(()),
        }
    }

    /// What a durable request leads to.
    pub fn outlook(&self, asked: Asked) -> Outlook {
        let blocked = self.blocked().filter(|_| self.writing.is_none());
        match (&self.phase, asked, blocked) {
            (Phase::Deposed | Phase::Ended { .. }, ..) => Outlook::NoEffect("the job is over".into()),
            (Phase::Regrouping { .. }, Asked::Stop, Some(blocked)) => Outlook::Later(format!(
                "no world trains: {blocked}; the job ends within {} s",
                self.stop_patience().as_secs_f64().ceil()
            )),
            // The answer of the store is on its way.
            (Phase::Regrouping { .. }, _, Some(blocked))
                if blocked.remaining().is_some() || blocked == Blocked::Listing =>
            {
                Outlook::Later(blocked.to_string())
            }
            (Phase::Regrouping { .. }, Asked::Change | Asked::Drain(_), Some(blocked)) => {
                Outlook::NoEffect(blocked.to_string())
            }
            (_, Asked::Drain(node), _) => self.without(node).map_or(Outlook::AtOnce, Outlook::Later),
            (Phase::Running { .. }, Asked::Change, Some(blocked @ Blocked::Wanted { .. })) => {
                Outlook::Later(format!("{blocked}; the present mesh trains until then"))
            }
            _ => Outlook::AtOnce,
        }
    }

    /// What happens without a node that the smallest mesh needs.
    fn without(&self, node: NodeId) -> Option<String> {
        let stays: BTreeSet<_> = self.candidates().into_iter().filter(|worker| worker.member.node != node).collect();
        let last = self.record.world_plan.as_ref().map(|world_plan| world_plan.mesh);
        let (have, need) = (stays.len(), self.policy.smallest(last));
        self.policy.largest(have, last).is_none().then(|| {
            format!(
                "the smallest mesh needs {need} ranks, and without {node} there are {have}: the job saves its state, \
                 releases the node, and waits for another one"
            )
        })
    }
}
