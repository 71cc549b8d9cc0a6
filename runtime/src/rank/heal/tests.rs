//! Transfers of state between members, on devices whose memory the host can or cannot address.
#![allow(unsafe_code)] // Catch-up transfers use the memory of machines.

use super::*;
use crate::devices::{self, remote::both, software_gpu::SoftwareGpu};
use crate::train::links::{STAGED, STAGING_BYTES};
use crate::train::shadow::{self, Shadow};
use crate::train::weights::elements;
use phalanx_collective::shm::control::Control;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_device::groups::Groups;
use phalanx_device::staging::Staging;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{Backing, Collective, Device, Run};
use phalanx_strategies::compile::{Offload, Parallel, StepSpec, compile_step};
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, Head, HfConfig, ModelConfig};
use phalanx_strategies::optimizer::{AdamW, OptimizerSpec};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::passes::shadow::log;
use phalanx_strategies::program::{Hyper, Role};
use phalanx_strategies::target::Target;
use serde_json::json;
use std::sync::{Arc, mpsc};
use std::time::Duration;

const MESH: Mesh = Mesh { dp_shard: 2, ..Mesh::ONE };

/// The step of a rank of a mesh that trains a model of 800,000 parameters.
pub(in crate::rank) fn compiled(mesh: Mesh, rank: usize) -> Compiled {
    compiled_for(devices::host().target(), mesh, rank, adamw(), 128)
}

fn adamw() -> OptimizerSpec {
    OptimizerSpec::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() })
}

fn compiled_for(target: &dyn Target, mesh: Mesh, rank: usize, optimizer: OptimizerSpec, width: usize) -> Compiled {
    let config = json!({
        "model_type": "llama", "hidden_size": width, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 1001,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    });
    let parsed: HfConfig = serde_json::from_value(config).unwrap();
    let model = ModelConfig::try_from(&parsed).unwrap();
    let mut forward = model.forward(BatchShape { n_rows: 1, seq_len: 8 }, Head::Loss).unwrap();
    forward.mesh_rank = MeshRank { mesh, rank };
    let spec = StepSpec {
        n_microbatches: 2,
        precision: Precision::F32,
        recompute: Recompute::None,
        lora: None,
        optimizer,
        max_grad_norm: None,
        offload: Offload::default(),
        parallel: Parallel::default(),
    };
    compile_step(forward, &spec, target).unwrap()
}

/// The state of a rank: each element is identified by its tensor and its index there, for any sharding.
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

pub(in crate::rank) fn fill(machine: &mut dyn Machine, compiled: &Compiled) {
    let mut values: BTreeMap<ValueId, Vec<f32>> = BTreeMap::new();
    for (value, at, element) in state_of(compiled) {
        values.entry(value).or_insert_with(|| machine.read(compiled, value))[at] = element;
    }
    values.iter().for_each(|(value, elements)| machine.write(compiled, *value, 0, elements));
}

fn room(on: &dyn Device, compiled: &Compiled) -> Box<dyn Machine> {
    on.machine(&[compiled], &Backing::default()).unwrap()
}

fn filled(on: &dyn Device, compiled: &Compiled) -> Box<dyn Machine> {
    let mut machine = room(on, compiled);
    fill(&mut *machine, compiled);
    machine
}

pub(in crate::rank) fn assert_filled(machine: &dyn Machine, compiled: &Compiled) {
    let mut values: BTreeMap<ValueId, Vec<f32>> = BTreeMap::new();
    for (value, at, element) in state_of(compiled) {
        let elements = values.entry(value).or_insert_with(|| machine.read(compiled, value));
        assert_eq!(elements[at], element, "{value:?} {at}");
    }
}

fn trainer_state(step: u64) -> TrainerState {
    let scale = json!({"scale": 1.0, "good_steps": 0, "window": null, "min": 1.0});
    serde_json::from_value(json!({"step": step, "n_updates": step, "loss_scale": scale})).unwrap()
}

/// A guard for each member's thread: if the thread panics, the world is aborted and no other member waits.
#[derive(Clone)]
struct EndsWorld(Arc<Control>);

