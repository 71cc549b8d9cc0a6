//! The programs of all ranks of a mesh match, and a fault in one of them is found.

#[allow(dead_code)] // layouts are not replayed here
mod support;

use phalanx_strategies::compile::{Compiled, Parallel, StepSpec, compile_forward, compile_shadow, compile_step};
use phalanx_strategies::mesh::{Axis, Coord, Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, Head, HfConfig, ModelConfig};
use phalanx_strategies::objective::Objective;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::passes::shadow::log;
use phalanx_strategies::pipeline::ScheduleKind;
use phalanx_strategies::program::{Instr, Op, Program, Role, ValueId, op};
use phalanx_strategies::target::Nowhere;
use phalanx_strategies::trace::{Ranks, Trace, verify_world, world};
use phalanx_strategies::world::{Collective, Links, Mover, Post, Rank, Step, Tensor, WorldError};
use proptest::prelude::*;
use std::time::{Duration, Instant};
use support::{any_parallel, families, model, spec};

fn any_mesh() -> impl Strategy<Value = Mesh> {
    (1usize..5, 1usize..3, 1usize..4, 1usize..4, prop::sample::select(vec![1usize, 2, 4]))
        .prop_map(|(pp, dp_replicate, dp_shard, cp, tp)| Mesh { pp, dp_replicate, dp_shard, cp, tp })
        .prop_filter("small", |m| m.size() <= 32)
}

/// A model, a mesh, and how the model is trained on the mesh.
#[derive(Clone, Debug)]
struct Case {
    model: ModelConfig,
    objective: Objective,
    mesh: Mesh,
    spec: StepSpec,
    target: Nowhere,
}

fn any_case() -> impl Strategy<Value = Case> {
    let family = families();
    let kv_heads = prop::sample::select(vec![1usize, 2, 4]);
    let precision = prop::sample::select(vec![Precision::F32, Precision::Bf16, Precision::Fp8]);
    let recompute = prop::sample::select(vec![Recompute::None, Recompute::Selective, Recompute::Full]);
    let model = (family, kv_heads, any::<bool>());
    let dropout = prop::option::of(support::dropouts());
    let how = (1usize..6, precision, recompute, dropout, support::optimizers());
    (model, any_mesh(), any_parallel(), how, support::targets(), support::objectives()).prop_map(
        |(
            (family, kv_heads, tied),
            mesh,
            parallel,
            (n, precision, recompute, dropout, optimizer),
            target,
            objective,
        )| {
            let lora = dropout.map(|dropout| support::adapters(family, dropout));
            let optimizer = support::fitting(optimizer, &[mesh]);
            let spec = StepSpec { parallel, lora, optimizer, ..spec(n, precision, recompute) };
            Case { model: model_of(family, kv_heads, tied), objective, mesh, spec, target }
        },
    )
}

fn model_of(family: &str, kv_heads: usize, tied: bool) -> ModelConfig {
    model(family, 8, kv_heads, tied)
}

impl Case {
    fn forward(&self, rank: usize) -> Program {
        // Long enough for six context shards of two chunks each.
        let batch = BatchShape { n_rows: self.objective.rows_per_sample(), seq_len: 12 };
        let mut forward = self.objective.program(&self.model, batch).unwrap();
        forward.mesh_rank = MeshRank { mesh: self.mesh, rank };
        forward
    }

    fn compiled(&self, rank: usize) -> Compiled {
        compile_step(self.forward(rank), &self.spec, &self.target).unwrap()
    }

    fn step(&self, rank: usize) -> Program {
        self.compiled(rank).program
    }

    fn evaluation(&self, rank: usize) -> Program {
        compile_forward(self.forward(rank), &self.spec, &self.target).unwrap().program
    }

    fn verify(&self, compile: impl Fn(&Case, usize) -> Program) -> Result<(), WorldError> {
        verify_world(self.mesh, |mesh_rank| Ok(compile(self, mesh_rank.rank)))
    }
}

/// The kinds of collectives that a rank starts, in order of first start, with the number of tensors over all starts of the
/// kind: where parts are uneven, a tensor may fall into the next bucket of gradients, after another start. Sums of
/// key/value heads that several tensor-parallel ranks hold are omitted, since only the shards with such heads have them.
fn starts(mut program: Program) -> Vec<(Collective, usize)> {
    program.instrs.retain(|i| matches!(i.op, Op::Start(op::Start(c)) if c.group.run.is_none()));
    let mut starts: Vec<(Collective, usize)> = Vec::new();
    for step in Trace::of(&program).steps {
        let Step::Start(post) = step else { continue };
        let (like, n_tensors) = (Collective { sequence: 0, ..post.collective }, post.tensors.len());
        match starts.iter_mut().find(|(known, _)| *known == like) {
            Some((_, n)) => *n += n_tensors,
            None => starts.push((like, n_tensors)),
        }
    }
    starts
}

