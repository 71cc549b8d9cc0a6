//! What an instruction costs: arithmetic and memory traffic, read off its shapes.

use crate::program::{Attention, Instr, Op, Program};

/// Work of an instruction or a program.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Multiply-adds of matrix products count as two.
    pub matmul_flops: f64,
    /// The same inside attention; causal, so half of the score matrix.
    pub attention_flops: f64,
    /// Bytes read and written by everything else.
    pub streamed_bytes: f64,
}

impl std::ops::Add for Cost {
    type Output = Cost;
    fn add(self, other: Cost) -> Cost {
        Cost {
            matmul_flops: self.matmul_flops + other.matmul_flops,
            attention_flops: self.attention_flops + other.attention_flops,
            streamed_bytes: self.streamed_bytes + other.streamed_bytes,
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
            Cost { matmul_flops: 2.0 * c.n_rows() as f64 * n as f64 * k as f64, ..Cost::default() }
        }
        // Two products forward; backward runs the scores again and four more.
        Op::Attention(a) => attention(program, instr, a, 2.0),
        Op::AttentionBackward(a) => attention(program, instr, a, 5.0),
        _ => {
            let touched = instr.reads.iter().chain(&instr.writes);
            Cost { streamed_bytes: touched.map(|v| program.value(*v).size_bytes() as f64).sum(), ..Cost::default() }
        }
    }
}

fn attention(program: &Program, instr: &Instr, a: &Attention, n_products: f64) -> Cost {
    let n_tokens = program.value(instr.reads[0]).n_rows() as f64;
    let seen = a.window.unwrap_or(a.seq_len).min(a.seq_len) as f64;
    // A full causal row sees half of the sequence on average, a windowed one its window.
    let mean_keys = if seen < a.seq_len as f64 { seen } else { (a.seq_len as f64 + 1.0) / 2.0 };
    let flops = n_products * 2.0 * n_tokens * mean_keys * (a.n_heads * a.head_dim) as f64;
    Cost { attention_flops: flops, ..Cost::default() }
}

/// Cost of a whole program.
pub fn program_cost(program: &Program) -> Cost {
    program.instrs.iter().map(|i| instr_cost(program, i)).fold(Cost::default(), std::ops::Add::add)
}
