//! Arbitrary consistent reports and desired states (`WIRE-4`), for the property tests.

use phalanx_strategies::elastic::checkpoint::{Checkpoint, Part};
use phalanx_strategies::elastic::commit::{CommitState, Version, Vote};
use phalanx_strategies::elastic::devices::DeviceHealth;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, JobId, MemberId, NodeId, Step, Term, Worker};
use phalanx_strategies::elastic::inputs::Input;
use phalanx_strategies::elastic::message::{
    Broken, CatchUp, DesiredState, DesiredStateId, MemberPhase, MemberReport, Refusal, Report, Requests, Stage,
    WorldPlan,
};
use phalanx_strategies::elastic::progress::{At, Progress, Wait};
use phalanx_strategies::elastic::recovery::{Source, Transfer};
use phalanx_strategies::elastic::shadow::{Cut, Shard};
use phalanx_strategies::elastic::validate::COUNTER_MAX;
use phalanx_strategies::mesh::Mesh;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

fn worker() -> impl Strategy<Value = Worker> {
    (any::<u32>(), any::<u32>(), counter()).prop_map(|(node, slot, incarnation)| Worker {
        member: MemberId { node: NodeId(node), slot },
        incarnation: Incarnation(incarnation),
    })
}

/// An address of either family; flow and scope are not encoded.
fn address() -> impl Strategy<Value = SocketAddr> {
    (any::<IpAddr>(), any::<u16>()).prop_map(SocketAddr::from)
}

fn counter() -> impl Strategy<Value = u64> {
    0..=COUNTER_MAX
}

fn shard() -> impl Strategy<Value = Shard> {
    // Three numbers below the cube root of the limit of a cut.
    let cut = [(); 3].map(|()| 1..=40u32);
    (any::<[u32; 3]>(), cut).prop_map(|(at, [n_stages, n_tensors, n_parts])| Shard {
        stage: at[0] % n_stages,
        tensor: at[1] % n_tensors,
        part: at[2] % n_parts,
        cut: Cut { n_stages, n_tensors, n_parts },
    })
}

fn version() -> impl Strategy<Value = Version> {
    (counter(), counter()).prop_map(|(l, s)| Version { lineage: Generation(l), step: Step(s) })
}

fn checkpoint() -> impl Strategy<Value = Checkpoint> {
    (counter(), counter()).prop_map(|(g, s)| Checkpoint { generation: Generation(g), step: Step(s) })
}

fn source() -> impl Strategy<Value = Source> {
    prop_oneof![
        worker().prop_map(Source::Replica),
        worker().prop_map(Source::Shadow),
        (worker(), shard()).prop_map(|(worker, shard)| Source::Survivor(worker, shard)),
        checkpoint().prop_map(Source::Disk),
    ]
}

fn commit_state() -> impl Strategy<Value = CommitState> {
    let vote = (counter(), counter()).prop_map(|(g, s)| Vote { generation: Generation(g), step: Step(s) });
    (counter(), option::of(version()), option::of(vote)).prop_map(|(entered, applied, voted)| CommitState {
        entered: Generation(entered),
        applied,
        voted,
    })
}

fn desired_state_id() -> impl Strategy<Value = DesiredStateId> {
    let stage = select(vec![Stage::Stop, Stage::Form, Stage::Run, Stage::End]);
    (counter(), counter(), stage, any::<u64>()).prop_map(|(term, generation, stage, revision)| DesiredStateId {
        term: Term(term),
        generation: Generation(generation),
        stage,
        revision,
    })
}

fn progress() -> impl Strategy<Value = Progress> {
    let wait = (any::<u8>(), any::<u32>()).prop_map(|(axes, number)| At::Waits(Wait { axes: axes.into(), number }));
    let at = prop_oneof![Just(At::Idle), Just(At::Computes), wait, Just(At::Stores)];
    (counter(), at).prop_map(|(ticks, at)| Progress { ticks, at })
}

fn member() -> impl Strategy<Value = MemberReport> {
    use MemberPhase::{CatchingUp, Done, Guest, Healing, Paused, Ready, Running, Saving, Stopped};
    let phase = select(vec![Stopped, Guest, Paused, Healing, Ready, CatchingUp, Running, Saving, Done]);
    let process = (worker(), option::of(any::<u32>()), option::of(address()));
    let part = (checkpoint(), shard()).prop_map(|(of, shard)| Part { of, shard });
    let counters = (any::<bool>(), counter(), counter());
    let broken = option::of((option::of(worker()), ".{0,20}").prop_map(|(lost, reason)| Broken {
        lost,
        corrupt: None,
        not_finite: None,
        reason,
    }));
    let failure = (option::of(".{0,20}"), option::of(".{0,20}"));
    let at = (phase, progress(), broken);
    (process, counters, at, commit_state(), vec(shard(), 0..4), option::of(part), failure).prop_map(
        |((worker, pid, address), (hangs, generation, entered), at, commit_state, holds, saved, (failure, fault))| {
            MemberReport {
                worker,
                pid,
                address,
                device: None,
                hangs,
                generation: Generation(generation),
                phase: at.0,
                entered: Step(entered),
                progress: at.1,
                broken: at.2,
                commit_state,
                holds,
                saved,
                unsaved: None,
                failure,
                settled: None,
                fault,
            }
        },
    )
}

