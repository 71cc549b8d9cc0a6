//! The bound of a candidate against its compiled and simulated step.

#[allow(dead_code)] // layouts are not replayed here
mod support;

use phalanx_strategies::compile::{StepSpec, compile_step};
use phalanx_strategies::mesh::MeshRank;
use phalanx_strategies::model::{BatchShape, Head, HfConfig, ModelConfig};
use phalanx_strategies::passes::context_parallel::CpComm;
use phalanx_strategies::passes::lora::LoraSpec;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::plan::bound::{Bound, MeshBound};
use phalanx_strategies::plan::cost::{post_duration, trace_on};
use phalanx_strategies::plan::workload::input_bytes;
use phalanx_strategies::plan::{Candidate, Evaluation, Hardware, MeshSizes, Overhead, Workload};
use phalanx_strategies::target::Nowhere;
use phalanx_strategies::trace::{Ranks, world};
use phalanx_strategies::world::{Links, WorldError};
use proptest::prelude::*;
use support::{families, spec};

/// A model whose products and activations are large enough to outweigh latencies, small enough to compile often.
fn model(family: &str, n_layers: usize, kv_heads: usize, tied: bool) -> ModelConfig {
    let json = format!(
        r#"{{"model_type": "{family}", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": {n_layers}, "num_attention_heads": 16, "num_key_value_heads": {kv_heads},
        "max_position_embeddings": 4096, "tie_word_embeddings": {tied}}}"#
    );
    ModelConfig::try_from(&serde_json::from_str::<HfConfig>(&json).unwrap()).unwrap()
}

/// A model, how it is trained, and one of the candidates for a world size.
#[derive(Clone, Debug)]
struct Case {
    model: ModelConfig,
    batch: BatchShape,
    spec: StepSpec,
    hardware: Hardware,
    workload: Workload,
    candidate: Candidate,
    target: Nowhere,
}

/// What is trained.
#[derive(Clone, Copy, Debug)]
enum Trained {
    All,
    Adapters,
    AdaptersOfTheLastBlock,
    AdaptersAndHead,
}

const TRAINED: [Trained; 5] =
    [Trained::All, Trained::All, Trained::Adapters, Trained::AdaptersOfTheLastBlock, Trained::AdaptersAndHead];

impl Trained {
    fn adapters(self, family: &str, dropout: f32, n_layers: usize, has_head: bool) -> Option<LoraSpec> {
        let adapters = support::adapters(family, dropout);
        match self {
            Trained::All => None,
            Trained::AdaptersOfTheLastBlock => Some(LoraSpec { blocks: vec![n_layers - 1], ..adapters }),
            Trained::AdaptersAndHead if has_head => {
                Some(LoraSpec { modules_to_save: vec!["lm_head".into()], ..adapters })
            }
            Trained::Adapters | Trained::AdaptersAndHead => Some(adapters),
        }
    }
}

fn any_case() -> impl Strategy<Value = Option<Case>> {
    let family = families();
    let kv_heads = prop::sample::select(vec![2usize, 16]);
    let model = (family, 1usize..7, kv_heads, any::<bool>());
    let precision = prop::sample::select(vec![Precision::F32, Precision::Bf16, Precision::Fp8]);
    let comm = prop::sample::select(vec![CpComm::Ring, CpComm::AllGather]);
    let trained = (prop::sample::select(TRAINED.to_vec()), support::dropouts());
    let how = (precision, trained, comm, any::<bool>(), any::<bool>());
    let world_size = prop::sample::select(vec![1usize, 2, 4, 8, 16, 32]);
    (model, how, world_size, any::<prop::sample::Index>(), any::<prop::sample::Index>()).prop_map(
        |(
            (family, n_layers, kv_heads, tied),
            (precision, (trained, dropout), comm, sequence, is_gpu),
            world_size,
            which,
            chosen,
        )| {
            let model = self::model(family, n_layers, kv_heads, tied);
            let has_head = !tied && family != "gpt2";
            let lora = trained.adapters(family, dropout, n_layers, has_head);
            let plain = spec(1, precision, Recompute::None);
            let parallel =
                phalanx_strategies::compile::Parallel { sequence_parallel: sequence, cp_comm: comm, ..plain.parallel };
            let spec = StepSpec { lora, parallel, ..plain };
            let batch = BatchShape { n_rows: 1, seq_len: 2048 };
            let forward = model.forward(batch, Head::Loss).unwrap();
            let chunk = is_gpu.then_some(512);
            let target = Nowhere { half_copies: is_gpu, head_chunk_tokens: chunk, ..Nowhere::default() };
            let workload = Workload::of(&model, &forward, batch, &spec, 32).unwrap().on(&target);
            let hardware = Hardware::named("h100").unwrap();
            let meshes = MeshSizes::all(world_size).into_iter().filter(|m| m.fits(&workload, &hardware).is_ok());
            let meshes: Vec<MeshSizes> = meshes.collect();
            let mesh = *meshes.get(which.index(meshes.len().max(1)))?;
            let all = Candidate::all(mesh, &workload, 4).into_iter().filter(|c| c.fits(&workload).is_ok());
            let all: Vec<Candidate> = all.collect();
            let candidate = *all.get(chosen.index(all.len().max(1)))?;
            Some(Case { model, batch, spec, hardware, workload, candidate, target })
        },
    )
}

