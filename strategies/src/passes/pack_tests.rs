use super::*;
use crate::mesh::{Mesh, MeshRank};
use crate::passes::compact::compact;
use crate::passes::memory::{Region, memory};
use crate::program::op;
use crate::program::{AdaptedRows, Collective, CollectiveKind, Columns, Init, MatMul, Phase};
use crate::target::Nowhere;
use std::slice;

const NF4: Packing = Packing::Nf4 { double: true };
const BF16: MatMul = MatMul { compute: Compute::Bf16, ..MatMul::nt() };

fn site(block: Option<u32>) -> Site {
    Site { phase: Phase::Forward, block, microbatch: 0 }
}

fn frozen(program: &mut Program, name: &str, shape: &[usize]) -> ValueId {
    let value = program.add_value(name, shape, DType::F32, Kind::Parameter);
    let parts = vec![ParamPart::whole(name, shape)];
    program.params.push(Param { trainable: false, ..Param::whole(value, shape, parts, Init::Zeros) });
    value
}

/// `y = x W^T` in a block or outside.
fn product(program: &mut Program, weight: ValueId, block: Option<u32>) {
    let [x, y] = ["x", "y"].map(|name| program.add_value(name, &[8, 128], DType::Bf16, Kind::Activation));
    program.push(Op::MatMul(BF16), vec![x, weight], vec![y], site(block));
}

fn packing_of(program: &Program, name: &str) -> Option<Packing> {
    program.params.iter().find(|p| p.parts[0].name == name).unwrap().packing
}

#[test]
fn frozen_matrices_of_blocks_are_packed_and_the_head_is_bf16() {
    let mut p = Program::default();
    let block = frozen(&mut p, "block", &[128, 128]);
    let head = frozen(&mut p, "head", &[128, 128]);
    let odd = frozen(&mut p, "odd", &[128, 62]);
    let trained = frozen(&mut p, "trained", &[128, 128]);
    p.params.last_mut().unwrap().trainable = true;
    [block, odd, trained].into_iter().for_each(|weight| product(&mut p, weight, Some(0)));
    product(&mut p, head, None);

    pack(&mut p, Some(NF4), Precision::Bf16, |_| false).unwrap();

    let found = ["block", "head", "odd", "trained"].map(|name| packing_of(&p, name));
    assert_eq!(found, [Some(NF4), Some(Packing::Bf16), Some(Packing::Bf16), None]);
    assert_eq!((&p.value(block).shape[..], p.value(block).dtype), (&[128, 18][..], DType::I32));
    assert_eq!(p.value(block).size_bytes() * 8, 128 * 128 * 9 / 2);
    assert_eq!(p.params[0].parts[0].shape, [128, 18]);
    assert_eq!(p.params[0].held, 0..128 * 18);
}

#[test]
fn other_reads_than_products_keep_a_weight_as_it_is() {
    let mut p = Program::default();
    let tied = frozen(&mut p, "tied", &[128, 128]);
    product(&mut p, tied, None);
    let [ids, x] = ["ids", "x"].map(|name| p.add_value(name, &[8], DType::I32, Kind::Input));
    p.push(Op::Embedding(op::Embedding { residual: false, first: 0 }), vec![ids, tied], vec![x], site(None));

    pack(&mut p, Some(NF4), Precision::Bf16, |_| false).unwrap();
    unpack(&mut p, false);

    assert_eq!(packing_of(&p, "tied"), None);
    assert_eq!(p.instrs.len(), 2);
}

/// Matrices of a block with rows of one weight, with lengths of rows, and trained; a head, a table, and a weight that is both.
#[test]
fn frozen_matrices_that_only_products_in_bf16_read_are_stored_in_bf16() {
    for (precision, half) in [(Precision::Bf16, Some(Packing::Bf16)), (Precision::F32, None), (Precision::F16, None)] {
        let mut p = Program::default();
        let [block, odd, measured, head, table, tied, trained] =
            [("block", 62), ("odd", 61), ("measured", 64), ("head", 64), ("table", 64), ("tied", 64), ("trained", 64)]
                .map(|(name, columns)| frozen(&mut p, name, &[64, columns]));
        p.params.last_mut().unwrap().trainable = true;
        [block, odd, measured, trained].into_iter().for_each(|weight| product(&mut p, weight, Some(0)));
        [head, tied].into_iter().for_each(|weight| product(&mut p, weight, None));
        let lengths = p.add_value("lengths", &[64], DType::F32, Kind::Activation);
        let rows = AdaptedRows { columns: Columns { start: 0, len: 64 }, factor: 1.0, trans_b: true };
        p.push(Op::RowLengths(op::RowLengths(rows)), vec![measured], vec![lengths], site(Some(0)));
        let [ids, x] = ["ids", "x"].map(|name| p.add_value(name, &[8], DType::I32, Kind::Input));
        for of in [table, tied] {
            p.push(Op::Embedding(op::Embedding { residual: false, first: 0 }), vec![ids, of], vec![x], site(None));
        }

        pack(&mut p, None, precision, |_| false).unwrap();

        let found = p.params.iter().map(|param| (&param.parts[0].name[..], param.packing)).collect::<BTreeMap<_, _>>();
        let stored = |name| if ["block", "head"].contains(&name) { half } else { None };
        assert_eq!(found, found.keys().map(|name| (*name, stored(name))).collect(), "{precision:?}");
    }
}

