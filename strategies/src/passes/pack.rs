//! Packed weights: frozen matrices are stored in fewer bits, and unpacked just before each product that reads them.
//!
//! [`pack`] changes what parameters are stored as, before anything is sharded: ranks then hold, gather and save words. Frozen
//! matrices that only products in bf16 read are stored in bf16 in any case, and those that only products in FP8 read as e4m3: the
//! products would round them in each step. [`unpack`]
//! inserts the instructions that unpack a weight, after everything else is in its place: a weight is unpacked anew for each
//! product inside a block, so that no more than one of them exists in full at a time. Weights outside blocks, such as that of
//! the head, are unpacked once for adjacent products. Products in bf16 read weights that are stored in bf16 where they are, or where
//! they were gathered, and those in FP8 weights that are stored as e4m3; so do products in f32 on devices that widen operands. [`pack_halves`] stores weights so that need no more than
//! bf16 and are never updated.
//!
//! Source: Dettmers et al. 2023, QLoRA, §3 (arXiv:2305.14314). We differ in that the scales of double quantisation are stored
//! as the f32 numbers that it gives, so that any 64 weights can be unpacked by themselves.

use crate::passes::precision::Precision;
use crate::program::op::weight_use::WeightUse;
use crate::program::{
    CollectiveKind, Compute, DType, Init, Instr, Kind, MatMul, Op, Packing, Param, ParamPart, Program, Site, ValueId,
    op,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Why weights cannot be packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "tensor parallelism leaves this rank columns {columns:?} of `{name}`, which is stored as {packing} in blocks of {} weights; \
     a smaller tensor_parallel_size would fit",
    packing.n_weights()
)]
pub struct CutBlocks {
    /// The tensor.
    pub name: String,
    /// The rank's columns.
    pub columns: Range<usize>,
    /// How it is stored.
    pub packing: Packing,
}