impl Drop for EndsWorld {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort("a member has panicked");
        }
    }
}

/// The links of four members; the last member has a link to each of the others.
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

fn n_elements(ranges: &[ElementRange]) -> usize {
    ranges.iter().map(|(_, run)| run.len()).sum()
}

/// Member 0 holds two shards that member 3 misses; member 3 asks for the later one first.
#[test]
fn catch_up_transfer_of_several_shards_follows_the_request_order() {
    both().iter().for_each(|on| check_request_order(&**on));
}

fn check_request_order(on: &dyn Device) {
    let shards @ [first, second] = [0, 1].map(|rank| Shard::of(&MESH, rank));
    assert!(first < second);
    let compiled = [0, 1].map(|rank| compiled(MESH, rank));
    let ([mut links_0, _, _, mut links_3], ends) = links();

    std::thread::scope(|scope| {
        let _ends = ends.clone();
        scope.spawn(|| {
            let _ends = ends.clone();
            let held = [0, 1].map(|i| filled(on, &compiled[i]));
            let held_states = [0, 1].map(|i| HeldState { compiled: &compiled[i], machine: &*held[i] });
            let mut healing = Healing::default();
            shards.iter().zip(held_states).for_each(|(shard, held)| healing.holds(*shard, held, trainer_state(7)));
            let asked = [1, 0].map(|i| healing.answer(&mut links_0, 3, shards[i]).unwrap().runs(&held_states[i]));
            // SAFETY: the held state outlives the transfer, and no thread writes it.
            let mut catch_up_transfers = [unsafe { links_0.catch_up_transfer(3, true, asked.concat()) }];
            while !catch_up_transfers[0].is_over() {
                links_0.send_pages(&mut catch_up_transfers, || ()).1.unwrap();
            }
        });

        let mut rooms = [0, 1].map(|i| room(on, &compiled[i]));
        let mut healing = Healing::default();
        for (i, machine) in rooms.iter_mut().enumerate() {
            healing.missing(shards[i], StateToFill { compiled: &compiled[i], machine: &mut **machine });
        }
        [1, 0].into_iter().for_each(|i| healing.ask(&mut links_3, &[0], shards[i]).unwrap());
        let (runs, state) = healing.catch_up_transfers().unwrap();
        assert_eq!((runs.len(), state), (1, Some(trainer_state(7))));
        // SAFETY: the destinations outlive the transfer, and are read after its end.
        let catch_up_transfer = |(from, runs)| unsafe { links_3.catch_up_transfer(from, false, runs) };
        let mut catch_up_transfers: Vec<_> = runs.into_iter().map(catch_up_transfer).collect();
        while !catch_up_transfers[0].is_over() {
            links_3.receive_catch_up(&mut catch_up_transfers).unwrap();
        }
        rooms.iter().zip(&compiled).for_each(|(room, compiled)| assert_filled(&**room, compiled));
    });
}

/// Member 0 holds a shard in the arena of an old rank, moves it to a new one, and sends it to member 3 from there.
#[test]
fn catch_up_transfer_reads_the_arena_of_the_training_world() {
    both().iter().for_each(|on| check_training_arena(&**on));
}

