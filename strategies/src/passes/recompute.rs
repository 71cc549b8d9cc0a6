//! Activation checkpointing: recomputes the values that the backward pass needs from a block instead of keeping them.
//!
//! Whatever the policy, results of norms, activations and dropout are recomputed where the backward pass reads what they are
//! computed from: they cost one pass over memory, and are a quarter of what a Llama block would keep. Every value is recomputed just
//! before its first use, so that few of them exist at once; [`super::again`] then lets adjoints write them where it can.
//!
//! Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174); the selective policy
//! inverts that of Korthikanti et al. 2022 (arXiv:2205.05198): attention is the only operation *not* recomputed, since its
//! output is small and its work is large.

use crate::program::op::recomputation::Recomputation;
use crate::program::{Kind, Op, Phase, Program, Site, ValueId, op};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What is kept from the forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Everything the backward pass reads, except results that are recomputed in one pass over memory.
    #[default]
    None,
    /// The inputs of each block and its attention outputs.
    Selective,
    /// The inputs of each block.
    Full,
}

/// Rewrites the backward pass of a program to recompute the values that the policy does not keep.
pub fn recompute(program: &mut Program, policy: Recompute) {
    let blocks: Vec<u32> = blocks(program);
    let kept = match policy {
        Recompute::None => kept_but_cheap(program),
        Recompute::Selective | Recompute::Full => kept(program, policy),
    };
    for block in blocks {
        recompute_block(program, block, &kept);
    }
}

fn blocks(program: &Program) -> Vec<u32> {
    let mut blocks: Vec<u32> = program.instrs.iter().filter_map(|i| i.site.block).collect();
    blocks.sort_unstable();
    blocks.dedup();
    blocks
}

/// Kept values: those that a forward instruction of another block reads, and by policy attention outputs.
fn kept(program: &Program, policy: Recompute) -> Vec<bool> {
    let mut home: Vec<Option<Option<u32>>> = vec![None; program.values.len()];
    let mut kept = vec![false; program.values.len()];
    for instr in program.instrs.iter().filter(|i| i.site.phase == Phase::Forward) {
        for v in &instr.reads {
            let elsewhere = home[v.0 as usize].is_some_and(|b| b != instr.site.block);
            kept[v.0 as usize] |= elsewhere;
        }
        let costly = instr.op.operation().recomputation() == Recomputation::Costly;
        let costly = policy == Recompute::Selective && costly;
        // A message cannot be received twice.
        let received = matches!(instr.op, Op::Start(op::Start(c)) if c.is_message());
        for v in &instr.writes {
            home[v.0 as usize] = Some(instr.site.block);
            kept[v.0 as usize] |= costly || received;
        }
    }
    kept
}

/// Kept values where only cheap results are recomputed: those of norms, activations and dropout, from values that the backward pass
/// reads anyway or that are recomputed as well.
fn kept_but_cheap(program: &Program) -> Vec<bool> {
    let mut at_hand: Vec<bool> = program.values.iter().map(|v| v.kind != Kind::Activation).collect();
    for instr in program.instrs.iter().filter(|i| i.site.phase == Phase::Backward) {
        instr.reads.iter().for_each(|v| at_hand[v.0 as usize] = true);
    }
    let mut kept = vec![true; program.values.len()];
    for instr in program.instrs.iter().filter(|i| i.site.phase == Phase::Forward) {
        let cheap = instr.op.operation().recomputation() == Recomputation::Cheap;
        if cheap && instr.reads.iter().all(|v| at_hand[v.0 as usize]) {
            // The statistics of a norm are small, so they are kept.
            kept[instr.writes[0].0 as usize] = false;
            at_hand[instr.writes[0].0 as usize] = true;
        }
    }
    kept
}

fn recompute_block(program: &mut Program, block: u32, kept: &[bool]) {
    let in_block = |site: Site, phase: Phase| site.block == Some(block) && site.phase == phase;
    let Some(first) = program.instrs.iter().position(|i| in_block(i.site, Phase::Backward)) else { return };
    let forward: Vec<usize> = (0..first).filter(|i| in_block(program.instrs[*i].site, Phase::Forward)).collect();
    let mut made_here = vec![false; program.values.len()];
    for i in &forward {
        program.instrs[*i].writes.iter().for_each(|v| made_here[v.0 as usize] = true);
    }
    let lost = |v: &ValueId| made_here[v.0 as usize] && !kept.get(v.0 as usize).copied().unwrap_or(true);
    let mut needed = vec![false; program.values.len()];
    for instr in program.instrs.iter().filter(|i| in_block(i.site, Phase::Backward)) {
        instr.reads.iter().filter(|v| lost(v)).for_each(|v| needed[v.0 as usize] = true);
    }
    // Where each value is first needed; a recomputed instruction moves there.
    let mut first_use = vec![usize::MAX; program.values.len()];
    for (at, instr) in program.instrs.iter().enumerate().filter(|(_, i)| in_block(i.site, Phase::Backward)).rev() {
        instr.reads.iter().for_each(|v| first_use[v.0 as usize] = at);
    }
    let mut again = Vec::new();
    for i in forward.into_iter().rev() {
        let instr = program.instrs[i].clone();
        // A needed result of a collective needs its await, too.
        let awaited = matches!(instr.op, Op::Await(_)).then_some(&instr.reads).into_iter().flatten();
        let results = awaited.chain(&instr.writes).filter(|v| needed[v.0 as usize]);
        let Some(at) = results.map(|v| first_use[v.0 as usize]).min() else { continue };
        for v in instr.reads.iter().filter(|v| lost(v)) {
            needed[v.0 as usize] = true;
            first_use[v.0 as usize] = first_use[v.0 as usize].min(at);
        }
        again.push((at, instr));
    }
    let mut fresh: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for (_, instr) in again.iter_mut().rev() {
        instr.site.phase = Phase::Backward;
        instr.reads.iter_mut().for_each(|v| *v = fresh.get(v).copied().unwrap_or(*v));
        for v in instr.writes.iter_mut() {
            let old = program.value(*v).clone();
            let new = program.add_value(format!("again.{}", old.name), &old.shape, old.dtype, old.kind);
            fresh.insert(*v, new);
            *v = new;
        }
    }
    // A kept value that an instruction writes together with a lost one is not replaced.
    fresh.retain(|old, _| needed[old.0 as usize]);
    for instr in program.instrs.iter_mut().filter(|i| in_block(i.site, Phase::Backward)) {
        instr.reads.iter_mut().for_each(|v| *v = fresh.get(v).copied().unwrap_or(*v));
    }
    again.reverse();
    // Stable: at one place, forward order.
    again.sort_by_key(|(at, _)| *at);
    let mut again = again.into_iter().peekable();
    let mut instrs = Vec::with_capacity(program.instrs.len() + again.len());
    for (i, instr) in std::mem::take(&mut program.instrs).into_iter().enumerate() {
        while let Some((_, recomputed)) = again.next_if(|(at, _)| *at == i) {
            instrs.push(recomputed);
        }
        instrs.push(instr);
    }
    program.instrs = instrs;
}
