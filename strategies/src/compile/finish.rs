//! The passes after a program is whole, and its memory.

use super::compiled::Compiled;
use super::error::CompileError;
use super::spec::StepSpec;
use crate::mesh::MeshRank;
use crate::passes::commit::commit;
use crate::passes::compact::compact;
use crate::passes::fully_sharded::{GROUP as SHARDS, ZeroStage};
use crate::passes::half_copies::half_copies;
use crate::passes::memory::memory;
use crate::passes::offload::offload;
use crate::passes::overlap::overlap;
use crate::passes::pack::unpack;
use crate::passes::split_weights::split_weights;
use crate::program::Program;
use crate::target::Target;
use crate::verify::verify;

pub(super) fn finish(
    mut program: Program,
    messages: usize,
    spec: &StepSpec,
    target: &dyn Target,
) -> Result<Compiled, CompileError> {
    unpack(&mut program, target.widens_operands());
    offload(&mut program, spec.offload);
    if splits(spec, &program.mesh_rank, target) {
        split_weights(&mut program);
    }
    if target.half_copies() {
        half_copies(&mut program);
    }
    overlap(&mut program, messages);
    let phases = commit(&mut program);
    compact(&mut program);
    verify(&program)?;
    let layout = memory(&program, target);
    Ok(Compiled::new(program, layout, phases))
}

/// Whether programs of this kind may have split weights on this rank. Rules with sums over whole tensors read weights in f32, and so
/// do ranks that gather updated weights. A reproducible run has the same bits on every mesh, and some meshes have to convert, which
/// rounds ties to even.
fn splits(spec: &StepSpec, mesh_rank: &MeshRank, target: &dyn Target) -> bool {
    let gathers_updated = spec.parallel.zero_stage == ZeroStage::One && mesh_rank.group_size(SHARDS) > 1;
    let reads_whole = [1, 2].iter().any(|n_dims| !spec.optimizer.sums(*n_dims).is_empty());
    target.split_weights() && spec.parallel.logical_shards.is_none() && !gathers_updated && !reads_whole
}
