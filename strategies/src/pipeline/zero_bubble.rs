//! ZB-H1: weight gradients are deferred until a stage has no more urgent work.
//!
//! Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, §2.3 (arXiv:2401.10241). Forwards and input gradients run
//! as in 1F1B; on stage `s`, weight gradients trail input gradients by `s` microbatches. With the `p - s` forwards that
//! 1F1B holds there, every stage holds `p` microbatches, as many as 1F1B's first stage.

use super::{Slot, Work, slot};

pub(super) fn order(n_stages: usize, stage: usize, n_microbatches: usize) -> Vec<Slot> {
    let n_ahead = (n_stages - stage).min(n_microbatches);
    let mut order: Vec<Slot> = (0..n_ahead).map(|i| slot(Work::Forward, 0, i)).collect();
    for i in 0..n_microbatches {
        order.push(slot(Work::BackwardInput, 0, i));
        if let Some(weight) = i.checked_sub(stage) {
            order.push(slot(Work::BackwardWeight, 0, weight));
        }
        if n_ahead + i < n_microbatches {
            order.push(slot(Work::Forward, 0, n_ahead + i));
        }
    }
    let n_done = n_microbatches.saturating_sub(stage);
    order.extend((n_done..n_microbatches).map(|i| slot(Work::BackwardWeight, 0, i)));
    order
}
