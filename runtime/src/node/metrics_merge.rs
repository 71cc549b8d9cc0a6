//! Merges the events of all ranks into those of one run: the leader's events in order, with the step metrics of all ranks.
//!
//! A step event of the leader is held back until every other rank has reported that step, and later events of the leader
//! wait behind it. Each rank reports a step before it begins the next. A step that a new leader reports for its dead
//! predecessor is reported by no other rank.

use crate::events::{Event, StepMetrics};
use std::collections::{BTreeMap, VecDeque};

/// Passes the events of this node's ranks to the job's reader.
pub(super) struct EventSink {
    /// Whether all ranks of the job are on this node, so that their metrics can be merged.
    pub(super) is_alone: bool,
    /// The world of the merged events.
    generation: u64,
    metrics_merge: MetricsMerge,
}

impl EventSink {
    pub(super) fn new(is_alone: bool) -> EventSink {
        EventSink { is_alone, generation: 0, metrics_merge: MetricsMerge::default() }
    }

    pub(super) fn add(&mut self, generation: u64, rank: u32, event: Event, on_event: &mut (dyn FnMut(&Event) + Send)) {
        if !self.is_alone {
            // Only the leader's events are passed on; metrics of ranks on other nodes are unavailable here.
            if rank == 0 {
                on_event(&event);
            }
            return;
        }
        if generation > self.generation {
            self.rest(on_event);
            (self.generation, self.metrics_merge) = (generation, MetricsMerge::default());
        }
        if generation == self.generation {
            self.metrics_merge.add(rank, event);
        }
        while let Some(event) = self.metrics_merge.next() {
            on_event(&event);
        }
    }

    /// Passes on the events that waited for ranks that have ended.
    pub(super) fn rest(&mut self, on_event: &mut (dyn FnMut(&Event) + Send)) {
        while let Some(event) = self.metrics_merge.next_as_it_is() {
            on_event(&event);
        }
    }
}

/// Merges the events of ranks.
#[derive(Debug, Default)]
struct MetricsMerge {
    /// Number of ranks that report each step, from the leader's start event.
    n_ranks: usize,
    /// The last step before the run started.
    first_step: u64,
    /// Events of the leader that are held back.
    events: VecDeque<Event>,
    /// Metrics of the other ranks for steps that are held back.
    steps: BTreeMap<u64, Vec<(u32, StepMetrics)>>,
}

impl MetricsMerge {
    /// Adds an event of a rank.
    fn add(&mut self, rank: u32, event: Event) {
        match event {
            event if rank == 0 => {
                if let Event::Started(started) = &event {
                    (self.n_ranks, self.first_step) = (started.buffer_bytes.len(), started.first_step);
                }
                self.events.push_back(event);
            }
            Event::Step(m) => self.steps.entry(m.step).or_default().push((rank, m)),
            _ => {}
        }
    }

    /// The next event of the run.
    fn next(&mut self) -> Option<Event> {
        if let Event::Step(m) = self.events.front()?
            && m.step > self.first_step
            && self.steps.get(&m.step).map_or(0, Vec::len) + 1 < self.n_ranks
        {
            return None;
        }
        self.next_as_it_is()
    }

