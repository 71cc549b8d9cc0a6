//! Whether a checkpoint is of the run that resumes: a run continues by itself only with the model, the data, the batch, the
//! learning rates and the optimizer with which it began.
//!
//! Digests of tokens, tokenizer and base weights are compared elsewhere (`inputs`), so their paths may change. So may the mesh,
//! the number format, and all keys of output and elasticity: a run continues on other machines. A user who wants other learning
//! rates from some step on names the checkpoint.

use crate::config::JobConfig;
use crate::config::adapter::AdapterSection;
use crate::config::datasets::DataSection;
use crate::config::model::ModelSection;
use crate::config::optimizer::OptimizerSection;
use crate::config::output::Resume;
use crate::config::preference::PreferenceSection;
use crate::config::reward::RewardSection;
use crate::config::schedule::{LrScheduler, ScheduleSection};
use crate::config::section::Section;
use crate::config::steps::Steps;
use serde_yaml_ng::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The keys of a configuration, with their values.
type Keys = BTreeMap<String, Value>;

/// Keys of these sections that may differ within a run: contents that are compared by digest, and what does not change what is
/// computed. The batch is compared as a whole.
const FREE: [&str; 13] = [
    "base_model",
    "lora_model_dir",
    "tokenizer",
    "dataset_prepared_path",
    "skip_bad_records",
    "eval_steps",
    "evals_per_epoch",
    "offload_optimizer",
    "offload_reference",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "microbatches_per_step",
    "precompute_ref_log_probs",
];
/// Keys that set the length of the run. Most schedules of the learning rate depend on it.
const LENGTH: [&str; 2] = ["max_steps", "num_epochs"];
/// Keys that change neither what is computed nor how.
const SHOWN: [&str; 13] = [
    "output_dir",
    "checkpoint_dir",
    "checkpoint_required",
    "resume_from_checkpoint",
    "logging_steps",
    "save_steps",
    "saves_per_epoch",
    "save_total_limit",
    "threads",
    "trace",
    "hub_model_id",
    "hub_private_repo",
    "hub_revision",
];

/// Keys that another coordinator of a running job may have changed. Its ranks keep all others, and those that join get what the
/// coordinator has.
const FREE_WHILE_RUNNING: [&str; 17] = [
    "output_dir",
    "logging_steps",
    "save_total_limit",
    "resume_from_checkpoint",
    "threads",
    "trace",
    "hub_model_id",
    "hub_private_repo",
    "hub_revision",
    "base_model",
    "lora_model_dir",
    "tokenizer",
    "dataset_prepared_path",
    "nproc_per_node",
    "nnodes",
    "dp_replicate_size",
    "dp_shard_size",
];
/// The same of the section `elastic`: only the coordinator decides by them. `detection_time` is none: nodes report by theirs.
const ELASTIC_WHILE_RUNNING: [&str; 8] = [
    "spare_ranks",
    "replace_patience",
    "dp_replicate_min",
    "dp_shard_min",
    "rest_bytes_max",
    "evict_stragglers",
    "step_timeout",
    "incidents_max",
];

/// How the configuration of a checkpoint differs from that of the job that resumes from it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// Why the checkpoint is of another run, unless it is of the same run or the user has named it.
    pub(crate) of_another_run: Option<String>,
    /// Whether keys differ that decide which state a checkpoint holds, so that no run continues from it with other values of them.
    pub(crate) other_state: bool,
    /// Keys that differ and change how the run continues.
    pub(crate) notable: Vec<String>,
    /// The sequences per step before and now, if they differ.
    batch: Option<(u64, u64)>,
}

impl Changes {
    /// What the run does about its data after `step`: its place follows from the number of steps.
    pub(crate) fn place_in_data(&self, step: u64) -> Option<String> {
        let (before, now) = self.batch?;
        let (read, place) = (step * before, step * now);
        let (n, what) = if place > read { (place - read, "are skipped") } else { (read - place, "are read again") };
        Some(format!("step {step} now stands for {place} sequences of the data instead of {read}: {n} {what}"))
    }
}

