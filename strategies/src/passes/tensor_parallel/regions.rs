//! Where a forward program can be cut: the columns of its values and the ranges of its parameters that a rank has.
//!
//! A region ends at an operation that works on heads, on feed-forward columns or on the vocabulary. From there the search
//! follows it back to the products that make its operand and cuts their outputs, and forward to the products that read its
//! result and cuts their inputs.

use super::TpError;
use crate::mesh::Axis;
use crate::program::op::shares::{Pieces, Ranks, Reading, Share, Unshared};
use crate::program::{Column, Instr, Op, Program, Role, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A rank's part of a program.
#[derive(Debug, Default)]
pub(super) struct Cut {
    /// The rank's columns of each value that is cut.
    pub(super) columns: BTreeMap<ValueId, Pieces>,
    /// The dim along which each parameter is cut, and the rank's pieces of that dim.
    pub(super) params: BTreeMap<ValueId, (usize, Pieces)>,
    /// Number of ranks that hold the same key/value head.
    pub(super) run: usize,
    /// What is computed from the logits of all columns: every rank has these values for all tokens.
    pub(super) whole: BTreeSet<ValueId>,
}

pub(super) fn find(program: &Program) -> Result<Cut, TpError> {
    let mut search = Search::new(program);
    if let Some(logits) = program.bound(Role::Logits).next() {
        return Err(search.refuse(logits, "logits are computed on one tensor-parallel rank only"));
    }
    for instr in &program.instrs {
        let n_columns = instr.reads.first().map_or(0, |v| program.value(*v).n_columns());
        let found = instr.op.operation().region(n_columns, &search.ranks);
        if let Some(region) = found.map_err(|why| search.unshared(instr, why))? {
            search.cut.run = search.cut.run.max(region.run);
            search.cut_outputs(instr.reads[0], &region.operand)?;
            match region.result {
                Some(result) => search.cut_readers(instr.writes[0], result)?,
                None => search.cut.whole.extend(&instr.writes),
            }
        }
        // Sums over the tokens of all ranks.
        if matches!(instr.op, Op::RowSums(_)) || instr.reads.iter().any(|v| search.cut.whole.contains(v)) {
            search.cut.whole.extend(&instr.writes);
        }
    }
    search.tables()?;
    Ok(search.cut)
}

struct Search<'a> {
    program: &'a Program,
    ranks: Ranks,
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
        let ranks = Ranks { tp: program.mesh_rank.mesh.tp, me: program.mesh_rank.on(Axis::Tp) };
        Search { program, ranks, writer, readers, cut: Cut { run: 1, ..Cut::default() } }
    }

    /// Cuts a value that products with weights read, and these weights.
    fn cut_readers(&mut self, y: ValueId, result: Pieces) -> Result<(), TpError> {
        for reader in self.readers[y.0 as usize].clone() {
            let instr = &self.program.instrs[reader];
            match instr.op.operation().of_some_columns() {
                Some(Reading::ByColumn) => self.cut_readers(instr.writes[0], result.clone())?,
                Some(Reading::Product { .. }) if instr.reads[0] != y || instr.reads[1..].contains(&y) => {
                    return Err(self.refuse(y, "it is read by an operation other than a product with weights"));
                }
                Some(Reading::Product { weight, dim }) => self.cut_param(instr.reads[weight], dim, result.clone())?,
                None => return Err(self.refuse(y, "it is read by an operation other than a product")),
            }
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
        let Some(operands) = instr.op.operation().operands_of(pieces) else {
            return Err(self.refuse(v, "no product makes it"));
        };
        for (operand, share) in operands {
            match share {
                Share::Columns(pieces) => self.cut_outputs(instr.reads[operand], &pieces)?,
                Share::Param { dim, pieces } => self.cut_param(instr.reads[operand], dim, pieces)?,
            }
        }
        self.cut.columns.insert(v, pieces.clone());
        Ok(())
    }

    /// Embedding tables are cut by token, like the head that may share them.
    fn tables(&mut self) -> Result<(), TpError> {
        let ids = self.program.bound(Role::Column(Column::Ids)).next();
        for instr in &self.program.instrs {
            if matches!(instr.op, Op::Embedding(_)) && Some(instr.reads[0]) == ids {
                let table = instr.reads[1];
                let n_rows = self.program.value(table).n_rows();
                let rows = self.ranks.evenly("tokens of the vocabulary", n_rows);
                let rows = rows.map_err(|why| self.unshared(instr, why))?;
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

    fn unshared(&self, instr: &Instr, why: Unshared) -> TpError {
        let tp = self.ranks.tp;
        match why {
            Unshared::Heads { n_heads, n_kv_heads, fits } => TpError::Heads { n_heads, n_kv_heads, tp, fits },
            Unshared::TooFew { what, extent } => TpError::TooSmall { what, extent, tp },
            Unshared::Never(reason) => self.refuse(instr.writes[0], reason),
        }
    }

    fn refuse(&self, v: ValueId, reason: &'static str) -> TpError {
        TpError::Shape { value: self.program.value(v).name.clone(), tp: self.ranks.tp, reason }
    }
}