/// Columns of the last of three ranks, which are whole words: of 60, 20 for each rank, or of 52, where the first one has 17.
#[test]
fn matrix_whose_columns_ranks_cannot_share_alike_is_not_stored_in_bf16_unless_it_was_to_be() {
    let of_last = |packing, columns: usize| {
        let mesh = Mesh { tp: 3, ..Mesh::ONE };
        let mut p = Program { mesh_rank: MeshRank { mesh, rank: 2 }, ..Program::default() };
        let weight = frozen(&mut p, "w", &[128, columns]);
        p.params[0].cut(1, slice::from_ref(&(columns * 2 / 3..columns)));
        product(&mut p, weight, Some(0));
        pack(&mut p, packing, Precision::Bf16, |_| false).unwrap();
        packing_of(&p, "w")
    };

    assert_eq!([60, 52].map(|columns| of_last(None, columns)), [Some(Packing::Bf16), None]);
    assert_eq!(of_last(Some(Packing::Bf16), 52), Some(Packing::Bf16));
}

#[test]
fn frozen_table_is_packed_as_bf16_beside_weights_of_fewer_bits() {
    for (packing, precision, expected) in [
        (NF4, Precision::Bf16, Some(Packing::Bf16)),
        (NF4, Precision::F32, None),
        (Packing::Bf16, Precision::Bf16, None),
    ] {
        let mut p = Program::default();
        let table = frozen(&mut p, "table", &[128, 128]);
        let [ids, x] = ["ids", "x"].map(|name| p.add_value(name, &[8], DType::I32, Kind::Input));
        p.push(Op::Embedding(op::Embedding { residual: false, first: 0 }), vec![ids, table], vec![x], site(None));

        pack(&mut p, Some(packing), precision, |_| false).unwrap();
        unpack(&mut p, false);

        assert_eq!(packing_of(&p, "table"), expected, "{packing} {precision:?}");
        assert_eq!(p.instrs.len(), 1, "rows are unpacked where they are looked up");
    }
}

/// A head that shares the weights of the embedding, matrices of a block and their bias, of a model that trains no more.
#[test]
fn weights_that_are_numbers_of_bf16_are_stored_so_and_read_where_they_are() {
    for widens in [true, false] {
        let mut p = Program::default();
        let [tied, inside, other] = ["tied", "in", "other"].map(|name| frozen(&mut p, name, &[128, 128]));
        p.params.iter_mut().for_each(|param| param.trainable = true);
        let [ids, x] = ["ids", "x"].map(|name| p.add_value(name, &[8], DType::I32, Kind::Input));
        p.push(Op::Embedding(op::Embedding { residual: false, first: 0 }), vec![ids, tied], vec![x], site(None));
        product(&mut p, inside, Some(0));
        product(&mut p, other, Some(0));
        product(&mut p, tied, None);
        for instr in &mut p.instrs[1..] {
            instr.op = Op::MatMul(MatMul::nt());
        }

        pack_halves(&mut p, &|name| name != "other");
        unpack(&mut p, widens);

        assert_eq!(
            ["tied", "in", "other"].map(|name| packing_of(&p, name)),
            [Some(Packing::Bf16), Some(Packing::Bf16), None]
        );
        let ops: Vec<&str> = p.instrs.iter().map(|i| i.op.name()).collect();
        if widens {
            assert_eq!(ops, ["embedding", "matmul", "matmul", "matmul"]);
            let operands = p.instrs.iter().map(|i| p.value(i.reads[1]).kind).collect::<Vec<_>>();
            assert_eq!(operands, [Kind::Parameter, Kind::View(inside), Kind::Parameter, Kind::View(tied)]);
        } else {
            assert_eq!(ops, ["embedding", "unpack", "matmul", "matmul", "unpack", "matmul"]);
        }
    }
}

