//! Sums gradients over the ranks that train on different rows or tokens, in buckets, as soon as the backward pass has
//! made them.
//!
//! Source: Li et al. 2020, PyTorch Distributed, §3.2, for buckets and overlap (arXiv:2006.15704); Rajbhandari et al. 2019,
//! ZeRO, §5, for scattering the sum (arXiv:1910.02054). A bucket is one collective over several tensors, without a copy
//! into one buffer.

use super::buckets::{buckets, buckets_within};
use super::fully_sharded::{GROUP as SHARDS, ZeroStage};
use crate::mesh::{Axis, Group};
use crate::program::{Collective, CollectiveKind, DType, Instr, Kind, Op, Phase, Program, Site, ValueId, op};
use std::collections::BTreeMap;

const REPLICAS: Group = Group::over(&[Axis::DpReplicate]);
const SITE: Site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };

/// Whether gradients of this stage are summed over the ranks after each microbatch, so that no rank keeps a whole one.
pub fn reduces_each_microbatch(stage: ZeroStage, n_shards: usize) -> bool {
    n_shards > 1 && stage != ZeroStage::One
}

/// Sums the terms of every gradient over the data; returns this rank's part of each: `(parameter, value)`. Shards begin at
/// multiples of `unit` elements.
pub fn data_parallel(
    program: &mut Program,
    grads: &[(usize, Vec<ValueId>)],
    bucket_bytes: usize,
    unit: usize,
) -> Vec<(usize, ValueId)> {
    let n_shards = program.mesh_rank.group_size(SHARDS);
    let mut terms: Vec<(usize, ValueId)> = grads.iter().flat_map(|(p, terms)| terms.iter().map(|t| (*p, *t))).collect();
    let written = last_writes(program);
    terms.sort_by_key(|(_, term)| written[term.0 as usize]);
    let mut kept: BTreeMap<usize, Vec<ValueId>> = BTreeMap::new();
    let mut insert = Insertions::default();
    if n_shards > 1 {
        let c = Collective { unit, ..Collective::new(CollectiveKind::ReduceScatter, SHARDS) };
        let microbatch = |(_, term): (usize, ValueId)| program.instrs[written[term.0 as usize]].site.microbatch;
        for bucket in buckets_within(program, &terms, |(p, _)| p, microbatch, bucket_bytes) {
            let at = bucket.iter().map(|(_, t)| written[t.0 as usize]).max().unwrap_or(0);
            let shards: Vec<ValueId> = bucket.iter().map(|(p, _)| shard(program, *p)).collect();
            insert.collective(at, c, bucket.iter().map(|(_, t)| *t).collect(), shards.clone());
            for ((param, _), shard) in bucket.iter().zip(shards) {
                let sum = insert.add(program, at, kept.get(param).and_then(|k| k.last()).copied(), shard);
                kept.insert(*param, vec![sum]);
            }
        }
    } else {
        terms.iter().for_each(|(p, term)| kept.entry(*p).or_default().push(*term));
        for (_, terms) in kept.iter_mut() {
            let mut sum = terms[0];
            for term in &terms[1..] {
                sum = insert.add(program, written[term.0 as usize], Some(sum), *term);
            }
            *terms = vec![sum];
        }
    }
    insert.apply(program);
    let mut kept: Vec<(usize, ValueId)> = kept.into_iter().map(|(p, terms)| (p, terms[0])).collect();
    sum_over_replicas(program, &mut kept, bucket_bytes);
    kept
}

fn sum_over_replicas(program: &mut Program, grads: &mut [(usize, ValueId)], bucket_bytes: usize) {
    if program.mesh_rank.group_size(REPLICAS) == 1 {
        return;
    }
    let written = last_writes(program);
    let mut order: Vec<(usize, ValueId)> = grads.to_vec();
    order.sort_by_key(|(_, g)| written[g.0 as usize]);
    let mut insert = Insertions::default();
    let c = Collective::new(CollectiveKind::AllReduce, REPLICAS);
    let mut sums = BTreeMap::new();
    for bucket in buckets(program, &order, |(p, _)| p, bucket_bytes) {
        let at = bucket.iter().map(|(_, g)| written[g.0 as usize]).max().unwrap_or(0);
        let reads: Vec<ValueId> = bucket.iter().map(|(_, g)| *g).collect();
        let writes: Vec<ValueId> = reads.iter().map(|g| like(program, *g)).collect();
        sums.extend(bucket.iter().map(|(p, _)| *p).zip(writes.iter().copied()));
        insert.collective(at, c, reads, writes);
    }
    insert.apply(program);
    grads.iter_mut().for_each(|(p, g)| *g = sums[p]);
}

/// Completes gradients that also have parts on tensor-parallel ranks, and on pipeline stages that hold the same
/// parameter.
pub fn complete(program: &mut Program, grads: &mut [(usize, ValueId)], bucket_bytes: usize) {
    let tp = Group::over(&[Axis::Tp]);
    let whole = |p: &usize| program.params[*p].sums.iter().any(|s| s.elements.is_none());
    let params: Vec<usize> = grads.iter().map(|(p, _)| *p).filter(whole).collect();
    for bucket in buckets(program, &params, |p| p, bucket_bytes) {
        let at: Vec<usize> = bucket.iter().filter_map(|p| grads.iter().position(|(g, _)| g == p)).collect();
        let reads: Vec<ValueId> = at.iter().map(|i| grads[*i].1).collect();
        let writes: Vec<ValueId> = reads.iter().map(|g| like(program, *g)).collect();
        emit(program, Collective::new(CollectiveKind::AllReduce, tp), reads, writes.clone());
        at.into_iter().zip(writes).for_each(|(i, sum)| grads[i].1 = sum);
    }
    for (param, grad) in grads.iter_mut() {
        some_elements(program, *param, grad);
    }
    // Every stage that holds a parameter does this at the same point of its program, in order of the parameter table.
    for (param, grad) in grads.iter_mut() {
        over_stages(program, *param, grad);
    }
}

