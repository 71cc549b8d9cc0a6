//! An interrupted run ends with the bits of an uninterrupted run.

use crate::support::Project;
use crate::support::job::signal;
use phalanx_strategies::optimizer::OptimizerSpec;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn interrupted_and_resumed_run_equals_the_undisturbed_run_bit_for_bit() {
    let p = Project::new();
    // Enough steps that the run does not end between the report of step 10 and the signal.
    const STEPS: usize = 600;
    let long = ["--max_steps", "600", "--save_steps", "none"];
    p.train(&[&long[..], &["--output_dir", "straight"]].concat()).succeeds();
    let args = [&["train", "job.yaml", "--output_dir", "halves"], &long[..]].concat();
    let mut child = p.command(&args).stdout(Stdio::piped()).spawn().unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let mut lines = out.lines().map(|l| l.unwrap());
    assert!(lines.any(|l| l.starts_with("step    10")), "step 10 is reported");
    signal(child.id(), libc::SIGINT);
    let rest: Vec<String> = lines.collect();
    let status = child.wait().unwrap();
    let stopped_at = p.metrics("halves").len();

    let resumed = p.train(&[&args[2..], &["--resume_from_checkpoint", "auto"]].concat()).succeeds();

    assert!(status.success(), "an interrupted run exits with 0: {rest:?}");
    assert!((10..STEPS).contains(&stopped_at), "the run ended early, after {stopped_at} steps");
    assert!(rest.iter().any(|l| l.starts_with("saved")), "the interrupted run saved: {rest:?}");
    assert!(
        rest.iter().any(|l| l.contains("resume with:  phalanx train job.yaml --output_dir halves --max_steps 600")),
        "{rest:?}"
    );
    assert!(resumed.stdout.contains(&format!("resuming at step {stopped_at}")), "{}", resumed.stdout);
    assert_eq!(p.metrics("halves").len(), STEPS);
    assert_eq!(p.metrics("halves"), p.metrics("straight"));
    assert_eq!(p.model_bytes("halves"), p.model_bytes("straight"));
}

#[test]
fn run_whose_checkpoints_are_on_a_disk_that_is_not_mounted_is_refused() {
    let p = Project::new();
    std::fs::create_dir(p.path("out")).unwrap();
    std::os::unix::fs::symlink(p.path("absent/checkpoints"), p.path("out/checkpoints")).unwrap();

    p.train(&[]).refuses(&["out/checkpoints", "absent/checkpoints, which does not exist"]);

    assert!(!p.path("out/metrics.jsonl").exists(), "no step was made");
}

/// As a full disk and an interrupted copy of the folder leave them.
#[test]
fn small_files_that_were_cut_off_cost_no_run() {
    let p = Project::new();
    p.train(&[]).succeeds();
    let control = p.path("out/control");
    let newest = |name: &str| {
        let files = std::fs::read_dir(control.join("store")).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.file_stem().is_some_and(|stem| stem == name)).max().unwrap()
    };
    let cut_off = |path: &std::path::Path, keeps: usize| {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() / 2 * keeps]).unwrap();
    };

    for keeps in [0, 1] {
        for name in ["authority.key", "operator.key", "operator.grant", "job", "address"] {
            cut_off(&control.join(name), keeps);
        }
        let status = p.run(&["status", "job.yaml"]);
        cut_off(&newest("lease.json"), keeps);
        let by_lease = p.train(&["--max_steps", "20"]).succeeds();
        cut_off(&newest("record.json"), keeps);
        let by_record = p.train(&["--max_steps", "20"]).succeeds();

        assert!(status.stdout.contains("finished"), "{status:?}");
        for run in [by_lease, by_record] {
            assert!(run.stdout.contains("all 20 steps were already done"), "{keeps}: {}", run.stdout);
        }
    }
}

const EVALUATED: [&str; 6] = ["--val_set_size", "0.9", "--eval_steps", "3", "--save_steps", "none"];