/// A rank with columns 64..128 of a tensor has whole blocks of them; one with columns 32..64 has not.
#[test]
fn columns_of_a_rank_are_packed_or_refused_if_they_are_no_blocks() {
    for (first, end, fits) in [(64, 128, true), (32, 64, false)] {
        let mut p = Program::default();
        let weight = frozen(&mut p, "w", &[128, 128]);
        p.params[0].cut(1, std::slice::from_ref(&(first..end)));
        p.values[weight.0 as usize].shape = vec![128, end - first];
        product(&mut p, weight, Some(0));

        let packed = pack(&mut p, Some(NF4), Precision::F32, |_| false);

        if fits {
            assert_eq!((packed, packing_of(&p, "w")), (Ok(()), Some(NF4)));
            assert_eq!(p.params[0].parts[0].ranges.first(), Some(&(9..18)));
        } else {
            assert_eq!(packed, Err(CutBlocks { name: "w".into(), columns: 32..64, packing: NF4 }));
        }
    }
}

#[test]
fn weight_is_unpacked_for_each_product_of_a_block_and_read_where_it_is_outside() {
    let mut p = Program::default();
    let [inside, outside] = ["in", "out"].map(|name| frozen(&mut p, name, &[128, 128]));
    for _ in 0..2 {
        product(&mut p, inside, Some(0));
    }
    for _ in 0..2 {
        product(&mut p, outside, None);
    }
    pack(&mut p, Some(NF4), Precision::Bf16, |_| false).unwrap();

    unpack(&mut p, false);

    let ops: Vec<&str> = p.instrs.iter().map(|i| i.op.name()).collect();
    assert_eq!(ops, ["unpack", "matmul", "unpack", "matmul", "matmul", "matmul"]);
    assert_eq!(p.value(p.instrs[1].reads[1]).shape, [128, 128]);
    assert_eq!(p.value(p.instrs[1].reads[1]).dtype, DType::Bf16);
    let views = [4, 5].map(|i: usize| p.instrs[i].reads[1]);
    assert_eq!(views[0], views[1]);
    let view = p.value(views[0]);
    assert_eq!((view.kind, view.dtype, &view.shape[..]), (Kind::View(outside), DType::Bf16, &[128, 128][..]));
}

#[test]
fn weight_is_unpacked_once_for_adjacent_products_in_f32_outside_blocks() {
    let mut p = Program::default();
    let weight = frozen(&mut p, "w", &[128, 128]);
    for _ in 0..2 {
        product(&mut p, weight, None);
    }
    pack(&mut p, Some(NF4), Precision::Bf16, |_| false).unwrap();
    for instr in &mut p.instrs {
        instr.op = Op::MatMul(MatMul::nt());
    }

    unpack(&mut p, false);

    let ops: Vec<&str> = p.instrs.iter().map(|i| i.op.name()).collect();
    assert_eq!(ops, ["unpack", "matmul", "matmul"]);
}

#[test]
fn view_has_the_place_of_its_weight_which_stays_in_the_program() {
    let mut p = Program::default();
    let unused = frozen(&mut p, "unused", &[128, 128]);
    let weight = frozen(&mut p, "w", &[128, 128]);
    product(&mut p, weight, None);
    pack(&mut p, Some(NF4), Precision::Bf16, |_| false).unwrap();
    p.params.retain(|param| param.value != unused);
    unpack(&mut p, false);

    compact(&mut p);

    let layout = memory(&p, &Nowhere::default());
    let view = p.instrs.iter().find(|i| matches!(i.op, Op::MatMul(_))).unwrap().reads[1];
    let Kind::View(of) = p.value(view).kind else { panic!("{:?}", p.value(view)) };
    assert_eq!((p.params[0].value, &p.value(of).name[..]), (of, "w"));
    assert_eq!(layout.locations[view.0 as usize], layout.locations[of.0 as usize]);
    assert_eq!(layout.bytes(Region::Parameters), 128 * 128 * 2);
}

#[test]
fn gathered_words_are_unpacked_where_they_are_gathered() {
    let mut p = Program::default();
    let weight = frozen(&mut p, "w", &[128, 128]);
    product(&mut p, weight, Some(0));
    pack(&mut p, Some(NF4), Precision::F32, |_| false).unwrap();
    let whole = p.add_value("w", &[128, 18], DType::I32, Kind::Activation);
    let gather = Collective::new(CollectiveKind::AllGather, crate::passes::fully_sharded::GROUP);
    p.instrs[0].reads[1] = whole;
    let start =
        Instr { op: Op::Start(op::Start(gather)), reads: vec![weight], writes: vec![whole], site: site(Some(0)) };
    p.instrs.insert(0, start);

    unpack(&mut p, false);

    let ops: Vec<(&str, ValueId)> = p.instrs.iter().map(|i| (i.op.name(), i.reads[0])).collect();
    assert_eq!(ops[..2], [("start", weight), ("unpack", whole)]);
}

