//! One forward, one backward.
//!
//! Source: Narayanan et al. 2021, §2.2.1 (arXiv:2104.04473), "PipeDream-Flush". Stage `s` of `p` runs `p - s` forwards,
//! then alternates backwards and forwards, then runs the remaining backwards.

use super::{Slot, Work, slot};

pub(super) fn order(n_stages: usize, stage: usize, n_microbatches: usize) -> Vec<Slot> {
    let n_ahead = (n_stages - stage).min(n_microbatches);
    let mut order: Vec<Slot> = (0..n_ahead).map(|i| slot(Work::Forward, 0, i)).collect();
    for i in 0..n_microbatches {
        order.push(slot(Work::Backward, 0, i));
        if n_ahead + i < n_microbatches {
            order.push(slot(Work::Forward, 0, n_ahead + i));
        }
    }
    order
}
