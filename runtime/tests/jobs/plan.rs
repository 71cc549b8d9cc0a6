//! Predictions of a step hold: its buffers to the byte, and a planned step trains. `tests/tests/memory.rs` compares the
//! estimate with the kernel's accounting of rank processes.

use crate::support::{Project, Run};
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Jobs with one and several ranks, on every axis.
const JOBS: [&str; 17] = [
    "--bf16 false",
    "--bf16 true --gradient_checkpointing full --val_set_size 0.1 --eval_steps 2",
    "--adapter lora --lora_r 4 --lora_target_linear true --gradient_checkpointing selective",
    "--dp_replicate_size 2 --offload_optimizer true",
    "--dp_shard_size 3 --zero_stage 1",
    "--dp_shard_size 3 --zero_stage 2 --bf16 true",
    "--dp_shard_size 4 --zero_stage 3 --offload_optimizer true --val_set_size 0.1 --eval_steps 2",
    "--tensor_parallel_size 4 --sequence_parallel true",
    "--context_parallel_size 2 --cp_comm_strategy allgather --bf16 true",
    "--pipeline_parallel_size 2 --gradient_accumulation_steps 4 --pipeline_schedule zero_bubble",
    "--pipeline_parallel_size 2 --dp_shard_size 2 --tensor_parallel_size 2 --bf16 true --gradient_checkpointing full",
    "--dp_replicate_size 2 --context_parallel_size 2 --adapter lora --lora_r 4 --lora_target_linear true",
    "--dp_shard_size 2 --adapter lora --lora_r 4 --lora_target_linear true --bf16 true --val_set_size 0.1 --eval_steps 2",
    "--optimizer lion --dp_shard_size 2 --offload_optimizer true",
    "--optimizer adafactor --dp_shard_size 2 --tensor_parallel_size 2",
    "--optimizer adafactor --pipeline_parallel_size 2 --dp_shard_size 2 --offload_optimizer true",
    "--optimizer adafactor --dp_shard_size 2 --reproducible true",
];

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn json(run: Run) -> Value {
    serde_json::from_str(&run.succeeds().stdout).unwrap()
}

/// The buffer bytes of each rank, as the run reports them.
fn allocated(p: &Project, job: &str) -> Vec<u64> {
    let out = tempfile::tempdir_in(p.dir.path()).unwrap();
    let mut keys = vec![("output_dir".to_string(), out.path().display().to_string())];
    for pair in words(job).chunks_exact(2) {
        keys.push((pair[0].trim_start_matches("--").into(), pair[1].into()));
    }
    let yaml = std::fs::read_to_string(p.path("job.yaml")).unwrap();
    let once = [("max_steps", "1"), ("warmup_steps", "0"), ("resume_from_checkpoint", "none"), ("save_steps", "none")];
    keys.extend(once.map(|(key, value)| (key.into(), value.into())));
    let config = phalanx::config::JobConfig::from_yaml_str(&yaml, &keys).unwrap();
    let mut bytes = Vec::new();
    let listen = |event: &phalanx::Event| {
        if let phalanx::Event::Started(started) = event {
            bytes.clone_from(&started.buffer_bytes);
        }
    };
    phalanx::Job::from_config(config).run_with(&phalanx::Control::default(), listen).unwrap();
    bytes
}

#[test]
fn estimate_equals_the_allocation_of_the_fullest_rank() {
    let p = Project::new();
    JOBS.iter().for_each(|job| assert_estimated(&p, job));
}

/// Scores have a head of one row, which adapters do not freeze.
#[test]
fn estimate_of_a_reward_model_equals_the_allocation_of_the_fullest_rank() {
    let p = crate::preference::pairs("reward_model: true\n");
    for job in [
        "--bf16 true --eval_steps 2",
        "--adapter lora --lora_r 4 --lora_target_linear true --gradient_checkpointing full",
        "--dp_shard_size 3 --center_rewards_coefficient 0.1",
        "--pipeline_parallel_size 2 --tensor_parallel_size 2 --sequence_parallel true --gradient_accumulation_steps 4",
        "--context_parallel_size 2 --dp_replicate_size 2",
    ] {
        assert_estimated(&p, job);
    }
}