/// Data whose evaluation takes about a second.
fn evaluated_at_length(p: &Project) {
    let text: String = (0..16_000).map(|i| format!("The {}th hoplite holds the line. ", i * i % 977)).collect();
    std::fs::write(p.path("text.txt"), text).unwrap();
}

fn evaluations(p: &Project, out: &str) -> Vec<(u64, f64)> {
    let text = std::fs::read_to_string(p.path(out).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter_map(|line| Some((line["step"].as_u64()?, line["eval_loss"].as_f64()?))).collect()
}

/// Runs a job, stops it at the line with this text, and returns the rest of its output.
fn stopped_at(p: &Project, keys: &[&str], line: &str) -> Vec<String> {
    let mut child = p.command(&[&["train", "job.yaml"], keys].concat()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|found| found.unwrap().contains(line)), "{line}");
    signal(child.id(), libc::SIGTERM);
    let rest: Vec<String> = lines.map(Result::unwrap).collect();

    assert!(child.wait().unwrap().success(), "{rest:?}");
    rest
}

#[test]
fn evaluation_that_a_request_to_stop_ends_is_made_up_for_by_the_resumed_run() {
    let p = Project::new();
    evaluated_at_length(&p);
    for ranks in ["1", "2"] {
        let [straight, halves] = ["straight", "halves"].map(|name| format!("{name}{ranks}"));
        let with = |out| {
            let own = ["--dp_shard_size", ranks, "--reproducible", "true", "--max_steps", "6", "--output_dir", out];
            [&own[..], &EVALUATED].concat()
        };
        p.train(&with(&straight)).succeeds();
        // The second run is stopped while it makes up for the evaluation.
        for line in ["step     3", "resuming at step 3"] {
            let rest = stopped_at(&p, &with(&halves), line);

            assert!(
                rest.iter().any(|line| line.contains("the evaluation after step 3 is left to the resumed run")),
                "{rest:?}"
            );
            assert_eq!((p.metrics(&halves).len(), evaluations(&p, &halves).len()), (3, 0), "{rest:?}");
        }
        p.train(&with(&halves)).succeeds();
        assert_eq!(evaluations(&p, &halves), evaluations(&p, &straight));
        assert_eq!(p.metrics(&halves), p.metrics(&straight));
        assert_eq!(p.model_bytes(&halves), p.model_bytes(&straight));
    }
}

#[test]
fn request_to_stop_ends_the_evaluation_after_the_last_step_and_the_model_is_exported() {
    let p = Project::new();
    evaluated_at_length(&p);
    for ranks in ["1", "2"] {
        let with = |out| {
            let own = ["--dp_shard_size", ranks, "--reproducible", "true", "--max_steps", "4", "--output_dir", out];
            [&own[..], &EVALUATED].concat()
        };
        let [straight, stopped] = ["straight", "stopped"].map(|name| format!("{name}{ranks}"));
        p.train(&with(&straight)).succeeds();

        let rest = stopped_at(&p, &with(&stopped), "step     4");

        let note = "the evaluation after step 4 is left out, because the run is to stop";
        assert!(rest.iter().any(|line| line.contains(note)), "{rest:?}");
        let found =
            [&straight, &stopped].map(|out| evaluations(&p, out).iter().map(|(step, _)| *step).collect::<Vec<_>>());
        assert_eq!(found, [vec![3, 4], vec![3]]);
        assert_eq!(p.model_bytes(&stopped), p.model_bytes(&straight));
    }
}

