//! Translations of keys of Axolotl to keys of Phalanx.

use serde_yaml_ng::Value;

use super::Outcome::{NoEffect, Refused, Said};
use super::{Draft, Outcome, deepspeed, fsdp, is_equal, reasons, shown};
use crate::config::yaml_1_1::{number, truth, whole};

/// Plugins that only select kernels.
const KERNEL_PLUGINS: [&str; 3] = ["CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin"];
/// Plugins for models with experts.
const EXPERT_PLUGINS: [&str; 1] = ["ExpertParallelPlugin"];
/// Plugins that only report.
const REPORTING_PLUGINS: [&str; 1] = ["SwanLabPlugin"];

pub(super) fn model_type(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    let class = shown(value);
    let is_reward_model = draft.given("reward_model").and_then(truth) == Some(true);
    match class.ends_with("ForSequenceClassification") {
        true if !is_reward_model => {
            return Refused(
                "of classifiers, only reward models are trained; set `reward_model: true`, or remove the line".into(),
            );
        }
        false if class.ends_with("ForTokenClassification") => {
            return Refused("no classifiers of tokens are trained; remove the line".into());
        }
        _ => {}
    }
    NoEffect("the directory of the model and its tokenizer determines this")
}

pub(super) fn num_labels(value: &Value, _: &mut Draft<'_>) -> Outcome {
    match whole(value) {
        Some(1) => NoEffect("a reward model has one label"),
        _ => Refused("a reward model has one label, and no other classifiers are trained; remove the line".into()),
    }
}

/// Keys of config.json that concern experts only.
const EXPERT_KEYS: [&str; 3] = ["output_router_logits", "router_aux_loss_coef", "router_jitter_noise"];

pub(super) fn model_config(value: &Value, _: &mut Draft<'_>) -> Outcome {
    let is_of_experts = |key: &Value| key.as_str().is_some_and(|key| EXPERT_KEYS.contains(&key));
    match value.as_mapping() {
        Some(keys) if keys.keys().all(is_of_experts) => NoEffect(reasons::NO_EXPERTS),
        _ => Refused(reasons::MODEL_CONFIG.into()),
    }
}

/// The lowest learning rate of a cosine, as PyTorch names it.
pub(super) fn eta_min(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    match (number(value), draft.given("learning_rate").and_then(number)) {
        (Some(lowest), Some(peak)) if lowest > 0.0 && lowest <= peak => {
            means("cosine_min_lr_ratio", lowest / peak, draft)
        }
        _ => Refused("use `cosine_min_lr_ratio`, a share of `learning_rate`, instead".into()),
    }
}

pub(super) fn adam_eps(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    match number(value) {
        Some(epsilon) => means("adam_epsilon", epsilon, draft),
        None => Refused("use `adam_epsilon` instead, a number".into()),
    }
}

pub(super) fn base_model_config(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    if draft.given("base_model") == Some(value) {
        return NoEffect("the directory of the model and its tokenizer determines this");
    }
    Refused("the config.json of `base_model` is used; remove the line".into())
}

pub(super) fn plugins(value: &Value, _: &mut Draft<'_>) -> Outcome {
    let Some(plugins) = value.as_sequence() else { return Refused("it must be a list of plugins".into()) };
    let class = |plugin: &Value| shown(plugin).rsplit('.').next().unwrap_or_default().to_owned();
    let known = [&KERNEL_PLUGINS[..], &EXPERT_PLUGINS, &REPORTING_PLUGINS].concat();
    match plugins.iter().map(class).find(|class| !known.contains(&class.as_str())) {
        Some(other) => Refused(format!("there is no replacement for {other}; remove it from the list")),
        None => NoEffect("no plugin is needed for kernels and reports, and models have no experts"),
    }
}

pub(super) fn float16(_: &Value, draft: &mut Draft<'_>) -> Outcome {
    means("fp16", true, draft)
}

pub(super) fn bfloat16(_: &Value, draft: &mut Draft<'_>) -> Outcome {
    means("bf16", true, draft)
}

pub(super) fn float32(_: &Value, draft: &mut Draft<'_>) -> Outcome {
    let half = ["bf16", "fp16"].into_iter().find(|key| draft.given(key).is_some_and(|x| truth(x) != Some(false)));
    match half {
        Some(key) => Refused(format!("`{key}` asks for another format; keep one of them")),
        None => Said("activations and matrix products are f32, as by default".into()),
    }
}

