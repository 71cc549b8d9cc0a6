//! The passes before a program is differentiated.

use super::error::CompileError;
use super::spec::StepSpec;
use crate::passes::context_parallel::{exchange_keys, shard_tokens, sum_rows};
use crate::passes::fp8::{fp8, fp8_of_whole_vectors};
use crate::passes::fuse::fuse;
use crate::passes::lora::lora;
use crate::passes::pack::pack;
use crate::passes::precision::{Precision, precision};
use crate::passes::reference::{is_copy, reference};
use crate::passes::tensor_parallel::tensor_parallel;
use crate::program::{Param, Program};
use crate::verify::verify;

pub(super) fn prepare(forward: &mut Program, spec: &StepSpec) -> Result<(), CompileError> {
    verify(forward)?;
    shard_tokens(forward)?;
    // Fusing comes before adapters: the base then computes the same bits as without adapters, and an adapter after a
    // fused product adds directly to the residual stream.
    fuse(forward);
    // Adapters are too small to gain: it comes before them.
    if spec.precision == Precision::Fp8 {
        fp8(forward);
    }
    if let Some(adapters) = &spec.lora {
        lora(forward, adapters)?;
    }
    reference(forward);
    tensor_parallel(forward, spec.parallel.sequence_parallel)?;
    exchange_keys(forward, spec.parallel.cp_comm);
    sum_rows(forward);
    precision(forward, spec.precision);
    // Without adapters, a run exports frozen weights, with all bits that they began with.
    let is_kept = |param: &Param| spec.lora.is_none() && !param.parts.iter().all(|part| is_copy(&part.name));
    pack(forward, spec.lora.as_ref().and_then(|adapters| adapters.packing), spec.precision, is_kept)?;
    fp8_of_whole_vectors(forward);
    Ok(())
}
