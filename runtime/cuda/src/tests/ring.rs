//! Copies of state beside programs, under several orders of streams.

use super::step::Trainer;
use super::{BorrowedGpu, hold_us, set};
use crate::gpu::Event;
use crate::ring::GpuMemory;
use phalanx_device::Machine;
use phalanx_device::groups::Groups;
use phalanx_device::span::{Span, chunks};
use phalanx_device::staging::Staging;
use phalanx_strategies::mesh::MeshRank;
use phalanx_strategies::program::{Column, Role};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const N_SEEDS: u64 = 8;
const N_STEPS: u64 = 4;

/// Bits of all weights, one after the other.
type Weights = Vec<u32>;

/// Settings of the software GPU, which all threads of this process share, as one test has them.
struct Settings(#[allow(dead_code)] MutexGuard<'static, ()>);

impl Settings {
    fn take() -> Settings {
        static ONE: Mutex<()> = Mutex::new(());
        Settings(ONE.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        set("SOFTGPU_COPY_US", "0");
        set("SOFTGPU_SEED", "0");
        set("SOFTGPU_HOLD_US", &hold_us());
    }
}

/// Gives the software GPU the time to run what follows in any order, until this thread waits.
fn hold_work_back() {
    set("SOFTGPU_HOLD_US", "50000");
}

fn set_seed(seed: u64) {
    set("SOFTGPU_SEED", &seed.to_string());
}

fn runs_of(trainer: &Trainer) -> Vec<Span> {
    let machine: &dyn Machine = &trainer.machine;
    let whole = |v| machine.source(&trainer.c, v, 0..trainer.c.program.value(v).n_elements()).span();
    trainer.c.program.params.iter().map(|param| whole(param.value)).collect()
}

/// The weights after each step of a run that nothing copies from.
fn undisturbed(gpu: &BorrowedGpu, graphs: bool) -> Vec<Weights> {
    let (mut trainer, mut groups) = (Trainer::new(&gpu.0, MeshRank::default(), graphs), Groups::none());
    let step = |step| {
        trainer.compute(&mut groups, step, None).unwrap();
        trainer.update(&mut groups).unwrap();
        trainer.weights().concat()
    };
    (1..=N_STEPS).map(step).collect()
}

fn words(bytes: &[u8]) -> Weights {
    bytemuck::pod_collect_to_vec(bytes)
}

/// A copy of all weights in two halves, each in a slot.
struct Copy {
    staging: Staging,
    chunks: Vec<Vec<Span>>,
}

impl Copy {
    /// The first half has begun; the second one is announced.
    fn begin(trainer: &Trainer) -> Copy {
        let runs = runs_of(trainer);
        let bytes: usize = runs.iter().map(Span::bytes).sum();
        let slot_bytes = (bytes / 2).next_multiple_of(4);
        let chunks = chunks(runs, slot_bytes);
        assert_eq!(chunks.len(), 2);
        let mut staging = Staging::new(chunks.iter().flatten(), 2, slot_bytes).unwrap();
        staging.hold(&chunks[0][0]);
        // SAFETY: the machine outlives the copy, or ends it.
        unsafe { staging.gather(0, &chunks[0]) }.unwrap();
        Copy { staging, chunks }
    }

    fn begin_rest(&mut self) {
        // SAFETY: as above.
        unsafe { self.staging.gather(1, &self.chunks[1]) }.unwrap();
        self.staging.let_go();
    }

    fn finish(&mut self) -> Weights {
        let bytes = |chunk: &Vec<Span>| chunk.iter().map(Span::bytes).sum::<usize>();
        let mut all = words(&self.staging.bytes(0).unwrap()[..bytes(&self.chunks[0])]);
        all.extend(words(&self.staging.bytes(1).unwrap()[..bytes(&self.chunks[1])]));
        all
    }
}

// STATE-FENCE-1, STATE-FENCE-2
#[test]
fn copy_beside_the_next_step_has_the_state_after_the_last_update_under_every_order() {
    let (_settings, gpu) = (Settings::take(), BorrowedGpu::take());
    let expected = [false, true].map(|graphs| undisturbed(&gpu, graphs));
    for seed in 0..N_SEEDS {
        set_seed(seed);
        let graphs = seed % 2 == 1;
        let expected = &expected[usize::from(graphs)];
        let (mut trainer, mut groups) = (Trainer::new(&gpu.0, MeshRank::default(), graphs), Groups::none());
        trainer.compute(&mut groups, 1, None).unwrap();
        trainer.update(&mut groups).unwrap();
        for step in 1..N_STEPS {
            let mut copy = Copy::begin(&trainer);
            copy.begin_rest();
            trainer.compute(&mut groups, step + 1, None).unwrap();
            // The update follows before the host looks at the copy.
            trainer.update(&mut groups).unwrap();

            assert!(copy.finish() == expected[step as usize - 1], "seed {seed}, step {step}, graphs {graphs}");
        }
        assert!(trainer.weights().concat() == expected[N_STEPS as usize - 1], "seed {seed}: an update differs");
    }
}

// STATE-FENCE-2
#[test]
fn step_computes_while_its_state_is_copied_and_only_its_update_waits() {
    let (_settings, gpu) = (Settings::take(), BorrowedGpu::take());
    let expected = undisturbed(&gpu, true);
    let (mut trainer, mut groups) = (Trainer::new(&gpu.0, MeshRank::default(), true), Groups::none());
    trainer.compute(&mut groups, 1, None).unwrap();
    trainer.update(&mut groups).unwrap();

    // From here on no copy to pinned memory is ever done.
    set("SOFTGPU_COPY_US", "1000000000000");
    let mut copy = Copy::begin(&trainer);
    copy.begin_rest();
    let copies = Event::for_order(&gpu.0).unwrap();
    // Waits until the step has computed, and reads its loss.
    let loss = trainer.compute(&mut groups, 2, None).unwrap();
    trainer.update(&mut groups).unwrap();
    copies.record(gpu.0.compute).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let has_updated = copies.is_reached().unwrap();
    set("SOFTGPU_COPY_US", "0");

    assert!(loss.is_finite());
    assert!(!has_updated, "the update does not wait for the copy");
    assert!(copy.finish() == expected[0], "the copy has the state before the update");
    assert!(trainer.weights().concat() == expected[1]);
}

// STATE-FENCE-2
#[test]
fn update_waits_on_the_host_while_copies_are_announced() {
    let (_settings, gpu) = (Settings::take(), BorrowedGpu::take());
    let expected = undisturbed(&gpu, false);
    let (mut trainer, mut groups) = (Trainer::new(&gpu.0, MeshRank::default(), false), Groups::none());
    trainer.compute(&mut groups, 1, None).unwrap();
    trainer.update(&mut groups).unwrap();
    let mut copy = Copy::begin(&trainer);
    trainer.compute(&mut groups, 2, None).unwrap();

    let copied = std::thread::scope(|scope| {
        let update = scope.spawn(|| {
            trainer.update(&mut groups).unwrap();
            trainer.weights().concat()
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!update.is_finished(), "the update does not wait");
        copy.begin_rest();
        let copied = copy.finish();
        assert!(update.join().unwrap() == expected[1]);
        copied
    });

    assert!(copied == expected[0]);
}

// STATE-FENCE-3
#[test]
fn machine_that_is_dropped_ends_the_copies_of_its_state_and_frees_it_after_them() {
    let (_settings, gpu) = (Settings::take(), BorrowedGpu::take());
    for seed in 0..N_SEEDS {
        set_seed(seed);
        set("SOFTGPU_COPY_US", "2000");
        let memory = Arc::new(GpuMemory::new(gpu.0.clone()));
        let trainer = Trainer::in_memory(&memory, MeshRank::default(), false);
        let address = runs_of(&trainer)[0].buffer().address() as u64;
        let Copy { mut staging, chunks } = Copy::begin(&trainer);

        let refused = std::thread::scope(|scope| {
            let dropped = scope.spawn(|| drop(trainer));
            let give_up = Instant::now() + Duration::from_secs(20);
            let refused = loop {
                // SAFETY: the machine refuses it when its memory is about to be freed.
                match unsafe { staging.gather(1, &chunks[1]) } {
                    Err(error) => break error,
                    Ok(()) => assert!(Instant::now() < give_up, "copies of a dropped machine begin"),
                }
            };
            // The software GPU ends the process if memory is freed while the first copy still reads it.
            staging.let_go();
            dropped.join().unwrap();
            refused
        });

        assert_eq!(refused.reason, "the state is about to be freed");
        assert!(memory.fences.around(address).is_none(), "the state has no machine");
    }
}

/// Begins to copy these weights to the machine, through three slots in turn.
fn scatter(trainer: &Trainer, weights: &Weights, slot_bytes: usize) -> Staging {
    let chunks = chunks(runs_of(trainer), slot_bytes);
    let mut staging = Staging::new(chunks.iter().flatten(), 3, slot_bytes).unwrap();
    let mut from: &[u8] = bytemuck::cast_slice(weights);
    for (i, chunk) in chunks.iter().enumerate() {
        let n: usize = chunk.iter().map(Span::bytes).sum();
        staging.bytes(i % 3).unwrap()[..n].copy_from_slice(&from[..n]);
        from = &from[n..];
        // SAFETY: the machine outlives the copies.
        unsafe { staging.scatter(i % 3, chunk) }.unwrap();
    }
    staging
}

/// Replaces all weights without a ring.
fn put(trainer: &mut Trainer, mut weights: &[u32]) {
    let Trainer { c, machine, .. } = trainer;
    for param in &c.program.params {
        let (these, others) = weights.split_at(c.program.value(param.value).n_elements());
        machine.put(c, param.value, 0, bytemuck::cast_slice(these));
        weights = others;
    }
}

// STATE-FENCE-1, STATE-FENCE-2
#[test]
fn state_from_the_host_waits_for_earlier_copies_and_later_copies_have_it_under_every_order() {
    let (_settings, gpu) = (Settings::take(), BorrowedGpu::take());
    let mut trainer = Trainer::new(&gpu.0, MeshRank::default(), false);
    hold_work_back();
    for seed in 0..N_SEEDS {
        set_seed(seed);
        for through_ring in [false, true] {
            let before = trainer.weights().concat();
            let after: Weights = before.iter().map(|bits| bits ^ 1).collect();
            let mut earlier = Copy::begin(&trainer);
            earlier.begin_rest();

            let ring = through_ring.then(|| scatter(&trainer, &after, size_of_val(&after[..]) / 3 + 4));
            if !through_ring {
                put(&mut trainer, &after);
            }

            let mut later = Copy::begin(&trainer);
            later.begin_rest();
            assert!(later.finish() == after, "seed {seed}, through a ring: {through_ring}");
            assert!(earlier.finish() == before, "seed {seed}, through a ring: {through_ring}");
            drop(ring);
        }
    }
}

// STATE-FENCE-1
#[test]
fn copy_from_a_new_machine_has_its_zeros_under_every_order() {
    let (_settings, gpu) = (Settings::take(), BorrowedGpu::take());
    hold_work_back();
    let memory = Arc::new(GpuMemory::new(gpu.0.clone()));
    for seed in 0..N_SEEDS {
        set_seed(seed);
        let trainer = Trainer::zeroed(&memory, MeshRank::default(), false);

        let mut copy = Copy::begin(&trainer);
        copy.begin_rest();

        assert!(copy.finish().iter().all(|bits| *bits == 0), "seed {seed}");
    }
}

#[test]
fn copy_of_what_is_no_state_comes_after_all_earlier_work_under_every_order() {
    let (_settings, gpu) = (Settings::take(), BorrowedGpu::take());
    hold_work_back();
    let mut trainer = Trainer::new(&gpu.0, MeshRank::default(), false);
    let Trainer { c, machine, .. } = &mut trainer;
    let ids = c.program.bound(Role::Column(Column::Ids)).next().unwrap();
    let span = (machine as &dyn Machine).source(c, ids, 0..c.program.value(ids).n_elements()).span();
    let mut staging = Staging::new([&span], 1, span.bytes()).unwrap();
    for seed in 0..N_SEEDS {
        set_seed(seed);
        let bytes = vec![seed as u8; span.bytes()];

        machine.put(c, ids, 0, &bytes);
        // SAFETY: the machine outlives the copy.
        unsafe { staging.gather(0, std::slice::from_ref(&span)) }.unwrap();

        assert!(staging.bytes(0).unwrap()[..] == bytes, "seed {seed}");
    }
}

#[test]
fn ring_that_is_dropped_waits_for_its_copies_before_others_get_its_memory() {
    let (_settings, gpu) = (Settings::take(), BorrowedGpu::take());
    let trainer = Trainer::new(&gpu.0, MeshRank::default(), false);
    set("SOFTGPU_COPY_US", "2000");
    let mut copy = Copy::begin(&trainer);
    copy.begin_rest();
    let chunks = copy.chunks.clone();
    let slot_bytes = copy.staging.bytes(0).unwrap().len();
    // The second half is under way.
    let memory = copy.staging.bytes(0).unwrap().as_ptr();
    drop(copy);

    let mut next = Staging::new(chunks.iter().flatten(), 2, slot_bytes).unwrap();
    assert_eq!(next.bytes(0).unwrap().as_ptr(), memory, "pinned memory is used again");
    next.bytes(1).unwrap().fill(7);
    trainer.weights();
    std::thread::sleep(Duration::from_millis(20));

    assert!(next.bytes(1).unwrap().iter().all(|byte| *byte == 7), "a copy of the dropped ring came later");
}

#[test]
fn state_from_the_host_is_in_place_for_the_next_step_under_every_order() {
    let (_settings, gpu) = (Settings::take(), BorrowedGpu::take());
    let mut groups = Groups::none();
    let mut other = Trainer::new(&gpu.0, MeshRank::default(), false);
    for step in 1..=2 {
        other.compute(&mut groups, step, None).unwrap();
        other.update(&mut groups).unwrap();
    }
    let weights = other.weights().concat();
    let expected = other.compute(&mut groups, 3, None).unwrap();
    for seed in 0..N_SEEDS {
        set_seed(seed);
        let mut trainer = Trainer::new(&gpu.0, MeshRank::default(), false);
        // Work on the state that the copies must not overtake.
        trainer.compute(&mut groups, 1, None).unwrap();
        trainer.update(&mut groups).unwrap();
        let ring = scatter(&trainer, &weights, 4096);
        let loss = trainer.compute(&mut groups, 3, None).unwrap();

        assert_eq!(loss.to_bits(), expected.to_bits(), "seed {seed}");
        drop(ring);
        assert!(trainer.weights().concat() == weights, "seed {seed}");
    }
}