pub(super) fn torch_dtype(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    match shown(value).trim_start_matches("torch.") {
        "bfloat16" => bfloat16(value, draft),
        "float16" => float16(value, draft),
        "float32" => float32(value, draft),
        "auto" => NoEffect("`bf16` and `fp16` set the number format"),
        _ => Refused("use `bf16` or `fp16` instead".into()),
    }
}

/// Options of bitsandbytes: what they ask for is how nf4 and int8 are here, or has a key of its own.
pub(super) fn bnb_config(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    let Some(options) = value.as_mapping().cloned() else { return Refused("it must be a map of options".into()) };
    for (key, value) in &options {
        match (shown(key).as_str(), shown(value).as_str()) {
            ("bnb_4bit_quant_type", "nf4") | ("llm_int8_has_fp16_weight", "false") => {}
            ("bnb_4bit_use_double_quant", "true" | "false") => {
                if let Refused(why) = means("bnb_4bit_use_double_quant", value.clone(), draft) {
                    return Refused(why);
                }
            }
            ("bnb_4bit_compute_dtype" | "bnb_4bit_quant_storage", _) => {}
            (key, value) => return Refused(format!("`{key}: {value}` has no counterpart; remove it")),
        }
    }
    let double = draft.keys.get("bnb_4bit_use_double_quant").and_then(truth) != Some(false);
    Said(format!("it means `bnb_4bit_use_double_quant: {double}` here; weights of 4 bits are nf4"))
}

/// Parameters that get adapters although they belong to no linear layer. Files name the stacked weights of experts with it; where a
/// model has none, PEFT adapts the other targets only.
pub(super) fn lora_target_parameters(value: &Value, _: &mut Draft<'_>) -> Outcome {
    let names: Vec<String> = value.as_sequence().into_iter().flatten().map(shown).collect();
    let is_of_experts = |name: &String| name.split('.').any(|part| part == "experts");
    match !names.is_empty() && names.iter().all(is_of_experts) {
        true => NoEffect(reasons::NO_EXPERTS),
        false => Refused("name the layers in `lora_target_modules` instead, and remove the line".into()),
    }
}

/// Patterns of parameters that are trained while all others are frozen. Beside adapters, all are frozen. Files for models with images
/// ask with them for the whole language model, which is all that there is here.
pub(super) fn unfrozen_parameters(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    const LANGUAGE_MODEL: [&str; 4] = ["model", "language_model", "model.language_model", "language_model.model"];
    const OTHERS: [&str; 3] = ["lm_head", "embed_tokens", "model.embed_tokens"];
    let patterns: Vec<String> = value.as_sequence().into_iter().flatten().map(shown).collect();
    let named: Vec<&str> = patterns
        .iter()
        .map(|pattern| pattern.trim_start_matches('^').trim_end_matches(['*', '$', '.']).trim_end_matches(".weight"))
        .collect();
    let is_whole = named.iter().any(|name| LANGUAGE_MODEL.contains(name));
    if is_whole && named.iter().all(|name| LANGUAGE_MODEL.contains(name) || OTHERS.contains(name)) {
        return NoEffect("the language model is all of the model, and is trained as `adapter` says");
    }
    if draft.given("adapter").is_some_and(|adapter| !adapter.is_null()) {
        return NoEffect("the parameters beside adapters are frozen; `lora_modules_to_save` names those that are not");
    }
    if patterns.is_empty() || patterns.iter().any(|pattern| pattern.ends_with(']') && pattern.contains('[')) {
        return Refused("it must be a list of patterns, and rows of a parameter cannot be trained alone".into());
    }
    draft.default("trained_parameters", patterns);
    Said("it means `trained_parameters` here".into())
}

