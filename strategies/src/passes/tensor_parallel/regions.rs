//! Where a forward program can be cut: the columns of its values and the ranges of its parameters that a rank has.
//!
//! A region ends at an operation that works on heads, on feed-forward columns or on the vocabulary. From there the search
//! follows it back to the products that make its operand and cuts their outputs, and forward to the products that read its
//! result and cuts their inputs.

use super::{TpError, heads_fit};
use crate::mesh::Axis;
use crate::program::collective::part;
use crate::program::{ActivationFn, Attention, MatMul, Op, Program, QkColumns, Role, ValueId, op};
use std::collections::BTreeMap;
use std::ops::Range;

/// A range of columns, and whether neighbouring ranks hold the same range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) range: Range<usize>,
    pub(super) copied: bool,
}

/// Columns of one dim that a rank has, in order.
pub(super) type Pieces = Vec<Piece>;

/// A rank's part of a program.
#[derive(Debug, Default)]
pub(super) struct Cut {
    /// The rank's columns of each value that is cut.
    pub(super) columns: BTreeMap<ValueId, Pieces>,
    /// The dim along which each parameter is cut, and the rank's pieces of that dim.
    pub(super) params: BTreeMap<ValueId, (usize, Pieces)>,
    /// Number of ranks that hold the same key/value head.
    pub(super) run: usize,
}

pub(super) fn find(program: &Program) -> Result<Cut, TpError> {
    let mut search = Search::new(program);
    if let Some(logits) = program.bound(Role::Logits).next() {
        return Err(search.refuse(logits, "logits are computed on one tensor-parallel rank only"));
    }
    for (i, instr) in program.instrs.iter().enumerate() {
        match &instr.op {
            Op::Attention(a) => {
                let (qkv, q) = search.heads(a)?;
                search.region(i, instr.reads[0], qkv, Some(q))?;
            }
            Op::Activation(op::Activation(f)) => {
                let (x, y) = search.feed_forward(*f, program.value(instr.reads[0]).n_columns())?;
                search.region(i, instr.reads[0], x, Some(y))?;
            }
            Op::Opaque(_) => return Err(search.refuse(instr.writes[0], "the model is user-defined")),
            Op::CrossEntropy(_) => {
                let vocabulary =
                    search.evenly("tokens of the vocabulary", program.value(instr.reads[0]).n_columns())?;
                search.region(i, instr.reads[0], vocabulary, None)?;
            }
            _ => {}
        }
    }
    search.tables()?;
    Ok(search.cut)
}

struct Search<'a> {
    program: &'a Program,
    tp: usize,
    me: usize,
    writer: Vec<Option<usize>>,
    readers: Vec<Vec<usize>>,
    cut: Cut,
}