fn at_once(_: &Post, _: &[u32]) -> Duration {
    Duration::ZERO
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn programs_of_all_ranks_match_for_every_mesh(case in any_case()) {
        prop_assert_eq!(case.verify(Case::step), Ok(()));
        prop_assert_eq!(case.verify(Case::evaluation), Ok(()));
    }

    /// Reproducible runs sum whole tensors from gathered elements.
    #[test]
    fn programs_of_all_ranks_match_in_reproducible_runs_with_every_optimizer(case in any_case(), n_more in 0usize..4) {
        let mesh = Mesh { cp: 1, ..case.mesh };
        let n_leaves = mesh.data_ranks() + n_more;
        let parallel = Parallel { logical_shards: Some(n_leaves), ..case.spec.parallel };
        let n_microbatches = n_leaves.div_ceil(mesh.data_ranks());
        let case = Case { mesh, spec: StepSpec { parallel, n_microbatches, ..case.spec }, ..case };

        prop_assert_eq!(case.verify(Case::step), Ok(()));
    }

    #[test]
    fn ranks_of_a_stage_start_the_same_collectives(case in any_case()) {
        for rank in 0..case.mesh.size() {
            let first = Ranks::OfEachStage.representative(&case.mesh, rank);

            prop_assert_eq!(starts(case.step(rank)), starts(case.step(first)), "rank {}", rank);
        }
    }

    #[test]
    fn step_changes_state_in_its_apply_phase_only_and_without_peers(case in any_case()) {
        for rank in 0..case.mesh.size() {
            let Compiled { program, phases, .. } = case.compiled(rank);
            let changes = |i: &Instr| i.writes.iter().any(|v| program.value(*v).kind.is_state());
            let collective = |i: &Instr| matches!(i.op, Op::Start(_) | Op::Await(_));

            prop_assert!(!program.instrs[phases.compute()].iter().any(changes));
            prop_assert!(program.instrs[phases.apply()].iter().all(|i| changes(i) && !collective(i)));
            prop_assert!(program.instrs[phases.gather()].iter().all(collective));
            prop_assert_eq!(phases.end, program.instrs.len());
        }
    }

    #[test]
    fn shadow_makes_the_updates_of_its_rank_on_the_same_elements(case in any_case()) {
        for rank in 0..case.mesh.size() {
            let step = case.compiled(rank);
            let shadow = compile_shadow(&step, &case.target).unwrap();

            let grads: Vec<ValueId> = shadow.program.bound(Role::Gradient).collect();
            let shapes = |program: &Program, grads: &[ValueId]| -> Vec<Vec<usize>> {
                grads.iter().map(|g| program.value(*g).shape.clone()).collect()
            };
            let log = log(&step.program, &step.phases);
            prop_assert_eq!(shapes(&shadow.program, &grads), shapes(&step.program, &log));
            let trained = step.program.params.iter().filter(|p| p.trainable).map(|p| (&p.parts, &p.updated));
            prop_assert!(shadow.program.params.iter().map(|p| (&p.parts, &p.held)).eq(trained));
        }
    }

    #[test]
    fn computing_and_waiting_fill_the_step_of_every_rank(case in any_case()) {
        let timed = |mesh_rank: MeshRank| -> Result<Trace, WorldError> {
            let nanos = |rank: usize| Duration::from_nanos(1000 + rank as u64);
            Ok(Trace::timed(&case.step(mesh_rank.rank), |_| Some(nanos(mesh_rank.rank))))
        };
        let links = Links { mover: Mover::Links, node: &|rank| rank / 4, duration: &|_, nodes| Duration::from_nanos(500 * nodes.len() as u64) };

        let world = world(case.mesh, Ranks::All, timed)?;
        let timeline = world.simulate(&links, false)?;

        for rank in 0..case.mesh.size() as u32 {
            let times = timeline.rank(Rank(rank));
            prop_assert_eq!(times.finish, times.compute + times.exposed);
            prop_assert!(times.finish <= timeline.makespan);
        }
    }

    #[test]
    fn fault_in_one_rank_is_found(case in any_case(), at in any::<prop::sample::Index>(), which in 0usize..3) {
        let victim = at.index(case.mesh.size());
        let mut program = case.step(victim);
        if !fault(&mut program, at, which) {
            return Ok(());
        }

        let found = case.verify(|case, rank| if rank == victim { program.clone() } else { case.step(rank) });

        prop_assert!(found.is_err());
    }
}

