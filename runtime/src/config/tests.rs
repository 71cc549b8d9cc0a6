//! Configurations as users write them: defaults, spellings, overrides and messages.

use std::path::{Path, PathBuf};

use phalanx_strategies::model::{HfConfig, ModelConfig, ModelError};
use phalanx_strategies::optimizer::{AdamW8bit, Lion, OptimizerSpec, Range};
use proptest::prelude::*;

use super::datasets::{DatasetType, ValSetSize};
use super::elastic::VerifySteps;
use super::model::{ModelSource, Tokenizer};
use super::output::Resume;
use super::precision::{Bf16, GradientCheckpointing, Precision};
use super::schedule::LrScheduler;
use super::starter::starter_yaml;
use super::steps::Steps;
use super::*;

const MINIMAL: &str = "base_model: ./llama\ndatasets:\n  - path: a.jsonl\n    type: alpaca\nmax_steps: 10\n";

fn load(text: &str) -> Result<JobConfig, ConfigError> {
    JobConfig::from_yaml_str(text, &[])
}

/// The message for the minimal file with `lines` added.
fn refusal(lines: &str) -> String {
    load(&format!("{MINIMAL}{lines}\n")).expect_err("the file must be rejected").to_string()
}

fn with_override(key: &str, value: &str) -> Result<JobConfig, ConfigError> {
    JobConfig::from_yaml_str(MINIMAL, &[(key.into(), value.into())])
}