#[test]
fn repeated_notices_save_and_ctrl_c_after_them_ends_the_run() {
    let p = Project::new();
    let begun = |keys: &[&str], line: &str| {
        let args = [&["train", "job.yaml", "--max_steps", "100000", "--save_steps", "none"], keys].concat();
        let mut child = p.command(&args).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|found| found.unwrap().contains(line)), "{line}");
        // As `timeout` does: to the process, and to its group.
        signal(child.id(), libc::SIGTERM);
        std::thread::sleep(Duration::from_millis(3));
        signal(child.id(), libc::SIGTERM);
        (child, lines)
    };

    let (mut saves, lines) = begun(&[], "step    10");
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    let saved = saves.wait().unwrap();
    // Its first step takes seconds.
    let slow = ["--model.hidden_size", "192", "--gradient_accumulation_steps", "2000", "--output_dir", "slow"];
    let (mut ends, _lines) = begun(&slow, "parameters;");
    // Batch systems repeat their notice, to the ranks as well, while the job saves.
    for number in [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGTERM] {
        std::thread::sleep(Duration::from_millis(300));
        crate::support::ranks_of(ends.id()).into_iter().chain([ends.id()]).for_each(|pid| signal(pid, number));
    }
    std::thread::sleep(Duration::from_millis(100));
    let still_runs = ends.try_wait().unwrap().is_none();
    signal(ends.id(), libc::SIGINT);
    let ended = ends.wait().unwrap();

    assert!(saved.success() && rest.iter().any(|line| line.starts_with("saved")), "{saved}: {rest:?}");
    assert!(still_runs && ended.signal() == Some(libc::SIGINT), "{ended}");
}

#[test]
fn resuming_from_a_named_checkpoint_repeats_the_rest_bit_for_bit() {
    for optimizer in OptimizerSpec::all() {
        let p = Project::new();
        let keys = ["--optimizer", optimizer.name(), "--learning_rate", "2e-3"];
        p.train(&[&keys[..], &["--output_dir", "straight", "--save_total_limit", "none"]].concat()).succeeds();
        let tenth = p.checkpoints("straight").into_iter().find(|c| c.display().to_string().contains("step-0000000010"));
        let tenth = tenth.unwrap().display().to_string();

        p.train(&[&keys[..], &["--output_dir", "again", "--resume_from_checkpoint", &tenth]].concat()).succeeds();

        assert_eq!(p.metrics("again"), p.metrics("straight")[10..], "{}", optimizer.name());
        assert_eq!(p.model_bytes("again"), p.model_bytes("straight"), "{}", optimizer.name());
    }
}

#[test]
fn fp16_run_skips_steps_that_overflow_and_resumes_with_its_loss_scale() {
    let p = Project::new();
    // At this scale the first gradients overflow, so it must fall before a step counts.
    let args =
        ["--fp16", "true", "--initial_loss_scale", "1e9", "--loss_scale_window", "4", "--save_total_limit", "none"];
    p.train(&[&args[..], &["--output_dir", "straight"]].concat()).succeeds();
    let fifth = p.checkpoints("straight").into_iter().next().unwrap().display().to_string();
    let from = ["--output_dir", "again", "--resume_from_checkpoint", &fifth];

    p.train(&[&args[..], &from].concat()).succeeds();

    let text = std::fs::read_to_string(p.path("straight/metrics.jsonl")).unwrap();
    let field = |line: &str, key: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()[key].as_f64();
    let scales: Vec<f64> = text.lines().filter_map(|l| field(l, "loss_scale")).collect();
    assert!(scales[0] < 1e9, "the first step overflowed and halved the scale: {scales:?}");
    assert!(scales.windows(2).any(|w| w[1] > w[0]), "a run of good steps doubled it again: {scales:?}");
    let losses: Vec<f64> = text.lines().filter_map(|l| field(l, "loss")).collect();
    assert!(losses.last() < losses.first(), "{losses:?}");
    assert_eq!(p.metrics("again"), p.metrics("straight")[5..]);
    assert_eq!(p.model_bytes("again"), p.model_bytes("straight"));
}

