//! Split weights: an f32 weight that only products in bf16 read is stored as its bf16 numbers, followed by what they leave of it.
//! Products read the first part where it lies, ranks gather it as it is, and nothing is converted; updates read and write both, and
//! so do embeddings of a table that is also the head. No bit of the f32 number is lost. [`Program::split`] defines the two parts.
//!
//! A weight with another reader stays f32. The programs over the same weights, of training
//! and of evaluation, store them alike: their products are the same, and the compiler leaves out what only a step would read.
//!
//! Source: Kalamkar et al. 2020, Split-SGD-BF16 (arXiv:2005.04680). We differ in that bf16 numbers are rounded, where theirs are
//! truncated; a tie is rounded away from zero, because the number to the other side could not be told from the next one.

use super::half_copies::{half_width, read_in_half_width};
use crate::program::{CollectiveKind, DType, Instr, Kind, Op, Program, ValueId, op};
use std::collections::{BTreeMap, BTreeSet};

/// Stores weights in two parts, and lets their readers read the first one.
pub fn split_weights(program: &mut Program) {
    let narrow = read_in_half_width(program);
    let split = splittable(program, &narrow);
    let mut views: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for mut instr in std::mem::take(&mut program.instrs) {
        let is_gather = is_gather(&instr);
        let n_read = if is_gather { instr.reads.len() } else { 2 };
        if is_gather || matches!(instr.op, Op::MatMul(_)) {
            for (i, read) in instr.reads.iter_mut().take(n_read).enumerate().filter(|(_, v)| split.contains(v)) {
                *read = *views.entry(*read).or_insert_with(|| program.split(*read));
                if is_gather {
                    program.values[instr.writes[i].0 as usize].dtype = DType::Bf16;
                }
            }
        }
        program.instrs.push(instr);
    }
}

/// The f32 weights whose readers are products in bf16, gathers for such products, embeddings, and updates; `narrow` is
/// [`read_in_half_width`].
fn splittable(program: &Program, narrow: &[Option<DType>]) -> BTreeSet<ValueId> {
    let is_weight = |v: &ValueId| {
        let value = program.value(*v);
        value.kind == Kind::Parameter && value.dtype == DType::F32
    };
    let mut split: BTreeSet<ValueId> = program.params.iter().map(|param| param.value).filter(is_weight).collect();
    for instr in &program.instrs {
        let is_product = half_width(program, instr) == Some(DType::Bf16);
        let permits = |i: usize, v: ValueId| match instr.writes.get(i) {
            Some(whole) if is_gather(instr) => *whole != v && narrow[whole.0 as usize] == Some(DType::Bf16),
            _ => is_product && i < 2 || instr.op.operation().reads_split(i),
        };
        let others = instr.reads.iter().enumerate().filter(|(i, v)| !permits(*i, **v)).map(|(_, v)| v);
        // What is updated in place counts as an operand.
        let made = instr.writes.iter().filter(|v| !instr.reads.contains(v));
        for v in others.chain(made) {
            split.remove(v);
        }
    }
    for bound in &program.bindings {
        split.remove(&bound.value);
    }
    split
}

fn is_gather(instr: &Instr) -> bool {
    matches!(instr.op, Op::Start(op::Start(c)) if c.kind == CollectiveKind::AllGather)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::fully_sharded::GROUP as SHARDS;
    use crate::program::{Collective, Compute, MatMul, Phase, Site};
    use crate::verify::verify;

    const SITE: Site = Site { phase: Phase::Forward, block: None, microbatch: 0 };
    const BF16: MatMul = MatMul { compute: Compute::Bf16, ..MatMul::nt() };

    /// Weights `w` and `v`, and a product in bf16 of each.
    fn products() -> (Program, [ValueId; 2], ValueId) {
        let mut p = Program::default();
        let weights = ["w", "v"].map(|name| p.add_value(name, &[8, 8], DType::F32, Kind::Parameter));
        let x = p.add_value("x", &[8, 8], DType::Bf16, Kind::Input);
        for w in weights {
            let part = crate::program::ParamPart::whole(p.value(w).name.clone(), &[8, 8]);
            p.params.push(crate::program::Param::whole(w, &[8, 8], vec![part], crate::program::Init::Zeros));
            let y = p.add_value("y", &[8, 8], DType::F32, Kind::Activation);
            p.push(Op::MatMul(BF16), vec![x, w], vec![y], SITE);
        }
        (p, weights, x)
    }

    #[test]
    fn weight_that_only_products_in_bf16_read_is_split_and_others_are_not() {
        let (mut p, [w, v], x) = products();
        let z = p.add_value("z", &[8, 8], DType::F32, Kind::Output);
        p.push(Op::MatMul(BF16), vec![w, x], vec![z], SITE);
        let again = p.add_value("again", &[8, 8], DType::F32, Kind::Output);
        p.push(Op::Add(op::Add), vec![v, z], vec![again], SITE);

        split_weights(&mut p);

        assert_eq!([w, v].map(|v| p.is_split(v)), [true, false]);
        let read: Vec<&str> = p.instrs.iter().flat_map(|i| &i.reads).map(|v| p.value(*v).name.as_str()).collect();
        assert_eq!(read, ["x", "w as bf16", "x", "v", "w as bf16", "x", "v", "z"]);
        verify(&p).unwrap();
    }

    #[test]
    fn weight_of_a_product_in_f32_is_not_split() {
        let (mut p, weights, x) = products();
        for w in weights {
            let y = p.add_value("y", &[8, 8], DType::F32, Kind::Activation);
            p.push(Op::MatMul(MatMul::nt()), vec![x, w], vec![y], SITE);
        }

        split_weights(&mut p);

        assert_eq!(weights.map(|v| p.is_split(v)), [false; 2]);
    }

    /// A shard of each weight is gathered, and a sum reads one of them.
    #[test]
    fn gathered_weight_that_only_products_read_is_gathered_as_its_bf16_numbers() {
        let (mut p, weights, _) = products();
        let c = Collective::new(CollectiveKind::AllGather, SHARDS);
        let whole = weights.map(|w| p.add_value(format!("all {}", w.0), &[8, 8], DType::F32, Kind::Activation));
        for instr in &mut p.instrs {
            let gathered = weights.iter().position(|w| *w == instr.reads[1]).unwrap();
            instr.reads[1] = whole[gathered];
        }
        p.instrs.insert(
            0,
            Instr { op: Op::Start(op::Start(c)), reads: weights.to_vec(), writes: whole.to_vec(), site: SITE },
        );
        p.instrs.insert(1, Instr { op: Op::Await(op::Await(c)), reads: whole.to_vec(), writes: vec![], site: SITE });
        let y = p.add_value("y", &[8, 8], DType::F32, Kind::Activation);
        p.push(Op::Add(op::Add), vec![whole[1], whole[1]], vec![y], SITE);

        split_weights(&mut p);

        assert_eq!(weights.map(|v| p.is_split(v)), [true, false]);
        assert_eq!(whole.map(|v| p.value(v).dtype), [DType::Bf16, DType::F32]);
        verify(&p).unwrap();
    }
}
