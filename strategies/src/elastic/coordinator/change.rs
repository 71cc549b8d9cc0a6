//! A world that another follows by choice: there are members for a larger one, or the operator wants another mesh.
//!
//! Invariant:
//! - `K-10` Such a world ends between two steps: its members come to rest behind a step that all have committed, so nothing
//!   that was begun is thrown away. If anything befalls it meanwhile it ends as any other.

use super::super::identity::Worker;
use super::super::incident::{Cause, Culprit, Why};
use super::{Coordinator, Phase};
use std::collections::BTreeSet;
use std::time::Instant;

/// A change that is under way.
#[derive(Clone, Debug)]
pub(super) struct Change {
    why: Why,
    /// Members that rest.
    paused: BTreeSet<Worker>,
    /// Since when any does: all have committed the same step.
    since: Option<Instant>,
}

impl Coordinator {
    /// Lets a world come to rest if members can form the one that is wanted, or a larger one.
    pub(super) fn consider_growth(&mut self) {
        let Some(formation) = &self.record.formation else { return };
        let (mesh, wanted) = (formation.mesh, self.policy.wanted);
        let n_members = self.candidates().len();
        let larger = self.policy.largest(n_members, Some(mesh)).is_some_and(|other| other.size() > mesh.size());
        let resizes = self.record.wanted.is_some() && mesh != wanted && wanted.size() <= n_members;
        let why = match (resizes, larger) {
            (true, _) => Why::Resized,
            (false, true) => Why::Grows,
            (false, false) => return,
        };
        let generation = self.record.generation;
        if let Phase::Running { change, .. } = &mut self.phase {
            change.get_or_insert(Change { why, paused: BTreeSet::new(), since: None });
            self.ask_to_pause(generation);
        }
    }

    /// A member has come to rest.
    pub(super) fn note_paused(&mut self, now: Instant, worker: Worker) {
        let (n_seats, grace) = (self.seats.len(), self.timing.stop_grace);
        match &mut self.phase {
            Phase::Running { change, .. } => {
                // A coordinator that has just taken over does not know why its predecessor asked for it.
                let change = change.get_or_insert(Change { why: Why::Grows, paused: BTreeSet::new(), since: None });
                change.paused.insert(worker);
                let since = *change.since.get_or_insert(now);
                if change.paused.len() < n_seats && now < since + grace {
                    return;
                }
                let why = change.why;
                self.trouble(Cause { culprit: Culprit::Job, why }, since);
            }
            Phase::TakingOver { .. } => self.trouble(Cause { culprit: Culprit::Job, why: Why::Grows }, now),
            _ => {}
        }
    }
}