/// Rank 3 exchanges starts of two groups that both have rank 2, too: each stream is in order, but not all of them together.
#[test]
fn exchanged_starts_of_two_groups_in_one_rank_are_found() {
    let case = tiny(Mesh { tp: 2, dp_shard: 2, ..Mesh::ONE });
    let mut program = case.step(3);
    let stream = |i: usize| if let Op::Start(op::Start(c)) = program.instrs[i].op { Some(c.stream()) } else { None };
    let starts: Vec<usize> = (0..program.instrs.len()).filter(|i| stream(*i).is_some()).collect();
    let with_rank_2 = |i: &usize| stream(*i).is_some_and(|s| case.mesh.members(s.group, 3).contains(&2));
    let starts: Vec<usize> = starts.into_iter().filter(with_rank_2).collect();
    let pair = starts.windows(2).find(|pair| stream(pair[0]) != stream(pair[1])).expect("there are two groups");
    let (first, second) = (pair[0], pair[1]);
    let later = program.instrs.remove(first);
    program.instrs.insert(second, later);

    let found = case.verify(|case, rank| if rank == 3 { program.clone() } else { case.step(rank) });

    let error = found.unwrap_err().to_string();
    assert!(error.contains("no common order of starts") && error.contains("rank 3"), "{error}");
}

/// Swaps two different collectives of a stream, drops one, or changes the size of one; false without such collectives.
fn fault(program: &mut Program, at: prop::sample::Index, which: usize) -> bool {
    let is_start = |i: &usize| matches!(program.instrs[*i].op, Op::Start(_));
    let starts: Vec<usize> = (0..program.instrs.len()).filter(is_start).collect();
    if starts.is_empty() {
        return false;
    }
    let first = *at.get(&starts);
    let Op::Start(op::Start(c)) = program.instrs[first].op else { return false };
    match which {
        0 => swap(program, &starts, first),
        1 => {
            program.instrs.retain(|i| i.op != Op::Start(op::Start(c)) && i.op != Op::Await(op::Await(c)));
            true
        }
        _ => {
            let instr = &program.instrs[first];
            let all: Vec<_> = instr.reads.iter().chain(&instr.writes).map(|v| v.0 as usize).collect();
            all.into_iter().for_each(|v| program.values[v].shape = vec![1_000_003]);
            true
        }
    }
}

/// Exchanges the buffers of a collective and of the next one of its stream with different tensors.
fn swap(program: &mut Program, starts: &[usize], first: usize) -> bool {
    let Op::Start(op::Start(c)) = program.instrs[first].op else { return false };
    let unlike = starts.iter().copied().find(|i| {
        let Op::Start(op::Start(other)) = program.instrs[*i].op else { return false };
        other.stream() == c.stream() && *i > first && wholes(program, *i) != wholes(program, first)
    });
    let Some(second) = unlike else { return false };
    let (a, b) = (program.instrs[first].clone(), program.instrs[second].clone());
    let (i, j) = (&mut program.instrs[first], b);
    (i.reads, i.writes) = (j.reads, j.writes);
    (program.instrs[second].reads, program.instrs[second].writes) = (a.reads, a.writes);
    true
}

/// The whole tensors of a collective, which other ranks check besides its number.
fn wholes(program: &Program, at: usize) -> Vec<Tensor> {
    let one = Program { instrs: vec![program.instrs[at].clone()], ..program.clone() };
    match &Trace::of(&one).steps[0] {
        Step::Start(post) => post.tensors.clone(),
        _ => unreachable!("it is a start"),
    }
}

fn tiny(mesh: Mesh) -> Case {
    let parallel = Parallel { sequence_parallel: true, ..Parallel::default() };
    Case {
        model: model("llama", 4, 2, false),
        objective: Objective::Supervised,
        mesh,
        spec: StepSpec { parallel, ..spec(2, Precision::F32, Recompute::None) },
        target: Nowhere::default(),
    }
}

#[test]
fn programs_of_four_thousand_ranks_match() {
    let case = tiny(Mesh { pp: 4, dp_replicate: 8, dp_shard: 16, cp: 2, tp: 4 });
    let begin = Instant::now();

    let verdict = case.verify(Case::step);

    assert_eq!((case.mesh.size(), verdict), (4096, Ok(())));
    println!("4096 ranks compiled and verified in {:.1?}", begin.elapsed());
}

