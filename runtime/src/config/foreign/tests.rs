//! Every key of Axolotl's reference has one verdict, and no key is ignored without a word.

use std::collections::BTreeSet;

use super::*;
use crate::config::{JobConfig, reference};
use phalanx_strategies::program::Packing;

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

/// What is on by default in Axolotl: false asks for something.
const ON_BY_DEFAULT: &str = "peft_init_lora_weights";

#[test]
fn value_that_asks_for_nothing_is_accepted_whatever_the_verdict() {
    let without = JobConfig::from_yaml_str(MINIMAL, &[]).unwrap();

    for nothing in ["", "~", "false", "0", "0.0", "''", "[]", "{}"] {
        let keys = names().filter(|key| *key != ON_BY_DEFAULT);
        let keys: String = keys.map(|key| format!("{key}: {nothing}\n")).collect();
        assert_eq!(JobConfig::from_yaml_str(&format!("{MINIMAL}{keys}"), &[]).as_ref(), Ok(&without), "{nothing}");
    }
}

#[test]
fn no_key_of_the_table_is_ignored_without_a_note() {
    for key in names().filter(|key| *key != ON_BY_DEFAULT) {
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
fn no_key_of_an_entry_is_ignored_without_a_note() {
    for (key, verdict, _) in entry_verdicts() {
        let entry = |value: &str| {
            let text = format!(
                "base_model: m\nmax_steps: 1\ndatasets:\n  - path: a\n    type: completion\n    {key}: {value}\n"
            );
            JobConfig::from_yaml_str(&text, &[])
        };
        let named = match entry("words") {
            Ok(job) => job.notes.join("\n"),
            Err(error) => error.to_string(),
        };
        assert_eq!(entry("words").is_err(), verdict == "refused", "{key}");
        assert!(named.contains(&format!("datasets[0].{key}")), "{key} gave {named:?}");
        assert_eq!(entry("").unwrap().notes, Vec::<String>::new(), "{key}");
    }
}

#[test]
fn patterns_of_trained_parameters_have_no_effect_beside_adapters_or_for_the_whole_language_model() {
    let of = |patterns: &str, more: &str| {
        let keys = format!("unfrozen_parameters: [{patterns}]\n{more}");
        JobConfig::from_yaml_str(&format!("{MINIMAL}{keys}"), &[])
    };

    for whole in ["^model.language_model.*, ^lm_head.*", "model.language_model.*, lm_head, embed_tokens", "model.*"] {
        let notes = of(whole, "").unwrap().notes.join("\n");
        assert!(notes.contains("unfrozen_parameters (the language model"), "{notes}");
    }
    let part = "^lm_head.weight$, 'model.layers.4[4-9]+.mlp.gate'";
    let beside = of(part, "adapter: lora\nlora_target_linear: true\n").unwrap();
    assert!(beside.notes.join("\n").contains("unfrozen_parameters (the parameters beside adapters are frozen"));
    assert_eq!(beside.adapter.trained_parameters, Vec::<String>::new());
    assert_eq!(of(part, "").unwrap().adapter.trained_parameters, ["^lm_head.weight$", "model.layers.4[4-9]+.mlp.gate"]);
    let rows = of("'^model.embed_tokens.weight$[:32000]'", "").unwrap_err().to_string();
    assert!(rows.contains("rows of a parameter cannot be trained alone"), "{rows}");
}

#[test]
fn adapters_of_experts_have_no_effect_and_those_of_other_parameters_are_refused() {
    let of = |names: &str| {
        let keys = format!("adapter: lora\nlora_target_modules: [q_proj]\nlora_target_parameters: [{names}]\n");
        JobConfig::from_yaml_str(&format!("{MINIMAL}{keys}"), &[]).map(|job| job.notes.join("\n"))
    };

    let experts = "mlp.experts.gate_up_proj, experts.down_proj";
    assert!(of(experts).unwrap().contains("lora_target_parameters (models have no experts"), "{experts}");
    for other in ["experts.down_proj, q_proj.weight", "mlp.gate.weight"] {
        assert!(of(other).unwrap_err().to_string().contains("`lora_target_modules`"), "{other}");
    }
}

#[test]
fn shard_of_all_data_is_one_of_each_data_set() {
    let keys = "dataset_shard_num: 4\ndataset_shard_idx: 3\n";

    let job = JobConfig::from_yaml_str(&format!("{MINIMAL}{keys}"), &[]).unwrap();

    assert_eq!((job.data.datasets[0].shards, job.data.datasets[0].shards_idx), (Some(4), 3));
    assert!(JobConfig::from_yaml_str(&format!("{MINIMAL}{}", keys.replace('3', "4")), &[]).is_err());
}

#[test]
fn data_for_pretraining_are_texts_of_data_sets() {
    let head = "base_model: m\nmax_steps: 1\n";
    let of = |keys: &str| JobConfig::from_yaml_str(&format!("{head}{keys}"), &[]);

    let path = of("pretraining_dataset: a.jsonl\n").unwrap();
    let entry =
        of("pretraining_dataset:\n  - path: a\n    text_column: body\n    skip: 7\n    split: train\n").unwrap();
    let both = of("pretraining_dataset: a\ndatasets: [{path: b, type: alpaca}]\n").unwrap_err().to_string();
    let skip = of("pretraining_dataset: [{path: a, skip: x}]\n").unwrap_err().to_string();

    assert_eq!((path.data.datasets.len(), path.data.sample_packing, path.data.streaming), (1, true, true));
    let by_epochs = JobConfig::from_yaml_str("base_model: m\nnum_epochs: 1\npretraining_dataset: a\n", &[]).unwrap();
    assert!(
        !by_epochs.data.streaming && by_epochs.notes.iter().any(|note| note.contains("set `max_steps` to stream it"))
    );
    let dataset = &entry.data.datasets[0];
    assert_eq!((dataset.field.as_deref(), dataset.split.as_ref().unwrap().text()), (Some("body"), "train[7:]"));
    assert!(both.contains("`pretraining_dataset`") && both.contains("`datasets`"), "{both}");
    assert!(skip.contains("whole number"), "{skip}");
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
    let job = of("optimizer: adamw_torch_4bit");

    assert_eq!(job.optimizer.rule.name(), "adamw_8bit");
    assert_eq!(
        job.notes,
        [
            "`optimizer` (line 6): adamw_torch_4bit means adamw_8bit here: its state is stored in 8 bits, as by bitsandbytes"
        ]
    );
    assert_eq!(of("batch_size: 8\nmicro_batch_size: 2").schedule.gradient_accumulation_steps, 4);
    assert!(!of("curriculum_sampling: true").data.shuffle);
    assert!(of("float16: true").precision.fp16);
}

#[test]
fn frozen_weights_are_stored_as_the_file_asks() {
    let of = |keys: &str| JobConfig::from_yaml_str(&format!("{MINIMAL}lora_target_linear: true\n{keys}"), &[]);
    let nf4 = |double| Some(Packing::Nf4 { double });
    let cases = [
        ("adapter: lora", None),
        ("adapter: qlora", nf4(true)),
        ("adapter: qlora\nload_in_4bit: true\nbnb_4bit_use_double_quant: false", nf4(false)),
        ("adapter: lora\nload_in_4bit: true", nf4(true)),
        ("adapter: lora\nload_in_8bit: true", Some(Packing::Int8)),
        ("adapter: qlora\nbnb_config_kwargs: {bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: false}", nf4(false)),
    ];
    for (keys, packing) in cases {
        assert_eq!(of(keys).unwrap().adapter.packing(), packing, "{keys}");
    }
    let refused = |keys: &str| of(keys).unwrap_err().to_string();
    assert!(refused("adapter: qlora\nload_in_8bit: true").contains("either 8 bits or 4"));
    assert!(refused("load_in_8bit: true").contains("no adapter is trained"));
    assert!(
        refused("adapter: qlora\nbnb_config_kwargs: {bnb_4bit_quant_type: fp4}").contains("`bnb_4bit_quant_type: fp4`")
    );
}

#[test]
fn key_that_is_refused_is_named_with_line_value_and_way_out() {
    let error = JobConfig::from_yaml_str(&format!("{MINIMAL}vllm: fast\n"), &[]).unwrap_err();

    assert_eq!(
        error.to_string(),
        "`vllm` (line 6) is the string \"fast\": there is no reinforcement training, and preference tuning has no such key; \
         remove the line"
    );
}

fn sharded(keys: &str) -> JobConfig {
    JobConfig::from_yaml_str(&format!("{MINIMAL}nproc_per_node: 2\n{keys}\n"), &[]).unwrap()
}

#[test]
fn options_of_fsdp_shard_over_all_ranks() {
    let job = sharded(
        "fsdp_version: 2
fsdp_config:
  offload_params: true
  cpu_ram_efficient_loading: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  reshard_after_forward: false
  activation_checkpointing: true",
    );

    assert_eq!((job.parallel.mesh().unwrap().dp_shard, job.parallel.zero_stage), (2, 2));
    assert!(job.optimizer.offload_optimizer);
    assert_eq!(job.precision.gradient_checkpointing.word(), "full");
    let note = &job.notes[0];
    assert!(note.starts_with("`fsdp_config` (line 8): it means `offload_optimizer: true`"), "{note}");
    for part in
        ["`zero_stage: 2`", "`dp_shard_size: auto`", "without effect: ", "state_dict_type", "offload_params of weights"]
    {
        assert!(note.contains(part), "{part} in {note}");
    }
    assert_eq!(sharded("fsdp: [shard_grad_op, auto_wrap, offload]").parallel.zero_stage, 2);
    assert_eq!(sharded("fsdp: full_shard auto_wrap").parallel.zero_stage, 3);
    assert_eq!(
        sharded("dp_shard_size: 1\ndp_replicate_size: 2\nfsdp: [full_shard]").parallel.mesh().unwrap().dp_shard,
        1
    );
}

#[test]
fn configuration_of_deepspeed_is_read_from_its_file_or_known_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mine.json");
    let json = r#"{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "overlap_comm": true},
        "bf16": {"enabled": true}, "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": "auto"}"#;
    std::fs::write(&file, json).unwrap();
    let read = |path: &str| sharded(&format!("deepspeed: {path}"));

    let of_file = read(file.to_str().unwrap());
    let by_name = read("deepspeed_configs/zero3_bf16_cpuoffload_all.json");
    let inline =
        sharded("bf16: auto\ndeepspeed: {zero_optimization: {stage: 2}, fp16: {enabled: true, loss_scale: 0}}");

    assert_eq!((of_file.parallel.zero_stage, of_file.optimizer.offload_optimizer), (1, true));
    assert_eq!((of_file.precision.bf16.word(), of_file.optimizer.max_grad_norm), ("true", Some(0.5)));
    assert!(of_file.notes[0].contains("without effect: zero_optimization.overlap_comm"), "{:?}", of_file.notes);
    assert_eq!((by_name.parallel.zero_stage, by_name.optimizer.offload_optimizer), (3, true));
    assert_eq!((inline.precision.bf16.word(), inline.precision.fp16), ("auto", false), "the file goes before");
}

