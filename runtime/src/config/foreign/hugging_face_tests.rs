//! Files of LLaMA-Factory, TRL and Hugging Face's trainer become jobs that train the same, or are refused by the name of a key.

use super::PairsAt;
use super::import::{Imported, import, tool_of};
use super::tests::{set, shown_keys};
use crate::config::JobConfig;
use crate::config::datasets::{ExcessLength, TrainedRoles};
use crate::config::error::ConfigError;
use crate::config::starter::{self, Extent};
use std::path::Path;

const LLAMA_FACTORY: &str = "### model
model_name_or_path: models/llama
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
### dataset
dataset: chats, orders
template: llama3
cutoff_len: 1024
max_samples: 1_000
overwrite_cache: yes
preprocessing_num_workers: 16
### output
output_dir: saves/one
logging_steps: 5
save_steps: 200
plot_loss: true
### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 100
";

const DATASET_INFO: &str = r#"{
  "chats": {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
  "orders": {"file_name": "orders.json", "columns": {"prompt": "question", "response": "answer"}}
}"#;

pub(super) fn imported(files: &[(&str, &str)]) -> Result<Imported, ConfigError> {
    imported_with(files, &|_| None)
}

/// The same, with data that are looked at.
pub(super) fn imported_with(files: &[(&str, &str)], pairs_at: &PairsAt<'_>) -> Result<Imported, ConfigError> {
    let read = |path: &Path| {
        let found = files.iter().find(|(name, _)| path == Path::new(name));
        found.map(|(_, text)| (*text).to_owned()).ok_or_else(|| std::io::ErrorKind::NotFound.into())
    };
    import(Path::new(files[0].0), &[], &read, pairs_at)
}

/// The job that the converted keys describe.
pub(super) fn job(imported: &Imported) -> JobConfig {
    JobConfig::from_yaml_str(&starter::file("", &imported.keys, None, Extent::Set), &[]).unwrap()
}

