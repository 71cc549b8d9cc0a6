//! Torchtitan's TOML configuration. Keys that a file leaves out have torchtitan's defaults, not those of Phalanx.

use serde_yaml_ng::{Mapping, Value};

use super::convert::Then::{Do, Key, LeftOut, NoEffect, Only, Part};
use super::convert::{Converted, Rule, at, convert};
use super::shown;

const NO_MODEL: &str = "set `base_model` to a Hugging Face directory, or describe the model under `model`";
const NO_DATA: &str = "name local files under `datasets`";
const STAGES: &str = "blocks are divided evenly between the stages";
const NO_QUANTIZATION: &str = "weights and products are f32, bf16 or fp16";

const RULES: &[Rule] = &[
    ("job.dump_folder", Key("output_dir")),
    ("job.*", NoEffect),
    ("model.hf_assets_path", Key("tokenizer")),
    ("model.tokenizer_path", Key("tokenizer")),
    ("model.name", LeftOut(NO_MODEL)),
    ("model.flavor", Part),
    ("model.converters", LeftOut(NO_QUANTIZATION)),
    ("model.print_after_conversion", NoEffect),
    ("optimizer.name", Do(optimizer)),
    ("optimizer.lr", Key("learning_rate")),
    ("optimizer.eps", Key("adam_epsilon")),
    ("optimizer.beta1", Key("adam_beta1")),
    ("optimizer.beta2", Key("adam_beta2")),
    ("optimizer.weight_decay", Key("weight_decay")),
    ("optimizer.implementation", NoEffect),
    ("optimizer.fused", NoEffect),
    ("optimizer.foreach", NoEffect),
    ("optimizer.early_step_in_backward", NoEffect),
    ("lr_scheduler.warmup_steps", Key("warmup_steps")),
    ("lr_scheduler.decay_ratio", Part),
    ("lr_scheduler.decay_type", Part),
    ("lr_scheduler.min_lr_factor", Part),
    ("lr_scheduler.lr_min", Part),
    ("training.dataset", LeftOut(NO_DATA)),
    ("training.dataset_path", LeftOut(NO_DATA)),
    ("training.local_batch_size", Key("micro_batch_size")),
    ("training.global_batch_size", Do(global_batch_size)),
    ("training.seq_len", Key("sequence_len")),
    ("training.max_norm", Key("max_grad_norm")),
    ("training.steps", Key("max_steps")),
    ("training.enable_cpu_offload", Do(cpu_offload)),
    ("training.mixed_precision_param", Part),
    ("training.seed", Key("seed")),
    ("training.dtype", Only("float32", "weights and their optimizer state are f32")),
    ("training.mixed_precision_reduce", Only("float32", "gradients are summed in f32")),
    ("training.gc_freq", NoEffect),
    ("training.gc_debug", NoEffect),
    ("training.debug_moe_force_load_balance", NoEffect),
    // Names of versions up to 0.1.
    ("training.batch_size", Key("micro_batch_size")),
    ("training.warmup_steps", Key("warmup_steps")),
    ("training.data_parallel_replicate_degree", Key("dp_replicate_size")),
    ("training.data_parallel_shard_degree", Do(shard_degree)),
    ("training.data_parallel_degree", Do(shard_degree)),
    ("training.tensor_parallel_degree", Do(tensor_parallel)),
    ("training.fsdp_reshard_after_forward", Do(reshard)),
    ("training.deterministic", Do(deterministic)),
    ("training.enable_loss_parallel", NoEffect),
    ("training.disable_loss_parallel", NoEffect),
    ("training.compile", NoEffect),
    ("experimental.context_parallel_degree", Key("context_parallel_size")),
    ("experimental.context_parallel_rotate_method", Do(rotate_method)),
    ("experimental.pipeline_parallel_degree", Key("pipeline_parallel_size")),
    ("experimental.pipeline_parallel_schedule", Do(pipeline_schedule)),
    ("parallelism.data_parallel_replicate_degree", Key("dp_replicate_size")),
    ("parallelism.data_parallel_shard_degree", Do(shard_degree)),
    ("parallelism.fsdp_reshard_after_forward", Do(reshard)),
    ("parallelism.tensor_parallel_degree", Do(tensor_parallel)),
    ("parallelism.context_parallel_degree", Key("context_parallel_size")),
    ("parallelism.context_parallel_rotate_method", Do(rotate_method)),
    ("parallelism.pipeline_parallel_degree", Key("pipeline_parallel_size")),
    ("parallelism.pipeline_parallel_schedule", Do(pipeline_schedule)),
    ("parallelism.expert_parallel_degree", NoEffect),
    ("parallelism.expert_tensor_parallel_degree", NoEffect),
    ("parallelism.disable_loss_parallel", NoEffect),
    ("parallelism.enable_async_tensor_parallel", NoEffect),
    ("parallelism.enable_compiled_autograd", NoEffect),
    ("parallelism.expert_parallel_comm_backend", NoEffect),
    ("parallelism.module_fqns_per_model_part", LeftOut(STAGES)),
    ("parallelism.pipeline_parallel_split_points", LeftOut(STAGES)),
    ("parallelism.pipeline_parallel_layers_per_stage", LeftOut(STAGES)),
    ("parallelism.pipeline_parallel_first_stage_less_layers", NoEffect),
    ("parallelism.pipeline_parallel_last_stage_less_layers", NoEffect),
    ("parallelism.pipeline_parallel_microbatch_size", Part),
    ("parallelism.pipeline_parallel_schedule_csv", LeftOut("set `pipeline_schedule`")),
    ("checkpoint.enable", Part),
    ("checkpoint.interval", Part),
    ("checkpoint.keep_latest_k", Do(keep_latest)),
    (
        "checkpoint.initial_load_path",
        LeftOut("set `base_model`, or `resume_from_checkpoint` to a checkpoint of Phalanx"),
    ),
    ("checkpoint.*", NoEffect),
    ("activation_checkpoint.mode", Part),
    ("activation_checkpoint.*", NoEffect),
    ("metrics.log_freq", Key("logging_steps")),
    ("metrics.*", NoEffect),
    ("profiling.enable_profiling", LeftOut("set `trace` to a file for a trace of the third step")),
    ("profiling.*", Part),
    ("compile.*", NoEffect),
    ("comm.*", NoEffect),
    ("memory_estimation.*", NoEffect),
    ("debug.seed", Key("seed")),
    ("debug.deterministic", Do(deterministic)),
    ("debug.*", NoEffect),
    ("validation.enable", LeftOut("set `val_set_size` to hold out samples")),
    ("validation.*", Part),
    ("quantize.linear.float8.recipe_name", LeftOut(NO_QUANTIZATION)),
    ("quantize.*", Part),
    ("float8.*", Part),
    ("mx.*", Part),
    ("fault_tolerance.enable", LeftOut("ranks are replaced as `elastic` says")),
    ("fault_tolerance.*", Part),
    ("experimental.custom_import", LeftOut("there are no imports of Python code")),
    ("experimental.*", Part),
];