/// Packs the frozen matrices that only products read: those of blocks as `packing` says, and all others as their products round them, to
/// bf16 or e4m3; without `packing`, or where it is bf16, those of blocks too, unless lengths of their rows are read. Beside weights of fewer bits, tables of embeddings
/// are bf16 too. Those for which `is_kept` holds stay as they are. The choice depends on whole tensors, so that it is the same on every rank; and on every mesh, except that bf16 is not
/// chosen where tensor parallelism does not cut rows into equal parts of whole words.
///
/// # Errors
/// When a block of weights, as `packing` has them, would be on two ranks.
pub fn pack(
    program: &mut Program,
    packing: Option<Packing>,
    precision: Precision,
    is_kept: impl Fn(&Param) -> bool,
) -> Result<(), CutBlocks> {
    let half = precision.is_bf16().then_some(Packing::Bf16);
    let (uses, measured, in_fp8) = (uses(program), measured(program), in_fp8(program));
    let fewer_bits = packing.filter(|packing| *packing != Packing::Bf16);
    for at in 0..program.params.len() {
        let param = &program.params[at];
        let rounded = (in_fp8.contains(&param.value) && !measured.contains(&param.value)).then_some(Packing::E4m3);
        let wanted = match uses.get(&param.value) {
            // Products round what they read, but lengths of f32 numbers would change.
            _ if param.trainable || is_kept(param) => continue,
            _ if packing.is_none() && measured.contains(&param.value) => continue,
            Some(Use::InBlock) => [fewer_bits, rounded, packing, half],
            Some(Use::Outside) => [half, None, None, None],
            // So would a table of f32 numbers.
            Some(Use::Table) if fewer_bits.is_some() => [half, None, None, None],
            Some(Use::Table | Use::TableAndHead | Use::Other) | None => continue,
        };
        let Some(fitting) = wanted.into_iter().flatten().find(|packing| has_blocks(param, *packing)) else { continue };
        match check_columns(param, fitting) {
            Err(cut) if packing == Some(fitting) => return Err(cut),
            Ok(()) if packing == Some(fitting) || has_equal_columns(param, fitting, program.mesh_rank.mesh.tp) => {
                store(program, at, fitting);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Stores the matrices as bf16 that only products and embeddings read, and whose parts are numbers of bf16 by their names: for programs
/// that update no weight. No result changes.
pub fn pack_halves(program: &mut Program, is_half: &dyn Fn(&str) -> bool) {
    let uses = uses(program);
    for at in 0..program.params.len() {
        let param = &program.params[at];
        let is_matrix = uses.get(&param.value).is_some_and(|found| *found != Use::Other);
        if is_matrix && has_blocks(param, Packing::Bf16) && param.parts.iter().all(|part| is_half(&part.name)) {
            store(program, at, Packing::Bf16);
        }
    }
}

/// Inserts the instructions that unpack weights, and views of those that need none; `widens` is [`Target::widens_operands`].
///
/// [`Target::widens_operands`]: crate::target::Target::widens_operands
pub fn unpack(program: &mut Program, widens: bool) {
    let mut packed: BTreeMap<ValueId, Packing> =
        program.params.iter().filter_map(|p| Some((p.value, p.packing?))).collect();
    if packed.is_empty() {
        return;
    }
    let mut views = BTreeMap::new();
    let mut last: Option<(ValueId, DType, Site, ValueId)> = None;
    for mut instr in std::mem::take(&mut program.instrs) {
        if let Op::Start(op::Start(c)) = &instr.op
            && c.kind == CollectiveKind::AllGather
        {
            for (shard, whole) in instr.reads.iter().zip(&instr.writes) {
                if let Some(packing) = packed.get(shard).copied() {
                    packed.insert(*whole, packing);
                }
            }
        } else if let Some((at, packing)) = operand(&instr, &packed) {
            let weight = instr.reads[at];
            let dtype = dtype(&instr);
            // Words of two bf16 numbers, or four e4m3 numbers, are a matrix of such numbers in memory.
            let is_in_place = match packing {
                Packing::Bf16 => dtype == DType::Bf16 || (widens && matches!(instr.op, Op::MatMul(_))),
                Packing::E4m3 => matches!(instr.op, Op::MatMul(MatMul { compute: Compute::Fp8, .. })),
                Packing::Int8 | Packing::Nf4 { .. } => false,
            };
            if is_in_place {
                instr.reads[at] = *views.entry(weight).or_insert_with(|| view(program, weight, packing));
                program.instrs.push(instr);
                continue;
            }
            let reusable = last.filter(|last| (last.0, last.1, last.2) == (weight, dtype, instr.site));
            let unpacked = match reusable.filter(|_| instr.site.block.is_none()) {
                Some((.., unpacked)) => unpacked,
                None => unpack_one(program, (weight, packing), dtype, instr.site),
            };
            last = Some((weight, dtype, instr.site, unpacked));
            instr.reads[at] = unpacked;
        }
        program.instrs.push(instr);
    }
}

/// Where a weight is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// Products of a block.
    InBlock,
    /// Products outside blocks.
    Outside,
    /// Embeddings.
    Table,
    /// Embeddings, and products outside blocks: the head has the same weights.
    TableAndHead,
    /// Not only products.
    Other,
}

fn uses(program: &Program) -> BTreeMap<ValueId, Use> {
    let mut uses = BTreeMap::new();
    for instr in &program.instrs {
        for (i, v) in instr.reads.iter().enumerate() {
            let weight = instr.op.operation().weight().filter(|(at, _)| *at == i);
            let here = match weight.map(|(_, read_as)| read_as) {
                Some(WeightUse::Matrix) if instr.site.block.is_some() => Use::InBlock,
                Some(WeightUse::Matrix) => Use::Outside,
                Some(WeightUse::Table) => Use::Table,
                None => Use::Other,
            };
            let known = uses.entry(*v).or_insert(here);
            *known = match (*known, here) {
                (known, here) if known == here => known,
                (Use::Table | Use::Outside | Use::TableAndHead, Use::Table | Use::Outside) => Use::TableAndHead,
                _ => Use::Other,
            };
        }
    }
    uses
}

/// Weights whose rows' lengths are read.
fn measured(program: &Program) -> BTreeSet<ValueId> {
    let lengths = program.instrs.iter().filter(|instr| matches!(instr.op, Op::RowLengths(_)));
    lengths.map(|instr| instr.reads[0]).collect()
}

/// The magnitudes that scale the rows of a weight.
fn magnitudes(program: &Program, weight: ValueId) -> Vec<ValueId> {
    let of_weight = program.instrs.iter().filter(|i| matches!(i.op, Op::RowLengths(_)) && i.reads[0] == weight);
    let lengths: BTreeSet<ValueId> = of_weight.map(|instr| instr.writes[0]).collect();
    let scaled = program.instrs.iter().filter(|i| matches!(i.op, Op::Magnitude(_)) && lengths.contains(&i.reads[2]));
    scaled.map(|instr| instr.reads[1]).collect()
}

/// Weights that only products in FP8 read.
fn in_fp8(program: &Program) -> BTreeSet<ValueId> {
    let is_fp8 = |op: &Op, at: usize| at == 1 && matches!(op, Op::MatMul(MatMul { compute: Compute::Fp8, .. }));
    let reads =
        || program.instrs.iter().flat_map(|i| i.reads.iter().enumerate().map(|(at, v)| (*v, is_fp8(&i.op, at))));
    let others: BTreeSet<ValueId> = reads().filter(|(_, is_fp8)| !is_fp8).map(|(v, _)| v).collect();
    reads().map(|(v, _)| v).filter(|v| !others.contains(v)).collect()
}

/// Whether a parameter is a matrix whose rows are blocks.
fn has_blocks(param: &Param, packing: Packing) -> bool {
    let part_fits = |part: &ParamPart| part.shape.len() == 2 && packing.has_blocks(0, part.shape[1]);
    param.shape.len() == 2 && param.parts.iter().all(part_fits)
}

fn check_columns(param: &Param, packing: Packing) -> Result<(), CutBlocks> {
    let cut = param.parts.iter().filter(|part| part.dim == 1);
    let ranges = cut.flat_map(|part| part.ranges.iter().map(move |range| (part, range)));
    match ranges.into_iter().find(|(_, range)| !packing.has_blocks(range.start, range.end)) {
        Some((part, range)) => Err(CutBlocks { name: part.name.clone(), columns: range.clone(), packing }),
        None => Ok(()),
    }
}

/// Whether all tensor-parallel ranks have as many columns, and whole blocks, of what is cut along its rows.
fn has_equal_columns(param: &Param, packing: Packing, tp: usize) -> bool {
    let mut cut = param.parts.iter().filter(|part| part.dim == 1);
    cut.all(|part| part.shape[1].is_multiple_of(tp * packing.n_weights()))
}

fn store(program: &mut Program, at: usize, packing: Packing) {
    for magnitude in magnitudes(program, program.params[at].value) {
        let of_it = program.params.iter_mut().filter(|param| param.value == magnitude);
        for param in of_it {
            if let Init::RowLengths(measured) = &mut param.init {
                measured.packing = Some(packing);
            }
        }
    }
    let param = &mut program.params[at];
    param.packing = Some(packing);
    param.shape[1] = packing.words(param.shape[1]);
    for part in &mut param.parts {
        part.shape[1] = packing.words(part.shape[1]);
        if part.dim == 1 {
            part.ranges.iter_mut().for_each(|r| *r = packing.words(r.start)..packing.words(r.end));
        }
    }
    let all = 0..param.shape.iter().product();
    (param.held, param.updated) = (all.clone(), all);
    let value = &mut program.values[param.value.0 as usize];
    (value.shape, value.dtype) = (param.shape.clone(), DType::I32);
}

/// The position of the packed operand of an instruction.
fn operand(instr: &Instr, packed: &BTreeMap<ValueId, Packing>) -> Option<(usize, Packing)> {
    let (at, _) = instr.op.operation().weight().filter(|(_, read_as)| *read_as == WeightUse::Matrix)?;
    Some((at, *packed.get(&instr.reads[at])?))
}

/// The element type in which a product reads its operands.
fn dtype(instr: &Instr) -> DType {
    match &instr.op {
        Op::MatMul(m) if m.compute != Compute::F32 => DType::Bf16,
        _ => DType::F32,
    }
}

fn view(program: &mut Program, weight: ValueId, packing: Packing) -> ValueId {
    let value = program.value(weight);
    let shape = [value.n_rows(), packing.weights(value.n_columns())];
    let dtype = if packing == Packing::E4m3 { DType::E4m3 } else { DType::Bf16 };
    program.add_value(format!("{} as {dtype}", value.name), &shape, dtype, Kind::View(weight))
}

fn unpack_one(program: &mut Program, (weight, packing): (ValueId, Packing), dtype: DType, site: Site) -> ValueId {
    let value = program.value(weight);
    let shape = [value.n_rows(), packing.weights(value.n_columns())];
    let name = format!("{} in {dtype}", value.name);
    let unpacked = program.add_value(name, &shape, dtype, Kind::Activation);
    program.push(Op::Unpack(op::Unpack(packing)), vec![weight], vec![unpacked], site);
    unpacked
}

#[cfg(test)]
#[path = "pack_tests.rs"]
mod tests;
