use super::*;
use crate::passes::recompute::Recompute;
use crate::pipeline::{ScheduleKind, WorkTimes, timeline};
use crate::plan::bound::MeshBound;
use proptest::prelude::*;

fn mesh(pp: usize, dp_shard: usize, tp: usize) -> MeshSizes {
    MeshSizes { pp, dp_replicate: 1, dp_shard, cp: 1, tp }
}

fn candidate(mesh: MeshSizes, zero: ZeroStage, n_microbatches: usize) -> Candidate {
    let (schedule, recompute) = (ScheduleKind::OneF1B, Recompute::None);
    Candidate { mesh, zero, schedule, recompute, micro_batch_size: 1, n_microbatches }
}

#[test]
fn state_of_a_model_is_sixteen_bytes_a_parameter_until_it_is_sharded() {
    let workload = llama_70b(8);
    let mesh = mesh(1, 8, 1);
    let hardware = Hardware { context_bytes: 0, channels: 0, ..h100() };
    let bounds = MeshBound::new(mesh, &workload, &hardware);
    let n_params = (80 * workload.layer_params + 2 * workload.head_params) as f64;

    let bytes =
        |zero| bounds.of(&Candidate { recompute: Recompute::Full, ..candidate(mesh, zero, 2) }).memory_bytes as f64;

    let logits = 8192.0 * 128_256.0 * 4.0;
    let activations = 80.0 * 8192.0 * 8192.0 * 2.0 + logits;
    // Rajbhandari et al. 2020, figure 1, with 4 + 4 + 8 bytes; here ZeRO-2 shards weights and keeps those of blocks gathered.
    let blocks = 80.0 * workload.layer_params as f64 / n_params;
    let expected = [16.0, 8.0 + 8.0 / 8.0, 4.0 * blocks + 16.0 / 8.0, 16.0 / 8.0];
    let stages = [ZeroStage::Zero0, ZeroStage::Zero1, ZeroStage::Zero2, ZeroStage::Zero3];
    for (zero, per_param) in stages.into_iter().zip(expected) {
        assert!((bytes(zero) - activations - per_param * n_params).abs() < 1e4, "{zero:?}");
    }
}

#[test]
fn bound_on_memory_has_room_for_the_context_and_a_connection_to_peers() {
    let (workload, hardware) = (llama_70b(8), h100());
    let bytes = |mesh, hardware: &Hardware| {
        MeshBound::new(mesh, &workload, hardware).of(&candidate(mesh, ZeroStage::Zero0, 2)).memory_bytes
    };
    let bare = Hardware { context_bytes: 0, channels: 0, ..h100() };

    let outside = [1, 8].map(|n| bytes(mesh(1, n, 1), &hardware) - bytes(mesh(1, n, 1), &bare));

    assert_eq!(outside, [1_060_000_000, 1_060_000_000 + 32 * (14 << 20)]);
}

#[test]
fn recomputation_trades_time_for_memory() {
    let (workload, hardware, mesh) = (llama_70b(64), h100(), mesh(8, 1, 8));
    let bounds = MeshBound::new(mesh, &workload, &hardware);

    let of = |recompute| bounds.of(&Candidate { recompute, ..candidate(mesh, ZeroStage::Zero0, 64) });
    let [none, selective, full] = [Recompute::None, Recompute::Selective, Recompute::Full].map(of);

    assert!(none.step_seconds < selective.step_seconds && selective.step_seconds < full.step_seconds);
    assert!(none.memory_bytes > selective.memory_bytes && selective.memory_bytes > full.memory_bytes);
}

// Hu et al. 2021, LoRA, §4.2 (arXiv:2106.09685): no gradients and no optimizer state for what is frozen.
#[test]
fn frozen_parameters_need_neither_gradients_nor_moments() {
    let (whole, hardware, mesh) = (llama_70b(8), h100(), mesh(1, 8, 1));
    let adapters = Workload { trainable_params: 1_000_000, ..whole };

    let [whole, adapters] =
        [whole, adapters].map(|w| MeshBound::new(mesh, &w, &hardware).of(&candidate(mesh, ZeroStage::Zero1, 2)));

    let n_params = llama_70b(8).n_params() as f64;
    let saved = (whole.memory_bytes - adapters.memory_bytes) as f64;
    // One block of eighty may also keep less, since nothing is kept for operations before the first adapter.
    assert!((1.0..1.01).contains(&(saved / (n_params * (4.0 + 8.0 / 8.0)))), "{saved}");
    assert!(adapters.step_seconds < 0.8 * whole.step_seconds);
}

// 6 operations a parameter and token, and attention: nothing is faster than its arithmetic.
#[test]
fn step_takes_at_least_its_arithmetic() {
    let (workload, hardware) = (llama_70b(512), h100());
    let mesh = mesh(4, 16, 8);
    let bound = MeshBound::new(mesh, &workload, &hardware).of(&candidate(mesh, ZeroStage::Zero1, 32));
    let flops = 6.0 * 69.5e9 * 512.0 * 8192.0 / 512.0;

    assert!(bound.step_seconds > flops / (989e12 * 0.8));
    assert!(bound.step_seconds < 2.5 * flops / (989e12 * 0.8), "{}", bound.step_seconds);
}

proptest! {
    // Equal stages without a head: the pipeline alone, simulated, takes no less than the bound.
    #[test]
    fn no_simulated_pipeline_beats_its_bound(
        pp in 1usize..9, per_stage in 1usize..4, m in 1usize..40, chunks in 1usize..4, kind in 0usize..4,
    ) {
        let schedule = [
            ScheduleKind::GPipe, ScheduleKind::OneF1B, ScheduleKind::ZeroBubble, ScheduleKind::Interleaved { chunks },
        ][kind];
        let n_layers = pp * per_stage * schedule.n_chunks();
        let blocks = Workload { n_layers, vocab_size: 0, embedding_params: 0, head_params: 0, ..llama_70b(m) };
        let workload = Workload { trainable_params: blocks.n_params(), ..blocks };
        let (hardware, mesh) = (h100(), mesh(pp, 1, 1));
        let candidate = Candidate { schedule, ..candidate(mesh, ZeroStage::Zero0, m) };
        prop_assume!(candidate.fits(&workload).is_ok());
        let tokens = 8192.0;
        let rate = 989e12 * 0.76;
        let products = 2.0 * workload.layer_params as f64 * tokens / rate;
        let attention = 4.0 * tokens * 4096.5 * 8192.0 / (989e12 * 0.37);
        let layers = (n_layers / pp) as f64;
        let times = WorkTimes {
            forward: layers * (products + attention),
            backward_input: layers * (products + 2.5 * attention),
            backward_weight: layers * products,
            transfer: 0.0,
        };

        let simulated = timeline(schedule, pp, m, &times).makespan();

        let bound = MeshBound::new(mesh, &workload, &hardware).of(&candidate).step_seconds;
        let optimizer = (n_layers / pp * workload.layer_params) as f64 * 28.0 / (3350e9 * 0.85);
        prop_assert!(bound <= (simulated + optimizer) * (1.0 + 1e-9), "{} > {} + {}", bound, simulated, optimizer);
        prop_assert!(bound >= 0.7 * (simulated + optimizer), "{} is far below {} + {}", bound, simulated, optimizer);
    }
}
