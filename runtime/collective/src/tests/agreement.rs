//! Every implementation computes the results of the definitions, bit for bit.
#![allow(unsafe_code)] // Asynchronous operations take raw memory.

use half::{bf16, f16};
use proptest::prelude::*;

use super::definitions::{Value, assert_same, check_every_kind, sum, values};
use super::{ID, Memory, Rank, with_all};
use phalanx_device::parts::part;
use phalanx_device::world::World;
use phalanx_device::{Collective, Element as _, Operand, Operation, OperationKind, RawBuffer, SliceOperations, Ticket};

/// Lengths around every boundary: zero, one, odd, a flat operation, a block, several chunks.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), 2..100usize, 500..530usize, 1020..1030usize, 2040..2060usize, 66_000..70_000usize]
}

fn check_types(rank: &mut Rank, n: usize, unit: usize, salt: u32) {
    let group = rank.group(0);
    check_every_kind::<f32>(group, n, unit, salt);
    check_every_kind::<bf16>(group, n, unit, salt);
    check_every_kind::<f16>(group, n, unit, salt);
    check_every_kind::<f64>(group, n, unit, salt);
    check_every_kind::<i32>(group, n, unit, salt);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn every_kind_and_type_equals_its_definition(
        size in 1..6u32, lens in prop::collection::vec(lengths(), 1..3), unit in 1..40usize, salt in any::<u32>()
    ) {
        let world = World::of_one_group(ID, size).unwrap();
        with_all(&world, &|rank| {
            for n in &lens {
                check_types(rank, *n, unit, salt);
            }
        });
    }
}

/// New memory that holds `values`.
fn filled<T: Value>(memory: &mut Memory, values: &[T]) -> RawBuffer {
    let buffer = memory.alloc(size_of_val(values));
    // SAFETY: the memory is new and as long as the values.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), buffer.start(), buffer.bytes()) };
    buffer
}

/// The contents of memory that no operation uses.
fn read<T: Value>(buffer: RawBuffer) -> Vec<T> {
    let n = buffer.bytes() / size_of::<T>();
    // SAFETY: the memory of a test lives as long as its rank, is aligned for every type, and is not in use by now.
    unsafe { std::slice::from_raw_parts(buffer.start().cast::<T>(), n) }.to_vec()
}

fn start(group: &mut dyn Collective, kind: OperationKind, sequence: u32, operands: &[Operand]) -> Ticket {
    // SAFETY: operands are memory of the rank, which outlives its groups, and not touched before the operation is finished.
    unsafe { group.start(&Operation { kind, sequence, unit: 3 }, operands) }.unwrap()
}

/// A bucket of three tensors of two types, summed in place.
fn check_bucket(rank: &mut Rank, sequence: u32) {
    let (position, size) = (rank.group(0).position(), rank.group(0).size());
    let a = filled(&mut rank.memory, &values::<f32>(position, 5000, 1));
    let b = filled(&mut rank.memory, &values::<bf16>(position, 77, 2));
    let c = filled(&mut rank.memory, &values::<bf16>(position, 0, 3));
    let operands = [
        Operand::in_place(a, f32::TYPE, 5000),
        Operand::in_place(b, bf16::TYPE, 77),
        Operand::in_place(c, bf16::TYPE, 0),
    ];

    let ticket = start(rank.group(0), OperationKind::AllReduce, sequence, &operands);
    rank.group(0).finish(ticket).unwrap();

    assert_same(&read::<f32>(a), &sum::<f32>(size, 5000, 1), "first of the bucket");
    assert_same(&read::<bf16>(b), &sum::<bf16>(size, 77, 2), "second of the bucket");
}

#[test]
fn bucket_of_tensors_is_one_operation() {
    let world = World::of_one_group(ID, 3).unwrap();

    with_all(&world, &|rank| (0..200).for_each(|sequence| check_bucket(rank, sequence)));
}

#[test]
fn reduce_scatter_and_all_gather_in_place_touch_only_their_parts() {
    let world = World::of_one_group(ID, 3).unwrap();
    let n = 20_000;

    with_all(&world, &|rank| {
        let (position, size) = (rank.group(0).position(), rank.group(0).size());
        let own = part(n, 3, size, position);
        let bytes = own.start * 4..own.end * 4;
        let whole = filled(&mut rank.memory, &values::<f32>(position, n, 5));

        let scattered = Operand { send: whole, recv: whole.slice(bytes), dtype: f32::TYPE, n_elements: n };
        let ticket = start(rank.group(0), OperationKind::ReduceScatter, 0, &[scattered]);
        rank.group(0).finish(ticket).unwrap();
        let gathered = Operand::in_place(whole, f32::TYPE, n);
        let ticket = start(rank.group(0), OperationKind::AllGather, 1, &[gathered]);
        rank.group(0).finish(ticket).unwrap();

        assert_same(&read::<f32>(whole), &sum::<f32>(size, n, 5), "reduce_scatter and all_gather equal an all_reduce");
    });
}

