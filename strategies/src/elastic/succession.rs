//! Leader election: a lease in the job's durable store, and terms that fence off its previous holder.
//!
//! The store offers one conditional write: replace the lease if it is still the one that was read. Each candidate
//! watches the lease with its own clock only; clocks need not agree.
//!
//! Invariants:
//! - `SUCCESSION-1` A term is led by at most one candidate: it begins with a conditional write that one candidate can
//!   win.
//! - `SUCCESSION-2` A standby takes over only if the lease was not renewed for [`Timing::lease`] on its own clock. So a lease
//!   that is renewed in time does not expire as long as the rates of the clocks are within
//!   [`CLOCK_RATIO_MAX`](super::timing::CLOCK_RATIO_MAX). The time of day does not matter.
//! - `SUCCESSION-3` A leader that cannot renew its lease for as long steps down. (Safety does not depend on it: the store
//!   rejects records of an older term, and nodes reject desired states of an older term.)
//! - `SUCCESSION-4` A candidate recognizes its own write in the store: a write whose answer was lost or overtaken is no reason
//!   to step down, or to wait until the own lease expires.
//! - `SUCCESSION-5` A candidate that has stepped down because the store was silent, and finds its own lease, takes it again at
//!   once, for the next term: nobody has replaced it.
//! - `SUCCESSION-6` A leader that learns of a later term than its own, because the store was restored from a backup, takes a lease
//!   after that term by the same conditional write, and begins anew.
//!
//! Why a leader steps down while the store is silent, although nobody can replace it if all machines have lost the store: it
//! may be its machine alone that has lost it. Its nodes then turn to its successor. If it is everyone's loss, ranks train on,
//! and the leader is back with the first answer (`SUCCESSION-5`); no candidate takes over what it could not read
//! ([`Succession::handle_silence`]).
//!
//! Source: Gray and Cheriton 1989, "Leases"; Burrows 2006, "The Chubby lock service", §2.4 (sequencers).

use super::identity::Term;
use super::timing::Timing;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::Instant;

/// The stored lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Counts coordinators.
    pub term: Term,
    /// The candidate that holds the lease.
    pub holder: u32,
    /// Counts renewals within the term.
    pub beat: u64,
}

/// Commands for the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Command {
    /// Read the lease; answer with [`Succession::handle_lease`].
    Read,
    /// Replace `old` by `new` if the store still has it; answer with [`Succession::handle_written`].
    Write {
        /// The expected lease.
        old: Lease,
        /// The replacement.
        new: Lease,
    },
    /// Read the record and coordinate under this term.
    Lead(Term),
    /// Stop coordinating.
    StepDown,
}

/// A candidate. See the [module](self).
#[derive(Clone, Debug)]
pub struct Succession {
    me: u32,
    timing: Timing,
    /// The lease as last read, and since when it has not changed.
    seen: Option<(Lease, Instant)>,
    leads: bool,
    /// The latest term that it has led.
    led: Term,
    /// The lease of the next term that it has asked for, and since when.
    claim: Option<(Lease, Instant)>,
    /// The lease with which this candidate stepped down for want of answers.
    left: Option<Lease>,
    has_successor: bool,
    next: Instant,
    commands: VecDeque<Command>,
}

impl Succession {
    /// A candidate that has just started.
    pub fn new(now: Instant, me: u32, timing: Timing) -> Succession {
        Succession {
            me,
            timing,
            seen: None,
            leads: false,
            led: Term(0),
            claim: None,
            left: None,
            has_successor: true,
            next: now,
            commands: VecDeque::new(),
        }
    }

    /// A candidate that already holds this lease, requested at `asked`, and leads at once.
    pub fn holding(now: Instant, me: u32, timing: Timing, lease: Lease, asked: Instant) -> Succession {
        let mut candidate = Succession::new(now, me, timing);
        candidate.handle_written(now, asked, Ok(lease));
        candidate
    }

