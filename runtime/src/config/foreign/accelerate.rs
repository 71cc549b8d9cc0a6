//! Accelerate's YAML configuration: how many processes there are, and how they share the work.

use std::path::Path;

use serde_yaml_ng::{Mapping, Value};

use super::convert::Then::{Do, Key, LeftOut, NoEffect, Part};
use super::convert::{Converted, Rule, at, convert};
use super::{ReadFile, deepspeed, fsdp, shown};

/// Keys by which a YAML file is known as Accelerate's.
const MARKS: [&str; 5] =
    ["distributed_type", "compute_environment", "num_processes", "mixed_precision", "num_machines"];

const RULES: &[Rule] = &[
    ("distributed_type", Do(distributed_type)),
    ("mixed_precision", Do(mixed_precision)),
    ("num_processes", Do(ranks)),
    ("num_machines", Key("nnodes")),
    ("use_cpu", Do(use_cpu)),
    ("gradient_accumulation_steps", Key("gradient_accumulation_steps")),
    ("parallelism_config.parallelism_config_dp_replicate_size", Key("dp_replicate_size")),
    ("parallelism_config.parallelism_config_dp_shard_size", Key("dp_shard_size")),
    ("parallelism_config.parallelism_config_tp_size", Key("tensor_parallel_size")),
    ("parallelism_config.parallelism_config_cp_size", Key("context_parallel_size")),
    ("parallelism_config.parallelism_config_cp_comm_strategy", Do(cp_comm_strategy)),
    ("parallelism_config.parallelism_config_sp_size", LeftOut("set `context_parallel_size` to divide sequences")),
    ("parallelism_config.*", Part),
    ("fsdp_config.*", Part),
    ("deepspeed_config.*", Part),
    ("gpu_ids", LeftOut("set CUDA_VISIBLE_DEVICES to choose GPUs")),
    ("fp8_config.*", LeftOut("there is one recipe: scales of rows, of the current step")),
    ("megatron_lm_config.*", LeftOut("set `tensor_parallel_size` and `pipeline_parallel_size`")),
    ("ipex_config.*", LeftOut("it is for hardware that Phalanx does not use")),
    ("tpu_name", LeftOut("it is for hardware that Phalanx does not use")),
    ("tpu_zone", LeftOut("it is for hardware that Phalanx does not use")),
    ("tpu_env", NoEffect),
    ("tpu_use_cluster", NoEffect),
    ("tpu_use_sudo", NoEffect),
    ("commands", NoEffect),
    ("command_file", NoEffect),
    ("downcast_bf16", NoEffect),
    ("dynamo_config.*", NoEffect),
    ("dynamo_backend", NoEffect),
    ("mpirun_config.*", NoEffect),
    ("machine_rank", NoEffect),
    ("main_process_ip", NoEffect),
    ("main_process_port", NoEffect),
    ("main_training_function", NoEffect),
    ("rdzv_backend", NoEffect),
    ("rdzv_conf.*", NoEffect),
    ("same_network", NoEffect),
    ("compute_environment", NoEffect),
    ("enable_cpu_affinity", NoEffect),
    ("debug", NoEffect),
];

/// The keys of the section `deepspeed_config`, if there is no file of DeepSpeed.
const DEEPSPEED_RULES: &[Rule] = &[
    ("zero_stage", Do(zero_stage)),
    ("offload_optimizer_device", Do(deepspeed::offload_optimizer)),
    ("offload_param_device", Do(deepspeed::offload_param)),
    ("gradient_accumulation_steps", Key("gradient_accumulation_steps")),
    ("gradient_clipping", Key("max_grad_norm")),
    ("deepspeed_config_file", Part),
    ("zero3_init_flag", NoEffect),
    ("zero3_save_16bit_model", NoEffect),
    ("deepspeed_hostfile", NoEffect),
    ("deepspeed_multinode_launcher", NoEffect),
    ("deepspeed_exclusion_filter", LeftOut("name the machines when starting the job")),
    ("deepspeed_inclusion_filter", LeftOut("name the machines when starting the job")),
    ("deepspeed_moe_layer_cls_names", LeftOut("models have no experts")),
    ("offload_optimizer_nvme_path", NoEffect),
    ("offload_param_nvme_path", NoEffect),
];

