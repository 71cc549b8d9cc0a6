//! Checkpoints of runs that do not train all weights: the others stay in the base model.

use crate::support::{Project, Run};
use std::collections::BTreeSet;

/// A project with a base model in `base/model`, and a job `my.yaml` that trains a part of it.
fn with_base(keys: &str) -> Project {
    let p = Project::new();
    p.train(&["--max_steps", "5", "--output_dir", "base"]).succeeds();
    let data = crate::support::YAML.split_once("datasets:").unwrap().1;
    p.write("my.yaml", &format!("base_model: DIR/base/model\n{keys}datasets:{data}"));
    p
}

fn train(p: &Project, to: &str, more: &[&str]) -> Run {
    p.run(&[&["train", "my.yaml", "--output_dir", to, "--max_steps", "8", "--learning_rate", "0.01"], more].concat())
}

fn weights(p: &Project, dir: &str) -> Vec<u8> {
    let file = ["adapter_model.safetensors", "model.safetensors"].map(|name| p.path(dir).join(name));
    file.iter().find_map(|path| std::fs::read(path).ok()).unwrap_or_else(|| panic!("{dir} has no weights"))
}

/// The names of the tensors of the newest checkpoint of a run.
fn tensors(p: &Project, dir: &str) -> BTreeSet<String> {
    let about: serde_json::Value = serde_json::from_str(&p.run(&["inspect", dir, "--json"]).succeeds().stdout).unwrap();
    about["tensors"].as_object().unwrap().keys().cloned().collect()
}

const KINDS: [(&str, &str); 3] = [
    ("adapter: lora\nlora_r: 4\nlora_target_linear: true\n", ".lora_"),
    ("adapter: qlora\nlora_r: 4\nlora_target_linear: true\n", ".lora_"),
    ("trained_parameters: [model.layers.1]\n", "model.layers.1."),
];

#[test]
fn checkpoint_has_what_its_run_trained_and_resumes_to_the_same_weights_on_other_meshes() {
    for (keys, trained) in KINDS {
        let p = with_base(keys);
        let constant = ["--reproducible", "true", "--lr_scheduler", "constant"];
        train(&p, "whole", &constant).succeeds();
        let two_ranks = ["--dp_shard_size", "2", "--gradient_accumulation_steps", "1", "--max_steps", "4"];
        train(&p, "parts", &[&constant[..], &two_ranks].concat()).succeeds();
        assert!(tensors(&p, "parts").iter().all(|name| name.contains(trained)), "{keys}: {:?}", tensors(&p, "parts"));

        let resumed = train(&p, "parts", &constant).succeeds();

        assert!(resumed.stdout.contains("step     5") && !resumed.stdout.contains("step     4"), "{}", resumed.stdout);
        assert!(weights(&p, "parts/model") == weights(&p, "whole/model"), "{keys}");
    }
}

#[test]
fn export_takes_the_other_weights_from_the_base_model_and_from_no_other_model() {
    for (keys, _) in KINDS {
        let p = with_base(keys);
        train(&p, "out", &[]).succeeds();
        let merge: &[&str] = if keys.starts_with("adapter") { &["--merge"] } else { &[] };
        let export = |to: &str, more: &[&str]| p.run(&[&["export", "out", to], merge, more].concat());
        export("before", &[]).succeeds();
        let loss = |p: &Project| p.run(&["eval", "my.yaml", "--model", "out/checkpoints", "--json"]).succeeds().stdout;
        let before = loss(&p);
        p.train(&["--max_steps", "6", "--output_dir", "other"]).succeeds();

        std::fs::rename(p.path("base"), p.path("moved")).unwrap();

        export("x", &[]).refuses(&["base/model", "--base_model"]);
        export("x", &["--base_model", "other/model"]).refuses(&["other/model", "other values"]);
        export("after", &["--base_model", "moved/model"]).succeeds();
        assert!(weights(&p, "after") == weights(&p, "before"), "{keys}");
        if keys.starts_with("adapter") {
            p.run(&["export", "out", "adapter"]).succeeds();
        }
        std::fs::rename(p.path("moved"), p.path("base")).unwrap();
        let (before, after) =
            (before.parse::<serde_json::Value>().unwrap(), loss(&p).parse::<serde_json::Value>().unwrap());
        assert_eq!(before["loss"], after["loss"]);
    }
}

#[test]
fn weights_drawn_in_the_shape_of_a_base_model_stay_in_the_checkpoint() {
    let p = with_base("reinit_weights: true\ntrained_parameters: [model.layers.1]\n");
    train(&p, "out", &[]).succeeds();
    std::fs::rename(p.path("base"), p.path("moved")).unwrap();

    p.run(&["export", "out", "model"]).succeeds();

    assert!(weights(&p, "model") == weights(&p, "out/model"));
}