/// Compares the configuration of a checkpoint with this job's, both as YAML. A configuration that cannot be read, as of an early
/// version, is compared by the text of its keys and refuses nothing.
pub(crate) fn changes(then: &[u8], now: &[u8]) -> Changes {
    let read = |yaml: &[u8]| JobConfig::from_yaml_str(std::str::from_utf8(yaml).ok()?, &[]).ok();
    let keys = |yaml: &[u8]| serde_yaml_ng::from_slice::<Keys>(yaml).unwrap_or_default();
    let (Some(before), Some(after)) = (read(then), read(now)) else {
        return Changes { notable: differing(&keys(then), &keys(now)), ..Changes::default() };
    };
    // Read and written again, so that keys that are newer than the checkpoint have their defaults.
    let (before, after) = (before.as_meant(), after.as_meant());
    let (then, now) = (keys(before.to_yaml().as_bytes()), keys(after.to_yaml().as_bytes()));
    let notable = differing(&then, &now);
    let of_another_run = match &after.output.resume_from_checkpoint {
        Resume::Path(_) => None,
        Resume::Auto | Resume::Never => another_run((&before, &then), (&after, &now)),
    };
    let (n_before, n_after) = (before.sequences_per_step() as u64, after.sequences_per_step() as u64);
    let other_state = keys_of_state().any(|key| !FREE.contains(&key) && then.get(key) != now.get(key));
    Changes { of_another_run, other_state, notable, batch: (n_before != n_after).then_some((n_before, n_after)) }
}

/// Why a coordinator cannot continue a running job with its configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// That of the job cannot be read.
    Unreadable,
    /// These keys differ.
    Of(String),
}

/// Why a coordinator with this configuration cannot continue a running job, which keeps the one that is recorded as YAML.
pub(crate) fn change_of_running_job(recorded: &str, now: &JobConfig) -> Option<Change> {
    let Ok(before) = JobConfig::from_yaml_str(recorded, &[]) else { return Some(Change::Unreadable) };
    let keys = |config: &JobConfig| {
        let mut keys: Keys = serde_yaml_ng::from_str(&config.as_meant().to_yaml()).unwrap_or_default();
        keys.retain(|key, _| !FREE_WHILE_RUNNING.contains(&key.as_str()));
        let elastic = keys.remove("elastic");
        for (key, value) in elastic.iter().filter_map(Value::as_mapping).flatten() {
            let Some(key) = key.as_str().filter(|key| !ELASTIC_WHILE_RUNNING.contains(key)) else { continue };
            keys.insert(format!("elastic.{key}"), value.clone());
        }
        keys
    };
    let (then, now_keys) = (keys(&before), keys(now));
    let differs = |key: &&String| without_places(then.get(*key)) != without_places(now_keys.get(*key));
    let all: BTreeSet<&String> = then.keys().chain(now_keys.keys()).collect();
    let changed = all.into_iter().filter(differs).map(|key| sentence(key, then.get(key), now_keys.get(key)));
    let mut found: Vec<String> = changed.collect();
    found.extend(other_batch(&before, now));
    (!found.is_empty()).then(|| Change::Of(found.join(", ")))
}

/// The keys that differ, without those that only show or keep what is computed.
fn differing(then: &Keys, now: &Keys) -> Vec<String> {
    let keys: BTreeSet<&String> = then.keys().chain(now.keys()).collect();
    keys.into_iter().filter(|k| !SHOWN.contains(&k.as_str()) && then.get(*k) != now.get(*k)).cloned().collect()
}