#[test]
fn job_of_llama_factory_keeps_its_adapters_batch_and_schedule() {
    let found = imported(&[("a.yaml", LLAMA_FACTORY), ("data/dataset_info.json", DATASET_INFO)]).unwrap();

    assert_eq!((found.tool, found.is_whole), ("LLaMA-Factory", true));
    let job = job(&found);
    assert_eq!(job.model.base_model.as_deref(), Some(Path::new("models/llama")));
    assert_eq!((job.adapter.lora_r, job.adapter.lora_alpha), (Some(16), Some(32.0)));
    assert!(job.adapter.lora_target_linear && job.precision.bf16.word() == "true");
    assert_eq!((job.data.sequence_len, job.schedule.num_epochs), (1024, Some(3.0)));
    assert_eq!((job.schedule.micro_batch_size, job.schedule.gradient_accumulation_steps), (2, 8));
    let [chats, orders] = &job.data.datasets[..] else { panic!("{:?}", job.data.datasets) };
    assert_eq!((chats.path.as_path(), chats.r#type.word().as_str()), (Path::new("data/chats.json"), "chat_template"));
    assert_eq!((orders.path.as_path(), orders.r#type.word().as_str()), (Path::new("data/orders.json"), "custom"));
    assert_eq!(chats.split.as_ref().unwrap().text(), "train[:1000]");
    assert!(found.notes.iter().any(|note| note.contains("without effect here: ") && note.contains("ddp_timeout")));
    assert!(found.notes.iter().any(|note| note.contains("the instructions of orders get Alpaca's prompt")));
}

#[test]
fn data_set_that_llama_factory_describes_elsewhere_keeps_its_name_and_is_reported() {
    let found = imported(&[("a.yaml", &LLAMA_FACTORY.replace("chats, orders", "identity"))]).unwrap();

    assert_eq!(job(&found).data.datasets[0].path, Path::new("identity"));
    assert!(found.notes.iter().any(|note| note.contains("does not describe identity")), "{:?}", found.notes);
}

#[test]
fn job_of_trl_has_the_defaults_of_trl() {
    let text = "model_name_or_path:\n  Qwen/Qwen2.5-0.5B\ndataset_name: stanfordnlp/imdb\ndataset_text_field: text\n\
                report_to:\n  none\nlearning_rate:\n  0.0001\nlr_scheduler_type: cosine\nuse_peft: true\nlora_target_modules: all-linear\n\
                optim: adamw_torch\nmax_grad_norm: 0\nmax_steps: -1\n";
    let found = imported(&[("a.yaml", text)]).unwrap();

    assert_eq!((found.tool, found.is_whole), ("TRL", true));
    assert_eq!(
        shown_keys(&found),
        set(&[
            "adapter: lora",
            "base_model: Qwen/Qwen2.5-0.5B",
            "bf16: true",
            "datasets: a list of 1",
            "excess_length_strategy: truncate",
            "gradient_checkpointing: true",
            "learning_rate: 0.0001",
            "lora_alpha: 32",
            "lora_dropout: 0.05",
            "lora_r: 16",
            "lora_target_linear: true",
            "lr_scheduler: cosine",
            "max_grad_norm: none",
            "micro_batch_size: 8",
            "num_epochs: 3",
            "optimizer: adamw",
            "save_total_limit: none",
            "sequence_len: 1024",
        ])
    );
    assert_eq!(job(&found).data.datasets[0].r#type.word(), "completion");
}

#[test]
fn arguments_of_the_trainer_are_a_part_of_a_job_also_as_json() {
    let json = r#"{"output_dir": "out", "per_device_train_batch_size": 4, "num_train_epochs": 2, "save_strategy": "epoch",
        "weight_decay": 0.01, "warmup_steps": 10, "gradient_checkpointing_kwargs": {"use_reentrant": false}, "tf32": true}"#;
    let found = imported(&[("a.json", json)]).unwrap();

    assert_eq!((found.tool, found.is_whole), ("Hugging Face's trainer", false));
    let keys = shown_keys(&found);
    for key in ["output_dir: out", "micro_batch_size: 4", "num_epochs: 2", "saves_per_epoch: 1", "warmup_steps: 10"] {
        assert!(keys.contains(key), "{key} in {keys:?}");
    }
    assert_eq!(found.notes.iter().filter(|note| note.contains("names no")).count(), 2, "{:?}", found.notes);
}

#[test]
fn key_that_no_trainer_has_is_refused_with_its_line_and_the_nearest_key() {
    let error = imported(&[("a.yaml", &format!("{LLAMA_FACTORY}learnig_rate: 2e-4\nzebra: 1\n"))]).unwrap_err();

    let text = error.to_string();
    assert!(text.contains("unknown key `learnig_rate` (line 36); did you mean `learning_rate`?"), "{text}");
    assert!(text.contains("unknown key `zebra` (line 37)"), "{text}");
}

#[test]
fn what_is_not_done_is_refused_by_the_name_of_its_key() {
    for (line, other, part) in [
        ("stage: sft", "stage: ppo", "`stage` (line 5) is the string \"ppo\": there is no reinforcement training"),
        ("finetuning_type: lora", "finetuning_type: freeze", "`finetuning_type` (line 7)"),
        ("bf16: true", "neftune_noise_alpha: 5", "`neftune_noise_alpha` (line 29) is 5"),
        ("bf16: true", "quantization_bit: 3", "`quantization_bit` (line 29) is 3"),
        ("bf16: true", "optim: sophia", "`optimizer` (line 29) is the string \"sophia\""),
        ("bf16: true", "deepspeed: no/such.json", "`deepspeed` (line 29)"),
    ] {
        let text = LLAMA_FACTORY.replace(line, other);
        let error = match imported(&[("a.yaml", &text), ("data/dataset_info.json", DATASET_INFO)]) {
            Err(error) => error,
            Ok(found) => {
                let written = starter::file("", &found.keys, None, Extent::Set);
                found.located(JobConfig::from_yaml_str(&written, &[]).unwrap_err())
            }
        };
        assert!(error.to_string().contains(part), "{other}: {error}");
    }
}

#[test]
fn file_of_a_trainer_is_no_job_of_phalanx() {
    assert_eq!(tool_of(Path::new("a.yaml"), LLAMA_FACTORY), Some("LLaMA-Factory"));
    assert_eq!(tool_of(Path::new("a.yaml"), "model_name_or_path: m\ndatasets: [{path: a}]\n"), Some("TRL"));
    assert_eq!(tool_of(Path::new("a.yaml"), "base_model: m\nnum_train_epochs: 3\n"), None);
}

/// The arguments of the three tools with their defaults: of `TrainingArguments`, and for the others where theirs differ.
fn arguments() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    include_str!("trainer_defaults.txt").lines().map(|line| {
        let (tool, rest) = line.split_once(' ').unwrap();
        let (key, default) = rest.split_once(' ').unwrap();
        (tool, key, default)
    })
}

#[test]
fn every_argument_of_the_three_tools_is_known() {
    let known: Vec<&str> = super::hugging_face::names().collect();
    let missing: Vec<&str> = arguments().map(|(_, key, _)| key).filter(|key| !known.contains(key)).collect();

    assert!(missing.is_empty(), "without a rule: {missing:?}");
}

#[test]
fn file_that_writes_out_a_default_of_its_tool_is_the_same_job() {
    // Keys that set how many lines are printed, and keys that name the kind of the records.
    const OTHER: [&str; 3] = ["logging_steps", "dataset_text_field", "assistant_only_loss"];
    let info = ("data/dataset_info.json", DATASET_INFO);
    let mut differing = Vec::new();
    for (tool, base) in [
        ("trl", "model_name_or_path: m\ndataset_name: d\nload_in_4bit: true\nuse_peft: true\n"),
        ("llama_factory", "model_name_or_path: m\nstage: sft\ndataset: chats\nquantization_bit: 4\n"),
    ] {
        let plain = job(&imported(&[("a.yaml", base), info]).unwrap());
        let own: Vec<&str> = arguments().filter(|(of, ..)| *of == tool).map(|(_, key, _)| key).collect();
        let of_tool = arguments().filter(|(of, key, _)| *of == tool || *of == "trainer" && !own.contains(key));
        for (_, key, default) in
            of_tool.filter(|(_, key, _)| !OTHER.contains(key) && !base.contains(&format!("{key}:")))
        {
            let explicit = match imported(&[("a.yaml", &format!("{base}{key}: {default}\n")), info]) {
                Ok(explicit) => job(&explicit),
                Err(error) => {
                    differing.push(format!("{tool} {key}: {default}: {error}"));
                    continue;
                }
            };
            if explicit != plain {
                differing.push(format!("{tool} {key}: {default}"));
            }
        }
    }

    assert!(differing.is_empty(), "{differing:#?}");
}

#[test]
fn long_samples_of_the_other_tools_are_truncated() {
    for (text, len) in [
        ("model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\n", 1024),
        ("model_name_or_path: m\nstage: sft\ndataset: chats\nmax_length: 77\n", 2048),
    ] {
        let job = job(&imported(&[("a.yaml", text), ("data/dataset_info.json", DATASET_INFO)]).unwrap());

        assert_eq!((job.data.excess_length_strategy, job.data.sequence_len), (ExcessLength::Truncate, len), "{text}");
    }
    let error = imported(&[("a.yaml", "model_name_or_path: m\ndataset_name: d\nmax_length: null\n")]).unwrap_err();
    assert!(error.to_string().contains("`max_length`"), "{error}");
}

#[test]
fn conversations_of_trl_are_trained_on_as_its_loss_keys_say() {
    for (keys, kind, on_inputs, note) in [
        ("", "chat_template", false, "`assistant_only_loss` is false"),
        ("assistant_only_loss: true\n", "chat_template", false, ""),
        ("completion_only_loss: true\n", "custom", false, "`prompt` and `completion`"),
        ("completion_only_loss: false\n", "custom", true, "`prompt` and `completion`"),
        ("dataset_text_field: body\n", "completion", false, "cut into several samples"),
    ] {
        let found = imported(&[("a.yaml", &format!("model_name_or_path: m\ndataset_name: d\n{keys}"))]).unwrap();
        let job = job(&found);

        assert_eq!(
            (job.data.datasets[0].r#type.word().as_str(), job.data.train_on_inputs),
            (kind, on_inputs),
            "{keys}"
        );
        let all = job.data.datasets[0].roles_to_train == TrainedRoles::All;
        assert_eq!(all, keys.is_empty(), "{keys}");
        assert!(found.notes.iter().any(|text| text.contains(note)) || note.is_empty(), "{keys}: {:?}", found.notes);
    }
}

#[test]
fn evaluation_of_trl_is_on_its_test_split() {
    for strategy in ["steps", "epoch"] {
        let text = format!("model_name_or_path: m\ndataset_name: d\neval_strategy: {strategy}\n");
        let job = job(&imported(&[("a.yaml", &text)]).unwrap());

        assert_eq!(job.data.test_datasets[0].split.as_ref().unwrap().text(), "test");
    }
}

fn of_info(description: &str) -> Result<Imported, ConfigError> {
    let text = "model_name_or_path: m\nstage: sft\ndataset: d\n";
    imported(&[("a.yaml", text), ("data/dataset_info.json", &format!("{{\"d\": {description}}}"))])
}

/// LLaMA-Factory reads `dev.json` and `test.json` of a folder, too.
#[test]
fn folder_of_llama_factory_is_all_its_files() {
    let of = |file_name: &str| {
        let info = format!(r#"{{"d": {{"file_name": "{file_name}"}}}}"#);
        let read = |path: &Path| match path.to_str().unwrap() {
            "a.yaml" => Ok("model_name_or_path: m\nstage: sft\ndataset: d\n".to_owned()),
            "data/dataset_info.json" => Ok(info.clone()),
            "data/corpus" => Err(std::io::ErrorKind::IsADirectory.into()),
            _ => Err(std::io::ErrorKind::NotFound.into()),
        };
        let job = job(&import(Path::new("a.yaml"), &[], &read, &|_| None).unwrap());
        job.data.datasets[0].data_files.as_ref().map(|files| files.0.clone())
    };

    assert_eq!((of("corpus"), of("d.json")), (Some(vec!["*".to_owned()]), None));
}

/// transformers takes it whenever DeepSpeed's file has one.
#[test]
fn schedule_of_deepspeed_goes_before_that_of_the_trainer() {
    let ds = r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "linear"}}}"#;
    let trainer =
        "model_name_or_path: m\ndataset_name: d\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\ndeepspeed: ds.json\n";
    let axolotl = "base_model: m\ndatasets: [{path: a, type: alpaca}]\nlr_scheduler: cosine\nwarmup_ratio: 0.1\ndeepspeed: ds.json\n";
    for text in [trainer, axolotl] {
        let found = imported(&[("a.yaml", text), ("ds.json", ds)]).unwrap();

        let keys = shown_keys(&found);
        assert!(keys.is_superset(&set(&["lr_scheduler: constant_with_warmup", "warmup_ratio: 0.1"])), "{keys:?}");
        assert!(found.notes.join("\n").contains("the scheduler of DeepSpeed goes before"), "{:?}", found.notes);
    }
}

#[test]
fn texts_of_llama_factory_are_isolated_and_cut_which_is_told() {
    let info = r#"{"d": {"file_name": "d.json"}}"#;
    let of = |keys: &str| {
        let text = format!("model_name_or_path: m\nstage: pt\ndataset: d\n{keys}");
        imported(&[("a.yaml", &text), ("data/dataset_info.json", info)]).unwrap().notes.join("\n")
    };

    assert!(of("").contains("attention does not cross texts here"));
    assert!(of("packing: false\n").contains("cut into several samples here"));
    assert!(of("packing: true\n").contains("attention does not cross samples here"));
}

#[test]
fn columns_of_llama_factory_keep_their_meaning() {
    let found = of_info(
        r#"{"file_name": "d.json", "num_samples": 5,
            "columns": {"prompt": "question", "response": "answer", "system": "persona"}}"#,
    );
    let job_of_d = job(&found.unwrap());
    let dataset = &job_of_d.data.datasets[0];
    let prompt = dataset.prompt.as_ref().unwrap().prompt();
    assert_eq!((prompt.field_system.as_str(), prompt.field_instruction.as_str()), ("persona", "question"));
    // Without `query`, no record has an input.
    assert!(!prompt.format.contains("{input}") && prompt.format.contains("### Instruction:"), "{}", prompt.format);
    assert_eq!(dataset.split.as_ref().unwrap().text(), "train[:5]");

    let found = of_info(
        r#"{"hf_hub_url": "org/d", "formatting": "openai", "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}}"#,
    );
    let job = job(&found.unwrap());
    assert_eq!(
        (job.data.datasets[0].path.as_path(), job.data.datasets[0].r#type.word().as_str()),
        (Path::new("org/d"), "chat_template")
    );
}

#[test]
fn calls_and_tools_of_llama_factory_keep_their_names() {
    let found = of_info(
        r#"{"file_name": "d.json", "formatting": "sharegpt", "columns": {"messages": "m", "tools": "t"},
            "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt", "function_tag": "call"}}"#,
    );

    let job = job(&found.unwrap());
    let dataset = &job.data.datasets[0];
    assert_eq!(dataset.field_tools.as_deref(), Some("t"));
    assert_eq!(dataset.roles.0["function_call"], ["call"]);
}