/// Whether the keys are those of Accelerate.
pub(super) fn is_accelerate(file: &Mapping) -> bool {
    MARKS.iter().any(|key| file.contains_key(*key))
}

/// What a configuration of Accelerate says, in keys of Phalanx.
pub(super) fn converted(file: &Mapping, read: &ReadFile<'_>) -> Converted {
    let mut converted = Converted::default();
    let section = |name: &str| file.get(name).and_then(Value::as_mapping);
    match at(file, "distributed_type").map(shown).as_deref() {
        Some("FSDP") => {
            converted.add("fsdp_config", fsdp::converted(section("fsdp_config").unwrap_or(&Mapping::new())))
        }
        Some("DEEPSPEED") => {
            converted
                .add("deepspeed_config", of_deepspeed(section("deepspeed_config").unwrap_or(&Mapping::new()), read));
        }
        _ => {}
    }
    // Sizes of axes go before what follows from the kind of distribution.
    converted.add("", convert(RULES, file));
    converted
}

fn of_deepspeed(section: &Mapping, read: &ReadFile<'_>) -> Converted {
    let mut converted = convert(DEEPSPEED_RULES, section);
    if let Some(path) = at(section, "deepspeed_config_file").map(shown) {
        match deepspeed::of_file(Path::new(&path), read) {
            Ok(of_file) => converted.add("", of_file),
            Err(why) => converted.leave_out("deepspeed_config_file", why),
        }
    }
    converted
}

fn zero_stage(value: &Value, _: &Mapping, to: &mut Converted) {
    deepspeed::stage(value, &Mapping::new(), to);
}

fn distributed_type(value: &Value, file: &Mapping, to: &mut Converted) {
    let kind = shown(value);
    let has_axes = file.contains_key("parallelism_config");
    match (kind.as_str(), at(file, "num_processes")) {
        // YAML 1.1 reads a plain NO as false.
        ("NO" | "false" | "FSDP" | "DEEPSPEED", _) => {}
        (kind, Some(n)) if kind.starts_with("MULTI_") => {
            if !has_axes {
                to.set("dp_replicate_size", n.clone());
            }
        }
        (kind, None) if kind.starts_with("MULTI_") => {
            to.leave_out(
                "distributed_type",
                "without `num_processes`, the number of copies is unknown; set `dp_replicate_size`",
            );
        }
        _ => to.leave_out(
            "distributed_type",
            format!("there is no {kind}; set the sizes of the axes, such as `dp_shard_size`"),
        ),
    }
}

fn mixed_precision(value: &Value, _: &Mapping, to: &mut Converted) {
    match shown(value).as_str() {
        "no" | "false" => to.set("bf16", false),
        "bf16" => to.set("bf16", true),
        "fp16" => to.set("fp16", true),
        "fp8" => {
            to.set("bf16", true);
            to.set("fp8", true);
        }
        other => to.leave_out("mixed_precision", format!("there is no {other}; set `bf16: true`")),
    }
}

/// Accelerate counts the processes of all machines.
fn ranks(value: &Value, file: &Mapping, to: &mut Converted) {
    let n_machines = at(file, "num_machines").map_or(Some(1), Value::as_u64).filter(|n| *n > 0);
    match (value.as_u64(), n_machines) {
        (Some(n), Some(machines)) if n > 0 && n.is_multiple_of(machines) => to.set("nproc_per_node", n / machines),
        _ => to.leave_out("num_processes", "it is no multiple of `num_machines`; set `nproc_per_node`"),
    }
}

fn use_cpu(value: &Value, _: &Mapping, to: &mut Converted) {
    if value.as_bool() == Some(true) {
        to.set("device", "cpu");
    }
}

fn cp_comm_strategy(value: &Value, _: &Mapping, to: &mut Converted) {
    to.set("cp_comm_strategy", if shown(value) == "allgather" { "allgather" } else { "ring" });
}
