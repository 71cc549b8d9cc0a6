//! Jobs over pairs of answers: kills, evaluations, and what cannot be evaluated.

use crate::gpu::{losses, run, software_gpu, train};
use crate::support::job::{reaches, until, with_kills};
use crate::support::{Project, ranks_of};
use std::process::Stdio;

/// Adapters, beside which the base model is the reference.
const ADAPTERS: &str = "rl: dpo\nadapter: lora\nlora_r: 4\nlora_target_linear: true\nlora_dropout: 0.1\n";
/// The whole model, beside a copy of it.
const WHOLE: &str = "rl: dpo\n";
/// The answers one by one, with a copy of what is trained.
const LABELLED: &str = "rl: kto\ntrained_parameters: [\".*layers.1.*\", lm_head]\n";

/// With the keys of the two: their reference is computed before the first step.
const COMPUTED: &str = "precompute_ref_log_probs: true\n";

/// With the keys of the two without adapters: the copy lies outside device memory.
const OFFLOADED: &str = "offload_reference: true\n";

/// The scores of answers, by the whole model.
const SCORES: &str = "reward_model: true\ncenter_rewards_coefficient: 0.01\n";

/// A project whose job trains on pairs.
pub(crate) fn pairs(keys: &str) -> Project {
    let p = Project::new();
    p.train(&["--max_steps", "5", "--output_dir", "base"]).succeeds();
    let pair = |i: u32| {
        let answers = [format!(" {} shields.", i % 7), " a road.".to_owned()];
        format!(
            "{{\"prompt\": \"Hoplite {i} holds\", \"chosen\": \"{}\", \"rejected\": \"{}\"}}\n",
            answers[0], answers[1]
        )
    };
    p.write("pairs.jsonl", &(0..80).map(pair).collect::<String>());
    p.write(
        "job.yaml",
        &format!(
            "{keys}base_model: DIR/base/model\ndatasets:\n  - path: DIR/pairs.jsonl\n    type: preference\n\
             sequence_len: 48\nmicro_batch_size: 2\nmax_steps: 8\nlearning_rate: 1e-3\nlogging_steps: 1\nsave_steps: 50\n\
             val_set_size: 7\noutput_dir: DIR/out\n"
        ),
    );
    p
}

/// The file with the weights of a run.
fn weights(p: &Project, out: &str) -> Vec<u8> {
    let model = p.path(out).join("model");
    let files = ["adapter_model.safetensors", "model.safetensors"].map(|name| model.join(name));
    std::fs::read(files.iter().find(|file| file.exists()).unwrap()).unwrap()
}

/// The lines of steps and evaluations, without what a clock measures.
pub(crate) fn numbers(p: &Project, out: &str) -> Vec<serde_json::Value> {
    let lines = std::fs::read_to_string(p.path(out).join("metrics.jsonl")).unwrap();
    let kept = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        serde_json::json!([line["step"], line["loss"], line["grad_norm"], line["eval_loss"], line["scalars"]])
    };
    lines.lines().map(kept).collect()
}

#[test]
fn twenty_kills_beside_a_sharded_reference_change_no_bit_of_weights_and_metrics() {
    kills_change_no_bit(&pairs(ADAPTERS));
}

#[test]
fn twenty_kills_beside_a_sharded_copy_of_the_model_change_no_bit_of_weights_and_metrics() {
    kills_change_no_bit(&pairs(WHOLE));
}

#[test]
fn twenty_kills_of_a_run_over_labelled_answers_change_no_bit_of_weights_and_metrics() {
    kills_change_no_bit(&pairs(LABELLED));
}

#[test]
fn twenty_kills_of_a_sharded_reward_model_change_no_bit_of_weights_and_metrics() {
    kills_change_no_bit(&pairs(SCORES));
}

#[test]
fn twenty_kills_beside_a_reference_that_was_computed_before_change_no_bit_of_weights_and_metrics() {
    kills_change_no_bit(&pairs(&format!("{WHOLE}{COMPUTED}")));
}

#[test]
fn twenty_kills_beside_a_copy_outside_device_memory_change_no_bit_of_weights_and_metrics() {
    kills_change_no_bit(&pairs(&format!("{WHOLE}{OFFLOADED}")));
}