fn device() -> impl Strategy<Value = DeviceHealth> {
    let text = || ".{0,20}";
    let amounts = (any::<u64>(), any::<u64>(), option::of(any::<u32>()), option::of(any::<u64>()));
    let texts = (option::of(text()), option::of(text()), option::of(text()));
    (text(), text(), amounts, texts).prop_map(
        |(id, name, (used_bytes, total_bytes, celsius, n_uncorrected), (slowed_by, event, fault))| DeviceHealth {
            id,
            name,
            used_bytes,
            total_bytes,
            celsius,
            slowed_by,
            n_uncorrected,
            event,
            fault,
        },
    )
}

pub(super) fn report() -> impl Strategy<Value = Report> {
    let who = (any::<u64>(), any::<u32>(), counter(), counter());
    let text = || ".{0,20}";
    let input = (text(), text()).prop_map(|(name, value)| Input { name, value });
    let parts = (vec(device(), 0..3), vec(input, 0..3), vec(member(), 0..5));
    (who, desired_state_id(), any::<bool>(), any::<u32>(), parts).prop_map(
        |((job, node, boot, number), desired_state, draining, n_failed_starts, (devices, inputs, mut members))| {
            for (i, member) in members.iter_mut().enumerate() {
                member.worker.member.node = NodeId(node);
                member.device = (i < devices.len()).then_some(i as u32);
            }
            let (job, node, boot) = (JobId(job), NodeId(node), Incarnation(boot));
            Report { job, node, boot, number, desired_state, draining, n_failed_starts, devices, inputs, members }
        },
    )
}

fn world_plan() -> impl Strategy<Value = WorldPlan> {
    let axis = || 1..4_usize;
    let mesh = (axis(), axis(), axis(), axis(), axis()).prop_map(|(pp, dp_replicate, dp_shard, cp, tp)| Mesh {
        pp,
        dp_replicate,
        dp_shard,
        cp,
        tp,
    });
    let others = (vec(worker(), 0..3), vec(worker(), 0..3));
    (mesh, others).prop_flat_map(|(mesh, (catching_up, guests))| world_plan_of(mesh, catching_up, guests))
}

fn world_plan_of(mesh: Mesh, catching_up: Vec<Worker>, guests: Vec<Worker>) -> impl Strategy<Value = WorldPlan> {
    let n = mesh.size();
    let transfer = || (shard(), source()).prop_map(|(shard, source)| Transfer { shard, source });
    let catch_up = (0..2 * n, vec(shard(), 0..2), vec(transfer(), 0..3)).prop_map(move |(rank, others, transfers)| {
        let mesh = Mesh { dp_replicate: 2 * mesh.dp_replicate, ..mesh };
        let holds = std::iter::once(Shard::of(&mesh, rank)).chain(others).collect();
        CatchUp { worker: Worker::default(), mesh, rank, holds, transfers }
    });
    let catch_ups_of = vec(catch_up, catching_up.len());
    let who = (vec(worker(), n), vec(option::of(address()), n + catching_up.len() + guests.len()), catch_ups_of);
    let plan = (vec(vec(shard(), 1..3), n), vec(vec(transfer(), 0..3), n));
    let counters = (counter(), counter(), counter(), any::<bool>());
    (who, version(), plan, counters).prop_map(
        move |((assignments, addresses, plans), base, (holds, transfers), (generation, voted_in, n_saves, rests))| {
            WorldPlan {
                generation: Generation(generation),
                mesh,
                assignments,
                catching_up: catching_up
                    .iter()
                    .zip(plans)
                    .map(|(worker, plan)| CatchUp { worker: *worker, ..plan })
                    .collect(),
                guests: guests.clone(),
                addresses,
                base,
                voted_in: Generation(voted_in),
                holds,
                transfers,
                n_saves,
                rests,
                disputed: vec![Step(n_saves)],
            }
        },
    )
}

pub(super) fn desired_state() -> impl Strategy<Value = DesiredState> {
    let requests = (any::<bool>(), counter(), counter()).prop_map(|(stop, save, pause)| Requests {
        stop,
        save,
        pause: Generation(pause),
    });
    let release = option::of(any::<u64>().prop_map(Incarnation));
    let refusal = (any::<u64>(), ".{0,20}").prop_map(|(boot, reason)| Refusal { boot: Incarnation(boot), reason });
    let leaves = (release, option::of(refusal));
    (any::<u64>(), desired_state_id(), option::of(world_plan()), vec(worker(), 0..4), requests, leaves).prop_map(
        |(job, id, world_plan, evict, requests, (release, refused))| {
            let of_world = |world_plan| Arc::new(WorldPlan { generation: id.generation, ..world_plan });
            let world_plan = world_plan.filter(|_| matches!(id.stage, Stage::Form | Stage::Run)).map(of_world);
            DesiredState { job: JobId(job), id, world_plan, evict, requests, release, refused }
        },
    )
}
