//! Fully sharded data parallelism: each rank of `dp_shard x cp` keeps a part of the state, and gathers weights when an
//! operation needs them.
//!
//! Source: Rajbhandari et al. 2019, ZeRO, §5 (arXiv:1910.02054); Zhao et al. 2023, FSDP, §3 (arXiv:2304.11277).
//! Stage 1 shards the optimizer's state; stages 2 and 3 also shard weights and gradients. Stage 2 keeps gathered weights
//! from their first use to their last, stage 3 gathers them for each use. We differ in that a parameter is cut by
//! elements, regardless of its rows, and that one collective gathers a block's parameters without a copy into one buffer.
//!
//! [`super::data_parallel`] handles the gradients.

use crate::mesh::{Axis, Group};
use crate::program::collective::part;
use crate::program::{Collective, CollectiveKind, Instr, Kind, Op, Phase, Program, Site, ValueId, op};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The ranks that share the shards.
pub const GROUP: Group = Group::over(&[Axis::DpShard, Axis::Cp]);
/// Shards begin at multiples of this many elements: a cache line of f32.
pub const UNIT: usize = 16;

/// What is sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum ZeroStage {
    /// State of the optimizer.
    One,
    /// Weights and gradients too; gathered weights stay for the step.
    Two,
    /// Weights and gradients too; gathered weights are dropped after each use.
    #[default]
    Three,
}

impl TryFrom<u8> for ZeroStage {
    type Error = String;

    fn try_from(stage: u8) -> Result<ZeroStage, String> {
        match stage {
            1 => Ok(ZeroStage::One),
            2 => Ok(ZeroStage::Two),
            3 => Ok(ZeroStage::Three),
            _ => Err(format!("ZeRO has stages 1, 2 and 3, not {stage}")),
        }
    }
}

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> u8 {
        stage as u8 + 1
    }
}

/// Reduces every parameter's state to this rank's part, and gathers weights where they are needed.
///
/// A gather begins `prefetch` uses ahead; shards begin at multiples of `unit` elements.
pub fn fully_sharded(program: &mut Program, stage: ZeroStage, prefetch: usize, unit: usize) {
    let n_ranks = program.mesh_rank.group_size(GROUP);
    if n_ranks == 1 {
        return;
    }
    let position = program.mesh_rank.position(GROUP);
    for param in &mut program.params {
        param.updated = part(param.shape.iter().product(), unit, n_ranks, position);
    }
    if stage == ZeroStage::One {
        return;
    }
    let whole: BTreeMap<ValueId, Vec<usize>> = program.params.iter().map(|p| (p.value, p.shape.clone())).collect();
    let uses = uses(program, &whole, stage);
    gather(program, &whole, &uses, prefetch, unit);
    for param in &mut program.params {
        param.held = param.updated.clone();
        program.values[param.value.0 as usize].shape = vec![param.held.len()];
    }
}

/// A run of instructions that use the same gathered parameters.
struct Use {
    /// First and last instruction.
    span: (usize, usize),
    params: Vec<ValueId>,
}

/// Parameters that consecutive instructions of one block use are gathered together.
fn uses(program: &Program, whole: &BTreeMap<ValueId, Vec<usize>>, stage: ZeroStage) -> Vec<Use> {
    let mut uses: Vec<Use> = Vec::new();
    let mut open: Option<Site> = None;
    let mut held: BTreeMap<ValueId, usize> = BTreeMap::new();
    for (i, instr) in program.instrs.iter().enumerate().filter(|(_, i)| i.site.phase != Phase::Optimizer) {
        if open != Some(instr.site) {
            open = Some(instr.site);
            if stage == ZeroStage::Three {
                held.clear();
            }
        }
        for v in instr.reads.iter().filter(|v| whole.contains_key(v)) {
            let known = held.get(v).copied();
            // A block's first use opens a collective; its other parameters join.
            let at = known.unwrap_or_else(|| match uses.last() {
                Some(last) if last.span.0 == i || same_run(program, last.span.0, i) => uses.len() - 1,
                _ => {
                    uses.push(Use { span: (i, i), params: Vec::new() });
                    uses.len() - 1
                }
            });
            if known.is_none() {
                held.insert(*v, at);
                uses[at].params.push(*v);
            }
            uses[at].span.1 = i;
        }
    }
    uses
}

/// Whether all instructions from `first` to `last` belong to one block and site.
fn same_run(program: &Program, first: usize, last: usize) -> bool {
    program.instrs[first].site.block.is_some()
        && program.instrs[first..=last].iter().all(|i| i.site == program.instrs[first].site)
}

fn gather(program: &mut Program, whole: &BTreeMap<ValueId, Vec<usize>>, uses: &[Use], prefetch: usize, unit: usize) {
    let instrs = std::mem::take(&mut program.instrs);
    // Before instruction `i`: collectives that begin there, then collectives that must be complete.
    let mut begins: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let mut needed: BTreeMap<usize, usize> = BTreeMap::new();
    for (u, this) in uses.iter().enumerate() {
        let at = uses[u.saturating_sub(prefetch)].span.0;
        begins.entry(at).or_default().push(u);
        needed.insert(this.span.0, u);
    }
    let c = Collective { unit, ..Collective::new(CollectiveKind::AllGather, GROUP) };
    let mut gathered: Vec<Vec<ValueId>> = vec![Vec::new(); uses.len()];
    // Parameter → its current gathered value, and the last instruction that may read that value.
    let mut current: BTreeMap<ValueId, (ValueId, usize)> = BTreeMap::new();
    for (i, mut instr) in instrs.into_iter().enumerate() {
        for u in begins.remove(&i).unwrap_or_default() {
            for param in &uses[u].params {
                let value = program.value(*param).clone();
                gathered[u].push(program.add_value(value.name, &whole[param], value.dtype, Kind::Activation));
            }
            program.push(Op::Start(op::Start(c)), uses[u].params.clone(), gathered[u].clone(), instr.site);
        }
        if let Some(u) = needed.remove(&i) {
            program.push(Op::Await(op::Await(c)), gathered[u].clone(), vec![], instr.site);
            let pairs = uses[u].params.iter().zip(&gathered[u]);
            current.extend(pairs.map(|(param, value)| (*param, (*value, uses[u].span.1))));
        }
        substitute(&mut instr, &current, i);
        program.instrs.push(instr);
    }
}

fn substitute(instr: &mut Instr, current: &BTreeMap<ValueId, (ValueId, usize)>, at: usize) {
    for v in &mut instr.reads {
        if let Some((value, _)) = current.get(v).filter(|(_, last)| at <= *last) {
            *v = *value;
        }
    }
}

/// After the update of stage 1, every rank gathers the parts that the others updated.
///
/// All ranks take part for every parameter, even if it is smaller than a unit and one rank has all of its elements.
pub fn gather_updated(program: &mut Program, trained: &[usize], bucket_bytes: usize, unit: usize) {
    if program.mesh_rank.group_size(GROUP) == 1 {
        return;
    }
    let c = Collective { unit, ..Collective::new(CollectiveKind::AllGather, GROUP) };
    let site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
    for bucket in crate::passes::buckets::buckets(program, trained, |p| p, bucket_bytes) {
        let values: Vec<ValueId> = bucket.iter().map(|p| program.params[*p].value).collect();
        program.push(Op::Start(op::Start(c)), values.clone(), values.clone(), site);
        program.push(Op::Await(op::Await(c)), values, vec![], site);
    }
}