#[test]
fn what_a_description_of_llama_factory_asks_for_in_vain_is_refused_by_name() {
    for (keys, named) in [
        (r#""columns": {"prompt": "q", "response": "a", "history": "h"}"#, "columns.history"),
        (r#""formatting": "sharegpt", "columns": {"messages": "m", "system": "persona"}"#, "columns.system"),
        (r#""columns": {"prompt": "q", "response": "a", "tools": "t"}"#, "columns.tools"),
        (r#""columns": {"prompt": "q", "images": "i"}"#, "columns.images"),
        (r#""ranking": true"#, "ranking"),
        (r#""folder": "f""#, "folder"),
        (r#""formatting": "parrot""#, "formatting"),
        (r#""tags": {"parrot_tag": "p"}"#, "tags.parrot_tag"),
    ] {
        let error = of_info(&format!("{{\"file_name\": \"d.json\", {keys}}}")).unwrap_err().to_string();

        assert!(error.contains(&format!("`{named}` of d in dataset_info.json")), "{keys}: {error}");
    }
}

#[test]
fn false_switches_off_what_is_on_by_default() {
    let found = imported(&[
        ("a.yaml", &format!("{LLAMA_FACTORY}enable_thinking: false\n")),
        ("data/dataset_info.json", DATASET_INFO),
    ]);
    let job = job(&found.unwrap());
    assert_eq!(job.data.chat_template_kwargs.0.get("enable_thinking"), Some(&serde_json::Value::Bool(false)));

    let axolotl = "base_model: m\nadapter: lora\nlora_target_linear: true\ndatasets: [{path: a, type: alpaca}]\npeft_init_lora_weights: ";
    assert!(imported(&[("a.yml", &format!("{axolotl}true\n"))]).is_ok());
    let notes = imported(&[("a.yml", &format!("{axolotl}false\n"))]).unwrap().notes.join("\n");
    assert!(notes.contains("left out `peft_init_lora_weights`"), "{notes}");

    let error = imported(&[("a.yaml", &format!("{LLAMA_FACTORY}parrot: false\n"))]).unwrap_err().to_string();
    assert!(error.contains("unknown key `parrot`"), "{error}");
}

#[test]
fn constant_schedule_of_the_trainer_has_no_warm_up() {
    for key in ["warmup_steps: 10", "warmup_ratio: 0.1"] {
        let text = format!("model_name_or_path: m\ndataset_name: d\nlr_scheduler_type: constant\n{key}\n");
        let found = imported(&[("a.yaml", &text)]).unwrap();

        assert_eq!((job(&found).schedule.warmup_steps, job(&found).schedule.warmup_ratio), (None, None));
        assert!(found.notes.iter().any(|note| note.contains("has no warm-up")), "{:?}", found.notes);
    }
}

#[test]
fn job_of_axolotl_with_unknown_or_invalid_keys_is_refused_with_the_lines_of_its_file() {
    let text = "base_model: m\ndatasets:\n  - path: a\n    type: alpaca\nlearnig_rate: 2e-4\nlora_rank: 8\nseed: x\n";
    let error = imported(&[("a.yml", text)]).unwrap_err().to_string();

    for part in [
        "unknown key `learnig_rate` (line 5); did you mean `learning_rate`?",
        "unknown key `lora_rank` (line 6); did you mean `lora_r`?",
        "`seed` (line 7)",
    ] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

#[test]
fn defaults_of_axolotl_that_differ_are_noted_but_not_in_files_of_phalanx() {
    let text = "base_model: m\ndatasets: [{path: a, type: alpaca}]\nlr_scheduler: SCHEDULE\n";
    let notes = |text: &str| imported(&[("a.yml", text)]).unwrap().notes.join("\n");

    let linear = notes(&text.replace("SCHEDULE", "linear"));
    assert!(linear.contains("3 % of the steps") && linear.contains("`bf16: auto`"), "{linear}");
    let constant =
        imported(&[("a.yml", &(text.replace("SCHEDULE", "constant") + "warmup_steps: 9\nbf16: true\n"))]).unwrap();
    assert_eq!(job(&constant).schedule.warmup_steps, None);
    assert!(constant.notes.join("").contains("`constant` of Axolotl has no warm-up"), "{:?}", constant.notes);
    let lion = imported(&[("a.yml", &(text.replace("SCHEDULE", "linear") + "optimizer: lion_pytorch\n"))]).unwrap();
    assert_eq!(lion.keys.get("adam_beta2").and_then(serde_yaml_ng::Value::as_f64), Some(0.999));
    assert_eq!(notes(&(text.replace("SCHEDULE", "linear") + "device: cpu\n")), "");
}

#[test]
fn spellings_of_accelerate_in_a_job_are_not_lost() {
    let found = imported(&[("a.yml", "base_model: m\ndatasets: [{path: a, type: alpaca}]\ntp_size: 2\n")]).unwrap();

    assert_eq!(job(&found).parallel.tensor_parallel_size, 2);
}

#[test]
fn lowest_rate_is_a_share_of_the_rate_wherever_that_stands() {
    let schedule = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5}\n";
    let base = "model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\n";
    for (text, share) in [
        (format!("{base}learning_rate: 4e-5\n{schedule}"), 0.25),
        (format!("{base}{schedule}learning_rate: 4e-5\n"), 0.25),
        (format!("{base}{schedule}"), 0.5),
    ] {
        let keys = shown_keys(&imported(&[("a.yaml", &text)]).unwrap());
        assert!(keys.contains(&format!("cosine_min_lr_ratio: {share}")), "{text}: {keys:?}");
    }
}

#[test]
fn templates_of_llama_factory_that_write_another_text_are_named() {
    let of = |template: &str| {
        let text = format!("model_name_or_path: m\nstage: sft\ndataset: chats\ntemplate: {template}\n");
        imported(&[("a.yaml", &text), ("data/dataset_info.json", DATASET_INFO)]).unwrap()
    };

    assert!(shown_keys(&of("qwen3_nothink")).contains("chat_template: chatml"));
    for template in ["qwen3", "alpaca"] {
        assert!(of(template).notes.iter().any(|note| note.starts_with("`template`")), "{template}");
    }
}

#[test]
fn plain_texts_that_are_lines_elsewhere_are_told() {
    let info = r#"{"d": {"file_name": "d.txt", "columns": {"prompt": "text"}}}"#;
    let factory =
        imported(&[("a.yaml", "model_name_or_path: m\nstage: pt\ndataset: d\n"), ("data/dataset_info.json", info)]);
    let axolotl = |path: &str| {
        let text = format!("base_model: m\nmax_steps: 1\ndatasets: [{{path: {path}, type: completion}}]\n");
        imported(&[("a.yml", &text)]).unwrap().notes.join("\n")
    };

    assert!(factory.unwrap().notes.join("\n").contains("data/d.txt is one text here"));
    assert!(axolotl("c.txt").contains("c.txt is one text here") && !axolotl("c.jsonl").contains("one text"));
}