#[test]
fn option_that_cannot_be_met_is_refused_by_its_name() {
    let of = |keys: &str| JobConfig::from_yaml_str(&format!("{MINIMAL}{keys}\n"), &[]).unwrap_err().to_string();

    for (keys, part) in [
        ("fsdp_config: {sharding_strategy: HYBRID_SHARD}", "set `dp_replicate_size`"),
        ("fsdp_config: {frobnicate: 3}", "`frobnicate` cannot be met: Phalanx does not know this key, 3"),
        ("deepspeed: no/such.json", "cannot be read"),
        ("deepspeed: {zero_optimization: {stage: 7}}", "must be 0, 1, 2 or 3"),
        ("deepspeed: {zero_optimization: {stage: 3, zero_quantized_gradients: true}}", "not compressed"),
    ] {
        assert!(of(keys).contains(part), "{keys}: {}", of(keys));
    }
}

/// The files of another tool by name, as `init --from` reads them.
fn imported(files: &[(&str, &str)]) -> import::Imported {
    let read = |path: &Path| {
        let found = files.iter().find(|(name, _)| path == Path::new(name));
        found.map(|(_, text)| (*text).to_owned()).ok_or_else(|| std::io::ErrorKind::NotFound.into())
    };
    import::import(Path::new(files[0].0), &[], &read, &|_| None).unwrap()
}