fn check_training_arena(on: &dyn Device) {
    let meshes = [Mesh { dp_replicate: 2, tp: 2, ..MESH }, Mesh { tp: 2, ..MESH }];
    let [before, now] = meshes.map(|mesh| compiled(mesh, 1));
    let [shard, same] = meshes.map(|mesh| Shard::of(&mesh, 1));
    let values = |compiled| updated_state(compiled).iter().map(|tensor| tensor.value).collect::<Vec<_>>();
    assert!(shard == same && values(&before) != values(&now), "the shard has another location");
    let ([mut links_0, _, _, mut links_3], ends) = links();

    std::thread::scope(|scope| {
        let _ends = ends.clone();
        scope.spawn(|| {
            let _ends = ends.clone();
            let (held, mut room) = (filled(on, &before), room(on, &now));
            let mut healing = Healing::default();
            healing.missing(shard, StateToFill { compiled: &now, machine: &mut *room });
            healing.holds(shard, HeldState { compiled: &before, machine: &*held }, trainer_state(7));
            healing.find(shard, shard);
            let promised = healing.answer_later(&mut links_0, 3, shard).unwrap();
            healing.carry_out(&mut links_0).unwrap();
            let runs = promised.runs(&HeldState { compiled: &now, machine: &*room });
            // SAFETY: the buffer outlives the transfer, and no thread writes it.
            let mut catch_up_transfers = [unsafe { links_0.catch_up_transfer(3, true, runs) }];
            while !catch_up_transfers[0].is_over() {
                links_0.send_pages(&mut catch_up_transfers, || ()).1.unwrap();
            }
        });

        let mut room = room(on, &now);
        let mut healing = Healing::default();
        healing.missing(shard, StateToFill { compiled: &now, machine: &mut *room });
        healing.ask(&mut links_3, &[0], shard).unwrap();
        let (runs, _) = healing.catch_up_transfers().unwrap();
        // SAFETY: the buffer outlives the transfer, and is read after its end.
        let catch_up_transfer = |(from, runs)| unsafe { links_3.catch_up_transfer(from, false, runs) };
        let mut catch_up_transfers: Vec<_> = runs.into_iter().map(catch_up_transfer).collect();
        while !catch_up_transfers[0].is_over() {
            links_3.receive_catch_up(&mut catch_up_transfers).unwrap();
        }
        assert_filled(&*room, &now);
    });
}

/// Members 0, 1 and 2 hold the state that member 3 misses; member 3 holds the state that member 0 misses.
#[test]
fn member_fetches_equal_shares_from_three_peers_and_sends_to_one_concurrently() {
    // Several operations for each peer.
    both().iter().for_each(|on| check_equal_shares([&**on; 4], 128));
}

#[test]
fn gpu_heals_from_three_gpus_under_every_order_of_their_work() {
    let gpu = SoftwareGpu::take();
    let gpus = [0; 4].map(|_| gpu.open());
    for seed in 0..8 {
        gpu.set("SOFTGPU_SEED", &seed.to_string());
        check_equal_shares(gpus.each_ref().map(|gpu| gpu as &dyn Device), 16);
    }
}

/// On a device for each member, with the state of a model of this width.
fn check_equal_shares(on: [&dyn Device; 4], width: usize) {
    let [shard, other] = [0, 1].map(|rank| Shard::of(&MESH, rank));
    let [compiled, other_compiled] = [0, 1].map(|rank| compiled_for(on[0].target(), MESH, rank, adamw(), width));
    let ([mut links_0, mut links_1, mut links_2, mut links_3], ends) = links();

    let gives = |links: &mut Links, machine: &dyn Machine, room: Option<&mut dyn Machine>| {
        let _ends = ends.clone();
        let mut healing = Healing::default();
        healing.holds(shard, HeldState { compiled: &compiled, machine }, trainer_state(7));
        if let Some(machine) = room {
            healing.missing(other, StateToFill { compiled: &other_compiled, machine });
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
            let mut room = room(on[0], &other_compiled);
            let n = gives(&mut links_0, &*filled(on[0], &compiled), Some(&mut *room));
            assert_filled(&*room, &other_compiled);
            n
        });
        let second = scope.spawn(|| gives(&mut links_1, &*filled(on[1], &compiled), None));
        let third = scope.spawn(|| gives(&mut links_2, &*filled(on[2], &compiled), None));

        let (held, mut room) = (filled(on[3], &other_compiled), room(on[3], &compiled));
        let mut healing = Healing::default();
        healing.holds(other, HeldState { compiled: &other_compiled, machine: &*held }, trainer_state(7));
        healing.missing(shard, StateToFill { compiled: &compiled, machine: &mut *room });
        let asked = healing.answer(&mut links_3, 0, other).unwrap();
        healing.gives(0, asked);
        healing.ask(&mut links_3, &[0, 1, 2], shard).unwrap();
        assert_eq!(healing.carry_out(&mut links_3).unwrap(), Some(trainer_state(7)));
        assert_filled(&*room, &compiled);
        [first, second, third].map(|member| member.join().unwrap())
    });

    let n = state_of(&compiled).len();
    assert!(width < 128 || n > 1_000_000, "{n} elements are too few for several operations");
    assert!(gave.iter().all(|part| part.abs_diff(n / 3) <= 1) && gave.iter().sum::<usize>() == n, "{gave:?} of {n}");
}

