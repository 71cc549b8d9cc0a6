//! Training steps of a small model on one rank, for tests of the machine.

use crate::gpu::Gpu;
use crate::kernels::Kernels;
use crate::lower::{ALIGN_BYTES, scratch_bytes};
use crate::machine::CudaMachine;
use crate::product::Products;
use crate::ring::GpuMemory;
use crate::shared::Shared;
use phalanx_device::groups::Groups;
use phalanx_device::{ExecError, Machine, Run, Timings};
use phalanx_strategies::compile::{Compiled, Offload, Parallel, StepSpec, compile_step};
use phalanx_strategies::mesh::MeshRank;
use phalanx_strategies::model::{
    BatchShape, Family, Head, ModelConfig, Multipliers, NormPlacement, Output, QkNorm, RopeScaling,
};
use phalanx_strategies::optimizer::{AdamW, OptimizerSpec};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::{Column, Hyper, Instr, Kind, Program, Role, ValueId};
use phalanx_strategies::target::Target;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// The compiler's view of the CUDA machine.
struct Cuda {
    split_weights: bool,
}

impl Target for Cuda {
    fn scratch_bytes(&self, program: &Program, instr: &Instr) -> usize {
        scratch_bytes(program, instr, false)
    }

    fn align(&self) -> usize {
        ALIGN_BYTES
    }

    fn half_copies(&self) -> bool {
        true
    }

    fn split_weights(&self) -> bool {
        self.split_weights
    }
}

/// Llama 3.2 1B.
pub fn llama_1b() -> ModelConfig {
    ModelConfig {
        family: Family::named("llama").expect("a supported family"),
        vocab_size: 128_256,
        hidden_size: 2048,
        intermediate_size: 8192,
        n_layers: 16,
        n_heads: 32,
        n_kv_heads: 8,
        head_dim: 64,
        max_positions: 8192,
        norm_eps: 1e-5,
        rope_theta: 500_000.0,
        rope_scaling: RopeScaling::None,
        tie_embeddings: true,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        output: Output::Logits,
        multipliers: Multipliers::default(),
        norm_placement: NormPlacement::Before,
        qk_norm: QkNorm::None,
        packed_projections: false,
        windows: vec![None; 16],
        init_std: 0.02,
    }
}

const BATCH: BatchShape = BatchShape { n_rows: 2, seq_len: 24 };

/// A Llama of two small blocks.
fn small_llama() -> ModelConfig {
    ModelConfig {
        vocab_size: 131,
        hidden_size: 64,
        intermediate_size: 88,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 16,
        max_positions: 64,
        windows: vec![None; 2],
        ..llama_1b()
    }
}

/// The step of a model on one rank of a mesh.
pub fn compiled(
    model: &ModelConfig,
    batch: BatchShape,
    mesh_rank: MeshRank,
    precision: Precision,
    optimizer: OptimizerSpec,
) -> Compiled {
    compiled_for(&Cuda { split_weights: true }, model, batch, mesh_rank, precision, optimizer)
}

fn compiled_for(
    target: &Cuda,
    model: &ModelConfig,
    batch: BatchShape,
    mesh_rank: MeshRank,
    precision: Precision,
    optimizer: OptimizerSpec,
) -> Compiled {
    let spec = StepSpec {
        n_microbatches: 1,
        precision,
        recompute: Recompute::None,
        lora: None,
        optimizer,
        max_grad_norm: Some(1.0),
        offload: Offload::default(),
        parallel: Parallel::default(),
    };
    let mut forward = model.forward(batch, Head::Loss).unwrap();
    forward.mesh_rank = mesh_rank;
    compile_step(forward, &spec, target).unwrap()
}

/// A rank that trains the small model.
pub struct Trainer {
    pub c: Compiled,
    pub machine: CudaMachine,
    optimizer: OptimizerSpec,
}

impl Trainer {
    /// A rank with the first weights.
    pub fn new(gpu: &Arc<Gpu>, mesh_rank: MeshRank, graphs: bool) -> Trainer {
        Trainer::in_memory(&Arc::new(GpuMemory::new(gpu.clone())), mesh_rank, graphs)
    }

    /// As [`Trainer::new`], in this memory.
    pub fn in_memory(memory: &Arc<GpuMemory>, mesh_rank: MeshRank, graphs: bool) -> Trainer {
        Trainer::zeroed(memory, mesh_rank, graphs).with_first_weights()
    }