/// What a configuration of torchtitan says, in keys of Phalanx.
pub(super) fn converted(file: &Mapping) -> Converted {
    let mut converted = Converted::default();
    let defaults: [(&str, Value); 10] = [
        ("adam_beta1", 0.9.into()),
        ("adam_beta2", 0.95.into()),
        ("weight_decay", 0.1.into()),
        ("learning_rate", 8e-4.into()),
        ("warmup_steps", 200u64.into()),
        ("micro_batch_size", 8u64.into()),
        ("sequence_len", 2048u64.into()),
        ("max_steps", 10_000u64.into()),
        ("dp_shard_size", "auto".into()),
        ("sample_packing", true.into()),
    ];
    defaults.into_iter().for_each(|(key, value)| converted.set(key, value));
    precision(file, &mut converted);
    recomputation(file, &mut converted);
    checkpoints(file, &mut converted);
    schedule(file, &mut converted);
    converted.add("", convert(RULES, file));
    converted
}

fn precision(file: &Mapping, to: &mut Converted) {
    let format = at(file, "training.mixed_precision_param").map_or("bfloat16".into(), shown);
    to.set("bf16", format == "bfloat16");
}

fn recomputation(file: &Mapping, to: &mut Converted) {
    match at(file, "activation_checkpoint.mode").map_or("selective".into(), shown).as_str() {
        "none" => to.set("gradient_checkpointing", false),
        "full" => to.set("gradient_checkpointing", true),
        "selective" => to.set("gradient_checkpointing", "selective"),
        other => to.leave_out("activation_checkpoint.mode", format!("it is {other}; set `gradient_checkpointing`")),
    }
}

/// Torchtitan saves only if told to.
fn checkpoints(file: &Mapping, to: &mut Converted) {
    if at(file, "checkpoint.enable").and_then(Value::as_bool) == Some(true) {
        to.set("save_steps", at(file, "checkpoint.interval").cloned().unwrap_or(500u64.into()));
    } else {
        to.set("save_steps", "none");
    }
}