    /// For a job whose nodes all end with this process: no successor could take them over, so there is nobody to step down for
    /// while the store is silent.
    #[must_use]
    pub fn without_successor(self) -> Succession {
        Succession { has_successor: false, ..self }
    }

    /// Handles a later term than the store knows of: a leader takes a lease after it (`SUCCESSION-6`).
    pub fn handle_outrun(&mut self, term: Term) {
        let Some((old, _)) = self.seen.filter(|(seen, _)| self.leads && seen.term <= term) else { return };
        let new = Lease { term: term.next(), holder: self.me, beat: 0 };
        self.commands.push_back(Command::Write { old, new });
    }

    /// Whether this candidate leads.
    pub fn leads(&self) -> bool {
        self.leads
    }

    /// Handles the store's answer to a read.
    pub fn handle_lease(&mut self, now: Instant, lease: Lease) {
        if self.leads {
            return;
        }
        if let Some(asked) = self.claimed(now, lease) {
            return self.handle_written(now, asked, Ok(lease));
        }
        // A renewal without an answer may have been written.
        let is_own = self.left.is_some_and(|left| (left.term, left.holder) == (lease.term, lease.holder));
        let unchanged = self.seen.filter(|(seen, _)| *seen == lease);
        // A lease of term 0 has never been held.
        let has_expired = unchanged.is_some_and(|(_, since)| lease.term == Term(0) || now >= since + self.timing.lease);
        if unchanged.is_none() {
            self.seen = Some((lease, now));
        }
        if is_own || has_expired {
            let new = Lease { term: lease.term.next(), holder: self.me, beat: 0 };
            if self.claim.is_none_or(|(claim, _)| claim != new) {
                self.claim = Some((new, now));
            }
            self.commands.push_back(Command::Write { old: lease, new });
        }
    }

    /// Handles a read of the lease without an answer: nobody knows whether the lease was renewed meanwhile.
    pub fn handle_silence(&mut self, now: Instant) {
        if let Some((_, since)) = self.seen.as_mut().filter(|_| !self.leads) {
            *since = now;
        }
    }

    /// Handles the store's answer to a write that was requested at `asked`: the new lease, or the conflicting one. A
    /// leader's lease counts from the request, not from the answer.
    pub fn handle_written(&mut self, now: Instant, asked: Instant, result: Result<Lease, Lease>) {
        match result {
            // SUCCESSION-4
            Ok(lease) | Err(lease) if self.leads && self.is_own(lease) => {
                if let Some((_, since)) = self.seen.filter(|(seen, _)| seen.beat < lease.beat) {
                    let is_answer = result.is_ok();
                    self.seen = Some((lease, if is_answer { asked } else { since }));
                    self.next = if is_answer { now + self.timing.lease_renewal } else { now };
                }
            }
            // The answer came after the leader stepped down: it does not lead the same term twice.
            Ok(lease) if lease.term <= self.led => self.seen = Some((lease, asked)),
            Ok(lease) => {
                (self.seen, self.leads, self.led) = (Some((lease, asked)), true, lease.term);
                (self.claim, self.left) = (None, None);
                self.next = now + self.timing.lease_renewal;
                self.commands.push_back(Command::Lead(lease.term));
            }
            Err(lease) => match self.claimed(now, lease) {
                Some(asked) => self.handle_written(now, asked, Ok(lease)),
                None => {
                    self.seen = Some((lease, now));
                    self.step_down();
                }
            },
        }
    }

    /// Whether a lease is that of the term that this candidate leads.
    fn is_own(&self, lease: Lease) -> bool {
        lease.holder == self.me && self.seen.is_some_and(|(seen, _)| seen.term == lease.term)
    }

    /// When this candidate first asked for the lease that it finds in the store, if it has and the lease has not run out since.
    fn claimed(&self, now: Instant, lease: Lease) -> Option<Instant> {
        let (_, asked) = self.claim.filter(|(claim, asked)| *claim == lease && now < *asked + self.timing.lease)?;
        Some(asked)
    }

