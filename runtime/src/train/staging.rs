//! One microbatch on the host, to be copied to the inputs of a rank's program.

use crate::data::columns::{Columns, IGNORED};
use crate::data::prepare::PrepareError;
use crate::data::rows::Rows;
use phalanx_device::Machine;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::passes::context_parallel::chunks;
use phalanx_strategies::program::collective::part;
use phalanx_strategies::program::{Column, Kind, Role, TokenSlice, ValueId};
use phalanx_strategies::rng::CounterRng;
use std::collections::BTreeSet;

/// An input of a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Input {
    what: What,
    value: ValueId,
}

#[derive(Clone, Copy, Debug)]
enum What {
    /// A column, or the part of its tokens on a sequence-parallel rank.
    Column(Column, Option<TokenSlice>),
    /// Log-probabilities of a reference.
    Reference,
}

/// The inputs of one microbatch; a pipeline stage may read none.
pub(super) type Inputs = Vec<Input>;

/// The inputs of every microbatch of a program.
pub(super) fn inputs(c: &Compiled) -> Vec<Inputs> {
    let mut inputs: Vec<Inputs> = Vec::new();
    for b in &c.program.bindings {
        let what = match b.role {
            Role::Column(column) => What::Column(column, b.slice),
            Role::Reference if c.program.value(b.value).kind == Kind::Input => What::Reference,
            _ => continue,
        };
        let at = b.microbatch as usize;
        inputs.resize(inputs.len().max(at + 1), Vec::new());
        inputs[at].push(Input { what, value: b.value });
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
    /// Log-probabilities of the rows under a reference, if a program reads them; their numbers of tokens, which none reads.
    reference: Option<Vec<f64>>,
}

impl Staging {
    /// Room for the columns that these programs read.
    pub(super) fn of(programs: &[&Compiled], batch: BatchShape, cp: usize) -> Staging {
        let all: Vec<What> = programs.iter().flat_map(|c| inputs(c)).flatten().map(|input| input.what).collect();
        let column = |what: &What| if let What::Column(column, _) = what { Some(*column) } else { None };
        let columns: BTreeSet<Column> = all.iter().filter_map(column).collect();
        let has_reference = all.iter().any(|what| matches!(what, What::Reference));
        let whole = if cp > 1 { columns.clone() } else { BTreeSet::new() };
        let own = BatchShape { seq_len: batch.seq_len / cp, ..batch };
        let (rows, own) = (Columns::new(whole, batch), Columns::new(columns, own));
        let unlabelled = vec![IGNORED; batch.n_tokens() / cp];
        let reference = has_reference.then(|| vec![f64::NAN; 2 * batch.n_rows]);
        Staging { seq_len: batch.seq_len, cp, rows, own, unlabelled, reference }
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
        if let Some(reference) = &mut self.reference
            && rows.reference().is_some()
        {
            rows.fill_reference(indices, reference);
        }
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
            let (tokens, of_rank) = match input.what {
                What::Column(column, slice) => (self.own.of(column), slice),
                What::Reference => {
                    let sums = self.reference.as_deref().expect("there is room for what a program reads");
                    machine.write(c, input.value, 0, sums);
                    continue;
                }
            };
            let slice = of_rank.map_or(0..tokens.len(), |s| part(tokens.len(), 1, s.of, s.index));
            if !of_rank.is_some_and(|s| s.masked) {
                machine.write(c, input.value, 0, &tokens[slice]);
                continue;
            }
            machine.write(c, input.value, 0, &self.unlabelled[..slice.start]);
            machine.write(c, input.value, slice.start, &tokens[slice.clone()]);
            machine.write(c, input.value, slice.end, &self.unlabelled[slice.end..]);
        }
    }
}
