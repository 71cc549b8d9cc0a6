//! Context parallelism: each rank has some tokens of every row, and keys and values travel around a ring of ranks.
//!
//! Source: Liu et al. 2023, Ring Attention (arXiv:2310.01889); Llama 3 report, §3.3.2, for the variant that gathers keys
//! and values (arXiv:2407.21783). A row is cut into `2 cp` chunks; rank `i` has the `i`-th chunk from either end, so all
//! ranks have the same work under a causal mask. Every operation except attention and the sums of rows works on single
//! tokens, so only its shapes change. Each rank has a part of every gradient, and the sum over the data adds these parts.
//!
//! The pass has three steps, with tensor parallelism between them: [`shard_tokens`] before, [`exchange_keys`] and [`sum_rows`] after.

use crate::mesh::{Axis, Group};
use crate::program::{
    Attention, AttentionPart, Collective, CollectiveKind, DType, Instr, Kind, Op, Program, ValueId, op,
};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How keys and values reach the other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpComm {
    /// From neighbour to neighbour, the keys and values of one rank at a time.
    #[default]
    Ring,
    /// All at once.
    AllGather,
}

/// Why tokens cannot be shared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a row of {seq_len} tokens cannot be cut into {chunks} equal chunks for context_parallel_size {cp}; {fits} would fit"
)]
pub struct CpError {
    /// Tokens of a row.
    pub seq_len: usize,
    /// Twice the size of the axis.
    pub chunks: usize,
    /// Size of the axis.
    pub cp: usize,
    /// The nearest length below or above that fits.
    pub fits: usize,
}

/// The two runs of a row that a context-parallel rank has, in order.
pub fn chunks(seq_len: usize, cp: usize, rank: usize) -> [Range<usize>; 2] {
    if cp == 1 {
        return [0..seq_len, seq_len..seq_len];
    }
    let chunk = seq_len / (2 * cp);
    [rank, 2 * cp - 1 - rank].map(|i| i * chunk..(i + 1) * chunk)
}

/// Reduces a forward program to this rank's tokens.
///
/// # Errors
/// When a row cannot be cut evenly; the program is then unchanged.
pub fn shard_tokens(program: &mut Program) -> Result<(), CpError> {
    let cp = program.mesh_rank.mesh.cp;
    if cp == 1 {
        return Ok(());
    }
    for instr in &program.instrs {
        if let Op::Attention(a) = instr.op {
            check(a.seq_len, cp)?;
        }
    }
    let of_tokens = |kind| matches!(kind, Kind::Input | Kind::Activation | Kind::Output);
    let values = program.values.iter_mut().filter(|v| of_tokens(v.kind) && v.dtype != DType::F64);
    values.for_each(|v| v.shape[0] /= cp);
    for instr in &mut program.instrs {
        if let Some(heads) = instr.op.operation_mut().heads_mut() {
            heads.seq_len /= cp;
        }
    }
    Ok(())
}

/// Checks that rows of this length can be cut.
///
/// # Errors
/// When they cannot; the error carries a length that can.
pub fn check(seq_len: usize, cp: usize) -> Result<(), CpError> {
    let chunks = 2 * cp;
    if cp == 1 || (seq_len.is_multiple_of(chunks) && seq_len > 0) {
        return Ok(());
    }
    let fits = (seq_len / chunks).max(1) * chunks;
    Err(CpError { seq_len, chunks, cp, fits })
}

/// Adds the sums of a row's tokens over the ranks that share the row. All of them then evaluate the same formulas, and the first one
/// counts these.
pub fn sum_rows(program: &mut Program) {
    let mesh_rank = program.mesh_rank;
    if mesh_rank.mesh.cp == 1 {
        return;
    }
    for mut instr in std::mem::take(&mut program.instrs) {
        match &mut instr.op {
            Op::RowSums(_) => {
                let (sums, site) = (instr.writes[0], instr.site);
                let value = program.value(sums).clone();
                let own = program.add_value(value.name, &value.shape, value.dtype, Kind::Activation);
                instr.writes = vec![own];
                program.instrs.push(instr);
                let c = Collective::new(CollectiveKind::AllReduce, Group::over(&[Axis::Cp]));
                program.push(Op::Start(op::Start(c)), vec![own], vec![sums], site);
                program.push(Op::Await(op::Await(c)), vec![sums], vec![], site);
                continue;
            }
            // Formulas that others read are evaluated in full by each rank.
            Op::Formulas(formulas) if program.value(instr.writes[0]).kind == Kind::Output => {
                formulas.counts = mesh_rank.on(Axis::Cp) == 0;
            }
            _ => {}
        }
        program.instrs.push(instr);
    }
}

