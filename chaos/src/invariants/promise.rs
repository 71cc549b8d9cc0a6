//! No committed step is lost while no more than one node was disturbed since all members last had their state.
//! Source: DESIGN, "Elasticity: what is promised", 1.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, NodeId, Step};
use std::collections::BTreeSet;

/// See the [module](self).
#[derive(Default)]
pub struct Promise {
    learnt: Step,
    lineage: Generation,
    disturbed: BTreeSet<NodeId>,
    lasting: Vec<NodeId>,
    /// Nodes of the last world that was whole.
    n_nodes: usize,
}

impl Invariant for Promise {
    fn name(&self) -> &'static str {
        "nothing committed is lost"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Learnt { step, .. } => self.learnt = self.learnt.max(*step),
            Observation::Disturbed { node, lasts } => {
                self.disturbed.insert(*node);
                if *lasts {
                    self.lasting.push(*node);
                }
            }
            Observation::Calm(node) => {
                if let Some(i) = self.lasting.iter().position(|other| other == node) {
                    self.lasting.remove(i);
                }
            }
            // Who still catches up has nothing yet.
            Observation::Healed(formation, _) if formation.learners.is_empty() => {
                self.disturbed = self.lasting.iter().copied().collect();
                let nodes: BTreeSet<NodeId> = formation.seats.iter().map(|worker| worker.member.node).collect();
                self.n_nodes = nodes.len();
            }
            Observation::Formed(formation) => {
                let step = formation.base.step;
                let promised = self.n_nodes > 1 && self.disturbed.len() <= 1;
                let lost = step < self.learnt;
                let disturbed: Vec<String> = self.disturbed.iter().map(NodeId::to_string).collect();
                if lost && (promised || formation.base.lineage == self.lineage) {
                    let learnt = self.learnt;
                    return Err(format!(
                        "{} begins from {step}, {learnt} was committed; disturbed since: {disturbed:?}",
                        formation.generation
                    ));
                }
                (self.learnt, self.lineage) = (step, formation.base.lineage);
            }
            _ => {}
        }
        Ok(())
    }
}
