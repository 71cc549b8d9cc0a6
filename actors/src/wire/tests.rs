mod arbitrary;

use super::*;
use arbitrary::{desired_state, report};
use phalanx_strategies::elastic::checkpoint::{Checkpoint, Part};
use phalanx_strategies::elastic::commit::{CommitState, Version, Vote};
use phalanx_strategies::elastic::copies::{Claim, Difference, Holder};
use phalanx_strategies::elastic::devices::DeviceHealth;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, JobId, MemberId, NodeId, Step, Term, Worker};
use phalanx_strategies::elastic::inputs::Input;
use phalanx_strategies::elastic::message::{
    Broken, CatchUp, DesiredStateId, MemberPhase, MemberReport, NotFinite, Refusal, Requests, Settled, Stage, Unsaved,
    WorldPlan,
};
use phalanx_strategies::elastic::progress::{At, Progress, Wait};
use phalanx_strategies::elastic::recovery::{Source, Transfer};
use phalanx_strategies::elastic::shadow::{Cut, Shard};
use phalanx_strategies::mesh::{Axes, Axis, Mesh};
use proptest::collection::vec;
use proptest::prelude::*;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

proptest! {
    #[test]
    fn report_round_trips(report in report()) {
        prop_assert_eq!(decode(&encode(&report).unwrap()), Ok(report));
    }

    #[test]
    fn desired_state_round_trips(desired_state in desired_state()) {
        prop_assert_eq!(decode(&encode(&desired_state).unwrap()), Ok(desired_state));
    }

    // WIRE-2
    #[test]
    fn truncated_frame_is_an_error(report in report(), cut in any::<prop::sample::Index>()) {
        let frame = encode(&report).unwrap();

        prop_assert!(decode::<Report>(&frame[..cut.index(frame.len())]).is_err());
    }

    // WIRE-1
    #[test]
    fn garbage_is_an_error(bytes in vec(any::<u8>(), 0..200)) {
        let mut frame = vec![MAGIC[0], MAGIC[1], VERSION, Kind::DesiredState as u8];
        frame.extend(bytes.iter());

        let _ = decode::<DesiredState>(&frame);
        prop_assert!(decode::<Report>(&bytes).is_err());
    }
}

fn small_report() -> Report {
    Report {
        job: JobId(7),
        node: NodeId(300),
        boot: Incarnation(70_000),
        number: 5,
        desired_state: DesiredStateId { term: Term(1), generation: Generation(2), stage: Stage::Run, revision: 3 },
        draining: true,
        n_failed_starts: 4,
        inputs: vec![Input { name: "tokenizer".into(), value: "1f".into() }],
        devices: vec![],
        members: vec![],
    }
}

// WIRE-3
#[test]
fn encoding_of_version_eight_is_stable() {
    let frame = encode(&small_report()).unwrap();

    let expected = [
        b'p', b'x', 9, 1, // envelope: version 9, kind 1
        7, // job
        251, 44, 1, // node 300: marker of two bytes, little endian
        252, 112, 17, 1, 0, // boot 70,000: marker of four bytes
        5, // number
        1, 2, 2, 3, // desired state: term, generation, stage, revision
        1, // draining
        4, // failed start
        0, // no devices
        1, 9, b't', b'o', b'k', b'e', b'n', b'i', b'z', b'e', b'r', 2, b'1', b'f', // an input: name and value
        0,    // no members
    ];
    assert_eq!(frame, expected);
}

/// Copies that differ, with every field.
fn difference() -> Difference {
    let claim = Claim { holder: Holder { rank: 35, part: 36 }, value: 37 };
    Difference { step: Step(38), tensor: "w".to_owned(), name: 39, suspects: vec![40], claims: vec![claim] }
}

/// A wait with every field.
fn waits() -> At {
    At::Waits(Wait { axes: Axes::of(&[Axis::DpShard, Axis::Cp]), number: 26 })
}

/// A broken world with every field.
fn broken(lost: Worker) -> Broken {
    let not_finite = Some(NotFinite { step: Step(9), suspect: Some(1) });
    Broken { lost: Some(lost), corrupt: Some(Box::new(difference())), not_finite, reason: "gone".to_owned() }
}