#[test]
fn one_faulty_rank_among_four_thousand_is_named() {
    let case = tiny(Mesh { pp: 4, dp_replicate: 8, dp_shard: 16, cp: 2, tp: 4 });
    let victim = 2711;
    let stages: Vec<Program> =
        (0..case.mesh.pp).map(|s| case.step(case.mesh.rank(Coord::default().with(Axis::Pp, s)))).collect();
    let trace = |mesh_rank: MeshRank| -> Result<Trace, WorldError> {
        let mut program = stages[mesh_rank.on(Axis::Pp)].clone();
        if mesh_rank.rank == victim {
            let last = program.instrs.iter().rposition(|i| matches!(i.op, Op::Start(_))).unwrap();
            let Op::Start(op::Start(c)) = program.instrs[last].op else { unreachable!("it is a start") };
            program.instrs.retain(|i| i.op != Op::Start(op::Start(c)) && i.op != Op::Await(op::Await(c)));
        }
        Ok(Trace::of(&program))
    };

    let error = world(case.mesh, Ranks::All, trace).unwrap().verify().unwrap_err().to_string();

    assert!(error.contains(&format!("rank {victim} has nothing")), "{error}");
}

// Stages that send to each other around the ring must not deadlock for any number of microbatches, even if receivers take
// each message only when they need it.
#[test]
fn compiled_stages_never_deadlock() {
    let schedules = [
        ScheduleKind::GPipe,
        ScheduleKind::OneF1B,
        ScheduleKind::ZeroBubble,
        ScheduleKind::Interleaved { chunks: 2 },
        ScheduleKind::Interleaved { chunks: 3 },
    ];
    for (schedule, pp, n) in
        schedules.into_iter().flat_map(|s| (2..=6).flat_map(move |pp| (1..=20).map(move |n| (s, pp, n))))
    {
        let parallel = Parallel { schedule, ..Parallel::default() };
        let case = Case {
            model: model("gpt2", 18, 4, false),
            objective: Objective::Supervised,
            mesh: Mesh { pp, ..Mesh::ONE },
            spec: StepSpec { parallel, ..spec(n, Precision::F32, Recompute::None) },
            target: Nowhere::default(),
        };

        assert_eq!(case.verify(Case::step), Ok(()), "{schedule}, {pp} stages, {n} microbatches");
    }
}

#[test]
fn mesh_of_thousands_is_simulated_by_one_rank_of_each_stage() {
    for mesh in [
        Mesh { pp: 4, dp_replicate: 8, dp_shard: 16, cp: 2, tp: 4 },
        Mesh { pp: 1, dp_replicate: 16, dp_shard: 64, cp: 1, tp: 4 },
        Mesh { pp: 2, dp_replicate: 1, dp_shard: 1024, cp: 1, tp: 2 },
    ] {
        let case = tiny(mesh);
        let world = world(mesh, Ranks::OfEachStage, |mesh_rank| {
            Ok::<Trace, WorldError>(Trace::timed(&case.step(mesh_rank.rank), |_| Some(Duration::from_micros(1))))
        });

        let timeline = world
            .unwrap()
            .simulate(&Links { mover: Mover::Links, node: &|rank| rank / 8, duration: &at_once }, false)
            .unwrap();

        assert!(timeline.makespan > Duration::ZERO);
    }
}

/// Time that this thread has had a processor, whatever else runs on the machine.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

// The fastest of several runs, since others use the caches; debug builds may take twenty times as long.
#[test]
fn one_rank_of_a_thousand_compiles_in_a_tenth_of_a_second() {
    let json = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "tie_word_embeddings": false}"#;
    let hf: HfConfig = serde_json::from_str(json).unwrap();
    let model = ModelConfig::try_from(&hf).unwrap();
    let mesh = Mesh { pp: 8, dp_replicate: 2, dp_shard: 8, cp: 1, tp: 8 };
    let spec = spec(8, Precision::Bf16, Recompute::None);
    let compile = |rank| {
        let begin = processor_time();
        let mut forward = model.forward(BatchShape { n_rows: 1, seq_len: 8192 }, Head::Loss).unwrap();
        forward.mesh_rank = MeshRank { mesh, rank };
        let compiled = compile_step(forward, &spec, &Nowhere::default()).unwrap();
        (processor_time() - begin, compiled.program.instrs.len())
    };

    let (least, n_instrs) = (0..10).map(|i| compile(i * 101)).min().unwrap();

    println!("{} ranks: {n_instrs} instructions of one in {least:.1?}", mesh.size());
    assert!(least < Duration::from_millis(if cfg!(debug_assertions) { 2000 } else { 100 }), "{least:?}");
}
