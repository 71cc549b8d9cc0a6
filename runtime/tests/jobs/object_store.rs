//! Runs with checkpoints in an object store: a folder as the store, and a stand-in for S3 on loopback.

use crate::support::job::signal;
use crate::support::s3::{Fault, S3};
use crate::support::{Project, Run};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

#[test]
fn run_resumes_from_an_object_store_alone_bit_for_bit() {
    let p = Project::new();
    p.train(&["--output_dir", "straight"]).succeeds();
    let url = format!("file://{}", p.path("store/first run").display());
    let saved = p.train(&["--output_dir", "first", "--checkpoint_dir", &url, "--save_total_limit", "none"]).succeeds();
    assert!(saved.stdout.contains(&format!("{url}/step-0000000010")), "{}", saved.stdout);
    assert_eq!(p.checkpoints("first"), [] as [std::path::PathBuf; 0], "the output folder has no checkpoints");
    std::fs::remove_dir_all(p.path("first")).unwrap();
    // The suffix of the names is the generation of the saving world, which is not fixed.
    for later in std::fs::read_dir(p.path("store/first run")).unwrap().map(|entry| entry.unwrap().path()) {
        let name = later.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("step-0000000015.") || name.starts_with("step-0000000020.") {
            std::fs::remove_dir_all(later).unwrap();
        }
    }

    let resumed = p.train(&["--output_dir", "again", "--checkpoint_dir", &url]).succeeds();

    assert!(resumed.stdout.contains("resuming at step 10"), "{}", resumed.stdout);
    assert_eq!(p.metrics("again"), p.metrics("straight")[10..]);
    assert!(p.model_bytes("again") == p.model_bytes("straight"), "the weights have the same bits");
}

/// Runs `phalanx` with access to the bucket.
fn run(p: &Project, s3: &S3, args: &[&str]) -> Run {
    Run::of(s3.open_to(&mut p.command(args)).output().unwrap())
}

const URL: &str = "s3://bucket/runs/one";

#[test]
fn two_ranks_save_to_s3_and_one_rank_resumes() {
    let (p, s3) = (Project::new(), S3::start());
    p.train(&["--output_dir", "straight", "--reproducible", "true"]).succeeds();
    let train = |out: &str, mesh: &str, accumulation: &str| {
        let args = ["train", "job.yaml", "--output_dir", out, "--checkpoint_dir", URL, "--save_total_limit", "2"];
        let step = ["--dp_shard_size", mesh, "--gradient_accumulation_steps", accumulation, "--reproducible", "true"];
        run(&p, &s3, &[&args[..], &step[..]].concat()).succeeds()
    };

    train("first", "2", "1");
    let kept: Vec<String> = s3.names().into_iter().filter(|name| name.ends_with("/COMMIT")).collect();
    s3.delete(|name| name.contains("step-0000000020"));
    let resumed = train("again", "1", "2");

    assert!(kept.len() == 2 && kept[0].starts_with("runs/one/step-0000000015.g"), "{kept:?}");
    assert!(resumed.stdout.contains("resuming at step 15"), "{}", resumed.stdout);
    assert!(p.model_bytes("again") == p.model_bytes("straight"), "the weights equal those of one rank");
    let inspected = run(&p, &s3, &["inspect", URL, "--json"]).succeeds();
    assert!(inspected.stdout.contains("s3://bucket/runs/one/step-0000000020"), "{}", inspected.stdout);
    run(&p, &s3, &["export", URL, "exported"]).succeeds();
    assert!(p.path("exported/model.safetensors").exists());
}

#[test]
fn unusable_store_is_refused_before_ranks_start() {
    let (p, s3) = (Project::new(), S3::start());
    p.train(&["--checkpoint_dir", "ftp://host/folder"]).refuses(&["ftp://host/folder", "s3://bucket/"]);
    p.train(&["--checkpoint_dir", "s3:///folder"]).refuses(&["s3:///folder", "names no bucket"]);
    p.train(&["--resume_from_checkpoint", "gs:///x"]).refuses(&["gs:///x", "names no bucket"]);

    let args = ["train", "job.yaml", "--checkpoint_dir", URL];
    let refused = Run::of(s3.known_to(&mut p.command(&args), "stranger").output().unwrap());

    refused.refuses(&["cannot read s3://bucket/runs/one", "credentials"]);
    assert!(!p.path("out").exists(), "nothing was written");
}

/// A run that trains until it is stopped, and its output.
struct Training {
    child: Child,
    lines: Box<dyn Iterator<Item = String>>,
}

impl Training {
    fn start(p: &Project, s3: &S3, overrides: &[&str]) -> Training {
        Training::start_as(p, overrides, |command| s3.open_to(command))
    }