#[test]
fn checkpoint_of_another_run_is_refused_unless_it_is_named() {
    let p = Project::new();
    p.train(&["--max_steps", "5"]).succeeds();
    let checkpoint = "out/checkpoints/step-0000000005.g0001";

    let other_shape = ["--model.vocab_size", "300", "--resume_from_checkpoint", checkpoint];
    p.train(&other_shape).refuses(&[checkpoint, "model.embed_tokens.weight", "[264, 32]", "[300, 32]"]);
    p.train(&["--max_steps", "5", "--learning_rate", "1e-3"]).refuses(&[
        checkpoint,
        "`learning_rate`, 0.001 instead of 0.01",
        "--resume_from_checkpoint none",
        "`output_dir`",
        "continue from it all the same",
    ]);
    let several_machines = ["coordinator", "job.yaml", "--max_steps", "5", "--learning_rate", "1e-3"];
    p.run(&several_machines).refuses(&["`learning_rate`, 0.001 instead of 0.01"]);
    let status = p.run(&["status", "job.yaml"]);
    assert!(!status.stdout.contains("`learning_rate`"), "the job has not begun: {status:?}");
    p.train(&["--max_steps", "5", "--micro_batch_size", "3"]).refuses(&["the sequences per step, 6 instead of 4"]);
    p.train(&["--max_steps", "8"]).refuses(&["`max_steps`, 8 instead of 5"]);
    let adafactor = ["--max_steps", "5", "--optimizer", "adafactor"];
    p.train(&adafactor).refuses(&["`optimizer`, adafactor instead of adamw"]);
    let named = [&adafactor[..], &["--resume_from_checkpoint", checkpoint]].concat();
    p.train(&named).refuses(&["changed since it was saved: optimizer;", "name the export as `base_model`"]);
    let changed = ["--max_steps", "8", "--learning_rate", "1e-3", "--resume_from_checkpoint", checkpoint];
    let told = p.train(&changed).succeeds().stdout;

    assert!(told.contains("changed since the checkpoint was saved: learning_rate, max_steps"), "{told}");
}

#[test]
fn checkpoint_beyond_the_last_step_is_refused_and_one_at_the_last_step_is_done() {
    let p = Project::new();
    let constant = ["--lr_scheduler", "constant", "--warmup_steps", "0"];
    p.train(&[&constant[..], &["--max_steps", "5"]].concat()).succeeds();

    p.train(&[&constant[..], &["--max_steps", "3"]].concat()).refuses(&["of step 5", "ends at step 3", "`max_steps`"]);
    let done = p.train(&[&constant[..], &["--max_steps", "5"]].concat()).succeeds().stdout;

    assert!(done.contains("all 5 steps were already done"), "{done}");
}

#[test]
fn empty_resume_key_begins_again() {
    let p = Project::new();
    p.train(&["--max_steps", "5"]).succeeds();

    let again = p.train(&["--max_steps", "5", "--resume_from_checkpoint", ""]).succeeds().stdout;

    assert!(again.contains("step     1  loss"), "{again}");
    assert!(!again.contains("already done"), "{again}");
}

#[test]
fn kill_at_any_moment_loses_no_committed_step() {
    const SAVE_STEPS: u64 = 3;
    let p = Project::new();
    let long = ["--max_steps", "90", "--save_steps", "3", "--save_total_limit", "2"];
    p.train(&[&long[..], &["--output_dir", "straight"]].concat()).succeeds();
    let args = [&["train", "job.yaml", "--output_dir", "killed"], &long[..]].concat();
    // Random moments, seeded by the clock's low digits.
    let mut moment = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos() as u64;
    println!("moments derive from {moment}");
    let (mut kills, mut resumed_at, mut reached) = (0, Vec::new(), 0);
    let deadline = Instant::now() + Duration::from_secs(300);
    loop {
        assert!(Instant::now() < deadline, "the run makes progress between kills: {resumed_at:?}");
        let mut child = p.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|l| l.unwrap());
        let mut printed = Vec::new();
        moment = moment.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let micros = if kills % 2 == 0 {
            // A save ends before the next one begins, so after three save intervals the first save is committed.
            let mut n_steps = 3 * SAVE_STEPS + (moment >> 33) % 10;
            while n_steps > 0
                && let Some(line) = lines.next()
            {
                n_steps -= u64::from(line.starts_with("step"));
                printed.push(line);
            }
            (moment >> 43) % 10_000
        } else {
            // Often before the first step.
            (moment >> 33) % 300_000
        };
        std::thread::sleep(Duration::from_micros(micros));
        let _ = child.kill();
        printed.extend(lines);
        let first = printed
            .iter()
            .find_map(|l| l.split_once("resuming at step ")?.1.split([' ', ',', ':']).next()?.parse().ok());
        if let Some(step) = first {
            assert!(step >= reached, "a run resumed at step {step} although step {reached} had been committed");
            reached = step;
            resumed_at.push(step);
        }
        if child.wait().unwrap().success() {
            break;
        }
        kills += 1;
    }
    println!("{kills} kills; resumed at steps {resumed_at:?}");

    assert!(kills > 0, "the run was killed");
    assert!(reached >= SAVE_STEPS, "no run resumed after its first save: {resumed_at:?}");
    assert_eq!(p.metrics("killed"), p.metrics("straight"));
    assert_eq!(p.model_bytes("killed"), p.model_bytes("straight"));
}

