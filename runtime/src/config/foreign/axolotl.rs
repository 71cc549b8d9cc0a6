//! Differences between the defaults of Axolotl and those of Phalanx, for files of Axolotl that are converted.
//!
//! A job of Phalanx has keys of the same names, so what a file leaves out is noted, and not written.

use serde_yaml_ng::{Mapping, Value};

use super::shown;
use crate::config::yaml_1_1::number;

/// Keys that only files of Phalanx have.
const OWN: [&str; 6] = ["model", "tokenizer", "elastic", "microbatches_per_step", "threads", "device"];

/// Makes the keys mean what they mean in Axolotl, and notes what cannot be the same.
pub(super) fn adapt(keys: &mut Mapping, notes: &mut Vec<String>) {
    if OWN.iter().any(|key| keys.contains_key(*key)) {
        return;
    }
    let has = |keys: &Mapping, key: &str| keys.get(key).is_some_and(|value| !value.is_null());
    let warm_up = ["warmup_steps", "warmup_ratio"];
    if keys.get("lr_scheduler").is_some_and(|kind| kind == "constant") {
        for key in warm_up {
            if let Some(value) = keys.remove(key).filter(|value| number(value) != Some(0.0)) {
                notes.push(format!(
                    "`{key}`: the schedule `constant` of Axolotl has no warm-up, so the result has none; for one, set `{key}: {}` there",
                    shown(&value)
                ));
            }
        }
    } else if !warm_up.iter().any(|key| has(keys, key)) {
        notes.push(
            "the file sets no warm-up: Axolotl warms up over 3 % of the steps, at most 100, by default; the result does not; for \
             that, set `warmup_ratio: 0.03`"
                .into(),
        );
    }
    if !["bf16", "fp16"].iter().any(|key| has(keys, key)) {
        notes.push("the file sets no number format: Axolotl's default is `bf16: auto`; the result has f32".into());
    }
    if ["tokens", "special_tokens"].iter().any(|key| has(keys, key)) && !has(keys, "mean_resizing_embeddings") {
        notes.push(
            "embeddings of added tokens begin with the mean of all others; Axolotl draws them by default, as \
             `mean_resizing_embeddings: false` does"
                .into(),
        );
    }
    end_by_steps(keys, notes);
    let entries =
        ["datasets", "test_datasets", "pretraining_dataset"].iter().filter_map(|key| keys.get(*key)?.as_sequence());
    let is_text = |entry: &&Value| entry.get("path").map(shown).is_some_and(|path| is_plain_text(&path));
    notes.extend(entries.flatten().find(is_text).map(|entry| LINES.replace("FILE", &shown(&entry["path"]))));
    if keys.get("optimizer").is_some_and(|rule| rule == "adafactor") {
        notes.push(ADAFACTOR.into());
    }
    let is_positive = |key: &str| keys.get(key).and_then(number).is_some_and(|n| n > 0.0);
    if is_positive("loraplus_lr_ratio") && is_positive("weight_decay") {
        keys.remove("weight_decay");
        notes.push(
            "`weight_decay`: beside `loraplus_lr_ratio`, Axolotl and PEFT decay nothing, and so does the result; set it there for decay".into(),
        );
    }
    let is_lion = keys.get("optimizer").map(shown).is_some_and(|rule| rule.starts_with("lion"));
    if is_lion && !has(keys, "adam_beta2") {
        keys.insert("adam_beta2".into(), Value::from(0.999));
    }
}

/// `max_steps` goes before `num_epochs` there, and what happens in each epoch happens after equal shares of all steps.
fn end_by_steps(keys: &mut Mapping, notes: &mut Vec<String>) {
    let positive = |keys: &Mapping, key: &str| keys.get(key).and_then(number).filter(|n| *n > 0.0);
    if positive(keys, "max_steps").is_none() {
        return;
    }
    let n_epochs = positive(keys, "num_epochs");
    for (per_epoch, steps) in [("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")] {
        let share = positive(keys, per_epoch).map(|n| 1.0 / (n * n_epochs.unwrap_or(1.0)));
        if let Some(share) = share.filter(|share| *share < 1.0) {
            keys.remove(per_epoch);
            keys.insert(steps.into(), share.into());
            notes.push(format!("`{per_epoch}`: beside `max_steps`, Axolotl divides all steps by it and `num_epochs`, as `{steps}` of the result does"));
        }
    }
    if keys.remove("num_epochs").is_some_and(|value| !value.is_null()) {
        notes.push("`num_epochs`: Axolotl trains `max_steps` steps, over the data as often as needed; so does the result, without this key".into());
    }
}

/// Whether a file of this name is one text here, and a sample for each line in `datasets` of Hugging Face.
pub(super) fn is_plain_text(path: &str) -> bool {
    path.ends_with(".txt")
}

/// What that means; FILE stands for its name.
pub(super) const LINES: &str = "FILE is one text here, which is cut into rows; there, each line is a sample of its own: for samples, store \
                                the lines as records with a field `text` (JSON, CSV, Parquet)";

/// What differs between adafactor here and that of Hugging Face's trainer.
pub(super) const ADAFACTOR: &str = "the updates of adafactor are relative to the RMS of each tensor here, unlike those of Hugging \
                                    Face's trainer; choose `learning_rate` anew";
