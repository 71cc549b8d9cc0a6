//! Gradient accumulation and pipelining: runs the forward and backward parts of each microbatch in the order of a
//! schedule. Each microbatch continues the loss and the gradients of the previous one.

use super::backward::Differentiated;
use crate::pipeline::{Slot, Work};
use crate::program::{Binding, Instr, Kind, Op, Phase, Program, Role, ValueId, op};
use std::collections::{BTreeMap, BTreeSet};

/// A chunk of the model, differentiated: for the first microbatch, and for the others, which continue it.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// For microbatch 0.
    pub first: Differentiated,
    /// For the others.
    pub rest: Differentiated,
}

/// The part of a step up to the gradients.
#[derive(Clone, Debug)]
pub struct Accumulated {
    /// The program; its inputs are bound once for each microbatch.
    pub program: Program,
    /// Gradient of each trainable parameter: `(index in Program::params, terms)`. Terms that do not continue each other
    /// are listed one by one, in order of microbatch. A parameter with gradients from several chunks or uses has one
    /// entry for each.
    pub grads: Vec<(usize, Vec<ValueId>)>,
    /// Losses of the microbatches, in order, if they do not continue each other.
    pub losses: Vec<ValueId>,
}

/// Runs the chunks of a rank in the given order.
///
/// All chunks are made from the forward program `base`, so that its values have the same ids in all of them.
pub fn accumulate(base: &Program, chunks: &[Chunk], order: &[Slot]) -> Accumulated {
    let shared = |v: ValueId| {
        let value = base.values.get(v.0 as usize);
        value.is_some_and(|value| value.kind.is_state()) || base.bound(Role::Hyper).any(|hyper| hyper == v)
    };
    let is_shared: Vec<bool> = (0..base.values.len() as u32).map(|v| shared(ValueId(v))).collect();
    let mut program = Program { instrs: Vec::new(), bindings: Vec::new(), ..base.clone() };
    program.bindings.extend(base.bindings.iter().filter(|b| b.role == Role::Hyper));
    for (i, param) in program.params.iter_mut().enumerate() {
        param.owned = chunks.iter().any(|c| c.first.program.params[i].owned);
        param.stages.clone_from(&chunks[0].first.program.params[i].stages);
    }
    let mut run = Run {
        chunks,
        is_shared,
        weight_grads: chunks.iter().map(|c| [weight_grads(&c.first), weight_grads(&c.rest)]).collect(),
        instances: BTreeMap::new(),
        terms: BTreeMap::new(),
        losses: Vec::new(),
        program,
    };
    order.iter().for_each(|slot| run.slot(*slot));
    run.finish()
}

struct Run<'a> {
    program: Program,
    chunks: &'a [Chunk],
    /// Values of the base program that all microbatches share.
    is_shared: Vec<bool>,
    /// Which instructions of the first and the other microbatches of a chunk only make gradients of weights.
    weight_grads: Vec<[Vec<bool>; 2]>,
    /// Ids of the values of a chunk for a microbatch.
    instances: BTreeMap<(u32, u32), Vec<Option<ValueId>>>,
    /// Gradients so far, by chunk and index in its list of gradients.
    terms: BTreeMap<(u32, usize), Vec<ValueId>>,
    losses: Vec<Binding>,
}

