//! The commands with text and JSON output.

use crate::support::{Project, Run};
use serde_json::Value;
use std::io::Write;
use std::process::Stdio;

#[test]
fn run_writes_metrics_events_checkpoint_and_model_and_its_loss_falls() {
    let p = Project::new();

    let run = p.train(&["--max_steps", "40", "--val_set_size", "0.1", "--eval_steps", "20"]).succeeds();

    let text = std::fs::read_to_string(p.path("out/metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let steps: Vec<&Value> = lines.iter().filter(|l| l.get("loss").is_some()).collect();
    assert_eq!(steps.len(), 40);
    for key in
        ["step", "loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "mfu_pct", "memory_bytes", "data_wait_pct"]
    {
        assert!(steps.iter().all(|l| l[key].is_number()), "{key}");
    }
    let loss = |i: usize| steps[i]["loss"].as_f64().unwrap();
    assert!(loss(0) > 5.0 && loss(39) < 3.0, "{} {}", loss(0), loss(39));
    assert_eq!(lines.iter().filter(|l| l.get("eval_loss").is_some()).count(), 2);
    assert!(run.stdout.contains("eval     20") && run.stdout.contains("step    40"), "{}", run.stdout);
    let names: Vec<String> =
        std::fs::read_dir(p.path("out")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().any(|n| n.starts_with("events.out.tfevents")), "{names:?}");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        assert!(p.path("out/model").join(file).exists(), "{file}");
    }
}

#[test]
fn estimate_prints_memory_parameters_arithmetic_and_time_as_table_and_json() {
    let p = Project::new();

    let table = p.run(&["estimate", "job.yaml"]).succeeds().stdout;
    let json = p.run(&["estimate", "--json", "job.yaml", "--micro_batch_size", "4"]).succeeds().stdout;

    for row in ["parameters", "optimizer state", "activations", "peak", "tokens/s", "GFLOP/s"] {
        assert!(table.contains(row), "{row}: {table}");
    }
    let json: Value = serde_json::from_str(&json).unwrap();
    let total: u64 = json["memory_bytes"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
    assert_eq!(json["peak_memory_bytes"].as_u64(), Some(total), "the categories add up to the peak");
    // Embedding and head 264 x 32; two blocks of q, k, v, o, gate, up, down and two gains; the last gain.
    let block = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 2 * 32;
    assert_eq!(json["parameters"].as_u64(), Some(2 * 264 * 32 + 2 * block + 32));
    assert!(!p.path("out").exists(), "estimating writes nothing");
}

#[test]
fn inspect_shows_the_tensors_of_a_checkpoint_and_of_a_model() {
    let p = Project::new();
    p.train(&["--max_steps", "2"]).succeeds();

    let checkpoint: Value = serde_json::from_str(&p.run(&["inspect", "--json", "out"]).succeeds().stdout).unwrap();
    let model = p.run(&["inspect", "out/model"]).succeeds().stdout;

    assert_eq!(checkpoint["step"], 2);
    assert!(checkpoint["tensors"].get("exp_avg.model.layers.0.self_attn.q_proj.weight").is_some());
    assert!(model.contains("LlamaForCausalLM") && model.contains("model.layers.1.mlp.down_proj.weight"), "{model}");
}

#[test]
fn inspect_shows_an_adapter_and_refuses_a_file_of_llama_cpp() {
    let p = Project::new();
    p.train(&["--max_steps", "1", "--output_dir", "base"]).succeeds();
    let data = crate::support::YAML.split_once("datasets:").unwrap().1;
    let keys = "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_modules: [q_proj]\n";
    p.write("lora.yaml", &format!("base_model: DIR/base/model\n{keys}datasets:{data}"));
    p.run(&["train", "lora.yaml", "--max_steps", "1"]).succeeds();
    p.run(&["export", "base/model", "folder/model.gguf", "--gguf", "q8_0"]).succeeds();

    let shown = p.run(&["inspect", "out/model"]).succeeds().stdout;
    let json: Value = serde_json::from_str(&p.run(&["inspect", "--json", "out/model"]).succeeds().stdout).unwrap();

    assert!(shown.contains("rank: 4") && shown.contains("layers.1.self_attn.q_proj.lora_B.weight"), "{shown}");
    assert_eq!((&json["kind"], &json["rank"], &json["alpha"]), (&"adapter".into(), &4.into(), &8.0.into()));
    assert_eq!(json["tensors"].as_object().unwrap().len(), 4);
    for path in ["folder", "folder/model.gguf"] {
        p.run(&["inspect", path]).refuses(&[path, "llama.cpp"]);
    }
}

#[test]
fn commands_with_json_print_nothing_else_to_standard_output() {
    let p = Project::new();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let repository = p.path("hub/models--owner--model");
    std::fs::create_dir_all(repository.join("refs")).unwrap();
    std::fs::create_dir_all(repository.join("snapshots").join(commit)).unwrap();
    std::fs::write(repository.join("refs/main"), commit).unwrap();
    std::fs::write(repository.join("snapshots").join(commit).join("config.json"), "{}").unwrap();

    let train = p.train(&["--json", "--max_steps", "2", "--val_set_size", "0.1", "--eval_steps", "2"]).succeeds();
    let prepare = p.run(&["prepare", "--json", "--show", "1", "job.yaml"]).succeeds();
    let export = p.run(&["export", "--json", "out", "model"]).succeeds();
    let mut fetch = p.command(&["fetch", "--json", "owner/model"]);
    fetch.env("HF_HUB_CACHE", p.path("hub")).env("HF_HUB_OFFLINE", "1");
    let fetch = Run::of(fetch.output().unwrap()).succeeds();

    let lines: Vec<Value> = train.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().filter(|line| line["loss"].is_number()).count(), 2);
    assert_eq!(lines.iter().filter(|line| line["eval_loss"].is_number()).count(), 1);
    let prepared: Value = serde_json::from_str(&prepare.stdout).unwrap();
    assert!(prepared["rows"].as_u64() > Some(0) && prepared["row_tokens"] == 32, "{prepared}");
    let pieces = prepared["samples"][0]["pieces"].as_array().unwrap();
    let text: String = pieces.iter().map(|piece| piece["text"].as_str().unwrap()).collect();
    assert!(text.contains("hoplite"), "{text}");
    let exported: Value = serde_json::from_str(&export.stdout).unwrap();
    assert!(exported["from"].as_str().unwrap().contains("step-") && exported["to"] == "model", "{exported}");
    let fetched: Value = serde_json::from_str(&fetch.stdout).unwrap();
    assert_eq!((&fetched[0]["name"], &fetched[0]["files"]), (&"owner/model".into(), &1.into()));
}

#[test]
fn json_of_inspect_stays_json_when_a_damaged_checkpoint_is_skipped() {
    let p = Project::new();
    p.train(&["--max_steps", "4", "--save_steps", "2"]).succeeds();
    let newest = p.checkpoints("out").pop().unwrap();
    std::fs::write(newest.join("MANIFEST"), "{").unwrap();

    let run = p.run(&["inspect", "--json", "out"]).succeeds();

    let checkpoint: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(checkpoint["step"], 2);
    assert!(run.stderr.contains("skipped") && run.stderr.contains("step-0000000004"), "{}", run.stderr);
}

#[test]
fn generation_is_greedy_by_default_and_reproducible_with_a_seed() {
    let p = Project::new();
    p.train(&["--max_steps", "120"]).succeeds();
    let generate =
        |args: &[&str]| p.run(&[&["generate", "out/model", "--max-new-tokens", "24"], args].concat()).succeeds().stdout;

    let greedy = generate(&["--prompt", "The 1"]);
    let sampled = generate(&["--prompt", "The 1", "--temperature", "1.5", "--seed", "3"]);

    assert!(greedy.starts_with("The 1"), "{greedy}");
    assert_eq!(greedy, generate(&["--prompt", "The 1"]));
    assert_eq!(sampled, generate(&["--prompt", "The 1", "--temperature", "1.5", "--seed", "3"]));
    assert_ne!(sampled, generate(&["--prompt", "The 1", "--temperature", "1.5", "--seed", "4"]));
}

#[test]
fn merged_adapter_is_a_complete_model_that_differs_from_its_base() {
    let p = Project::new();
    p.train(&["--max_steps", "10", "--output_dir", "base"]).succeeds();
    let yaml = crate::support::YAML.split_once("datasets:").unwrap().1;
    p.write("lora.yaml", &format!("base_model: base/model\nadapter: lora\nlora_r: 4\nlora_target_modules: [q_proj, v_proj, down_proj]\ndatasets:{yaml}"));

    p.run(&["train", "lora.yaml", "--max_steps", "10", "--output_dir", "tuned", "--val_set_size", "0.1"]).succeeds();
    p.run(&["export", "tuned", "adapter"]).succeeds();
    p.run(&["export", "tuned", "merged", "--merge"]).succeeds();

    assert!(p.path("adapter/adapter_model.safetensors").exists());
    let merged: Value = serde_json::from_str(&p.run(&["inspect", "--json", "merged"]).succeeds().stdout).unwrap();
    let base: Value = serde_json::from_str(&p.run(&["inspect", "--json", "base/model"]).succeeds().stdout).unwrap();
    assert_eq!(merged["tensors"], base["tensors"], "merged and base model have the same tensors and shapes");
    assert_ne!(std::fs::read(p.path("merged/model.safetensors")).unwrap(), p.model_bytes("base"));
    // On the same validation rows the merged model, without further training, has the loss of the adapted model.
    p.write("on.yaml", &format!("base_model: merged\ndatasets:{yaml}"));
    let still = ["--max_steps", "2", "--learning_rate", "0", "--output_dir", "on", "--val_set_size", "0.1"];
    p.run(&[&["train", "on.yaml"], &still[..]].concat()).succeeds();
    let (tuned, on) = (eval_loss(&p, "tuned"), eval_loss(&p, "on"));
    assert!((tuned - on).abs() < 1e-5, "{tuned} {on}");
    p.run(&["export", "base", "x", "--merge"]).refuses(&["no adapter"]);

    // Training continues from the adapter: a rate of zero keeps it as it is.
    let on = ["train", "lora.yaml", "--lora_model_dir", "adapter", "--max_steps", "3", "--learning_rate", "0"];
    p.run(&[&on[..], &["--output_dir", "continued"]].concat()).succeeds();
    let adapter = |dir: &str| std::fs::read(p.path(dir).join("adapter_model.safetensors")).unwrap();
    assert!(adapter("continued/model") == adapter("adapter"), "the run began with another adapter");
    p.run(&[&on[..], &["--lora_r", "8"]].concat()).refuses(&["lora_model_dir adapter", "set `lora_r: 4`"]);
    let other = ["--lora_target_modules", "[q_proj]"];
    p.run(&[&on[..], &other[..]].concat()).refuses(&["the adapter has tensor", "target modules"]);
}

#[test]
fn init_writes_a_file_that_trains_and_never_replaces_one() {
    let p = Project::new();
    p.run(&["init", "new.yaml", "--yes", "--dataset", "text.txt"]).succeeds();

    let run = p.run(&["train", "new.yaml", "--max_steps", "1", "--num_epochs", "none", "--warmup_ratio", "none"]);

    run.succeeds();
    p.run(&["init", "new.yaml", "--yes"]).refuses(&["new.yaml"]);
}

#[test]
fn init_converts_a_file_of_another_tool_and_says_what_it_left_out() {
    let p = Project::new();
    let accelerate = "distributed_type: FSDP\nmixed_precision: fp8\ngpu_ids: '0,1'\nnum_processes: 2\nfsdp_config:\n  fsdp_offload_params: false\n";
    std::fs::write(p.path("accelerate.yaml"), accelerate).unwrap();

    let refused = p.run(&["estimate", "accelerate.yaml"]);
    let run = p.run(&["init", "new.yaml", "--yes", "--from", "accelerate.yaml", "--dataset", "text.txt"]).succeeds();

    refused.refuses(&["is a configuration of Accelerate", "phalanx init --from accelerate.yaml"]);
    assert!(run.stdout.contains("note: left out `gpu_ids`: set CUDA_VISIBLE_DEVICES"), "{}", run.stdout);
    let json = p.run(&["estimate", "--json", "new.yaml"]).succeeds().stdout;
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["ranks"], 2);
}

#[test]
fn init_says_what_it_left_out_also_if_the_rest_cannot_be_used() {
    let p = Project::new();
    let without_its_file =
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: missing.json\n";
    std::fs::write(p.path("accelerate.yaml"), without_its_file).unwrap();

    let run = p.run(&["init", "new.yaml", "--yes", "--from", "accelerate.yaml", "--dataset", "text.txt"]);

    assert!(run.stdout.contains("left out `deepspeed_config.deepspeed_config_file`: "), "{}", run.stdout);
    run.refuses(&["has 1 ranks, but the world has 2"]);
    assert!(!p.path("new.yaml").exists());
}

#[test]
fn init_takes_answers_of_a_pipe_and_explains_keys_only_if_asked() {
    let p = Project::new();
    let init = |file: &str, more: &[&str]| {
        let mut child = p.command(&[&["init", file][..], more].concat());
        let child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.unwrap();
        child.stdin.take().unwrap().write_all(b"models/tiny\ntext.txt\ncompletion\n1\nlora\n").unwrap();
        Run::of(child.wait_with_output().unwrap()).succeeds();
        std::fs::read_to_string(p.path(file)).unwrap()
    };

    let (short, commented) = (init("short.yaml", &[]), init("long.yaml", &["--commented"]));

    for line in ["base_model: models/tiny", "adapter: lora", "learning_rate: 2e-4"] {
        assert!([&short, &commented].iter().all(|text| text.lines().any(|found| found == line)), "{line} in {short}");
    }
    assert!(short.lines().count() < 50 && commented.lines().count() > 300, "{short}");
}

#[test]
fn init_refuses_unknown_keys_with_the_lines_of_the_file_that_it_converts() {
    let p = Project::new();
    let text = "base_model: m\ndatasets: [{path: text.txt, type: completion}]\nlearnig_rate: 2e-4\nlora_r: 8\n";
    p.write("axolotl.yml", text);

    let run = p.run(&["init", "new.yaml", "--from", "axolotl.yml"]);

    assert_eq!(run.code, Some(2), "{}", run.stderr);
    for error in ["unknown key `learnig_rate` (line 3); did you mean `learning_rate`?", "`lora_r` (line 4) conflicts"] {
        assert!(run.stderr.contains(error), "{}", run.stderr);
    }
    p.write("axolotl.yml", &text.replace("learnig_rate: 2e-4\n", ""));
    p.run(&["init", "new.yaml", "--from", "axolotl.yml"]).refuses(&["`lora_r` (line 3) conflicts"]);
    assert!(!p.path("new.yaml").exists());
}

#[test]
fn init_chooses_a_chat_template_for_a_model_that_has_none() {
    let p = Project::new();
    let line = r#"{"messages": [{"role": "user", "content": "who holds the line"}, {"role": "assistant", "content": "we do"}]}"#;
    p.write("chat.jsonl", &format!("{line}\n").repeat(40));
    p.train(&["--max_steps", "2", "--output_dir", "base"]).succeeds();
    let chosen = |file: &str, base: &[&str]| {
        let chat = ["init", file, "--yes", "--dataset", "chat.jsonl", "--dataset-type", "chat_template"];
        p.run(&[&chat[..], base].concat()).succeeds();
        std::fs::read_to_string(p.path(file)).unwrap().contains("\nchat_template: chatml")
    };
    let base = ["--base-model", "base/model"];
    assert!(!chosen("own.yaml", &base), "the exported model has a template");
    let config = p.path("base/model/tokenizer_config.json");
    let mut keys: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    keys.as_object_mut().unwrap().remove("chat_template").expect("its template");
    std::fs::write(&config, keys.to_string()).unwrap();

    for (file, base) in [("small.yaml", &[][..]), ("based.yaml", &base)] {
        assert!(chosen(file, base), "{file}");
        p.run(&["train", file, "--max_steps", "2", "--sequence_len", "64"]).succeeds();
        std::fs::remove_dir_all(p.path("outputs")).unwrap();
    }
}

#[test]
fn init_recognises_pairs_and_labelled_answers() {
    let p = Project::new();
    p.train(&["--max_steps", "2", "--output_dir", "base"]).succeeds();
    let turn = r#"[{"role": "user", "content": "who holds?"}, {"role": "assistant", "content": "WE"}]"#;
    let of_messages = format!(r#"{{"chosen": {turn}, "rejected": {}, "messages": {turn}}}"#, turn.replace("WE", "no"));
    p.write("pairs.jsonl", &"{\"prompt\": \"who\", \"chosen\": \" we\", \"rejected\": \" no\"}\n".repeat(16));
    p.write("talks.jsonl", &format!("{of_messages}\n").repeat(16));
    p.write("labels.jsonl", &"{\"prompt\": \"who\", \"completion\": \" we\", \"label\": true}\n".repeat(16));
    let base = ["--base-model", "base/model", "--goal", "lora"];
    for (data, more, rl) in [
        ("pairs.jsonl", &[][..], "rl: dpo"),
        ("pairs.jsonl", &["--dataset-type", "preference"], "rl: dpo"),
        ("talks.jsonl", &[], "rl: dpo"),
        ("labels.jsonl", &[], "rl: kto"),
    ] {
        p.run(&[&["init", "new.yaml", "--yes", "--dataset", data][..], &base, more].concat()).succeeds();
        let text = std::fs::read_to_string(p.path("new.yaml")).unwrap();

        for line in ["    type: preference", rl, "learning_rate: 5e-6"] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        assert!(!text.contains("sample_packing"), "{text}");
        p.run(&["train", "new.yaml", "--max_steps", "1", "--sequence_len", "64"]).succeeds();
        std::fs::remove_dir_all(p.path("outputs")).unwrap();
        std::fs::remove_file(p.path("new.yaml")).unwrap();
    }
    // The questions of a terminal propose what the data are.
    let child =
        p.command(&["init", "asked.yaml"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    child.stdin.take().unwrap().write_all(b"base/model\nlabels.jsonl\n\n1\nlora\n").unwrap();
    let asked = Run::of(child.wait_with_output().unwrap()).succeeds();
    assert!(asked.stderr.contains("sharegpt, preference) [preference]"), "{}", asked.stderr);
    assert!(std::fs::read_to_string(p.path("asked.yaml")).unwrap().contains("rl: kto"));
    let init = ["init", "new.yaml", "--yes", "--dataset", "pairs.jsonl", "--dataset-type"];
    p.run(&[&init[..], &["pears"]].concat()).refuses(&["unknown dataset type `pears`", "preference"]);
}

#[test]
fn init_asks_for_ranks_and_for_full_or_low_rank_training() {
    let p = Project::new();
    let options = ["--dataset", "text.txt", "--ranks", "2", "--goal", "lora"];

    p.run(&[&["init", "new.yaml", "--yes"][..], &options].concat()).succeeds();

    let text = std::fs::read_to_string(p.path("new.yaml")).unwrap();
    for line in ["nproc_per_node: 2", "dp_shard_size: auto", "adapter: lora", "lora_target_linear: true"] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    p.run(&["init", "other.yaml", "--yes", "--goal", "half"]).refuses(&["unknown goal `half`"]);
}

#[test]
fn notes_about_keys_of_another_tool_are_on_standard_error() {
    let p = Project::new();

    let run = p.run(&["estimate", "--json", "job.yaml", "--tf32", "true", "--optimizer", "adamw_hf"]).succeeds();

    assert!(serde_json::from_str::<Value>(&run.stdout).is_ok(), "{}", run.stdout);
    assert!(run.stderr.contains("note: keys without effect here: tf32"), "{}", run.stderr);
    assert!(run.stderr.contains("adamw_hf means adamw here"), "{}", run.stderr);
}

#[test]
fn estimate_counts_what_is_stored_in_fewer_bits_and_names_the_tensor_whose_blocks_a_mesh_cuts() {
    let p = Project::new();
    let of =
        |keys: &[&str]| p.run(&[&["estimate", "--json", "job.yaml", "--model.hidden_size", "128"][..], keys].concat());
    let bytes = |of_what: &str, keys: &[&str]| -> f64 {
        let estimate: Value = serde_json::from_str(&of(keys).succeeds().stdout).unwrap();
        estimate["memory_bytes"][of_what].as_f64().unwrap_or_else(|| panic!("{estimate}"))
    };

    let [whole, in_blocks] =
        ["adamw", "adamw_bnb_8bit"].map(|optimizer| bytes("optimizer state", &["--optimizer", optimizer]));
    let adapters = ["--adapter", "lora", "--lora_target_linear", "true", "--bf16"];
    let [in_f32, rounded] = ["false", "true"].map(|bf16| bytes("parameters", &[&adapters[..], &[bf16]].concat()));
    let lengths = ["--peft_use_dora", "true"];
    let [read_in_f32, stored] =
        ["true", "full"].map(|bf16| bytes("parameters", &[&adapters[..], &[bf16], &lengths].concat()));

    assert!(in_blocks < 0.6 * whole, "{in_blocks} bytes instead of {whole}");
    assert!(rounded < 0.7 * in_f32, "{rounded} bytes instead of {in_f32}");
    assert!(stored < 0.7 * read_in_f32, "{stored} bytes instead of {read_in_f32}");
    of(&["--optimizer", "adamw_8bit", "--tensor_parallel_size", "2"]).refuses(&["o_proj.weight", "`optimizer: adamw`"]);
}

#[test]
fn paths_of_a_model_with_images_name_the_layers_of_the_language_model() {
    let p = Project::new();
    let trained = |targets: &[&str]| {
        let run = p.run(&[&["estimate", "--json", "job.yaml", "--adapter", "lora"], targets].concat()).succeeds();
        serde_json::from_str::<Value>(&run.stdout).unwrap()["trainable_parameters"].clone()
    };

    let pattern = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj";

    assert_eq!(trained(&["--lora_target_modules", pattern]), trained(&["--lora_target_linear", "true"]));
}

#[test]
fn run_that_no_longer_learns_is_reported_and_counted_in_its_metrics() {
    let p = Project::new();
    // The decay takes away all weights, and clipping leaves nothing of their updates.
    let keys = "--max_steps 8 --optimizer sgd --lr_scheduler constant --learning_rate 1 --weight_decay 1 --max_grad_norm 1e-30";

    let run = p.train(&keys.split(' ').collect::<Vec<_>>()).succeeds();

    let text = std::fs::read_to_string(p.path("out/metrics.jsonl")).unwrap();
    assert!(run.stdout.contains("warning: the gradient has been 0 for 5 steps"), "{}\n{text}", run.stdout);
    assert!(text.contains("\"stalled_steps\":5"), "{text}");
}

#[test]
fn unused_dropout_of_a_model_is_reported() {
    let p = Project::new();
    let run = p.train(&["--max_steps", "2", "--model.attention_dropout", "0.1"]).succeeds();
    assert!(run.stdout.contains("attention_dropout is not applied"), "{}", run.stdout);
    assert!(!p.train(&["--max_steps", "2", "--output_dir", "other"]).succeeds().stdout.contains("dropout"));
}

#[test]
fn env_describes_the_machine() {
    let p = Project::new();
    let json: Value = serde_json::from_str(&p.run(&["env", "--json"]).succeeds().stdout).unwrap();
    assert!(json["threads"].as_u64().unwrap() > 0 && json["f32_gflops"].as_f64().unwrap() > 0.0, "{json}");
}

fn eval_loss(p: &Project, out: &str) -> f64 {
    let text = std::fs::read_to_string(p.path(out).join("metrics.jsonl")).unwrap();
    let line = text.lines().rfind(|l| l.contains("eval_loss")).unwrap();
    serde_json::from_str::<Value>(line).unwrap()["eval_loss"].as_f64().unwrap()
}

#[test]
fn shells_complete_every_command_and_each_has_a_manual_page() {
    let p = Project::new();
    let help = p.run(&["--help"]).succeeds().stdout;
    let (_, commands) = help.split_once("Commands:").unwrap();
    let commands: Vec<&str> =
        commands.split("Options:").next().unwrap().lines().filter_map(|l| l.strip_prefix("  ")).collect();
    let names = commands.iter().filter(|line| !line.starts_with(' ')).filter_map(|line| line.split(' ').next());
    let names: Vec<&str> = names.filter(|name| *name != "help").collect();

    p.run(&["man", "pages"]).succeeds();
    for shell in ["bash", "zsh", "fish"] {
        let script = p.run(&["completions", shell]).succeeds().stdout;
        assert!(names.iter().all(|name| script.contains(name)), "{shell}");
    }

    assert!(names.len() > 15, "{help}");
    for name in names {
        let page = std::fs::read_to_string(p.path(&format!("pages/phalanx-{name}.1"))).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".SH OPTIONS"), "{name}: {page}");
    }
    p.write("taken", "");
    p.run(&["man", "taken"]).refuses(&["cannot write manual pages to taken"]);
    p.run(&["completions", "cmd.exe"]).refuses(&["cmd.exe", "bash"]);
}

/// Sections that are loaded are what is left of a stripped program.
#[test]
fn program_fits_into_forty_megabytes_without_symbols() {
    if cfg!(debug_assertions) {
        return;
    }
    let program = std::fs::read(env!("CARGO_BIN_EXE_phalanx")).unwrap();
    assert_eq!(&program[..5], b"\x7fELF\x02", "a 64-bit program");
    let word = |at: usize| u64::from_le_bytes(program[at..at + 8].try_into().unwrap());
    let half = |at: usize| usize::from(u16::from_le_bytes(program[at..at + 2].try_into().unwrap()));
    // Fields of System V's ABI, chapter 4: the table of sections, and flags and size of each.
    let (table, entry, n_sections) = (word(0x28) as usize, half(0x3a), half(0x3c));
    let sections = (0..n_sections).map(|nth| table + nth * entry);
    let is_stored = |at: &usize| word(at + 8) & 2 != 0 && program[at + 4] != 8;

    let bytes: u64 = sections.filter(is_stored).map(|at| word(at + 0x20)).sum();

    assert!((10_000_000..=40_000_000).contains(&bytes), "{bytes} bytes");
}
