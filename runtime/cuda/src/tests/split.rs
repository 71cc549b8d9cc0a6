//! Split weights, as the host and as products see them.

use super::BorrowedGpu;
use super::step::Trainer;
use phalanx_device::Machine;
use phalanx_device::groups::Groups;
use phalanx_device::span::Span;
use phalanx_device::staging::Staging;
use phalanx_strategies::program::{DType, Kind, Op, ValueId, op};

/// A split weight, and the view of its bf16 numbers.
fn pairs(trainer: &Trainer) -> Vec<(ValueId, ValueId)> {
    let values = trainer.c.program.values.iter().enumerate();
    let views = values.filter_map(|(i, value)| match value.kind {
        Kind::View(of) => Some((of, ValueId(i as u32))),
        _ => None,
    });
    views.collect()
}

/// Numbers with all kinds of rests, ties among them.
fn numbers(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 0x3c00_0000 + i * 0x4321 + [0, 0x7fff, 0x8000, 0xffff][i as usize % 4]).collect()
}

#[test]
fn step_of_split_weights_has_the_bits_of_a_step_that_converts_them() {
    let gpu = BorrowedGpu::take();
    let step = |split_weights| {
        let (mut trainer, mut groups) = (Trainer::in_bf16(&gpu.0, split_weights), Groups::none());
        let is_cast_of_weight =
            |op: &Op, read: ValueId| *op == Op::Cast(op::Cast) && trainer.c.program.param_of(read).is_some();
        let n_casts = trainer.c.program.instrs.iter().filter(|i| is_cast_of_weight(&i.op, i.reads[0])).count();
        // No first weight is a tie.
        assert!(trainer.weights().concat().iter().all(|bits| bits & 0xffff != 0x8000));
        let loss = trainer.compute(&mut groups, 1, None).unwrap();
        trainer.update(&mut groups).unwrap();
        (n_casts, pairs(&trainer).len(), loss.to_bits(), trainer.weights())
    };

    let (split, converted) = (step(true), step(false));

    // Four matrices of each block, and the head, which is also the table. Each is converted once, since they are small.
    assert_eq!(((split.0, split.1), (converted.0, converted.1)), ((0, 9), (9, 0)));
    assert_eq!((split.2, split.3), (converted.2, converted.3));
}

#[test]
fn host_sees_the_f32_numbers_of_split_weights_and_products_their_bf16_numbers() {
    let gpu = BorrowedGpu::take();
    let mut trainer = Trainer::in_bf16(&gpu.0, true);
    let pairs = pairs(&trainer);
    let machine: &mut dyn Machine = &mut trainer.machine;
    for (weight, view) in pairs {
        let numbers = numbers(trainer.c.program.value(weight).n_elements());
        machine.write(&trainer.c, weight, 0, &numbers);
        let part = [0x3f80_8000u32, 0x3f81_8000, 0x7fff_ffff];
        machine.write(&trainer.c, weight, 5, &part);

        let found: Vec<u32> = machine.read(&trainer.c, weight);
        let rounded: Vec<u16> = machine.read(&trainer.c, view);

        assert_eq!(trainer.c.program.value(view).dtype, DType::Bf16);
        assert_eq!((&found[..5], &found[8..]), (&numbers[..5], &numbers[8..]));
        assert_eq!(
            (&found[5..8], &rounded[5..8]),
            (&[part[0], part[1], 0x7fc0_0000][..], &[0x3f81, 0x3f82, 0x7fc0][..])
        );
        assert!(
            std::iter::zip(&numbers[8..], &rounded[8..]).all(|(bits, high)| (bits + 0x8000) >> 16 == u32::from(*high))
        );
    }
}

#[test]
fn copies_of_split_weights_through_slots_are_of_f32_numbers() {
    let gpu = BorrowedGpu::take();
    let mut trainer = Trainer::in_bf16(&gpu.0, true);
    let weights: Vec<ValueId> = trainer.c.program.params.iter().map(|param| param.value).collect();
    let machine: &mut dyn Machine = &mut trainer.machine;
    for weight in weights {
        let n = trainer.c.program.value(weight).n_elements();
        let numbers = numbers(n);
        // From within the weight on, in two pieces.
        let span = machine.source(&trainer.c, weight, 3..n).span();
        let middle = span.bytes() / 8 * 4;
        let pieces: [Span; 2] = [span.slice(0..middle), span.slice(middle..span.bytes())];
        let mut staging = Staging::new(&pieces, 1, span.bytes()).unwrap();
        staging.bytes(0).unwrap().copy_from_slice(bytemuck::cast_slice(&numbers[3..]));

        // SAFETY: the machine outlives the copies, and nothing else runs.
        unsafe { staging.scatter(0, &pieces) }.unwrap();
        let sent: Vec<u32> = bytemuck::pod_collect_to_vec(staging.bytes(0).unwrap());
        let found: Vec<u32> = machine.read(&trainer.c, weight);
        staging.bytes(0).unwrap().fill(0);
        // SAFETY: as above.
        unsafe { staging.gather(0, &pieces) }.unwrap();
        let gathered: Vec<u32> = bytemuck::pod_collect_to_vec(staging.bytes(0).unwrap());

        assert_eq!((&sent[..], &found[3..], &gathered[..]), (&numbers[3..], &numbers[3..], &numbers[3..]));
    }
}
