//! Each incident has one first cause (a new coordinator may record the same cause again). A node or rank is the culprit only
//! if it was disturbed; the job is stuck or unreachable only if any node was. Source: `incident` INCIDENT-1.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, NodeId};
use phalanx_strategies::elastic::incident::{Cause, Culprit, Why};
use std::collections::{BTreeMap, BTreeSet};

/// Remembers the nodes that were disturbed, and the cause of each incident.
#[derive(Default)]
pub struct Attribution {
    disturbed: BTreeSet<NodeId>,
    causes: BTreeMap<Generation, Cause>,
}

impl Invariant for Attribution {
    fn name(&self) -> &'static str {
        "attribution"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Disturbed { node, .. } => {
                self.disturbed.insert(*node);
            }
            Observation::Flipped { worker, .. } => {
                self.disturbed.insert(worker.member.node);
            }
            Observation::Resumed(timeline) => {
                let before = self.causes.insert(timeline.generation, timeline.cause);
                if let Some(before) = before.filter(|before| *before != timeline.cause) {
                    return Err(format!(
                        "{} resumed after \"{}\" and \"{before}\"",
                        timeline.generation, timeline.cause
                    ));
                }
                let innocent = match timeline.cause.culprit {
                    Culprit::Worker(worker) => !self.disturbed.contains(&worker.member.node),
                    Culprit::Node(node) => !self.disturbed.contains(&node),
                    Culprit::Job => {
                        matches!(timeline.cause.why, Why::Stuck | Why::Unreachable) && self.disturbed.is_empty()
                    }
                };
                if innocent {
                    return Err(format!("\"{}\", but the culprit was not disturbed", timeline.cause));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
