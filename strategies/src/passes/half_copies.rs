//! Half copies: products in half width read half-width copies of their f32 operands, on devices that cannot round while they
//! multiply. A product with a float16 operand or result is one: such devices multiply two float16 matrices much faster than two
//! of f32.
//!
//! Each value is converted once, before its first product, so a weight is read in f32 once a step however often it is
//! multiplied; in a step of one microbatch twice, so that no copies of all weights exist between the forward and the backward pass,
//! where the step needs most memory. Small weights, such as those of adapters, are converted together at the start of the step, which
//! devices can do in a few launches. Where ranks gather a weight that only products in half width read, each rank converts its shard and the ranks
//! gather that: half the bytes, and the same bits. A shard is converted for each gathering, since a copy of all shards would
//! take memory for the whole step, and the traffic within a device is small beside that between devices. Nothing is left to convert of
//! weights that [`super::split_weights`] stores in two parts.
//!
//! The gradient of the residual stream is converted by the adjoint of the norm that writes it: one pass over memory less for each.
//!
//! Logits that a product in half width writes, and their gradient that only such products read, are stored in half width: with a
//! large vocabulary they are the largest values of a step, and each is read several times. PyTorch's autocast does the same. The
//! loss is computed from them in f32; evaluation keeps them in f32.
//!
//! Source: Micikevicius et al. 2018, §3.1 (arXiv:1710.03740). We differ in that the copy is made within the step, not kept
//! as state: state that follows from other state would have to be kept consistent through healing and checkpoints.

use crate::program::{
    Collective, CollectiveKind, Compute, DType, Instr, Kind, NormKind, Op, Phase, Program, Site, ValueId, op,
};
use std::collections::{BTreeMap, BTreeSet};

/// A weight with at most this many elements is small: the step keeps its copy from start to end.
const SMALL: usize = 1 << 20;
/// Where small weights are converted.
const START: Site = Site { phase: Phase::Forward, block: None, microbatch: 0 };

/// Converts the f32 operands of products in half width.
pub fn half_copies(program: &mut Program) {
    narrow_logits(program);
    gather_copies(program);
    let is_single = program.instrs.iter().all(|i| i.site.microbatch == 0);
    let mut copies: BTreeMap<(ValueId, Option<Phase>), ValueId> = BTreeMap::new();
    let instrs = std::mem::take(&mut program.instrs);
    for (wide, narrow) in small_weights(program, &instrs) {
        copies.insert((wide, None), copy(program, wide, narrow, START));
    }
    for mut instr in instrs {
        if let Some(narrow) = half_width(program, &instr) {
            for i in 0..2 {
                let wide = instr.reads[i];
                let value = program.value(wide);
                if value.dtype == DType::F32 {
                    let is_weight = value.kind == Kind::Parameter && value.n_elements() > SMALL;
                    let phase = (is_single && is_weight).then_some(instr.site.phase);
                    let copied = copies.entry((wide, phase));
                    instr.reads[i] = *copied.or_insert_with(|| copy(program, wide, narrow, instr.site));
                }
            }
        }
        // State is written in place: its copy is of the old contents.
        copies.retain(|(wide, _), _| !instr.writes.contains(wide));
        program.instrs.push(instr);
    }
}

/// The small f32 weights that products in half width read, in the order of their first products, and the type of those.
fn small_weights(program: &Program, instrs: &[Instr]) -> Vec<(ValueId, DType)> {
    let (mut seen, mut found) = (BTreeSet::new(), Vec::new());
    for instr in instrs {
        let Some(narrow) = half_width(program, instr) else { continue };
        for wide in &instr.reads[..2] {
            let value = program.value(*wide);
            let is_small = value.kind == Kind::Parameter && value.n_elements() <= SMALL;
            if is_small && value.dtype == DType::F32 && seen.insert(*wide) {
                found.push((*wide, narrow));
            }
        }
    }
    found
}

/// Stores logits and their gradients in half width where all products that write and read them work in it.
fn narrow_logits(program: &mut Program) {
    let mut pairs: Vec<[ValueId; 2]> = Vec::new();
    let mut pair_of: BTreeMap<ValueId, usize> = BTreeMap::new();
    for instr in &program.instrs {
        if let Some(gradient) = instr.op.operation().gradient_of_logits() {
            let pair = [instr.reads[0], instr.writes[gradient]];
            pair_of.extend(pair.map(|v| (v, pairs.len())));
            pairs.push(pair);
        }
    }
    // None: not used yet. Some(None): used in full width, or in two widths.
    let mut width: Vec<Option<Option<DType>>> = vec![None; pairs.len()];
    for instr in program.instrs.iter().filter(|i| !i.op.operation().reads_logits()) {
        // A bias is added in f32, which a narrow result would need memory for.
        let here = half_width(program, instr).filter(|_| !matches!(instr.op, Op::MatMul(m) if m.bias));
        for pair in instr.reads.iter().chain(&instr.writes).filter_map(|v| pair_of.get(v)) {
            width[*pair] = Some(width[*pair].map_or(here, |before| before.filter(|dtype| Some(*dtype) == here)));
        }
    }
    for pair in program.bindings.iter().filter_map(|b| pair_of.get(&b.value)) {
        width[*pair] = Some(None);
    }
    for (pair, width) in pairs.iter().zip(width) {
        if let Some(Some(dtype)) = width {
            pair.iter().for_each(|v| program.values[v.0 as usize].dtype = dtype);
        }
    }
}

