//! Stores that fail: operations that are refused, late, or done without an answer, and the shells' further tries.

use super::Sim;
use super::event::{Attempt, CandidateEvent, Event, LeaseWrite, RankEvent, RecordWrite};
use super::store::Written;
use crate::dice::Dice;
use crate::environment::{Outage, StoreName};
use crate::invariants::Observation;
use crate::mutation::Mutation;
use crate::state;
use phalanx_strategies::elastic::checkpoint::{Checkpoint, Part};
use phalanx_strategies::elastic::coordinator::newest_checkpoint::Listing;
use phalanx_strategies::elastic::identity::{Term, Worker};
use phalanx_strategies::elastic::message::Record;
use std::ops::Range;

/// Outages of both stores, with the time of their end.
#[derive(Debug)]
pub struct Storage {
    dice: Dice,
    outages: Vec<(StoreName, Outage, u64)>,
}

/// Pieces of a state: name and value.
type Pieces = Vec<(u64, u64)>;

/// Time in microseconds after an outage of the coordinators' store in which its late answers may still end a lease.
pub const AFTER_OUTAGE: u64 = 2_500_000;
/// Operations that fail in an outage: others get through, so that decisions follow each other while earlier writes hang.
const FAILING_PERCENT: u64 = 70;
/// Pause of a rank before it tries to read or write a checkpoint again.
const CHECKPOINT_PAUSE: u64 = 200_000;

impl Storage {
    /// Stores without faults.
    pub fn new(seed: u64) -> Storage {
        Storage { dice: Dice::new(seed, "storage"), outages: vec![] }
    }

    /// Lets a store fail until this time.
    pub fn fail(&mut self, store: StoreName, how: Outage, until: u64) {
        self.outages.push((store, how, until));
    }

    /// Ends all outages.
    pub fn recover(&mut self) {
        self.outages.clear();
    }
}

impl Sim {
    /// How an operation fails now, if it does, and when the outage ends.
    fn outage(&mut self, store: StoreName) -> Option<(Outage, u64)> {
        let now = self.now;
        self.storage.outages.retain(|(_, _, until)| *until > now);
        let found = self.storage.outages.iter().find(|(failing, _, _)| *failing == store);
        let found = found.map(|(_, how, until)| (*how, *until));
        let found = found.filter(|_| self.storage.dice.percent(FAILING_PERCENT));
        self.outcome.n_failed_operations += u64::from(found.is_some());
        found
    }

    /// When an operation that hangs in an outage until this time is done.
    fn late(&mut self, until: u64) -> u64 {
        until + self.storage.dice.pick(0..300_000)
    }

    /// When the answer to a read of the lease arrives, if it does; `at` without a fault.
    pub(super) fn lease_is_read(&mut self, at: u64) -> Option<u64> {
        match self.outage(StoreName::Coordinators) {
            None => Some(at),
            Some((Outage::Hangs, until)) => Some(self.late(until)),
            Some((Outage::Refuses | Outage::LosesAnswers, _)) => None,
        }
    }

    pub(super) fn lease_reaches_store(&mut self, i: usize, life: u64, write: LeaseWrite, gone: bool) {
        // A write may survive its dead candidate or be lost.
        if gone && self.dice.percent(50) {
            return;
        }
        let LeaseWrite { old, new, asked, attempt } = write;
        match self.outage(StoreName::Coordinators) {
            None => {
                let result = self.store.replace_lease(old, new);
                if attempt == Attempt::Awaited {
                    self.answer(i, life, CandidateEvent::LeaseWritten { asked, result });
                }
            }
            // The candidate tries again when it is due.
            Some((Outage::Refuses, _)) => {}
            Some((Outage::LosesAnswers, _)) => {
                let _ = self.store.replace_lease(old, new);
            }
            Some((Outage::Hangs, until)) => {
                let gives_up = self.storage.dice.percent(50);
                let attempt = if gives_up { Attempt::GivenUp } else { attempt };
                let at = self.late(until);
                let what = CandidateEvent::WriteLease(LeaseWrite { attempt, ..write });
                self.queue.push(at, Event::ToCandidate { candidate: i, life, what });
            }
        }
    }

    /// Reads the record for a new term, until the store answers.
    pub(super) fn read_record(&mut self, i: usize, term: Term) {
        let again_at = match self.outage(StoreName::Coordinators) {
            None => return self.begin_term(i, term, self.store.record.clone()),
            Some(_) if self.is(Mutation::BeginWithoutRecord) => {
                return self.begin_term(i, term, Record::default());
            }
            Some((Outage::Hangs, until)) => self.late(until),
            Some(_) => self.now + self.config.timing.lease_renewal.as_micros() as u64,
        };
        let (life, what) = (self.candidates[i].life, CandidateEvent::ReadRecord(term));
        self.queue.push(again_at, Event::ToCandidate { candidate: i, life, what });
    }

