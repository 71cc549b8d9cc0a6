//! Runs whose data is prepared while they train.

use crate::support::job::{Addresses, Job, UNENDING, equals_undisturbed_run, with_kills};
use crate::support::{Project, YAML};

/// A project whose data are four files of twelve rows, in this order.
fn project() -> Project {
    let p = Project::new();
    std::fs::create_dir(p.path("data")).unwrap();
    for file in 0..4 {
        let lines = (0..12).map(|row| format!("{{\"text\": \"file {file} row {row} holds the line\"}}\n"));
        p.write(&format!("data/{file}.jsonl"), &lines.collect::<String>());
    }
    p.write("job.yaml", &(YAML.replace("DIR/text.txt", "DIR/data/*.jsonl") + "streaming: true\nshuffle: false\n"));
    p
}

#[test]
fn streamed_run_trains_on_what_comes_before_a_file_that_cannot_be_used() {
    let p = project();
    let right = std::fs::read_to_string(p.path("data/2.jsonl")).unwrap();
    p.write("data/2.jsonl", &right.replace("{\"text\": \"file 2 row 5", "{\"body\": \"file 2 row 5"));

    // Four rows a step: six steps of the first two files.
    p.train(&["--save_steps", "3"]).refuses(&["2.jsonl:6", "field \"text\" is missing"]);

    assert_eq!(p.metrics("out").len(), 6);
    assert!(!p.checkpoints("out").is_empty());
    p.write("data/2.jsonl", &right);
    let resumed = p.train(&["--save_steps", "3"]).succeeds();
    assert!(resumed.stdout.contains("resuming at step"), "{}", resumed.stdout);
    p.train(&["--output_dir", "straight"]).succeeds();
    assert!(p.model_bytes("out") == p.model_bytes("straight"), "the resumed run has other weights");
}

#[test]
fn streamed_run_whose_ranks_are_killed_ends_with_the_weights_of_one_that_ran_through() {
    let p = project();
    // A pass has 48 rows and a step 20, so that steps take rows of several files and of two passes.
    let job = ["--dp_replicate_size", "2", "--gradient_accumulation_steps", "5", "--reproducible", "true"];
    let job = [&job[..], &["--max_steps", "60", "--shuffle", "true", "--save_steps", "none"]].concat();
    p.train(&[&job[..], &["--output_dir", "straight"]].concat()).succeeds();

    with_kills(&p, &job, &[(1, 4), (0, 12)]);

    assert_eq!(p.metrics("out"), p.metrics("straight"));
    assert!(p.model_bytes("out") == p.model_bytes("straight"));
}

#[test]
fn machines_with_their_own_disks_stream_the_same_rows_and_a_replacement_catches_up() {
    let p = project();
    p.write(
        "job.yaml",
        &std::fs::read_to_string(p.path("job.yaml"))
            .unwrap()
            .replace(&format!("{}/data", p.dir.path().display()), "data"),
    );
    for disk in ["disk0", "disk1"] {
        std::fs::create_dir_all(p.path(disk).join("data")).unwrap();
        for file in std::fs::read_dir(p.path("data")).unwrap().map(Result::unwrap) {
            std::fs::copy(file.path(), p.path(disk).join("data").join(file.file_name())).unwrap();
        }
    }
    let keys = ["--shuffle", "true", "--dataset_prepared_path", "prepared"];
    let disks = Addresses { disks: vec!["disk0", "disk1"], ..Addresses::default() };
    let mut job = Job::start_at(&p, 2, &[&UNENDING[..], &keys].concat(), disks);
    job.until_step(20);

    job.nodes[1].kill().unwrap();
    job.nodes[1].wait().unwrap();
    job.add_node(1);
    job.until_step(job.n_steps() + 40);
    let n_steps = job.stop();

    for disk in ["disk0", "disk1"] {
        let prepared = std::fs::read_dir(p.path(disk).join("prepared")).unwrap().map(|file| file.unwrap().file_name());
        assert_eq!(prepared.filter(|name| name.to_str().unwrap().ends_with(".tokens")).count(), 4, "{disk}");
    }
    equals_undisturbed_run(&p, n_steps, &keys);
}

#[test]
fn stream_of_other_files_does_not_continue_a_run_and_prepare_tokenizes_all_that_is_needed() {
    let p = project();
    p.train(&["--max_steps", "5"]).succeeds();

    p.train(&["--max_steps", "9", "--streaming", "false"]).refuses(&["its data was streamed"]);
    std::fs::rename(p.path("data/3.jsonl"), p.path("data/4.jsonl")).unwrap();
    p.train(&["--max_steps", "9"]).refuses(&["other names"]);

    // Of nine rows, the first file has all; of 36, the fourth file has none.
    let tokenized = |max_steps: &str, cache: &str| {
        let keys = ["--max_steps", max_steps, "--dataset_prepared_path", cache, "--micro_batch_size", "3"];
        p.run(&[&["prepare", "job.yaml", "--gradient_accumulation_steps", "1"], &keys[..]].concat()).succeeds();
        let names = std::fs::read_dir(p.path(cache)).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_str().unwrap().ends_with(".tokens")).count()
    };
    assert_eq!([tokenized("3", "few"), tokenized("12", "more")], [1, 3]);
}
