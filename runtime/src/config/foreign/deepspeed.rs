//! DeepSpeed's JSON configuration.

use std::path::Path;

use serde_yaml_ng::{Mapping, Value};

use super::convert::Then::{Do, Key, LeftOut, NoEffect, Only, Part};
use super::convert::{Converted, Rule, at, convert};
use super::{ReadFile, shown};

const NO_COMPRESSION: &str = "sums of gradients and gathered weights are not compressed";
const NO_SUCH_METHOD: &str = "there is no such training method";

const RULES: &[Rule] = &[
    ("zero_optimization.stage", Do(stage)),
    ("zero_optimization.offload_optimizer.device", Do(offload_optimizer)),
    ("zero_optimization.cpu_offload", Do(offload_optimizer)),
    ("zero_optimization.offload_param.device", Do(offload_param)),
    ("zero_optimization.zero_quantized_weights", LeftOut(NO_COMPRESSION)),
    ("zero_optimization.zero_quantized_gradients", LeftOut(NO_COMPRESSION)),
    ("zero_optimization.zero_quantized_nontrainable_weights", LeftOut(NO_COMPRESSION)),
    ("zero_optimization.zero_hpz_partition_size", LeftOut("set `dp_replicate_size` to keep sums within a machine")),
    ("zero_optimization.*", NoEffect),
    ("bf16.enabled", Do(bf16)),
    ("bf16.*", NoEffect),
    ("bfloat16.enabled", Do(bf16)),
    ("fp16.enabled", Do(fp16)),
    ("fp16.loss_scale", Part),
    ("fp16.initial_scale_power", Part),
    ("fp16.loss_scale_window", Part),
    ("fp16.min_loss_scale", Part),
    ("fp16.*", NoEffect),
    ("optimizer.type", Do(optimizer)),
    ("optimizer.params.lr", Part),
    ("optimizer.params.weight_decay", Part),
    ("optimizer.params.betas", Part),
    ("optimizer.params.eps", Part),
    ("optimizer.params.momentum", Part),
    ("optimizer.params.adam_w_mode", Part),
    ("optimizer.params.bias_correction", Only("true", "averages are corrected for their beginning")),
    ("optimizer.params.amsgrad", LeftOut("the rule is AdamW")),
    ("optimizer.params.nesterov", LeftOut("momentum is that of plain SGD")),
    ("optimizer.params.dampening", LeftOut("momentum is that of plain SGD")),
    ("optimizer.params.maximize", LeftOut("the loss is minimized")),
    ("optimizer.params.torch_adam", NoEffect),
    ("optimizer.params.fused", NoEffect),
    ("optimizer.params.foreach", NoEffect),
    ("optimizer.params.capturable", NoEffect),
    ("optimizer.params.set_grad_none", NoEffect),
    ("optimizer.legacy_fusion", NoEffect),
    ("scheduler.type", Do(scheduler)),
    ("scheduler.params.warmup_min_lr", Part),
    ("scheduler.params.warmup_max_lr", Part),
    ("scheduler.params.warmup_num_steps", Part),
    ("scheduler.params.total_num_steps", Part),
    ("scheduler.params.cos_min_ratio", Part),
    ("scheduler.params.warmup_type", Only("linear", "the warm-up is linear")),
    ("scheduler.params.warmup_min_ratio", LeftOut("the warm-up begins at 0")),
    ("scheduler.params.last_batch_iteration", Only("-1", "a checkpoint of another trainer cannot be continued")),
    ("train_micro_batch_size_per_gpu", Key("micro_batch_size")),
    ("gradient_accumulation_steps", Key("gradient_accumulation_steps")),
    ("train_batch_size", Do(train_batch_size)),
    ("gradient_clipping", Key("max_grad_norm")),
    ("steps_per_print", Key("logging_steps")),
    ("activation_checkpointing.*", NoEffect),
    ("compile.*", NoEffect),
    ("aio.*", NoEffect),
    ("flops_profiler.*", NoEffect),
    ("comms_logger.*", NoEffect),
    ("tensorboard.*", NoEffect),
    ("wandb.*", NoEffect),
    ("csv_monitor.*", NoEffect),
    ("autotuning.*", NoEffect),
    ("checkpoint.*", NoEffect),
    ("data_types.*", NoEffect),
    ("wall_clock_breakdown", NoEffect),
    ("memory_breakdown", NoEffect),
    ("dump_state", NoEffect),
    ("prescale_gradients", NoEffect),
    ("gradient_predivide_factor", NoEffect),
    ("communication_data_type", NoEffect),
    ("disable_allgather", NoEffect),
    ("sparse_gradients", NoEffect),
    ("zero_force_ds_cpu_optimizer", NoEffect),
    ("zero_allow_untested_optimizer", NoEffect),
    ("seq_parallel_communication_data_type", NoEffect),
    ("amp.enabled", LeftOut("set `bf16` or `fp16` instead")),
    ("amp.*", Part),
    ("sparse_attention.*", LeftOut(NO_SUCH_METHOD)),
    ("curriculum_learning.*", LeftOut(NO_SUCH_METHOD)),
    ("data_efficiency.*", LeftOut(NO_SUCH_METHOD)),
    ("compression_training.*", LeftOut(NO_SUCH_METHOD)),
    ("progressive_layer_drop.*", LeftOut(NO_SUCH_METHOD)),
    ("eigenvalue.*", LeftOut(NO_SUCH_METHOD)),
    ("quantize_training.*", LeftOut(NO_SUCH_METHOD)),
    ("hybrid_engine.*", LeftOut(NO_SUCH_METHOD)),
    ("elasticity.*", LeftOut("see the keys of `elastic`")),
];