#[test]
fn shift_may_replace_its_input() {
    let world = World::of_one_group(ID, 4).unwrap();

    with_all(&world, &|rank| {
        for n in [10, 30_000] {
            let position = rank.group(0).position();
            let buffer = filled(&mut rank.memory, &values::<f32>(position, n, 5));

            for step in 1..5 {
                let operand = Operand::in_place(buffer, f32::TYPE, n);
                let ticket = start(rank.group(0), OperationKind::Shift { by: 1 }, step, &[operand]);
                rank.group(0).finish(ticket).unwrap();
                let source = (position + 4 * step - step) % 4;
                assert_same(&read::<f32>(buffer), &values::<f32>(source, n, 5), "shift in place");
            }
        }
    });
}

#[test]
fn operations_in_flight_finish_in_any_order() {
    let world = World::of_one_group(ID, 3).unwrap();

    with_all(&world, &|rank| {
        let (position, size) = (rank.group(0).position(), rank.group(0).size());
        let n = |i: u32| 100 + 3000 * (i as usize % 4);
        let started: Vec<(u32, RawBuffer, Ticket)> = (0..32)
            .map(|i| {
                let buffer = filled(&mut rank.memory, &values::<f32>(position, n(i), i));
                let operand = Operand::in_place(buffer, f32::TYPE, n(i));
                (i, buffer, start(rank.group(0), OperationKind::AllReduce, i, &[operand]))
            })
            .collect();

        // Each rank finishes in its own order.
        let (even, odd): (Vec<_>, Vec<_>) = started.into_iter().partition(|(i, _, _)| (i + position) % 2 == 0);
        for (i, buffer, ticket) in odd.into_iter().chain(even.into_iter().rev()) {
            rank.group(0).finish(ticket).unwrap();
            assert_same(&read::<f32>(buffer), &sum::<f32>(size, n(i), i), "one of many");
        }
    });
}

#[test]
fn members_that_await_groups_in_opposite_orders_do_not_deadlock() {
    let world = World::new(ID, 2, vec![vec![0, 1], vec![1, 0]]).unwrap();
    let n = 50_000;

    with_all(&world, &|rank| {
        let order = if rank.rank == 0 { [0, 1] } else { [1, 0] };
        for round in 0..20 {
            let mut started = Vec::new();
            for group in [0, 1] {
                let position = rank.group(group).position();
                let buffer = filled(&mut rank.memory, &values::<f32>(position, n, round));
                let operand = Operand::in_place(buffer, f32::TYPE, n);
                started.push(Some((buffer, start(rank.group(group), OperationKind::AllReduce, round, &[operand]))));
            }
            for group in order {
                let (buffer, ticket) = started[group].take().unwrap();
                rank.group(group).finish(ticket).unwrap();
                assert_same(&read::<f32>(buffer), &sum::<f32>(2, n, round), "one of two groups");
            }
        }
    });
}

#[test]
fn send_completes_while_its_receiver_waits_for_a_later_message() {
    let world = World::of_one_group(ID, 2).unwrap();
    let n = 50_000;

    with_all(&world, &|rank| {
        // Rank 0 awaits its first send before it sends again; rank 1 awaits the second message before the first.
        let dtype = f32::TYPE;
        if rank.rank == 0 {
            for i in 0..2 {
                let send = filled(&mut rank.memory, &values::<f32>(0, n, i));
                let operand = Operand { send, recv: RawBuffer::EMPTY, dtype, n_elements: n };
                let ticket = start(rank.group(0), OperationKind::Send { to: 1 }, i, &[operand]);
                rank.group(0).finish(ticket).unwrap();
            }
        } else {
            let started = [0, 1].map(|i| {
                let recv = rank.memory.alloc(4 * n);
                let operand = Operand { send: RawBuffer::EMPTY, recv, dtype, n_elements: n };
                (i, recv, start(rank.group(0), OperationKind::Recv { from: 0 }, i, &[operand]))
            });
            for (i, recv, ticket) in started.into_iter().rev() {
                rank.group(0).finish(ticket).unwrap();
                assert_same(&read::<f32>(recv), &values::<f32>(0, n, i), "one of two messages");
            }
        }
    });
}

#[test]
fn overlapping_groups_of_a_mesh_work_together() {
    // Two rows and three columns, and two parts of rows; some members are not in order of rank.
    let groups = vec![vec![0, 1, 2], vec![5, 4, 3], vec![0, 3], vec![4, 1], vec![2, 5], vec![0, 1], vec![3, 4]];
    let world = World::new(ID, 6, groups).unwrap();

    with_all(&world, &|rank| {
        for round in 0..5 {
            for (index, group) in &mut rank.groups {
                check_every_kind::<f32>(&mut **group, 3000 + index, 4, round);
            }
        }
    });
}

#[test]
fn group_of_one_member_returns_its_input() {
    let world = World::of_one_group(ID, 1).unwrap();

    with_all(&world, &|rank| {
        let mut values = [1.0f32, 2.0];
        rank.group(0).all_reduce(&mut values).unwrap();
        assert_eq!(values, [1.0, 2.0]);
    });
}