#[test]
fn reference_outside_device_memory_changes_no_bit() {
    // In bf16, the copy is stored in bf16.
    let half = format!("{WHOLE}bf16: true\n");
    for (keys, ranks) in [(WHOLE, "1"), (WHOLE, "2"), (LABELLED, "2"), (&half[..], "2")] {
        let p = pairs(&format!("{keys}reproducible: true\neval_steps: 4\nmicrobatches_per_step: 2\n"));
        let offloaded = ["--offload_reference", "true"];
        let sharded = ["--dp_shard_size", ranks, "--output_dir"];
        p.train(&[&sharded[..], &["inside"]].concat()).succeeds();

        p.train(&[&offloaded[..], &sharded, &["outside"]].concat()).succeeds();

        assert!(weights(&p, "outside") == weights(&p, "inside"), "{keys}: the weights differ");
        assert_eq!(numbers(&p, "outside"), numbers(&p, "inside"), "{keys}");
        let bytes = |more: &[&str]| {
            let run = p.run(&[&["estimate", "job.yaml", "--json", "--dp_shard_size", ranks], more].concat()).succeeds();
            let found: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
            ["parameters", "outside device memory"].map(|what| found["memory_bytes"][what].as_u64().unwrap())
        };
        let ([inside, none], [outside, offloaded]) = (bytes(&[]), bytes(&offloaded));
        assert!(none == 0 && offloaded > 0, "{none} and {offloaded} bytes outside");
        assert_eq!(outside + offloaded, inside, "{keys}: only the place differs");
    }
}

/// The host's memory holds the copy, and each block of layers is copied to the device.
#[test]
fn reference_outside_device_memory_trains_on_gpus_with_the_losses_of_the_cpu() {
    let (p, gpu) = (pairs(&format!("{WHOLE}{OFFLOADED}")), software_gpu());
    for ranks in ["1", "2"] {
        let keys = ["--dp_shard_size", ranks, "--microbatches_per_step", "2"];
        p.train(&[&keys[..], &["--device", "cpu", "--output_dir", "cpu", "--resume_from_checkpoint", "none"]].concat())
            .succeeds();

        run(&mut train(&p, gpu.dir(), &[&keys[..], &["--device", "cuda", "--output_dir", ranks]].concat())).succeeds();

        let (found, expected) = (losses(&p, ranks), losses(&p, "cpu"));
        for (x, y) in found.iter().zip(&expected) {
            assert!((x - y).abs() < 2e-5 * y, "{ranks}: {found:?} on GPUs, {expected:?} on CPUs");
        }
        assert_eq!(found.len(), expected.len());
    }
    let [inside, outside] = [("inside", "false"), ("outside", "true")].map(|(out, offloads)| {
        let keys = ["--device", "cuda", "--bf16", "true", "--dp_shard_size", "2", "--offload_reference", offloads];
        run(&mut train(&p, gpu.dir(), &[&keys[..], &["--output_dir", out]].concat())).succeeds();
        losses(&p, out)
    });
    assert_eq!((outside.len(), outside), (8, inside), "in bf16");
}

#[test]
fn reference_that_is_computed_before_the_first_step_changes_no_bit() {
    for keys in [WHOLE, ADAPTERS] {
        let p = pairs(&format!("{keys}reproducible: true\neval_steps: 4\nmicrobatches_per_step: 2\n"));
        let computed = ["--precompute_ref_log_probs", "true"];
        let sharded = ["--dp_shard_size", "2", "--output_dir"];
        p.train(&[&sharded[..], &["in-passes"]].concat()).succeeds();

        let run = p.train(&[&computed[..], &sharded, &["before"]].concat()).succeeds();

        assert!(run.stdout.contains("log-probabilities of the reference were computed"), "{}", run.stdout);
        assert!(weights(&p, "before") == weights(&p, "in-passes"), "{keys}: the weights differ");
        assert_eq!(numbers(&p, "before"), numbers(&p, "in-passes"), "{keys}");
    }
}