    pub(super) fn record_reaches_store(&mut self, i: usize, life: u64, write: RecordWrite, gone: bool) {
        let leads = !gone && self.candidates[i].term == Some(write.record.term);
        match write.attempt {
            Attempt::Awaited if gone && (self.is(Mutation::TrustUnsyncedWrites) || self.dice.percent(50)) => return,
            Attempt::Repeated if !leads => return,
            _ => {}
        }
        match self.outage(StoreName::Coordinators) {
            None => {
                let (accepted, term) = (self.write_record(&write), write.record.term);
                if write.attempt != Attempt::GivenUp && !self.is(Mutation::TrustUnsyncedWrites) {
                    let version = self.store.version();
                    self.answer(i, life, CandidateEvent::RecordWritten { term, accepted, version });
                }
            }
            Some((Outage::Refuses, _)) => self.write_again(i, life, write),
            Some((Outage::LosesAnswers, _)) => {
                self.write_record(&write);
                self.write_again(i, life, write);
            }
            Some((Outage::Hangs, until)) => {
                let gives_up = self.storage.dice.percent(50);
                let attempt = if gives_up { Attempt::GivenUp } else { write.attempt };
                let at = self.late(until);
                let what = CandidateEvent::WriteRecord(Box::new(RecordWrite { attempt, ..write.clone() }));
                self.queue.push(at, Event::ToCandidate { candidate: i, life, what });
                if gives_up {
                    self.write_again(i, life, write);
                }
            }
        }
    }

    /// Whether the store has the record now.
    fn write_record(&mut self, write: &RecordWrite) -> bool {
        let fenced = !self.is(Mutation::ForgetFencing);
        let conditional = fenced && !self.is(Mutation::ForgetConditions) && !self.is(Mutation::TrustUnsyncedWrites);
        let RecordWrite { record, over, .. } = write;
        let written = self.store.write(record, *over, fenced, conditional);
        if written == Written::Now {
            self.mark(3, record.term.0, record.generation.0);
            self.observe(&Observation::Persisted(record));
        }
        written != Written::Rejected
    }

    fn write_again(&mut self, i: usize, life: u64, write: RecordWrite) {
        if write.attempt == Attempt::GivenUp {
            return;
        }
        let at = self.now + self.config.timing.heartbeat.as_micros() as u64;
        let what = CandidateEvent::WriteRecord(Box::new(RecordWrite { attempt: Attempt::Repeated, ..write }));
        self.queue.push(at, Event::ToCandidate { candidate: i, life, what });
    }

    /// Looks for the newest checkpoint, until the store answers.
    pub(super) fn list_checkpoints(&mut self, i: usize, term: Term, listing: Listing) {
        let life = self.candidates[i].life;
        let again_at = match self.outage(StoreName::Checkpoints) {
            None => {
                let newest = self.store.newest(listing).filter(|_| !self.is(Mutation::BelieveTheRecord));
                return self.answer(i, life, CandidateEvent::Listed { term, listing, newest });
            }
            Some((Outage::Hangs, until)) => self.late(until),
            Some(_) => self.now + CHECKPOINT_PAUSE,
        };
        let what = CandidateEvent::ListCheckpoints { term, listing };
        self.queue.push(again_at, Event::ToCandidate { candidate: i, life, what });
    }

    /// The pieces of a checkpoint in these runs.
    ///
    /// # Errors
    /// When to try again.
    pub(super) fn load(&mut self, checkpoint: Checkpoint, runs: &[Range<u64>]) -> Result<Pieces, u64> {
        match self.outage(StoreName::Checkpoints) {
            None => Ok(self.store.load(checkpoint, runs)),
            Some(_) if self.is(Mutation::RestartIfUnreadable) => {
                let all = runs.iter().cloned().flatten();
                Ok(all.map(|atom| (atom, state::value(state::INITIAL, atom))).collect())
            }
            Some((Outage::Hangs, until)) => Err(self.late(until)),
            Some(_) => Err(self.now + CHECKPOINT_PAUSE),
        }
    }

    /// A rank's part of a checkpoint reaches the store; the rank tries again until it is saved.
    pub(super) fn rank_saved(&mut self, worker: Worker, part: Part, atoms: Pieces) {
        let outage = self.outage(StoreName::Checkpoints);
        let trusts = outage.is_some() && self.is(Mutation::TrustFailedSaves);
        let again_at = match outage {
            None => None,
            Some((Outage::Hangs, until)) => Some(self.late(until)),
            Some(_) => Some(self.now + CHECKPOINT_PAUSE),
        };
        if matches!(outage, None | Some((Outage::LosesAnswers, _))) {
            let committed = self.store.save(part, atoms.clone());
            committed.into_iter().for_each(|checkpoint| self.observe(&Observation::CheckpointCommitted(checkpoint)));
        }
        match again_at.filter(|_| !trusts) {
            Some(at) => self.queue.push(at, Event::ToRank { worker, what: RankEvent::Saved { part, atoms } }),
            None => {
                if let Some(rank) = self.rank(worker) {
                    rank.member.handle_saved(part);
                }
            }
        }
    }
}