/// Two blocks gather a weight each, which products of their forward pass read in two ways.
#[test]
fn weight_in_bf16_is_read_where_it_was_gathered_and_its_memory_is_free_after_the_last_product() {
    let mut p = Program::default();
    let gather = Collective::new(CollectiveKind::AllGather, crate::passes::fully_sharded::GROUP);
    let mut gathered = Vec::new();
    for block in 0..2 {
        let weight = frozen(&mut p, &format!("w{block}"), &[128, 128]);
        product(&mut p, weight, Some(block));
        product(&mut p, weight, Some(block));
        pack(&mut p, None, Precision::Bf16, |_| false).unwrap();
        let whole = p.add_value("whole", &[128, 64], DType::I32, Kind::Activation);
        let products = p.instrs.split_off(p.instrs.len() - 2);
        p.push(Op::Start(op::Start(gather)), vec![weight], vec![whole], site(Some(block)));
        p.push(Op::Await(op::Await(gather)), vec![whole], vec![], site(Some(block)));
        p.instrs.extend(products.into_iter().map(|i| Instr { reads: vec![i.reads[0], whole], ..i }));
        gathered.push(whole);
    }

    unpack(&mut p, false);

    let ops: Vec<&str> = p.instrs.iter().map(|i| i.op.name()).collect();
    assert_eq!(ops, ["start", "await", "matmul", "matmul"].repeat(2));
    let layout = memory(&p, &Nowhere::default());
    let place = |v: ValueId| layout.locations[v.0 as usize];
    for (block, whole) in gathered.iter().enumerate() {
        let views = [2, 3].map(|i| p.instrs[4 * block + i].reads[1]);
        assert_eq!(views[0], views[1]);
        assert_eq!(p.value(views[0]).kind, Kind::View(*whole));
        assert_eq!(place(views[0]), place(*whole));
    }
    assert_eq!(place(gathered[0]), place(gathered[1]));
}

/// A weight that products in FP8 read, one that they share with one in bf16, and one whose rows' lengths are read.
#[test]
fn weights_of_products_in_fp8_are_stored_as_these_read_them() {
    let fp8 = |p: &mut Program, weight| {
        product(p, weight, Some(0));
        p.instrs.last_mut().unwrap().op = Op::MatMul(MatMul { compute: Compute::Fp8, ..MatMul::nt() });
    };
    for (packing, expected) in [(None, Packing::E4m3), (Some(Packing::Bf16), Packing::E4m3), (Some(NF4), NF4)] {
        let mut p = Program::default();
        let [own, shared] = ["own", "shared"].map(|name| frozen(&mut p, name, &[128, 128]));
        [own, shared].into_iter().for_each(|weight| fp8(&mut p, weight));
        product(&mut p, shared, Some(0));

        pack(&mut p, packing, Precision::Fp8, |_| false).unwrap();

        let other = if packing == Some(NF4) { NF4 } else { Packing::Bf16 };
        assert_eq!(["own", "shared"].map(|name| packing_of(&p, name)), [Some(expected), Some(other)]);
        if expected == Packing::E4m3 {
            assert_eq!(&p.value(own).shape[..], [128, 32]);
        }
    }
}

#[test]
fn weight_in_fp8_is_read_in_place_and_unpacked_only_for_products_in_bf16() {
    let mut p = Program::default();
    let weight = frozen(&mut p, "w", &[128, 128]);
    product(&mut p, weight, Some(0));
    p.instrs[0].op = Op::MatMul(MatMul { compute: Compute::Fp8, ..MatMul::nt() });
    pack(&mut p, None, Precision::Fp8, |_| false).unwrap();
    product(&mut p, weight, Some(0));

    unpack(&mut p, false);

    let ops: Vec<&str> = p.instrs.iter().map(|i| i.op.name()).collect();
    assert_eq!(ops, ["matmul", "unpack", "matmul"]);
    let [in_fp8, in_bf16] = [0, 2].map(|i| p.value(p.instrs[i].reads[1]));
    assert_eq!((in_fp8.kind, in_fp8.dtype, in_fp8.size_bytes()), (Kind::View(weight), DType::E4m3, 128 * 128));
    assert_eq!(in_bf16.dtype, DType::Bf16);
}