#[test]
fn checkpoint_that_trained_more_than_a_run_is_refused_even_if_it_is_named() {
    for trained in ["", "trained_parameters: [model.layers.0, model.layers.1]\n"] {
        let p = with_base(trained);
        train(&p, "more", &[]).succeeds();
        let checkpoint = p.checkpoints("more").pop().unwrap();
        let named = ["--resume_from_checkpoint", checkpoint.to_str().unwrap(), "--max_steps", "10"];

        let fewer = [&named[..], &["--trained_parameters", "[model.layers.1]"]].concat();

        train(&p, "fewer", &fewer).refuses(&["which this run leaves as `base_model` has it", "export"]);
        train(&p, "same", &named).succeeds();
    }
    let p = with_base("adapter: lora\nlora_target_modules: [q_proj, o_proj]\n");
    train(&p, "more", &[]).succeeds();
    let checkpoint = p.checkpoints("more").pop().unwrap();
    let named = ["--resume_from_checkpoint", checkpoint.to_str().unwrap(), "--max_steps", "10"];
    for fewer in [["--lora_target_modules", "[q_proj]"], ["--peft_layers_to_transform", "[0]"]] {
        train(&p, "fewer", &[&named[..], &fewer].concat())
            .refuses(&["lora_A.weight`, for which this run has no place"]);
    }
}

/// Without a base model, checkpoints hold frozen weights: as f32 in f32, and where products round them, as bf16.
#[test]
fn run_in_bf16_continues_alike_from_frozen_weights_of_32_bits_and_of_16() {
    let p = Project::new();
    let data = crate::support::YAML
        .replace("learning_rate: 1e-2", "adapter: lora\nlora_r: 4\nlora_target_linear: true\noptimizer: sgd");
    p.write("drawn.yaml", &data);
    let train = |to: &str, more: &[&str]| {
        let keys = ["train", "drawn.yaml", "--output_dir", to, "--lr_scheduler", "constant", "--reproducible", "true"];
        p.run(&[&keys[..], more].concat()).succeeds()
    };
    // A rate of zero leaves adapters as they began.
    let begin = |to: &str, bf16: &str| {
        train(to, &["--bf16", bf16, "--max_steps", "2", "--learning_rate", "0"]);
        p.checkpoints(to).pop().unwrap().display().to_string()
    };
    let [wide, narrow] = [("wide", "false"), ("narrow", "true")].map(|(to, bf16)| begin(to, bf16));
    let go_on = |to: &str, from: &str, bf16: &str, more: &[&str]| {
        let keys = ["--bf16", bf16, "--resume_from_checkpoint", from, "--max_steps", "5", "--learning_rate", "0.1"];
        train(to, &[&keys[..], more].concat());
        (p.metrics(to), weights(&p, &format!("{to}/model")))
    };
    let two_ranks = ["--dp_shard_size", "2", "--gradient_accumulation_steps", "1"];

    let from_narrow = go_on("a", &narrow, "true", &[]);

    assert!(go_on("b", &wide, "true", &[]) == from_narrow);
    assert!(go_on("c", &wide, "true", &two_ranks).1 == from_narrow.1, "on two ranks");
    go_on("d", &narrow, "false", &[]);
    let loss = |dir: &str| -> f64 {
        let eval = ["eval", "drawn.yaml", "--val_set_size", "20", "--bf16", "true", "--model", dir, "--json"];
        let json: serde_json::Value = serde_json::from_str(&p.run(&eval).succeeds().stdout).unwrap();
        json["loss"].as_f64().unwrap()
    };
    assert_eq!(loss(&wide), loss(&narrow));
}

/// Ranks keep copies of each other's state, also one that trains nothing of one that does; a copy that is not current is an alarm.
#[test]
fn copies_of_what_another_rank_trains_are_current_beside_frozen_weights() {
    const LORA: &str = "adapter: lora\nlora_r: 4\nlora_target_linear: true\n";
    let of_one_stage = format!("{LORA}peft_layers_to_transform: [1]\n");
    let with_lengths = format!("{LORA}peft_use_dora: true\n");
    for keys in [KINDS[2].0, &of_one_stage, &with_lengths] {
        let p = with_base(keys);
        let verified = ["--reproducible", "true", "--elastic.verify_steps", "2"];
        train(&p, "one", &verified).succeeds();
        let shards = ["--dp_shard_size", "2", "--gradient_accumulation_steps", "1"];
        for (to, axis) in [("stages", &["--pipeline_parallel_size", "2"][..]), ("shards", &shards)] {
            train(&p, to, &[&verified[..], axis].concat()).succeeds();

            assert!(weights(&p, &format!("{to}/model")) == weights(&p, "one/model"), "{keys}: {to}");
        }
    }
}