    /// As [`MetricsMerge::next`], without waiting for ranks that have ended.
    fn next_as_it_is(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        let Event::Step(m) = event else { return Some(event) };
        let others = self.steps.remove(&m.step).unwrap_or_default();
        // A single rank has no metrics to merge.
        Some(Event::Step(if others.is_empty() { m } else { merged(m, &others) }))
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
    use crate::events::Started;
    use phalanx_strategies::mesh::Mesh;

    fn step(step: u64, memory_bytes: u64, collective_pct: f64) -> Event {
        Event::Step(StepMetrics {
            step,
            total_steps: 10,
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
            scalars: BTreeMap::new(),
            loss_scale: None,
            collective_pct: Some(collective_pct),
            verify_pct: None,
            stalled_steps: None,
            slowest_rank: None,
        })
    }

    /// Starts a world of `n_ranks`; returns the number of reported events.
    fn begun_sink(sink: &mut EventSink, generation: u64, n_ranks: usize) -> usize {
        reported(sink, generation, 0, Event::Started(started(n_ranks, 0))).len()
    }

    /// The merge of a world that starts after this step.
    fn begun(n_ranks: usize, first_step: u64) -> MetricsMerge {
        let started = started(n_ranks, first_step);
        let mut metrics_merge = MetricsMerge::default();
        metrics_merge.add(0, Event::Started(started.clone()));
        assert_eq!(metrics_merge.next(), Some(Event::Started(started)));
        metrics_merge
    }

    fn started(n_ranks: usize, first_step: u64) -> Started {
        let (n_rows, buffer_bytes) = ((1, 0), vec![1; n_ranks]);
        let (mesh, total_steps, n_threads) = (Mesh { dp_replicate: n_ranks, ..Mesh::ONE }, 100, 1);
        let (n_trainable, n_params, resumed_from) = (1, 1, None);
        Started { mesh, first_step, total_steps, n_trainable, n_params, n_rows, buffer_bytes, n_threads, resumed_from }
    }

    #[test]
    fn step_is_reported_once_with_total_memory_and_the_slowest_rank() {
        let mut metrics_merge = begun(3, 0);

        metrics_merge.add(1, step(1, 20, 5.0));
        metrics_merge.add(0, step(1, 10, 30.0));
        metrics_merge.add(0, Event::Note("after".into()));
        let early = metrics_merge.next();
        metrics_merge.add(2, step(1, 30, 25.0));

        assert_eq!(early, None, "rank 2 has not reported step 1");
        let Some(Event::Step(m)) = metrics_merge.next() else { panic!("the step is complete") };
        assert_eq!((m.memory_bytes, m.collective_pct, m.slowest_rank), (60, Some(20.0), Some(1)));
        assert_eq!(metrics_merge.next(), Some(Event::Note("after".into())));
        assert_eq!(metrics_merge.next(), None);
    }

    #[test]
    fn step_of_an_ended_world_waits_for_no_other_rank() {
        let mut metrics_merge = begun(2, 6);

        metrics_merge.add(0, step(6, 10, 0.0));
        metrics_merge.add(0, step(7, 10, 0.0));

        assert!(matches!(metrics_merge.next(), Some(Event::Step(m)) if m.step == 6), "no other rank reports step 6");
        assert_eq!(metrics_merge.next(), None, "the other rank reports step 7, too");
    }

    #[test]
    fn leader_events_survive_the_end_of_another_rank() {
        let mut metrics_merge = begun(2, 0);
        metrics_merge.add(0, step(4, 10, 0.0));

        assert_eq!(metrics_merge.next(), None);
        assert!(matches!(metrics_merge.next_as_it_is(), Some(Event::Step(m)) if m.step == 4 && m.memory_bytes == 10));
    }

    #[test]
    fn step_of_a_single_rank_is_reported_as_the_rank_measured_it() {
        let mut metrics_merge = begun(1, 0);
        let Event::Step(measured) = step(1, 10, 0.0) else { panic!("it is a step") };
        let measured = StepMetrics { collective_pct: None, ..measured };

        metrics_merge.add(0, Event::Step(measured.clone()));

        assert_eq!(metrics_merge.next(), Some(Event::Step(measured)));
    }

    fn reported(sink: &mut EventSink, generation: u64, rank: u32, event: Event) -> Vec<Event> {
        let mut events = vec![];
        sink.add(generation, rank, event, &mut |event| events.push(event.clone()));
        events
    }

    #[test]
    fn new_world_flushes_events_that_waited_for_ranks_of_the_old_world() {
        let mut sink = EventSink::new(true);
        let waiting = begun_sink(&mut sink, 1, 2);

        let at_once = reported(&mut sink, 1, 0, step(1, 10, 0.0));
        let late = reported(&mut sink, 2, 0, Event::Note("next".into()));
        let stale = reported(&mut sink, 1, 1, step(1, 10, 0.0));

        assert_eq!((waiting, at_once.len(), stale.len()), (1, 0, 0));
        assert_eq!(late, [step(1, 10, 0.0), Event::Note("next".into())]);
    }

    #[test]
    fn one_of_several_nodes_reports_only_the_leader_and_does_not_wait() {
        let mut sink = EventSink::new(false);

        let leader = reported(&mut sink, 1, 0, step(1, 10, 0.0));
        let other = reported(&mut sink, 1, 1, step(1, 10, 0.0));

        assert_eq!((leader, other), (vec![step(1, 10, 0.0)], vec![]));
    }
}
