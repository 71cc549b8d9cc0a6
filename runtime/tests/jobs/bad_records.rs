//! Jobs whose data has records that cannot be used.

use crate::support::job::with_kills;
use crate::support::{Project, Run, YAML};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Forty records; of some, by their line, something else.
fn records(bad: &[(usize, &str)]) -> String {
    let line = |n: usize| match bad.iter().find(|(line, _)| *line == n) {
        Some((_, text)) => format!("{text}\n"),
        None => format!("{{\"text\": \"line {n} holds\"}}\n"),
    };
    (1..=40).map(line).collect()
}

const BAD: [(usize, &str); 3] = [(5, "{\"body\": \"secret\"}"), (17, "not \u{1b}[31mJSON"), (40, "{\"text\": 7}")];

/// A project with the data in `noisy.jsonl`, and the same without its bad records in `clean.jsonl`.
fn project() -> Project {
    let p = Project::new();
    p.write("noisy.jsonl", &records(&BAD));
    p.write(
        "clean.jsonl",
        &records(&[]).lines().enumerate().fold(String::new(), |text, (i, line)| {
            let is_bad = BAD.iter().any(|(bad, _)| *bad == i + 1);
            if is_bad { text } else { text + line + "\n" }
        }),
    );
    p.write("job.yaml", &YAML.replace("text.txt", "noisy.jsonl"));
    p
}

const SKIPS: [&str; 2] = ["--skip_bad_records", "true"];

/// The lists of what was left out, by name, in a folder of prepared data.
fn lists(p: &Project, folder: &str) -> Vec<PathBuf> {
    let files = std::fs::read_dir(p.path(folder)).unwrap().map(|entry| entry.unwrap().path());
    let mut lists: Vec<PathBuf> = files.filter(|path| path.to_str().unwrap().ends_with(".skipped.jsonl")).collect();
    lists.sort();
    lists
}

