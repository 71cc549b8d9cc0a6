//! The options of PyTorch's fully sharded data parallelism, as Axolotl and Accelerate write them.

use serde_yaml_ng::{Mapping, Value};

use super::convert::Then::{Do, LeftOut, NoEffect};
use super::convert::{Converted, Rule, convert};
use super::shown;

const RULES: &[Rule] = &[
    ("sharding_strategy", Do(strategy)),
    ("reshard_after_forward", Do(reshard)),
    ("offload_params", Do(offload)),
    ("activation_checkpointing", Do(checkpointing)),
    ("auto_wrap_policy", NoEffect),
    ("transformer_layer_cls_to_wrap", NoEffect),
    ("min_num_params", NoEffect),
    ("backward_prefetch", NoEffect),
    ("backward_prefetch_policy", NoEffect),
    ("forward_prefetch", NoEffect),
    ("limit_all_gathers", NoEffect),
    ("sync_module_states", NoEffect),
    ("use_orig_params", NoEffect),
    ("cpu_ram_efficient_loading", NoEffect),
    ("cpu_offload_pin_memory", NoEffect),
    ("state_dict_type", NoEffect),
    ("final_state_dict_type", NoEffect),
    ("version", NoEffect),
    ("mixed_precision_policy", NoEffect),
    ("ignored_modules", LeftOut("all parameters are sharded")),
];

/// What the options say, in keys of Phalanx. Each option may have the prefix `fsdp_`.
pub(super) fn converted(options: &Mapping) -> Converted {
    let bare = |(key, value): (&Value, &Value)| {
        let key = shown(key);
        (Value::from(key.strip_prefix("fsdp_").unwrap_or(&key)), value.clone())
    };
    let options: Mapping = options.iter().map(bare).collect();
    let mut converted = convert(RULES, &options);
    for (key, value) in sharded(3) {
        if !converted.keys.contains_key(&key) {
            converted.keys.insert(key, value);
        }
    }
    converted
}

/// What the words of the older key `fsdp` say.
pub(super) fn of_words(words: &[String]) -> Converted {
    let mut converted = Converted::default();
    converted.keys.extend(sharded(3));
    for word in words {
        match word.as_str() {
            "auto_wrap" => converted.no_effect.push(word.clone()),
            "offload" => converted.set("offload_optimizer", true),
            _ => strategy(&word.as_str().into(), &Mapping::new(), &mut converted),
        }
    }
    converted
}

fn sharded(stage: u64) -> [(Value, Value); 2] {
    [("dp_shard_size".into(), "auto".into()), ("zero_stage".into(), stage.into())]
}

fn strategy(value: &Value, _: &Mapping, to: &mut Converted) {
    match shown(value).to_uppercase().as_str() {
        "FULL_SHARD" | "1" => to.set("zero_stage", 3u64),
        "SHARD_GRAD_OP" | "2" => to.set("zero_stage", 2u64),
        // Without sharding, the same is computed with more memory.
        "NO_SHARD" | "3" => to.set("zero_stage", 1u64),
        "HYBRID_SHARD" | "HYBRID_SHARD_ZERO2" | "_HYBRID_SHARD_ZERO2" | "4" | "5" => {
            to.leave_out("sharding_strategy", "set `dp_replicate_size` to the number of machines for hybrid sharding");
        }
        other => to.leave_out("sharding_strategy", format!("it is {other}; set `zero_stage`")),
    }
}

/// In its first version the option was a strategy; in the second it is a switch.
fn reshard(value: &Value, file: &Mapping, to: &mut Converted) {
    match value.as_bool() {
        Some(drops) => to.set("zero_stage", if drops { 3u64 } else { 2 }),
        None => strategy(value, file, to),
    }
}

/// Of weights, gradients and optimizer state, only the last can leave device memory.
fn offload(value: &Value, _: &Mapping, to: &mut Converted) {
    if value.as_bool() == Some(true) {
        to.set("offload_optimizer", true);
        to.no_effect.push("offload_params of weights (they stay in device memory, divided by `dp_shard_size`)".into());
    }
}

fn checkpointing(value: &Value, _: &Mapping, to: &mut Converted) {
    if value.as_bool() == Some(true) {
        to.set("gradient_checkpointing", true);
    }
}