/// A device with every field.
fn device() -> DeviceHealth {
    DeviceHealth {
        id: "u".to_owned(),
        name: "n".to_owned(),
        used_bytes: 30,
        total_bytes: 31,
        celsius: Some(32),
        slowed_by: Some("h".to_owned()),
        n_uncorrected: Some(33),
        event: Some("e".to_owned()),
        fault: Some("f".to_owned()),
    }
}

fn unsaved() -> Unsaved {
    Unsaved { of: Checkpoint { generation: Generation(35), step: Step(36) }, reason: "u".to_owned() }
}

fn full_member(worker: Worker, shard: Shard) -> MemberReport {
    MemberReport {
        worker,
        pid: Some(19),
        address: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 20))),
        device: Some(0),
        hangs: true,
        generation: Generation(8),
        phase: MemberPhase::Ready,
        entered: Step(9),
        progress: Progress { ticks: 25, at: waits() },
        broken: Some(broken(worker)),
        settled: Some(Settled { step: Step(30), suspects: vec![31] }),
        commit_state: CommitState {
            entered: Generation(10),
            applied: Some(Version { lineage: Generation(11), step: Step(12) }),
            voted: Some(Vote { generation: Generation(13), step: Step(14) }),
        },
        holds: vec![shard],
        saved: Some(Part { of: Checkpoint { generation: Generation(15), step: Step(16) }, shard }),
        unsaved: Some(unsaved()),
        failure: Some("no".to_owned()),
        fault: Some("d".to_owned()),
    }
}

// WIRE-3
#[test]
fn encoding_of_a_full_report_and_desired_state_is_stable() {
    let shard = Shard { stage: 1, tensor: 2, part: 3, cut: Cut { n_stages: 28, n_tensors: 29, n_parts: 4 } };
    let worker = Worker { member: MemberId { node: NodeId(5), slot: 6 }, incarnation: Incarnation(7) };
    let member = full_member(worker, shard);
    let report = Report { devices: vec![device()], members: vec![member], ..small_report() };
    let sources = [
        Source::Replica(worker),
        Source::Shadow(worker),
        Source::Survivor(worker, shard),
        Source::Disk(Checkpoint { generation: Generation(17), step: Step(18) }),
    ];
    let world_plan = WorldPlan {
        catching_up: vec![CatchUp {
            worker,
            mesh: Mesh { dp_replicate: 28, ..Mesh::ONE },
            rank: 29,
            holds: vec![shard],
            transfers: vec![Transfer { shard, source: Source::Replica(worker) }],
        }],
        guests: vec![worker],
        addresses: vec![Some(SocketAddr::from((Ipv6Addr::LOCALHOST, 21))), None],
        transfers: vec![sources.map(|source| Transfer { shard, source }).to_vec()],
        n_saves: 22,
        rests: true,
        disputed: vec![Step(29)],
        ..world(1, 0)
    };
    let desired_state = DesiredState {
        job: JobId(7),
        id: DesiredStateId { term: Term(1), generation: Generation(2), stage: Stage::Form, revision: 3 },
        world_plan: Some(Arc::new(world_plan)),
        evict: vec![worker],
        requests: Requests { stop: true, save: 23, pause: Generation(27) },
        release: Some(Incarnation(24)),
        refused: Some(Refusal { boot: Incarnation(34), reason: "r".to_owned() }),
    };

    let hex = |frame: Result<Vec<u8>, WireError>| data_encoding::HEXLOWER.encode(&frame.unwrap());
    assert_eq!(
        hex(encode(&report)),
        "7078090107fb2c01fc7011010005010202030104010175016e1e1f012001016801210101650101660109746f6b656e697a657202316601050607011301007f0000011401000108040919020c1a010105060701260177270128012324250109010104676f6e65011e011f0a010b0c010d0e010102031c1d04010f100102031c1d04012324017501026e6f010164"
    );
    assert_eq!(
        hex(encode(&desired_state)),
        "70780902070102010301fc000010000101010101010000fd000000000002000001050607011c0101011d010102031c1d04010102031c1d0400050607010506070201010000000000000000000000000000000115000000fc00001000010200010001020100010001020101040102031c1d04000506070102031c1d04010506070102031c1d04020506070102031c1d040102031c1d040311121601011d0105060701171b011801220172"
    );
}

