//! Norms and activations that the backward pass recomputes are written by their adjoint, which reads the same operands: one pass
//! over memory less for each.
//!
//! The adjoint moves up to the first reader of the recomputed result, past the product for the gradient of a weight that
//! reads it. Where the gradient that the adjoint reads does not exist there yet, both instructions stay. They also stay where that
//! gradient comes from a collective: the product then runs while ranks exchange it.

use crate::program::{Op, Phase, Program, ValueId};

/// Lets adjoints write recomputed results. Results do not change.
pub fn again(program: &mut Program) {
    let mut i = 0;
    while i < program.instrs.len() {
        match fusion(program, i) {
            // The next instruction takes the place of the recomputed one.
            Some(fusion) => fuse(program, i, fusion),
            None => i += 1,
        }
    }
}

struct Fusion {
    /// Index of the adjoint.
    adjoint: usize,
    /// The adjoint that also writes the result.
    op: Op,
    /// Index of the instruction before which it moves.
    to: usize,
}

/// The adjoint that can write the result of the recomputed instruction `i`.
fn fusion(program: &Program, i: usize) -> Option<Fusion> {
    let instrs = &program.instrs;
    let recomputed = &instrs[i];
    if recomputed.site.phase != Phase::Backward || !recomputed.op.operation().is_written_again() {
        return None;
    }
    let (y, statistics) = (recomputed.writes[0], &recomputed.writes[1..]);
    let is_read = |v: &ValueId| instrs[i + 1..].iter().any(|instr| instr.reads.contains(v));
    let (adjoint, dy, op) = (i + 1..instrs.len()).find_map(|j| {
        let adjoint = instrs[j].op.operation().writing_again(&instrs[j], recomputed);
        let (dy, op) = adjoint.filter(|_| instrs[j].site == recomputed.site)?;
        Some((j, dy, op))
    })?;
    let to = (i + 1..adjoint).find(|j| instrs[*j].reads.contains(&y))?;
    // Nothing moves across its own operands, nor ahead of an await of them.
    let is_early = (to..adjoint).all(|j| {
        let made = if matches!(instrs[j].op, Op::Await(_)) { &instrs[j].reads } else { &instrs[j].writes };
        !instrs[adjoint].reads.iter().any(|v| made.contains(v))
    });
    let from_product = instrs[..to].iter().any(|instr| matches!(instr.op, Op::MatMul(_)) && instr.writes.contains(&dy));
    let fits = program.value(y).dtype == program.value(dy).dtype;
    (is_early && from_product && fits && !statistics.iter().any(is_read)).then_some(Fusion { adjoint, op, to })
}

