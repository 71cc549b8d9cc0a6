#![allow(unsafe_code)] // Lessons are lent memory.

use super::*;
use crate::train::links::STAGING_BYTES;
use phalanx_collective::shm::control::Control;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_cpu::scratch_bytes;
use phalanx_device::Collective;
use phalanx_device::world::{World, WorldId};
use phalanx_strategies::compile::{Parallel, StepSpec, compile_step};
use phalanx_strategies::mesh::{Mesh, Place as Seat};
use phalanx_strategies::model::{BatchShape, Head, HfConfig, ModelConfig};
use phalanx_strategies::optimizer::{AdamW, OptimizerSpec};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use serde_json::json;
use std::sync::Arc;

const MESH: Mesh = Mesh { dp_shard: 2, ..Mesh::ONE };

/// The step of a rank of a mesh that trains a model of 800,000 parameters.
pub(in crate::rank) fn compiled(mesh: Mesh, rank: usize) -> Compiled {
    let config = json!({
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 1001,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    });
    let parsed: HfConfig = serde_json::from_value(config).unwrap();
    let model = ModelConfig::try_from(&parsed).unwrap();
    let mut forward = model.forward(BatchShape { n_rows: 1, seq_len: 8 }, Head::Loss).unwrap();
    forward.place = Seat { mesh, rank };
    let spec = StepSpec {
        n_microbatches: 2,
        precision: Precision::F32,
        recompute: Recompute::None,
        lora: None,
        optimizer: OptimizerSpec::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() }),
        max_grad_norm: None,
        offload_optimizer: false,
        parallel: Parallel::default(),
    };
    compile_step(forward, &spec, scratch_bytes).unwrap()
}

/// The state of a rank: each element is told by its tensor and its index there, however that is cut.
fn state_of(compiled: &Compiled) -> Vec<(ValueId, usize, f32)> {
    let all = |tensor: Tensor| -> Vec<(ValueId, usize, f32)> {
        let first = 31 * tensor.name.bytes().map(usize::from).sum::<usize>();
        let element = |(index, at): (usize, Range<usize>)| {
            at.enumerate().map(move |(i, at)| (tensor.value, at, (first + index + i) as f32))
        };
        tensor.held.runs().flat_map(element).collect()
    };
    updated_state(compiled).into_iter().flat_map(all).collect()
}

pub(in crate::rank) fn fill(machine: &mut CpuMachine, compiled: &Compiled) {
    for (value, at, element) in state_of(compiled) {
        machine.write::<f32>(compiled, value)[at] = element;
    }
}

fn filled(compiled: &Compiled) -> CpuMachine {
    let mut machine = CpuMachine::new(&[compiled]).unwrap();
    fill(&mut machine, compiled);
    machine
}

pub(in crate::rank) fn assert_filled(machine: &CpuMachine, compiled: &Compiled) {
    for (value, at, element) in state_of(compiled) {
        assert_eq!(machine.read::<f32>(compiled, value)[at], element, "{value:?} {at}");
    }
}

fn trainer_state(step: u64) -> TrainerState {
    let scale = json!({"scale": 1.0, "good_steps": 0, "window": null, "min": 1.0});
    serde_json::from_value(json!({"step": step, "n_updates": step, "loss_scale": scale})).unwrap()
}

/// What each thread of a member holds: if it panics, no other waits for it.
#[derive(Clone)]
struct EndsWorld(Arc<Control>);

impl Drop for EndsWorld {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort("a member has panicked");
        }
    }
}

/// The links of each of four members, of whom the last has one with each of the others.
fn links() -> ([Links; 4], EndsWorld) {
    let id = WorldId { job: 1, generation: 2, incarnation: 3 };
    let world = World::new(id, 4, vec![vec![0, 3], vec![1, 3], vec![2, 3]]).unwrap();
    let world = ShmWorld::create(&world, &[0; 4], STAGING_BYTES).unwrap();
    let links = [0, 1, 2, 3].map(|me| {
        let rank = world.join(me).unwrap();
        let groups = (0..3).filter(|group| me == 3 || me == *group);
        let link = |group: u32| {
            let link: Box<dyn Collective> = Box::new(rank.communicator(group as usize).unwrap());
            (if me == 3 { group } else { 3 }, link)
        };
        Links::new(groups.map(link).collect())
    });
    (links, EndsWorld(world.control().clone()))
}

fn n_elements(places: &[Place]) -> usize {
    places.iter().map(|(_, run)| run.len()).sum()
}