    /// Reads or renews the lease when due.
    pub fn handle_timeout(&mut self, now: Instant) {
        if now < self.next {
            return;
        }
        self.next = now + self.timing.lease_renewal;
        match self.seen {
            Some((lease, since)) if self.leads && self.has_successor && now >= since + self.timing.lease => {
                self.step_down();
                self.left = Some(lease);
            }
            Some((old, _)) if self.leads => {
                self.commands.push_back(Command::Write { old, new: Lease { beat: old.beat + 1, ..old } });
            }
            _ => self.commands.push_back(Command::Read),
        }
    }

    /// When to call [`Succession::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        Some(self.next)
    }

    /// The next command.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    fn step_down(&mut self) {
        if std::mem::replace(&mut self.leads, false) {
            self.seen = None;
            self.commands.push_back(Command::StepDown);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::time::Duration;

    /// Arrival time, receiver, request time, result of a write, and the stored lease.
    type Answer = (u64, u32, u64, Option<Result<Lease, Lease>>, Lease);

    /// Runs candidates against a store whose answers take up to `delay`; some candidates stop at some time. Returns the
    /// leader of each term, and when the term began.
    fn run(n: u32, stops: &[u64], delay: u64, seed: u64) -> BTreeMap<Term, (u32, u64)> {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut store = Lease::default();
        let mut candidates: Vec<Succession> = (0..n).map(|me| Succession::new(start, me, Timing::default())).collect();
        let mut answers: Vec<Answer> = vec![];
        let mut led = BTreeMap::new();
        let rng = crate::rng::CounterRng::new(seed);
        for ms in 0..8_000u64 {
            let (due, later): (Vec<Answer>, Vec<Answer>) = answers.into_iter().partition(|a| a.0 <= ms);
            answers = later;
            for (_, who, asked, written, lease) in due {
                match written {
                    Some(result) => candidates[who as usize].handle_written(at(ms), at(asked), result),
                    None => candidates[who as usize].handle_lease(at(ms), lease),
                }
            }
            for who in 0..n {
                if stops.get(who as usize).is_some_and(|stop| *stop <= ms) {
                    continue;
                }
                candidates[who as usize].handle_timeout(at(ms));
                while let Some(command) = candidates[who as usize].poll_command() {
                    let when = ms + 1 + rng.bits(ms * 64 + u64::from(who)) % delay;
                    match command {
                        Command::Read => answers.push((when, who, ms, None, store)),
                        Command::Write { old, new } => {
                            let result = if store == old { Ok(new) } else { Err(store) };
                            store = result.unwrap_or(store);
                            answers.push((when, who, ms, Some(result), store));
                        }
                        Command::Lead(term) => {
                            let before = led.insert(term, (who, ms));
                            assert_eq!(before, None, "{term} has two leaders");
                        }
                        Command::StepDown => {}
                    }
                }
            }
        }
        led
    }

    // SUCCESSION-2
    #[test]
    fn standby_takes_over_once_the_lease_has_run_out() {
        let led = run(2, &[2_000, 9_000], 1, 1);

        let terms: Vec<(Term, u32)> = led.iter().map(|(term, (who, _))| (*term, *who)).collect();
        assert_eq!(terms, [(Term(1), 0), (Term(2), 1)]);
        let took_over = led[&Term(2)].1;
        assert!((2_800..=3_600).contains(&took_over), "took over at {took_over} ms");
    }

    #[test]
    fn leader_that_renews_is_never_replaced() {
        assert_eq!(run(3, &[], 20, 5).len(), 1);
    }

    // SUCCESSION-1, SUCCESSION-3
    #[test]
    fn candidate_that_holds_the_lease_leads_at_once_and_renews_it() {
        let start = Instant::now();
        let lease = Lease { term: Term(4), holder: 2, beat: 0 };
        let mut leader = Succession::holding(start, 2, Timing::default(), lease, start);

        let first = leader.poll_command();
        leader.handle_timeout(start + Timing::default().lease_renewal);

        assert_eq!(first, Some(Command::Lead(Term(4))));
        assert_eq!(leader.poll_command(), Some(Command::Write { old: lease, new: Lease { beat: 1, ..lease } }));
    }

    // SUCCESSION-4
    #[test]
    fn leader_whose_renewal_took_effect_without_an_answer_renews_again_and_leads_on() {
        let start = Instant::now();
        let own = |beat| Lease { term: Term(1), holder: 0, beat };
        let mut leader = Succession::new(start, 0, Timing::default());
        leader.handle_written(start, start, Ok(own(0)));
        let second = start + Timing::default().lease_renewal * 2;

        leader.handle_written(second, second, Err(own(1)));
        leader.handle_timeout(second);

        let commands: Vec<Command> = std::iter::from_fn(|| leader.poll_command()).collect();
        assert_eq!(commands, [Command::Lead(Term(1)), Command::Write { old: own(1), new: own(2) }]);
        leader.handle_written(second, second, Ok(own(2)));
        leader.handle_written(second, start, Ok(own(1)));
        leader.handle_timeout(second + Timing::default().lease_renewal);
        assert_eq!(leader.poll_command(), Some(Command::Write { old: own(2), new: own(3) }));
        leader.handle_written(second, second, Err(Lease { term: Term(2), holder: 1, beat: 0 }));
        assert_eq!(leader.poll_command(), Some(Command::StepDown));
    }

    // SUCCESSION-1, SUCCESSION-4
    #[test]
    fn candidate_finds_the_term_that_it_has_won_without_an_answer_and_leads_it_once() {
        let start = Instant::now();
        let won = Lease { term: Term(1), holder: 7, beat: 0 };
        let mut candidate = Succession::new(start, 7, Timing::default());
        (0..2).for_each(|_| candidate.handle_lease(start, Lease::default()));
        assert_eq!(candidate.poll_command(), Some(Command::Write { old: Lease::default(), new: won }));

        candidate.handle_lease(start + Timing::default().lease_renewal, won);
        assert_eq!(candidate.poll_command(), Some(Command::Lead(Term(1))));
        candidate.handle_timeout(start + Timing::default().lease);
        assert_eq!(candidate.poll_command(), Some(Command::StepDown));
        candidate.handle_written(start + Timing::default().lease, start, Ok(won));
        candidate.handle_lease(start + Timing::default().lease, won);

        assert!(!candidate.leads());
        let next = Lease { term: Term(2), ..won };
        assert_eq!(candidate.poll_command(), Some(Command::Write { old: won, new: next }));
    }

    // SUCCESSION-6
    #[test]
    fn leader_that_learns_of_a_later_term_leads_one_after_it_unless_it_has_been_replaced() {
        let (start, old) = (Instant::now(), Lease { term: Term(1), holder: 3, beat: 0 });
        let leader = || {
            let mut leader = Succession::holding(start, 3, Timing::default(), old, start);
            assert_eq!(leader.poll_command(), Some(Command::Lead(Term(1))));
            leader.handle_outrun(Term(5));
            leader
        };
        let (mut alone, mut replaced) = (leader(), leader());
        let new = Lease { term: Term(6), holder: 3, beat: 0 };
        assert_eq!(alone.poll_command(), Some(Command::Write { old, new }));
        assert!(replaced.poll_command().is_some());

        alone.handle_written(start, start, Ok(new));
        replaced.handle_written(start, start, Err(Lease { term: Term(5), holder: 9, beat: 0 }));

        assert_eq!(alone.poll_command(), Some(Command::Lead(Term(6))));
        assert_eq!((replaced.poll_command(), replaced.leads()), (Some(Command::StepDown), false));
    }

    // SUCCESSION-3
    #[test]
    fn leader_whose_renewals_get_no_answer_steps_down() {
        let start = Instant::now();
        let mut leader = Succession::new(start, 0, Timing::default());
        leader.handle_written(start, start, Ok(Lease { term: Term(1), holder: 0, beat: 0 }));

        for ms in (0..1_700).step_by(100) {
            leader.handle_timeout(start + Duration::from_millis(ms));
        }

        assert!(!leader.leads());
        let commands: Vec<Command> = std::iter::from_fn(|| leader.poll_command()).collect();
        assert_eq!(commands.last(), Some(&Command::Read), "{commands:?}");
        assert!(commands.contains(&Command::StepDown));
    }

    // SUCCESSION-5
    #[test]
    fn leader_that_the_store_left_without_answers_leads_again_with_the_first_one() {
        let (start, renewed) = (Instant::now(), |beat| Lease { term: Term(1), holder: 5, beat });
        let mut leader = Succession::holding(start, 5, Timing::default(), renewed(0), start);
        let later = start + 60 * Timing::default().lease;

        leader.handle_timeout(later);
        let stepped_down = !leader.leads();
        while leader.poll_command().is_some() {}
        // The last renewal was written, but its answer was lost.
        leader.handle_lease(later, renewed(1));
        let next = Lease { term: Term(2), holder: 5, beat: 0 };

        assert!(stepped_down);
        assert_eq!(leader.poll_command(), Some(Command::Write { old: renewed(1), new: next }));
        leader.handle_written(later, later, Ok(next));
        assert_eq!(leader.poll_command(), Some(Command::Lead(Term(2))));
    }

    // SUCCESSION-3
    #[test]
    fn leader_without_a_successor_leads_until_the_store_names_another_one() {
        let (start, mine) = (Instant::now(), Lease { term: Term(1), holder: 0, beat: 0 });
        let mut leader = Succession::holding(start, 0, Timing::default(), mine, start).without_successor();
        let later = start + 60 * Timing::default().lease;

        leader.handle_timeout(later);
        let leads = leader.leads();
        leader.handle_written(later, later, Err(Lease { term: Term(2), ..mine }));

        assert_eq!((leads, leader.leads()), (true, false));
    }

    // SUCCESSION-2, SUCCESSION-5
    #[test]
    fn leader_that_was_replaced_during_its_silence_waits_like_every_candidate() {
        let start = Instant::now();
        let mut leader =
            Succession::holding(start, 5, Timing::default(), Lease { term: Term(1), holder: 5, beat: 0 }, start);
        let later = start + 60 * Timing::default().lease;
        leader.handle_timeout(later);
        while leader.poll_command().is_some() {}

        let other = Lease { term: Term(2), holder: 6, beat: 9 };
        leader.handle_lease(later, other);
        leader.handle_lease(later, other);

        assert_eq!(leader.poll_command(), None);
    }

    // SUCCESSION-2
    #[test]
    fn lease_that_cannot_be_read_does_not_expire() {
        let (start, lease) = (Instant::now(), Lease { term: Term(1), holder: 6, beat: 3 });
        let mut standby = Succession::new(start, 5, Timing::default());
        let returns = start + 60 * Timing::default().lease;

        standby.handle_lease(start, lease);
        standby.handle_silence(returns);
        standby.handle_lease(returns, lease);
        let at_once = standby.poll_command();
        standby.handle_lease(returns + Timing::default().lease, lease);

        assert_eq!(at_once, None, "its leader has the time of a lease to renew it");
        assert!(matches!(standby.poll_command(), Some(Command::Write { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        // `run` asserts SUCCESSION-1; some candidate leads, whenever the others stop.
        #[test]
        fn candidate_leads_when_others_stop(stops in prop::collection::vec(0u64..4_000, 0..3), delay in 1u64..400, seed: u64) {
            let led = run(4, &stops, delay, seed);

            prop_assert!(!led.is_empty());
        }
    }
}
