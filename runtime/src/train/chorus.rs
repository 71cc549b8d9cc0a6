//! The events of all ranks as those of one run: the leader's, in order, with every step as all ranks measured it.
//!
//! A step of the leader waits until each other rank has told of it; every rank does before it begins the next. What the
//! leader says after it waits with it, so nothing is told out of order.

use super::metrics::StepMetrics;
use crate::job::Event;
use std::collections::{BTreeMap, VecDeque};

/// Puts the events of ranks together.
#[derive(Debug)]
pub(super) struct Chorus {
    n_ranks: usize,
    /// Of the leader, not told yet.
    events: VecDeque<Event>,
    /// What the other ranks measured in steps that were not told yet.
    steps: BTreeMap<u64, Vec<(u32, StepMetrics)>>,
}

impl Chorus {
    pub(super) fn new(n_ranks: u32) -> Chorus {
        Chorus { n_ranks: n_ranks as usize, events: VecDeque::new(), steps: BTreeMap::new() }
    }

    /// Takes what a rank says.
    pub(super) fn hear(&mut self, rank: u32, event: Event) {
        match event {
            event if rank == 0 => self.events.push_back(event),
            Event::Step(m) => self.steps.entry(m.step).or_default().push((rank, m)),
            _ => {}
        }
    }

    /// The next event of the run.
    pub(super) fn next(&mut self) -> Option<Event> {
        if let Event::Step(m) = self.events.front()?
            && self.steps.get(&m.step).map_or(0, Vec::len) + 1 < self.n_ranks
        {
            return None;
        }
        self.next_as_it_is()
    }

    /// As [`Chorus::next`], without waiting for ranks that say no more.
    pub(super) fn next_as_it_is(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        let Event::Step(m) = event else { return Some(event) };
        let others = self.steps.remove(&m.step).unwrap_or_default();
        Some(Event::Step(merged(m, &others)))
    }
}

/// A step as the leader and the other ranks measured it.
fn merged(leader: StepMetrics, others: &[(u32, StepMetrics)]) -> StepMetrics {
    let collective_pct = |m: &StepMetrics| m.collective_pct.unwrap_or(0.0);
    let all = || std::iter::once((0, &leader)).chain(others.iter().map(|(rank, m)| (*rank, m)));
    let slowest = all().min_by(|a, b| collective_pct(a.1).total_cmp(&collective_pct(b.1)));
    StepMetrics {
        memory_bytes: all().map(|(_, m)| m.memory_bytes).sum(),
        collective_pct: Some(all().map(|(_, m)| collective_pct(m)).sum::<f64>() / (others.len() + 1) as f64),
        slowest_rank: slowest.map(|(rank, _)| rank),
        ..leader
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, memory_bytes: u64, collective_pct: f64) -> Event {
        Event::Step(StepMetrics {
            step,
            loss: 1.0,
            grad_norm: 1.0,
            lr: 1.0,
            tokens_per_s: 1.0,
            step_ms: 1.0,
            epoch: 0.0,
            predicted_tokens: 1,
            mfu_pct: 1.0,
            memory_bytes,
            data_wait_pct: 0.0,
            loss_scale: None,
            collective_pct: Some(collective_pct),
            slowest_rank: None,
        })
    }

    #[test]
    fn a_step_is_told_once_with_the_memory_of_all_and_the_rank_they_waited_for() {
        let mut chorus = Chorus::new(3);

        chorus.hear(1, step(1, 20, 5.0));
        chorus.hear(0, step(1, 10, 30.0));
        chorus.hear(0, Event::Note("after".into()));
        let early = chorus.next();
        chorus.hear(2, step(1, 30, 25.0));

        assert_eq!(early, None, "rank 2 has not told of step 1");
        let Some(Event::Step(m)) = chorus.next() else { panic!("the step is complete") };
        assert_eq!((m.memory_bytes, m.collective_pct, m.slowest_rank), (60, Some(20.0), Some(1)));
        assert_eq!(chorus.next(), Some(Event::Note("after".into())));
        assert_eq!(chorus.next(), None);
    }

    #[test]
    fn what_the_leader_said_is_not_lost_with_a_rank_that_ended() {
        let mut chorus = Chorus::new(2);
        chorus.hear(0, step(4, 10, 0.0));

        assert_eq!(chorus.next(), None);
        assert!(matches!(chorus.next_as_it_is(), Some(Event::Step(m)) if m.step == 4 && m.memory_bytes == 10));
    }
}