fn assert_estimated(p: &Project, job: &str) {
    let estimate = json(p.run(&[&["estimate", "job.yaml", "--json", "--threads", "1"], &words(job)[..]].concat()));

    let bytes = allocated(p, job);

    let ranks = estimate["ranks"].as_u64().unwrap() as usize;
    let fullest = estimate["fullest_rank"].as_u64().unwrap() as usize;
    assert_eq!(bytes.len(), ranks, "{job}");
    assert_eq!(estimate["peak_memory_bytes"].as_u64(), bytes.iter().copied().max(), "{job}: {bytes:?}");
    assert_eq!(bytes[fullest], *bytes.iter().max().unwrap(), "{job}: {bytes:?}");
    let parts: u64 = estimate["memory_bytes"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
    assert_eq!(parts, bytes[fullest], "{job}: the categories add up to the peak");
}

#[test]
fn rates_of_processors_are_measured_once_and_again_when_asked() {
    let p = Project::new();
    let estimate = |more: &[&str]| {
        let mut command = p.command(&[&["estimate", "job.yaml", "--json"], more].concat());
        json(Run::of(command.env("XDG_CACHE_HOME", p.path("cache")).output().unwrap()))
    };
    let step_ms = |estimate: &Value| estimate["step_ms"].as_f64().unwrap();
    let path = p.path("cache/phalanx/rates.json");
    // JSON's decimals may differ from a number in its last bit, and the times of instructions are rounded to nanoseconds.
    let are_same = |one: &Value, two: &Value| (step_ms(one) / step_ms(two) - 1.0).abs() < 1e-4;

    let first = estimate(&[]);
    let kept = std::fs::read(&path).unwrap();

    assert!(are_same(&first, &estimate(&[])), "the second call uses the rates of the first");
    assert!(std::fs::read(&path).unwrap() == kept, "the second call has measured again");
    let mut known: Value = serde_json::from_slice(&kept).unwrap();
    for measurement in known.as_object_mut().unwrap().values_mut() {
        measurement["value"]["launch_s"] = 1.0.into();
    }
    std::fs::write(&path, known.to_string()).unwrap();
    assert!(step_ms(&estimate(&[])) > 1e4, "a kernel takes a second to start");
    // Another step has rates of its own.
    assert!(step_ms(&estimate(&["--micro_batch_size", "3"])) < 1e4);
    let again = estimate(&["--remeasure"]);
    assert!(step_ms(&again) < 1e4);
    assert!(are_same(&again, &estimate(&[])), "the next call uses the new rates");
    assert!(std::fs::read(&path).unwrap() != kept, "new rates are kept");
}

#[test]
fn estimate_is_for_the_stage_with_the_most_memory() {
    let p = Project::new();
    // The last stage has the head, whose logits take most of the memory.
    let job = "--pipeline_parallel_size 2 --gradient_accumulation_steps 4 --model.vocab_size 4096";

    let estimate = json(p.run(&[&["estimate", "job.yaml", "--json", "--threads", "1"], &words(job)[..]].concat()));
    let bytes = allocated(&p, job);

    assert_eq!(estimate["fullest_rank"], 1, "{bytes:?}");
    assert!(bytes[1] > bytes[0], "{bytes:?}");
}

/// Llama 3.1 8B with rows of 4,096 tokens in bf16.
const LLAMA_8B: &str = "\
model:
  model_type: llama
  vocab_size: 128256
  hidden_size: 4096
  intermediate_size: 14336
  num_hidden_layers: 32
  num_attention_heads: 32
  num_key_value_heads: 8
  max_position_embeddings: 131072
  rope_theta: 500000.0
  tie_word_embeddings: false
tokenizer: bytes
datasets:
  - path: DIR/text.txt
    type: completion
sequence_len: 4096
bf16: true
device: cuda
max_steps: 10
warmup_steps: 1
gradient_checkpointing: full
output_dir: DIR/out
";

/// The machine of the test has no GPU; the estimate is for one all the same.
#[test]
fn estimate_for_gpus_needs_no_gpu_and_tells_memory_by_kind() {
    let p = Project::new();
    p.write("8b.yaml", LLAMA_8B);
    let estimate = |keys: &[&str]| {
        let mut command = p.command(&[&["estimate", "8b.yaml", "--json"], keys].concat());
        let run = Run::of(command.env("PHALANX_CUDA_LIBS", p.path("nothing")).output().unwrap());
        println!("{keys:?}: {}", run.stdout);
        json(run)
    };
    let bytes = |estimate: &Value, kind: &str| estimate["memory_bytes"][kind].as_u64().unwrap();

    let full = estimate(&[]);
    let lora = estimate(&["--adapter", "lora", "--lora_r", "16", "--lora_target_linear", "true"]);
    let sharded = estimate(&["--dp_shard_size", "8"]);

    assert_eq!((&full["hardware"]["gpu"], &full["hardware"]["measured"]), (&Value::from("h100"), &Value::Null));
    let n_params = 8_030_261_248;
    assert_eq!(full["parameters"].as_u64(), Some(n_params));
    // All parameters are multiples of the alignment.
    assert_eq!((bytes(&full, "parameters"), bytes(&full, "optimizer state")), (4 * n_params, 8 * n_params));
    assert_eq!((bytes(&sharded, "parameters"), bytes(&sharded, "optimizer state")), (n_params / 2, n_params));
    // Frozen matrices in bf16, embeddings and adapters in f32; copies of the adapters, 42 million numbers, in bf16.
    let copies = bytes(&lora, "half-width weights, at the peak");
    assert!(bytes(&lora, "parameters") < n_params * 23 / 10 && copies < 2 * 43_000_000, "{copies}");
    assert!(bytes(&lora, "optimizer state") < n_params / 10 && bytes(&lora, "gradients, at the peak") < n_params / 10);
    for estimate in [&full, &lora, &sharded] {
        let parts: u64 = estimate["memory_bytes"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
        assert_eq!(estimate["peak_memory_bytes"].as_u64(), Some(parts));
        // Half of the logits of a row, and their half-width copy; all of them would take 2.1 GB.
        assert!(bytes(estimate, "logits, at the peak") <= 2048 * 128_256 * 6, "{estimate}");
    }
    // Outside of buffers: CUDA's context; a ring for shards, and a ring and a tree for sums, of 32 channels of 14 MiB.
    let outside = |estimate: &Value| {
        ["context", "communicator", "device"].map(|what| estimate[format!("{what}_memory_bytes")].as_u64().unwrap())
    };
    let (peak, rings) = (sharded["peak_memory_bytes"].as_u64().unwrap(), 4 * 32 * (14 << 20));
    assert_eq!(outside(&sharded), [1_060_000_000, rings, peak + 1_060_000_000 + rings]);
    assert_eq!(outside(&full)[1], 0);
    assert_eq!(outside(&estimate(&["--dp_shard_size", "8", "--gpu_collectives", "staged"]))[1], 0);
}

#[test]
fn eight_billion_weights_of_four_bits_train_with_adapters_in_seven_gibibytes() {
    let p = Project::new();
    p.write("8b.yaml", LLAMA_8B);
    let keys =
        "--adapter qlora --lora_r 16 --lora_target_linear true --bf16 full --sequence_len 512 --micro_batch_size 1";
    for device in ["cuda", "cpu"] {
        let words = [&["estimate", "8b.yaml", "--json", "--device", device][..], &words(keys)].concat();
        let run = Run::of(p.command(&words).env("PHALANX_CUDA_LIBS", p.path("nothing")).output().unwrap());

        let peak = json(run)["peak_memory_bytes"].as_u64().unwrap();
        assert!((5 << 30..7 << 30).contains(&peak), "{device}: {peak}");
    }
}

/// The results of `phalanx-gpu all` on a GPU of this name.
fn summary(device: &str) -> String {
    let ceilings = serde_json::json!([
        ["copy", "0.180", "2.98 TB/s"],
        ["product bf16 8192", "2.816", "390.0 TFLOP/s, 39 % of 989"],
        ["product f32 8192", "21.9", "50.2 TFLOP/s, 75 % of 67"],
    ]);
    let rates = serde_json::json!([["adamw", "98", "14.30", "", "", "2.60"]]);
    let libraries = serde_json::json!([["NCCL", "libnccl.so.2"], ["context", "612 MiB"]]);
    let stage = |rows: Value| serde_json::json!({"outcome": "passed", "report": {"device": device, "rows": rows}});
    serde_json::json!({"libraries": stage(libraries), "ceilings": stage(ceilings), "rates": stage(rates)}).to_string()
}

#[test]
fn measured_rates_of_a_gpu_decide_the_predicted_time() {
    let p = Project::new();
    p.write("8b.yaml", LLAMA_8B);
    p.write("h100.json", &summary("NVIDIA H100 80GB HBM3"));
    let cache = p.path("cache/phalanx/gpu");
    std::fs::create_dir_all(&cache).unwrap();
    let estimate = |keys: &[&str]| {
        let mut command = p.command(&[&["estimate", "8b.yaml", "--json"], keys].concat());
        Run::of(
            command
                .env("PHALANX_CUDA_LIBS", p.path("nothing"))
                .env("XDG_CACHE_HOME", p.path("cache"))
                .output()
                .unwrap(),
        )
    };

    let published = json(estimate(&[]));
    let measured = json(estimate(&["--measured", "h100.json"]));
    std::fs::copy(p.path("h100.json"), cache.join("summary.json")).unwrap();
    let (cached, other) = (json(estimate(&[])), json(estimate(&["--gpu", "h200"])));

    let ms = |estimate: &Value| estimate["step_ms"].as_f64().unwrap();
    // Half of the published rate of products, which take most of the time.
    assert!(ms(&measured) > 1.5 * ms(&published), "{} and {} ms", ms(&measured), ms(&published));
    assert_eq!((ms(&cached), &other["hardware"]["measured"]), (ms(&measured), &Value::Null));
    assert!(cached["hardware"]["measured"].as_str().unwrap().ends_with("summary.json"));
    assert_eq!(measured["context_memory_bytes"].as_u64(), Some(612 << 20));
    estimate(&["--gpu", "h200", "--measured", "h100.json"]).refuses(&["h100.json", "NVIDIA H100", "not h200"]);
    estimate(&["--measured", "8b.yaml"]).refuses(&["8b.yaml", "phalanx-gpu"]);
    estimate(&["--measured", "nowhere.json"]).refuses(&["nowhere.json"]);
}

#[test]
fn plan_for_gpus_says_why_this_machine_cannot_run_it() {
    let p = Project::new();
    let plan = |gpu: &str| {
        let mut command = p.command(&["plan", "job.yaml", "--gpu", gpu, "--gpus-per-node", "2", "--json"]);
        json(Run::of(command.env("PHALANX_CUDA_LIBS", p.path("nothing")).output().unwrap()))
    };

    let (gpu, cpu) = (plan("h200"), plan("cpu"));

    let why = gpu["obstacle"].as_str().unwrap();
    assert!(why.starts_with("This machine cannot run this plan: ") && why.contains("nothing"), "{why}");
    assert_eq!((why.matches(". ").count(), &cpu["obstacle"]), (0, &Value::Null), "{why}");
    // CUDA's context, and at least a ring between the two.
    let least = |plan: &Value| {
        let ranked = plan["plan"]["ranked"].as_array().unwrap().iter();
        ranked.map(|ranked| ranked["evaluation"]["memory_bytes"].as_u64().unwrap()).min().unwrap()
    };
    assert!(least(&gpu) > 1_060_000_000 + 32 * (14 << 20) && least(&cpu) < 1 << 30, "{gpu} {cpu}");
}

/// The keys of a planned candidate, for `train`.
fn overrides(candidate: &Value, data_ranks: u64) -> Vec<String> {
    let mesh = |axis: &str| candidate["mesh"][axis].as_u64().unwrap();
    let keys = [
        ("pipeline_parallel_size", mesh("pp").to_string()),
        ("dp_replicate_size", mesh("dp_replicate").to_string()),
        ("dp_shard_size", mesh("dp_shard").to_string()),
        ("context_parallel_size", mesh("cp").to_string()),
        ("tensor_parallel_size", mesh("tp").to_string()),
        ("micro_batch_size", candidate["micro_batch_size"].to_string()),
        ("gradient_accumulation_steps", candidate["n_microbatches"].to_string()),
        ("zero_stage", candidate["zero"].as_str().unwrap().replace('0', "1")),
        (
            "gradient_checkpointing",
            match candidate["recompute"].as_str().unwrap() {
                "none" => "false".to_string(),
                policy => policy.to_string(),
            },
        ),
    ];
    assert_eq!(mesh("dp_replicate") * mesh("dp_shard"), data_ranks);
    let schedule = match &candidate["schedule"] {
        Value::Object(interleaved) => {
            let chunks = interleaved["interleaved"]["chunks"].to_string();
            vec!["--pipeline_schedule".into(), "interleaved".into(), "--pipeline_chunks".into(), chunks]
        }
        name => vec!["--pipeline_schedule".into(), name.as_str().unwrap().to_string()],
    };
    keys.into_iter().flat_map(|(key, value)| [format!("--{key}"), value]).chain(schedule).collect()
}

#[test]
fn plans_for_this_machine_train_and_allocate_their_planned_memory() {
    let p = Project::new();
    let plan = ["plan", "job.yaml", "--gpu", "cpu", "--gpus-per-node", "2", "--json", "--top", "4"];
    let plan = json(p.run(&[&plan[..], &["--gradient_accumulation_steps", "4", "--threads", "1"]].concat()));
    let ranked = plan["plan"]["ranked"].as_array().unwrap();
    assert_eq!(ranked.len(), 4);
    let seconds: Vec<f64> = ranked.iter().map(|r| r["evaluation"]["step_seconds"].as_f64().unwrap()).collect();
    assert!(seconds.is_sorted() && seconds[0] > 0.0, "{seconds:?}");

    for (i, of) in ranked.iter().enumerate() {
        let data_ranks = of["candidate"]["mesh"]["dp_replicate"].as_u64().unwrap()
            * of["candidate"]["mesh"]["dp_shard"].as_u64().unwrap();
        let keys = overrides(&of["candidate"], data_ranks);
        let job = keys.join(" ");
        assert_eq!(of["evaluation"]["memory_bytes"].as_u64(), allocated(&p, &job).into_iter().max(), "{job}");
        if i == 0 {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            p.train(&[&["--max_steps", "2", "--warmup_steps", "0", "--output_dir", "planned"], &keys[..]].concat())
                .succeeds();
            assert_eq!(p.metrics("planned").len(), 2);
        }
    }
}

#[test]
fn impossible_plan_is_refused_in_one_sentence() {
    let p = Project::new();
    let plan = |args: &[&str]| p.run(&[&["plan", "job.yaml", "--gpu", "cpu"], args].concat());

    plan(&["--gpus-per-node", "0"]).refuses(&["--gpus-per-node", "at least 1"]);
    plan(&["--gpus-per-node", "many"]).refuses(&["--gpus-per-node", "many"]);
    plan(&["--gpus-per-node"]).refuses(&["--gpus-per-node", "value"]);
    plan(&["--nodes", "0"]).refuses(&["--nodes", "at least 1"]);
    plan(&["--gpus-per-node", "65"]).refuses(&["65 ranks", "at most 64"]);
    plan(&["--gpus-per-node", "4000000000", "--nodes", "4000000000"]).refuses(&["cannot plan", "the maximum is"]);
    plan(&["--micro-batch-max", "0"]).refuses(&["--micro-batch-max", "at least 1"]);
    plan(&["--learning_rat", "1"]).refuses(&["learning_rat", "learning_rate"]);
    plan(&["--sequence_len", "65"]).refuses(&["sequence_len 65", "max_position_embeddings 64"]);
    plan(&["--trace", "nowhere/trace.json"]).refuses(&["nowhere/trace.json"]);
    // Three ranks fit neither 4 heads, nor 2 blocks, nor 32 tokens, nor 4 rows.
    plan(&["--gpus-per-node", "3"]).refuses(&["no arrangement of 3 ranks"]);
    p.run(&["plan", "job.yaml", "--gpu", "abacus"]).refuses(&["abacus", "cpu", "h100"]);
    p.run(&["plan", "nowhere.yaml", "--gpu", "cpu"]).refuses(&["nowhere.yaml"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

/// Rank, stream and name of each span of a trace.
fn names(path: &std::path::Path) -> BTreeSet<(u64, u64, String)> {
    let trace: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let spans = events.iter().filter(|e| e["ph"] == "X");
    let name = |e: &Value| (e["pid"].as_u64().unwrap(), e["tid"].as_u64().unwrap(), e["name"].as_str().unwrap().into());
    spans.map(name).collect()
}

#[test]
fn measured_step_has_the_ranks_and_names_of_the_simulated_one() {
    let p = Project::new();
    let job = words("--pipeline_parallel_size 2 --dp_shard_size 2 --gradient_accumulation_steps 4 --max_steps 4");
    p.run(&[&["estimate", "job.yaml", "--trace", "predicted.json"], &job[..]].concat()).succeeds();

    let run = p.train(&[&["--trace", "measured.json"], &job[..]].concat()).succeeds();

    assert!(run.stdout.contains("trace of step 3 in measured.json"), "{}", run.stdout);
    let (predicted, measured) = (names(&p.path("predicted.json")), names(&p.path("measured.json")));
    let ranks = |names: &BTreeSet<(u64, u64, String)>| names.iter().map(|(rank, ..)| *rank).collect::<BTreeSet<u64>>();
    assert_eq!(ranks(&measured), BTreeSet::from([0, 1, 2, 3]));
    // The simulation has one rank of each class of equal ranks.
    let simulated = ranks(&predicted);
    assert!(simulated.len() >= 2, "{simulated:?}");
    let of_simulated: BTreeSet<_> = measured.into_iter().filter(|(rank, ..)| simulated.contains(rank)).collect();
    assert_eq!(of_simulated, predicted);
}

#[test]
fn unwritable_trace_is_refused_before_the_first_step() {
    let p = Project::new();
    p.train(&["--trace", "nowhere/trace.json"]).refuses(&["nowhere/trace.json"]);
    p.train(&["--trace", ".", "--dp_shard_size", "2"]).refuses(&["cannot write ."]);
    assert!(!p.path("out/metrics.jsonl").exists(), "no step has run");

    p.train(&["--max_steps", "1", "--warmup_steps", "0", "--trace", "short.json"]).succeeds();
    assert!(!names(&p.path("short.json")).is_empty(), "a run shorter than three steps traces its last step");
}

#[test]
fn time_of_a_step_is_the_wall_time_since_the_previous_step() {
    let p = Project::new();
    let yaml = std::fs::read_to_string(p.path("job.yaml")).unwrap();
    let keys = [("dp_replicate_size", "2"), ("threads", "1"), ("save_steps", "none")];
    let keys = keys.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let config = phalanx::config::JobConfig::from_yaml_str(&yaml, &keys).unwrap();
    let mut reported = Vec::new();
    let listen = |event: &phalanx::Event| {
        let phalanx::Event::Step(m) = event else { return };
        reported.push((Instant::now(), m.step_ms, m.tokens_per_s));
        // Time outside of the step's computation counts, too.
        std::thread::sleep(Duration::from_millis(30));
    };

    phalanx::Job::from_config(config).run_with(&phalanx::Control::default(), listen).unwrap();

    assert_eq!(reported.len(), 20);
    let wall_ms = reported[19].0.duration_since(reported[0].0).as_secs_f64() * 1e3;
    let steps_ms: f64 = reported[1..].iter().map(|(_, step_ms, _)| step_ms).sum();
    assert!((steps_ms / wall_ms - 1.0).abs() < 0.1, "{steps_ms} ms in steps, {wall_ms} ms between them: {reported:?}");
    // Two ranks with two microbatches of two rows of 32 tokens.
    assert!(reported.iter().all(|(_, ms, per_s)| (ms / 1e3 * per_s - 256.0).abs() < 1e-6), "{reported:?}");
}
