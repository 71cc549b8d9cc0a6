//! One microbatch on the host, to be copied to the inputs of a rank's program.

use crate::data::columns::{Columns, IGNORED};
use crate::data::prepare::PrepareError;
use crate::data::rows::Rows;
use phalanx_device::Machine;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::passes::context_parallel::chunks;
use phalanx_strategies::program::collective::part;
use phalanx_strategies::program::{Column, Role, TokenSlice, ValueId};
use phalanx_strategies::rng::CounterRng;
use std::collections::BTreeSet;

/// An input of a program: the column that it reads, and the part of the tokens on a sequence-parallel rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Input {
    column: Column,
    value: ValueId,
    slice: Option<TokenSlice>,
}

/// The inputs of one microbatch; a pipeline stage may read none.
pub(super) type Inputs = Vec<Input>;

/// The inputs of every microbatch of a program.
pub(super) fn inputs(c: &Compiled) -> Vec<Inputs> {
    let mut inputs: Vec<Inputs> = Vec::new();
    for b in &c.program.bindings {
        let Role::Column(column) = b.role else { continue };
        let at = b.microbatch as usize;
        inputs.resize(inputs.len().max(at + 1), Vec::new());
        inputs[at].push(Input { column, value: b.value, slice: b.slice });
    }
    inputs
}

/// Buffers for whole rows, and for this rank's tokens of them.
#[derive(Debug)]
pub(super) struct Staging {
    seq_len: usize,
    cp: usize,
    rows: Columns,
    own: Columns,
    /// Labels of no token, as many as there are tokens here.
    unlabelled: Vec<i32>,
}

impl Staging {
    /// Room for the columns that these programs read.
    pub(super) fn of(programs: &[&Compiled], batch: BatchShape, cp: usize) -> Staging {
        let columns: BTreeSet<Column> =
            programs.iter().flat_map(|c| inputs(c)).flatten().map(|input| input.column).collect();
        let whole = if cp > 1 { columns.clone() } else { BTreeSet::new() };
        let own = BatchShape { seq_len: batch.seq_len / cp, ..batch };
        let (rows, own) = (Columns::new(whole, batch), Columns::new(columns, own));
        let unlabelled = vec![IGNORED; batch.n_tokens() / cp];
        Staging { seq_len: batch.seq_len, cp, rows, own, unlabelled }
    }

    /// Fills in the tokens of these rows that belong to the context-parallel rank `cp_rank`. Keys of dropout are drawn from the
    /// stream of the step by row and position, wherever a row is trained.
    ///
    /// # Errors
    /// When the token cache cannot be read.
    pub(super) fn fill(
        &mut self,
        rows: &Rows,
        indices: &[u64],
        cp_rank: usize,
        of_step: CounterRng,
    ) -> Result<(), PrepareError> {
        if self.cp == 1 {
            rows.fill(indices, of_step, &mut self.own)?;
            return Ok(());
        }
        rows.fill(indices, of_step, &mut self.rows)?;
        self.own.cut(&self.rows, &chunks(self.seq_len, self.cp, cp_rank));
        Ok(())
    }

    /// Excludes the labels of rows from `first` on.
    pub(super) fn ignore(&mut self, first: usize) {
        self.own.ignore(first);
    }

    /// Copies the microbatch to a program's inputs.
    pub(super) fn copy_to(&self, machine: &mut dyn Machine, c: &Compiled, inputs: &Inputs) {
        for input in inputs {
            let tokens = self.own.of(input.column);
            let slice = input.slice.map_or(0..tokens.len(), |s| part(tokens.len(), 1, s.of, s.index));
            if !input.slice.is_some_and(|s| s.masked) {
                machine.write(c, input.value, 0, &tokens[slice]);
                continue;
            }
            machine.write(c, input.value, 0, &self.unlabelled[..slice.start]);
            machine.write(c, input.value, slice.start, &tokens[slice.clone()]);
            machine.write(c, input.value, slice.end, &self.unlabelled[slice.end..]);
        }
    }
}