/// Samples of a rank in a step.
pub(super) fn batch_size(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    if draft.given("gradient_accumulation_steps").is_some() {
        return Refused("`gradient_accumulation_steps` sets the same; keep one of them".into());
    }
    let micro_batch = draft.given("micro_batch_size").map_or(Some(1), whole);
    match (value.as_u64(), micro_batch) {
        (Some(batch), Some(micro)) if micro > 0 && batch.is_multiple_of(micro) && batch > 0 => {
            draft.default("gradient_accumulation_steps", batch / micro);
            Said(format!("it means `gradient_accumulation_steps: {}` here", batch / micro))
        }
        _ => {
            Refused("it must be a multiple of `micro_batch_size`; or use `gradient_accumulation_steps` instead".into())
        }
    }
}

pub(super) fn curriculum_sampling(_: &Value, draft: &mut Draft<'_>) -> Outcome {
    means("shuffle", false, draft)
}

pub(super) fn auto_resume(_: &Value, draft: &mut Draft<'_>) -> Outcome {
    if draft.given("resume_from_checkpoint").is_some() {
        return NoEffect("`resume_from_checkpoint` says where the run begins");
    }
    draft.default("resume_from_checkpoint", "auto");
    Said("it means `resume_from_checkpoint: auto` here".into())
}

pub(super) fn selective_checkpointing(_: &Value, draft: &mut Draft<'_>) -> Outcome {
    draft.keys.insert("gradient_checkpointing".into(), "selective".into());
    Said("it means `gradient_checkpointing: selective` here: each layer keeps its input and attention output".into())
}

pub(super) fn save_strategy(word: &str, draft: &mut Draft<'_>) -> Outcome {
    match word {
        "no" => means("save_steps", "none", draft),
        "epoch" => means("saves_per_epoch", 1u64, draft),
        "steps" => NoEffect("`save_steps` and `eval_steps` set this"),
        _ => Refused("use `save_steps` or `saves_per_epoch` instead".into()),
    }
}

pub(super) fn eval_strategy(word: &str, draft: &mut Draft<'_>) -> Outcome {
    match word {
        // As in Axolotl, which sets samples aside and never evaluates them.
        "no" => {
            draft.keys.insert("val_set_size".into(), 0u64.into());
            Said("it means `val_set_size: 0` here".into())
        }
        "epoch" => means("evals_per_epoch", 1u64, draft),
        "steps" => NoEffect("`save_steps` and `eval_steps` set this"),
        _ => Refused("use `eval_steps` or `evals_per_epoch` instead".into()),
    }
}

/// Another key says it, unless the file gives that key another value.
fn means(key: &str, value: impl Into<Value>, draft: &mut Draft<'_>) -> Outcome {
    let value = value.into();
    if let Some(own) = draft.given(key).filter(|own| !is_equal(own, &value)) {
        return Refused(format!(
            "it means `{key}: {}`, and the file has `{key}: {}`; keep one of them",
            shown(&value),
            shown(own)
        ));
    }
    let text = format!("it means `{key}: {}` here", shown(&value));
    draft.keys.insert(key.into(), value);
    Said(text)
}

pub(super) fn fsdp_words(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    let words: Vec<String> = match value {
        Value::Sequence(items) => items.iter().map(shown).collect(),
        word => shown(word).split_whitespace().map(str::to_owned).collect(),
    };
    draft.defaults(fsdp::of_words(&words))
}

pub(super) fn fsdp_config(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    match value.as_mapping() {
        Some(options) => draft.defaults(fsdp::converted(options)),
        None => Refused("it must be a section of options".into()),
    }
}

/// A DeepSpeed configuration, or the path of one.
pub(super) fn deepspeed_config(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    let converted = match value {
        Value::Mapping(config) => Ok(deepspeed::converted(config)),
        path => deepspeed::of_file(shown(path).as_ref(), draft.read),
    };
    let converted = match converted {
        Ok(converted) => converted,
        Err(why) => return Refused(why),
    };
    let own = draft.given("lr_scheduler").cloned();
    let schedule =
        converted.keys.get("lr_scheduler").cloned().filter(|schedule| own.is_some_and(|own| own != *schedule));
    match (draft.defaults(converted), schedule) {
        (Said(text), Some(schedule)) => {
            let text = format!("{text}; {}", deepspeed::overruled("lr_scheduler", &schedule));
            draft.keys.remove("cosine_min_lr_ratio");
            draft.keys.insert("lr_scheduler".into(), schedule);
            Said(text)
        }
        (outcome, _) => outcome,
    }
}