pub(super) fn shown_keys(imported: &import::Imported) -> BTreeSet<String> {
    imported.keys.iter().map(|(key, value)| format!("{}: {}", shown(key), shown(value))).collect()
}

pub(super) fn set(keys: &[&str]) -> BTreeSet<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

#[test]
fn configuration_of_accelerate_becomes_a_mesh() {
    let ddp = imported(&[(
        "a.yaml",
        "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 8\nmachine_rank: 0\nrdzv_backend: static\nsame_network: false\n",
    )]);
    let fsdp = imported(&[(
        "a.yaml",
        "distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 4\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_offload_params: false\n  fsdp_use_orig_params: true\nparallelism_config:\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n",
    )]);
    let fp8 = imported(&[(
        "a.yaml",
        "distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config: {backend: TE, margin: 0}\ndowncast: 1\n",
    )]);

    assert_eq!((ddp.tool, ddp.is_whole), ("Accelerate", false));
    assert_eq!(shown_keys(&ddp), set(&["bf16: true", "dp_replicate_size: 8", "nnodes: 2", "nproc_per_node: 4"]));
    assert_eq!(ddp.notes, ["without effect here: rdzv_backend"]);
    assert_eq!(
        shown_keys(&fsdp),
        set(&["bf16: false", "dp_shard_size: 2", "nproc_per_node: 4", "tensor_parallel_size: 2", "zero_stage: 2"])
    );
    assert_eq!(fsdp.notes, ["without effect here: fsdp_config.use_orig_params"]);
    assert_eq!(shown_keys(&fp8), set(&["bf16: true", "fp8: true"]));
    assert_eq!(
        fp8.notes,
        [
            "left out `fp8_config.backend`: there is one recipe: scales of rows, of the current step",
            "left out `downcast`: Phalanx does not know this key, 1; did you mean `downcast_bf16`?"
        ]
    );
}

