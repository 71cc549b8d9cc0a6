//! Rewrites a program to one rank's part, given where it is cut.

use super::regions::Cut;
use crate::mesh::{Axes, Axis, Group};
use crate::program::collective::part;
use crate::program::op::shares::{Piece, inside};
use crate::program::{
    Binding, Collective, CollectiveKind, Column, Columns, DType, Dropout, GradSum, Instr, Kind, MatMul, Op, Param,
    ParamPart, Program, QkColumns, QkNorm, Role, Site, TokenSlice, ValueId, VocabShard, op,
};
use std::collections::BTreeMap;
use std::ops::Range;

const GROUP: Group = Group::over(&[Axis::Tp]);

pub(super) fn rewrite(program: &mut Program, cut: &Cut, sequence_parallel: bool) {
    let instrs = std::mem::take(&mut program.instrs);
    let mesh_rank = program.mesh_rank;
    let ids = program.bound(Role::Column(Column::Ids)).next();
    let mut r = Rewrite {
        n_tokens: ids.map_or(0, |ids| program.value(ids).shape[0]),
        tp: mesh_rank.mesh.tp,
        me: mesh_rank.on(Axis::Tp),
        cut,
        sequence_parallel,
        entered: BTreeMap::new(),
        sliced: BTreeMap::new(),
        program,
    };
    r.cut_params();
    r.cut_values();
    instrs.into_iter().for_each(|instr| r.instr(instr));
}

struct Rewrite<'a> {
    program: &'a mut Program,
    cut: &'a Cut,
    n_tokens: usize,
    tp: usize,
    me: usize,
    sequence_parallel: bool,
    /// A value between the regions → the value that products within a region read instead.
    entered: BTreeMap<ValueId, ValueId>,
    /// An input → what this rank has of it: its slice for this rank's tokens, or all tokens with this rank's labels.
    sliced: BTreeMap<(ValueId, bool), ValueId>,
}

fn ranges(pieces: &[Piece]) -> Vec<Range<usize>> {
    pieces.iter().map(|p| p.range.clone()).collect()
}

fn extent(pieces: &[Piece]) -> usize {
    pieces.iter().map(|p| p.range.len()).sum()
}

