//! Bad input yields one clear sentence and exit code 2, and leaves no half-written files.

use crate::support::{Project, Run, flip, ranks_of};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

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
fn unknown_instruction_set_is_refused_with_those_that_fit() {
    let p = Project::new();
    let limited = |isa| {
        let mut command =
            p.command(&["train", "job.yaml", "--device", "cpu", "--max_steps", "2", "--warmup_steps", "1"]);
        Run::of(command.env("PHALANX_MAX_CPU_ISA", isa).output().expect("the binary is built"))
    };
    limited("avx1024").refuses(&["PHALANX_MAX_CPU_ISA=avx1024", "baseline, avx2, avx512, avx512_bf16, amx"]);
    assert!(!p.path("out").exists(), "nothing was written");
    limited("baseline").succeeds();
}

#[test]
fn missing_files_are_named() {
    let p = Project::new();
    p.run(&["train", "jobb.yaml"]).refuses(&["jobb.yaml"]);
    p.train(&["--datasets.0.path", "texts.txt"]).refuses(&["texts.txt"]);
    p.write(
        "job2.yaml",
        &crate::support::YAML.replace("model:\n  model_type: llama", "base_model: nowhere\nx:\n  y: z"),
    );
    let yaml = crate::support::YAML.split_once("tokenizer: bytes").unwrap().1;
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
    let line = |text: &str| format!("{{\"segments\": [{{\"label\": true, \"text\": \"{text}\"}}]}}\n");
    p.write("data.jsonl", &[line("fine"), line(&long)].concat());
    let data = ["--datasets.0.path", "data.jsonl", "--datasets.0.type", "input_output", "--max_steps", "4"];
    p.train(&[&data[..], &["--excess_length_strategy", "error"]].concat()).refuses(&[
        "data.jsonl:2",
        "sequence_len 32",
        "truncate",
    ]);
    p.train(&data).succeeds();
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
fn regular_expression_that_adapts_nothing_is_refused_with_a_path_that_exists() {
    let p = Project::new();
    let lora = |pattern: &'static str| ["--adapter", "lora", "--lora_target_modules", pattern];
    p.train(&lora("q_proj")).refuses(&["\"q_proj\"", "model.layers.0.self_attn.q_proj"]);
    p.train(&lora("(q_proj")).refuses(&["lora_target_modules", "a regular expression"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

#[test]
fn patterns_of_trained_parameters_that_fit_none_or_half_of_a_product_are_refused() {
    let p = Project::new();
    let trained = |pattern: &'static str| ["--trained_parameters", pattern];
    p.train(&trained("[lm_head$]")).refuses(&["trained_parameters", "a name is model.embed_tokens.weight"]);
    let half = "[model.layers.0.self_attn.q_proj]";
    p.train(&trained(half)).refuses(&["self_attn.q_proj.weight without model.layers.0.self_attn.k_proj.weight"]);
    p.train(&trained("['(']")).refuses(&["trained_parameters", "\"(\""]);
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
    p.run(&["train", "job.yaml", "--resume_from_checkpoint", &fifteen.display().to_string()]).refuses(&["damaged"]);

    let run = p.train(&[]).succeeds();

    for bad in [twenty, fifteen, ten] {
        let name = bad.file_name().unwrap().to_str().unwrap();
        assert!(run.stdout.contains("skipped checkpoint") && run.stdout.contains(name), "{}", run.stdout);
    }
    assert!(
        run.stdout.contains("resuming at step 5 ") && run.stdout.contains(five.file_name().unwrap().to_str().unwrap())
    );
    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"));
}

#[test]
fn run_is_refused_if_no_checkpoint_is_readable() {
    let p = Project::new();
    p.train(&["--save_total_limit", "none"]).succeeds();
    let before = p.checkpoints("out");
    let newest = before.last().unwrap().join("MANIFEST");
    std::fs::rename(&newest, newest.with_extension("away")).unwrap();
    // Root ignores permissions, so a folder stands for a file that refuses to be read.
    std::fs::create_dir(&newest).unwrap();

    let longer = ["--max_steps", "30", "--save_total_limit", "1"];
    p.train(&longer).refuses(&[newest.to_str().unwrap(), "--resume_from_checkpoint none"]);
    assert_eq!(p.checkpoints("out"), before);
    assert_eq!(p.metrics("out").len(), 20, "no step ran");

    for checkpoint in &before {
        let _ = std::fs::remove_dir(checkpoint.join("MANIFEST"));
        std::fs::write(checkpoint.join("MANIFEST"), "damaged").unwrap();
    }
    p.train(&longer).refuses(&["none of the 4 checkpoints", newest.to_str().unwrap(), "--resume_from_checkpoint none"]);
    assert_eq!(p.checkpoints("out"), before);

    p.train(&["--resume_from_checkpoint", "none"]).succeeds();
}

#[test]
fn full_disk_keeps_the_previous_checkpoint_and_is_reported() {
    let p = Project::new();
    let constant = ["--lr_scheduler", "constant"];
    p.train(&[&constant[..], &["--max_steps", "5"]].concat()).succeeds();
    let before = p.checkpoints("out");
    let long = "--max_steps 1000000 --gradient_accumulation_steps 64 --save_steps none --checkpoint_required true";
    let (program, checkpoint) = (env!("CARGO_BIN_EXE_phalanx"), before[0].display());
    let words = format!("train job.yaml {long} --resume_from_checkpoint {checkpoint}");
    let mut full = Command::new(program);
    full.args(words.split(' ')).current_dir(p.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut full = full.spawn().unwrap();
    let mut lines = BufReader::new(full.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    assert!(lines.any(|line| line.starts_with("step     6")), "the run resumes after step 5");

    // From now on no file may grow beyond 64 KiB: a shard of this model does not fit, but its metrics do.
    ranks_of(full.id()).into_iter().for_each(|rank| limit_file_size(rank, 64 << 10));
    let save = p.run(&["save", "job.yaml"]);
    lines.for_each(drop);
    let full = crate::support::Run::of(full.wait_with_output().unwrap());

    assert_ne!(save.code, Some(0), "a save that failed does not seem to succeed: {}", save.stdout);
    assert_ne!(full.code, Some(0), "{}", full.stdout);
    assert!(full.stderr.contains("rank-00000-0000.safetensors"), "{}", full.stderr);
    assert_eq!(p.checkpoints("out"), before, "the failed save left no files, and the previous checkpoint remains");
    let resumed = p.train(&[&constant[..], &["--max_steps", "10"]].concat()).succeeds();
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

#[test]
fn numbers_beyond_any_machine_are_refused_with_their_range() {
    let p = Project::new();
    for [key, value, fits] in [
        ["micro_batch_size", "72057594037927936", "1 to 1048576"],
        ["sequence_len", "9223372036854775807", "1 to 16777216"],
        ["microbatches_per_step", "18446744073709551615", "1 to 1048576"],
        ["gradient_accumulation_steps", "1000000", "at most 8192"],
        ["threads", "2000", "1 to 1024"],
        ["bucket_cap_mb", "18446744073709551615", "1 to 1048576"],
        ["tp_size", "18446744073709551615", "1 to 1048576"],
        ["dp_shard_size", "4611686018427387904", "1 to 1048576"],
        ["elastic.detection_time", "1e300", "at most 3600"],
        ["elastic.step_timeout", "1e300", "at most 31536000"],
        ["elastic.replace_patience", "1e300", "at most 31536000"],
        ["elastic.spare_ranks", "4294967296", "0 to 65536"],
        ["datasets.0.weight", "1e12", "at most 10000"],
    ] {
        let words = [&format!("--{key}"), value];
        p.train(&words).refuses(&[fits]);
        p.run(&["estimate", "job.yaml", words[0], words[1]]).refuses(&[fits]);
    }
    for (words, parts) in [
        (["--dp_replicate_size", "65536", "--dp_shard_size", "65536"], ["65536 x 65536", "1 to 1048576"]),
        (["--micro_batch_size", "1048576", "--sequence_len", "1048576"], ["1099511627776 tokens", "2147483647"]),
        (["--model.hidden_size", "268435456", "--model.intermediate_size", "268435456"], ["parameters", "at most"]),
    ] {
        p.train(&words).refuses(&parts);
        p.run(&[&["estimate", "job.yaml"], &words[..]].concat()).refuses(&parts);
    }
    p.run(&["node", "--join", "x", "--ranks", "4294967295"]).refuses(&["--ranks", "65536"]);
    p.run(&["coordinator", "--join-hours", "18446744073709551615", "job.yaml"]).refuses(&["--join-hours"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

#[test]
fn yaml_of_any_depth_is_refused_at_once_and_a_byte_order_mark_is_read() {
    let p = Project::new();
    for deep in [format!("seed: {}1{}", "[".repeat(40_000), "]".repeat(40_000)), "- ".repeat(40_000)] {
        p.write("job.yaml", &deep);
        let begin = std::time::Instant::now();
        p.train(&[]).refuses(&["line 1", "deep"]);
        assert!(begin.elapsed().as_secs() < 30, "{:?}", begin.elapsed());
    }
    p.write("job.yaml", &format!("\u{feff}{}", crate::support::YAML));
    p.train(&["--max_steps", "2"]).succeeds();
    p.run(&["train", "/dev/zero"]).refuses(&["more than the 1048576 allowed"]);
}

#[test]
fn dataset_without_an_end_is_refused() {
    let p = Project::new();
    p.train(&["--datasets.0.path", "/dev/zero"]).refuses(&["/dev/zero: it is a device, not a regular file"]);
    assert!(Command::new("mkfifo").arg(p.path("pipe.jsonl")).status().unwrap().success());
    p.train(&["--datasets.0.path", "pipe.jsonl"]).refuses(&["pipe.jsonl: it is a pipe, not a regular file"]);
    p.train(&["--datasets.0.path", "/proc/self/status"]).refuses(&["/proc/self/status: it is a file of the kernel"]);
}

#[test]
fn pointer_of_git_lfs_is_refused_as_data() {
    let p = Project::new();
    p.write("text.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n");

    p.train(&[]).refuses(&["text.txt", "pointer of Git LFS", "git lfs pull"]);
}

#[test]
fn pointer_of_git_lfs_is_refused_in_place_of_any_file_of_a_model() {
    let p = Project::new();
    p.train(&["--max_steps", "1", "--output_dir", "base"]).succeeds();
    for name in
        ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
    {
        let path = p.path("base/model").join(name);
        let content = std::fs::read(&path);
        std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n").unwrap();

        let run = p.run(&["generate", "base/model", "--prompt", "a", "--max-new-tokens", "1"]);

        run.refuses(&[name, "it is a pointer of Git LFS", "git lfs pull"]);
        match content {
            Ok(content) => std::fs::write(&path, content).unwrap(),
            Err(_) => std::fs::remove_file(&path).unwrap(),
        }
    }
}

#[test]
fn data_set_has_more_files_than_a_process_may_open() {
    let p = Project::new();
    std::fs::create_dir(p.path("many")).unwrap();
    for n in 0..300 {
        p.write(&format!("many/{n:03}.jsonl"), &format!("{{\"text\": \"sample number {n}\"}}\n"));
    }
    let train = |limit: &str| {
        let program = env!("CARGO_BIN_EXE_phalanx");
        let script = format!("{limit}; exec {program} train job.yaml --max_steps 3 --datasets.0.path 'many/*.jsonl'");
        Run::of(Command::new("bash").args(["-c", &script]).current_dir(p.dir.path()).output().unwrap())
    };

    train("ulimit -n 200").succeeds();
    train("ulimit -Sn 200").succeeds();
}

#[test]
fn join_string_is_read_from_a_file_or_the_environment() {
    let p = Project::new();
    p.write("join.txt", "no join string\n");
    let in_environment =
        crate::support::Run::of(p.command(&["node"]).env("PHALANX_JOIN", "none either").output().unwrap());

    p.run(&["node", "--join-file", "join.txt"]).refuses(&["--join-file join.txt: "]);
    in_environment.refuses(&["PHALANX_JOIN: "]);
    p.run(&["node", "--join-file", "absent.txt"]).refuses(&["cannot read absent.txt"]);
    p.run(&["node"]).refuses(&["--join-file", "PHALANX_JOIN"]);
}

#[test]
fn rank_whose_token_cache_is_truncated_is_replaced_and_the_data_prepared_again() {
    let p = Project::new();
    p.train(&["--output_dir", "straight", "--max_steps", "300", "--save_steps", "none"]).succeeds();
    let long = ["train", "job.yaml", "--max_steps", "300", "--save_steps", "20", "--logging_steps", "1"];
    let mut job = p.command(&long).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(job.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    assert!(lines.any(|line| line.starts_with("step    25")));

    let tokens = std::fs::read_dir(p.path("out/data")).unwrap().map(|entry| entry.unwrap().path());
    let tokens = tokens.into_iter().find(|path| path.extension().is_some_and(|e| e == "tokens")).unwrap();
    std::fs::File::options().write(true).open(&tokens).unwrap().set_len(200).unwrap();
    let rest: Vec<String> = lines.collect();
    let run = crate::support::Run::of(job.wait_with_output().unwrap());

    assert_eq!(run.code, Some(0), "{rest:?} {}", run.stderr);
    assert!(rest.iter().any(|line| line.contains("cannot read token cache")), "{rest:?}");
    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"));
}

/// Limits the size of files that a process writes.
#[allow(unsafe_code)] // the standard library sets no limits
fn limit_file_size(pid: u32, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: `limit` lives until the call returns; the null pointer means that the old limit is not returned.
    let set = unsafe { libc::prlimit(pid as i32, libc::RLIMIT_FSIZE, &limit, std::ptr::null_mut()) };
    assert_eq!(set, 0, "process {pid} exists");
}