#[test]
fn configuration_of_deepspeed_becomes_stage_precision_batch_and_rates() {
    let json = r#"{"fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_min_lr": 0, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "overlap_comm": true},
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "steps_per_print": 7}"#;
    let in_accelerate = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n";

    let alone = imported(&[("ds.json", json)]);
    let beside = imported(&[("a.yaml", in_accelerate), ("ds.json", json)]);
    let absent = imported(&[("a.yaml", in_accelerate)]);

    let keys = [
        "adam_beta1: 0.8",
        "adam_beta2: 0.9",
        "adam_epsilon: 1e-7",
        "dp_shard_size: auto",
        "fp16: true",
        "initial_loss_scale: 4096.0",
        "learning_rate: 0.00003",
        "logging_steps: 7",
        "loss_scale_window: 500",
        "lr_scheduler: linear",
        "max_grad_norm: 1.0",
        "max_steps: 100",
        "micro_batch_size: 4",
        "microbatches_per_step: 8",
        "offload_optimizer: true",
        "optimizer: adamw",
        "warmup_steps: 10",
        "zero_stage: 2",
    ];
    assert_eq!(shown_keys(&alone), set(&keys));
    assert_eq!(
        alone.notes,
        ["without effect here: zero_optimization.offload_optimizer.pin_memory, zero_optimization.overlap_comm"]
    );
    assert_eq!(shown_keys(&beside), &set(&keys) | &set(&["nproc_per_node: 2"]));
    assert!(absent.notes[0].starts_with("left out `deepspeed_config.deepspeed_config_file`: the file cannot be read"));
}