/// Keys that decide which tensors are trained, and which state their updates need.
fn keys_of_state() -> impl Iterator<Item = &'static str> {
    let sections = [ModelSection::keys(), AdapterSection::keys()];
    let keys = sections.into_iter().flatten().map(|doc| doc.key).chain(["optimizer"]);
    keys.filter(|key| !["lora_alpha", "lora_dropout", "loraplus_lr_ratio"].contains(key))
}

fn another_run((before, then): (&JobConfig, &Keys), (after, now): (&JobConfig, &Keys)) -> Option<String> {
    let s = &after.schedule;
    let warmup_is_a_share = s.warmup_ratio.is_some() || matches!(s.warmup_steps, Some(Steps::Share(_)));
    let rates_depend_on_length = s.lr_scheduler != LrScheduler::Constant || warmup_is_a_share;
    let is_free = |key: &str| FREE.contains(&key) || LENGTH.contains(&key) && !rates_depend_on_length;
    let same = |key: &str| without_places(then.get(key)) == without_places(now.get(key));
    let sections = [
        ModelSection::keys(),
        DataSection::keys(),
        ScheduleSection::keys(),
        OptimizerSection::keys(),
        AdapterSection::keys(),
        PreferenceSection::keys(),
        RewardSection::keys(),
    ];
    let keys = sections.iter().flatten().map(|doc| doc.key).chain(["seed"]);
    let changed = keys.filter(|key| !is_free(key) && !same(key));
    let mut found: Vec<String> = changed.map(|key| sentence(key, then.get(key), now.get(key))).collect();
    found.extend(other_batch(before, after));
    (!found.is_empty()).then(|| found.join(", "))
}

fn other_batch(before: &JobConfig, after: &JobConfig) -> Option<String> {
    let (before, after) = (before.sequences_per_step(), after.sequences_per_step());
    (before != after).then(|| format!("the sequences per step, {after} instead of {before}"))
}

fn sentence(key: &str, then: Option<&Value>, now: Option<&Value>) -> String {
    let shown = |value: Option<&Value>| match value {
        None | Some(Value::Null) => Some("none".to_owned()),
        Some(Value::Bool(x)) => Some(x.to_string()),
        Some(Value::Number(x)) => Some(x.to_string()),
        Some(Value::String(x)) if x.len() <= 40 => Some(x.clone()),
        Some(_) => None,
    };
    match (shown(then), shown(now)) {
        (Some(then), Some(now)) => format!("`{key}`, {now} instead of {then}"),
        _ => format!("`{key}`"),
    }
}