/// Member 0 holds two shards that 3 lacks, which asks for the later one first.
#[test]
fn what_one_member_teaches_another_of_several_shards_passes_in_the_order_in_which_it_was_asked_for() {
    let shards @ [first, second] = [0, 1].map(|rank| Shard::of(&MESH, rank));
    assert!(first < second);
    let compiled = [0, 1].map(|rank| compiled(MESH, rank));
    let ([mut links_0, _, _, mut links_3], ends) = links();

    std::thread::scope(|scope| {
        let _ends = ends.clone();
        scope.spawn(|| {
            let _ends = ends.clone();
            let held = [0, 1].map(|i| filled(&compiled[i]));
            let holdings = [0, 1].map(|i| Holding { compiled: &compiled[i], machine: &held[i] });
            let mut healing = Healing::default();
            shards.iter().zip(holdings).for_each(|(shard, held)| healing.holds(*shard, held, trainer_state(7)));
            let asked = [1, 0].map(|i| healing.answer(&mut links_0, 3, shards[i]).unwrap().runs(&holdings[i]));
            // SAFETY: what is held outlives the lesson, and nobody writes it.
            let mut lessons = [unsafe { links_0.lesson(3, true, asked.concat()) }];
            while !lessons[0].is_over() {
                links_0.teach(&mut lessons, || ()).1.unwrap();
            }
        });

        let mut rooms = [0, 1].map(|i| CpuMachine::new(&[&compiled[i]]).unwrap());
        let mut healing = Healing::default();
        for (i, machine) in rooms.iter_mut().enumerate() {
            healing.lacks(shards[i], Wanting { compiled: &compiled[i], machine });
        }
        [1, 0].into_iter().for_each(|i| healing.ask(&mut links_3, &[0], shards[i]).unwrap());
        let (runs, state) = healing.lessons().unwrap();
        assert_eq!((runs.len(), state), (1, Some(trainer_state(7))));
        // SAFETY: the rooms outlive the lesson, and are looked at when it is over.
        let lesson = |(from, runs)| unsafe { links_3.lesson(from, false, runs) };
        let mut lessons: Vec<_> = runs.into_iter().map(lesson).collect();
        while !lessons[0].is_over() {
            links_3.learn(&mut lessons).unwrap();
        }
        rooms.iter().zip(&compiled).for_each(|(room, compiled)| assert_filled(room, compiled));
    });
}

/// Member 0 has a shard in the memory of an old seat, takes it along to a new one, and teaches 3 from there.
#[test]
fn what_is_taught_lies_in_the_seat_of_the_world_that_trains_wherever_it_lay_before() {
    let meshes = [Mesh { dp_replicate: 2, tp: 2, ..MESH }, Mesh { tp: 2, ..MESH }];
    let [before, now] = meshes.map(|mesh| compiled(mesh, 1));
    let [shard, same] = meshes.map(|mesh| Shard::of(&mesh, 1));
    let values = |compiled| updated_state(compiled).iter().map(|tensor| tensor.value).collect::<Vec<_>>();
    assert!(shard == same && values(&before) != values(&now), "it lies elsewhere");
    let ([mut links_0, _, _, mut links_3], ends) = links();

    std::thread::scope(|scope| {
        let _ends = ends.clone();
        scope.spawn(|| {
            let _ends = ends.clone();
            let (held, mut room) = (filled(&before), CpuMachine::new(&[&now]).unwrap());
            let mut healing = Healing::default();
            healing.lacks(shard, Wanting { compiled: &now, machine: &mut room });
            healing.holds(shard, Holding { compiled: &before, machine: &held }, trainer_state(7));
            healing.find(shard, shard);
            let promised = healing.promise(&mut links_0, 3, shard).unwrap();
            healing.carry_out(&mut links_0).unwrap();
            let runs = promised.runs(&Holding { compiled: &now, machine: &room });
            // SAFETY: the room outlives the lesson, and nobody writes it.
            let mut lessons = [unsafe { links_0.lesson(3, true, runs) }];
            while !lessons[0].is_over() {
                links_0.teach(&mut lessons, || ()).1.unwrap();
            }
        });

        let mut room = CpuMachine::new(&[&now]).unwrap();
        let mut healing = Healing::default();
        healing.lacks(shard, Wanting { compiled: &now, machine: &mut room });
        healing.ask(&mut links_3, &[0], shard).unwrap();
        let (runs, _) = healing.lessons().unwrap();
        // SAFETY: the room outlives the lesson, and is looked at when it is over.
        let lesson = |(from, runs)| unsafe { links_3.lesson(from, false, runs) };
        let mut lessons: Vec<_> = runs.into_iter().map(lesson).collect();
        while !lessons[0].is_over() {
            links_3.learn(&mut lessons).unwrap();
        }
        assert_filled(&room, &now);
    });
}

