//! When each piece of a pipeline's work begins and ends, with every stage running its order as early as possible.

use super::{ScheduleKind, Slot, Work, order};

/// Seconds of the work of one stage on one microbatch, all of its chunks together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkTimes {
    /// Forward.
    pub forward: f64,
    /// Gradient of the input.
    pub backward_input: f64,
    /// Gradients of the weights.
    pub backward_weight: f64,
    /// From the end of a piece of work to the start of the next one on a neighbouring stage.
    pub transfer: f64,
}

/// Times of a pipeline's step, in seconds from its beginning.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// For each stage its slots in order, with start and end.
    pub stages: Vec<Vec<(Slot, f64, f64)>>,
}

impl Timeline {
    /// End of the last piece of work.
    pub fn makespan(&self) -> f64 {
        self.stages.iter().filter_map(|s| s.last()).map(|(_, _, end)| *end).fold(0.0, f64::max)
    }

    /// Idle seconds of `stage`.
    pub fn idle(&self, stage: usize) -> f64 {
        self.makespan() - self.stages[stage].iter().map(|(_, start, end)| end - start).sum::<f64>()
    }
}

/// Runs the orders of all stages.
///
/// # Panics As [`order`].
pub fn timeline(kind: ScheduleKind, n_stages: usize, n_microbatches: usize, times: &WorkTimes) -> Timeline {
    let orders: Vec<Vec<Slot>> = (0..n_stages).map(|s| order(kind, n_stages, s, n_microbatches)).collect();
    let timeline = run(&orders, kind.n_chunks(), n_microbatches, times);
    timeline.expect("the orders of a kind are free of deadlock (PIPELINE-3)")
}

/// Runs `orders`; `None` if they deadlock.
pub(super) fn run(orders: &[Vec<Slot>], n_chunks: usize, n_microbatches: usize, times: &WorkTimes) -> Option<Timeline> {
    let n_stages = orders.len();
    let mut ends = Ends { n_microbatches, forward: Vec::new(), backward: Vec::new() };
    ends.forward.resize(n_stages * n_chunks * n_microbatches, None);
    ends.backward.resize(n_stages * n_chunks * n_microbatches, None);
    let mut stages: Vec<Vec<(Slot, f64, f64)>> = orders.iter().map(|o| Vec::with_capacity(o.len())).collect();
    let mut runnable: Vec<usize> = (0..n_stages).collect();
    while let Some(stage) = runnable.pop() {
        let before = stages[stage].len();
        while let Some(slot) = orders[stage].get(stages[stage].len()) {
            let Some(ready) = ends.ready(slot, stage, n_stages, n_chunks, times.transfer) else { break };
            let start = stages[stage].last().map_or(0.0, |(_, _, end)| *end).max(ready);
            let end = start + seconds(slot.work, times) / n_chunks as f64;
            ends.record(slot, stage, n_stages, end);
            stages[stage].push((*slot, start, end));
        }
        if stages[stage].len() > before {
            runnable.extend([(stage + 1) % n_stages, (stage + n_stages - 1) % n_stages]);
        }
    }
    let all = stages.iter().zip(orders).all(|(done, order)| done.len() == order.len());
    all.then_some(Timeline { stages })
}

fn seconds(work: Work, times: &WorkTimes) -> f64 {
    match work {
        Work::Forward => times.forward,
        Work::Backward => times.backward_input + times.backward_weight,
        Work::BackwardInput => times.backward_input,
        Work::BackwardWeight => times.backward_weight,
    }
}

/// When the forward and the input gradient of each `(part, microbatch)` ended.
struct Ends {
    n_microbatches: usize,
    forward: Vec<Option<f64>>,
    backward: Vec<Option<f64>>,
}

impl Ends {
    /// When the operands of `slot` are available; `None` if they are not computed yet.
    fn ready(&self, slot: &Slot, stage: usize, n_stages: usize, n_chunks: usize, transfer: f64) -> Option<f64> {
        let part = slot.chunk as usize * n_stages + stage;
        let at = |part: usize| part * self.n_microbatches + slot.microbatch as usize;
        // Consecutive parts lie on the same stage only if there is a single stage.
        let transfer = if n_stages == 1 { 0.0 } else { transfer };
        match slot.work {
            Work::Forward if part == 0 => Some(0.0),
            Work::Forward => self.forward[at(part - 1)].map(|t| t + transfer),
            Work::Backward | Work::BackwardInput => {
                let own = self.forward[at(part)]?;
                let last = part + 1 == n_stages * n_chunks;
                if last { Some(own) } else { self.backward[at(part + 1)].map(|t| own.max(t + transfer)) }
            }
            Work::BackwardWeight => self.backward[at(part)],
        }
    }

    fn record(&mut self, slot: &Slot, stage: usize, n_stages: usize, end: f64) {
        let part = slot.chunk as usize * n_stages + stage;
        let at = part * self.n_microbatches + slot.microbatch as usize;
        match slot.work {
            Work::Forward => self.forward[at] = Some(end),
            Work::Backward | Work::BackwardInput => self.backward[at] = Some(end),
            Work::BackwardWeight => {}
        }
    }
}