    /// A run in an environment that `identify` gives it.
    fn start_as(p: &Project, overrides: &[&str], identify: impl Fn(&mut Command) -> &mut Command) -> Training {
        let args = ["train", "job.yaml", "--checkpoint_dir", URL, "--max_steps", "10000000", "--save_steps", "20"];
        let mut command = p.command(&[&args, overrides].concat());
        let mut child = identify(&mut command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
        Training { child, lines: Box::new(lines) }
    }

    /// The next line with this text.
    #[track_caller]
    fn until(&mut self, text: &str) -> String {
        self.lines
            .find(|line| line.contains(text))
            .unwrap_or_else(|| panic!("the run ended before a line with `{text}`"))
    }

    /// Stops the run, which fails; returns what it tells.
    fn fails(mut self) -> String {
        signal(self.child.id(), libc::SIGINT);
        let mut text: String = self.lines.by_ref().map(|line| line + "\n").collect();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(1), "{text}");
        text
    }

    /// Waits for the end of a run that ends by itself.
    fn ends(mut self) -> Run {
        let stdout = self.lines.by_ref().map(|line| line + "\n").collect();
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        Run { code: self.child.wait().unwrap().code(), stdout, stderr }
    }

    /// Stops the run, which saves; returns its last lines.
    fn stop(mut self) -> Vec<String> {
        signal(self.child.id(), libc::SIGINT);
        let last: Vec<String> = self.lines.by_ref().collect();
        assert!(self.child.wait().unwrap().success(), "{last:?}");
        last
    }
}

