//! Reward models: their evaluations and memory, their scores over HTTP, and what they cannot do.

use crate::gpu::{losses, run, software_gpu, train};
use crate::preference::{numbers, pairs};
use crate::support::Project;
use crate::support::server::{JSON, Server};
use phalanx::api::scores::with_scorer;
use serde_json::{Value, json};

/// The whole model.
const WHOLE: &str = "reward_model: true\ncenter_rewards_coefficient: 0.01\n";
/// Adapters, and the head beside them.
const ADAPTERS: &str = "reward_model: true\nadapter: lora\nlora_r: 4\nlora_target_linear: true\n";

/// A project with a reward model in `out/model`.
fn trained(keys: &str) -> Project {
    let p = pairs(keys);
    p.train(&["--max_steps", "40", "--logging_steps", "40"]).succeeds();
    p
}

fn score_of(p: &Project, model: &str, text: &str) -> f64 {
    let score = with_scorer(&p.path(model), 64, |scorer| {
        let start = scorer.tokenizer().document_start();
        let ids: Vec<u32> = start.into_iter().chain(scorer.tokenizer().encode(text)?).collect();
        scorer.score(&ids)
    });
    f64::from(score.unwrap())
}

fn probs(answer: &Value) -> Vec<f64> {
    let all = answer["data"].as_array().unwrap_or_else(|| panic!("{answer}"));
    all.iter().map(|one| one["probs"][0].as_f64().unwrap()).collect()
}

#[test]
fn run_checkpoint_and_export_of_a_reward_model_evaluate_as_the_run_did() {
    for keys in [WHOLE, ADAPTERS] {
        let p = trained(keys);
        let last = numbers(&p, "out").pop().unwrap();
        p.run(&["export", "out", "exported"]).succeeds();
        let checkpoint = p.checkpoints("out").pop().unwrap();

        for subject in [
            &["job.yaml"][..],
            &["out"],
            &["job.yaml", "--model", checkpoint.to_str().unwrap()],
            &["job.yaml", "--model", "out/model"],
            &["job.yaml", "--model", "exported"],
        ] {
            let run = p.run(&[&["eval"][..], subject, &["--json"]].concat()).succeeds();
            let found: Value = serde_json::from_str(&run.stdout).unwrap();
            let [loss, expected] = [&found["loss"], &last[3]].map(|loss| loss.as_f64().unwrap());
            assert!((loss - expected).abs() < 1e-5, "{keys} {subject:?}: {loss} {expected}");
            assert!(found["perplexity"].is_null(), "{found}");
            let scalars = &found["scalars"];
            for name in ["accuracy", "margin", "mean_reward"] {
                let [found, expected] = [&scalars[name], &last[4][name]].map(|x| x.as_f64().unwrap());
                assert!((found - expected).abs() < 1e-5, "{keys} {subject:?} {name}: {found} {expected}");
            }
            assert_eq!(scalars["accuracy"], 1.0, "{found}");
        }
        p.run(&["eval", "job.yaml", "--model", "base/model"]).refuses(&["gives no scores"]);
    }
}

#[test]
fn scores_over_http_are_those_of_the_model_in_the_shape_of_vllm() {
    for keys in [WHOLE, ADAPTERS] {
        let p = trained(keys);
        let server = Server::start(&p, &["out/model", "--name", "judge"]);
        let texts = ["Hoplite 3 holds 4 shields.", "Hoplite 3 holds a road."];

        let (status, answer) = server.post(
            "/classify",
            &json!({"model": "judge", "input": texts, "use_activation": false, "activation": false}),
        );

        assert_eq!(status, 200, "{answer}");
        let scores = probs(&answer);
        for (score, text) in scores.iter().zip(texts) {
            let expected = score_of(&p, "out/model", text);
            assert!((score - expected).abs() < 1e-6, "{text}: {score} {expected}");
        }
        assert!(scores[0] > scores[1], "the preferred answer has the greater score: {scores:?}");
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("judge")));
        assert_eq!(answer["data"][1], json!({"index": 1, "label": "LABEL_0", "probs": [scores[1]], "num_classes": 1}));
        let n_tokens = 2 + texts.concat().len();
        assert_eq!(
            answer["usage"],
            json!({"prompt_tokens": n_tokens, "total_tokens": n_tokens, "completion_tokens": 0})
        );
        let (_, squashed) = server.post("/classify", &json!({"input": texts[0]}));
        assert!((probs(&squashed)[0] - 1.0 / (1.0 + (-scores[0]).exp())).abs() < 1e-6, "{squashed}");
        // The same text has the same bits, whatever came before, and as ids.
        let ids: Vec<u32> = [256].into_iter().chain(texts[0].bytes().map(u32::from)).collect();
        for input in [json!(texts[0]), json!([ids])] {
            let (_, again) = server.post("/classify", &json!({"input": input, "use_activation": false}));
            assert_eq!(probs(&again), scores[..1], "{input}");
        }
    }
}