impl Rewrite<'_> {
    fn cut_params(&mut self) {
        let run = self.cut.run;
        for param in &mut self.program.params {
            let Some((dim, pieces)) = self.cut.params.get(&param.value) else {
                param.owned = self.me == 0;
                continue;
            };
            param.cut(*dim, &ranges(pieces));
            self.program.values[param.value.0 as usize].shape.clone_from(&param.shape);
            let mut first = 0;
            let row: usize = param.shape[1..].iter().product();
            for piece in pieces {
                let elements = first * row..(first + piece.range.len()) * row;
                first += piece.range.len();
                if piece.copied {
                    let group = Group { axes: Axes::of(&[Axis::Tp]), run: Some(run as u32) };
                    match param.sums.last_mut().and_then(|s| s.elements.as_mut()) {
                        // Keys and values are adjacent: one sum for both.
                        Some(before) if before.end == elements.start => before.end = elements.end,
                        _ => param.sums.push(GradSum { group, elements: Some(elements) }),
                    }
                }
            }
            if !self.me.is_multiple_of(run) {
                disown_copies(param, pieces);
            }
        }
    }

    /// Removes other ranks' columns from values, and other ranks' tokens from values between regions.
    fn cut_values(&mut self) {
        for i in 0..self.program.values.len() {
            let id = ValueId(i as u32);
            let value = &mut self.program.values[i];
            match self.cut.columns.get(&id) {
                Some(pieces) => *value.shape.last_mut().expect("it has columns") = extent(pieces),
                None if self.cut.whole.contains(&id) => {}
                None if self.sequence_parallel && value.kind == Kind::Activation && !value.shape.is_empty() => {
                    value.shape[0] = part(value.shape[0], 1, self.tp, self.me).len();
                }
                None => {}
            }
        }
    }

    fn instr(&mut self, mut instr: Instr) {
        let is_cut = |v: &ValueId| self.cut.columns.contains_key(v);
        if instr.op.operation_mut().heads_mut().is_some() {
            return self.own_heads(instr);
        }
        match instr.op {
            Op::MatMul(m) if is_cut(&instr.reads[0]) => self.row_parallel(&instr, m),
            Op::MatMul(m) if is_cut(&instr.writes[0]) => self.column_parallel(instr, m),
            Op::Embedding(op::Embedding { residual, .. }) if self.cut.params.contains_key(&instr.reads[1]) => {
                self.embedding(&instr, residual);
            }
            Op::CrossEntropy(op::CrossEntropy { residual, gradient, .. }) => {
                let (vocab, stats) = self.stats(&instr);
                instr.reads.insert(3, stats);
                let op = Op::CrossEntropy(op::CrossEntropy { residual, gradient, vocab: Some(vocab) });
                self.program.push(op, instr.reads, instr.writes, instr.site);
            }
            Op::LogProbs(_) => {
                let (vocab, stats) = self.stats(&instr);
                instr.reads.push(stats);
                let op = Op::LogProbs(op::LogProbs { vocab: Some(vocab) });
                self.program.push(op, instr.reads, instr.writes, instr.site);
            }
            _ if instr.reads.iter().any(|v| self.cut.whole.contains(v)) => self.program.instrs.push(instr),
            Op::RowSums(_) if self.sequence_parallel => self.sums_of_own_tokens(instr),
            Op::QkSquares(op::QkSquares(columns)) => self.qk_squares(&instr, columns),
            Op::QkNorm(norm) => {
                let columns = self.local_qk(norm.columns, instr.reads[0]);
                let summed = QkColumns { q: columns.q * self.tp, k: columns.k * self.tp };
                let op = Op::QkNorm(QkNorm { columns, summed, ..norm });
                self.program.push(op, instr.reads, instr.writes, instr.site);
            }
            // What products along cut inputs read is one run of columns.
            Op::Dropout(dropout) if is_cut(&instr.reads[0]) => {
                let first_column = self.cut.columns[&instr.reads[0]][0].range.start;
                let op = Op::Dropout(Dropout { first_column, ..dropout });
                self.program.push(op, instr.reads, instr.writes, instr.site);
            }
            _ => {
                if self.sequence_parallel {
                    self.of_own_tokens(&mut instr);
                }
                self.program.instrs.push(instr);
            }
        }
    }

    /// An operation on heads works on this rank's. Every rank has the part of a gradient that comes from its heads.
    fn own_heads(&mut self, mut instr: Instr) {
        if let Some(heads) = instr.op.operation_mut().heads_mut() {
            (heads.n_heads, heads.n_kv_heads) = (heads.n_heads / self.tp, (heads.n_kv_heads / self.tp).max(1));
        }
        let n_tokens = self.program.value(instr.writes[0]).shape[0];
        if let Some(statistics) = instr.writes.get(1) {
            self.program.values[statistics.0 as usize].shape = vec![n_tokens, instr.op.operation().n_statistics()];
        }
        let is_param = |v: &ValueId| self.program.value(*v).kind == Kind::Parameter;
        let params: Vec<ValueId> = instr.reads.iter().copied().filter(is_param).collect();
        params.into_iter().for_each(|param| self.sum_gradient(param));
        self.program.instrs.push(instr);
    }

    /// This rank's columns of queries and keys. Keys that several ranks hold count on each of them.
    fn local_qk(&self, all: QkColumns, qkv: ValueId) -> QkColumns {
        let pieces = &self.cut.columns[&qkv];
        QkColumns { q: extent(&inside(pieces, 0..all.q)), k: extent(&inside(pieces, all.q..all.q + all.k)) }
    }

    /// The heads of every rank contribute a part of the sum of squares and of its gradient.
    fn qk_squares(&mut self, instr: &Instr, columns: QkColumns) {
        let (qkv, squares) = (instr.reads[0], instr.writes[0]);
        let n = self.program.value(qkv).n_rows();
        self.program.values[squares.0 as usize].shape = vec![n, 2];
        let (partial, sum) = (self.like(squares, n), self.like(squares, n));
        let op = Op::QkSquares(op::QkSquares(self.local_qk(columns, qkv)));
        self.program.push(op, vec![qkv], vec![partial], instr.site);
        self.collective(CollectiveKind::AllReduce, 2, partial, sum, instr.site);
        self.program.push(Op::Enter(op::Enter { group: GROUP }), vec![sum], vec![squares], instr.site);
    }

    /// An operation between regions works on this rank's tokens only: its inputs are cut, and every rank has a part of the
    /// gradients of its parameters.
    fn of_own_tokens(&mut self, instr: &mut Instr) {
        for v in &mut instr.reads {
            match self.program.value(*v).kind {
                Kind::Input if self.program.value(*v).dtype == DType::I32 => *v = self.slice(*v, false),
                Kind::Parameter => self.sum_gradient(*v),
                _ => {}
            }
        }
    }

    /// Sums over rows of what is computed between regions: each rank sums over its tokens, wherever rows begin among them. It has the
    /// operand of all tokens, so that the gradient of a token is that of the rank whose token it is.
    fn sums_of_own_tokens(&mut self, mut instr: Instr) {
        let (x, sums, site) = (instr.reads[0], instr.writes[0], instr.site);
        let all = self.like(x, self.n_tokens);
        self.collective(CollectiveKind::AllGather, self.program.value(x).n_columns(), x, all, site);
        let value = self.program.value(sums).clone();
        let own = self.program.add_value(value.name, &value.shape, value.dtype, Kind::Activation);
        (instr.reads[0], instr.reads[1]) = (all, self.slice(instr.reads[1], true));
        instr.writes = vec![own];
        self.program.instrs.push(instr);
        self.collective(CollectiveKind::AllReduce, 1, own, sums, site);
    }

    fn slice(&mut self, input: ValueId, masked: bool) -> ValueId {
        if let Some(there) = self.sliced.get(&(input, masked)) {
            return *there;
        }
        let value = self.program.value(input).clone();
        let n = if masked { value.shape[0] } else { part(value.shape[0], 1, self.tp, self.me).len() };
        let slice = self.program.add_value(value.name, &[n], value.dtype, value.kind);
        let bindings: Vec<Binding> = self.program.bindings.iter().filter(|b| b.value == input).copied().collect();
        let to = Some(TokenSlice { index: self.me, of: self.tp, masked });
        self.program.bindings.extend(bindings.into_iter().map(|b| Binding { value: slice, slice: to, ..b }));
        self.sliced.insert((input, masked), slice);
        slice
    }

    fn sum_gradient(&mut self, param: ValueId) {
        let all = GradSum { group: GROUP, elements: None };
        if let Some(param) = self.program.params.iter_mut().find(|p| p.value == param && !p.sums.contains(&all)) {
            param.sums.push(all);
        }
    }

    /// `y = x W^T` with some columns of `y`: ranks exchange only the gradient of `x`, in the backward pass.
    fn column_parallel(&mut self, mut instr: Instr, m: MatMul) {
        instr.reads[0] = self.enter(instr.reads[0], instr.site);
        let mut op = m;
        if let Some(c) = m.c_columns {
            let pieces = &self.cut.columns[&instr.writes[0]];
            let here = extent(&inside(pieces, c.start..c.start + c.len));
            let before = extent(&inside(pieces, 0..c.start));
            op.c_columns = Some(Columns { start: before, len: here });
        }
        self.program.push(Op::MatMul(op), instr.reads, instr.writes, instr.site);
    }

    /// `y = x W^T` with some columns of `x`: the products of all ranks are summed.
    fn row_parallel(&mut self, instr: &Instr, m: MatMul) {
        let y = instr.writes[0];
        let n = self.program.value(instr.reads[0]).shape[0];
        let partial = self.like(y, n);
        let product = MatMul { bias: false, residual: false, ..m };
        self.program.push(Op::MatMul(product), instr.reads[..2].to_vec(), vec![partial], instr.site);
        let bias = m.bias.then(|| instr.reads[2]);
        let residual = m.residual.then(|| instr.reads[instr.reads.len() - 1]);
        self.finish_sum(partial, y, bias, residual, instr.site);
    }

    fn embedding(&mut self, instr: &Instr, residual: bool) {
        let (ids, table, y) = (instr.reads[0], instr.reads[1], instr.writes[0]);
        let n = self.program.value(ids).shape[0];
        let partial = self.like(y, n);
        let first = self.cut.params[&table].1[0].range.start;
        self.program.push(
            Op::Embedding(op::Embedding { residual: false, first }),
            vec![ids, table],
            vec![partial],
            instr.site,
        );
        self.finish_sum(partial, y, None, residual.then(|| instr.reads[2]), instr.site);
    }

    /// `y = residual + bias + Σ partial`.
    fn finish_sum(
        &mut self,
        partial: ValueId,
        y: ValueId,
        bias: Option<ValueId>,
        residual: Option<ValueId>,
        site: Site,
    ) {
        let n = self.program.value(y).shape[0];
        let kind = if self.sequence_parallel { CollectiveKind::ReduceScatter } else { CollectiveKind::AllReduce };
        let sum = if bias.is_none() && residual.is_none() { y } else { self.like(y, n) };
        self.collective(kind, self.program.value(y).n_columns(), partial, sum, site);
        let mut last = sum;
        if let Some(bias) = bias {
            let to = if residual.is_none() { y } else { self.like(y, n) };
            if self.sequence_parallel {
                self.sum_gradient(bias);
            }
            self.program.push(Op::AddBias(op::AddBias), vec![last, bias], vec![to], site);
            last = to;
        }
        if let Some(residual) = residual {
            self.program.push(Op::Add(op::Add), vec![residual, last], vec![y], site);
        }
    }

    /// The logits of each token are spread over the ranks; three statistics per token summarise each rank's logits.
    fn stats(&mut self, instr: &Instr) -> (VocabShard, ValueId) {
        let (logits, labels) = (instr.reads[0], instr.reads[1]);
        let n = self.program.value(logits).shape[0];
        let vocab = VocabShard { first: self.cut.columns[&logits][0].range.start, n_shards: self.tp };
        let own = self.program.add_value("loss_stats", &[1, n, 3], DType::F32, Kind::Activation);
        let all = self.program.add_value("loss_stats", &[self.tp, n, 3], DType::F32, Kind::Activation);
        let op = Op::CrossEntropyStats(op::CrossEntropyStats(vocab));
        self.program.push(op, vec![logits, labels], vec![own], instr.site);
        self.collective(CollectiveKind::AllGather, 3 * n, own, all, instr.site);
        (vocab, all)
    }

    /// The value as a region reads it: all tokens, and a gradient that is summed over the ranks.
    fn enter(&mut self, x: ValueId, site: Site) -> ValueId {
        if let Some(entered) = self.entered.get(&x) {
            return *entered;
        }
        let all = self.like(x, self.n_tokens);
        if self.sequence_parallel {
            self.collective(CollectiveKind::AllGather, self.program.value(x).n_columns(), x, all, site);
        } else {
            self.program.push(Op::Enter(op::Enter { group: GROUP }), vec![x], vec![all], site);
        }
        self.entered.insert(x, all);
        all
    }

    fn collective(&mut self, kind: CollectiveKind, unit: usize, from: ValueId, to: ValueId, site: Site) {
        let c = Collective { unit, ..Collective::new(kind, GROUP) };
        self.program.push(Op::Start(op::Start(c)), vec![from], vec![to], site);
        self.program.push(Op::Await(op::Await(c)), vec![to], vec![], site);
    }

    /// A new value with the columns of `v` and `n` rows.
    fn like(&mut self, v: ValueId, n: usize) -> ValueId {
        let value = self.program.value(v);
        let (name, shape) = (value.name.clone(), [n, value.n_columns()]);
        self.program.add_value(name, &shape, DType::F32, Kind::Activation)
    }
}

/// The first of the ranks that hold a key/value head owns it.
fn disown_copies(param: &mut Param, pieces: &[Piece]) {
    // Queries, keys and values may be packed into one tensor; this rank then owns only some of its ranges.
    let of_range = |part: &ParamPart, range: &Range<usize>| ParamPart { ranges: vec![range.clone()], ..part.clone() };
    param.parts = param.parts.iter().flat_map(|part| part.ranges.iter().map(|r| of_range(part, r))).collect();
    for (part, piece) in param.parts.iter_mut().zip(pieces) {
        part.owned = !piece.copied;
    }
}