#[test]
fn background_save_of_several_ranks_holds_the_state_of_its_named_step() {
    let p = Project::new();
    let shared = ["--dp_shard_size", "2", "--save_steps", "1", "--save_total_limit", "none"];
    let straight = p.train(&[&shared[..], &["--output_dir", "straight"]].concat()).succeeds();
    let saved: Vec<&str> = straight.stdout.lines().filter(|l| l.starts_with("saved")).collect();
    assert_eq!(saved.len(), 20, "every save is waited for before the next one begins: {saved:?}");

    for step in [1, 7, 12] {
        let name = format!("step-{step:010}");
        let from = p.checkpoints("straight").into_iter().find(|c| c.display().to_string().contains(&name)).unwrap();
        let from = from.display().to_string();
        p.train(&[&shared[..], &["--output_dir", "again", "--resume_from_checkpoint", &from]].concat()).succeeds();

        assert_eq!(p.metrics("again"), p.metrics("straight")[step..], "from step {step}");
        assert_eq!(p.model_bytes("again"), p.model_bytes("straight"), "from step {step}");
        std::fs::remove_dir_all(p.path("again")).unwrap();
    }
}

#[test]
fn failed_background_save_ends_all_ranks_with_its_reason_only_if_checkpoints_are_required() {
    for (ranks, required) in [("1", "true"), ("2", "true"), ("1", "false"), ("2", "false")] {
        let p = Project::new();
        std::fs::create_dir_all(p.path("out")).unwrap();
        std::fs::write(p.path("out/checkpoints"), "a file").unwrap();

        let args = ["--output_dir", "out", "--dp_shard_size", ranks, "--save_steps", "2"];
        let run =
            p.train(&[&args[..], &["--checkpoint_required", required, "--resume_from_checkpoint", "none"]].concat());

        // The save at the end of a run must succeed in any case.
        assert_ne!(run.code, Some(0), "{}", run.stdout);
        let reason: Vec<&str> = run.stderr.lines().filter(|l| l.contains("checkpoints")).collect();
        assert_eq!(reason.len(), 1, "one sentence names the folder: {}", run.stderr);
        let (n_steps, n_failed) = (p.metrics("out").len(), run.stdout.matches("was not saved").count());
        match required {
            "true" => assert!((2..20).contains(&n_steps), "the run ends soon after the save was due: {n_steps} steps"),
            _ => assert_eq!((n_steps, n_failed), (20, 9), "{}", run.stdout),
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let p = Project::new();
    for (threads, out) in [("1", "one"), ("2", "two"), ("3", "three")] {
        for (bf16, kind) in [("false", "f32"), ("true", "bf16")] {
            let out = format!("{out}-{kind}");
            p.train(&["--threads", threads, "--bf16", bf16, "--output_dir", &out]).succeeds();
        }
    }
    for kind in ["f32", "bf16"] {
        for n in ["two", "three"] {
            assert_eq!(p.model_bytes(&format!("one-{kind}")), p.model_bytes(&format!("{n}-{kind}")), "{n} {kind}");
        }
    }
}
