//! Products of a warp group that have not been awaited.

use crate::program::Reg;
use std::collections::{BTreeSet, VecDeque};

/// Products of a warp that have not been waited for.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) open: BTreeSet<Reg>,
    pub(super) groups: VecDeque<BTreeSet<Reg>>,
    pub(super) n_committed: u64,
}

impl Pending {
    /// Whether a product still writes a register.
    pub(super) fn uses(&self, reg: Reg) -> bool {
        self.open.contains(&reg) || self.groups.iter().any(|group| group.contains(&reg))
    }

    /// A copy of a register that is still written is not valid before the end of the product either.
    pub(super) fn copied(&mut self, from: Reg, to: Reg) {
        for group in self.groups.iter_mut().chain([&mut self.open]) {
            if group.contains(&from) {
                group.insert(to);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.groups.is_empty()
    }
}