/// Sums runs of elements: the key/value heads that several tensor-parallel ranks hold.
fn some_elements(program: &mut Program, param: usize, grad: &mut ValueId) {
    let updated = program.params[param].updated.clone();
    for sum in program.params[param].sums.clone() {
        let Some(elements) = sum.elements else { continue };
        let (start, end) = (elements.start.max(updated.start), elements.end.min(updated.end));
        if start >= end {
            continue;
        }
        let start = start - updated.start;
        let len = end - updated.start - start;
        let part = program.add_value("copied_heads", &[len], DType::F32, Kind::Gradient);
        program.push(Op::Slice(op::Slice { start }), vec![*grad], vec![part], SITE);
        let total = like(program, part);
        emit(program, Collective::new(CollectiveKind::AllReduce, sum.group), vec![part], vec![total]);
        let pasted = like(program, *grad);
        program.push(Op::Paste(op::Paste { start }), vec![*grad, total], vec![pasted], SITE);
        *grad = pasted;
    }
}

/// Stages that hold the same parameter exchange their parts, and all sum them in order of stage.
fn over_stages(program: &mut Program, param: usize, grad: &mut ValueId) {
    let stages = program.params[param].stages.clone();
    let me = program.mesh_rank.on(Axis::Pp);
    if stages.len() < 2 {
        return;
    }
    let group = Group::over(&[Axis::Pp]);
    // Beyond the channels of activations; stages share the parameter table until it is compacted.
    let channel = (1 << 16) | param as u32;
    let others: Vec<usize> = stages.iter().copied().filter(|s| *s != me).collect();
    let send = |to: usize| Collective::new(CollectiveKind::Send { to: to as u32, channel }, group);
    let recv = |from: usize| Collective::new(CollectiveKind::Recv { from: from as u32, channel }, group);
    let theirs: BTreeMap<usize, ValueId> = others.iter().map(|s| (*s, like(program, *grad))).collect();
    // All stages start the messages in one order: pair by pair, from the earlier stage of a pair first.
    for (other, value) in &theirs {
        let mut starts = [(send(*other), vec![*grad], vec![]), (recv(*other), vec![], vec![*value])];
        if *other < me {
            starts.reverse();
        }
        starts.into_iter().for_each(|(c, reads, writes)| program.push(Op::Start(op::Start(c)), reads, writes, SITE));
    }
    theirs.iter().for_each(|(s, v)| program.push(Op::Await(op::Await(recv(*s))), vec![*v], vec![], SITE));
    others.iter().for_each(|s| program.push(Op::Await(op::Await(send(*s))), vec![], vec![], SITE));
    let mut sum: Option<ValueId> = None;
    for stage in stages {
        let term = theirs.get(&stage).copied().unwrap_or(*grad);
        sum = Some(match sum {
            None => term,
            Some(before) => {
                let next = like(program, *grad);
                program.push(Op::Add(op::Add), vec![before, term], vec![next], SITE);
                next
            }
        });
    }
    *grad = sum.unwrap_or(*grad);
}

pub(super) fn last_writes(program: &Program) -> Vec<usize> {
    let mut written = vec![0; program.values.len()];
    for (i, instr) in program.instrs.iter().enumerate() {
        // The result of a collective is available at its await.
        let done = if matches!(instr.op, Op::Await(_)) { &instr.reads } else { &instr.writes };
        done.iter().for_each(|v| written[v.0 as usize] = i);
    }
    written
}

fn shard(program: &mut Program, param: usize) -> ValueId {
    let param = &program.params[param];
    let (name, len) = (format!("d.{}", program.value(param.value).name), param.updated.len());
    program.add_value(name, &[len], DType::F32, Kind::Gradient)
}

pub(super) fn like(program: &mut Program, v: ValueId) -> ValueId {
    let value = program.value(v).clone();
    program.add_value(value.name, &value.shape, value.dtype, value.kind)
}

fn emit(program: &mut Program, c: Collective, reads: Vec<ValueId>, writes: Vec<ValueId>) {
    program.push(Op::Start(op::Start(c)), reads, writes.clone(), SITE);
    program.push(Op::Await(op::Await(c)), writes, vec![], SITE);
}

/// Instructions to insert after existing ones.
#[derive(Default)]
pub(super) struct Insertions {
    after: BTreeMap<usize, Vec<Instr>>,
}

impl Insertions {
    fn push(&mut self, at: usize, op: Op, reads: Vec<ValueId>, writes: Vec<ValueId>) {
        self.after.entry(at).or_default().push(Instr { op, reads, writes, site: SITE });
    }

    fn collective(&mut self, at: usize, c: Collective, reads: Vec<ValueId>, writes: Vec<ValueId>) {
        self.push(at, Op::Start(op::Start(c)), reads, writes.clone());
        self.push(at, Op::Await(op::Await(c)), writes, vec![]);
    }

    pub(super) fn add(&mut self, program: &mut Program, at: usize, before: Option<ValueId>, term: ValueId) -> ValueId {
        let Some(before) = before else { return term };
        let sum = like(program, term);
        self.push(at, Op::Add(op::Add), vec![before, term], vec![sum]);
        sum
    }

    pub(super) fn apply(mut self, program: &mut Program) {
        let instrs = std::mem::take(&mut program.instrs);
        for (i, instr) in instrs.into_iter().enumerate() {
            let site = instr.site;
            program.instrs.push(instr);
            let after = self.after.remove(&i).unwrap_or_default();
            program.instrs.extend(after.into_iter().map(|new| Instr { site, ..new }));
        }
    }
}