#[test]
fn elements_without_a_holder_are_reported_and_other_transfers_complete() {
    both().iter().for_each(|on| check_elements_without_a_holder(&**on));
}

fn check_elements_without_a_holder(on: &dyn Device) {
    let [shard, other] = [0, 1].map(|rank| Shard::of(&MESH, rank));
    let [compiled, other_compiled] = [0, 1].map(|rank| compiled(MESH, rank));
    let ([mut links_0, _, _, mut links_3], ends) = links();

    std::thread::scope(|scope| {
        let _ends = ends.clone();
        let gives = scope.spawn(|| {
            let _ends = ends.clone();
            let mut healing = Healing::default();
            let machine = filled(on, &compiled);
            healing.holds(shard, HeldState { compiled: &compiled, machine: &*machine }, trainer_state(7));
            let asked = healing.answer(&mut links_0, 3, shard).unwrap();
            healing.gives(3, asked);
            healing.carry_out(&mut links_0)
        });
        // The other half of the same tensors.
        let mut room = room(on, &other_compiled);
        let mut healing = Healing::default();
        healing.missing(other, StateToFill { compiled: &other_compiled, machine: &mut *room });
        healing.ask(&mut links_3, &[0], other).unwrap();
        let missing = healing.carry_out(&mut links_3);

        assert!(matches!(missing, Err(JobError::Peer(PeerError::NotHeld { n_elements, .. })) if n_elements > 0));
        assert!(gives.join().unwrap().is_ok());
    });
}

#[test]
fn member_copies_its_own_state_from_any_sharding() {
    both().iter().for_each(|on| check_own_state(&**on));
}

fn check_own_state(on: &dyn Device) {
    let halves = [0, 1].map(|rank| compiled(MESH, rank));
    let held = halves.each_ref().map(|half| filled(on, half));
    let whole = compiled(Mesh::ONE, 0);
    let mut room = room(on, &whole);
    let mut healing = Healing::default();
    healing.missing(Shard::WHOLE, StateToFill { compiled: &whole, machine: &mut *room });
    for (rank, (compiled, machine)) in halves.iter().zip(&held).enumerate() {
        healing.holds(Shard::of(&MESH, rank), HeldState { compiled, machine: &**machine }, trainer_state(3));
        healing.find(Shard::of(&MESH, rank), Shard::WHOLE);
    }

    let state = healing.carry_out(&mut Links::default()).unwrap();

    assert_eq!(state, Some(trainer_state(3)));
    assert_filled(&*room, &whole);
}

/// A shard's owner and its shadow, which have the same state and the same gradients of a step, on two devices.
fn owner_and_shadow(
    owner_on: &dyn Device,
    shadow_on: &dyn Device,
    bytes_max: usize,
    optimizer: OptimizerSpec,
) -> (Compiled, Box<dyn Machine>, Shadow) {
    let shard = Shard::of(&MESH, 1);
    let c = compiled_for(owner_on.target(), MESH, 1, optimizer, 128);
    let mut owner = filled(owner_on, &c);
    let gradients = log(&c.program, &c.phases);
    for (k, grad) in gradients.iter().enumerate() {
        owner.fill(&c, *grad, 0..c.program.value(*grad).n_elements(), |first, run| {
            (first..).zip(run).for_each(|(i, x)| *x = ((i * 7 + k) % 13) as f32 - 6.0);
        });
    }
    let hyper = c.program.bound(Role::Hyper).next().unwrap();
    let mut scalars = [0.5; Hyper::LEN];
    scalars[Hyper::LOSS_SCALE] = 1.0;
    owner.write(&c, hyper, 0, &scalars);
    if let Some(factor) = c.program.bound(Role::ClipCoefficient).next() {
        owner.write(&c, factor, 0, &[0.25]);
    }
    let id = WorldId { job: 1, generation: 1, incarnation: 1 };
    let bytes = Shadow::bytes(shadow_on, &c).unwrap() as u64;
    let world = ShmWorld::create(&World::of_one_group(id, 1).unwrap(), &[bytes], 4096).unwrap();
    let member = world.join(0).unwrap();
    // SAFETY: the shadow's machine is the only one in this memory.
    let memory = unsafe { member.arena() };
    let mut shadow = Shadow::new(shadow_on, shard, 1, &c, &memory, 0).unwrap();
    fill(&mut *shadow.machine, &shadow.compiled);

    let ([mut links_0, _, _, mut links_3], ends) = links();
    std::thread::scope(|scope| {
        let _ends = ends.clone();
        let own = |grad: &ValueId| owner.source(&c, *grad, 0..c.program.value(*grad).n_elements());
        let sends = [(3, gradients.iter().map(own).collect::<Vec<_>>())];
        let ends = ends.clone();
        scope.spawn(move || {
            let _ends = ends;
            links_0.exchange(&sends, &[], bytes_max).unwrap();
        });
        links_3.exchange(&[], &[(0, shadow.gradients())], bytes_max).unwrap();
    });
    (c, owner, shadow)
}