impl Run<'_> {
    fn slot(&mut self, slot: Slot) {
        let chunks = self.chunks;
        let chunk = &chunks[slot.chunk as usize];
        let is_rest = usize::from(slot.microbatch > 0);
        let template = if is_rest == 1 { &chunk.rest } else { &chunk.first };
        let key = (slot.chunk, slot.microbatch);
        let n_values = template.program.values.len();
        let mut map = self.instances.remove(&key).unwrap_or_else(|| vec![None; n_values]);
        if slot.work == Work::Forward {
            self.bind(template, slot.microbatch, &mut map);
        }
        let first = self.program.instrs.len();
        for (i, instr) in template.program.instrs.iter().enumerate() {
            let is_weight_grad = self.weight_grads[slot.chunk as usize][is_rest][i];
            let runs = match slot.work {
                Work::Forward => instr.site.phase <= Phase::Forward,
                Work::Backward => instr.site.phase == Phase::Backward,
                Work::BackwardInput => instr.site.phase == Phase::Backward && !is_weight_grad,
                Work::BackwardWeight => instr.site.phase == Phase::Backward && is_weight_grad,
            };
            if runs {
                self.instr(template, instr, slot, &mut map);
            }
        }
        self.collect(template, slot, &map, first);
        self.instances.insert(key, map);
    }

    /// Inputs are bound when the forward part begins.
    fn bind(&mut self, template: &Differentiated, microbatch: u32, map: &mut [Option<ValueId>]) {
        for b in template.program.bindings.iter().filter(|b| !matches!(b.role, Role::Hyper | Role::LossSum)) {
            let value = self.instance(template, b.value, (0, 0), map);
            self.program.bindings.push(Binding { microbatch, value, ..*b });
        }
    }

    fn instr(&mut self, template: &Differentiated, instr: &Instr, slot: Slot, map: &mut [Option<ValueId>]) {
        let key = (slot.chunk, slot.microbatch);
        let mut ids =
            |vs: &[ValueId]| -> Vec<ValueId> { vs.iter().map(|v| self.instance(template, *v, key, map)).collect() };
        let (reads, writes) = (ids(&instr.reads), ids(&instr.writes));
        let mut site = instr.site;
        site.microbatch = slot.microbatch;
        self.program.push(instr.op.clone(), reads, writes, site);
    }

    fn instance(
        &mut self,
        template: &Differentiated,
        v: ValueId,
        (chunk, _): (u32, u32),
        map: &mut [Option<ValueId>],
    ) -> ValueId {
        if self.is_shared.get(v.0 as usize).copied().unwrap_or(false) {
            return v;
        }
        if let Some(known) = map[v.0 as usize] {
            return known;
        }
        let carried = template.carried_grads.iter().find(|(_, hole)| *hole == v);
        let continued = match carried {
            Some((param, _)) => {
                let at = template.grads.iter().position(|(p, _)| p == param);
                at.and_then(|at| self.terms.get(&(chunk, at))?.last().copied())
            }
            None if template.carried_loss == Some(v) => self.losses.last().map(|l| l.value),
            None => None,
        };
        let id = continued.unwrap_or_else(|| {
            let value = template.program.value(v);
            self.program.add_value(value.name.clone(), &value.shape, value.dtype, value.kind)
        });
        map[v.0 as usize] = Some(id);
        id
    }

    /// Records the loss and the gradients that the instructions from `first` on have made.
    fn collect(&mut self, template: &Differentiated, slot: Slot, map: &[Option<ValueId>], first: usize) {
        if let Some(loss) = template.loss().filter(|_| slot.work == Work::Forward) {
            let value = map[loss.value.0 as usize].expect("the forward part writes the loss");
            if let Some(previous) = self.losses.last() {
                self.program.values[previous.value.0 as usize].kind = Kind::Activation;
            }
            if template.carried_loss.is_some() {
                self.losses.clear();
            }
            self.losses.push(Binding { value, ..loss });
        }
        let made: BTreeSet<ValueId> = self.program.instrs[first..].iter().flat_map(|i| &i.writes).copied().collect();
        for (at, (param, grad)) in template.grads.iter().enumerate() {
            // Later microbatches may have continued gradients of an earlier part of this microbatch.
            let Some(grad) = map[grad.0 as usize].filter(|grad| made.contains(grad)) else { continue };
            let terms = self.terms.entry((slot.chunk, at)).or_default();
            if template.carried_grads.iter().any(|(p, _)| p == param) {
                terms.clear();
            }
            terms.push(grad);
        }
    }

    fn finish(mut self) -> Accumulated {
        let losses: Vec<ValueId> = self.losses.iter().map(|b| b.value).collect();
        if let [loss] = self.losses[..] {
            self.program.bindings.push(loss);
        }
        let param = |(chunk, at): (u32, usize)| self.chunks[chunk as usize].first.grads[at].0;
        let mut grads: Vec<(usize, Vec<ValueId>)> =
            self.terms.into_iter().map(|(key, terms)| (param(key), terms)).collect();
        // In order of the parameter table, which all ranks share; uses stay in order.
        grads.sort_by_key(|(param, _)| *param);
        Accumulated { program: self.program, grads, losses }
    }
}

/// Marks backward instructions that no gradient leaving the chunk depends on: they can be deferred.
/// Source: Qi et al. 2023, §2.1 (arXiv:2401.10241).
fn weight_grads(template: &Differentiated) -> Vec<bool> {
    let program = &template.program;
    let mut needed = vec![false; program.values.len()];
    let mut waits = vec![false; program.instrs.len()];
    for (i, instr) in program.instrs.iter().enumerate().rev() {
        let leaves = matches!(instr.op, Op::Start(op::Start(c)) if c.is_message());
        let awaited = matches!(instr.op, Op::Await(_)) && (instr.reads.is_empty() || any(&needed, &instr.reads));
        if leaves || awaited || any(&needed, &instr.writes) {
            instr.reads.iter().for_each(|v| needed[v.0 as usize] = true);
        } else {
            waits[i] = instr.site.phase == Phase::Backward;
        }
    }
    waits
}

fn any(marked: &[bool], values: &[ValueId]) -> bool {
    values.iter().any(|v| marked[v.0 as usize])
}
