//! The weights of a frozen reference: a copy of every parameter that a run trains and that the pass of a reference reads.
//!
//! Beside adapters there is nothing to copy. A copy is a frozen parameter like any other: it is cut over the ranks of every axis, gathered
//! before use, counted in estimates, and filled from the same tensors of the model file (see [`file_name`]).

use crate::program::{Kind, Param, Phase, Program, Value, ValueId};
use std::collections::BTreeMap;

/// What the names of copies begin with.
const PREFIX: &str = "reference.";

/// The name in the model file of a tensor of a program: a copy has that of its original.
pub fn file_name(name: &str) -> &str {
    name.strip_prefix(PREFIX).unwrap_or(name)
}

/// Whether a tensor of a program is such a copy, which is no part of the model that a run makes.
pub fn is_copy(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Lets the pass of a reference read copies of trained parameters.
pub fn reference(program: &mut Program) {
    let mut copies: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for at in 0..program.instrs.len() {
        if program.instrs[at].site.phase != Phase::Reference {
            continue;
        }
        for operand in 0..program.instrs[at].reads.len() {
            let original = program.instrs[at].reads[operand];
            let Some(param) = program.param_of(original).filter(|param| param.trainable) else { continue };
            let param = param.clone();
            let copy = *copies.entry(original).or_insert_with(|| copied(program, param));
            program.instrs[at].reads[operand] = copy;
        }
    }
}

fn copied(program: &mut Program, original: Param) -> ValueId {
    let Value { name, shape, dtype, .. } = program.value(original.value).clone();
    let value = program.add_value(format!("{PREFIX}{name}"), &shape, dtype, Kind::Parameter);
    let mut copy = Param { value, trainable: false, ..original };
    copy.parts.iter_mut().for_each(|part| part.name.insert_str(0, PREFIX));
    program.params.push(copy);
    value
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::model::{BatchShape, ForwardBuilder};
    use crate::program::{Column, Init};

    /// Two passes over one head, of which the second is that of a reference.
    pub(in crate::passes) fn two_passes() -> Program {
        let mut b = ForwardBuilder::new(BatchShape { n_rows: 2, seq_len: 4 });
        let pass = |b: &mut ForwardBuilder| {
            let table = b.param("embed.weight", &[8, 4], Init::Normal { std: 0.1 });
            let gain = b.param("norm.weight", &[4], Init::Ones);
            let x = b.embed_ids(table, None);
            let h = b.rms_norm(x, gain, 1e-6);
            let logits = b.linear(h, table, None);
            let log_probs = b.log_probs(logits, Column::Labels);
            b.row_sums(log_probs, Column::Labels)
        };
        let sums = [pass(&mut b), b.reference(pass)];
        b.finish_formulas(&[], &[], (&sums, None), 2)
    }

    fn names(program: &Program) -> Vec<(&str, bool)> {
        program.params.iter().map(|param| (param.parts[0].name.as_str(), param.trainable)).collect()
    }

    #[test]
    fn reference_reads_one_copy_of_each_trained_parameter() {
        let mut p = two_passes();

        reference(&mut p);

        let copies = [("reference.embed.weight", false), ("reference.norm.weight", false)];
        assert_eq!(names(&p), [[("embed.weight", true), ("norm.weight", true)], copies].concat());
        for instr in &p.instrs {
            let is_copied = |v: &ValueId| is_copy(&p.value(*v).name);
            let of_params = |v: &&ValueId| p.param_of(**v).is_some();
            let of_reference = instr.site.phase == Phase::Reference;
            assert!(instr.reads.iter().filter(of_params).all(|v| is_copied(v) == of_reference), "{instr:?}");
        }
        assert_eq!(file_name("reference.embed.weight"), "embed.weight");
    }

    #[test]
    fn frozen_parameters_are_shared() {
        let mut p = two_passes();
        p.params[0].trainable = false;

        reference(&mut p);

        let expected = [("embed.weight", false), ("norm.weight", true), ("reference.norm.weight", false)];
        assert_eq!(names(&p), expected);
    }
}