impl<'a> Search<'a> {
    fn new(program: &'a Program) -> Search<'a> {
        let mut writer = vec![None; program.values.len()];
        let mut readers = vec![Vec::new(); program.values.len()];
        for (i, instr) in program.instrs.iter().enumerate() {
            instr.writes.iter().for_each(|v| writer[v.0 as usize] = Some(i));
            instr.reads.iter().for_each(|v| readers[v.0 as usize].push(i));
        }
        let (tp, me) = (program.mesh_rank.mesh.tp, program.mesh_rank.on(Axis::Tp));
        Search { program, tp, me, writer, readers, cut: Cut { run: 1, ..Cut::default() } }
    }

    /// This rank's pieces of packed qkv, and of the attention's output.
    fn heads(&mut self, a: &Attention) -> Result<(Pieces, Pieces), TpError> {
        let (h, k, d) = (a.n_heads, a.n_kv_heads, a.head_dim);
        if !heads_fit(h, k, self.tp) {
            let fits = (1..=h).filter(|tp| heads_fit(h, k, *tp)).collect();
            return Err(TpError::Heads { n_heads: h, n_kv_heads: k, tp: self.tp, fits });
        }
        let run = (self.tp / k).max(1);
        let n_kv = (k / self.tp).max(1);
        let (q, kv) = (self.me * (h / self.tp), self.me / run * n_kv);
        let piece = |first: usize, n: usize, copied: bool| Piece { range: first * d..(first + n) * d, copied };
        let q = piece(q, h / self.tp, false);
        let copied = run > 1;
        self.cut.run = self.cut.run.max(run);
        Ok((vec![q.clone(), piece(h + kv, n_kv, copied), piece(h + k + kv, n_kv, copied)], vec![q]))
    }

    fn feed_forward(&self, f: ActivationFn, n_columns: usize) -> Result<(Pieces, Pieces), TpError> {
        let what = "feed-forward columns";
        Ok(match f {
            ActivationFn::GeluTanh => (self.evenly(what, n_columns)?, self.evenly(what, n_columns)?),
            ActivationFn::SwiGlu => {
                let width = n_columns / 2;
                let gate = self.evenly(what, width)?;
                let up = gate.iter().map(|p| Piece { range: p.range.start + width..p.range.end + width, ..*p });
                (gate.iter().cloned().chain(up).collect(), gate)
            }
        })
    }

    fn evenly(&self, what: &'static str, extent: usize) -> Result<Pieces, TpError> {
        if extent < self.tp {
            return Err(TpError::TooSmall { what, extent, tp: self.tp });
        }
        Ok(vec![Piece { range: part(extent, 1, self.tp, self.me), copied: false }])
    }

    /// Cuts the region that ends at instruction `at`: its operand by `pieces`, its result by `result`.
    fn region(&mut self, at: usize, operand: ValueId, pieces: Pieces, result: Option<Pieces>) -> Result<(), TpError> {
        self.cut_outputs(operand, &pieces)?;
        let Some(result) = result else { return Ok(()) };
        self.cut_readers(self.program.instrs[at].writes[0], result)
    }

    /// Cuts a value that products with weights read, and these weights.
    fn cut_readers(&mut self, y: ValueId, result: Pieces) -> Result<(), TpError> {
        for reader in self.readers[y.0 as usize].clone() {
            let instr = &self.program.instrs[reader];
            if let Op::Dropout(_) = instr.op {
                self.cut_readers(instr.writes[0], result.clone())?;
                continue;
            }
            let Op::MatMul(m @ MatMul { trans_a: false, a_columns: None, .. }) = instr.op else {
                return Err(self.refuse(y, "it is read by an operation other than a product"));
            };
            if instr.reads[0] != y || instr.reads[1..].contains(&y) {
                return Err(self.refuse(y, "it is read by an operation other than a product with weights"));
            }
            self.cut_param(instr.reads[1], usize::from(m.trans_b), result.clone())?;
        }
        self.cut.columns.insert(y, result);
        Ok(())
    }

    /// Cuts the instructions that make `v` along its columns.
    fn cut_outputs(&mut self, v: ValueId, pieces: &Pieces) -> Result<(), TpError> {
        // Readers that compute a statistic do not count: it is summed over the ranks.
        let is_statistic = |i: &&usize| matches!(self.program.instrs[**i].op, Op::QkSquares(_));
        if self.readers[v.0 as usize].iter().filter(|i| !is_statistic(i)).count() > 1 {
            return Err(self.refuse(v, "it is read more than once"));
        }
        let Some(writer) = self.writer[v.0 as usize] else { return Err(self.refuse(v, "no product makes it")) };
        let instr = &self.program.instrs[writer];
        match instr.op {
            Op::Rotary(_) | Op::HeadNorm(_) | Op::Scale(_) => self.cut_outputs(instr.reads[0], pieces)?,
            Op::QkNorm(norm) => {
                let QkColumns { q, k } = norm.columns;
                self.cut_param(instr.reads[1], 0, inside(pieces, 0..q))?;
                self.cut_param(instr.reads[2], 0, inside(pieces, q..q + k))?;
                self.cut_outputs(instr.reads[0], pieces)?;
            }
            Op::MatMul(m) => {
                let here = match m.c_columns {
                    Some(c) => inside(pieces, c.start..c.start + c.len),
                    None => pieces.clone(),
                };
                self.cut_param(instr.reads[1], usize::from(!m.trans_b), here.clone())?;
                if m.bias {
                    self.cut_param(instr.reads[2], 0, here)?;
                }
                if m.residual {
                    self.cut_outputs(instr.reads[instr.reads.len() - 1], pieces)?;
                }
            }
            _ => return Err(self.refuse(v, "no product makes it")),
        }
        self.cut.columns.insert(v, pieces.clone());
        Ok(())
    }

    /// Embedding tables are cut by token, like the head that may share them.
    fn tables(&mut self) -> Result<(), TpError> {
        let ids = self.program.bound(Role::Ids).next();
        for instr in &self.program.instrs {
            if matches!(instr.op, Op::Embedding(_)) && Some(instr.reads[0]) == ids {
                let table = instr.reads[1];
                let rows = self.evenly("tokens of the vocabulary", self.program.value(table).n_rows())?;
                self.cut_param(table, 0, rows)?;
            }
        }
        Ok(())
    }

    fn cut_param(&mut self, param: ValueId, dim: usize, pieces: Pieces) -> Result<(), TpError> {
        if self.program.param_of(param).is_none() {
            return Err(self.refuse(param, "it is not a parameter"));
        }
        if pieces.iter().any(|p| p.copied) && dim > 0 {
            return Err(self.refuse(param, "its packed key/value heads are fewer than the ranks"));
        }
        let cut = (dim, pieces);
        match self.cut.params.get(&param) {
            Some(other) if *other != cut => Err(self.refuse(param, "it is used in two ways that are cut differently")),
            _ => {
                self.cut.params.insert(param, cut);
                Ok(())
            }
        }
    }

    fn refuse(&self, v: ValueId, reason: &'static str) -> TpError {
        TpError::Shape { value: self.program.value(v).name.clone(), tp: self.tp, reason }
    }
}

/// The pieces that lie in a range, counted from its start.
pub(super) fn inside(pieces: &Pieces, range: Range<usize>) -> Pieces {
    let clamp = |x: usize| x.clamp(range.start, range.end) - range.start;
    let cut = pieces.iter().map(|p| Piece { range: clamp(p.range.start)..clamp(p.range.end), ..*p });
    cut.filter(|p| !p.range.is_empty()).collect()
}
