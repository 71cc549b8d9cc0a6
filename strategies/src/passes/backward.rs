//! Reverse-mode differentiation of a forward program: every operation has an adjoint, so no model has a backward pass
//! of its own. Source: Griewank and Walther 2008, Evaluating Derivatives, §3.
//!
//! Collectives have adjoints like everything else, so the parallel backward pass needs no code of its own: a sum over a
//! group passes its gradient on, and where a value enters a group its gradient is summed; gathering and scattering are
//! adjoint to each other, and so are sending and receiving.
//!
//! No separate instruction sums partial gradients where an adjoint can accumulate: the adjoint takes the partial sum as
//! its residual.

use crate::program::{
    AttentionPart, Binding, Collective, CollectiveKind, Columns, DType, Instr, Kind, MatMul, NormKind, Op, Phase,
    Program, QkColumns, QkNorm, Role, Site, ValueId,
};
use std::collections::{BTreeMap, BTreeSet};

/// Why a program cannot be differentiated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackwardError {
    /// The program has no loss.
    #[error("the program computes no loss to differentiate")]
    NoLoss,
    /// Nothing is trainable.
    #[error("no parameter is trainable")]
    NothingTrainable,
    /// An operation that only occurs after this pass.
    #[error("operation `{op}` has no adjoint in a forward program")]
    NoAdjoint {
        /// Its name.
        op: &'static str,
    },
}

/// Results of an earlier microbatch that a backward pass continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carry {
    /// The loss.
    pub loss: bool,
    /// The gradients of parameters.
    pub grads: bool,
    /// Each use of a parameter has a separate gradient, even within a microbatch.
    pub apart: bool,
}

impl Carry {
    /// Nothing to continue: a first microbatch.
    pub const NOTHING: Carry = Carry { loss: false, grads: false, apart: false };
}

/// A forward program, or a pipeline stage of one, followed by its backward pass.
#[derive(Clone, Debug)]
pub struct Differentiated {
    /// The program; its loss, if it has one, is bound to [`Role::LossSum`].
    pub program: Program,
    /// Gradient of each trainable parameter: `(index in Program::params, value)`; with [`Carry::apart`], one for each use,
    /// in forward order.
    pub grads: Vec<(usize, ValueId)>,
    /// Initial values of gradients that continue an earlier microbatch: `(index, value)` as in `grads`. These values are
    /// read but never written here; [`super::accumulate`] supplies them.
    pub carried_grads: Vec<(usize, ValueId)>,
    /// Initial value of a loss that continues an earlier microbatch.
    pub carried_loss: Option<ValueId>,
}

/// Marks the values of a whole forward program that receive a gradient: those that a trainable parameter influences.
///
/// # Errors
/// When the program has no loss, or no trainable parameter influences it.
pub fn needs_grad(program: &Program) -> Result<Vec<bool>, BackwardError> {
    let loss = program.bound(Role::LossSum).next().ok_or(BackwardError::NoLoss)?;
    let mut needs = vec![false; program.values.len()];
    program.params.iter().filter(|p| p.trainable).for_each(|p| needs[p.value.0 as usize] = true);
    for instr in &program.instrs {
        if instr.reads.iter().any(|v| needs[v.0 as usize]) {
            instr.writes.iter().for_each(|v| needs[v.0 as usize] = true);
        }
    }
    if needs[loss.0 as usize] { Ok(needs) } else { Err(BackwardError::NothingTrainable) }
}

