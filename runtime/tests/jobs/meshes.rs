//! Every pair of axes with rank processes under a supervisor: on one machine over shared memory, and on two nodes over TCP.
//! The whole matrix (`phalanx-tests`) runs its ranks on threads of one process.

use crate::support::Project;
use crate::support::job::{Addresses, Job as Nodes};
use phalanx_strategies::mesh::{Axis, Mesh};

const STEPS: usize = 8;
/// Ten times the worst difference of `tests/MATRIX.md`: of a loss in nats, of a gradient norm relative.
const TOLERANCE: (f64, f64) = (8e-7, 2.5e-6);
/// The same batch on every mesh. Text, schedule and seed come from [`Project`].
const JOB: [&str; 14] = [
    "--gradient_accumulation_steps",
    "1",
    "--microbatches_per_step",
    "4",
    "--micro_batch_size",
    "1",
    "--max_steps",
    "8",
    "--learning_rate",
    "1e-3",
    "--save_steps",
    "none",
    "--threads",
    "1",
];

const fn mesh(pp: usize, dp_replicate: usize, dp_shard: usize, cp: usize, tp: usize) -> Mesh {
    Mesh { pp, dp_replicate, dp_shard, cp, tp }
}

/// Eight ranks each; every pair of axes is larger than one in at least one mesh.
const MESHES: [Mesh; 4] = [mesh(2, 2, 2, 1, 1), mesh(2, 1, 1, 2, 2), mesh(1, 2, 1, 2, 2), mesh(1, 1, 2, 2, 2)];
const N_RANKS: usize = 8;

fn keys(mesh: Mesh) -> Vec<String> {
    let sizes = [
        ("--pipeline_parallel_size", mesh.pp),
        ("--dp_replicate_size", mesh.dp_replicate),
        ("--dp_shard_size", mesh.dp_shard),
        ("--context_parallel_size", mesh.cp),
        ("--tensor_parallel_size", mesh.tp),
    ];
    sizes.into_iter().flat_map(|(key, n)| [key.to_owned(), n.to_string()]).collect()
}

/// Step, bits of its loss, bits of its gradient norm.
type Metrics = Vec<(u64, u64, u64)>;

/// Compares with one rank.
#[track_caller]
fn assert_as_one_rank(mesh: Mesh, metrics: &Metrics, alone: &Metrics) {
    assert_eq!((metrics.len(), alone.len()), (STEPS, STEPS), "{mesh}: every step is reported exactly once");
    let worst = metrics.iter().zip(alone).fold((0.0f64, 0.0f64), |worst, (a, b)| {
        let value = f64::from_bits;
        let norm = (value(a.2) - value(b.2)).abs() / value(b.2);
        (worst.0.max((value(a.1) - value(b.1)).abs()), worst.1.max(norm))
    });
    println!("{mesh}: a loss differs by {:.1e}, a norm by {:.1e}", worst.0, worst.1);
    assert!(worst.0 <= TOLERANCE.0 && worst.1 <= TOLERANCE.1, "{mesh}: {worst:?}");
}

/// Trains on one rank, for comparison.
fn alone(p: &Project, extra: &[&str]) -> Metrics {
    p.train(&[&JOB[..], extra, &["--output_dir", "alone"]].concat()).succeeds();
    p.metrics("alone")
}

/// Trains on this mesh with rank processes of one machine.
fn on_one_machine(p: &Project, mesh: Mesh, extra: &[&str]) -> (Metrics, Vec<u8>) {
    let (out, keys) = (mesh.to_string().replace(' ', "-"), keys(mesh));
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    p.train(&[&JOB[..], extra, &keys, &["--output_dir", &out]].concat()).succeeds();
    (p.metrics(&out), p.model_bytes(&out))
}

/// Trains on this mesh with rank processes of two nodes, half of them on each.
fn on_two_nodes(p: &Project, mesh: Mesh, extra: &[&str]) -> (Metrics, Vec<u8>) {
    let keys = keys(mesh);
    let overrides: Vec<&str> = [&JOB[..], extra].concat().into_iter().chain(keys.iter().map(String::as_str)).collect();
    let addresses = Addresses { ranks_per_node: N_RANKS / 2, ..Addresses::default() };
    let weights = Nodes::start_at(p, 2, &overrides, addresses).finish();
    (p.metrics("out"), weights)
}

#[test]
fn every_pair_of_axes_is_used_by_a_mesh() {
    let size = |mesh: &Mesh, axis: Axis| mesh.axis(axis);
    for (i, a) in Axis::ALL.into_iter().enumerate() {
        for b in Axis::ALL.into_iter().skip(i + 1) {
            assert!(MESHES.iter().any(|mesh| size(mesh, a) > 1 && size(mesh, b) > 1), "{a:?} and {b:?}");
        }
    }
    assert!(MESHES.iter().all(|mesh| mesh.size() == N_RANKS));
}

#[test]
fn rank_processes_train_as_one_rank_under_every_pair_of_axes() {
    let p = Project::new();
    let alone = alone(&p, &["--reproducible", "false"]);

    for mesh in MESHES {
        let (metrics, _) = on_one_machine(&p, mesh, &["--reproducible", "false"]);

        assert_as_one_rank(mesh, &metrics, &alone);
    }
}

#[test]
fn ranks_of_two_nodes_train_as_one_rank_under_every_pair_of_axes() {
    for mesh in MESHES {
        let p = Project::new();
        let alone = alone(&p, &["--reproducible", "false"]);

        let (metrics, _) = on_two_nodes(&p, mesh, &["--reproducible", "false"]);

        assert_as_one_rank(mesh, &metrics, &alone);
    }
}

#[test]
fn reproducible_ranks_on_one_and_two_nodes_end_with_the_bits_of_one_rank() {
    let p = Project::new();
    let exact = ["--reproducible", "true"];
    let alone = alone(&p, &exact);
    let weights = p.model_bytes("alone");

    let processes = on_one_machine(&p, MESHES[0], &exact);
    let nodes = on_two_nodes(&p, MESHES[0], &exact);

    assert!(processes == (alone.clone(), weights.clone()), "processes of one machine");
    assert!(nodes == (alone, weights), "processes of two nodes");
}