/// Members 0, 1 and 2 hold what 3 lacks; 3 holds what 0 lacks.
#[test]
fn a_member_gets_as_much_from_each_of_three_peers_and_gives_to_one_of_them_meanwhile() {
    let [shard, other] = [0, 1].map(|rank| Shard::of(&MESH, rank));
    let [compiled, other_compiled] = [0, 1].map(|rank| compiled(MESH, rank));
    let ([mut links_0, mut links_1, mut links_2, mut links_3], ends) = links();

    let gives = |links: &mut Links, machine: &CpuMachine, room: Option<&mut CpuMachine>| {
        let _ends = ends.clone();
        let mut healing = Healing::default();
        healing.holds(shard, Holding { compiled: &compiled, machine }, trainer_state(7));
        if let Some(machine) = room {
            healing.lacks(other, Wanting { compiled: &other_compiled, machine });
            healing.ask(links, &[3], other).unwrap();
        }
        let asked = healing.answer(links, 3, shard).unwrap();
        healing.gives(3, asked);
        let n = n_elements(&healing.gives[0].2);
        healing.carry_out(links).unwrap();
        n
    };

    let gave = std::thread::scope(|scope| {
        let _ends = ends.clone();
        let first = scope.spawn(|| {
            let _ends = ends.clone();
            let mut room = CpuMachine::new(&[&other_compiled]).unwrap();
            let n = gives(&mut links_0, &filled(&compiled), Some(&mut room));
            assert_filled(&room, &other_compiled);
            n
        });
        let second = scope.spawn(|| gives(&mut links_1, &filled(&compiled), None));
        let third = scope.spawn(|| gives(&mut links_2, &filled(&compiled), None));

        let (held, mut room) = (filled(&other_compiled), CpuMachine::new(&[&compiled]).unwrap());
        let mut healing = Healing::default();
        healing.holds(other, Holding { compiled: &other_compiled, machine: &held }, trainer_state(7));
        healing.lacks(shard, Wanting { compiled: &compiled, machine: &mut room });
        let asked = healing.answer(&mut links_3, 0, other).unwrap();
        healing.gives(0, asked);
        healing.ask(&mut links_3, &[0, 1, 2], shard).unwrap();
        assert_eq!(healing.carry_out(&mut links_3).unwrap(), Some(trainer_state(7)));
        assert_filled(&room, &compiled);
        [first, second, third].map(|member| member.join().unwrap())
    });

    let n = state_of(&compiled).len();
    assert!(n > 1_000_000, "{n} elements pass in many operations");
    assert!(gave.iter().all(|part| part.abs_diff(n / 3) <= 1) && gave.iter().sum::<usize>() == n, "{gave:?} of {n}");
}

#[test]
fn what_nobody_has_is_told_and_others_get_what_they_were_promised() {
    let [shard, other] = [0, 1].map(|rank| Shard::of(&MESH, rank));
    let [compiled, other_compiled] = [0, 1].map(|rank| compiled(MESH, rank));
    let ([mut links_0, _, _, mut links_3], ends) = links();

    std::thread::scope(|scope| {
        let _ends = ends.clone();
        let gives = scope.spawn(|| {
            let _ends = ends.clone();
            let mut healing = Healing::default();
            let machine = filled(&compiled);
            healing.holds(shard, Holding { compiled: &compiled, machine: &machine }, trainer_state(7));
            let asked = healing.answer(&mut links_0, 3, shard).unwrap();
            healing.gives(3, asked);
            healing.carry_out(&mut links_0)
        });
        // The other half of the same tensors.
        let mut room = CpuMachine::new(&[&other_compiled]).unwrap();
        let mut healing = Healing::default();
        healing.lacks(other, Wanting { compiled: &other_compiled, machine: &mut room });
        healing.ask(&mut links_3, &[0], other).unwrap();
        let lacks = healing.carry_out(&mut links_3);

        assert!(matches!(lacks, Err(JobError::Unusable(text)) if text.contains("are in no memory that was asked")));
        assert!(gives.join().unwrap().is_ok());
    });
}

#[test]
fn a_member_takes_what_it_holds_itself_however_that_is_cut() {
    let halves = [0, 1].map(|rank| compiled(MESH, rank));
    let held = halves.each_ref().map(filled);
    let whole = compiled(Mesh::ONE, 0);
    let mut room = CpuMachine::new(&[&whole]).unwrap();
    let mut healing = Healing::default();
    healing.lacks(Shard::WHOLE, Wanting { compiled: &whole, machine: &mut room });
    for (rank, (compiled, machine)) in halves.iter().zip(&held).enumerate() {
        healing.holds(Shard::of(&MESH, rank), Holding { compiled, machine }, trainer_state(3));
        healing.find(Shard::of(&MESH, rank), Shard::WHOLE);
    }

    let state = healing.carry_out(&mut Links::default()).unwrap();

    assert_eq!(state, Some(trainer_state(3)));
    assert_filled(&room, &whole);
}
