//! The kernels of whole training steps, as their programs lower to them.

use crate::launches;
use phalanx_cuda::work::{KernelLaunch, work_of};
use phalanx_gpu::step;
use phalanx_strategies::compile::{StepSpec, compile_step};
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, Head, ModelConfig};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::program::{Instr, Program};
use phalanx_strategies::target::Target;

/// Head widths, and heads of a model.
const HEADS: [(usize, usize); 6] = [(64, 12), (64, 32), (80, 32), (96, 32), (128, 32), (128, 64)];

/// A GPU, for programs that do not run on one.
pub struct Gpu;

impl Target for Gpu {
    fn scratch_bytes(&self, program: &Program, instr: &Instr) -> usize {
        let scratch = work_of(program, instr, |v| (u64::from(v.0) + 1) << 40, 0).scratch;
        scratch.last().map_or(0, |(at, bytes)| *at as usize + bytes.next_multiple_of(256))
    }

    fn half_copies(&self) -> bool {
        true
    }

    fn split_weights(&self) -> bool {
        true
    }
}

/// All launches of steps of every kind of model at usual widths in every precision, on one rank and on one of two
/// context-parallel ranks.
pub fn launches_of_steps() -> impl Iterator<Item = KernelLaunch> {
    let cases = step::all().into_iter().flat_map(|case| HEADS.map(|heads| (case.clone(), heads)));
    let precisions = [Precision::F32, Precision::Bf16, Precision::Fp8, Precision::F16];
    let cases = cases.flat_map(move |(case, heads)| precisions.map(|precision| (case.clone(), heads, precision)));
    let cases = cases.flat_map(|(case, heads, precision)| [1, 2].map(|cp| (case.clone(), heads, precision, cp)));
    cases.flat_map(|(case, (head_dim, n_heads), precision, cp)| {
        let is_grouped = case.model.n_kv_heads < case.model.n_heads;
        let model = ModelConfig {
            head_dim,
            n_heads,
            n_kv_heads: if is_grouped { n_heads / 4 } else { n_heads },
            hidden_size: head_dim * n_heads,
            intermediate_size: 4 * head_dim * n_heads,
            vocab_size: 50_257,
            max_positions: 1024,
            ..case.model
        };
        let mut forward = model.forward(BatchShape { n_rows: 2, seq_len: 1024 }, Head::Loss).expect("a valid model");
        forward.mesh_rank = MeshRank { mesh: Mesh { cp, ..Mesh::ONE }, rank: cp - 1 };
        let compiled = compile_step(forward, &StepSpec { precision, ..case.spec }, &Gpu);
        let program = compiled.unwrap_or_else(|e| panic!("{} on {cp} ranks: {e}", case.name)).program;
        program.instrs.iter().flat_map(|instr| launches(&program, instr)).collect::<Vec<KernelLaunch>>()
    })
}