// WIRE-2
#[test]
fn error_names_each_defect_of_a_frame() {
    let frame = encode(&small_report()).unwrap();
    let changed = |at: usize, to: u8| {
        let mut frame = frame.clone();
        frame[at] = to;
        decode::<Report>(&frame).unwrap_err().to_string()
    };

    assert_eq!(changed(0, b'q'), "expected a report that begins with [70, 78], found [71, 78]");
    assert_eq!(changed(2, 10), "expected a report of protocol version 9, found version 10");
    assert_eq!(changed(3, 2), "expected a report (kind 1), found kind 2");
    let longer = [frame.as_slice(), &[0]].concat();
    assert_eq!(decode::<Report>(&longer).unwrap_err().to_string(), "expected a report, found 1 bytes after it");
    assert_eq!(
        decode::<Report>(&frame[..3]).unwrap_err().to_string(),
        "expected a report, found 3 bytes, which is less than an envelope"
    );
    let oversized = vec![0; (1 << 20) + 1];
    assert_eq!(
        decode::<Report>(&oversized).unwrap_err().to_string(),
        "expected a report of at most 1048576 bytes, found 1048577"
    );
}

// WIRE-4
#[test]
fn contradictory_messages_are_refused() {
    let foreign = MemberReport { worker: Worker::default(), ..member(0) };
    let report = Report { members: vec![member(0), foreign], ..small_report() };
    let empty = desired_state_of(Some(WorldPlan { assignments: vec![], ..world(2, 0) }));

    let refused = decode::<Report>(&encode(&report).unwrap()).unwrap_err().to_string();
    let desired_state = decode::<DesiredState>(&encode(&empty).unwrap()).unwrap_err().to_string();

    assert_eq!(
        refused,
        "a report is invalid: node 300 reports a worker of another node: node 0 slot 0 (incarnation 0)"
    );
    assert!(desired_state.contains("needs 2 ranks, found 0"), "{desired_state}");
}

// WIRE-1
#[test]
fn wrong_length_is_refused_before_memory_is_allocated() {
    let mut frame = encode(&small_report()).unwrap();
    frame.pop();
    frame.push(253);
    frame.extend(u64::MAX.to_le_bytes());

    assert!(matches!(decode::<Report>(&frame), Err(WireError::Malformed { .. })));
}

// WIRE-1
#[test]
fn many_empty_vectors_do_not_decode_to_more_than_the_limit() {
    // One byte of input is 24 bytes of memory here, which is why the limit counts decoded bytes.
    let frame = encode(&desired_state_of(Some(world(0, 0)))).unwrap();
    // The last ten bytes are no holds, no transfers, no saves, no rest, no disputed steps, no evictions, three requests and no release.
    let hostile = |n_holds: u32| {
        let mut hostile = frame[..frame.len() - 10].to_vec();
        hostile.push(252);
        hostile.extend(n_holds.to_le_bytes());
        hostile.resize(hostile.len() + n_holds as usize + 9, 0);
        hostile
    };
    // Three are decoded, and rejected by their check.
    assert!(matches!(decode::<DesiredState>(&hostile(3)), Err(WireError::InvalidMessage { .. })));

    let many = hostile(4_000_000);

    assert!(many.len() < Kind::DesiredState.limit());
    assert!(matches!(decode::<DesiredState>(&many), Err(WireError::Malformed { .. })));
}

fn desired_state_of(world_plan: Option<WorldPlan>) -> DesiredState {
    let stage = if world_plan.is_some() { Stage::Form } else { Stage::Stop };
    DesiredState {
        job: JobId(1),
        id: DesiredStateId { generation: Generation(1 << 20), stage, ..DesiredStateId::default() },
        world_plan: world_plan.map(Arc::new),
        evict: Vec::new(),
        requests: Requests::default(),
        release: None,
        refused: None,
    }
}

