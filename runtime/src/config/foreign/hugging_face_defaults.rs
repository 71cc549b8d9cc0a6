//! What holds in files of Hugging Face's trainer and its relatives where they do not say otherwise: the defaults of these tools, as far
//! as those of Phalanx differ.

use serde_yaml_ng::{Mapping, Value};

use super::convert::{Converted, at};
use crate::config::yaml_1_1::{truth, whole};

/// A key of Phalanx with the default of TRL, of LLaMA-Factory and of `TrainingArguments`, as YAML.
const DEFAULTS: &[(&str, [&str; 3])] = &[
    ("micro_batch_size", ["8"; 3]),
    ("num_epochs", ["3"; 3]),
    ("lr_scheduler", ["linear"; 3]),
    ("learning_rate", ["2e-5", "5e-5", "5e-5"]),
    ("save_total_limit", ["none"; 3]),
    ("sequence_len", ["1024", "2048", "1024"]),
    // All of them cut off the end of long samples.
    ("excess_length_strategy", ["truncate"; 3]),
    ("bf16", ["true", "false", "false"]),
    ("gradient_checkpointing", ["true", "true", "false"]),
    ("bnb_4bit_use_double_quant", ["false", "true", "true"]),
];

/// The tool's default of a key of Phalanx.
pub(super) fn default_of(tool: &str, key: &str) -> Option<Value> {
    let column = ["TRL", "LLaMA-Factory"].iter().position(|name| *name == tool).unwrap_or(2);
    let (_, of_tools) = DEFAULTS.iter().find(|(name, _)| *name == key)?;
    serde_yaml_ng::from_str(of_tools[column]).ok()
}

/// The defaults of the tool, with those of its defaults that depend on other keys of the file.
pub(super) fn defaults(tool: &str, file: &Mapping, to: &mut Converted) {
    for (key, _) in DEFAULTS {
        to.set(key, default_of(tool, key).unwrap_or_default());
    }
    let is_on = |key: &str| at(file, key).and_then(truth) == Some(true);
    if at(file, "max_steps").and_then(whole).is_some_and(|n| n > 0) {
        to.keys.remove("num_epochs");
    }
    if is_on("fp16") {
        to.set("bf16", false);
    }
    if tool == "LLaMA-Factory" {
        to.set("gradient_checkpointing", !is_on("disable_gradient_checkpointing"));
        // Texts without turns are packed.
        if at(file, "stage").is_some_and(|stage| stage == "pt") {
            to.set("sample_packing", true);
            match at(file, "packing").map(truth) {
                None => to.notes.push(
                    "`stage: pt`: rows are packed, as by default there, but attention does not cross texts here; LLaMA-Factory joins them"
                        .into(),
                ),
                Some(Some(false)) => to.notes.push(
                    "`packing`: texts of more than `cutoff_len` tokens are cut into several samples here; LLaMA-Factory trains on the first \
                     tokens only"
                        .into(),
                ),
                _ => {}
            }
        } else {
            to.notes.push(
                "`cutoff_len`: the first tokens of a longer sample are kept, so a sample with a longer prompt has no answer and is \
                 left out; LLaMA-Factory cuts such prompts and trains on the answers"
                    .into(),
            );
        }
    }
    if file.get("max_length").is_some_and(Value::is_null) && tool == "TRL" {
        to.leave_out("max_length", "sequences have a fixed length; write the largest number of tokens of a sample");
    }
}