/// Bits of the state of a rank, by tensor.
fn state_bits(machine: &dyn Machine, c: &Compiled) -> BTreeMap<String, Vec<u32>> {
    let bits = |t: &Tensor| elements(machine, c, t).iter().map(|x| x.to_bits()).collect();
    updated_state(c).iter().map(|t| (format!("{} {:?}", t.name, t.held.region.offset), bits(t))).collect()
}

#[test]
fn shadow_equals_its_owner_on_any_pair_of_devices() {
    for optimizer in OptimizerSpec::all() {
        let after_update = |owner_on: &dyn Device, shadow_on: &dyn Device| {
            let (c, mut owner, mut shadow) = owner_and_shadow(owner_on, shadow_on, STAGED, optimizer);
            let shadows = std::slice::from_mut(&mut shadow);
            shadow::update(&mut *owner, &c, shadows, &mut Run::with(&mut Groups::none())).unwrap();
            [state_bits(&*owner, &c), state_bits(&*shadow.machine, &shadow.compiled)]
        };
        let expected = after_update(&*devices::host(), &*devices::host());
        assert!(expected[0] == expected[1] && expected[0].len() > 10, "{}", optimizer.name());
        for owner_on in both() {
            for shadow_on in both() {
                let found = after_update(&*owner_on, &*shadow_on);
                assert!(found == expected, "{} {owner_on:?} {shadow_on:?}", optimizer.name());
            }
        }
    }
}

#[test]
fn shadow_is_updated_while_the_gpu_of_its_holder_still_has_to_update() {
    let gpu = SoftwareGpu::take();
    let (c, mut owner, mut shadow) = owner_and_shadow(&gpu.open(), &*devices::host(), STAGED, adamw());
    // The update waits on the GPU for a copy of its state, which does not end.
    let param = updated_state(&c).remove(0);
    let first = owner.source(&c, param.value, 0..1).span();
    let mut copy = Staging::new([&first], 1, first.bytes()).unwrap();
    gpu.set("SOFTGPU_COPY_US", "1000000000000");
    // SAFETY: the machine outlives the copy.
    unsafe { copy.gather(0, &[first]) }.unwrap();

    let (updated, is_updated) = mpsc::channel();
    let was_in_time = std::thread::scope(|scope| {
        let gpu = &gpu;
        let rescue = scope.spawn(move || {
            let was_in_time = is_updated.recv_timeout(Duration::from_secs(30)).is_ok();
            gpu.set("SOFTGPU_COPY_US", "0");
            was_in_time
        });
        let shadows = std::slice::from_mut(&mut shadow);
        shadow::update(&mut *owner, &c, shadows, &mut Run::with(&mut Groups::none())).unwrap();
        updated.send(()).ok();
        rescue.join().unwrap()
    });

    assert!(was_in_time, "the shadow waits for the GPU");
    assert!(state_bits(&*shadow.machine, &shadow.compiled) == state_bits(&*owner, &c));
}