impl Drop for Training {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const TWO_RANKS: [&str; 4] = ["--dp_replicate_size", "2", "--gradient_accumulation_steps", "1"];

#[test]
fn training_continues_while_the_store_is_busy_or_silent_and_later_steps_are_saved() {
    for fault in [Fault::Fails("503 Service Unavailable"), Fault::Fails("500 Internal Server Error"), Fault::Hangs] {
        let (p, s3) = (Project::new(), S3::start());
        let mut training = Training::start(&p, &s3, &TWO_RANKS);
        training.until("saved ");

        s3.set(fault);
        let skipped = training.until("was not saved");
        let n_steps = (0..50).map(|_| training.until("step ")).count();
        s3.set(Fault::Nothing);
        training.until("saved ");
        let last = training.stop();

        assert!(skipped.contains("still waits for its store; training continues"), "{fault:?}: {skipped}");
        assert_eq!(n_steps, 50);
        let saved = last.iter().rfind(|line| line.starts_with("saved")).unwrap();
        let marker = saved.split_once("s3://bucket/").unwrap().1.to_owned() + "/COMMIT";
        assert!(s3.names().contains(&marker), "{fault:?}: {saved}");
    }
}

#[test]
fn refused_saves_end_a_run_only_if_checkpoints_are_required() {
    let (p, s3) = (Project::new(), S3::start());
    let mut training = Training::start(&p, &s3, &TWO_RANKS);
    training.until("saved ");

    s3.set(Fault::Forbids("PUT"));
    let refused = training.until("was not saved");
    training.until("step ");
    let status = p.run(&["status", "job.yaml"]).succeeds().stdout;
    s3.set(Fault::Nothing);
    training.until("saved ");
    training.stop();
    let required = ["--checkpoint_dir", "s3://bucket/two", "--checkpoint_required", "true", "--output_dir", "required"];
    let mut ending = Training::start(&p, &s3, &required);
    ending.until("saved ");
    s3.set(Fault::Forbids("PUT"));
    let ended = ending.ends();
    let forbidden = ["train", "job.yaml", "--checkpoint_dir", "s3://bucket/three", "--output_dir", "three"];
    let never_begun = run(&p, &s3, &forbidden);

    assert!(refused.contains("AccessDenied"), "{refused}");
    assert!(status.contains("last checkpoint at step ") && status.contains(" s ago"), "{status}");
    assert!(ended.code == Some(2) && ended.stderr.contains("AccessDenied"), "{ended:?}");
    assert!(ended.stderr.contains("s3://bucket/two/step-00000000"), "{ended:?}");
    assert!(ended.stdout.contains("required/checkpoints/step-00000000"), "{ended:?}");
    never_begun.refuses(&["checkpoints cannot be saved in s3://bucket/three", "AccessDenied"]);
    assert!(!p.path("three/metrics.jsonl").exists(), "no step was made");
}

#[test]
fn run_whose_store_takes_no_more_saves_its_last_state_in_its_folder() {
    let (p, s3) = (Project::new(), S3::start());
    let mut training = Training::start(&p, &s3, &[&TWO_RANKS[..], &["--lr_scheduler", "constant"]].concat());
    training.until("saved ");
    s3.set(Fault::Forbids("PUT"));
    training.until("was not saved");

    let failed = training.fails();
    let n_steps = p.metrics("out").len();
    let saved = p.checkpoints("out");
    s3.set(Fault::Nothing);
    let exported = run(&p, &s3, &["export", "out", "m"]).succeeds();
    let steps = (n_steps + 2).to_string();
    let command =
        [&["train", "job.yaml"], &TWO_RANKS[..], &["--lr_scheduler", "constant", "--max_steps", &steps]].concat();
    let unnamed = run(&p, &s3, &[&command[..], &["--checkpoint_dir", URL]].concat()).succeeds();
    let other = ["--checkpoint_dir", "s3://bucket/two", "--output_dir", "again"];
    let named = ["--resume_from_checkpoint", saved[0].to_str().unwrap()];
    let again = run(&p, &s3, &[&command[..], &other, &named].concat()).succeeds();

    assert!(failed.contains("AccessDenied"), "{failed}");
    let here = p.path(&format!("out/checkpoints/step-{n_steps:010}"));
    assert!(failed.contains(&format!("step {n_steps} is saved in {}", here.display())), "{failed}");
    assert_eq!(saved.len(), 1, "{saved:?}");
    assert!(exported.stdout.contains(&format!("step-{n_steps:010}")), "{}", exported.stdout);
    assert!(again.stdout.contains(&format!("resuming at step {n_steps} ")), "{}", again.stdout);
    assert!(unnamed.stdout.contains("is newer than all checkpoints in s3://bucket"), "{}", unnamed.stdout);
}

#[test]
fn second_launch_with_the_place_of_a_running_job_is_refused_and_names_its_process() {
    let (p, s3) = (Project::new(), S3::start());
    let mut first = Training::start(&p, &s3, &[]);
    first.until("saved ");
    let other = ["train", "job.yaml", "--checkpoint_dir", URL, "--output_dir", "other", "--max_steps", "10000000"];

    let refused = run(&p, &s3, &other);
    let pid = first.child.id();
    signal(pid, libc::SIGKILL);
    let mut second = Training::start(&p, &s3, &["--output_dir", "other"]);
    let resumed = second.until("resuming at step ");

    refused.refuses(&[URL, &format!("process {pid} on "), "set another checkpoint_dir"]);
    assert!(resumed.contains(URL), "{resumed}");
}

#[test]
fn checkpoints_that_may_not_be_deleted_remain_and_the_run_succeeds() {
    let (p, s3) = (Project::new(), S3::start());
    s3.set(Fault::Forbids("POST"));

    let done = run(&p, &s3, &["train", "job.yaml", "--checkpoint_dir", URL, "--save_total_limit", "1"]).succeeds();

    assert!(
        done.stdout.contains("older checkpoints remain") && done.stdout.contains("AccessDenied"),
        "{}",
        done.stdout
    );
    assert_eq!(s3.names().iter().filter(|name| name.ends_with("/COMMIT")).count(), 4);
}

#[test]
fn store_that_is_busy_for_longer_than_its_client_asks_is_asked_again() {
    let (p, s3) = (Project::new(), S3::start());
    // A client asks six times.
    s3.set(Fault::IsBusyFor(8));

    run(&p, &s3, &["train", "job.yaml", "--checkpoint_dir", URL, "--max_steps", "5"]).succeeds();

    assert!(s3.names().iter().any(|name| name.ends_with("/COMMIT")));
}

#[test]
fn run_whose_store_loses_answers_saves_and_resumes() {
    let (p, s3) = (Project::new(), S3::start());
    s3.set(Fault::LosesAnswers);
    let constant = ["train", "job.yaml", "--checkpoint_dir", URL, "--lr_scheduler", "constant"];
    let train = |steps: &str| run(&p, &s3, &[&constant[..], &["--max_steps", steps]].concat()).succeeds();

    let first = train("10");
    let again = train("20");

    assert!(!first.stdout.contains("not saved"), "{}", first.stdout);
    assert!(again.stdout.contains("resuming at step 10"), "{}", again.stdout);
}

#[test]
fn keys_that_expire_during_a_run_are_replaced_in_the_shared_file_without_ending_it() {
    let (p, s3) = (Project::new(), S3::start());
    let keys = |id: &str| format!("[default]\naws_access_key_id = {id}\naws_secret_access_key = phalanx\n");
    let file = p.write("credentials", &keys("hoplite"));
    let mut training = Training::start_as(&p, &TWO_RANKS, |command| {
        s3.open_to(command).env_remove("AWS_ACCESS_KEY_ID").env_remove("AWS_SECRET_ACCESS_KEY");
        command.env("AWS_SHARED_CREDENTIALS_FILE", &file)
    });
    training.until("saved ");

    s3.rotate_to("second");
    let expired = training.until("was not saved");
    p.write("credentials", &keys("second"));
    training.until("saved ");
    training.stop();

    assert!(expired.contains("ExpiredToken"), "{expired}");
}