/// Appends the backward pass of a program or of one of its stages; `needs` comes from [`needs_grad`].
///
/// # Errors
/// When an operation has no adjoint.
pub fn backward(forward: &Program, needs: &[bool], carry: Carry) -> Result<Differentiated, BackwardError> {
    let loss = forward.bound(Role::LossSum).next();
    let mut b = Backward {
        needs: needs.to_vec(),
        grads: vec![None; forward.values.len()],
        merged: BTreeMap::new(),
        in_columns: BTreeSet::new(),
        apart: carry.apart.then(Vec::new),
        out: Program { instrs: Vec::new(), ..forward.clone() },
        site: Site { phase: Phase::Backward, block: None, microbatch: 0 },
    };
    let carried_grads = if carry.grads { b.carry_grads(forward) } else { Vec::new() };
    let carried_loss = loss.filter(|_| carry.loss);
    let carried_loss = carried_loss.map(|_| b.out.add_value("loss_carry", &[], DType::F64, Kind::Activation));
    for instr in &forward.instrs {
        let instr = b.forward_instr(instr, loss, carried_loss);
        b.out.instrs.push(instr);
    }
    for i in (0..forward.instrs.len()).rev() {
        let instr = b.out.instrs[i].clone();
        b.site = Site { phase: Phase::Backward, ..instr.site };
        b.adjoint(&instr)?;
    }
    let trained = || forward.params.iter().enumerate().filter(|(_, p)| p.trainable);
    let grads = match b.apart.take() {
        None => trained().filter_map(|(i, p)| Some((i, b.grads[p.value.0 as usize]?))).collect(),
        Some(apart) => {
            let uses = |p: ValueId| apart.iter().rev().filter(move |(of, _)| *of == p).map(|(_, g)| *g);
            trained().flat_map(|(i, p)| uses(p.value).map(move |g| (i, g))).collect()
        }
    };
    Ok(Differentiated { program: b.out, grads, carried_grads, carried_loss })
}

struct Backward {
    out: Program,
    needs: Vec<bool>,
    /// Partial gradient of each value of the forward program.
    grads: Vec<Option<ValueId>>,
    /// Output of an attention part → output and statistics of all parts together.
    merged: BTreeMap<ValueId, (ValueId, ValueId)>,
    /// Gradients whose columns are written by the adjoints of products that read these columns.
    in_columns: BTreeSet<ValueId>,
    /// Gradients of parameters, one per use from the last use on, if they are kept apart.
    apart: Option<Vec<(ValueId, ValueId)>>,
    site: Site,
}

impl Backward {
    fn carry_grads(&mut self, forward: &Program) -> Vec<(usize, ValueId)> {
        let mut read = vec![false; forward.values.len()];
        forward.instrs.iter().flat_map(|i| &i.reads).for_each(|v| read[v.0 as usize] = true);
        let mut carried = Vec::new();
        let trained = |p: &crate::program::Param| p.trainable && read[p.value.0 as usize];
        for (i, param) in forward.params.iter().enumerate().filter(|(_, p)| trained(p)) {
            let shape = &forward.value(param.value).shape;
            let value = self.out.add_value("grad_carry", shape, DType::F32, Kind::Gradient);
            self.grads[param.value.0 as usize] = Some(value);
            carried.push((i, value));
        }
        carried
    }

    /// The forward instruction as it runs in training: the loss also writes its gradient.
    fn forward_instr(&mut self, instr: &Instr, loss: Option<ValueId>, carried_loss: Option<ValueId>) -> Instr {
        let mut instr = instr.clone();
        match &mut instr.op {
            Op::CrossEntropy { residual, gradient, .. } if Some(instr.writes[0]) == loss => {
                let logits = instr.reads[0];
                *residual = carried_loss.is_some();
                *gradient = self.needs[logits.0 as usize];
                instr.reads.extend(carried_loss);
                if *gradient {
                    let shape = self.out.value(logits).shape.clone();
                    let dlogits = self.out.add_value("d.logits", &shape, DType::F32, Kind::Activation);
                    instr.writes.push(dlogits);
                    self.grads[logits.0 as usize] = Some(dlogits);
                }
            }
            Op::Opaque { n_inputs, n_params, residual, gradient, .. } => {
                let params = instr.reads[*n_inputs..*n_inputs + *n_params].to_vec();
                (*residual, *gradient) = (carried_loss.is_some(), true);
                instr.reads.extend(carried_loss);
                for param in params {
                    // With a carried loss every parameter carries a gradient too; without one, none does.
                    instr.reads.extend(self.take(param));
                    let grad = self.grad_of(param);
                    instr.writes.push(grad);
                    self.give(param, grad);
                }
            }
            _ => {}
        }
        instr
    }

