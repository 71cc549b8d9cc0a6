//! One microbatch on the host, to be copied to the inputs of a rank's program.

use crate::data::prepare::PrepareError;
use crate::data::rows::{BatchMut, Rows};
use phalanx_device::Machine;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::passes::context_parallel::chunks;
use phalanx_strategies::program::collective::part;
use phalanx_strategies::program::{Binding, Role};
use phalanx_strategies::rng::CounterRng;

/// The bindings of one microbatch's inputs; a pipeline stage may read none.
pub(super) type Inputs = Vec<Binding>;

/// The inputs of every microbatch of a program.
pub(super) fn inputs(c: &Compiled) -> Vec<Inputs> {
    let is_input = |b: &&Binding| {
        matches!(b.role, Role::Ids | Role::Labels | Role::Positions | Role::DocStart | Role::DropoutKeys)
    };
    let mut inputs: Vec<Inputs> = Vec::new();
    for b in c.program.bindings.iter().filter(is_input) {
        let at = b.microbatch as usize;
        inputs.resize(inputs.len().max(at + 1), Vec::new());
        inputs[at].push(*b);
    }
    inputs
}

/// Buffers for whole rows, and for this rank's tokens of them.
#[derive(Debug)]
pub(super) struct Staging {
    batch: BatchShape,
    cp: usize,
    rows: Buffers,
    own: Buffers,
}

#[derive(Debug)]
struct Buffers {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    doc_start: Vec<i32>,
    dropout_keys: Vec<i32>,
}

impl Buffers {
    fn new(n: usize) -> Buffers {
        Buffers {
            ids: vec![0; n],
            labels: vec![0; n],
            positions: vec![0; n],
            doc_start: vec![0; n],
            dropout_keys: vec![0; n],
        }
    }

    fn all(&mut self) -> [&mut Vec<i32>; 5] {
        [&mut self.ids, &mut self.labels, &mut self.positions, &mut self.doc_start, &mut self.dropout_keys]
    }
}

impl Staging {
    pub(super) fn new(batch: BatchShape, cp: usize) -> Staging {
        let n = batch.n_tokens();
        Staging { batch, cp, rows: Buffers::new(n), own: Buffers::new(n / cp) }
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
        let whole = if self.cp == 1 { &mut self.own } else { &mut self.rows };
        let mut batch = BatchMut {
            ids: &mut whole.ids,
            labels: &mut whole.labels,
            positions: &mut whole.positions,
            doc_start: &mut whole.doc_start,
        };
        rows.fill(indices, &mut batch)?;
        for (row, keys) in indices.iter().zip(whole.dropout_keys.chunks_exact_mut(self.batch.seq_len)) {
            let of_row = of_step.fork(*row);
            keys.iter_mut().enumerate().for_each(|(at, key)| *key = of_row.bits(at as u64) as i32);
        }
        if self.cp == 1 {
            return Ok(());
        }
        let chunks = chunks(self.batch.seq_len, self.cp, cp_rank);
        for (own, whole) in self.own.all().into_iter().zip(self.rows.all()) {
            own.clear();
            for row in whole.chunks_exact(self.batch.seq_len) {
                chunks.iter().for_each(|chunk| own.extend_from_slice(&row[chunk.clone()]));
            }
        }
        Ok(())
    }

    /// Excludes the labels of rows from `first` on.
    pub(super) fn ignore(&mut self, first: usize) {
        self.own.labels[first * self.batch.seq_len / self.cp..].fill(-100);
    }

    /// Copies the microbatch to a program's inputs.
    pub(super) fn copy_to(&self, machine: &mut dyn Machine, c: &Compiled, inputs: &Inputs) {
        for b in inputs {
            let tokens = match b.role {
                Role::Ids => &self.own.ids,
                Role::Labels => &self.own.labels,
                Role::Positions => &self.own.positions,
                Role::DropoutKeys => &self.own.dropout_keys,
                _ => &self.own.doc_start,
            };
            let slice = b.slice.map_or(0..tokens.len(), |s| part(tokens.len(), 1, s.of, s.index));
            machine.write(c, b.value, 0, &tokens[slice]);
        }
    }
}