#[test]
fn schedule_of_deepspeed_has_its_own_defaults() {
    let of = |scheduler: &str| {
        let json = format!(r#"{{"optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}}{scheduler}}}"#);
        imported(&[("ds.json", &json)])
    };

    let cosine = of(r#", "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}"#);
    let of_trainer = of(r#", "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}"#);

    let keys = shown_keys(&cosine);
    assert!(keys.contains("warmup_steps: 1000") && keys.contains("cosine_min_lr_ratio: 0.0001"), "{keys:?}");
    assert!(!shown_keys(&of_trainer).iter().any(|key| key.starts_with("warmup_steps")));
    assert!(of("").notes.join("\n").contains("no scheduler, with which DeepSpeed keeps the learning rate constant"));
}

const TORCHTITAN: &str = "
[model]
name = \"llama3\"
hf_assets_path = \"./tokenizer\"
[optimizer]
name = \"AdamW\"
lr = 3e-4
[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.8
[training]
local_batch_size = 2
global_batch_size = 16
seq_len = 1024
steps = 50
dataset = \"c4\"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = \"Interleaved1F1B\"
[checkpoint]
enable = true
interval = 10
[activation_checkpoint]
mode = \"full\"
";

#[test]
fn configuration_of_torchtitan_keeps_its_own_defaults() {
    let job = imported(&[("a.toml", TORCHTITAN)]);

    assert_eq!(
        shown_keys(&job),
        set(&[
            "adam_beta1: 0.9",
            "adam_beta2: 0.95",
            "bf16: true",
            "decay_ratio: 0.8",
            "dp_shard_size: auto",
            "gradient_checkpointing: true",
            "learning_rate: 0.0003",
            "lr_scheduler: wsd",
            "max_steps: 50",
            "micro_batch_size: 2",
            "microbatches_per_step: 8",
            "optimizer: adamw",
            "pipeline_parallel_size: 2",
            "pipeline_schedule: Interleaved1F1B",
            "sample_packing: true",
            "save_steps: 10",
            "sequence_len: 1024",
            "sequence_parallel: true",
            "tensor_parallel_size: 2",
            "tokenizer: ./tokenizer",
            "warmup_steps: 20",
            "weight_decay: 0.1",
        ])
    );
    assert_eq!(job.notes.len(), 2, "{:?}", job.notes);
    assert!(job.notes[0].starts_with("left out `model.name`: set `base_model`"));
    assert!(job.notes[1].starts_with("left out `training.dataset`: name local files"));
}

#[test]
fn lowest_rate_of_a_cosine_of_torchtitan_is_kept_with_a_decay_ratio() {
    for ratio in ["", "decay_ratio = 0.8\n"] {
        let text =
            format!("[lr_scheduler]\ndecay_type = \"cosine\"\nmin_lr_factor = 0.1\n{ratio}[training]\nsteps = 20\n");

        assert!(shown_keys(&imported(&[("a.toml", &text)])).contains("cosine_min_lr_ratio: 0.1"), "{text}");
    }
}

#[test]
fn keys_of_early_versions_of_torchtitan_keep_their_meaning_and_misspelt_ones_are_refused() {
    let early = "[lr_scheduler]\ndecay_type = \"cosine\"\nlr_min = 0.1\n[training]\nbatch_size = 1\nwarmup_steps = 20\n\
                 steps = 9\ndata_parallel_shard_degree = 4\ntensor_parallel_degree = 2\n";

    let shown = shown_keys(&imported(&[("a.toml", early)]));

    for key in [
        "micro_batch_size: 1",
        "warmup_steps: 20",
        "dp_shard_size: 4",
        "tensor_parallel_size: 2",
        "cosine_min_lr_ratio: 0.1",
    ] {
        assert!(shown.contains(key), "{key}: {shown:?}");
    }
    for (section, key) in [
        ("lr_scheduler", "warmup_stepz"),
        ("optimizer", "weight_decai"),
        ("training", "global_batch_sise"),
        ("parallelism", "tensor_parallel_size"),
    ] {
        let text = format!("[model]\nname = \"llama3\"\n[{section}]\n{key} = 3\n");
        let notes = imported(&[("a.toml", &text)]).notes.join("\n");
        assert!(notes.contains(&format!("left out `{section}.{key}`")), "{notes}");
    }
}

#[test]
fn job_of_axolotl_is_imported_as_a_whole() {
    let text = format!("{MINIMAL}vllm: fast\ntf32: true\noptimizer: paged_adamw\nwandb_project:\nseed: 3\n");
    let job = imported(&[("a.yml", &text)]);

    assert_eq!((job.tool, job.is_whole), ("Axolotl", true));
    assert_eq!(
        shown_keys(&job),
        set(&["base_model: ./llama", "datasets: a list of 1", "max_steps: 10", "optimizer: adamw", "seed: 3"])
    );
    assert_eq!(job.notes.len(), 5, "{:?}", job.notes);
    assert!(job.notes[0].starts_with("left out `vllm` (line 6) is the string \"fast\""));
}

#[test]
fn steps_of_axolotl_go_before_its_epochs_and_are_divided_by_what_happens_in_each() {
    let of = |keys: &str| {
        let text = format!("{MINIMAL}num_epochs: 2\n{keys}");
        let imported = imported(&[("job.yaml", &text)]);
        let keys = serde_yaml_ng::to_string(&imported.keys).unwrap();
        (JobConfig::from_yaml_str(&keys, &[]).unwrap(), imported.notes.join("\n"))
    };

    let (job, notes) = of("saves_per_epoch: 2\nval_set_size: 0.1\nevals_per_epoch: 5\n");

    assert_eq!((job.schedule.max_steps, job.schedule.num_epochs), (Some(10), None));
    let plan = crate::train::run_plan::run_plan(&job, 4);
    assert_eq!((plan.total_steps, plan.save_steps, plan.eval_steps), (10, Some(3), Some(1)));
    assert!(notes.contains("`num_epochs`: Axolotl") && notes.contains("`saves_per_epoch`: beside"), "{notes}");
    let own = of("threads: 1\n").0;
    assert_eq!((own.schedule.max_steps, own.schedule.num_epochs), (Some(10), Some(2.0)));
}

#[test]
fn nothing_decays_beside_two_rates_of_adapters_in_axolotl() {
    let of = |keys: &str| {
        let text = format!("{MINIMAL}adapter: lora\nlora_target_linear: true\nweight_decay: 0.1\n{keys}");
        let imported = imported(&[("job.yaml", &text)]);
        (imported.keys.contains_key("weight_decay"), imported.notes.join("\n").contains("decay nothing"))
    };

    assert_eq!((of("loraplus_lr_ratio: 16\n"), of("")), ((false, true), (true, false)));
}

#[test]
fn file_of_another_tool_is_recognised_and_a_job_is_not() {
    let tool = |name: &str, text: &str| import::tool_of(Path::new(name), text);

    assert_eq!(tool("a.toml", "[model]"), Some("torchtitan"));
    assert_eq!(tool("a.json", "{\"zero_optimization\": {\"stage\": 1}}"), Some("DeepSpeed"));
    assert_eq!(tool("a.yaml", "distributed_type: FSDP\n"), Some("Accelerate"));
    assert_eq!(tool("a.yaml", MINIMAL), None);
    assert_eq!(tool("a.yaml", "seed: 3\n"), None);
}

#[test]
fn key_of_another_tool_that_contradicts_the_own_one_is_refused() {
    let error = |keys: &str| JobConfig::from_yaml_str(&format!("{MINIMAL}{keys}"), &[]).unwrap_err().to_string();

    for (keys, own) in [
        ("adam_eps: 1e-6\nadam_epsilon: 1e-8\n", "adam_epsilon"),
        ("save_strategy: 'no'\nsave_steps: 5\n", "save_steps"),
        ("float16: true\nfp16: false\n", "fp16"),
        ("curriculum_sampling: true\nshuffle: true\n", "shuffle"),
        ("micro_batch_size: 2\ndeepspeed: {train_micro_batch_size_per_gpu: 4}\n", "micro_batch_size"),
    ] {
        assert!(error(keys).contains(&format!("the file has `{own}")), "{}", error(keys));
    }
    let same = format!("{MINIMAL}adam_eps: 1e-6\nadam_epsilon: 0.000001\nfloat16: true\nfp16: true\n");
    assert!(JobConfig::from_yaml_str(&same, &[]).is_ok());
}