    fn adjoint(&mut self, instr: &Instr) -> Result<(), BackwardError> {
        match instr.op {
            // The loss writes its own gradient; the adjoint of a start covers its await.
            Op::CrossEntropy { .. } | Op::CrossEntropyStats(_) | Op::Opaque { .. } | Op::Await(_) => return Ok(()),
            Op::Start(c) => return self.collective(instr, c),
            _ => {}
        }
        // A result has no gradient if it does not influence the loss or no parameter influences it.
        let Some(dy) = self.take(instr.writes[0]) else { return Ok(()) };
        match &instr.op {
            Op::Embedding { residual, first } => self.embedding(instr, *residual, *first, dy),
            Op::MatMul(m) => self.matmul(instr, *m, dy),
            Op::Norm { kind, .. } => self.norm(instr, *kind, dy),
            Op::HeadNorm { heads, .. } => {
                let (qkv, gains, rstd) = (instr.reads[0], &instr.reads[1..3], instr.writes[1]);
                let carried: Vec<ValueId> = gains.iter().filter_map(|g| self.take(*g)).collect();
                let reads = [qkv, gains[0], gains[1], rstd, dy].into_iter().chain(carried.iter().copied()).collect();
                let writes = vec![self.grad_of(qkv), self.grad_of(gains[0]), self.grad_of(gains[1])];
                self.emit(Op::HeadNormBackward { heads: *heads, residual: !carried.is_empty() }, reads, &writes);
                self.give_params(gains, &writes[1..]);
                self.give(qkv, writes[0]);
            }
            Op::QkSquares(columns) => self.qk_squares(instr, *columns, dy),
            Op::QkNorm(norm) => self.qk_norm(instr, *norm, dy),
            Op::Rotary { heads, inverse } => {
                let op = Op::Rotary { heads: *heads, inverse: !inverse };
                self.simple(op, instr.reads[0], vec![dy, instr.reads[1], instr.reads[2]]);
            }
            Op::Attention(a) => {
                let reads = vec![instr.reads[0], instr.reads[1], instr.writes[0], instr.writes[1], dy];
                self.simple(Op::AttentionBackward(*a), instr.reads[0], reads);
            }
            Op::Activation(f) => {
                let op = Op::ActivationBackward { function: *f, again: false };
                self.simple(op, instr.reads[0], vec![instr.reads[0], dy]);
            }
            Op::SplitColumns => self.split_columns(instr, dy),
            Op::AttentionPart(part) => self.attention_part(instr, *part, dy),
            Op::Add => instr.reads.iter().for_each(|x| self.give(*x, dy)),
            Op::Scale { factor } => self.simple(Op::Scale { factor: *factor }, instr.reads[0], vec![dy]),
            Op::Dropout(dropout) => self.simple(Op::Dropout(*dropout), instr.reads[0], vec![dy, instr.reads[1]]),
            Op::AddBias => {
                self.give(instr.reads[0], dy);
                self.bias(instr.reads[1], None, dy);
            }
            Op::Magnitude(columns) => self.magnitude(instr, *columns, dy),
            Op::Enter { group } => {
                let sum = Collective::new(CollectiveKind::AllReduce, *group);
                let dx = self.grad_of(instr.reads[0]);
                self.emit_collective(sum, vec![dy], vec![dx]);
                self.give(instr.reads[0], dx);
            }
            Op::Cast => self.simple(Op::Cast, instr.reads[0], vec![dy]),
            other => return Err(BackwardError::NoAdjoint { op: other.name() }),
        }
        Ok(())
    }

    /// Appends a collective and its await.
    fn emit_collective(&mut self, c: Collective, reads: Vec<ValueId>, writes: Vec<ValueId>) {
        self.emit(Op::Start(c), reads, &writes);
        self.emit(Op::Await(c), writes, &[]);
    }

