//! Folds `y = a b; z = x + y` into one product that adds to the residual stream, and `y = a b; z = factor y` into one that
//! scales as it multiplies. Each saves a pass over memory.

use crate::program::{MatMul, Op, Program, ValueId, op};

/// Rewrites every product whose only reader is an addition or a scaling.
pub fn fuse(program: &mut Program) {
    let mut n_reads = vec![0u32; program.values.len()];
    let mut writer = vec![None; program.values.len()];
    for (i, instr) in program.instrs.iter().enumerate() {
        instr.reads.iter().for_each(|v| n_reads[v.0 as usize] += 1);
        instr.writes.iter().for_each(|v| writer[v.0 as usize] = Some(i));
    }
    program.bindings.iter().for_each(|b| n_reads[b.value.0 as usize] += 1);
    let mut dead = vec![false; program.instrs.len()];
    for i in 0..program.instrs.len() {
        if let Op::Scale(op::Scale { factor }) = program.instrs[i].op {
            let at = fusable(program, &n_reads, &writer, program.instrs[i].reads[0]);
            // A bias would have to be scaled too.
            if let Some((at, m)) = at.filter(|(_, m)| !m.bias) {
                program.instrs[i].op = Op::MatMul(MatMul { alpha: factor * m.alpha, ..m });
                program.instrs[i].reads = program.instrs[at].reads.clone();
                dead[at] = true;
            }
            continue;
        }
        if program.instrs[i].op != Op::Add(op::Add) {
            continue;
        }
        let [x, y] = program.instrs[i].reads[..] else { continue };
        for (product, other) in [(y, x), (x, y)] {
            let Some((at, m)) = fusable(program, &n_reads, &writer, product) else { continue };
            // The fused product replaces the addition, where both operands are available.
            program.instrs[i].op = Op::MatMul(MatMul { residual: true, ..m });
            program.instrs[i].reads = program.instrs[at].reads.iter().copied().chain([other]).collect();
            dead[at] = true;
            break;
        }
    }
    let mut keep = dead.iter().map(|d| !d);
    program.instrs.retain(|_| keep.next().unwrap_or(true));
}

fn fusable(program: &Program, n_reads: &[u32], writer: &[Option<usize>], product: ValueId) -> Option<(usize, MatMul)> {
    let at = writer[product.0 as usize]?;
    match program.instrs[at].op {
        Op::MatMul(m) if !m.residual && n_reads[product.0 as usize] == 1 => Some((at, m)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{BatchShape, ForwardBuilder};
    use crate::program::Init;

    #[test]
    fn product_scaled_and_added_to_the_stream_becomes_one_instruction_unless_it_has_a_bias() {
        for with_bias in [false, true] {
            let mut b = ForwardBuilder::new(BatchShape { n_rows: 1, seq_len: 4 });
            let table = b.param("t", &[10, 8], Init::Zeros);
            let w = b.param("w", &[8, 8], Init::Zeros);
            let bias = with_bias.then(|| b.param("b", &[8], Init::Zeros));
            let x = b.embed_ids(table, None);
            let y = b.linear(x, w, bias);
            let y = b.scale(y, 0.25);
            let z = b.add(x, y);
            let mut program = b.finish_logits(z);

            fuse(&mut program);

            let scaled = matches!(program.instrs[1].op, Op::MatMul(m) if m.alpha == 0.25 && m.residual);
            assert_eq!((program.instrs.len(), scaled), if with_bias { (4, false) } else { (2, true) });
            crate::verify::verify(&program).unwrap();
        }
    }

    #[test]
    fn product_added_to_the_stream_becomes_one_instruction() {
        let mut b = ForwardBuilder::new(BatchShape { n_rows: 1, seq_len: 4 });
        let table = b.param("t", &[10, 8], Init::Zeros);
        let w = b.param("w", &[8, 8], Init::Zeros);
        let x = b.embed_ids(table, None);
        let y = b.linear(x, w, None);
        let z = b.add(x, y);
        let mut program = b.finish_logits(z);

        fuse(&mut program);

        assert_eq!(program.instrs.len(), 2);
        assert_eq!(program.instrs[1].reads, [x, w, x]);
        assert_eq!(program.instrs[1].writes, [z]);
        crate::verify::verify(&program).unwrap();
    }
}
