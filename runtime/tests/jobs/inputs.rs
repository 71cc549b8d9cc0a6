//! Nodes and checkpoints of other data, or of another base model, are refused; the sentence names what differs.

use crate::support::job::{JOB, Job, until};
use crate::support::{Project, Run, YAML};
use serde_json::Value;
use std::path::Path;

/// A project that trains a base model in its folder on a text there; both have relative paths.
fn project() -> Project {
    let p = Project::new();
    p.train(&["--max_steps", "3", "--save_steps", "none", "--output_dir", "pretrained"]).succeeds();
    copy(&p.path("pretrained/model"), &p.path("base"));
    let model = &YAML[..YAML.find("tokenizer:").unwrap()];
    let relative =
        YAML.replace(model, "base_model: base\n").replace("tokenizer: bytes\n", "").replace("DIR/text.txt", "text.txt");
    p.write("job.yaml", &relative);
    p
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Changes one weight of a model, or changes it back. The hash in the header and the digests beside the file would reveal
/// damage, which this is not; other tools write neither.
fn change_weights(model: &Path) {
    let path = model.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_bytes]).unwrap();
    let start = header["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    let at = 8 + header_bytes + start;
    bytes[at] ^= 1;
    let text = String::from_utf8(bytes[8..8 + header_bytes].to_vec()).unwrap();
    bytes[8..8 + header_bytes].copy_from_slice(text.replace("blake3", "______").as_bytes());
    std::fs::write(&path, bytes).unwrap();
    let _ = std::fs::remove_file(model.join("model.safetensors.digests"));
}

#[test]
fn node_with_other_data_or_another_base_model_is_refused_and_the_job_goes_on() {
    let p = project();
    p.train(&[&JOB[..], &["--output_dir", "straight"]].concat()).succeeds();
    for folder in ["of-data", "of-model"] {
        copy(&p.path("base"), &p.path(folder).join("base"));
        std::fs::copy(p.path("text.txt"), p.path(folder).join("text.txt")).unwrap();
    }
    std::fs::write(p.path("of-data/text.txt"), "Some other text altogether. ".repeat(400)).unwrap();
    change_weights(&p.path("of-model/base"));
    let mut job = Job::start(&p, 1);
    until("the first node", || {
        let status: Value = serde_json::from_str(&p.run(&["status", "out", "--json"]).stdout).ok()?;
        (status["nodes"].as_array()?.len() == 1).then_some(())
    });
    for (folder, named) in [("of-data", "another `datasets[0]` (text.txt)"), ("of-model", "another `base_model`")] {
        let dir = format!("node-{folder}");
        let mut command = p.command(&["node", "--join", &job.join, "--dir", &dir, "--ranks", "1"]);
        let run = Run::of(command.current_dir(p.path(folder)).output().unwrap());

        run.refuses(&[named, "the job's first node"]);
    }
    job.add_node(1);

    assert_eq!(job.finish(), p.model_bytes("straight"));
}

#[test]
fn checkpoint_of_a_run_on_other_data_or_of_another_base_model_is_refused() {
    let p = project();
    let constant = ["--lr_scheduler", "constant"];
    p.train(&[&constant[..], &["--max_steps", "5"]].concat()).succeeds();
    let text = std::fs::read(p.path("text.txt")).unwrap();
    std::fs::write(p.path("text.txt"), "Some other text altogether. ".repeat(400)).unwrap();

    let of_data = p.train(&constant);
    std::fs::write(p.path("text.txt"), text).unwrap();
    change_weights(&p.path("base"));
    let of_model = p.train(&constant);
    change_weights(&p.path("base"));
    let of_rate = p.train(&["--lr_scheduler", "constant", "--learning_rate", "0.5"]);
    let status = p.run(&["status", "out"]).succeeds().stdout;
    let of_run = p.train(&constant);

    of_data.refuses(&[
        "step-0000000005",
        "`datasets[0]` (text.txt) has other tokens than text.txt had",
        "phalanx export",
    ]);
    of_model
        .refuses(&["step-0000000005", "tensor `model.layers.1.mlp.up_proj.weight` of `base_model` has other values"]);
    of_rate.refuses(&["step-0000000005", "`learning_rate`, 0.5 instead of"]);
    assert!(status.contains("it has finished at step 5 of 5"), "{status}");
    of_run.succeeds();
}
