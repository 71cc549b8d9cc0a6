//! Cost of an instruction: arithmetic and memory traffic, derived from its shapes.

use crate::program::{
    Attention, AttentionPart, CachedAttention, Columns, Compute, DType, Instr, MatMul, Op, Program, ValueId,
};

/// Work of an instruction or a program.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Operations of matrix products; a multiply-add counts as two.
    pub matmul_flops: f64,
    /// Operations of attention, counted alike; causal, so half of the score matrix.
    pub attention_flops: f64,
    /// Bytes read and written.
    pub streamed_bytes: f64,
    /// Bytes read and written before a product in FP8 to round its operands, or to transpose a weight.
    pub rounded_bytes: f64,
}

impl std::ops::Add for Cost {
    type Output = Cost;
    fn add(self, other: Cost) -> Cost {
        Cost {
            matmul_flops: self.matmul_flops + other.matmul_flops,
            attention_flops: self.attention_flops + other.attention_flops,
            streamed_bytes: self.streamed_bytes + other.streamed_bytes,
            rounded_bytes: self.rounded_bytes + other.rounded_bytes,
        }
    }
}

/// Cost of one instruction.
pub fn instr_cost(program: &Program, instr: &Instr) -> Cost {
    match &instr.op {
        Op::MatMul(m) => {
            let c = program.value(instr.writes[0]);
            let n = m.c_columns.map_or(c.n_columns(), |cols| cols.len);
            let a = program.value(instr.reads[0]);
            let k = if m.trans_a { a.n_rows() } else { m.a_columns.map_or(a.n_columns(), |cols| cols.len) };
            Cost {
                matmul_flops: 2.0 * c.n_rows() as f64 * n as f64 * k as f64,
                streamed_bytes: product_bytes(program, instr, m),
                rounded_bytes: if m.compute == Compute::Fp8 { rounded_bytes(program, instr, m) } else { 0.0 },
                ..Cost::default()
            }
        }
        // Two products forward; backward recomputes the scores and runs four more.
        Op::Attention(a) => attention(program, instr, a, 2.0),
        Op::AttentionBackward(a) => attention(program, instr, a, 5.0),
        Op::AttentionPart(part) => attention_part(program, instr, part, 2.0),
        Op::AttentionPartBackward { part, .. } => attention_part(program, instr, part, 5.0),
        Op::CachedAttention(a) => cached_attention(program, instr, a),
        // The keys and values of the tokens, read and written; the other rows of the cache stay where they are.
        Op::CacheWrite(a) => Cost { streamed_bytes: 2.0 * cached_bytes(program, instr, a, 1.0), ..Cost::default() },
        // Collectives load the links, not the memory of the ranks.
        Op::Start(_) | Op::Await(_) => Cost::default(),
        // The other elements stay where they are.
        Op::Slice { .. } => Cost { streamed_bytes: 2.0 * bytes(program, instr.writes[0]), ..Cost::default() },
        Op::Paste { .. } => Cost { streamed_bytes: 2.0 * bytes(program, instr.reads[1]), ..Cost::default() },
        _ => Cost { streamed_bytes: touched_bytes(program, instr), ..Cost::default() },
    }
}

fn touched_bytes(program: &Program, instr: &Instr) -> f64 {
    instr.reads.iter().chain(&instr.writes).map(|v| bytes(program, *v)).sum()
}

fn bytes(program: &Program, value: ValueId) -> f64 {
    program.value(value).size_bytes() as f64
}

/// Bytes of operands and results; only the columns in use of packed values. The other columns of a residual stay where they are.
fn product_bytes(program: &Program, instr: &Instr, m: &MatMul) -> f64 {
    let unused = |v: ValueId, columns: Option<Columns>| {
        let (value, used) = (program.value(v), columns.map(|c| c.len));
        used.map_or(0.0, |used| {
            (value.n_columns() - used) as f64 / value.n_columns() as f64 * value.size_bytes() as f64
        })
    };
    let residual = instr.reads.last().filter(|_| m.residual);
    let unused_residual =
        residual.map_or(0.0, |v| if m.replaces { bytes(program, *v) } else { unused(*v, m.c_columns) });
    let unused_operands = unused(instr.reads[0], m.a_columns) + unused(instr.reads[1], m.b_columns);
    touched_bytes(program, instr) - unused_operands - unused_residual - unused(instr.writes[0], m.c_columns)
}

