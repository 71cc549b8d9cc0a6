//! Runs that end early, and the best model of a run.

use crate::support::Project;
use crate::support::job::with_kills;
use serde_json::Value;

/// A learning rate with which the loss over the held-out rows soon rises again.
const KEYS: [&str; 14] = [
    "--val_set_size",
    "12",
    "--eval_steps",
    "2",
    "--learning_rate",
    "0.1",
    "--lr_scheduler",
    "constant",
    "--max_steps",
    "200",
    "--save_steps",
    "none",
    "--save_total_limit",
    "1",
];

/// Steps and losses of the evaluations of a run.
fn evaluations(p: &Project, out: &str) -> Vec<(u64, f64)> {
    let text = std::fs::read_to_string(p.path(out).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| Some((line["step"].as_u64()?, line["eval_loss"].as_f64()?))).collect()
}

fn best(evaluations: &[(u64, f64)]) -> (u64, f64) {
    evaluations.iter().copied().reduce(|best, next| if next.1 < best.1 { next } else { best }).unwrap()
}

fn steps_of_checkpoints(p: &Project, out: &str) -> Vec<u64> {
    let name = |path: &std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    p.checkpoints(out).iter().map(|path| name(path)["step-".len()..][..10].parse().unwrap()).collect()
}

#[test]
fn run_whose_loss_falls_no_more_ends_early_with_its_best_model() {
    let p = Project::new();
    let early = [&KEYS[..], &["--early_stopping_patience", "3"]].concat();

    let run = p.train(&early).succeeds();

    let found = evaluations(&p, "out");
    let (best_step, best_loss) = best(&found);
    let n_steps = p.metrics("out").len() as u64;
    assert_eq!(found.last().unwrap().0, best_step + 2 * 3, "three evaluations were no better: {found:?}");
    assert_eq!(n_steps, best_step + 2 * 3 + 1, "the vote of the next step ends the run");
    assert!(
        run.stdout.contains("ending early") && run.stdout.contains(&format!("that of step {best_step}")),
        "{}",
        run.stdout
    );
    // The best checkpoint and the newest.
    assert_eq!(steps_of_checkpoints(&p, "out"), [best_step, n_steps]);
    let eval = p.run(&["eval", "--json", "job.yaml", "--val_set_size", "12"]).succeeds().stdout;
    assert_eq!(serde_json::from_str::<Value>(&eval).unwrap()["loss"].as_f64(), Some(best_loss));
    let model = p.model_bytes("out");
    let exported = p.run(&["export", "out", "exported"]).succeeds();
    assert!(exported.stdout.contains(&format!("taking step {best_step}, which has the lowest")), "{}", exported.stdout);
    assert!(p.model_bytes("out") == std::fs::read(p.path("exported/model.safetensors")).unwrap());
    let again = p.train(&early).succeeds();
    assert!(
        again.stdout.contains("ended early") && again.stdout.contains("early_stopping_patience"),
        "{}",
        again.stdout
    );
    assert_eq!((p.metrics("out").len() as u64, p.model_bytes("out") == model), (n_steps, true));
    let of_several_machines = p.run(&[&["coordinator", "job.yaml"], &early[..]].concat()).succeeds();
    assert!(of_several_machines.stdout.contains("ended early"), "{}", of_several_machines.stdout);
    let patient = [&KEYS[..], &["--early_stopping_patience", "5"]].concat();
    p.train(&patient).succeeds();
    assert!(p.metrics("out").len() as u64 > n_steps, "it continues");
}

