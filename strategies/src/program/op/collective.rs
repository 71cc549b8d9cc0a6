//! Exchanges with other ranks.

use super::adjoints::{Adjoints, NoAdjoint};
use super::cost::Cost;
use super::operation::Operation;
use super::signature::Signature;
use super::width::Width;
use crate::mesh::Group;
use crate::program::{Collective, CollectiveKind, Instr, Program, Value, ValueId};
use std::ops::Range;

/// `[buffers…] -> [results…]`: begins a collective; see [`CollectiveKind`]. Operands and results may not be touched
/// before the matching await.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Start(pub Collective);

impl Operation for Start {
    fn name(&self) -> &'static str {
        "start"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let Start(c) = self;
        let (size, position) = (s.mesh_rank.group_size(c.group), s.mesh_rank.position(c.group));
        let part = |n: usize| c.part(n, size, position).len();
        let (n_in, n_out) = match c.kind {
            CollectiveKind::Send { .. } => (s.reads.len(), 0),
            CollectiveKind::Recv { .. } => (0, s.writes.len()),
            _ => (s.reads.len().max(1), s.reads.len().max(1)),
        };
        s.count(n_in, n_out)?;
        let pairs = || s.reads.iter().zip(s.writes);
        let sized = |v: &Value, n: usize| match v.n_elements() == n {
            true => Ok(()),
            false => Err(format!(
                "`{}` has {} elements, expected {n} at position {position} of {size}",
                v.name,
                v.n_elements()
            )),
        };
        if let Some((a, b)) = pairs().find(|(a, b)| a.dtype != b.dtype) {
            return Err(format!("`{}` is {} and `{}` is {}", a.name, a.dtype, b.name, b.dtype));
        }
        match c.kind {
            CollectiveKind::ReduceScatter => pairs().try_for_each(|(a, b)| sized(b, part(a.n_elements()))),
            CollectiveKind::AllToAll => pairs().try_for_each(|(a, b)| sized(b, size * part(a.n_elements()))),
            CollectiveKind::AllGather => pairs().try_for_each(|(a, b)| match std::ptr::eq(*a, *b) {
                true => Ok(()),
                false => sized(a, part(b.n_elements())),
            }),
            CollectiveKind::Send { to: peer, .. } | CollectiveKind::Recv { from: peer, .. } => match peer as usize {
                peer if peer < size && peer != position => Ok(()),
                peer => Err(format!("position {peer} is not another member of a group of {size}")),
            },
            _ => pairs().try_for_each(|(a, b)| sized(b, a.n_elements())),
        }
    }

    fn in_place_pairs(&self, n_reads: usize) -> Vec<(usize, usize)> {
        match self.0.kind {
            CollectiveKind::AllReduce | CollectiveKind::Broadcast { .. } => (0..n_reads).map(|i| (i, i)).collect(),
            _ => Vec::new(),
        }
    }

    // Collectives load the links, not the memory of the ranks.
    fn cost(&self, _program: &Program, _instr: &Instr) -> Cost {
        Cost::default()
    }

    fn backward(&self, instr: &Instr, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let kind = match self.0.kind {
            CollectiveKind::Send { to, channel } => {
                self.backward_of_send(instr, to, channel, adjoints);
                return Ok(());
            }
            CollectiveKind::Recv { from, channel } => {
                self.backward_of_recv(instr, from, channel, adjoints);
                return Ok(());
            }
            CollectiveKind::AllReduce => None,
            CollectiveKind::AllGather => Some(CollectiveKind::ReduceScatter),
            CollectiveKind::ReduceScatter => Some(CollectiveKind::AllGather),
            CollectiveKind::Shift { by } => Some(CollectiveKind::Shift { by: -by }),
            _ => return Err(NoAdjoint { op: "collective" }),
        };
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for (x, y) in instr.reads.iter().zip(&instr.writes) {
            let Some(dy) = adjoints.take(*y) else { continue };
            if kind.is_none() {
                // Every rank has the gradient of the sum, which is also the gradient of each term.
                adjoints.give(*x, dy);
                continue;
            }
            let dtype = adjoints.out.value(dy).dtype;
            let dx = adjoints.grad_of(*x);
            adjoints.set_dtype(dx, dtype);
            from.push(dy);
            to.push((*x, dx));
        }
        if let Some(kind) = kind.filter(|_| !from.is_empty()) {
            let c = Collective { kind, ..self.0 };
            adjoints.emit_collective(c, from, to.iter().map(|(_, dx)| *dx).collect());
        }
        to.into_iter().for_each(|(x, dx)| adjoints.give(x, dx));
        Ok(())
    }

    fn width(&self) -> Width {
        Width::OfOperands
    }

    fn wide_operands(&self, is_wide: bool, n_reads: usize) -> Range<usize> {
        if is_wide { 0..n_reads } else { 0..0 }
    }
}

impl Start {
    /// Values use even channels; their gradients return on the next, odd channel.
    fn backward_of_send(&self, instr: &Instr, to: u32, channel: u32, adjoints: &mut Adjoints) {
        let sent: Vec<ValueId> = instr.reads.iter().copied().filter(|v| adjoints.needs(*v)).collect();
        let grads: Vec<ValueId> = sent.iter().map(|v| adjoints.grad_of(*v)).collect();
        if !sent.is_empty() {
            let kind = CollectiveKind::Recv { from: to, channel: channel + 1 };
            adjoints.emit_collective(Collective { kind, ..self.0 }, vec![], grads.clone());
        }
        sent.iter().zip(grads).for_each(|(v, g)| adjoints.give(*v, g));
    }

    fn backward_of_recv(&self, instr: &Instr, from: u32, channel: u32, adjoints: &mut Adjoints) {
        let grads: Vec<ValueId> = instr.writes.iter().filter_map(|v| adjoints.take(*v)).collect();
        if !grads.is_empty() {
            let kind = CollectiveKind::Send { to: from, channel: channel + 1 };
            adjoints.emit_collective(Collective { kind, ..self.0 }, grads, vec![]);
        }
    }
}

/// `[results…] -> []`: waits for the collective that writes the results.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Await(pub Collective);

impl Operation for Await {
    fn name(&self) -> &'static str {
        "await"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(s.reads.len(), 0)
    }

    fn cost(&self, _program: &Program, _instr: &Instr) -> Cost {
        Cost::default()
    }

    // The adjoint of a start covers its await.
    fn backward(&self, _instr: &Instr, _adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        Ok(())
    }
}

/// `[x] -> [x]`: the beginning of a tensor-parallel region. The value does not change; its gradient, which has a part
/// on every rank, is summed over the group. Erased once the program is differentiated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Enter {
    /// Ranks over which the gradient is summed.
    pub group: Group,
}

impl Operation for Enter {
    fn name(&self) -> &'static str {
        "enter"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(1, 1)?;
        s.same_shape(&[s.reads[0], s.writes[0]])
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let dx = adjoints.grad_of(instr.reads[0]);
        adjoints.emit_collective(Collective::new(CollectiveKind::AllReduce, self.group), vec![dy], vec![dx]);
        adjoints.give(instr.reads[0], dx);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::OfOperands
    }

    fn wide_operands(&self, is_wide: bool, n_reads: usize) -> Range<usize> {
        if is_wide { 0..n_reads } else { 0..0 }
    }
}

impl Adjoints {
    /// Appends a collective and its await.
    pub(super) fn emit_collective(&mut self, c: Collective, reads: Vec<ValueId>, writes: Vec<ValueId>) {
        self.emit(Start(c), reads, &writes);
        self.emit(Await(c), writes, &[]);
    }
}
