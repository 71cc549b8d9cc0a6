//! Failures of the communicator that stages operands in host memory.

use super::{BorrowedGpu, ID};
use crate::staged::Staged;
use phalanx_collective::local::{LocalCollective, LocalWorld};
use phalanx_device::world::World;
use phalanx_device::{
    Collective, CollectiveError, ElementType, Operand, Operation, OperationKind, RawBuffer, SliceOperations, Space,
};

const SUM: Operation = Operation { kind: OperationKind::AllReduce, sequence: 0, unit: 1 };

/// The members of a group of two; the first one reaches a GPU.
fn pair(gpu: &BorrowedGpu) -> (Staged, LocalCollective) {
    let world = LocalWorld::new(World::of_one_group(ID, 2).unwrap());
    let member = |rank| world.communicator(0, rank).unwrap();
    (Staged::new(gpu.0.clone(), Box::new(member(0))), member(1))
}

#[test]
fn operand_of_another_device_aborts_the_group_and_names_both_devices() {
    let gpu = BorrowedGpu::take();
    let (mut staged, mut peer) = pair(&gpu);
    let elsewhere = RawBuffer::on_device(4096, 8, gpu.0.ordinal + 1);

    // SAFETY: the operand is refused.
    let refused = unsafe { staged.start(&SUM, &[Operand::in_place(elsewhere, ElementType::F32, 2)]) };

    let error = CollectiveError::WrongMemory {
        expected: Space::Device(gpu.0.ordinal),
        found: Space::Device(gpu.0.ordinal + 1),
    };
    assert_eq!(refused, Err(error.clone()));
    let aborted = CollectiveError::aborted(format!("position 0: {error}"));
    assert_eq!(peer.all_reduce(&mut [1.0f32]), Err(aborted));
}

#[test]
fn member_that_leaves_with_an_operation_in_flight_releases_its_peers() {
    let gpu = BorrowedGpu::take();
    let (mut staged, mut peer) = pair(&gpu);
    let memory = gpu.0.allocate(8).unwrap();
    let buffer = RawBuffer::on_device(memory.address as usize, 8, gpu.0.ordinal);

    // SAFETY: the memory outlives the communicator.
    let _ = unsafe { staged.start(&SUM, &[Operand::in_place(buffer, ElementType::F32, 2)]) }.unwrap();
    drop(staged);

    assert!(matches!(peer.barrier(), Err(CollectiveError::Aborted { .. })));
}

#[test]
fn result_is_in_place_for_what_the_compute_stream_runs_next() {
    let gpu = BorrowedGpu::take();
    let (mut staged, mut peer) = pair(&gpu);
    let memory = gpu.0.allocate(8).unwrap();
    let buffer = RawBuffer::on_device(memory.address as usize, 8, gpu.0.ordinal);
    // SAFETY: memory of this GPU that lives until the end.
    unsafe { gpu.0.write(memory.address, bytemuck::bytes_of(&[1.0f32, 2.0])) }.unwrap();

    std::thread::scope(|scope| {
        scope.spawn(|| peer.all_reduce(&mut [10.0f32, 20.0]).unwrap());
        // SAFETY: as above.
        let ticket = unsafe { staged.start(&SUM, &[Operand::in_place(buffer, ElementType::F32, 2)]) }.unwrap();
        staged.finish(ticket).unwrap();
    });

    let mut sum = [0.0f32; 2];
    // SAFETY: as above.
    unsafe { gpu.0.read(memory.address, bytemuck::bytes_of_mut(&mut sum)) }.unwrap();
    assert_eq!(sum, [11.0, 22.0]);
}

#[test]
fn operation_that_starts_before_results_have_arrived_uses_other_memory() {
    let gpu = BorrowedGpu::take();
    let (mut staged, mut peer) = pair(&gpu);
    let memory = [gpu.0.allocate(8).unwrap(), gpu.0.allocate(8).unwrap()];
    for m in &memory {
        // SAFETY: memory of this GPU that lives until the end.
        unsafe { gpu.0.write(m.address, bytemuck::bytes_of(&[1.0f32, 2.0])) }.unwrap();
    }

    std::thread::scope(|scope| {
        scope.spawn(|| (0..2).for_each(|_| peer.all_reduce(&mut [10.0f32, 20.0]).unwrap()));
        for m in &memory {
            let buffer = RawBuffer::on_device(m.address as usize, 8, gpu.0.ordinal);
            // SAFETY: as above.
            let ticket = unsafe { staged.start(&SUM, &[Operand::in_place(buffer, ElementType::F32, 2)]) }.unwrap();
            staged.finish(ticket).unwrap();
        }
    });

    for m in &memory {
        let mut sum = [0.0f32; 2];
        // SAFETY: as above.
        unsafe { gpu.0.read(m.address, bytemuck::bytes_of_mut(&mut sum)) }.unwrap();
        assert_eq!(sum, [11.0, 22.0]);
    }
}
