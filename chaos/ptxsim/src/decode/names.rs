//! Names within a function: registers, variables and labels, by the block that declares them.

use super::Place;
use crate::program::{Initial, LaneMask, Reg, Special};
use crate::syntax::{Function, ScopeId};
use crate::types::Ty;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug)]
pub(super) enum Slot {
    Reg(Reg, Ty),
    Pred(u32),
}

#[derive(Default)]
pub(super) struct Names {
    pub(super) slots: BTreeMap<(ScopeId, String), Slot>,
    pub(super) vars: BTreeMap<(ScopeId, String), Place>,
    labels: BTreeMap<(ScopeId, String), usize>,
    lists: BTreeMap<(ScopeId, String), Vec<String>>,
    parents: Vec<ScopeId>,
    /// The decoded instruction at which each statement starts.
    pub(super) starts: Vec<u32>,
    n_statements: usize,
}

impl Names {
    pub(super) fn new(function: &Function) -> Names {
        let labels = function.labels.iter().map(|(scope, name, at)| ((*scope, name.clone()), *at));
        let lists = function.branch_targets.iter().map(|(scope, name, list)| ((*scope, name.clone()), list.clone()));
        Names {
            labels: labels.collect(),
            lists: lists.collect(),
            parents: function.scopes.clone(),
            n_statements: function.body.len(),
            ..Names::default()
        }
    }

    pub(super) fn slot(&self, scope: ScopeId, name: &str) -> Option<Slot> {
        self.find(scope, name, &self.slots)
    }

    pub(super) fn var(&self, scope: ScopeId, name: &str) -> Option<Place> {
        self.find(scope, name, &self.vars)
    }

    /// The statement that a label stands before. A label at the end stands before the final return.
    pub(super) fn label(&self, scope: ScopeId, name: &str) -> Option<usize> {
        self.find(scope, name, &self.labels)
    }

    pub(super) fn list(&self, scope: ScopeId, name: &str) -> Option<Vec<String>> {
        self.find(scope, name, &self.lists)
    }

    /// Completes [`Names::starts`] by the final return.
    pub(super) fn end(&mut self, at: u32) {
        debug_assert_eq!(self.starts.len(), self.n_statements);
        self.starts.push(at);
    }

    /// Looks from the innermost block outwards.
    fn find<T: Clone>(&self, scope: ScopeId, name: &str, table: &BTreeMap<(ScopeId, String), T>) -> Option<T> {
        let mut scope = scope;
        loop {
            if let Some(found) = table.get(&(scope, name.to_owned())) {
                return Some(found.clone());
            }
            if scope == 0 {
                return None;
            }
            scope = self.parents[scope];
        }
    }
}

/// The value of a special register that stays constant while a block runs.
pub(super) fn special(name: &str) -> Option<Initial> {
    let axis = |rest: &str| match rest {
        ".x" => Some(0u8),
        ".y" => Some(1),
        ".z" => Some(2),
        _ => None,
    };
    let of = |prefix: &str, make: fn(u8) -> Special| name.strip_prefix(prefix).and_then(axis).map(make);
    let masks = [
        ("%lanemask_eq", LaneMask::Equal),
        ("%lanemask_lt", LaneMask::Below),
        ("%lanemask_le", LaneMask::BelowOrEqual),
        ("%lanemask_gt", LaneMask::Above),
        ("%lanemask_ge", LaneMask::AboveOrEqual),
    ];
    let special = of("%tid", Special::Tid)
        .or_else(|| of("%ntid", Special::Ntid))
        .or_else(|| of("%ctaid", Special::Ctaid))
        .or_else(|| of("%nctaid", Special::Nctaid))
        // Without clusters, every block is a cluster of its own.
        .or_else(|| of("%clusterid", Special::Ctaid))
        .or_else(|| of("%nclusterid", Special::Nctaid))
        .or_else(|| masks.iter().find(|(n, _)| *n == name).map(|(_, mask)| Special::LaneMask(*mask)));
    if let Some(special) = special {
        return Some(Initial::Special(special));
    }
    Some(match name {
        "%laneid" => Initial::Special(Special::LaneId),
        "%warpid" => Initial::Special(Special::WarpId),
        "%nwarpid" => Initial::Special(Special::NWarpId),
        "%dynamic_smem_size" => Initial::Special(Special::DynamicSharedBytes),
        "%total_smem_size" => Initial::Special(Special::TotalSharedBytes),
        "WARP_SZ" | "%WARP_SZ" => Initial::Bits(32),
        "%cluster_ctarank" | "%cluster_ctaid.x" | "%cluster_ctaid.y" | "%cluster_ctaid.z" | "%smid" => Initial::Bits(0),
        "%cluster_nctarank" | "%cluster_nctaid.x" | "%cluster_nctaid.y" | "%cluster_nctaid.z" | "%nsmid" => {
            Initial::Bits(1)
        }
        _ => return None,
    })
}
