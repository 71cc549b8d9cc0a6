//! Files of LLaMA-Factory, TRL and Hugging Face's trainer become jobs that train the same, or are refused by the name of a key.

use super::import::{Imported, import, tool_of};
use super::tests::{set, shown_keys};
use crate::config::JobConfig;
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

fn imported(files: &[(&str, &str)]) -> Result<Imported, ConfigError> {
    let read = |path: &Path| {
        let found = files.iter().find(|(name, _)| path == Path::new(name));
        found.map(|(_, text)| (*text).to_owned()).ok_or_else(|| std::io::ErrorKind::NotFound.into())
    };
    import(Path::new(files[0].0), &[], &read)
}

/// The job that the converted keys describe.
fn job(imported: &Imported) -> JobConfig {
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
        ("stage: sft", "stage: dpo", "`stage` (line 5) is the string \"dpo\": there is no preference"),
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

#[test]
fn every_argument_of_the_three_tools_is_known() {
    let known: Vec<&str> = super::hugging_face::names().collect();
    let missing: Vec<&str> = include_str!("trainer_arguments.txt").lines().filter(|key| !known.contains(key)).collect();

    assert!(missing.is_empty(), "without a rule: {missing:?}");
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
fn spellings_of_accelerate_in_a_job_are_not_lost() {
    let found = imported(&[("a.yml", "base_model: m\ndatasets: [{path: a, type: alpaca}]\ntp_size: 2\n")]).unwrap();

    assert_eq!(job(&found).parallel.tensor_parallel_size, 2);
}
