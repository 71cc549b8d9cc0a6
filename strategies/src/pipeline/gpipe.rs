//! All forwards, then all backwards.
//!
//! Source: Huang et al. 2018, GPipe, §2.3 (arXiv:1811.06965). Backwards run in ascending order of microbatch, where the
//! paper's figure runs them descending: the bubble is the same, and gradients are summed in the order of other
//! schedules.

use super::{Slot, Work, slot};

pub(super) fn order(n_microbatches: usize) -> Vec<Slot> {
    let all = |work| (0..n_microbatches).map(move |i| slot(work, 0, i));
    all(Work::Forward).chain(all(Work::Backward)).collect()
}