/// Without a decay ratio, the rate decays from the end of the warm-up.
fn schedule(file: &Mapping, to: &mut Converted) {
    let kind = at(file, "lr_scheduler.decay_type").map_or("linear".into(), shown);
    // It was called lr_min before.
    let lowest = ["min_lr_factor", "lr_min"].iter().find_map(|key| at(file, &format!("lr_scheduler.{key}")));
    let lowest = lowest.and_then(Value::as_f64).filter(|x| *x > 0.0);
    match (kind.as_str(), at(file, "lr_scheduler.decay_ratio")) {
        ("linear", Some(ratio)) => {
            to.set("lr_scheduler", "wsd");
            to.set("decay_ratio", ratio.clone());
        }
        ("linear", None) => to.set("lr_scheduler", "linear"),
        ("cosine", ratio) => {
            to.set("lr_scheduler", "cosine");
            lowest.into_iter().for_each(|lowest| to.set("cosine_min_lr_ratio", lowest));
            if ratio.is_some() {
                to.leave_out("lr_scheduler.decay_ratio", "a cosine decays from the end of the warm-up");
            }
        }
        (other, _) => to.leave_out("lr_scheduler.decay_type", format!("it is {other}; set `lr_scheduler`")),
    }
    if lowest.is_some() && kind != "cosine" {
        to.leave_out("lr_scheduler.min_lr_factor", "only a cosine has a lowest rate above 0");
    }
}

fn optimizer(value: &Value, _: &Mapping, to: &mut Converted) {
    match shown(value).as_str() {
        "AdamW" => to.set("optimizer", "adamw"),
        other => to.leave_out("optimizer.name", format!("it is {other}; set `optimizer`")),
    }
}

fn global_batch_size(value: &Value, file: &Mapping, to: &mut Converted) {
    let local = at(file, "training.local_batch_size").map_or(Some(8), Value::as_u64).filter(|n| *n > 0);
    match (value.as_i64(), value.as_u64(), local) {
        (Some(-1), ..) => {}
        (_, Some(batch), Some(local)) if batch > 0 && batch.is_multiple_of(local) => {
            to.set("microbatches_per_step", batch / local);
        }
        _ => to.leave_out(
            "training.global_batch_size",
            "it is no multiple of the local batch; set `microbatches_per_step`",
        ),
    }
}

fn cpu_offload(value: &Value, _: &Mapping, to: &mut Converted) {
    if value.as_bool() == Some(true) {
        to.set("offload_optimizer", true);
        to.no_effect.push("training.enable_cpu_offload of weights (they stay in device memory)".into());
    }
}

/// -1 stands for the ranks that the other axes leave.
fn shard_degree(value: &Value, _: &Mapping, to: &mut Converted) {
    to.set("dp_shard_size", if value.as_i64() == Some(-1) { "auto".into() } else { value.clone() });
}

fn reshard(value: &Value, _: &Mapping, to: &mut Converted) {
    to.set("zero_stage", if shown(value) == "never" { 2u64 } else { 3 });
}

/// Torchtitan shares the tokens between matrix products too.
fn tensor_parallel(value: &Value, _: &Mapping, to: &mut Converted) {
    to.set("tensor_parallel_size", value.clone());
    if value.as_u64().is_some_and(|n| n > 1) {
        to.set("sequence_parallel", true);
    }
}

fn rotate_method(value: &Value, _: &Mapping, to: &mut Converted) {
    to.set("cp_comm_strategy", if shown(value) == "allgather" { "allgather" } else { "ring" });
}

fn pipeline_schedule(value: &Value, file: &Mapping, to: &mut Converted) {
    let degree =
        ["parallelism", "experimental"].iter().find_map(|s| at(file, &format!("{s}.pipeline_parallel_degree")));
    if degree.and_then(Value::as_u64).unwrap_or(1) == 1 {
        return to.no_effect.push("parallelism.pipeline_parallel_schedule".into());
    }
    match shown(value).as_str() {
        known @ ("1F1B" | "GPipe" | "Interleaved1F1B") => to.set("pipeline_schedule", known),
        "ZBVZeroBubble" | "InterleavedZeroBubble" => to.set("pipeline_schedule", "zero_bubble"),
        other => {
            to.leave_out("parallelism.pipeline_parallel_schedule", format!("it is {other}; set `pipeline_schedule`"))
        }
    }
}

/// 0 keeps all.
fn keep_latest(value: &Value, _: &Mapping, to: &mut Converted) {
    match value.as_u64() {
        Some(0) => to.set("save_total_limit", "none"),
        _ => to.set("save_total_limit", value.clone()),
    }
}

fn deterministic(value: &Value, _: &Mapping, to: &mut Converted) {
    if value.as_bool() == Some(true) {
        to.no_effect.push("debug.deterministic (a run with the same seed and ranks has the same bits)".into());
    }
}
