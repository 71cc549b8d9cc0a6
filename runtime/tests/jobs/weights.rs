//! Jobs whose tokens count more or less: what weights of 1 change, packing, meshes, kills, and what is refused.

use crate::gpu::{losses, run, software_gpu, train};
use crate::support::job::with_kills;
use crate::support::{Project, YAML};
use serde_json::{Value, json};

const CHATS: &str = "type: chat_template\nchat_template: chatml\nloss_weights: true";
const LOSS_WEIGHTS: [&str; 2] = ["--loss_weights", "true"];

/// A project whose data has conversations; the answer of each has the weight that `weight` gives for its number.
fn conversations(weight: impl Fn(usize) -> Option<f64>) -> Project {
    let p = Project::new();
    let record = |i: usize| {
        let turn = |role: &str, text: String| json!({ "role": role, "content": text });
        let mut answer = turn("assistant", format!("{} holds", i % 5));
        if let Some(weight) = weight(i) {
            answer["weight"] = weight.into();
        }
        format!("{}\n", json!({ "messages": [turn("user", format!("{i}?")), answer] }))
    };
    p.write("chats.jsonl", &(0..64).map(record).collect::<String>());
    p.write("job.yaml", &job(CHATS));
    p
}

/// The keys of a job over conversations.
fn job(of_data: &str) -> String {
    let (kind, keys) = of_data.split_once('\n').unwrap();
    let yaml = YAML.replace("text.txt", "chats.jsonl").replace("type: completion", kind);
    let yaml = yaml.replace("gradient_accumulation_steps: 2", "microbatches_per_step: 2\nlr_scheduler: constant");
    yaml.replace("sequence_len: 32", "sequence_len: 256").replace("embeddings: 64", "embeddings: 256") + keys + "\n"
}

/// The numbers of all steps and evaluations.
fn numbers(p: &Project, out: &str) -> Vec<[Value; 4]> {
    let lines = std::fs::read_to_string(p.path(out).join("metrics.jsonl")).unwrap();
    let numbers = |line: Value| ["step", "loss", "grad_norm", "eval_loss"].map(|key| line[key].clone());
    lines.lines().map(|line| numbers(serde_json::from_str(line).unwrap())).collect()
}

/// The losses and gradient norms of all steps, and the losses of evaluations.
fn curve(p: &Project, out: &str) -> Vec<f64> {
    numbers(p, out).into_iter().flat_map(|[_, numbers @ ..]| numbers).filter_map(|number| number.as_f64()).collect()
}

#[track_caller]
fn are_near(a: &[f64], b: &[f64], bound: f64) {
    assert!(a.len() == b.len() && a.len() >= 3, "{a:?} {b:?}");
    a.iter().zip(b).for_each(|(x, y)| assert!((x - y).abs() <= bound * y.abs(), "{x} and {y} in {a:?} and {b:?}"));
}

#[test]
fn weights_of_one_train_as_without_the_key_and_others_do_not() {
    let (none, ones) = (conversations(|_| None), conversations(|i| (i % 2 == 0).then_some(1.0)));
    let keys = ["--val_set_size", "8", "--eval_steps", "10"];
    none.train(&[&keys[..], &["--loss_weights", "false"]].concat()).succeeds();
    ones.train(&keys).succeeds();
    // One answer of eight counts eight times as much.
    let uneven = conversations(|i| (i % 8 == 0).then_some(8.0));
    uneven.train(&keys).succeeds();

    are_near(&curve(&ones, "out"), &curve(&none, "out"), 2e-6);
    let [uneven, none] = [&uneven, &none].map(|p| curve(p, "out"));
    assert!((uneven[0] - none[0]).abs() > 1e-3, "{uneven:?} {none:?}");
}

/// A step over all data has the same loss, however the data is laid into rows and divided among ranks.
#[test]
fn weighted_mean_is_that_of_the_whole_step_whatever_the_rows_and_the_mesh() {
    let p = conversations(|i| Some([0.5, 0.0, 3.25, 0.01][i % 4]));
    let all =
        ["--shuffle", "false", "--micro_batch_size", "1", "--warmup_steps", "0", "--max_steps", "2", "--output_dir"];
    p.train(&[&all[..], &["rows", "--microbatches_per_step", "48"]].concat()).succeeds();
    let rows = p.run(&["prepare", "job.yaml", "--sample_packing", "true"]).succeeds().stdout;
    let n_packed = rows.lines().last().unwrap().split(' ').next().unwrap().to_owned();
    assert!(n_packed.parse::<usize>().unwrap() < 20, "{rows}");

    let packed = [&all[..], &["packed", "--microbatches_per_step", &n_packed, "--sample_packing", "true"]].concat();
    p.train(&packed).succeeds();
    let shards = ["--microbatches_per_step", "48", "--dp_shard_size", "2", "--context_parallel_size", "2"];
    p.train(&[&all[..], &["mesh"], &shards].concat()).succeeds();

    are_near(&curve(&p, "packed"), &curve(&p, "rows"), 1e-5);
    are_near(&curve(&p, "mesh"), &curve(&p, "rows"), 1e-5);
}