#[test]
fn minimal_file_takes_every_default() {
    let job = load(MINIMAL).unwrap();

    assert_eq!(job.model.source(), ModelSource::Pretrained(Path::new("./llama")));
    assert_eq!(job.model.tokenizer_source(), Tokenizer::Path("./llama".into()));
    assert_eq!(job.data.datasets[0].r#type, DatasetType::Alpaca);
    assert_eq!(job.schedule, ScheduleSection { max_steps: Some(10), ..Default::default() });
    assert_eq!(job.optimizer, OptimizerSection::default());
    assert_eq!(job.output, OutputSection::default());
    assert_eq!(job.precision.precision(true), Precision::F32);
    assert_eq!(job.adapter.lora(), None);
}

#[test]
fn file_with_axolotl_keys_loads() {
    let text = "
base_model: ./llama
datasets: [{path: a.jsonl, type: chat_template, roles_to_train: [assistant, tool]}]
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
wandb_is_not_here_but_empty_keys_are_fine_as_in: \nnum_epochs: 3
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
lr_scheduler: warmup_stable_decay
learning_rate: 2e-4
warmup_ratio: 0.1
bf16: auto
gradient_checkpointing: true
resume_from_checkpoint:
tp_size: 1
save_total_limit: none
"
    .replace("wandb_is_not_here_but_empty_keys_are_fine_as_in: \n", "max_steps:\n");
    let job = load(&text).unwrap();

    assert_eq!(job.schedule.learning_rate, 2e-4);
    assert_eq!(job.schedule.lr_scheduler, LrScheduler::WarmupStableDecay);
    assert_eq!((job.schedule.max_steps, job.schedule.num_epochs), (None, Some(3.0)));
    assert_eq!(job.sequences_per_step(), 8);
    assert_eq!(job.data.val_set_size, ValSetSize::Share(0.05));
    assert_eq!(job.optimizer.rule.name(), "adamw");
    assert_eq!(job.precision.bf16, Bf16::Auto);
    assert_eq!(job.precision.gradient_checkpointing, GradientCheckpointing::Full);
    assert_eq!(job.output.resume_from_checkpoint, Resume::Never);
    assert_eq!(job.output.save_total_limit, None);
    assert_eq!(job.adapter.lora().map(|lora| (lora.rank, lora.alpha)), Some((32, 64.0)));
}

#[test]
fn every_notation_of_a_number_is_accepted() {
    for (written, value) in
        [("1e-4", 1e-4), ("1E-4", 1e-4), ("1.0e-4", 1e-4), ("'1e-4'", 1e-4), (".5", 0.5), ("2", 2.0), ("+3", 3.0)]
    {
        let job = load(&format!("{MINIMAL}learning_rate: {written}\n")).unwrap();
        assert_eq!(job.schedule.learning_rate, value, "{written}");
    }
}

#[test]
fn values_of_yaml_1_1_are_accepted_for_keys_of_every_type() {
    let job = load(&format!(
        "{MINIMAL}seed: 500_000\nmicro_batch_size: 0x10\nsave_steps: 1_000\nwarmup_steps: 0b11\nval_set_size: 1_0\n\
         learning_rate: 1_0.5e-5\nmax_grad_norm: .5\nsample_packing: On\nbf16: off\ngradient_checkpointing: Off\n\
         trace: off\nevals_per_epoch: No\nresume_from_checkpoint: NO\ndp_shard_size: 0b1\nlora_r: off\n\
         elastic:\n  verify_steps: 1_0\n  shadows: no\n  replace_patience: 1_0\n"
    ))
    .unwrap();

    assert_eq!((job.output.seed, job.schedule.micro_batch_size), (500_000, 16));
    assert_eq!((job.output.save_steps, job.schedule.warmup_steps), (Some(Steps::Count(1000)), Some(Steps::Count(3))));
    assert_eq!((job.data.val_set_size, job.schedule.learning_rate), (ValSetSize::Samples(10), 1.05e-4));
    assert_eq!((job.optimizer.max_grad_norm, job.data.sample_packing), (Some(0.5), true));
    assert_eq!((job.precision.bf16.word(), job.precision.gradient_checkpointing.word()), ("false", "false"));
    assert_eq!((job.output.trace, job.data.evals_per_epoch, job.adapter.lora_r), (None, None, None));
    assert_eq!((job.output.resume_from_checkpoint, job.parallel.mesh().unwrap().dp_shard), (Resume::Never, 1));
    assert_eq!((job.elastic.verify_steps, job.elastic.shadows), (VerifySteps::Every(10), false));
    let model = MINIMAL.replace(
        "base_model: ./llama",
        "model:\n  model_type: llama\n  rope_theta: 500_000\n  tie_word_embeddings: yes\ntokenizer: bytes",
    );
    let description = load(&model).unwrap().model.model.unwrap().0;
    assert_eq!((&description["rope_theta"], &description["tie_word_embeddings"]), (&500_000.into(), &true.into()));
}

#[test]
fn number_in_another_base_or_of_a_time_is_refused() {
    for value in ["012", "1:30", "'0_1'", "ten"] {
        let error = refusal(&format!("micro_batch_size: {value}"));
        assert!(error.ends_with("must be a whole number from 1 to 1048576"), "{error}");
    }
}

#[test]
fn value_of_the_wrong_type_is_told_the_range_of_its_key() {
    for (line, range) in [
        ("micro_batch_size: many", "a whole number from 1 to 1048576"),
        ("sequence_len: -1", "a whole number from 1 to 16777216"),
        ("lora_dropout: x", "a number between 0 and 0.99"),
        ("microbatches_per_step: 1.5", "a whole number from 1 to 1048576, or none"),
    ] {
        let error = refusal(line);
        assert!(error.ends_with(&format!("must be {range}")), "{error}");
    }
}

#[test]
fn run_without_a_length_goes_over_the_data_once() {
    let of = |length: &str| load(&MINIMAL.replace("max_steps: 10\n", length)).unwrap().schedule;

    assert_eq!((of("").num_epochs, of("").max_steps), (Some(1.0), None));
    assert_eq!((of("max_steps: 7\n").num_epochs, of("num_epochs: 2\n").num_epochs), (None, Some(2.0)));
}

#[test]
fn unknown_key_is_named_with_its_line_and_the_nearest_key() {
    assert_eq!(refusal("lerning_rate: 1e-4"), "unknown key `lerning_rate` (line 6); did you mean `learning_rate`?");
    assert_eq!(refusal("zebra_crossing_count: 1"), "unknown key `zebra_crossing_count` (line 6)");
    assert!(refusal("qat: {x: 1}").contains("quantize weights, beside adapters"));
}

#[test]
fn unknown_keys_inside_sections_are_found_too() {
    let dataset = MINIMAL.replace("type: alpaca", "type: alpaca\n    feild: x");
    assert_eq!(
        load(&dataset).unwrap_err().to_string(),
        "unknown key `datasets[0].feild` (line 5); did you mean `field`?"
    );
    let model = MINIMAL.replace("base_model: ./llama", "model:\n  model_type: llama\n  hiden_size: 8");
    assert_eq!(
        load(&model).unwrap_err().to_string(),
        "unknown key `model.hiden_size` (line 3); did you mean `hidden_size`?"
    );
}

#[test]
fn wrong_type_is_named_with_the_found_value_and_the_accepted_values() {
    assert_eq!(
        refusal("learning_rate: fast"),
        "`learning_rate` (line 6) is the string \"fast\", but must be a number of at least 0"
    );
    assert_eq!(
        refusal("micro_batch_size: 0"),
        "`micro_batch_size` (line 6) is 0, but must be a whole number from 1 to 1048576"
    );
    assert_eq!(refusal("seed: -1"), "`seed` (line 6) is -1, but must be a whole number of at least 0");
    assert_eq!(
        refusal("adam_beta2: 1.0"),
        "`adam_beta2` (line 6) is 1.0, but must be a number of at least 0 and below 1"
    );
    assert_eq!(
        refusal("save_total_limit: 0"),
        "`save_total_limit` (line 6) is 0, but must be a whole number of at least 1, or none"
    );
    assert!(refusal("optimizer: muon").contains("one of adamw, adamw_torch, adamw_torch_fused, adamw_8bit"));
    assert!(refusal("bf16: sometimes").contains("one of false, true, full, auto"));
    assert!(refusal("learning_rate: .nan").contains("must be a number"));
    assert!(refusal("val_set_size: 1.5").contains("a whole number of samples"));
}

#[test]
fn each_rule_has_its_own_default_of_a_key_that_rules_share() {
    let rule = |lines: &str| load(&format!("{MINIMAL}{lines}\n")).unwrap().optimizer.rule;

    assert_eq!(rule("optimizer: lion"), OptimizerSpec::Lion(Lion::default()));
    assert_eq!(rule("optimizer: lion_pytorch").get("adam_beta2"), Some(0.99));
    assert_eq!(rule("optimizer: lion\nadam_beta2: 0.999").get("adam_beta2"), Some(0.999));
    assert_eq!(rule("optimizer: adamw").get("adam_beta2"), Some(0.999));
    for word in ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"] {
        assert_eq!(rule(&format!("optimizer: {word}")), OptimizerSpec::AdamW8bit(AdamW8bit::default()));
    }
    let doc = reference().into_iter().find(|doc| doc.key == "adam_beta2").unwrap();
    assert!(doc.doc.contains("`lion`: decay of the average of gradients, by default 0.99"), "{}", doc.doc);
}

