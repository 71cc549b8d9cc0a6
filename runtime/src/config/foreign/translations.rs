//! Translations of keys of Axolotl to keys of Phalanx.

use serde_yaml_ng::Value;

use super::Outcome::{NoEffect, Refused, Said};
use super::{Draft, Outcome, shown};

/// Plugins that only select kernels.
const KERNEL_PLUGINS: [&str; 3] = ["CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin"];
/// Plugins that only report.
const REPORTING_PLUGINS: [&str; 1] = ["SwanLabPlugin"];

pub(super) fn model_type(value: &Value, _: &mut Draft) -> Outcome {
    let class = shown(value);
    if class.ends_with("ForSequenceClassification") || class.ends_with("ForTokenClassification") {
        return Refused("only language models are trained, no classifiers or reward models; remove the line".into());
    }
    NoEffect("the directory of the model and its tokenizer determines this")
}

pub(super) fn base_model_config(value: &Value, draft: &mut Draft) -> Outcome {
    if draft.given("base_model") == Some(value) {
        return NoEffect("the directory of the model and its tokenizer determines this");
    }
    Refused("the config.json of `base_model` is used; remove the line".into())
}

pub(super) fn plugins(value: &Value, _: &mut Draft) -> Outcome {
    let Some(plugins) = value.as_sequence() else { return Refused("it must be a list of plugins".into()) };
    let class = |plugin: &Value| shown(plugin).rsplit('.').next().unwrap_or_default().to_owned();
    let is_known =
        |class: &String| KERNEL_PLUGINS.contains(&class.as_str()) || REPORTING_PLUGINS.contains(&class.as_str());
    match plugins.iter().map(class).find(|class| !is_known(class)) {
        Some(other) => Refused(format!("there is no replacement for {other}; remove it from the list")),
        None => NoEffect("no plugin is needed for kernels and reports"),
    }
}

pub(super) fn float16(_: &Value, draft: &mut Draft) -> Outcome {
    draft.default("fp16", true);
    Said("it means `fp16: true` here".into())
}

pub(super) fn bfloat16(_: &Value, draft: &mut Draft) -> Outcome {
    draft.default("bf16", true);
    Said("it means `bf16: true` here".into())
}

pub(super) fn float32(_: &Value, draft: &mut Draft) -> Outcome {
    let half = ["bf16", "fp16"].into_iter().find(|key| draft.given(key).is_some_and(|x| x != &Value::Bool(false)));
    match half {
        Some(key) => Refused(format!("`{key}` asks for another format; keep one of them")),
        None => Said("activations and matrix products are f32, as by default".into()),
    }
}

pub(super) fn torch_dtype(value: &Value, draft: &mut Draft) -> Outcome {
    match shown(value).trim_start_matches("torch.") {
        "bfloat16" => bfloat16(value, draft),
        "float16" => float16(value, draft),
        "float32" => float32(value, draft),
        "auto" => NoEffect("`bf16` and `fp16` set the number format"),
        _ => Refused("use `bf16` or `fp16` instead".into()),
    }
}

/// Samples of a rank in a step.
pub(super) fn batch_size(value: &Value, draft: &mut Draft) -> Outcome {
    if draft.given("gradient_accumulation_steps").is_some() {
        return Refused("`gradient_accumulation_steps` sets the same; keep one of them".into());
    }
    let micro_batch = draft.given("micro_batch_size").map_or(Some(1), Value::as_u64);
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

pub(super) fn curriculum_sampling(_: &Value, draft: &mut Draft) -> Outcome {
    draft.default("shuffle", false);
    Said("it means `shuffle: false` here".into())
}

pub(super) fn auto_resume(_: &Value, draft: &mut Draft) -> Outcome {
    draft.default("resume_from_checkpoint", "auto");
    Said("it means `resume_from_checkpoint: auto` here".into())
}

pub(super) fn selective_checkpointing(_: &Value, draft: &mut Draft) -> Outcome {
    draft.keys.insert("gradient_checkpointing".into(), "selective".into());
    Said("it means `gradient_checkpointing: selective` here: each layer keeps its input and attention output".into())
}

pub(super) fn save_strategy(word: &str, draft: &mut Draft) -> Outcome {
    match word {
        "no" => when("save_steps", "none", draft),
        "epoch" => when("saves_per_epoch", 1u64, draft),
        "steps" => NoEffect("`save_steps` and `eval_steps` set this"),
        _ => Refused("use `save_steps` or `saves_per_epoch` instead".into()),
    }
}

pub(super) fn eval_strategy(word: &str, draft: &mut Draft) -> Outcome {
    match word {
        "no" => when("val_set_size", 0u64, draft),
        "epoch" => when("evals_per_epoch", 1u64, draft),
        "steps" => NoEffect("`save_steps` and `eval_steps` set this"),
        _ => Refused("use `eval_steps` or `evals_per_epoch` instead".into()),
    }
}

/// The key that says when something happens.
fn when(key: &str, value: impl Into<Value>, draft: &mut Draft) -> Outcome {
    let value = value.into();
    let text = format!("it means `{key}: {}` here", shown(&value));
    draft.keys.insert(key.into(), value);
    Said(text)
}