    fn collective(&mut self, instr: &Instr, c: Collective) -> Result<(), BackwardError> {
        let kind = match c.kind {
            CollectiveKind::Send { to, channel } => return self.send(instr, c, to, channel),
            CollectiveKind::Recv { from, channel } => return self.recv(instr, c, from, channel),
            CollectiveKind::AllReduce => None,
            CollectiveKind::AllGather => Some(CollectiveKind::ReduceScatter),
            CollectiveKind::ReduceScatter => Some(CollectiveKind::AllGather),
            CollectiveKind::Shift { by } => Some(CollectiveKind::Shift { by: -by }),
            _ => return Err(BackwardError::NoAdjoint { op: "collective" }),
        };
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for (x, y) in instr.reads.iter().zip(&instr.writes) {
            let Some(dy) = self.take(*y) else { continue };
            if kind.is_none() {
                // Every rank has the gradient of the sum, which is also the gradient of each term.
                self.give(*x, dy);
                continue;
            }
            let dtype = self.out.value(dy).dtype;
            let dx = self.grad_of(*x);
            self.out.values[dx.0 as usize].dtype = dtype;
            from.push(dy);
            to.push((*x, dx));
        }
        if let Some(kind) = kind.filter(|_| !from.is_empty()) {
            self.emit_collective(Collective { kind, ..c }, from, to.iter().map(|(_, dx)| *dx).collect());
        }
        to.into_iter().for_each(|(x, dx)| self.give(x, dx));
        Ok(())
    }

    /// Values use even channels; their gradients return on the next, odd channel.
    fn send(&mut self, instr: &Instr, c: Collective, to: u32, channel: u32) -> Result<(), BackwardError> {
        let sent: Vec<ValueId> = instr.reads.iter().copied().filter(|v| self.needs[v.0 as usize]).collect();
        let grads: Vec<ValueId> = sent.iter().map(|v| self.grad_of(*v)).collect();
        if !sent.is_empty() {
            let kind = CollectiveKind::Recv { from: to, channel: channel + 1 };
            self.emit_collective(Collective { kind, ..c }, vec![], grads.clone());
        }
        sent.iter().zip(grads).for_each(|(v, g)| self.give(*v, g));
        Ok(())
    }

    fn recv(&mut self, instr: &Instr, c: Collective, from: u32, channel: u32) -> Result<(), BackwardError> {
        let grads: Vec<ValueId> = instr.writes.iter().filter_map(|v| self.take(*v)).collect();
        if !grads.is_empty() {
            let kind = CollectiveKind::Send { to: from, channel: channel + 1 };
            self.emit_collective(Collective { kind, ..c }, grads, vec![]);
        }
        Ok(())
    }

    /// Joins the gradient of the left part with that of the right part.
    fn split_columns(&mut self, instr: &Instr, dleft: ValueId) {
        let Some(dright) = self.take(instr.writes[1]) else { return };
        self.simple(Op::JoinColumns, instr.reads[0], vec![dleft, dright]);
    }

    /// The adjoint of each part needs only the merged output of all parts, so the parts are independent of each other: the
    /// gradient of a part's carried input equals the gradient of its output.
    fn attention_part(&mut self, instr: &Instr, part: AttentionPart, dy: ValueId) {
        let (q, kv) = (instr.reads[0], instr.reads[1]);
        let all = self.merged.get(&instr.writes[0]).copied().unwrap_or((instr.writes[0], instr.writes[1]));
        if part.carried {
            self.merged.insert(instr.reads[3], all);
            self.give(instr.reads[3], dy);
        }
        let (dq0, dkv0) = (self.take(q), self.take(kv));
        let op = Op::AttentionPartBackward { part, carried_q: dq0.is_some(), carried_kv: dkv0.is_some() };
        let reads = [q, kv, instr.reads[2], all.0, all.1, dy].into_iter().chain(dq0).chain(dkv0).collect();
        let grads = [q, kv].map(|v| {
            let dv = self.grad_of(v);
            // Parts are summed: a half-width sum would lose the terms of the last parts.
            self.out.values[dv.0 as usize].dtype = DType::F32;
            dv
        });
        self.emit(op, reads, &grads);
        self.give(q, grads[0]);
        self.give(kv, grads[1]);
    }

