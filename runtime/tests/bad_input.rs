//! Bad input yields one clear sentence and exit code 2, and leaves no half-written files.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use support::{Project, flip, ranks_of};

#[test]
fn unknown_key_is_refused_with_the_nearest_known_key() {
    let p = Project::new();
    p.train(&["--learning_rat", "1"]).refuses(&["learning_rat", "learning_rate"]);
    p.train(&["--model.hidden_sise", "8"]).refuses(&["hidden_sise", "hidden_size"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

#[test]
fn value_of_the_wrong_type_is_named_in_the_error() {
    let p = Project::new();
    p.train(&["--max_steps", "many"]).refuses(&["max_steps", "many"]);
    p.train(&["--sequence_len", "-4"]).refuses(&["sequence_len", "-4"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

#[test]
fn unavailable_device_is_refused_with_its_reason() {
    let p = Project::new();
    p.train(&["--device", "tpu"]).refuses(&["device", "tpu", "auto, cpu, cuda"]);
    assert!(!p.path("out").exists(), "nothing was written");
    p.train(&["--device", "cpu", "--max_steps", "3"]).succeeds();
}

#[test]
fn missing_files_are_named() {
    let p = Project::new();
    p.run(&["train", "jobb.yaml"]).refuses(&["jobb.yaml"]);
    p.train(&["--datasets.0.path", "texts.txt"]).refuses(&["texts.txt"]);
    p.write("job2.yaml", &support::YAML.replace("model:\n  model_type: llama", "base_model: nowhere\nx:\n  y: z"));
    let yaml = support::YAML.split_once("tokenizer: bytes").unwrap().1;
    p.write("job2.yaml", &format!("base_model: nowhere\n{yaml}"));
    p.run(&["train", "job2.yaml"]).refuses(&["nowhere"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

#[test]
fn empty_dataset_is_refused() {
    let p = Project::new();
    p.write("text.txt", "");
    p.train(&[]).refuses(&["text.txt"]);
    p.write("text.txt", "short");
    p.train(&[]).refuses(&["text.txt", "sequence_len 32"]);
}

#[test]
fn sample_longer_than_a_row_is_named_by_line_and_length() {
    let p = Project::new();
    let long = "x".repeat(100);
    p.write("data.jsonl", &format!("{{\"text\": \"fine\"}}\n{{\"text\": \"{long}\"}}\n"));
    p.train(&["--datasets.0.path", "data.jsonl"]).refuses(&["data.jsonl:2", "sequence_len 32", "truncate"]);
    p.train(&["--datasets.0.path", "data.jsonl", "--excess_length_strategy", "drop", "--max_steps", "2"]).succeeds();
}

#[test]
fn tokenizer_larger_than_the_model_is_refused() {
    let p = Project::new();
    p.train(&["--model.vocab_size", "100"]).refuses(&["vocab_size", "100"]);
}

#[test]
fn unsupported_architecture_is_refused_with_a_list_of_supported_ones() {
    let p = Project::new();
    p.train(&["--model.model_type", "mamba"]).refuses(&["mamba", "llama", "mistral", "qwen2", "qwen3", "gpt2"]);
}

#[test]
fn unknown_adapter_target_is_refused_with_a_list_of_targets_and_leaves_no_files() {
    let p = Project::new();
    let lora = ["--adapter", "lora", "--lora_target_modules", "[query]"];
    p.train(&lora).refuses(&["query", "q_proj", "down_proj"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

#[test]
fn row_longer_than_the_positions_of_the_model_is_refused() {
    let p = Project::new();
    p.train(&["--sequence_len", "65"]).refuses(&["sequence_len 65", "max_position_embeddings 64"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

#[test]
fn step_larger_than_the_machine_is_refused_with_a_hint() {
    let p = Project::new();
    let huge =
        ["--model.hidden_size", "65536", "--model.intermediate_size", "262144", "--model.num_hidden_layers", "64"];
    p.train(&huge).refuses(&["needs", "TiB", "this machine has", "phalanx estimate"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

#[test]
fn damaged_weights_are_refused_by_name() {
    let p = Project::new();
    p.train(&["--max_steps", "2"]).succeeds();
    let weights = p.path("out/model/model.safetensors");
    let good = std::fs::read(&weights).unwrap();
    let generate = || p.run(&["generate", "out/model", "--max-new-tokens", "1"]);
    generate().succeeds();

    std::fs::write(&weights, &good[..good.len() - 7]).unwrap();
    generate().refuses(&["model.safetensors"]);
    for at in [0, 9, 60, good.len() / 2, good.len() - 1] {
        std::fs::write(&weights, &good).unwrap();
        flip(&weights, |_| at);
        generate().refuses(&["model.safetensors"]);
    }
}

#[test]
fn damaged_and_uncommitted_checkpoints_are_skipped_with_a_warning() {
    let p = Project::new();
    p.train(&["--output_dir", "straight"]).succeeds();
    p.train(&["--save_total_limit", "none"]).succeeds();
    let checkpoints = p.checkpoints("out");
    let [five, ten, fifteen, twenty] = &checkpoints[..] else { panic!("{checkpoints:?}") };
    std::fs::remove_file(twenty.join("COMMIT")).unwrap();
    let shard = std::fs::read_dir(fifteen).unwrap().map(|e| e.unwrap().path());
    let shard = shard.into_iter().find(|f| f.extension().is_some_and(|e| e == "safetensors")).unwrap();
    flip(&shard, |n| n - 5);
    flip(&ten.join("MANIFEST"), |n| n / 2);

    let run = p.train(&[]).succeeds();

    for bad in [twenty, fifteen, ten] {
        let name = bad.file_name().unwrap().to_str().unwrap();
        assert!(run.stdout.contains("skipped checkpoint") && run.stdout.contains(name), "{}", run.stdout);
    }
    assert!(
        run.stdout.contains("resuming at step 5 ") && run.stdout.contains(five.file_name().unwrap().to_str().unwrap())
    );
    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"));
    p.run(&["train", "job.yaml", "--resume_from_checkpoint", &fifteen.display().to_string()]).refuses(&["damaged"]);
}

#[test]
fn full_disk_keeps_the_previous_checkpoint_and_is_reported() {
    let p = Project::new();
    p.train(&["--max_steps", "5"]).succeeds();
    let before = p.checkpoints("out");
    let long = "--max_steps 1000000 --gradient_accumulation_steps 64 --save_steps none --resume_from_checkpoint auto";
    let script = format!("trap '' XFSZ; exec {} train job.yaml {long}", env!("CARGO_BIN_EXE_phalanx"));
    let mut full = Command::new("bash");
    full.args(["-c", &script]).current_dir(p.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut full = full.spawn().unwrap();
    let mut lines = BufReader::new(full.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    assert!(lines.any(|line| line.starts_with("step     6")), "the run resumes after step 5");

    // From now on no file may grow beyond 64 KiB: a shard of this model does not fit, but its metrics do.
    ranks_of(full.id()).into_iter().for_each(|rank| limit_file_size(rank, 64 << 10));
    p.run(&["save", "job.yaml"]).succeeds();
    lines.for_each(drop);
    let full = support::Run::of(full.wait_with_output().unwrap());

    assert_ne!(full.code, Some(0), "{}", full.stdout);
    assert!(full.stderr.contains("rank-00000-0000.safetensors"), "{}", full.stderr);
    assert_eq!(p.checkpoints("out"), before, "the failed save left no files, and the previous checkpoint remains");
    let resumed = p.train(&["--max_steps", "10"]).succeeds();
    assert!(resumed.stdout.contains("resuming at step 5"), "{}", resumed.stdout);
}

#[test]
fn non_finite_loss_stops_the_run_and_names_step_and_parameter() {
    let p = Project::new();
    let run = p.train(&["--learning_rate", "1e30", "--max_grad_norm", "none", "--warmup_steps", "0"]);
    run.refuses(&["step ", "not finite", "model."]);
    assert!(!p.path("out/model").exists(), "no model was exported");
}

#[test]
fn export_overwrites_only_exports() {
    let p = Project::new();
    p.train(&["--max_steps", "2"]).succeeds();
    std::fs::create_dir(p.path("precious")).unwrap();
    p.write("precious/notes.txt", "mine");
    p.run(&["export", "out", "precious"]).refuses(&["precious"]);
    assert_eq!(std::fs::read_to_string(p.path("precious/notes.txt")).unwrap(), "mine");
    p.run(&["export", "out", "copy"]).succeeds();
    assert_eq!(std::fs::read(p.path("copy/model.safetensors")).unwrap(), p.model_bytes("out"));
}

/// Limits the size of files that a process writes.
#[allow(unsafe_code)] // the standard library sets no limits
fn limit_file_size(pid: u32, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: `limit` lives until the call returns; the null pointer means that the old limit is not returned.
    let set = unsafe { libc::prlimit(pid as i32, libc::RLIMIT_FSIZE, &limit, std::ptr::null_mut()) };
    assert_eq!(set, 0, "process {pid} exists");
}
