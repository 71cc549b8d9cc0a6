//! Every implementation fails in the same way: with the names of ranks, and at every rank.
#![allow(unsafe_code)] // Asynchronous operations take raw memory.

use std::sync::Mutex;

use super::{ID, Rank, with_failures};
use phalanx_device::communicator::Behind;
use phalanx_device::world::World;
use phalanx_device::{
    CollectiveError, ElementType, Operand, Operation, OperationKind, RawBuffer, SliceOperations, Stream,
};

/// The error of each rank of a world, for one implementation after the other.
fn errors_of(
    n_ranks: u32,
    body: &(dyn Fn(&mut Rank) -> Result<(), CollectiveError> + Sync),
) -> Vec<Vec<CollectiveError>> {
    let world = World::of_one_group(ID, n_ranks).unwrap();
    let of_implementation = |run: super::Run| {
        let errors = Mutex::new(vec![None; n_ranks as usize]);
        run(&world, &|rank| {
            let error = body(rank).unwrap_err();
            errors.lock().unwrap()[rank.rank as usize] = Some(error);
        });
        errors.into_inner().unwrap().into_iter().map(Option::unwrap).collect()
    };
    with_failures().map(|(_, run)| of_implementation(run)).collect()
}

fn assert_all_name(errors: &[Vec<CollectiveError>], sides: [&str; 2]) {
    for error in errors.iter().flatten() {
        let text = error.to_string();
        assert!(sides.iter().all(|side| text.contains(side)), "{text}");
    }
}

#[test]
fn mismatched_kinds_fail_every_rank_with_both_descriptors() {
    let errors = errors_of(3, &|rank| {
        let mut values = vec![1.0f32; 10];
        if rank.rank == 1 { rank.group(0).broadcast(&mut values, 0) } else { rank.group(0).all_reduce(&mut values) }
    });

    assert_all_name(&errors, ["#0 all_reduce of 10", "rank 1 issued #0 broadcast from position 0 of 10"]);
}

#[test]
fn mismatched_sizes_fail_every_rank_with_both_descriptors() {
    let errors = errors_of(2, &|rank| {
        let n = 10 + rank.rank as usize;
        rank.group(0).all_reduce(&mut vec![1.0f32; n])
    });

    assert_all_name(&errors, ["rank 0 issued #0 all_reduce of 10", "rank 1 issued #0 all_reduce of 11"]);
}

#[test]
fn message_longer_than_expected_fails_both_sides_with_both_descriptors() {
    let errors = errors_of(2, &|rank| match rank.rank {
        0 => rank.group(0).send(&[1.0f32; 9000], 1),
        _ => rank.group(0).recv(&mut [1.0f32; 8000], 0),
    });

    assert_all_name(
        &errors,
        ["rank 0 issued #0 send to position 1 of 9000", "rank 1 issued #0 recv from position 0 of 8000"],
    );
}

#[test]
fn mismatched_types_fail_every_rank() {
    let errors = errors_of(2, &|rank| match rank.rank {
        0 => rank.group(0).all_reduce(&mut [1.0f32; 10]),
        _ => rank.group(0).all_reduce(&mut [1i32; 10]),
    });

    assert_all_name(&errors, ["rank 0 issued", "rank 1 issued"]);
}

#[test]
fn host_transports_refuse_device_memory_with_the_device_number() {
    let errors = errors_of(2, &|rank| {
        let (there, kind) = match rank.rank {
            0 => (RawBuffer::EMPTY, OperationKind::Send { to: 1 }),
            _ => (rank.memory.alloc(40), OperationKind::Recv { from: 0 }),
        };
        let here = if rank.rank == 0 { RawBuffer::on_device(4096, 40, 3) } else { RawBuffer::EMPTY };
        let operand = Operand { send: here, recv: there, dtype: ElementType::F32, n_elements: 10 };
        let operation = Operation { kind, sequence: 0, unit: 1 };
        // SAFETY: the receive buffer lives as long as the rank, and the send is refused.
        let ticket = unsafe { rank.group(0).start(&operation, &[operand]) }?;
        rank.group(0).finish(ticket)
    });

    let refused = CollectiveError::NotOnHost { kind: OperationKind::Send { to: 1 }, side: "send", device: 3 };
    for of_ranks in errors {
        assert_eq!(of_ranks[0], refused);
        assert!(
            of_ranks[1].to_string().contains(&refused.to_string()),
            "the peer's error has the reason: {}",
            of_ranks[1]
        );
    }
}

#[test]
fn wrong_buffer_length_at_one_rank_fails_every_rank() {
    let errors = errors_of(2, &|rank| match rank.rank {
        0 => rank.group(0).all_gather(&[1.0f32, 2.0], &mut [0.0; 3], 1),
        _ => rank.group(0).all_gather(&[1.0f32, 2.0], &mut [0.0; 4], 1),
    });

    for of_implementation in errors {
        assert!(matches!(of_implementation[0], CollectiveError::Length { .. }), "{}", of_implementation[0]);
        assert!(of_implementation[1].to_string().contains("rank 0: AllGather: expected"), "{}", of_implementation[1]);
    }
}