    /// An adjoint with one result, the gradient of `x`.
    fn simple(&mut self, op: Op, x: ValueId, reads: Vec<ValueId>) {
        if self.needs[x.0 as usize] {
            let dx = self.grad_of(x);
            self.emit(op, reads, &[dx]);
            self.give(x, dx);
        }
    }

    fn embedding(&mut self, instr: &Instr, residual: bool, first: usize, dy: ValueId) {
        let (ids, table) = (instr.reads[0], instr.reads[1]);
        if residual {
            self.give(instr.reads[2], dy);
        }
        if self.needs[table.0 as usize] {
            let carried = self.take(table);
            let reads = [ids, dy].into_iter().chain(carried).collect();
            let dtable = self.grad_of(table);
            self.emit(Op::EmbeddingBackward { residual: carried.is_some(), first }, reads, &[dtable]);
            self.give(table, dtable);
        }
    }

    fn matmul(&mut self, instr: &Instr, m: MatMul, dy: ValueId) {
        let (x, w) = (instr.reads[0], instr.reads[1]);
        if m.bias {
            self.bias(instr.reads[2], m.c_columns, dy);
        }
        // First, since adjoints of earlier operations wait for it, but only the optimizer for dW.
        if self.needs[x.0 as usize] {
            let carried = self.take(x);
            let layout = if m.trans_b { MatMul::nn() } else { MatMul::nt() };
            let op = MatMul {
                alpha: m.alpha,
                compute: m.compute,
                residual: carried.is_some(),
                a_columns: m.c_columns,
                c_columns: m.a_columns,
                replaces: carried.is_some_and(|dx| self.in_columns.contains(&dx)),
                ..layout
            };
            let dx = self.grad_of(x);
            self.emit(Op::MatMul(op), [dy, w].into_iter().chain(carried).collect(), &[dx]);
            if m.a_columns.is_some() && (carried.is_none() || op.replaces) {
                self.in_columns.insert(dx);
            }
            self.give(x, dx);
        }
        if self.needs[w.0 as usize] {
            let carried = self.take(w);
            let (x, dy) = ((x, m.a_columns), (dy, m.c_columns));
            // `W [out, in]`: dW = dy^T x; `W [in, out]`: dW = x^T dy.
            let (a, b) = if m.trans_b { (dy, x) } else { (x, dy) };
            let op = MatMul {
                alpha: m.alpha,
                // Of a sum over tokens, the terms would have different scales in FP8.
                compute: m.compute.without_fp8(),
                residual: carried.is_some(),
                a_columns: a.1,
                b_columns: b.1,
                ..MatMul::tn()
            };
            let dw = self.grad_of(w);
            self.emit(Op::MatMul(op), [a.0, b.0].into_iter().chain(carried).collect(), &[dw]);
            self.give(w, dw);
        }
        if m.residual {
            self.give(instr.reads[instr.reads.len() - 1], dy);
        }
    }

    fn bias(&mut self, bias: ValueId, columns: Option<Columns>, dy: ValueId) {
        if self.needs[bias.0 as usize] {
            let carried = self.take(bias);
            let db = self.grad_of(bias);
            let op = Op::ColumnSum { residual: carried.is_some(), columns };
            self.emit(op, [dy].into_iter().chain(carried).collect(), &[db]);
            self.give(bias, db);
        }
    }

    fn magnitude(&mut self, instr: &Instr, columns: Columns, dy: ValueId) {
        let [x, magnitude, lengths] = instr.reads[..] else { unreachable!("the verifier counts operands") };
        let carried = self.take(magnitude);
        let reads = [x, magnitude, lengths, dy].into_iter().chain(carried).collect();
        let writes = [x, magnitude].map(|v| self.grad_of(v));
        self.emit(Op::MagnitudeBackward { columns, residual: carried.is_some() }, reads, &writes);
        self.give(magnitude, writes[1]);
        self.give(x, writes[0]);
    }