#[test]
fn every_rule_reads_back_equal() {
    for mut rule in OptimizerSpec::all() {
        rule.hyperparameters().into_iter().filter(|h| h.range == Range::BelowOne).for_each(|h| *h.value = 0.625);
        let mut job = load(MINIMAL).unwrap();
        job.optimizer.rule = rule;

        assert_eq!(load(&job.to_yaml()).unwrap(), job, "{}", rule.name());
    }
}

#[test]
fn wrong_types_inside_lists_are_named_by_position() {
    let text = MINIMAL.replace("type: alpaca", "type: alpaca\n    roles_to_train: [user, 3]");
    assert_eq!(
        load(&text).unwrap_err().to_string(),
        "`datasets[0].roles_to_train[1]` (line 5) is 3, but must be a string"
    );
}

#[test]
fn repeated_key_is_rejected_in_any_spelling() {
    assert_eq!(refusal("max_steps: 20"), "`max_steps` and `max_steps` (line 6) set the same thing; keep one of them");
    assert!(refusal("tp_size: 1\ntensor_parallel_size: 1").contains("`tensor_parallel_size` and `tp_size` (line 6)"));
    let nested = MINIMAL.replace("type: alpaca", "type: alpaca\n    type: completion");
    assert!(load(&nested).unwrap_err().to_string().contains("duplicate"), "{}", load(&nested).unwrap_err());
}

#[test]
fn violated_relation_names_both_keys() {
    for (lines, first, second) in [
        ("warmup_steps: 1\nwarmup_ratio: 0.1", "warmup_steps", "warmup_ratio"),
        ("bf16: true\nfp16: true", "bf16", "fp16"),
        ("fp8: true", "fp8", "bf16"),
        ("fp8: true\nbf16: false", "fp8", "bf16"),
        ("fp8: true\nbf16: true\nfp16: true", "bf16", "fp16"),
        ("model: {model_type: llama}", "base_model", "model"),
        ("lora_r: 4", "lora_r", "adapter"),
        ("peft_use_rslora: true", "peft_use_rslora", "adapter"),
        ("peft_use_dora: true", "peft_use_dora", "adapter"),
        (
            "adapter: lora\nlora_target_linear: true\npeft_use_dora: true\nlora_dropout: 0.1",
            "peft_use_dora",
            "lora_dropout",
        ),
        ("eval_steps: 5", "eval_steps", "val_set_size"),
        ("cosine_min_lr_ratio: 0.1\nlr_scheduler: linear", "cosine_min_lr_ratio", "lr_scheduler"),
        ("decay_ratio: 0.1", "decay_ratio", "lr_scheduler"),
        ("momentum: 0.9", "momentum", "optimizer"),
        ("optimizer: sgd\nadam_beta1: 0.8", "adam_beta1", "optimizer"),
        ("optimizer: lion\nadam_epsilon: 1e-6", "adam_epsilon", "optimizer"),
        ("initial_loss_scale: 2.0", "initial_loss_scale", "fp16"),
        ("fp16: true\nloss_scale: 8\ninitial_loss_scale: 2", "loss_scale", "initial_loss_scale"),
    ] {
        let error = load(&format!("{MINIMAL}{lines}\n")).unwrap_err();
        let ConfigError::Conflict { first: found_first, second: found_second, .. } = &error else {
            panic!("{lines:?} gave {error}");
        };
        assert_eq!((found_first.key.as_str(), found_second.key.as_str()), (first, second), "{lines:?}");
    }
}