#[test]
fn message_to_oneself_or_to_an_unknown_position_is_refused() {
    for to in [0, 7] {
        let errors = errors_of(1, &|rank| rank.group(0).send(&[1.0f32], to));

        for error in errors.into_iter().flatten() {
            assert_eq!(error, CollectiveError::NoSuchPosition { named: to, position: 0, size: 1 });
        }
    }
}

#[test]
fn abort_releases_waiting_ranks_and_fails_later_calls() {
    let world = World::of_one_group(ID, 3).unwrap();

    let body = |rank: &mut Rank| {
        if rank.rank == 1 {
            rank.group(0).abort("node lost");
        }
        let expected = CollectiveError::aborted("node lost");
        assert_eq!(rank.group(0).barrier().unwrap_err(), expected);
        assert_eq!(rank.group(0).all_reduce(&mut [1.0f32]).unwrap_err(), expected);
    };
    with_failures().for_each(|(_, run)| run(&world, &body));
}

/// Two groups of all ranks.
fn twice(n_ranks: u32) -> World {
    World::new(ID, n_ranks, vec![(0..n_ranks).collect(); 2]).unwrap()
}

#[test]
fn aborted_group_releases_its_members_and_other_groups_continue() {
    let world = twice(4);

    let body = |rank: &mut Rank| {
        let expected = CollectiveError::aborted("this group only");
        if rank.rank == 1 {
            let control = rank.group(0).control();
            control.abort("this group only");
            control.abort("later");
        } else {
            // Too large for a copy with the announcement or a single operation: every implementation waits for rank 1.
            assert_eq!(rank.group(0).all_reduce(&mut vec![1.0f32; 100_000]).unwrap_err(), expected);
        }
        assert_eq!(rank.group(0).barrier().unwrap_err(), expected);
        let mut values = vec![rank.rank as f32; 100_000];
        rank.group(1).all_reduce(&mut values).unwrap();
        assert!(values.iter().all(|value| *value == 6.0));
    };
    with_failures().for_each(|(_, run)| run(&world, &body));
}

#[test]
fn behind_lists_members_that_have_not_started_an_operation() {
    let world = twice(4);

    let body = |rank: &mut Rank| {
        let control = rank.group(0).control();
        if rank.rank > 0 {
            rank.group(1).barrier().unwrap();
            rank.group(0).barrier().unwrap();
            return;
        }
        let barrier = Operation { kind: OperationKind::Barrier, sequence: 0, unit: 1 };
        // SAFETY: a barrier has no operands.
        let ticket = unsafe { rank.group(0).start(&barrier, &[]) }.unwrap();
        let behind = Behind { stream: Stream::Group, index: 0, positions: vec![1, 2, 3] };
        assert_eq!(control.behind(), [behind]);
        rank.group(1).barrier().unwrap();
        rank.group(0).finish(ticket).unwrap();
        assert_eq!(control.behind(), []);
    };
    with_failures().for_each(|(_, run)| run(&world, &body));
}

#[test]
fn behind_lists_a_sender_until_it_starts_its_send() {
    let world = twice(2);

    let body = |rank: &mut Rank| {
        let control = rank.group(0).control();
        if rank.rank > 0 {
            rank.group(1).barrier().unwrap();
            rank.group(0).send(&[1.0f32], 0).unwrap();
            return;
        }
        let recv = rank.memory.alloc(4);
        let operand = Operand { send: RawBuffer::EMPTY, recv, dtype: ElementType::F32, n_elements: 1 };
        let operation = Operation { kind: OperationKind::Recv { from: 1 }, sequence: 0, unit: 1 };
        // SAFETY: the memory lives as long as the rank.
        let ticket = unsafe { rank.group(0).start(&operation, &[operand]) }.unwrap();
        assert_eq!(control.behind(), [Behind { stream: Stream::RecvFrom(1), index: 0, positions: vec![1] }]);
        rank.group(1).barrier().unwrap();
        rank.group(0).finish(ticket).unwrap();
        assert_eq!(control.behind(), []);
    };
    super::IMPLEMENTATIONS.iter().for_each(|(_, run)| run(&world, &body));
}

#[test]
fn rank_that_panics_aborts_its_world() {
    let world = World::of_one_group(ID, 2).unwrap();

    for (_, run) in with_failures() {
        let received = Mutex::new(None);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            run(&world, &|rank| match rank.rank {
                0 => *received.lock().unwrap() = Some(rank.group(0).barrier().unwrap_err()),
                _ => panic!("on purpose"),
            });
        }));

        assert!(outcome.is_err());
        let expected = CollectiveError::aborted("rank 1 panicked");
        assert_eq!(received.into_inner().unwrap(), Some(expected));
    }
}