/// Its template ends an answer as in training, without the beginning of another one.
#[test]
fn conversation_is_scored_as_its_template_writes_it_in_training() {
    let p = pairs(WHOLE);
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let [asked, yes, no] = [turn("user", "Hold?"), turn("assistant", "Yes."), turn("assistant", "No.")];
    let pair = json!({"prompt": [asked], "chosen": [yes], "rejected": [no]});
    let messages = json!([asked, yes]);
    p.write("pairs.jsonl", &format!("{pair}\n").repeat(8));
    p.train(&["--chat_template", "chatml", "--sequence_len", "64", "--max_steps", "2", "--val_set_size", "0"])
        .succeeds();
    let server = Server::start(&p, &["out/model"]);
    let ask = |body: Value| probs(&server.post("/classify", &body).1)[0];

    let score = ask(json!({"messages": messages, "use_activation": false}));

    let text = "<|im_start|>user\nHold?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n";
    assert_eq!(score, ask(json!({"input": text, "add_special_tokens": false, "use_activation": false})));
    let asked = ask(json!({"messages": messages, "add_generation_prompt": true, "use_activation": false}));
    assert!(asked != score, "the beginning of an answer is scored, too");
}

#[test]
fn each_kind_of_model_refuses_what_the_other_one_answers() {
    let p = trained(WHOLE);
    let scores = Server::start(&p, &["out/model", "--max-len", "32"]);
    let texts = Server::start(&p, &["base/model"]);
    let refused = |server: &Server, path: &str, body: Value, status: u16, parts: &[&str]| {
        let (found, answer) = server.post(path, &body);
        let message = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer}"));
        assert!(found == status && parts.iter().all(|part| message.contains(part)), "{found} {message}");
    };

    refused(&scores, "/v1/completions", json!({"prompt": "a"}), 400, &["gives scores and no texts", "/classify"]);
    let messages = json!({"messages": [{"role": "user", "content": "a"}]});
    refused(&scores, "/v1/chat/completions", messages, 400, &["gives scores and no texts", "/classify"]);
    refused(&texts, "/classify", json!({"input": "a"}), 400, &["gives texts and no scores", "reward_model: true"]);
    refused(&scores, "/classify", json!({"input": "x".repeat(40)}), 400, &["41 tokens", "takes 32"]);
    refused(&scores, "/classify", json!({"input": [1, 999]}), 400, &["999"]);
    refused(&scores, "/classify", json!({"input": "a", "model": "other"}), 404, &["other"]);
    refused(&scores, "/classify", json!({"input": "a", "dimensions": 8}), 400, &["dimensions"]);
    assert_eq!(scores.ask("GET", "/classify", &[], "").0, 405);
    assert_eq!(scores.ask("POST", "/classify", &["content-type: text/plain"], "{}").0, 415);
    assert_eq!(scores.ask("POST", "/classify", &[JSON], &" ".repeat(3 << 20)).0, 413);
    assert_eq!(scores.get("/v1/models").1["data"][0]["max_model_len"], 32);
    for command in [&["generate", "out/model"][..], &["chat", "out/model", "--prompt", "a"]] {
        p.run(command).refuses(&["gives scores and no texts", "phalanx serve"]);
    }
    p.run(&["export", "out/model", "m.gguf", "--gguf", "f16"])
        .refuses(&["a reward model cannot be written to a GGUF file"]);
}

/// One rank, and two that share every row: only one of them has its last token.
#[test]
fn reward_model_trains_on_gpus_with_the_losses_of_the_cpu() {
    let (p, gpu) = (pairs(WHOLE), software_gpu());
    for ranks in ["1", "2"] {
        let train_on = |device: &str| {
            let out = p.path(&format!("{device}-{ranks}")).display().to_string();
            let keys = ["--device", device, "--max_steps", "3", "--output_dir", &out, "--context_parallel_size", ranks];
            run(&mut train(&p, gpu.dir(), &keys)).succeeds();
            losses(&p, &out)
        };

        let (found, expected) = (train_on("cuda"), train_on("cpu"));

        assert_eq!((expected.len(), found.len()), (3, 3));
        for (y, x) in expected.iter().zip(&found) {
            assert!((x - y).abs() < 2e-5 * y, "{ranks}: {found:?} on GPUs, {expected:?} on CPUs");
        }
    }
}