/// Gathers half-width copies of the weights that only products in half width read.
fn gather_copies(program: &mut Program) {
    let narrow = read_in_half_width(program);
    for mut instr in std::mem::take(&mut program.instrs) {
        if matches!(instr.op, Op::Start(op::Start(Collective { kind: CollectiveKind::AllGather, .. }))) {
            for (shard, whole) in instr.reads.iter_mut().zip(&instr.writes) {
                let is_weight = program.value(*shard).kind == Kind::Parameter && shard != whole;
                if let Some(dtype) = narrow[whole.0 as usize].filter(|_| is_weight) {
                    program.values[whole.0 as usize].dtype = dtype;
                    *shard = copy(program, *shard, dtype, instr.site);
                }
            }
        }
        program.instrs.push(instr);
    }
}

/// For each f32 value the element type in which all instructions that read it multiply it, if there is one.
pub(super) fn read_in_half_width(program: &Program) -> Vec<Option<DType>> {
    // None: not read yet. Some(None): read in full width, or in two widths.
    let mut read: Vec<Option<Option<DType>>> = vec![None; program.values.len()];
    for instr in program.instrs.iter().filter(|i| !matches!(i.op, Op::Await(_))) {
        let narrow = half_width(program, instr);
        for (i, v) in instr.reads.iter().enumerate() {
            let here = narrow.filter(|_| i < 2 && program.value(*v).dtype == DType::F32);
            let before = &mut read[v.0 as usize];
            *before = Some(before.map_or(here, |before| before.filter(|dtype| Some(*dtype) == here)));
        }
    }
    program.bindings.iter().for_each(|b| read[b.value.0 as usize] = Some(None));
    read.into_iter().map(Option::flatten).collect()
}

/// The element type in which an instruction multiplies matrices, if it is narrower than f32.
pub(super) fn half_width(program: &Program, instr: &Instr) -> Option<DType> {
    let Op::MatMul(m) = &instr.op else { return None };
    let has_f16 = instr.reads[..2].iter().chain(&instr.writes).any(|v| program.value(*v).dtype == DType::F16);
    match m.compute {
        // Devices round to bf16 before they round to e4m3.
        Compute::Bf16 | Compute::Fp8 => Some(DType::Bf16),
        Compute::F32 => has_f16.then_some(DType::F16),
    }
}

/// A half-width copy of a value; the adjoint of a norm writes that of its result itself.
fn copy(program: &mut Program, wide: ValueId, narrow: DType, site: Site) -> ValueId {
    let value = program.value(wide);
    let (name, shape) = (format!("{} in {narrow}", value.name), value.shape.clone());
    let copy = program.add_value(name, &shape, narrow, Kind::Activation);
    let Some(adjoint) = adjoint_of_norm(program, wide, narrow, site) else {
        program.push(Op::Cast(op::Cast), vec![wide], vec![copy], site);
        return copy;
    };
    let Instr { op, writes, .. } = &mut program.instrs[adjoint];
    if let Op::NormBackward(op::NormBackward { narrow, .. }) = op {
        *narrow = true;
        writes.push(copy);
    }
    copy
}