#[test]
fn kills_of_a_run_over_weighted_tokens_change_no_bit() {
    let p = conversations(|i| Some([0.5, 1.0, 3.25][i % 3]));
    let keys = ["--reproducible", "true", "--dp_shard_size", "2", "--max_steps", "200", "--val_set_size", "8"];
    let keys = [&keys[..], &["--eval_steps", "50", "--sequence_len", "64", "--save_steps", "20"]].concat();
    p.train(&[&keys[..], &["--output_dir", "straight"]].concat()).succeeds();
    p.train(&[&keys[..], &["--output_dir", "alone", "--dp_shard_size", "1"]].concat()).succeeds();

    with_kills(&p, &keys, &[(0, 25), (1, 70), (0, 130)]);

    assert!(p.model_bytes("out") == p.model_bytes("straight"), "the weights differ");
    assert_eq!(numbers(&p, "out"), numbers(&p, "straight"));
    assert!(p.model_bytes("alone") == p.model_bytes("straight"), "the weights of another mesh differ");
}

#[test]
fn weighted_tokens_train_on_a_gpu_with_the_losses_of_the_cpu() {
    let (p, gpu) = (conversations(|i| Some([0.5, 3.25][i % 2])), software_gpu());
    let (on_gpu, cpu) = (["--device", "cuda", "--output_dir", "gpu"], ["--device", "cpu"]);
    let keys = ["--sequence_len", "64", "--max_steps", "3", "--save_steps", "3"];

    run(&mut train(&p, gpu.dir(), &[&keys[..], &on_gpu].concat())).succeeds();
    p.train(&[&keys[..], &cpu].concat()).succeeds();

    are_near(&losses(&p, "gpu"), &losses(&p, "out"), 2e-5);
}

/// Files that are tokenised while the run trains have weights like those that are prepared before it.
#[test]
fn stream_of_weighted_tokens_trains_as_data_that_is_prepared_before() {
    let p = conversations(|i| Some([0.5, 3.25][i % 2]));
    let data = std::fs::read_to_string(p.path("chats.jsonl")).unwrap();
    let lines: Vec<&str> = data.split_inclusive('\n').collect();
    lines.chunks(20).enumerate().for_each(|(i, lines)| _ = p.write(&format!("part-{i}.jsonl"), &lines.concat()));
    let parts = p.path("part-*.jsonl").display().to_string();
    let keys = ["--datasets.0.path", &parts, "--shuffle", "false", "--max_steps", "16", "--output_dir"];

    p.train(&[&keys[..], &["stream", "--streaming", "true"]].concat()).succeeds();
    p.train(&[&keys[..], &["before"]].concat()).succeeds();

    assert_eq!(numbers(&p, "stream"), numbers(&p, "before"));
    assert!(p.model_bytes("stream") == p.model_bytes("before"), "the weights differ");
}

#[test]
fn weights_are_refused_without_the_key_and_where_they_are_none() {
    let p = conversations(|i| Some(if i == 5 { 0.5 } else { 1.0 }));
    p.run(&["prepare", "job.yaml"]).succeeds();
    let off = p.train(&["--loss_weights", "false"]);
    let bad = conversations(|i| Some(if i == 5 { -0.5 } else { 1.0 }));

    off.refuses(&["chats.jsonl:6: a message has the weight 0.5", "set `loss_weights: true`"]);
    bad.train(&[]).refuses(&["chats.jsonl:6: `weight` of a message is -0.5;", "from 0 to 1048576"]);
}

/// Other weights are other data.
#[test]
fn run_does_not_continue_with_other_weights() {
    let p = conversations(|_| Some(1.0));
    p.train(&["--max_steps", "5"]).succeeds();
    let data = std::fs::read_to_string(p.path("chats.jsonl")).unwrap();
    p.write("chats.jsonl", &data.replacen("\"weight\":1.0", "\"weight\":2.0", 1));

    let run = p.train(&[]);

    assert_eq!(run.code, Some(2), "{}{}", run.stdout, run.stderr);
    assert!(run.stderr.contains("data"), "{}", run.stderr);
    p.write("chats.jsonl", &data);
    let keyless = p.train(&["--loss_weights", "false"]);
    assert!(keyless.stderr.contains("loss_weights"), "{}", keyless.stderr);
    p.train(&LOSS_WEIGHTS).succeeds();
}