#[test]
fn best_model_is_kept_on_several_ranks_as_on_one() {
    let p = Project::new();
    let keys =
        [&KEYS[..], &["--load_best_model_at_end", "true", "--max_steps", "18", "--reproducible", "true"]].concat();
    let ranks = ["--dp_shard_size", "2", "--gradient_accumulation_steps", "1", "--output_dir", "two"];

    p.train(&keys).succeeds();
    p.train(&[&keys[..], &ranks].concat()).succeeds();

    let found = evaluations(&p, "out");
    let (best_step, _) = best(&found);
    // The sums of the losses are of other parts, and may differ in their last bit.
    for ((step, loss), (of_two, loss_of_two)) in found.iter().zip(evaluations(&p, "two")) {
        assert!(*step == of_two && (loss - loss_of_two).abs() < 1e-12, "{found:?}");
    }
    assert!(best_step < 18, "{found:?}");
    assert!(p.model_bytes("out") == p.model_bytes("two"));
    assert_eq!(
        (steps_of_checkpoints(&p, "out"), steps_of_checkpoints(&p, "two")),
        (vec![best_step, 18], vec![best_step, 18])
    );
    let last = [&keys[..], &["--load_best_model_at_end", "false", "--output_dir", "last"]].concat();
    p.train(&last).succeeds();
    assert!(p.model_bytes("last") != p.model_bytes("out"), "the last model is another one");
}

#[test]
fn run_whose_ranks_are_killed_ends_early_at_the_same_step_with_the_same_model() {
    let p = Project::new();
    // Long enough for the kills, also on a fast machine.
    let early = ["--early_stopping_patience", "15", "--gradient_accumulation_steps", "8"];
    let ranks = ["--dp_replicate_size", "2", "--reproducible", "true"];
    let job = [&KEYS[..], &early, &ranks].concat();
    p.train(&[&job[..], &["--output_dir", "straight"]].concat()).succeeds();

    with_kills(&p, &job, &[(1, 5), (0, 12)]);

    assert_eq!(evaluations(&p, "out"), evaluations(&p, "straight"));
    assert_eq!(p.metrics("out"), p.metrics("straight"));
    assert!(p.metrics("out").len() < 200, "it ended early");
    assert!(p.model_bytes("out") == p.model_bytes("straight"), "the best model is another one");
}

/// As after a kill between the report of a step and that of its evaluation.
#[test]
fn evaluation_that_was_not_reported_is_repeated_once_and_counts_once() {
    for decides in ["false", "true"] {
        let p = Project::new();
        let keys = [&KEYS[..], &["--load_best_model_at_end", decides, "--save_steps", "4", "--save_total_limit", "9"]]
            .concat();
        p.train(&[&keys[..], &["--max_steps", "8", "--output_dir", "straight"]].concat()).succeeds();
        p.train(&[&keys[..], &["--max_steps", "4"]].concat()).succeeds();
        let path = p.path("out/metrics.jsonl");
        let text = std::fs::read_to_string(&path).unwrap();
        let last = text.trim_end().rfind('\n').unwrap() + 1;
        assert!(text[last..].contains("eval_loss"), "{text}");
        std::fs::write(&path, &text[..last]).unwrap();

        for max_steps in ["6", "8"] {
            p.train(&[&keys[..], &["--max_steps", max_steps]].concat()).succeeds();
        }

        assert_eq!(evaluations(&p, "out"), evaluations(&p, "straight"), "load_best_model_at_end: {decides}");
        assert!(p.model_bytes("out") == p.model_bytes("straight"), "load_best_model_at_end: {decides}");
    }
}

#[test]
fn early_stopping_without_evaluations_is_refused() {
    let p = Project::new();

    p.train(&["--early_stopping_patience", "3"]).refuses(&["early_stopping_patience", "eval_steps", "val_set_size"]);
    p.train(&["--val_set_size", "12", "--eval_steps", "2", "--metric_for_best_model", "accuracy"])
        .refuses(&["metric_for_best_model", "eval_loss"]);
    p.train(&["--greater_is_better", "true"]).refuses(&["greater_is_better", "a lower loss is better"]);
    let idle = p.train(&["--load_best_model_at_end", "true", "--max_steps", "2"]).succeeds();
    assert!(idle.stderr.contains("nothing is evaluated"), "{}", idle.stderr);
}