#[test]
fn warm_up_longer_than_the_run_is_accepted_and_reported() {
    let job = JobConfig::from_yaml_str(&format!("{MINIMAL}warmup_steps: 10\n"), &[("max_steps".into(), "1".into())]);

    assert_eq!(
        job.unwrap().notes,
        ["the warm-up of 10 steps does not end within `max_steps`, 1: the learning rate only rises"]
    );
    assert!(load(&format!("{MINIMAL}warmup_steps: 9\n")).unwrap().notes.is_empty());
}

#[test]
fn steps_may_be_a_share_of_the_run_or_a_number_per_epoch() {
    use crate::train::run_plan::run_plan;
    // 200 rows in batches of 2 are 100 steps, an epoch; three epochs are 300.
    let text = MINIMAL.replace("max_steps: 10", "num_epochs: 3\nmicro_batch_size: 2\nval_set_size: 0.1");
    let plan = |keys: &str| run_plan(&load(&format!("{text}{keys}\n")).unwrap(), 200);

    assert_eq!(plan("").total_steps, 300);
    assert_eq!((plan("").save_steps, plan("").eval_steps), (Some(500), None));
    assert_eq!(plan("save_steps: 0.25").save_steps, Some(75));
    assert_eq!(plan("save_steps: 0").save_steps, None);
    assert_eq!(plan("saves_per_epoch: 4\nsave_steps:").save_steps, Some(25));
    assert_eq!(plan("save_strategy: epoch").save_steps, Some(100));
    assert_eq!(plan("save_strategy: no").save_steps, None);
    assert_eq!(plan("evals_per_epoch: 2").eval_steps, Some(50));
    assert_eq!(plan("eval_steps: 0.1").eval_steps, Some(30));
    assert_eq!(plan("warmup_steps: 0.1").schedule.warmup_steps, 30);
    assert_eq!(plan("warmup_steps: 7").schedule.warmup_steps, 7);
    for (keys, first) in [
        ("saves_per_epoch: 2\nsave_steps: 10", "saves_per_epoch"),
        ("evals_per_epoch: 2\neval_steps: 10", "evals_per_epoch"),
    ] {
        assert!(load(&format!("{text}{keys}\n")).unwrap_err().to_string().starts_with(&format!("`{first}`")));
    }
    assert_eq!(
        load(&format!("{MINIMAL}evals_per_epoch: 2\n")).unwrap().notes,
        ["`evals_per_epoch` evaluates nothing, because `val_set_size` is 0"]
    );
    assert_eq!(with_override("dp_shard_size", "-1"), with_override("dp_shard_size", "auto"));
}

#[test]
fn epochs_that_end_before_the_steps_are_told() {
    use crate::train::preparation::early_end;
    let of = |keys: &str| early_end(&load(&format!("{MINIMAL}{keys}\n")).unwrap(), 4);

    let told = of("num_epochs: 2").unwrap();

    assert!(told.starts_with("`num_epochs` ends the run after 8 steps; for the 10 of `max_steps`"), "{told}");
    assert_eq!((of(""), of("num_epochs: 2.5"), of("num_epochs: 9")), (None, None, None));
}

#[test]
fn rows_that_the_last_step_trains_again_are_told_if_they_are_many() {
    use crate::train::preparation::overlong_end;
    let text = MINIMAL.replace("max_steps: 10", "micro_batch_size: 8\ngradient_accumulation_steps: 8");
    let of = |keys: &str, n_rows| overlong_end(&load(&format!("{text}{keys}\n")).unwrap(), n_rows);

    let told = of("num_epochs: 1", 40).unwrap();

    assert!(told.starts_with("every step takes 64 rows: the last one trains 24 rows again"), "{told}");
    assert!(of("num_epochs: 3", 40).unwrap().contains("trains 8 rows again"));
    assert_eq!(
        (of("num_epochs: 1", 64), of("num_epochs: 1", 6390), of("num_epochs: 1\nmax_steps: 1", 400)),
        (None, None, None)
    );
}