fn listed(list: &PathBuf) -> Vec<Value> {
    std::fs::read_to_string(list).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn fails_with(run: &Run, parts: &[&str]) {
    assert_eq!(run.code, Some(2), "{run:?}");
    parts.iter().for_each(|part| assert!(run.stderr.contains(part), "`{part}` in: {}", run.stderr));
}

#[test]
fn run_with_bad_records_trains_on_the_others_names_the_list_and_says_so_again_from_the_cache() {
    let p = project();
    let prepared = ["--dataset_prepared_path", "prepared"];
    let keys = [&prepared[..], &SKIPS].concat();
    let strict = p.train(&prepared);

    let run = p.train(&keys).succeeds();
    let again = p.train(&[&keys[..], &["--output_dir", "again"]].concat()).succeeds();
    p.train(&["--datasets.0.path", "clean.jsonl", "--output_dir", "clean"]).succeeds();

    fails_with(&strict, &["3 records cannot be used", "noisy.jsonl:5:", "noisy.jsonl:17:", "noisy.jsonl:40:"]);
    let lists = lists(&p, "prepared");
    let [list] = &lists[..] else { panic!("{lists:?}") };
    let name = list.file_name().unwrap().to_str().unwrap();
    let note = format!("3 of 40 records cannot be used and are left out (listed in prepared/{name})");
    assert!(run.stdout.contains(&note), "{}", run.stdout);
    assert!(again.stdout.contains(&(note + " (from the cache)")), "{}", again.stdout);
    let found = listed(list);
    assert_eq!(found.iter().map(|line| line["line"].as_u64().unwrap()).collect::<Vec<_>>(), [5, 17, 40]);
    assert!(found.iter().all(|line| line["path"] == json!(p.path("noisy.jsonl"))), "{found:?}");
    assert!(found[0]["error"].as_str().unwrap().contains("field \"text\" is missing"), "{found:?}");
    let text = std::fs::read_to_string(list).unwrap();
    assert!(!text.contains("secret") && !text.contains('\u{1b}'), "{text}");
    assert_eq!(p.metrics("out"), p.metrics("clean"), "it trained on something else");
}

#[test]
fn two_ranks_that_are_killed_leave_out_the_same_records_as_one_run_that_was_not() {
    let p = project();
    let keys = ["--dp_replicate_size", "2", "--reproducible", "true", "--max_steps", "60", "--save_steps", "none"];
    let keys = [&keys[..], &SKIPS].concat();
    p.train(&[&keys[..], &["--output_dir", "straight"]].concat()).succeeds();

    with_kills(&p, &keys, &[(1, 4), (0, 12)]);

    assert_eq!(p.metrics("out"), p.metrics("straight"));
    assert!(p.model_bytes("out") == p.model_bytes("straight"));
    let [of_out, of_straight] = ["out/data", "straight/data"].map(|folder| listed(&lists(&p, folder)[0]));
    assert!(of_out.len() == 3 && of_out == of_straight, "{of_out:?}");
}

#[test]
fn prepare_tells_the_counts_as_json_and_warns_of_a_tenth() {
    let p = project();
    let prepare = |keys: &[&str]| p.run(&[&["prepare", "job.yaml"], keys, &SKIPS].concat()).succeeds();

    let json = prepare(&["--json"]);
    let few = prepare(&[]);
    let noise: Vec<(usize, &str)> = (1..=5).map(|line| (line, "{}")).collect();
    p.write("noisy.jsonl", &records(&noise));
    let many = prepare(&[]);

    let result: Value = serde_json::from_str(&json.stdout).unwrap();
    let list = &lists(&p, "out/data");
    let file = json!({"path": p.path("noisy.jsonl"), "records": 40, "skipped": 3, "list": result["skipped"]["files"][0]["list"]});
    assert_eq!(result["skipped"], json!({"records": 3, "files": [file]}));
    assert!(list.iter().any(|list| json!(list) == result["skipped"]["files"][0]["list"]), "{list:?}");
    assert_eq!(result["rows"], 37);
    assert!(!few.stdout.contains("% of the records of"), "{}", few.stdout);
    assert!(many.stdout.contains("warning: 12.5% of the records of"), "{}", many.stdout);
}

#[test]
fn streamed_run_continues_after_a_bad_record_once_such_records_are_left_out() {
    let p = Project::new();
    std::fs::create_dir(p.path("data")).unwrap();
    for file in 0..3 {
        let bad = [(21, "{}"), (22, "x")];
        p.write(&format!("data/{file}.jsonl"), &records(if file == 2 { &bad } else { &[] }));
    }
    p.write("job.yaml", &(YAML.replace("DIR/text.txt", "DIR/data/*.jsonl") + "streaming: true\nshuffle: false\n"));
    let keys = ["--max_steps", "28"];

    let strict = p.train(&keys);
    let run = p.train(&[&keys[..], &SKIPS].concat()).succeeds();
    let prepared = p.run(&[&["prepare", "job.yaml"], &keys[..], &SKIPS].concat()).succeeds();
    let json = p.run(&[&["prepare", "--json", "job.yaml"], &keys[..], &SKIPS].concat()).succeeds();

    fails_with(&strict, &["2.jsonl:21"]);
    assert!(run.stdout.contains("resuming at step"), "{}", run.stdout);
    assert!(prepared.stdout.contains("2 of 40 records cannot be used and are left out"), "{}", prepared.stdout);
    assert_eq!(listed(&lists(&p, "out/data")[0]).len(), 2);
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((&json["skipped"]["records"], &json["skipped"]["files"][0]["skipped"]), (&json!(2), &json!(2)));
}

/// As Python's `json` writes them.
#[test]
fn numbers_that_json_does_not_know_change_nothing_in_fields_that_are_not_read() {
    let p = Project::new();
    let texts: Vec<String> = (1..=40).map(|n| format!("line {n} holds")).collect();
    let plain = texts.iter().map(|text| json!({ "text": text }).to_string() + "\n");
    p.write("plain.jsonl", &plain.collect::<String>());
    let scored = texts.iter().map(|text| {
        format!(
            "{{\"score\": NaN, \"all\": [Infinity, -Infinity, 123456789012345678901234567890], \"text\": {text:?}}}\n"
        )
    });
    p.write("scored.jsonl", &scored.collect::<String>());

    for name in ["plain", "scored"] {
        p.write("job.yaml", &YAML.replace("text.txt", &format!("{name}.jsonl")));
        p.train(&["--output_dir", name]).succeeds();
    }

    assert_eq!(p.metrics("scored"), p.metrics("plain"));
    assert_eq!(p.model_bytes("scored"), p.model_bytes("plain"));
}