fn fuse(program: &mut Program, i: usize, Fusion { adjoint, op, to }: Fusion) {
    let mut fused = program.instrs.remove(adjoint);
    let recomputed = program.instrs[i].clone();
    fused.op = op;
    // The bias of a layer norm.
    fused.reads.extend(recomputed.reads.get(2));
    fused.writes.push(recomputed.writes[0]);
    program.instrs.insert(to, fused);
    program.instrs.remove(i);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Axis, Group};
    use crate::model::{BatchShape, ForwardBuilder};
    use crate::passes::backward::{Carry, backward, needs_grad};
    use crate::passes::fuse::fuse as fuse_sums;
    use crate::passes::recompute::{Recompute, recompute};
    use crate::program::{Collective, CollectiveKind, Init, Instr, NormKind, op};
    use crate::verify::verify;

    /// A block of Llama without its attention; `n_gates` products read the result of its norm.
    fn block(n_gates: usize, norm: NormKind, policy: Recompute) -> Program {
        let mut b = ForwardBuilder::new(BatchShape { n_rows: 1, seq_len: 4 });
        let table = b.param("table", &[10, 8], Init::Zeros);
        let [gain, bias] = ["gain", "bias"].map(|name| b.param(name, &[8], Init::Ones));
        let x = b.embed_ids(table, None);
        b.block(Some(0));
        let normed = match norm {
            NormKind::Rms => b.rms_norm(x, gain, 1e-5),
            NormKind::Layer => b.layer_norm(x, gain, bias, 1e-5),
        };
        let mut y = x;
        for gate in 0..n_gates {
            let gate_up = b.param(&format!("gate_up{gate}"), &[12, 8], Init::Zeros);
            let down = b.param(&format!("down{gate}"), &[8, 6], Init::Zeros);
            let gates = b.linear(normed, gate_up, None);
            let act = b.swiglu(gates);
            let out = b.linear(act, down, None);
            y = b.add(y, out);
        }
        b.block(None);
        let logits = b.linear(y, table, None);
        let mut forward = b.finish_loss(logits);
        fuse_sums(&mut forward);
        let needs = needs_grad(&forward).unwrap();
        let mut program = backward(&forward, &needs, Carry::NOTHING).unwrap().program;
        recompute(&mut program, policy);
        program
    }

    /// The backward pass of the block, by names of operations; those that also write a result end with `+`.
    fn names(program: &Program) -> Vec<String> {
        let in_block = |i: &&Instr| i.site.phase == Phase::Backward && i.site.block.is_some();
        let is_again = |op: &Op| {
            matches!(
                op,
                Op::ActivationBackward(op::ActivationBackward { again: true, .. })
                    | Op::NormBackward(op::NormBackward { again: true, .. })
            )
        };
        let name = |i: &Instr| format!("{}{}", i.op.name(), if is_again(&i.op) { "+" } else { "" });
        program.instrs.iter().filter(in_block).map(name).collect()
    }

    #[test]
    fn adjoints_of_a_llama_block_write_what_it_recomputes_before_the_products_that_read_it() {
        for norm in [NormKind::Rms, NormKind::Layer] {
            let mut program = block(1, norm, Recompute::None);
            let separate = ["activation", "matmul", "activation_backward", "matmul", "norm", "matmul", "norm_backward"];
            assert_eq!(names(&program)[1..], separate);

            again(&mut program);

            verify(&program).unwrap();
            let together = ["activation_backward+", "matmul", "matmul", "norm_backward+", "matmul"];
            assert_eq!(names(&program)[1..], together);
        }
    }

    #[test]
    fn norm_whose_gradient_is_complete_after_its_first_reader_stays_recomputed() {
        let mut program = block(2, NormKind::Rms, Recompute::None);

        again(&mut program);

        verify(&program).unwrap();
        let n = |name: &str| names(&program).iter().filter(|n| *n == name).count();
        assert_eq!([n("norm"), n("norm_backward"), n("norm_backward+")], [1, 1, 0]);
        assert_eq!([n("activation"), n("activation_backward"), n("activation_backward+")], [0, 0, 2]);
    }

    /// The norm is recomputed for the product that computes `gate_up` again, long before its gradient.
    #[test]
    fn recomputed_block_writes_only_its_activation_by_the_adjoint() {
        let mut program = block(1, NormKind::Rms, Recompute::Full);

        again(&mut program);

        verify(&program).unwrap();
        let expected =
            ["matmul", "norm", "matmul", "activation_backward+", "matmul", "matmul", "matmul", "norm_backward"];
        assert_eq!(names(&program), expected);
    }

    #[test]
    fn adjoint_of_a_gradient_that_ranks_sum_stays_after_the_product() {
        let mut program = block(1, NormKind::Rms, Recompute::None);
        let at = program.instrs.iter().position(|i| matches!(i.op, Op::ActivationBackward(_))).unwrap();
        let dy = program.instrs[at].reads[1];
        let value = program.value(dy).clone();
        let sum = program.add_value("sum", &value.shape, value.dtype, value.kind);
        program.instrs[at].reads[1] = sum;
        let c = Collective::new(CollectiveKind::AllReduce, Group::over(&[Axis::Tp]));
        let site = program.instrs[at].site;
        let made = program.instrs.iter().position(|i| i.writes.contains(&dy)).unwrap();
        let start = Instr { op: Op::Start(op::Start(c)), reads: vec![dy], writes: vec![sum], site };
        let wait = Instr { op: Op::Await(op::Await(c)), reads: vec![sum], writes: vec![], site };
        program.instrs.splice(made + 1..=made, [start, wait]);

        again(&mut program);

        verify(&program).unwrap();
        let expected = ["matmul", "start", "await", "activation", "matmul", "activation_backward"];
        assert_eq!(names(&program)[..6], expected);
    }
}