/// The value of a key without paths of data sets, whose contents are compared by digest.
fn without_places(value: Option<&Value>) -> Option<Value> {
    let mut value = value?.clone();
    for entry in value.as_sequence_mut().into_iter().flatten() {
        if let Some(keys) = entry.as_mapping_mut() {
            keys.remove("path");
        }
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: &str = "base_model: m\ndatasets: [{path: text.txt, type: completion}]\nmax_steps: 10\n";

    fn job(more: &str) -> Vec<u8> {
        JobConfig::from_yaml_str(&format!("{JOB}{more}"), &[]).unwrap().to_yaml().into_bytes()
    }

    fn refusal(then: &str, now: &str) -> Option<String> {
        changes(&job(then), &job(now)).of_another_run
    }

    #[test]
    fn every_change_of_model_data_batch_or_learning_rate_is_another_run() {
        let changed = [
            ("learning_rate: 1e-4", "learning_rate: 2e-4", "`learning_rate`, 0.0002 instead of 0.0001"),
            ("seed: 1", "seed: 2", "`seed`, 2 instead of 1"),
            ("micro_batch_size: 2", "micro_batch_size: 4", "the sequences per step, 4 instead of 2"),
            ("sequence_len: 64", "sequence_len: 128", "`sequence_len`, 128 instead of 64"),
            ("lr_scheduler: linear", "lr_scheduler: cosine", "`lr_scheduler`, cosine instead of linear"),
            ("", "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true", "`lora_r`, 8 instead of none"),
            ("optimizer: adamw", "optimizer: sgd", "`optimizer`, sgd instead of adamw"),
            ("weight_decay: 0.1", "weight_decay: 0", "`weight_decay`, 0.0 instead of 0.1"),
        ];
        for (then, now, expected) in changed {
            let found = refusal(then, now).unwrap_or_default();
            assert!(found.contains(expected), "{now}: {found}");
        }
    }

    #[test]
    fn change_of_the_state_is_told_from_one_of_what_is_done_with_it() {
        let lora = "adapter: lora\nlora_target_linear: true\n";
        let changes = |then: &str, now: &str| changes(&job(then), &job(now)).other_state;

        for now in ["optimizer: adamw_8bit", "optimizer: sgd", lora, "reinit_weights: true"] {
            assert!(changes("", now), "{now}");
        }
        for now in ["learning_rate: 1e-2", "weight_decay: 0.5", "micro_batch_size: 7", "seed: 3"] {
            assert!(!changes("", now), "{now}");
        }
        assert!(changes(lora, &format!("{lora}lora_r: 4")) && !changes(lora, &format!("{lora}lora_alpha: 4")));
    }

    #[test]
    fn other_spellings_of_the_same_job_are_the_same_run() {
        let lora = "adapter: lora\nlora_target_linear: true\n";
        for (one, other) in [
            (lora.to_owned(), format!("{lora}load_in_4bit: false\nlora_r: 8\nlora_alpha: 16\nloraplus_lr_ratio: 1")),
            (format!("{lora}load_in_4bit: true"), lora.replace("lora\n", "qlora\n")),
            (String::new(), "load_in_4bit: false".into()),
            (String::new(), "warmup_steps: 0".into()),
            ("warmup_ratio: 0".into(), "warmup_steps: 0".into()),
            ("warmup_ratio: 0.1".into(), "warmup_steps: 0.1".into()),
            ("lr_scheduler: wsd".into(), "lr_scheduler: wsd\ndecay_ratio: 0.2".into()),
            ("max_grad_norm: 0".into(), "max_grad_norm: none".into()),
        ] {
            assert_eq!(refusal(&one, &other), None, "{other}");
            assert_eq!(refusal(&other, &one), None, "{one}");
        }
        let listed =
            String::from_utf8(job("")).unwrap().replace("roles_to_train: answers", "roles_to_train: [assistant]");
        assert!(listed.contains("[assistant]"), "as earlier versions wrote it");
        assert_eq!(changes(listed.as_bytes(), &job("")).of_another_run, None);
        assert!(refusal(lora, &format!("{lora}lora_r: 4")).is_some());
        assert!(refusal("", "warmup_steps: 1").is_some());
    }

    #[test]
    fn other_machines_places_and_precision_are_the_same_run() {
        for now in ["output_dir: b", "save_steps: 5", "bf16: true", "threads: 1", "elastic: {spare_ranks: 1}"] {
            assert_eq!(refusal("", now), None, "{now}");
        }
        let wide = "microbatches_per_step: 4\ndp_shard_size: 2";
        assert_eq!(refusal("gradient_accumulation_steps: 4", wide), None);
        let moved = JobConfig::from_yaml_str(&JOB.replace("text.txt", "elsewhere/text.txt").replace(": m", ": n"), &[]);
        assert_eq!(changes(&job(""), moved.unwrap().to_yaml().as_bytes()).of_another_run, None);
    }

    #[test]
    fn other_numbers_of_ranks_change_the_batch_unless_it_is_fixed() {
        let found = refusal("gradient_accumulation_steps: 2", "gradient_accumulation_steps: 2\ndp_shard_size: 2");

        assert_eq!(found.as_deref(), Some("the sequences per step, 4 instead of 2"));
    }

    #[test]
    fn run_with_a_constant_rate_may_become_longer_and_others_may_not() {
        let longer = |schedule: &str| {
            let now = JobConfig::from_yaml_str(&format!("{}{schedule}", JOB.replace("10", "20")), &[]).unwrap();
            changes(&job(schedule), now.to_yaml().as_bytes()).of_another_run
        };

        assert_eq!(longer("lr_scheduler: constant\nwarmup_steps: 3"), None);
        assert_eq!(longer("lr_scheduler: cosine").as_deref(), Some("`max_steps`, 20 instead of 10"));
        assert_eq!(
            longer("lr_scheduler: constant\nwarmup_ratio: 0.1").as_deref(),
            Some("`max_steps`, 20 instead of 10")
        );
    }

    #[test]
    fn named_checkpoint_is_continued_and_the_changed_keys_are_told() {
        let found = changes(&job("learning_rate: 1e-4"), &job("learning_rate: 2e-4\nresume_from_checkpoint: out/c"));

        assert_eq!(found, Changes { notable: vec!["learning_rate".into()], ..Changes::default() });
    }

    #[test]
    fn another_batch_of_a_named_checkpoint_tells_what_is_left_out_or_read_again() {
        let place = |then: &str, now: &str| {
            changes(&job(then), &job(&format!("{now}\nresume_from_checkpoint: out/c"))).place_in_data(10)
        };

        let told = place("micro_batch_size: 2", "micro_batch_size: 4");
        assert_eq!(
            told.as_deref(),
            Some("step 10 now stands for 40 sequences of the data instead of 20: 20 are skipped")
        );
        let told = place("micro_batch_size: 4", "micro_batch_size: 2");
        assert_eq!(
            told.as_deref(),
            Some("step 10 now stands for 20 sequences of the data instead of 40: 20 are read again")
        );
        assert_eq!(place("gradient_accumulation_steps: 2", "micro_batch_size: 2"), None);
    }

    #[test]
    fn coordinator_of_a_running_job_may_change_only_what_its_ranks_do_not_compute_with() {
        let change = |then: &str, now: &str| {
            let now = JobConfig::from_yaml_str(&format!("{JOB}{now}"), &[]).unwrap();
            match change_of_running_job(std::str::from_utf8(&job(then)).unwrap(), &now) {
                Some(Change::Of(keys)) => Some(keys),
                change => change.map(|change| format!("{change:?}")),
            }
        };

        for taken in ["output_dir: b", "logging_steps: 3", "trace: t.json", "elastic: {replace_patience: 5}"] {
            assert_eq!(change("", taken), None, "{taken}");
        }
        for (refused, named) in [
            ("learning_rate: 2e-4", "`learning_rate`"),
            ("bf16: true", "`bf16`, true instead of false"),
            ("save_steps: 7", "`save_steps`, 7 instead of 500"),
            ("checkpoint_dir: elsewhere", "`checkpoint_dir`"),
            ("elastic: {detection_time: 5}", "`elastic.detection_time`, 5.0 instead of 1.0"),
            ("dp_shard_size: 2", "the sequences per step, 2 instead of 1"),
        ] {
            let found = change("", refused).unwrap_or_default();
            assert!(found.contains(named), "{refused}: {found}");
        }
        let fixed = "microbatches_per_step: 4\n";
        assert_eq!(change(fixed, &format!("{fixed}dp_shard_size: 2")), None, "the world decides about its mesh");
    }

    #[test]
    fn keys_that_are_newer_than_the_checkpoint_have_their_defaults() {
        let then = String::from_utf8(job("")).unwrap();
        let old: String = then.lines().filter(|line| !line.starts_with("shuffle")).map(|l| format!("{l}\n")).collect();
        assert_ne!(old, then);

        assert_eq!(changes(old.as_bytes(), &job("")), Changes::default());
        assert_eq!(
            changes(old.as_bytes(), &job("shuffle: false")).of_another_run.as_deref(),
            Some("`shuffle`, false instead of true")
        );
    }
}