#[test]
fn all_errors_of_a_file_are_reported_together() {
    let text = "
base_model: ./llama
sede: 1
datasets:
  - path: a.jsonl
    feild: x
    field: 3
lora_r: 4
learning_rate: fast
micro_batch_size: 0
warmup_steps: 1
warmup_ratio: 0.1
decay_ratio: 0.1
vllm: fast
optimizer: muon
momentum: 0.9
elastic: {detection_time: -1, spare_rank: 1}
";
    let error = JobConfig::from_yaml_str(text, &[("tp_size".into(), "two".into())]).unwrap_err();

    let ConfigError::Several { errors } = &error else { panic!("{error}") };
    let lines: Vec<String> = errors.iter().map(ConfigError::to_string).collect();
    for (starts, contains) in [
        ("`vllm` (line 14) is the string \"fast\"", "remove the line"),
        ("unknown key `sede` (line 3)", "did you mean `seed`?"),
        ("unknown key `datasets[0].feild` (line 6)", "did you mean `field`?"),
        ("`datasets[0].type` (line 5) is missing", "needs a `path` and a `type`"),
        ("`datasets[0].field` (line 7) is 3", "must be a string"),
        ("`learning_rate` (line 9) is the string \"fast\"", "must be a number"),
        ("`micro_batch_size` (line 10) is 0", "from 1 to"),
        ("`lora_r` (line 8) conflicts with `adapter`", "add `adapter: lora`"),
        ("`optimizer` (line 15) is the string \"muon\"", "one of adamw"),
        ("`tensor_parallel_size` (from the command line) is the string \"two\"", "must be a whole number"),
        ("`elastic.detection_time` (line 17) is -1", "must be a number above 0"),
        ("unknown key `elastic.spare_rank` (line 17)", "did you mean `spare_ranks`?"),
    ] {
        let n = lines.iter().filter(|line| line.starts_with(starts) && line.contains(contains)).count();
        assert_eq!(n, 1, "{starts} in {lines:#?}");
    }
    assert_eq!(lines.len(), 12, "{lines:#?}");
    assert!(error.to_string().starts_with("the configuration has 12 errors:\n  `vllm`"), "{error}");
}

#[test]
fn settings_of_which_one_would_have_no_effect_beside_an_adapter_are_refused() {
    let base = "base_model: m\ndatasets: [{path: a, type: completion}]\nadapter: lora\nlora_target_linear: true\n";
    for (key, why) in [
        ("trained_parameters: [lm_head]", "leave all other parameters frozen"),
        ("reinit_weights: true", "not to random ones"),
    ] {
        let error = JobConfig::from_yaml_str(&format!("{base}{key}\n"), &[]).unwrap_err().to_string();

        assert!(error.contains("conflicts with `adapter`") && error.contains(why), "{error}");
    }
}

#[test]
fn empty_path_is_refused_and_an_absent_one_has_its_default() {
    let base = "base_model: m\ndatasets: [{path: a, type: completion}]\n";
    let of = |line: &str, to: &[(String, String)]| JobConfig::from_yaml_str(&format!("{base}{line}"), to);
    let unset = [("output_dir".to_owned(), String::new())];

    let error = of("output_dir: ''", &[]).unwrap_err().to_string();
    let of_shell = of("", &unset).unwrap_err().to_string();

    assert!(error.contains("`output_dir` (line 3) is") && error.contains("must be a path"), "{error}");
    assert!(of_shell.contains("`output_dir` (from the command line)"), "{of_shell}");
    assert_eq!(of("output_dir:", &[]).unwrap().output.output_dir, std::path::Path::new("./outputs"));
}

#[test]
fn adapter_of_4_bits_beside_an_explicit_no_to_them_is_refused() {
    let base = "base_model: m\ndatasets: [{path: a, type: completion}]\nlora_target_linear: true\nadapter: qlora\n";
    let of = |key: &str| JobConfig::from_yaml_str(&format!("{base}{key}"), &[]);

    let error = of("load_in_4bit: false").unwrap_err().to_string();
    let (plain, same) = (of("").unwrap(), of("load_in_4bit: true").unwrap());

    assert!(error.contains("`load_in_4bit` (line 5) conflicts with `adapter`"), "{error}");
    assert_eq!(plain.adapter.packing(), same.adapter.packing());
    assert_eq!(JobConfig::from_yaml_str(&plain.to_yaml(), &[]).unwrap(), plain, "what is stored reads back equal");
}

