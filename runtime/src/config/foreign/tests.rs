//! Every key of Axolotl's reference has one verdict, and no key is ignored without a word.

use std::collections::BTreeSet;

use super::*;
use crate::config::{JobConfig, reference};

/// Every top-level key of Axolotl's configuration and of the plugins in its repository, in July 2026.
const AXOLOTL: &str = include_str!("axolotl_keys.txt");

const MINIMAL: &str = "base_model: ./llama\ndatasets:\n  - path: a.jsonl\n    type: alpaca\nmax_steps: 10\n";

fn own_keys() -> BTreeSet<&'static str> {
    reference().iter().flat_map(|doc| doc.aliases.iter().copied().chain([doc.key])).collect()
}

#[test]
fn every_key_of_axolotl_is_read_or_has_a_verdict() {
    let own = own_keys();
    let table: BTreeSet<&str> = names().collect();

    let missing: Vec<&str> = AXOLOTL.lines().filter(|key| !own.contains(key) && !table.contains(key)).collect();

    assert!(AXOLOTL.lines().count() > 470, "the list is cut");
    assert!(missing.is_empty(), "without a verdict: {missing:?}");
}

#[test]
fn no_key_has_two_verdicts() {
    let own = own_keys();
    let mut seen = BTreeSet::new();

    let twice: Vec<&str> = names().filter(|key| own.contains(key) || !seen.insert(*key)).collect();

    assert!(twice.is_empty(), "read by a section, or in two rows: {twice:?}");
}

#[test]
fn value_that_asks_for_nothing_is_accepted_whatever_the_verdict() {
    let without = JobConfig::from_yaml_str(MINIMAL, &[]).unwrap();

    for key in names() {
        for nothing in ["", "~", "false", "0", "0.0", "''", "[]", "{}"] {
            let job = JobConfig::from_yaml_str(&format!("{MINIMAL}{key}: {nothing}\n"), &[]);
            assert_eq!(job.as_ref(), Ok(&without), "{key}: {nothing}");
        }
    }
}

#[test]
fn no_key_of_the_table_is_ignored_without_a_note() {
    for key in names() {
        for value in ["true", "7", "abc", "[abc]", "{abc: 1}"] {
            let job = JobConfig::from_yaml_str(&format!("{MINIMAL}{key}: {value}\n"), &[]);
            let named = match &job {
                Ok(job) => job.notes.join("\n"),
                Err(error) => error.to_string(),
            };
            assert!(named.split([' ', '`', ',']).any(|word| word == key), "{key}: {value} gave {named:?}");
        }
    }
}

#[test]
fn every_verdict_is_a_clause_that_fits_its_sentence() {
    for (keys, _, why) in verdicts() {
        assert!(!keys.is_empty());
        assert!(!why.is_empty() && !why.ends_with('.') && !why.contains('\n'), "{why:?}");
    }
    for words in VALUES {
        assert!(own_keys().contains(words.key), "{}", words.key);
    }
}

#[test]
fn keys_without_effect_share_one_sentence() {
    let keys = "tf32: true\nliger_rope: true\nwandb_project: x\nwandb_name:\n";

    let job = JobConfig::from_yaml_str(&format!("{MINIMAL}{keys}"), &[]).unwrap();

    assert_eq!(
        job.notes,
        ["keys without effect here: tf32, liger_rope (kernels are chosen for the device and compute the same); \
             wandb_project (measurements go to metrics.jsonl and TensorBoard files in output_dir)"]
    );
}

#[test]
fn word_of_another_tool_is_replaced_and_named_with_its_line() {
    let of = |keys: &str| JobConfig::from_yaml_str(&format!("{MINIMAL}{keys}\n"), &[]).unwrap();
    let job = of("optimizer: adamw_bnb_8bit");

    assert_eq!(job.optimizer.rule.name(), "adamw");
    assert_eq!(job.notes, ["`optimizer` (line 6): adamw_bnb_8bit means adamw here: its state is f32, not quantized"]);
    assert_eq!(of("batch_size: 8\nmicro_batch_size: 2").schedule.gradient_accumulation_steps, 4);
    assert!(!of("curriculum_sampling: true").data.shuffle);
    assert!(of("float16: true").precision.fp16);
}

#[test]
fn key_that_is_refused_is_named_with_line_value_and_way_out() {
    let error = JobConfig::from_yaml_str(&format!("{MINIMAL}rl: dpo\n"), &[]).unwrap_err();

    assert_eq!(
        error.to_string(),
        "`rl` (line 6) is the string \"dpo\": there is no preference or reinforcement training; remove the line to train on the \
         text of the data set"
    );
}