/// What a DeepSpeed configuration says, in keys of Phalanx.
pub(super) fn converted(file: &Mapping) -> Converted {
    convert(RULES, file)
}

/// What a DeepSpeed configuration says that no trainer reads, in keys of Phalanx.
pub(super) fn alone(file: &Mapping) -> Converted {
    let mut converted = converted(file);
    if converted.keys.contains_key("optimizer") && !file.contains_key("scheduler") {
        converted.notes.push(
            "the file has an optimizer and no scheduler, with which DeepSpeed keeps the learning rate constant; for that, set \
             `lr_scheduler: constant` and remove `warmup_ratio`"
                .into(),
        );
    }
    converted
}

/// Gives a job the schedule of DeepSpeed, which transformers takes whenever there is one, instead of that of its own `key`.
pub(super) fn overrule(key: &str, schedule: Value, to: &mut Converted) {
    if to.keys.get("lr_scheduler").is_some_and(|own| *own != schedule) {
        to.notes.push(overruled(key, &schedule));
        to.keys.remove("cosine_min_lr_ratio");
        to.set("lr_scheduler", schedule);
    }
}

pub(super) fn overruled(key: &str, schedule: &Value) -> String {
    format!("the scheduler of DeepSpeed goes before `{key}`, as in transformers: `lr_scheduler: {}`", shown(schedule))
}

/// What a file of DeepSpeed says; a file that is absent may be known by its name.
///
/// # Errors
/// A sentence that says what is wrong with the file.
pub(super) fn of_file(path: &Path, read: &ReadFile<'_>) -> Result<Converted, String> {
    match read(path) {
        Ok(text) => {
            let parsed =
                serde_json::from_str::<Value>(&text).map_err(|error| format!("the file is no JSON: {error}"))?;
            Ok(converted(parsed.as_mapping().ok_or("the file is no JSON object")?))
        }
        Err(error) => path.file_name().and_then(|name| of_axolotl(name.to_str()?)).ok_or_else(|| {
            format!("the file cannot be read ({error}); name another, or set `zero_stage` and `dp_shard_size`")
        }),
    }
}

/// What the configurations in Axolotl's folder `deepspeed_configs` say; where Axolotl is not installed, files name them all the
/// same.
fn of_axolotl(file_name: &str) -> Option<Converted> {
    let (stage, offloads) = match file_name {
        "zero1.json" | "zero1_torch_compile.json" => (1u64, false),
        "zero2.json" | "zero2_torch_compile.json" => (2, true),
        "zero3.json" | "zero3_bf16.json" | "zero3_bf16_cpuoffload_params.json" => (3, false),
        "zero3_bf16_cpuoffload_all.json" => (3, true),
        _ => return None,
    };
    let mut converted = Converted::default();
    sharded(stage, &mut converted);
    if offloads {
        converted.set("offload_optimizer", true);
    }
    Some(converted)
}

/// State is sharded over all ranks that the other axes leave.
fn sharded(stage: u64, to: &mut Converted) {
    to.set("dp_shard_size", "auto");
    to.set("zero_stage", stage);
}

pub(super) fn stage(value: &Value, _: &Mapping, to: &mut Converted) {
    match value.as_u64() {
        // Stage 1 computes the same with less memory.
        Some(0) => sharded(1, to),
        Some(stage @ 1..=3) => sharded(stage, to),
        _ => to.leave_out("zero_optimization.stage", format!("it is {}, but must be 0, 1, 2 or 3", shown(value))),
    }
}

pub(super) fn offload_optimizer(value: &Value, _: &Mapping, to: &mut Converted) {
    match shown(value).as_str() {
        "none" | "false" => {}
        _ => to.set("offload_optimizer", true),
    }
}

pub(super) fn offload_param(value: &Value, _: &Mapping, to: &mut Converted) {
    if !["none", "false"].contains(&shown(value).as_str()) {
        to.no_effect.push("offload_param (weights stay in device memory, divided by `dp_shard_size`)".into());
    }
}

fn bf16(value: &Value, _: &Mapping, to: &mut Converted) {
    if value.as_bool() == Some(true) {
        to.set("bf16", true);
    }
}