    fn norm(&mut self, instr: &Instr, kind: NormKind, dy: ValueId) {
        let (x, params, stats) = (instr.reads[0], &instr.reads[1..], &instr.writes[1..]);
        let dx0 = self.take(x);
        let dparams0: Vec<ValueId> = params.iter().filter_map(|p| self.take(*p)).collect();
        let (residual_x, residual_params) = (dx0.is_some(), !dparams0.is_empty());
        let op = Op::NormBackward { kind, residual_x, residual_params, again: false, narrow: false };
        let head = [x, params[0]].into_iter().chain(stats.iter().copied()).chain([dy]);
        let reads = head.chain(dx0).chain(dparams0).collect();
        let writes: Vec<ValueId> = [x].iter().chain(params).map(|v| self.grad_of(*v)).collect();
        self.emit(op, reads, &writes);
        self.give_params(params, &writes[1..]);
        if self.needs[x.0 as usize] {
            self.give(x, writes[0]);
        }
    }

    fn qk_squares(&mut self, instr: &Instr, columns: QkColumns, dy: ValueId) {
        let qkv = instr.reads[0];
        if self.needs[qkv.0 as usize] {
            let carried = self.take(qkv);
            let reads = [qkv, dy].into_iter().chain(carried).collect();
            let dqkv = self.grad_of(qkv);
            self.emit(Op::QkSquaresBackward { columns, residual: carried.is_some() }, reads, &[dqkv]);
            self.give(qkv, dqkv);
        }
    }

    fn qk_norm(&mut self, instr: &Instr, norm: QkNorm, dy: ValueId) {
        let (qkv, gains, squares) = (instr.reads[0], &instr.reads[1..3], instr.reads[3]);
        let carried: Vec<ValueId> = gains.iter().filter_map(|g| self.take(*g)).collect();
        let reads = [qkv, gains[0], gains[1], squares, dy].into_iter().chain(carried.iter().copied()).collect();
        let writes = [qkv, squares, gains[0], gains[1]].map(|v| self.grad_of(v));
        self.emit(Op::QkNormBackward { norm, residual: !carried.is_empty() }, reads, &writes);
        self.give_params(gains, &writes[2..]);
        self.give(squares, writes[1]);
        self.give(qkv, writes[0]);
    }

    fn give_params(&mut self, params: &[ValueId], grads: &[ValueId]) {
        for (param, grad) in params.iter().zip(grads) {
            if self.needs[param.0 as usize] {
                self.give(*param, *grad);
            }
        }
    }

    /// The partial gradient of `v`, which the caller's adjoint continues.
    fn take(&mut self, v: ValueId) -> Option<ValueId> {
        self.grads[v.0 as usize].take()
    }

    /// Adds `g` to the gradient of `v`.
    fn give(&mut self, v: ValueId, g: ValueId) {
        if !self.needs[v.0 as usize] {
            return;
        }
        let is_param = self.out.value(v).kind == Kind::Parameter;
        if let Some(apart) = self.apart.as_mut().filter(|_| is_param) {
            apart.push((v, g));
            return;
        }
        let sum = match self.take(v) {
            None => g,
            Some(partial) => {
                let sum = self.grad_of(v);
                // Attention parts write f32, so their sum stays f32.
                if [partial, g].iter().any(|x| self.out.value(*x).dtype == DType::F32) {
                    self.out.values[sum.0 as usize].dtype = DType::F32;
                }
                self.emit(Op::Add, vec![partial, g], &[sum]);
                sum
            }
        };
        self.grads[v.0 as usize] = Some(sum);
    }

    /// A new value for the gradient of `v`: same shape and element type.
    fn grad_of(&mut self, v: ValueId) -> ValueId {
        let value = self.out.value(v).clone();
        let trained = value.kind == Kind::Parameter && self.needs[v.0 as usize];
        let kind = if trained { Kind::Gradient } else { Kind::Activation };
        self.out.add_value(format!("d.{}", value.name), &value.shape, value.dtype, kind)
    }

    fn emit(&mut self, op: Op, reads: Vec<ValueId>, writes: &[ValueId]) {
        self.out.push(op, reads, writes.to_vec(), self.site);
    }
}

impl Differentiated {
    /// The binding of the loss.
    pub fn loss(&self) -> Option<Binding> {
        self.program.bindings.iter().copied().find(|b| b.role == Role::LossSum)
    }
}