/// Replaces attention within the tokens of a rank by attention to the tokens of all ranks.
pub fn exchange_keys(program: &mut Program, comm: CpComm) {
    let mesh_rank = program.mesh_rank;
    if mesh_rank.mesh.cp == 1 {
        return;
    }
    let instrs = std::mem::take(&mut program.instrs);
    for instr in instrs {
        match instr.op {
            Op::Attention(a) => attention(program, &instr, a, comm),
            _ => program.instrs.push(instr),
        }
    }
}

fn attention(program: &mut Program, instr: &Instr, a: Attention, comm: CpComm) {
    let (cp, me) = (program.mesh_rank.mesh.cp, program.mesh_rank.on(Axis::Cp));
    let (qkv, doc_start) = (instr.reads[0], instr.reads[1]);
    let n = program.value(qkv).n_rows();
    let part = AttentionPart { heads: a, n_ranks: cp, q_rank: me, kv_rank: me, n_kv_ranks: 1, carried: false };
    let mut b = Emit { n, kv_columns: 2 * a.n_kv_heads * a.head_dim, dtype: program.value(qkv).dtype, program, instr };
    let (q, kv) = (b.value("q", n, a.n_heads * a.head_dim), b.keys(n));
    b.push(Op::SplitColumns(op::SplitColumns), vec![qkv], vec![q, kv]);
    if comm == CpComm::AllGather {
        let all = b.keys(cp * n);
        let gather = b.start(CollectiveKind::AllGather, kv, all);
        b.push(Op::Await(op::Await(gather)), vec![all], vec![]);
        let part = AttentionPart { kv_rank: 0, n_kv_ranks: cp, ..part };
        return b.part(part, vec![q, all, doc_start], instr.writes.clone());
    }
    let (mut here, mut merged) = (kv, Vec::new());
    for step in 0..cp {
        let part = AttentionPart { kv_rank: (me + cp - step) % cp, carried: step > 0, ..part };
        // Keys are sent to the neighbour before their use here, so the exchange overlaps the attention.
        let next = (step + 1 < cp).then(|| {
            let next = b.keys(n);
            (next, b.start(CollectiveKind::Shift { by: 1 }, here, next))
        });
        let writes = match next {
            Some(_) => vec![b.value("o", n, a.n_heads * a.head_dim), b.value("lse", n, a.n_heads)],
            None => instr.writes.clone(),
        };
        let reads = [q, here, doc_start].into_iter().chain(merged).collect();
        b.part(part, reads, writes.clone());
        merged = writes;
        if let Some((next, shift)) = next {
            b.push(Op::Await(op::Await(shift)), vec![next], vec![]);
            here = next;
        }
    }
}

/// Appends the replacement of one attention.
struct Emit<'a> {
    program: &'a mut Program,
    instr: &'a Instr,
    n: usize,
    kv_columns: usize,
    dtype: DType,
}

impl Emit<'_> {
    fn value(&mut self, name: &str, rows: usize, columns: usize) -> ValueId {
        self.program.add_value(name, &[rows, columns], self.dtype, Kind::Activation)
    }

    fn keys(&mut self, rows: usize) -> ValueId {
        self.value("kv", rows, self.kv_columns)
    }

    fn push(&mut self, op: Op, reads: Vec<ValueId>, writes: Vec<ValueId>) {
        self.program.push(op, reads, writes, self.instr.site);
    }

    fn start(&mut self, kind: CollectiveKind, from: ValueId, to: ValueId) -> Collective {
        // One part is the keys and values of one rank.
        let c = Collective { unit: self.n * self.kv_columns, ..Collective::new(kind, Group::over(&[Axis::Cp])) };
        self.push(Op::Start(op::Start(c)), vec![from], vec![to]);
        c
    }

    /// Parts are merged in f32 under every precision.
    fn part(&mut self, part: AttentionPart, reads: Vec<ValueId>, writes: Vec<ValueId>) {
        writes.iter().for_each(|v| self.program.values[v.0 as usize].dtype = DType::F32);
        self.push(Op::AttentionPart(part), reads, writes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_all_ranks_tile_the_row_and_pair_early_with_late() {
        let mut all: Vec<Range<usize>> = (0..4).flat_map(|rank| chunks(64, 4, rank)).collect();
        assert_eq!(chunks(64, 4, 1), [8..16, 48..56]);

        all.sort_by_key(|r| r.start);

        assert!(all.windows(2).all(|w| w[0].end == w[1].start) && all[0].start == 0 && all[7].end == 64);
    }

    #[test]
    fn row_that_cannot_be_cut_is_refused_with_a_length_that_can() {
        let err = check(100, 4).unwrap_err().to_string();

        assert!(err.contains("100 tokens") && err.contains("8 equal chunks") && err.contains("96 would fit"), "{err}");
    }
}