#[test]
fn all_violated_relations_of_a_section_are_reported_together() {
    let message = refusal("warmup_steps: 1\nwarmup_ratio: 0.9\ndecay_ratio: 0.2\nfp16: true\nbf16: true");

    for part in ["`warmup_steps` (line 6) conflicts", "`decay_ratio` (line 8) conflicts", "`bf16` (line 10) conflicts"]
    {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn empty_value_keeps_the_default_of_a_key() {
    for key in ["learning_rate", "lora_target_modules", "sample_prompt", "optimizer", "max_grad_norm", "elastic"] {
        for empty in ["", "~", "''", "[]", "{}"] {
            assert_eq!(load(&format!("{MINIMAL}{key}: {empty}\n")), load(MINIMAL), "{key}: {empty}");
        }
    }
    assert!(load(&format!("{MINIMAL}sample_packing: on\n")).unwrap().data.sample_packing);
    assert!(!load(&format!("{MINIMAL}shuffle: no\n")).unwrap().data.shuffle);
}

#[test]
fn missing_keys_are_named() {
    for (absent, key) in [
        ("base_model: ./llama\n", "base_model"),
        ("datasets:\n  - path: a.jsonl\n    type: alpaca\n", "datasets"),
        ("    type: alpaca\n", "datasets[0].type"),
    ] {
        let error = load(&MINIMAL.replace(absent, "")).unwrap_err();
        assert!(
            matches!(&error, ConfigError::Missing { key: found, .. } if found.key == key),
            "{absent:?} gave {error}"
        );
    }
    let scratch = MINIMAL.replace("base_model: ./llama", "model: {model_type: llama}");
    assert!(load(&scratch).unwrap_err().to_string().starts_with("`tokenizer` is missing"));
}

#[test]
fn mesh_that_differs_from_the_world_size_is_rejected_with_its_product() {
    assert_eq!(
        refusal("tp_size: 2\nnproc_per_node: 8"),
        "the mesh pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2 has 2 ranks, but the world has 8"
    );
    assert!(refusal("tp_size: 3\ndp_shard_size: auto\nnproc_per_node: 8").contains("8 ranks are not a multiple of 3"));
    assert!(refusal("dp_shard_size: auto").contains("set `nproc_per_node`"));
    let filled = load(&format!("{MINIMAL}\ntp_size: 2\ndp_shard_size: auto\nnproc_per_node: 8")).unwrap();
    assert_eq!(filled.parallel.mesh().unwrap().dp_shard, 4);
}

#[test]
fn overrides_are_checked_like_the_file_and_win_over_it() {
    assert_eq!(with_override("learning_rate", "1e-4").unwrap().schedule.learning_rate, 1e-4);
    assert_eq!(with_override("--max-steps", "3").unwrap().schedule.max_steps, Some(3));
    assert_eq!(with_override("datasets.0.path", "b.jsonl").unwrap().data.datasets[0].path, PathBuf::from("b.jsonl"));
    assert_eq!(
        with_override("learning_rate", "fast").unwrap_err().to_string(),
        "`learning_rate` (from the command line) is the string \"fast\", but must be a number of at least 0"
    );
    assert!(with_override("sede", "1").unwrap_err().to_string().contains("did you mean `seed`?"));
    assert!(with_override("datasets.7.path", "b").unwrap_err().to_string().contains("has 1 entries"));
    assert!(with_override("seed.low", "1").is_err());
}

#[test]
fn overrides_build_a_list_item_by_item() {
    let keys = [
        ("base_model", "./llama"),
        ("max_steps", "1"),
        ("datasets.0.path", "a.txt"),
        ("datasets.0.type", "completion"),
        ("datasets.1.path", "b.txt"),
        ("datasets.1.type", "completion"),
    ];
    let keys = keys.map(|(key, value)| (key.to_string(), value.to_string()));

    let job = JobConfig::from_yaml_str("{}", &keys).unwrap();

    let paths: Vec<&Path> = job.data.datasets.iter().map(|d| d.path.as_path()).collect();
    assert_eq!(paths, [Path::new("a.txt"), Path::new("b.txt")]);
}

#[test]
fn override_reaches_into_the_model_section() {
    let text = MINIMAL.replace("base_model: ./llama", "tokenizer: bytes\nmodel: {model_type: llama, rope_theta: 1e4}");
    let job = JobConfig::from_yaml_str(&text, &[("model.hidden_size".into(), "64".into())]).unwrap();

    let ModelSource::Scratch(description) = job.model.source() else { panic!("not from scratch") };
    assert_eq!(description.0["hidden_size"], serde_json::json!(64));
    assert_eq!(description.0["rope_theta"], serde_json::json!(1e4));
}

#[test]
fn none_disables_an_optional_key() {
    assert_eq!(with_override("max_grad_norm", "none").unwrap().optimizer.clip_norm(), None);
    assert_eq!(with_override("max_grad_norm", "0").unwrap().optimizer.clip_norm(), None);
    assert_eq!(with_override("seed", "1").unwrap().optimizer.clip_norm(), Some(1.0));
}

#[test]
fn learning_rate_scales_linearly_with_the_batch_if_configured() {
    let job = with_override("scale_learning_rate_with_batch", "8").unwrap();

    assert_eq!(job.schedule.peak_learning_rate(32), 4.0 * job.schedule.learning_rate);
    assert_eq!(load(MINIMAL).unwrap().schedule.peak_learning_rate(32), 5e-5);
}

#[test]
fn text_that_is_not_a_mapping_is_rejected() {
    assert!(load("- a\n- b\n").unwrap_err().to_string().contains("is a list of 2"));
    assert!(load("a: [1\n").unwrap_err().to_string().starts_with("the configuration is not valid YAML"));
    assert!(load(&" ".repeat(2 << 20)).unwrap_err().to_string().contains("more than"));
    assert!(JobConfig::load(Path::new("/no/such.yaml"), &[]).unwrap_err().to_string().contains("/no/such.yaml"));
}

#[test]
fn every_error_is_one_sentence_on_one_line() {
    for lines in
        ["lerning_rate: 1", "seed: x", "bf16: true\nfp16: true", "tp_size: 3\nnproc_per_node: 4", "max_steps: 1"]
    {
        let message = refusal(lines);
        assert!(!message.contains('\n') && !message.ends_with('.'), "{message}");
    }
}

#[test]
fn every_key_is_documented_and_no_two_share_a_spelling() {
    let mut spellings = std::collections::BTreeSet::new();
    for doc in reference() {
        assert!(doc.doc.len() > 10 && doc.doc.ends_with('.'), "{}: {:?}", doc.key, doc.doc);
        for name in doc.aliases.iter().chain([&doc.key]) {
            assert!(spellings.insert(*name), "{name} is declared twice");
        }
    }
}

#[test]
fn reference_lists_exactly_the_written_keys() {
    let written: Mapping = serde_yaml_ng::from_str(&load(MINIMAL).unwrap().to_yaml()).unwrap();
    let written: Vec<&str> = written.keys().map(|key| key.as_str().unwrap()).collect();
    let documented: Vec<&str> = reference().iter().map(|doc| doc.key).collect();
    assert_eq!(written, documented);
}

#[test]
fn absent_key_takes_its_documented_default() {
    // An empty `resume_from_checkpoint` has a meaning of its own.
    for doc in reference().iter().filter(|doc| !["datasets", "resume_from_checkpoint"].contains(&doc.key)) {
        let text = starter_yaml(Some(Path::new("./llama")), Path::new("a.jsonl"), DatasetType::Alpaca);
        let absent = JobConfig::from_yaml_str(&text, &[(doc.key.into(), "~".into())]);
        let given = JobConfig::from_yaml_str(&text, &[(doc.key.into(), doc.default.clone())]);
        assert_eq!(absent, given, "{}", doc.key);
    }
}

#[test]
fn starter_file_loads_and_mentions_every_key_once() {
    let from_base =
        starter_yaml(Some(Path::new("/models/it's a llama")), Path::new("data/a.jsonl"), DatasetType::ChatTemplate);
    let from_scratch = starter_yaml(None, Path::new("a.txt"), DatasetType::Completion);

    let job = load(&from_base).unwrap();
    assert_eq!(job.model.base_model, Some(PathBuf::from("/models/it's a llama")));
    assert_eq!(load(&from_scratch).unwrap().model.tokenizer_source(), Tokenizer::Bytes);
    for text in [from_base, from_scratch] {
        for doc in reference() {
            let starts = [format!("{}:", doc.key), format!("# {}:", doc.key)];
            let n = text.lines().filter(|line| starts.iter().any(|start| line.starts_with(start))).count();
            assert_eq!(n, 1, "{}", doc.key);
        }
        assert!(text.lines().all(|line| line.len() <= 120));
    }
}

#[test]
fn commented_lines_of_the_starter_file_can_be_uncommented() {
    let text = starter_yaml(None, Path::new("a.txt"), DatasetType::Completion);
    let keys: Vec<String> = reference().iter().map(|doc| format!("# {}:", doc.key)).collect();
    let uncomment = |line: &str| match keys.iter().any(|key| line.starts_with(key)) {
        true => line[2..].to_owned() + "\n",
        false => line.to_owned() + "\n",
    };
    let uncommented: String = text.lines().map(uncomment).collect();
    assert_eq!(load(&uncommented).unwrap(), load(&text).unwrap());
}

#[test]
fn configurations_of_the_reference_models_are_accepted_as_model_sections() {
    let mut n_supported = 0;
    for entry in std::fs::read_dir(phalanx_needs::reference("models")).unwrap() {
        let json = std::fs::read_to_string(entry.unwrap().path().join("config.json")).unwrap();
        let hf: HfConfig = serde_json::from_str(&json).unwrap();
        // Some reference models belong to families that are not supported yet.
        if matches!(ModelConfig::try_from(&hf), Err(ModelError::Unsupported { .. })) {
            continue;
        }
        n_supported += 1;
        let text =
            MINIMAL.replace("base_model: ./llama", &format!("tokenizer: bytes\nmodel: {}", json.replace('\n', " ")));

        let job = load(&text).unwrap();

        let ModelSource::Scratch(description) = job.model.source() else { panic!("not from scratch") };
        assert_eq!(
            serde_json::Value::Object(description.0.clone()),
            serde_json::from_str::<serde_json::Value>(&json).unwrap()
        );
    }
    assert!(n_supported >= 6, "{n_supported}");
}

proptest! {
    #[test]
    fn written_configuration_reads_back_equal(
        learning_rate in 0.0..1.0f64, seed: u64, micro_batch_size in 1usize..100, clip in proptest::option::of(0.0..10.0f64),
        limit in proptest::option::of(1usize..9), ratio in 0.0..1.0f64, path in "[a-z0-9 :#'\"{}-]{1,20}", bf16: bool,
    ) {
        let mut job = load(MINIMAL).unwrap();
        job.schedule.learning_rate = learning_rate;
        job.schedule.micro_batch_size = micro_batch_size;
        job.schedule.warmup_ratio = Some(ratio);
        job.optimizer.max_grad_norm = clip;
        job.output.seed = seed;
        job.output.save_total_limit = limit;
        job.output.output_dir = path.into();
        job.precision.bf16 = if bf16 { Bf16::On } else { Bf16::Auto };

        prop_assert_eq!(load(&job.to_yaml()).unwrap(), job);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "([a-z_]{1,8}|- |: |\n|  |[0-9]|[\\[\\]{}&*#'\"|>%!-]){0,60}") {
        let _ = load(&text);
        let _ = load(&format!("{MINIMAL}{text}"));
    }
}

#[test]
fn stream_ends_with_max_steps_which_its_epochs_divide() {
    let share = load(&format!("{MINIMAL}streaming: true\nval_set_size: 0.1\n")).unwrap_err().to_string();
    assert!(share.contains("use `test_datasets` instead"), "{share}");
    let weighted = MINIMAL.replace("type: alpaca", "type: alpaca\n    weight: 2");
    assert!(load(&format!("{weighted}streaming: true\n")).unwrap_err().to_string().contains("`weight`"));
    let endless = MINIMAL.replace("max_steps: 10", "num_epochs: 1");
    assert!(load(&format!("{endless}streaming: true\n")).unwrap_err().to_string().contains("set `max_steps`"));
    let both = load(&format!("{MINIMAL}streaming: true\nnum_epochs: 2\n")).unwrap();
    assert!(both.notes.iter().any(|note| note.contains("a stream ends with `max_steps`")), "{:?}", both.notes);
    let plan = |keys: &str| {
        let evaluated =
            "evals_per_epoch: 1\ntest_datasets: [{path: b, type: alpaca}]\nsaves_per_epoch: 2\nstreaming: true";
        let plan =
            crate::train::run_plan::run_plan(&load(&format!("{MINIMAL}{evaluated}\n{keys}\n")).unwrap(), u64::MAX);
        (plan.eval_steps, plan.save_steps)
    };
    assert_eq!(plan(""), (Some(10), Some(5)));
    assert_eq!(plan("num_epochs: 2"), (Some(5), Some(3)));
}

#[test]
fn tilde_in_every_path_stands_for_the_home_folder() {
    let home = std::env::home_dir().unwrap();
    let text = "base_model: ~/m\ndatasets: [{path: ~/d.jsonl, type: completion}]\nmax_steps: 1\noutput_dir: ~/runs\n\
                checkpoint_dir: ~/c\ndataset_prepared_path: ~/p\ntokenizer: ~/t\nresume_from_checkpoint: ~/r\n\
                adapter: lora\nlora_target_linear: true\nlora_model_dir: ~/a\n";

    let job = JobConfig::from_yaml_str(text, &[("trace".into(), "~/trace.json".into())]).unwrap();

    let paths = [
        (job.model.base_model.clone().unwrap(), "m"),
        (job.data.datasets[0].path.clone(), "d.jsonl"),
        (job.output.output_dir.clone(), "runs"),
        (job.output.checkpoint_dir.clone().unwrap(), "c"),
        (job.output.trace.clone().unwrap(), "trace.json"),
        (job.data.dataset_prepared_path.clone().unwrap(), "p"),
        (job.adapter.lora_model_dir.clone().unwrap(), "a"),
    ];
    for (found, name) in paths {
        assert_eq!(found, home.join(name));
    }
    assert_eq!(job.output.resume_from_checkpoint, output::Resume::Path(home.join("r")));
    assert!(!job.to_yaml().contains('~'), "another machine may have another home folder");
}

#[test]
fn loss_weights_are_of_texts_and_train_with_dropout() {
    let keys = "adapter: lora\nlora_target_linear: true\nlora_dropout: 0.1\nstreaming: true\nsample_packing: true\n";
    let job = |weights: bool| load(&format!("{MINIMAL}{keys}loss_weights: {weights}\n")).unwrap();

    assert_eq!(job(false).objective(), Objective::Supervised);
    assert_eq!((job(true).objective(), job(true).adapter.lora_dropout), (Objective::Weighted(Weighted), 0.1));
}