/// The adjoint of a norm that has written a value for the same part of the step, and can write it in this type too.
fn adjoint_of_norm(program: &Program, wide: ValueId, narrow: DType, site: Site) -> Option<usize> {
    let writer = program.instrs.iter().rposition(|instr| instr.writes.first() == Some(&wide))?;
    let instr = &program.instrs[writer];
    let dy = match instr.op {
        Op::NormBackward(op::NormBackward { kind: NormKind::Rms, narrow: false, .. }) => instr.reads[3],
        Op::NormBackward(op::NormBackward { kind: NormKind::Layer, narrow: false, .. }) => instr.reads[4],
        _ => return None,
    };
    let is_near = (instr.site.phase, instr.site.microbatch) == (site.phase, site.microbatch);
    (is_near && program.value(dy).dtype == narrow).then_some(writer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::MatMul;

    const SITE: Site = Site { phase: Phase::Forward, block: None, microbatch: 0 };
    const BF16: MatMul = MatMul { compute: Compute::Bf16, ..MatMul::nt() };

    fn names(program: &Program) -> Vec<(&'static str, Vec<&str>)> {
        let name = |v: &ValueId| program.value(*v).name.as_str();
        program.instrs.iter().map(|i| (i.op.name(), i.reads.iter().map(name).collect())).collect()
    }

    #[test]
    fn weight_of_several_products_is_converted_once_until_it_is_updated() {
        let mut p = Program::default();
        let w = p.add_value("w", &[8, 8], DType::F32, Kind::Parameter);
        let x = p.add_value("x", &[8, 8], DType::Bf16, Kind::Activation);
        let y = p.add_value("y", &[8, 8], DType::F32, Kind::Activation);
        p.push(Op::MatMul(BF16), vec![x, w], vec![y], SITE);
        p.push(Op::MatMul(BF16), vec![x, w], vec![y], SITE);
        p.push(Op::Add(op::Add), vec![w, y], vec![w], SITE);
        p.push(Op::MatMul(BF16), vec![x, w], vec![y], SITE);

        half_copies(&mut p);

        let product = ("matmul", vec!["x", "w in bf16"]);
        let cast = ("cast", vec!["w"]);
        let expected = [cast.clone(), product.clone(), product.clone(), ("add", vec!["w", "y"]), cast, product];
        assert_eq!(names(&p), expected);
    }

    /// A large weight and two small ones.
    #[test]
    fn small_weights_are_converted_at_the_start_and_large_ones_before_their_products() {
        let mut p = Program::default();
        let mut weight = |name, rows| p.add_value(name, &[rows, 8], DType::F32, Kind::Parameter);
        let [large, a, b] = [("large", SMALL), ("a", 8), ("b", 8)].map(|(name, rows)| weight(name, rows));
        let x = p.add_value("x", &[8, 8], DType::Bf16, Kind::Activation);
        let y = p.add_value("y", &[8, 8], DType::F32, Kind::Activation);
        let [forward, backward] = [Phase::Forward, Phase::Backward];
        for (w, phase) in
            [(a, forward), (large, forward), (b, forward), (large, forward), (a, backward), (large, backward)]
        {
            p.push(Op::MatMul(BF16), vec![x, w], vec![y], Site { phase, ..SITE });
        }

        half_copies(&mut p);

        let casts = |(op, reads): &(&str, Vec<&str>)| (*op == "cast").then(|| reads.join(" "));
        let of_forward = ["a", "b", "matmul", "large", "matmul", "matmul", "matmul"];
        let expected = [&of_forward[..], &["matmul", "large", "matmul"]].concat();
        assert_eq!(names(&p).iter().map(|i| casts(i).unwrap_or(i.0.into())).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn operands_of_f32_products_biases_and_residuals_stay_f32() {
        let mut p = Program::default();
        let [x, w, b, y] = ["x", "w", "b", "y"].map(|name| p.add_value(name, &[8, 8], DType::F32, Kind::Activation));
        p.push(Op::MatMul(MatMul::nt()), vec![x, w], vec![y], SITE);
        let with_rest = MatMul { bias: true, residual: true, ..BF16 };
        p.push(Op::MatMul(with_rest), vec![x, w, b, y], vec![y], SITE);

        half_copies(&mut p);

        assert_eq!(names(&p)[0], ("matmul", vec!["x", "w"]));
        assert_eq!(names(&p)[3], ("matmul", vec!["x in bf16", "w in bf16", "b", "y"]));
    }

    /// Two gathered weights: a product reads one of them, a product and a sum read the other.
    #[test]
    fn gathered_weight_that_only_products_read_is_gathered_in_half_width() {
        let mut p = Program::default();
        let [w, v] = ["w", "v"].map(|name| p.add_value(name, &[32], DType::F32, Kind::Parameter));
        let [x, y] = ["x", "y"].map(|name| p.add_value(name, &[8, 8], DType::F32, Kind::Activation));
        let [all_w, all_v] = ["all w", "all v"].map(|name| p.add_value(name, &[8, 8], DType::F32, Kind::Activation));
        let c = Collective::new(CollectiveKind::AllGather, crate::passes::fully_sharded::GROUP);
        p.push(Op::Start(op::Start(c)), vec![w, v], vec![all_w, all_v], SITE);
        p.push(Op::Await(op::Await(c)), vec![all_w, all_v], vec![], SITE);
        p.push(Op::MatMul(BF16), vec![x, all_w], vec![y], SITE);
        p.push(Op::MatMul(BF16), vec![x, all_v], vec![y], SITE);
        p.push(Op::Add(op::Add), vec![x, all_v], vec![y], SITE);

        half_copies(&mut p);

        assert_eq!(names(&p)[..2], [("cast", vec!["w"]), ("start", vec!["w in bf16", "v"])]);
        assert_eq!([all_w, all_v].map(|v| p.value(v).dtype), [DType::Bf16, DType::F32]);
        let products: Vec<_> =
            names(&p).into_iter().filter(|(op, _)| *op == "matmul").map(|(_, reads)| reads).collect();
        assert_eq!(products, [["x in bf16", "all w"], ["x in bf16", "all v in bf16"]]);
    }

    #[test]
    fn weight_beside_an_f16_activation_is_converted_to_f16() {
        let mut p = Program::default();
        let w = p.add_value("w", &[8, 8], DType::F32, Kind::Parameter);
        let x = p.add_value("x", &[8, 8], DType::F16, Kind::Activation);
        let y = p.add_value("y", &[8, 8], DType::F32, Kind::Activation);
        p.push(Op::MatMul(MatMul::nt()), vec![x, w], vec![y], SITE);

        half_copies(&mut p);

        assert_eq!(names(&p), [("cast", vec!["w"]), ("matmul", vec!["x", "w in f16"])]);
    }

    /// The adjoint of a norm in f16 or bf16, and a product in bf16 that reads its result.
    #[test]
    fn adjoint_of_a_norm_writes_its_result_for_products_of_the_type_that_it_reads() {
        for (dtype, expected) in
            [(DType::Bf16, vec!["norm_backward", "matmul"]), (DType::F16, vec!["norm_backward", "cast", "matmul"])]
        {
            let mut p = Program::default();
            let mut value = |name, shape: &[usize], dtype| p.add_value(name, shape, dtype, Kind::Input);
            let (x, dy, w) =
                (value("x", &[8, 8], DType::F32), value("dy", &[8, 8], dtype), value("w", &[8, 8], DType::Bf16));
            let (gain, rstd) = (value("gain", &[8], DType::F32), value("rstd", &[8], DType::F32));
            let mut value = |name, shape: &[usize]| p.add_value(name, shape, DType::F32, Kind::Activation);
            let (dx, dgain, y) = (value("dx", &[8, 8]), value("dgain", &[8]), value("y", &[8, 8]));
            let (kind, rest) = (NormKind::Rms, false);
            let op = Op::NormBackward(op::NormBackward {
                kind,
                residual_x: rest,
                residual_params: rest,
                again: rest,
                narrow: rest,
            });
            p.push(op, vec![x, gain, rstd, dy], vec![dx, dgain], SITE);
            p.push(Op::MatMul(BF16), vec![dx, w], vec![y], SITE);

            half_copies(&mut p);

            assert_eq!(names(&p).into_iter().map(|(op, _)| op).collect::<Vec<_>>(), expected);
            assert_eq!(names(&p).last().unwrap().1, ["dx in bf16", "w"]);
            crate::verify::verify(&p).unwrap();
        }
    }

    /// Logits of a product, the loss with their gradient, and a product that reads it.
    #[test]
    fn logits_stay_f32_where_a_bias_is_added_or_something_else_than_a_product_reads_their_gradient() {
        for (has_bias, is_added, expected) in
            [(false, false, DType::Bf16), (true, false, DType::F32), (false, true, DType::F32)]
        {
            let mut p = Program::default();
            let mut value = |name, shape: &[usize], dtype| p.add_value(name, shape, dtype, Kind::Activation);
            let [x, w] = ["x", "w"].map(|name| value(name, &[8, 8], DType::Bf16));
            let [logits, gradient, dx] = ["logits", "gradient", "dx"].map(|name| value(name, &[8, 8], DType::F32));
            let bias = value("b", &[8], DType::F32);
            let (labels, hyper, loss) =
                (value("labels", &[8], DType::I32), value("hyper", &[6], DType::F64), value("loss", &[], DType::F64));
            let reads = if has_bias { vec![x, w, bias] } else { vec![x, w] };
            p.push(Op::MatMul(MatMul { bias: has_bias, ..BF16 }), reads, vec![logits], SITE);
            let op = Op::CrossEntropy(op::CrossEntropy { residual: false, gradient: true, vocab: None });
            p.push(op, vec![logits, labels, hyper], vec![loss, gradient], SITE);
            p.push(Op::MatMul(BF16), vec![gradient, w], vec![dx], SITE);
            if is_added {
                p.push(Op::Add(op::Add), vec![gradient, dx], vec![dx], SITE);
            }

            half_copies(&mut p);

            assert_eq!([logits, gradient].map(|v| p.value(v).dtype), [expected; 2]);
        }
    }
}