#[test]
fn run_continues_with_the_reference_in_its_checkpoint_and_not_without_one() {
    let p = pairs(&format!("{WHOLE}reproducible: true\nmicrobatches_per_step: 2\n"));
    let computed = ["--precompute_ref_log_probs", "true"];
    let half = |out: &str, keys: &[&str]| {
        let length = ["--max_steps", "4", "--lr_scheduler", "constant", "--output_dir", out];
        p.train(&[keys, &length[..]].concat()).succeeds();
    };
    let rest = ["--lr_scheduler", "constant", "--output_dir"];
    half("out", &computed);
    p.train(&[&computed[..], &rest, &["out", "--dp_shard_size", "2"]].concat()).succeeds();
    p.train(&[&computed[..], &rest, &["whole"]].concat()).succeeds();
    assert!(weights(&p, "out") == weights(&p, "whole"), "the weights differ");
    // A run without a reference in its checkpoint may go on as it began, and one with it may do without.
    half("passes", &[]);
    let run = p.train(&[&computed[..], &rest, &["passes"]].concat());
    run.refuses(&[
        "computes the log-probabilities of the reference before the first step",
        "precompute_ref_log_probs: false",
    ]);
    assert_eq!(
        numbers(&p, "passes").iter().filter(|line| !line[1].is_null()).count(),
        4,
        "a refused run keeps what was measured"
    );
    half("back", &computed);
    p.train(&[&rest[..], &["back"]].concat()).succeeds();
    assert!(weights(&p, "back") == weights(&p, "whole"), "the weights differ");
}

/// The world that follows trains no more, and saves what the one before it has done.
#[test]
fn last_state_that_is_saved_without_its_rank_has_the_reference_with_which_it_continues() {
    // The evaluation comes before the save, and gives time for the kill.
    let p = pairs(&format!("{WHOLE}{COMPUTED}"));
    let length = ["--max_steps", "6", "--save_steps", "none", "--val_set_size", "60", "--eval_steps", "100"];
    let keys = [&length[..], &["--dp_shard_size", "2"]].concat();
    let died = (0..5).any(|i| {
        let out = format!("out-{i}");
        let mut command = p.command(&[&["train", "job.yaml"][..], &keys, &["--output_dir", &out]].concat());
        let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        until("the last step", || {
            (p.path(&out).join("metrics.jsonl").exists() && p.metrics(&out).len() >= 6).then_some(())
        });
        if let [.., last] = ranks_of(run.id())[..] {
            reaches(last, libc::SIGKILL);
        }
        assert!(run.wait().unwrap().success());

        let last = p.checkpoints(&out).pop().unwrap();
        let mut files = std::fs::read_dir(last).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
        assert!(files.any(|name| name.ends_with("reference.bin")), "{out}");
        std::fs::read_to_string(p.path(&out).join("events.jsonl")).unwrap().contains("\"why\":\"Died\"")
    });
    assert!(died, "no rank of five runs died before its last save");
}

fn kills_change_no_bit(p: &Project) {
    let keys = ["--reproducible", "true", "--dp_shard_size", "2", "--max_steps", "420", "--eval_steps", "100"];
    p.train(&[&keys[..], &["--output_dir", "straight"]].concat()).succeeds();
    let kills: Vec<(usize, usize)> = (0..20).map(|i| (i % 2, 5 + 20 * i)).collect();

    with_kills(p, &keys, &kills);

    assert!(weights(p, "out") == weights(p, "straight"), "the weights differ");
    assert_eq!(numbers(p, "out"), numbers(p, "straight"));
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    let n_died = events.lines().filter(|line| line.contains("\"why\":\"Died\"")).count();
    assert!(n_died >= 15, "{n_died} incidents of 20 kills");
}