    /// A rank alone with the first weights, in bf16.
    pub fn in_bf16(gpu: &Arc<Gpu>, split_weights: bool) -> Trainer {
        let optimizer = OptimizerSpec::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
        let (target, mesh_rank) = (Cuda { split_weights }, MeshRank::default());
        let c = compiled_for(&target, &small_llama(), BATCH, mesh_rank, Precision::Bf16, optimizer);
        let shared = shared(&Arc::new(GpuMemory::new(gpu.clone())));
        let machine = CudaMachine::new(&shared, &[&c], BTreeMap::new(), true).unwrap();
        Trainer { c, machine, optimizer }.with_first_weights()
    }

    /// The same rank with the first weights.
    pub fn with_first_weights(mut self) -> Trainer {
        let Trainer { c, machine, .. } = &mut self;
        for (i, value) in c.program.values.iter().enumerate() {
            let (v, n) = (ValueId(i as u32), value.n_elements());
            let elements = match value.kind {
                Kind::Constant => small_llama().constant(&value.name, &value.shape).unwrap(),
                Kind::Parameter => (0..n).map(|j| ((i * 37 + j * 101) % 211) as f32 / 1055.0 - 0.1).collect(),
                _ => continue,
            };
            write(machine, c, v, &elements);
        }
        self
    }

    /// A rank whose state was never written.
    pub fn zeroed(memory: &Arc<GpuMemory>, mesh_rank: MeshRank, graphs: bool) -> Trainer {
        Trainer::of(&shared(memory), mesh_rank, graphs)
    }

    /// The same, with what others have loaded.
    pub fn of(shared: &Arc<Shared>, mesh_rank: MeshRank, graphs: bool) -> Trainer {
        let (c, optimizer) = program(mesh_rank);
        let machine = CudaMachine::new(shared, &[&c], BTreeMap::new(), graphs).unwrap();
        Trainer { c, machine, optimizer }
    }

    /// Writes the inputs of a step and runs its first phase; returns the loss.
    pub fn compute(&mut self, groups: &mut Groups, step: u64, timings: Option<&mut Timings>) -> Result<f64, ExecError> {
        let Trainer { c, machine, .. } = self;
        let mut hyper = [0.0; Hyper::LEN];
        hyper[Hyper::LEARNING_RATE] = 1e-3;
        let of_rule = self.optimizer.scalars(step);
        hyper[Hyper::RULE..][..of_rule.len()].copy_from_slice(&of_rule);
        (hyper[Hyper::LOSS_GRAD_SCALE], hyper[Hyper::LOSS_SCALE]) = (1.0 / 48.0, 1.0);
        write(machine, c, c.program.bound(Role::Hyper).next().unwrap(), &hyper);
        for column in [Column::Ids, Column::Labels, Column::Positions, Column::DocStart] {
            for v in c.program.bound(Role::Column(column)) {
                let token = |i: usize| match column {
                    Column::Positions => i as i32 % 24,
                    Column::DocStart => 0,
                    _ => ((i as u64 * 29 + step * 13) % 131) as i32,
                };
                write(machine, c, v, &(0..c.program.value(v).n_elements()).map(token).collect::<Vec<i32>>());
            }
        }
        machine.run(c, c.phases.compute(), &mut Run { groups, models: &mut [], timings })?;
        machine.settle()?;
        Ok((machine as &dyn Machine).first(c, c.program.bound(Role::LossSum).next().unwrap()))
    }

    /// Runs the other phases.
    pub fn update(&mut self, groups: &mut Groups) -> Result<(), ExecError> {
        let Trainer { c, machine, .. } = self;
        machine.run(c, c.phases.apply(), &mut Run::with(groups))?;
        machine.run(c, c.phases.gather(), &mut Run::with(groups))
    }

    /// The bits of all weights.
    pub fn weights(&self) -> Vec<Vec<u32>> {
        let machine: &dyn Machine = &self.machine;
        let params = self.c.program.params.iter();
        params.map(|p| machine.read::<f32>(&self.c, p.value).into_iter().map(f32::to_bits).collect()).collect()
    }
}

/// The step of the small model, in f32.
pub fn program(mesh_rank: MeshRank) -> (Compiled, OptimizerSpec) {
    let optimizer = OptimizerSpec::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
    (compiled(&small_llama(), BATCH, mesh_rank, Precision::F32, optimizer), optimizer)
}

/// A GPU on which nothing is loaded yet.
pub fn shared(memory: &Arc<GpuMemory>) -> Arc<Shared> {
    let (gpu, memory) = (memory.gpu.clone(), memory.clone());
    gpu.bind().unwrap();
    let (kernels, products) = (Kernels::new(None), Products::open(&gpu, None).unwrap());
    Arc::new(Shared { gpu, memory, kernels, products, launches_early: false, cudnn: None, nccl: OnceLock::new() })
}

fn write<T: bytemuck::Pod>(machine: &mut CudaMachine, c: &Compiled, v: ValueId, elements: &[T]) {
    (machine as &mut dyn Machine).write(c, v, 0, elements);
}