impl Case {
    fn bound(&self) -> Bound {
        MeshBound::new(self.candidate.mesh, &self.workload, &self.hardware).of(&self.candidate)
    }

    /// The simulated step of `n` microbatches, and the input bytes of one on the fullest rank.
    fn simulated(&self, n_microbatches: usize) -> (Evaluation, u64) {
        let batch = BatchShape { n_rows: self.candidate.micro_batch_size, ..self.batch };
        let spec = Candidate { n_microbatches, ..self.candidate }.spec(&self.spec);
        let (mut bytes, mut inputs) = (0, 0);
        let all = world(self.candidate.mesh.into(), Ranks::OfEachStage, |mesh_rank: MeshRank| {
            let mut forward = self.model.forward(batch, Head::Loss).unwrap();
            forward.mesh_rank = mesh_rank;
            let compiled = compile_step(forward, &spec, &self.target).unwrap();
            let outside = Overhead::of(&self.hardware, &compiled.program).bytes();
            let own = compiled.layout.total_bytes() as u64 + outside;
            if own > bytes {
                (bytes, inputs) = (own, input_bytes(&compiled.program));
            }
            Ok::<_, WorldError>(trace_on(&self.hardware, &compiled.program))
        });
        let duration = |post: &_, nodes: &[u32]| post_duration(&self.hardware, post, nodes);
        let node = |rank| self.hardware.node(rank);
        let links = Links { mover: self.hardware.mover, node: &node, duration: &duration };
        let timeline = all.unwrap().simulate(&links, false).unwrap();
        let (step, exposed) = (timeline.makespan.as_secs_f64(), timeline.mean_exposed().as_secs_f64());
        (Evaluation { step_seconds: step, memory_bytes: bytes, exposed_seconds: exposed }, inputs)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_compiled_step_beats_the_bound_of_its_candidate(case in any_case()) {
        let Some(case) = case else { return Ok(()) };

        let bound = case.bound();
        let simulated = case.simulated(case.candidate.n_microbatches).0;
        let Evaluation { step_seconds: seconds, memory_bytes: bytes, .. } = simulated;

        // The bound counts parts of a shard that differ in length as equal.
        let slack = 1.0 + 1e-3;
        prop_assert!(bound.step_seconds <= seconds * slack, "{:e} s > {seconds:e} s: {:?}", bound.step_seconds, case.candidate);
        prop_assert!(bound.memory_bytes as f64 <= bytes as f64 * slack, "{} B > {bytes} B: {:?}", bound.memory_bytes, case.candidate);
    }

    // In a full pipeline, every run of microbatches takes the same time.
    #[test]
    fn long_step_is_extrapolated_from_two_short_steps(case in any_case()) {
        let Some(case) = case else { return Ok(()) };
        let Some([a, b]) = case.candidate.samples() else { return Ok(()) };
        let n = case.candidate.n_microbatches;

        let (longer, input_bytes) = case.simulated(b);
        let extrapolated = Evaluation::extrapolated([(a, case.simulated(a).0), (b, longer)], n, input_bytes);
        let whole = case.simulated(n).0;

        let off = extrapolated.step_seconds / whole.step_seconds - 1.0;
        // Zero-bubble schedules with gathers are 1.5 % off in one of some ten thousand cases; 30,000 cases were within this.
        prop_assert!(off.abs() < 0.02, "{off} of {:e} s: {:?}", whole.step_seconds, case.candidate);
        let off = extrapolated.memory_bytes as f64 / whole.memory_bytes as f64 - 1.0;
        // Best fit finds other locations in a longer step.
        prop_assert!(off.abs() < 0.2, "{off} of {} B: {:?}", whole.memory_bytes, case.candidate);
    }
}
