//! Tests of machines with several ranks each; every machine is a shared-memory world of its own.
#![allow(unsafe_code)] // Asynchronous operations take raw memory.

use half::bf16;

use crate::tests::definitions::{Value, assert_same, check_every_kind, values};
use crate::tests::{Rank, with_machines};
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{CollectiveError, Operand, Operation, OperationKind, RawBuffer, SliceOperations};

const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

/// Sums within each of the `machines` (lists of positions) first, then over machines.
fn sum_over<T: Value>(machines: &[&[u32]], n: usize, salt: u32) -> Vec<f32> {
    let wide = |x: T| bytemuck::cast::<[u8; 4], f32>(widened(bytemuck::bytes_of(&x)));
    let of_machine = |members: &[u32]| {
        let all: Vec<Vec<T>> = members.iter().map(|position| values(*position, n, salt)).collect();
        (0..n).map(|i| f32::sum_of(&all.iter().map(|v| wide(v[i])).collect::<Vec<_>>())).collect::<Vec<f32>>()
    };
    let all: Vec<Vec<f32>> = machines.iter().map(|members| of_machine(members)).collect();
    (0..n).map(|i| f32::sum_of(&all.iter().map(|v| v[i]).collect::<Vec<_>>())).collect()
}

/// The bits of an f32, from those of an f32 or of a bf16.
fn widened(bytes: &[u8]) -> [u8; 4] {
    std::array::from_fn(|i| (i + bytes.len()).checked_sub(4).map_or(0, |i| bytes[i]))
}

#[test]
fn sum_is_computed_within_each_machine_first_and_rounded_once() {
    // Machine 1 has the first position, and positions alternate.
    let world = World::new(ID, 6, vec![vec![3, 0, 4, 1, 5, 2]]).unwrap();
    let machines: [&[u32]; 2] = [&[0, 2, 4], &[1, 3, 5]];
    let n = 10_007;

    with_machines(&world, &[0, 0, 0, 1, 1, 1], &|rank| {
        let position = rank.group(0).position();
        let mut full = values::<f32>(position, n, 1);
        rank.group(0).all_reduce(&mut full).unwrap();
        let mut half = values::<bf16>(position, n, 2);
        rank.group(0).all_reduce(&mut half).unwrap();

        assert_same(&full, &sum_over::<f32>(&machines, n, 1), "f32");
        let rounded: Vec<bf16> = sum_over::<bf16>(&machines, n, 2).into_iter().map(bf16::from_f32).collect();
        assert_same(&half, &rounded, "bf16");
    });
}

#[test]
fn every_kind_works_for_every_placement_of_ranks() {
    // Integers, because their sums do not depend on the order.
    let groups = vec![vec![0, 1, 2, 3], vec![0, 2], vec![3, 1], vec![0, 1], vec![1, 2, 3]];
    let world = World::new(ID, 4, groups).unwrap();

    for machine_of in [[0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]] {
        with_machines(&world, &machine_of, &|rank| {
            for (index, group) in &mut rank.groups {
                for n in [3, 5000 + index, 70_001] {
                    check_every_kind::<i32>(&mut **group, n, 4, *index as u32);
                }
            }
        });
    }
}

fn start_sum(rank: &mut Rank, group: usize, n: usize) -> (RawBuffer, phalanx_device::Ticket) {
    let buffer = rank.memory.alloc(4 * n);
    let operand = Operand::in_place(buffer, phalanx_device::ElementType::I32, n);
    let operation = Operation { kind: OperationKind::AllReduce, sequence: 3, unit: 1 };
    // SAFETY: the memory lives as long as the rank, and is not touched before the operation is finished.
    let ticket = unsafe {
        std::slice::from_raw_parts_mut(buffer.start().cast::<i32>(), n).fill(1 + rank.rank as i32);
        rank.group(group).start(&operation, &[operand])
    };
    (buffer, ticket.unwrap())
}

#[test]
fn sums_of_two_groups_may_be_awaited_in_opposite_orders() {
    let world = World::new(ID, 4, vec![vec![0, 1, 2, 3], vec![3, 2, 1, 0]]).unwrap();
    let n = 20_000;

    with_machines(&world, &[0, 0, 1, 1], &|rank| {
        for _ in 0..10 {
            let mut started = [0, 1].map(|group| Some(start_sum(rank, group, n)));
            let order = if rank.rank % 2 == 0 { [0, 1] } else { [1, 0] };
            for group in order {
                let (buffer, ticket) = started[group].take().unwrap();
                rank.group(group).finish(ticket).unwrap();
                // SAFETY: the operation is finished.
                let values = unsafe { std::slice::from_raw_parts(buffer.start().cast::<i32>(), n) };
                assert!(values.iter().all(|x| *x == 10), "group {group}");
            }
        }
    });
}

#[test]
fn mismatch_between_machines_names_both_operations() {
    let world = World::of_one_group(ID, 4).unwrap();
    let n = 20_000;

    with_machines(&world, &[0, 0, 1, 1], &|rank| {
        let error = match rank.rank {
            0 | 1 => rank.group(0).all_reduce(&mut vec![1.0f32; n]).unwrap_err(),
            _ => rank.group(0).shift(&vec![1.0f32; n], &mut vec![1.0f32; n], 1).unwrap_err(),
        };

        let text = error.to_string();
        assert!(text.contains("all_reduce of 20000") && text.contains("shift by 1 of 20000"), "{text}");
    });
}

#[test]
fn abort_on_one_machine_reaches_the_others() {
    let world = World::new(ID, 4, vec![vec![0, 1, 2, 3], vec![0, 1]]).unwrap();

    with_machines(&world, &[0, 0, 1, 1], &|rank| {
        if rank.rank == 0 {
            // The barrier makes sure that all ranks have joined before the abort.
            rank.group(0).barrier().unwrap();
            // Group 1 exists on this machine only.
            rank.group(1).abort("node lost");
            rank.group(0).barrier().unwrap_err();
            return;
        }
        let met = rank.group(0).barrier();
        let error = met.and_then(|()| rank.group(0).all_reduce(&mut vec![1.0f32; 20_000])).unwrap_err();

        assert_eq!(error, CollectiveError::aborted("node lost"));
    });
}