/// The largest plan: each rank fetches its own shard and a shadow, both from several pieces of another cut.
fn world(n_ranks: u32, n_pieces: u32) -> WorldPlan {
    // Large counters, as in a long-running job: varints are as long as they get in practice.
    let worker = |rank: u32| Worker {
        member: MemberId { node: NodeId(rank / 8), slot: rank % 8 },
        incarnation: Incarnation(1 << 41),
    };
    let shard =
        move |part: u32| Shard { stage: 0, tensor: 1, part, cut: Cut { n_stages: 1, n_tensors: 2, n_parts: n_ranks } };
    let pieces = move |rank: u32| {
        (0..n_pieces).map(move |i| Transfer {
            shard: shard(rank),
            source: Source::Survivor(worker((rank + i) % n_ranks), shard(i)),
        })
    };
    WorldPlan {
        generation: Generation(1 << 20),
        mesh: Mesh { pp: 1, dp_replicate: 1, dp_shard: n_ranks as usize, cp: 1, tp: 1 },
        assignments: (0..n_ranks).map(worker).collect(),
        catching_up: Vec::new(),
        guests: Vec::new(),
        addresses: vec![Some(SocketAddr::from((Ipv6Addr::LOCALHOST, 40_000))); n_ranks as usize],
        base: Version::default(),
        voted_in: Generation(1 << 20),
        holds: (0..n_ranks).map(|rank| vec![shard(rank), shard((rank + 8) % n_ranks)]).collect(),
        transfers: (0..n_ranks).map(|rank| pieces(rank).collect()).collect(),
        n_saves: 0,
        rests: false,
        disputed: vec![],
    }
}

#[test]
fn desired_state_of_twenty_thousand_ranks_fits_its_limit() {
    // Six pieces per rank: own shard and shadow, each cut from three of another world.
    let desired_state = desired_state_of(Some(world(20_000, 6)));

    let frame = encode(&desired_state).unwrap();

    println!("20,000 ranks, six pieces each: {} bytes on the wire", frame.len());
    assert_eq!(decode(&frame), Ok(desired_state));
}

fn member(slot: u32) -> MemberReport {
    let shard = Shard { stage: 0, tensor: 1, part: 2, cut: Cut { n_stages: 1, n_tensors: 2, n_parts: 4 } };
    MemberReport {
        worker: Worker { member: MemberId { node: NodeId(300), slot }, incarnation: Incarnation(1 << 41) },
        pid: (slot > 0).then_some(70_000),
        address: (slot > 1).then_some(SocketAddr::from((Ipv4Addr::LOCALHOST, 40_000))),
        device: (slot == 2).then_some(1),
        hangs: slot == 1,
        generation: Generation(9),
        phase: MemberPhase::Running,
        entered: Step(70_000),
        progress: Progress { ticks: 1 << 33, at: At::Computes },
        broken: None,
        settled: None,
        commit_state: CommitState { entered: Generation(9), applied: Some(Version::default()), voted: None },
        holds: vec![shard; 2],
        saved: Some(Part { of: Checkpoint { generation: Generation(8), step: Step(60_000) }, shard }),
        unsaved: None,
        failure: (slot == 1).then(|| "no memory".to_owned()),
        fault: (slot == 2).then(|| "no disk".to_owned()),
    }
}

// WIRE-1
#[test]
fn damaged_reports_and_desired_states_are_rejected_or_decode_to_valid_ones() {
    let faulty = DeviceHealth { fault: Some("Xid 79".to_owned()), celsius: Some(90), ..DeviceHealth::default() };
    let devices = vec![DeviceHealth { name: "G".to_owned(), ..DeviceHealth::default() }, faulty];
    let report = Report { devices, members: (0..3).map(member).collect(), ..small_report() };
    crate::fuzz::damage(&[small_report(), report], 500_000);

    let none = DesiredState { job: JobId(7), evict: vec![Worker::default()], ..desired_state_of(None) };
    let all = DesiredState {
        world_plan: Some(Arc::new(WorldPlan {
            guests: vec![Worker::default()],
            addresses: vec![None; 5],
            ..world(4, 2)
        })),
        requests: Requests { stop: true, save: 70_000, pause: Generation(9) },
        release: Some(Incarnation(1 << 41)),
        refused: Some(Refusal { boot: Incarnation(1 << 41), reason: "no GPU".to_owned() }),
        ..none.clone()
    };
    crate::fuzz::damage(&[all, none], 500_000);
}