#[test]
fn checkpoint_evaluates_as_its_run_did_and_a_model_without_its_reference_is_refused() {
    for keys in [ADAPTERS, WHOLE, LABELLED] {
        let p = pairs(keys);
        p.train(&[]).succeeds();
        let last = numbers(&p, "out").pop().unwrap();

        let checkpoint = p.checkpoints("out").pop().unwrap();
        let found = p.run(&["eval", "job.yaml", "--model", checkpoint.to_str().unwrap(), "--json"]).succeeds();

        let found: serde_json::Value = serde_json::from_str(&found.stdout).unwrap();
        assert_eq!((&found["loss"], &found["scalars"]), (&last[3], &last[4]), "{keys}");
        assert!(found["perplexity"].is_null() && found["scalars"]["rewards/margins"].is_number(), "{found}");
        // A run means its checkpoint here, and an adapter knows its base.
        for subject in [&["job.yaml"][..], &["out"], &["job.yaml", "--model", "out/model"]] {
            let eval = [&["eval"][..], subject].concat();
            if keys != ADAPTERS && subject.contains(&"out/model") {
                p.run(&eval).refuses(&["compares it with the model that it began with"]);
                continue;
            }
            let run = p.run(&[&eval[..], &["--json"]].concat()).succeeds();
            let found: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
            let [found, expected] = [&found["loss"], &last[3]].map(|loss| loss.as_f64().unwrap());
            assert!((found - expected).abs() < 1e-5, "{subject:?}: {found} {expected}");
        }
    }
}

#[test]
fn pair_whose_answer_is_too_long_is_left_out_with_the_other_one() {
    let p = pairs(ADAPTERS);
    let long = "x".repeat(100);
    p.write(
        "pairs.jsonl",
        &format!(
            "{{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"{long}\"}}\n{{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}}\n"
        ),
    );

    let run = p.train(&["--max_steps", "1", "--val_set_size", "0"]).succeeds();

    assert!(run.stdout.contains("1 rows"), "{}", run.stdout);
}

#[test]
fn messages_of_pairs_may_be_in_a_column_of_any_name() {
    let p = pairs("rl: dpo\nchat_template: chatml\n");
    let job = std::fs::read_to_string(p.path("job.yaml")).unwrap();
    let mut losses = Vec::new();
    for name in ["prompt", "completion", "turns", "messages"] {
        let turn = |role: &str, text: &str| format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
        let (asked, yes, no) = (turn("user", "who?"), turn("assistant", "we"), turn("assistant", "none"));
        let record = format!("{{\"{name}\": [{asked}], \"chosen\": {yes}, \"rejected\": {no}}}\n");
        p.write("pairs.jsonl", &record.repeat(16));
        let kind = format!("type: chat_template.default\n    field_messages: {name}\n");
        p.write("job.yaml", &job.replace("type: preference\n", &kind));

        p.train(&["--max_steps", "1", "--output_dir", name]).succeeds();

        losses.push(numbers(&p, name).remove(0));
    }
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
}

#[test]
fn run_over_conversations_proposes_to_talk_and_one_without_a_template_is_refused_in_one_line() {
    let p = pairs("rl: dpo\n");
    let proposed = |out: &str| {
        let run = p.train(&["--max_steps", "1", "--output_dir", out]).succeeds();
        run.stdout.lines().last().unwrap().to_owned()
    };
    assert!(proposed("of-texts").contains("phalanx generate"));
    let turn = |role: &str, text: &str| format!(r#"[{{"role": "{role}", "content": "{text}"}}]"#);
    let (asked, yes, no) = (turn("user", "who?"), turn("assistant", "we"), turn("assistant", "none"));
    let record = format!("{{\"prompt\": {asked}, \"chosen\": {yes}, \"rejected\": {no}}}\n");
    p.write("pairs.jsonl", &record.repeat(16));

    let config = p.path("base/model/tokenizer_config.json");
    let keys = std::fs::read_to_string(&config).unwrap();
    let mut without: serde_json::Value = serde_json::from_str(&keys).unwrap();
    without.as_object_mut().unwrap().remove("chat_template");
    std::fs::write(&config, without.to_string()).unwrap();
    let refused = p.train(&["--max_steps", "1"]);
    assert_eq!(refused.stderr.matches("set `chat_template`").count(), 1, "{}", refused.stderr);
    std::fs::write(&config, keys).unwrap();
    let hint = proposed("of-messages");
    assert!(hint.contains("phalanx chat"), "{hint}");
    p.write("pairs.jsonl", &record);
    p.write(
        "job2.yaml",
        "base_model: DIR/base/model\ndatasets: [{path: DIR/pairs.jsonl, type: chat_template}]\nsequence_len: 48\nmax_steps: 1\n",
    );
    p.run(&["train", "job2.yaml"]).refuses(&["set `type: preference` and `rl: dpo`"]);
}