/// Bytes that are moved to have both operands of a product as e4m3, their rows along the sums.
fn rounded_bytes(program: &Program, instr: &Instr, m: &MatMul) -> f64 {
    let [a, b] = [0, 1].map(|i| program.value(instr.reads[i]));
    let from_bf16 = (DType::Bf16.size_bytes() + DType::E4m3.size_bytes()) as f64;
    let used = a.n_rows() * m.a_columns.map_or(a.n_columns(), |columns| columns.len);
    let of_weight = match (b.dtype, m.trans_b) {
        (DType::E4m3, true) => 0.0,
        (DType::E4m3, false) => 2.0 * DType::E4m3.size_bytes() as f64,
        _ => from_bf16,
    };
    from_bf16 * used as f64 + of_weight * b.n_elements() as f64
}

fn attention(program: &Program, instr: &Instr, a: &Attention, n_products: f64) -> Cost {
    let n_tokens = program.value(instr.reads[0]).n_rows() as f64;
    let seen = a.window.unwrap_or(a.seq_len).min(a.seq_len) as f64;
    // A full causal row sees half of the sequence on average, a windowed one its window.
    let mean_keys = if seen < a.seq_len as f64 { seen } else { (a.seq_len as f64 + 1.0) / 2.0 };
    let flops = n_products * 2.0 * n_tokens * mean_keys * (a.n_heads * a.head_dim) as f64;
    Cost { attention_flops: flops, streamed_bytes: touched_bytes(program, instr), ..Cost::default() }
}

/// A query sees the keys at earlier positions. Each rank has two chunks, one from either end of the row, so the queries of
/// a rank see half of the keys of every rank: half of all pairs for each pair of ranks.
/// Source: zigzag order, as in Llama 3 (Dubey et al. 2024, §3.3.2, arXiv:2407.21783).
fn attention_part(program: &Program, instr: &Instr, part: &AttentionPart, n_products: f64) -> Cost {
    let n_tokens = program.value(instr.reads[0]).n_rows() as f64;
    let a = &part.heads;
    let mean_keys = (part.n_kv_ranks * a.seq_len) as f64 / 2.0;
    let mean_keys = a.window.map_or(mean_keys, |w| mean_keys.min(w as f64));
    let flops = n_products * 2.0 * n_tokens * mean_keys * (a.n_heads * a.head_dim) as f64;
    Cost { attention_flops: flops, streamed_bytes: touched_bytes(program, instr), ..Cost::default() }
}

/// A token sees half of the cache on average, or its window.
fn cached_attention(program: &Program, instr: &Instr, a: &CachedAttention) -> Cost {
    let mean_keys = (a.capacity as f64 + 1.0) / 2.0;
    let mean_keys = a.heads.window.map_or(mean_keys, |w| mean_keys.min(w as f64));
    let n_tokens = program.value(instr.reads[0]).n_rows() as f64;
    let flops = 2.0 * 2.0 * n_tokens * mean_keys * (a.heads.n_heads * a.heads.head_dim) as f64;
    let results: f64 = instr.writes.iter().map(|v| bytes(program, *v)).sum();
    let queries = bytes(program, instr.reads[0]) - cached_bytes(program, instr, a, 1.0);
    let streamed_bytes = queries + cached_bytes(program, instr, a, mean_keys) + results;
    Cost { attention_flops: flops, streamed_bytes, ..Cost::default() }
}

/// Bytes of the keys and values of `n_keys` tokens for each token that is an operand.
fn cached_bytes(program: &Program, instr: &Instr, a: &CachedAttention, n_keys: f64) -> f64 {
    let qkv = program.value(instr.reads[0]);
    qkv.n_rows() as f64 * n_keys * (a.cache_columns() * qkv.dtype.size_bytes()) as f64
}

/// Cost of a whole program.
pub fn program_cost(program: &Program) -> Cost {
    program.instrs.iter().map(|i| instr_cost(program, i)).fold(Cost::default(), std::ops::Add::add)
}
