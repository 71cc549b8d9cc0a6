//! How a step computes: its precision, its adapters, what it recomputes.

use super::architecture::{Architecture, smallest};
use super::frozen::path_beside_images;
use super::score_head;
use crate::config::JobConfig;
use crate::config::adapter::{Lora, whole};
use crate::config::precision::{Bf16, GradientCheckpointing, Precision as ConfigPrecision};
use crate::error::JobError;
use crate::error::plan::PlanError;
use phalanx_device::Device;
use phalanx_strategies::compile::{Offload, StepSpec};
use phalanx_strategies::model::ModelConfig;
use phalanx_strategies::passes::lora::{LoraSpec, linear_modules};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::Packing;

pub(crate) fn step_spec(config: &JobConfig, model: &Architecture, device: &dyn Device) -> Result<StepSpec, JobError> {
    let o = &config.optimizer;
    let mut lora = config.adapter.lora().map(|lora| lora_spec(&lora, model)).transpose()?;
    if let Some(lora) = lora.as_mut().filter(|_| config.reward.reward_model) {
        // As PEFT does for the task of classification.
        lora.modules_to_save.push(score_head::MODULE.into());
    }
    if let Some(lora) = lora.as_mut().filter(|_| config.precision.bf16 == Bf16::Full) {
        lora.packing = lora.packing.or(Some(Packing::Bf16));
    }
    Ok(StepSpec {
        n_microbatches: config.microbatches_per_rank(),
        precision: precision(config, model, device),
        recompute: match config.precision.gradient_checkpointing {
            GradientCheckpointing::Off => Recompute::None,
            GradientCheckpointing::Selective => Recompute::Selective,
            GradientCheckpointing::Full => Recompute::Full,
        },
        lora,
        optimizer: o.rule,
        max_grad_norm: o.clip_norm(),
        offload: Offload { optimizer: o.offload_optimizer, reference: config.preference.offload_reference },
        parallel: config.parallel.parallel(config.microbatches_per_step()),
    })
}

/// The number format of products.
pub(crate) fn precision(config: &JobConfig, model: &Architecture, device: &dyn Device) -> Precision {
    // `bf16: auto` keeps the precision of a user-defined model.
    match config.precision.precision(device.has_fast_bf16() && model.known().is_some()) {
        ConfigPrecision::F32 => Precision::F32,
        ConfigPrecision::Bf16 => Precision::Bf16,
        ConfigPrecision::Fp8 => Precision::Fp8,
        ConfigPrecision::Fp16 => Precision::F16,
    }
}

fn lora_spec(lora: &Lora<'_>, model: &Architecture) -> Result<LoraSpec, JobError> {
    let mut target_modules = lora.targets.named.to_vec();
    if lora.targets.all_linear {
        target_modules.extend(model.known().map(block_linears).unwrap_or_default());
    }
    if let Some(pattern) = lora.targets.matching {
        target_modules.extend(matching_modules(pattern, model)?);
    }
    Ok(LoraSpec {
        rank: lora.rank,
        alpha: lora.alpha as f32,
        rank_stabilised: lora.section.peft_use_rslora,
        target_modules,
        blocks: lora.section.peft_layers_to_transform.clone(),
        modules_to_save: lora.section.lora_modules_to_save.clone(),
        dropout: lora.section.lora_dropout as f32,
        in_evaluation: false,
        magnitudes: lora.section.peft_use_dora,
        rate_ratio: lora.section.loraplus_lr_ratio,
        packing: lora.section.packing(),
    })
}

/// Paths of the linear layers that a regular expression matches, also if it is written for a model that also reads images.
fn matching_modules(pattern: &str, model: &Architecture) -> Result<Vec<String>, JobError> {
    let regex = whole(pattern).map_err(PlanError::Targets)?;
    let paths = linear_modules(&smallest(model)?);
    let example = paths.first().cloned().unwrap_or_default();
    let mut found = Vec::new();
    for path in paths {
        let matches = |path: &str| regex.is_match(path).map_err(|error| PlanError::Targets(Box::new(error)));
        if matches(&path)? || matches(&path_beside_images(&path))? {
            found.push(path);
        }
    }
    match found.is_empty() {
        false => Ok(found),
        true => Err(PlanError::NoTarget { pattern: pattern.into(), example }.into()),
    }
}

/// Names of the linear layers of a block.
fn block_linears(model: &ModelConfig) -> Vec<String> {
    model.family.linears.iter().map(|name| (*name).to_string()).collect()
}