fn fp16(value: &Value, file: &Mapping, to: &mut Converted) {
    if value.as_bool() != Some(true) {
        return;
    }
    to.set("fp16", true);
    let number = |path| at(file, path).and_then(Value::as_f64).filter(|x| *x > 0.0);
    match number("fp16.loss_scale") {
        // 0 is a factor that adapts.
        Some(fixed) => to.set("loss_scale", fixed),
        None => {
            let given = [
                ("initial_loss_scale", number("fp16.initial_scale_power").map(f64::exp2)),
                ("min_loss_scale", number("fp16.min_loss_scale")),
            ];
            given.into_iter().for_each(|(key, value)| value.into_iter().for_each(|value| to.set(key, value)));
            if let Some(window) = at(file, "fp16.loss_scale_window").and_then(Value::as_u64) {
                to.set("loss_scale_window", window);
            }
        }
    }
}

fn optimizer(value: &Value, file: &Mapping, to: &mut Converted) {
    let name = shown(value);
    let rule = match name.to_lowercase().as_str() {
        "adamw" | "fusedadam" | "deepspeedcpuadam" => "adamw",
        // Without decoupled decay, Adam is another rule, unless it has no decay at all.
        "adam" => match at(file, "optimizer.params.adam_w_mode").and_then(Value::as_bool) {
            Some(false) => return to.leave_out("optimizer.type", "it is Adam with an L2 term; set `optimizer`"),
            _ => "adamw",
        },
        "sgd" => "sgd",
        "lion" | "fusedlion" | "deepspeedcpulion" => "lion",
        _ => return to.leave_out("optimizer.type", format!("it is {name}; set `optimizer`")),
    };
    to.set("optimizer", rule);
    let params = |key: &str| at(file, &format!("optimizer.params.{key}")).cloned();
    let beta = |n: usize| params("betas")?.as_sequence()?.get(n).cloned();
    let adam_only = |value: Option<Value>| value.filter(|_| rule == "adamw");
    let given = [
        ("learning_rate", params("lr")),
        ("weight_decay", params("weight_decay")),
        ("adam_beta1", beta(0).filter(|_| rule != "sgd")),
        ("adam_beta2", beta(1).filter(|_| rule != "sgd")),
        ("adam_epsilon", adam_only(params("eps"))),
        ("momentum", params("momentum").filter(|_| rule == "sgd")),
    ];
    given.into_iter().for_each(|(key, value)| value.into_iter().for_each(|value| to.set(key, value)));
}

fn scheduler(value: &Value, file: &Mapping, to: &mut Converted) {
    let name = shown(value);
    let schedule = match name.as_str() {
        "WarmupLR" => "constant_with_warmup",
        "WarmupDecayLR" => "linear",
        "WarmupCosineLR" => "cosine",
        _ => return to.leave_out("scheduler.type", format!("it is {name}; set `lr_scheduler`")),
    };
    to.set("lr_scheduler", schedule);
    let params = |key: &str| at(file, &format!("scheduler.params.{key}")).cloned();
    // A trainer fills in what is `auto`, and DeepSpeed what is not there.
    let is_absent = |key: &str| file["scheduler"]["params"].get(key).is_none();
    let or_default = |key: &str, default: Value| params(key).or(Some(default).filter(|_| is_absent(key)));
    let given = [
        ("learning_rate", params("warmup_max_lr")),
        ("warmup_steps", or_default("warmup_num_steps", 1000.into())),
        ("max_steps", params("total_num_steps")),
        ("cosine_min_lr_ratio", or_default("cos_min_ratio", 1e-4.into()).filter(|_| schedule == "cosine")),
    ];
    given.into_iter().for_each(|(key, value)| value.into_iter().for_each(|value| to.set(key, value)));
    if params("warmup_type").is_none() {
        to.notes.push("`scheduler`: the warm-up is linear here; that of DeepSpeed is logarithmic by default".into());
    }
    if params("warmup_min_lr").and_then(|x| x.as_f64()).is_some_and(|lowest| lowest != 0.0) {
        to.leave_out("scheduler.params.warmup_min_lr", "the warm-up begins at 0");
    }
}

/// The batch of all ranks, where the file does not say of which microbatches it consists.
fn train_batch_size(value: &Value, file: &Mapping, to: &mut Converted) {
    let micro = at(file, "train_micro_batch_size_per_gpu").and_then(Value::as_u64).unwrap_or(1);
    if at(file, "gradient_accumulation_steps").is_some() {
        return;
    }
    match value.as_u64() {
        Some(batch) if micro > 0 && batch > 0 && batch.is_multiple_of(micro) => {
            to.set("microbatches_per_step", batch / micro)
        }
        _ => to.leave_out("train_batch_size", "it is no multiple of the microbatch; set `microbatches_per_step`"),
    }
}
