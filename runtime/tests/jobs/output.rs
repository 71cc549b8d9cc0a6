//! A job depends neither on the reader of its output nor on its terminal.

use crate::support::job::{PATIENCE, signal, until};
use crate::support::{Project, Run, hears, ranks_of};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than the job of any test here.
const LONG: [&str; 8] =
    ["--max_steps", "1000000", "--save_steps", "none", "--logging_steps", "1", "--lr_scheduler", "constant"];

fn train(p: &Project, overrides: &[&str]) -> Command {
    p.command(&[&["train", "job.yaml"], overrides].concat())
}

fn n_steps(p: &Project) -> usize {
    std::fs::read_to_string(p.path("out/metrics.jsonl")).unwrap_or_default().lines().count()
}

fn until_step(p: &Project, n: usize) {
    until("a step", || (n_steps(p) >= n).then_some(()));
}

/// Waits for the end of a process, whatever it does with its output; returns the exit code.
fn ends(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("the process does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A pipe of one page. Nobody reads it while the first end lives.
#[allow(unsafe_code)] // the standard library does not change the size of pipes
fn unread_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    // SAFETY: the call takes an open descriptor and integers.
    let size = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    assert_eq!(size, 4096, "the page size");
    (reader, writer)
}

/// A terminal: the end of its emulator, and the end of its processes.
#[allow(unsafe_code)] // the standard library has no terminals
fn terminal() -> (OwnedFd, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    // SAFETY: the first two pointers are to integers of ours; null stands for no name, settings and size.
    let made = unsafe {
        libc::openpty(&raw mut ours, &raw mut theirs, std::ptr::null_mut(), std::ptr::null(), std::ptr::null())
    };
    assert_eq!(made, 0);
    // SAFETY: both descriptors are new and unowned.
    unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

#[test]
fn job_whose_reader_has_died_trains_on_and_is_saved_by_a_signal() {
    for number in [libc::SIGINT, libc::SIGTERM] {
        let p = Project::new();
        let mut job = train(&p, &LONG).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(job.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().starts_with("step")));

        drop(lines);
        until_step(&p, n_steps(&p) + 50);
        signal(job.id(), number);

        assert_eq!(ends(&mut job), Some(0));
        let n_steps = n_steps(&p);
        let one_more = ["--max_steps", &(n_steps + 1).to_string()];
        let resumed = p.train(&[&LONG[..], &one_more].concat()).succeeds();
        assert!(resumed.stdout.contains(&format!("resuming at step {n_steps} ")), "{}", resumed.stdout);
    }
}

/// Whether a process handles a signal.
fn handles(pid: u32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal - 1) & 1 == 1
}

#[test]
fn signal_before_the_first_step_ends_a_run_at_once_and_unfinished() {
    for number in [libc::SIGTERM, libc::SIGINT] {
        let p = Project::new();
        let mut job = train(&p, &LONG);
        let mut job = job.env("SLURM_JOB_ID", "7").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        until("its handlers", || handles(job.id(), number).then_some(()));

        signal(job.id(), number);

        assert_eq!(ends(&mut job), Some(75));
    }
}

#[test]
fn job_that_reaches_its_limit_of_cpu_time_is_saved() {
    let p = Project::new();
    let script = format!("ulimit -St 1; exec {} train job.yaml {}", env!("CARGO_BIN_EXE_phalanx"), LONG.join(" "));
    let mut job = Command::new("bash");
    job.args(["-c", &script]).current_dir(p.dir.path()).env("PBS_JOBID", "7").stdout(Stdio::null());
    let mut job = job.stderr(Stdio::null()).spawn().unwrap();

    let code = ends(&mut job);

    let n_steps = n_steps(&p);
    assert_eq!(code, Some(75));
    let name = p.checkpoints("out").last().unwrap().file_name().unwrap().to_string_lossy().into_owned();
    assert!(n_steps > 0 && name.contains(&format!("{n_steps}")), "{n_steps} steps, {name}");
}

#[test]
fn model_folder_with_a_foreign_file_is_refused_before_the_first_step() {
    let p = Project::new();
    p.train(&["--max_steps", "2"]).succeeds();
    p.write("out/model/README.md", "My model.");

    let run = p.train(&["--max_steps", "4"]);

    run.refuses(&["README.md"]);
    assert_eq!(n_steps(&p), 2);
}

#[test]
fn job_on_a_full_device_trains_to_its_end_and_says_so_once() {
    let p = Project::new();
    let full = File::options().write(true).open("/dev/full").unwrap();

    let run = Run::of(train(&p, &["--output_dir", "full"]).stdout(full).output().unwrap()).succeeds();
    p.train(&["--output_dir", "out"]).succeeds();

    assert_eq!(p.model_bytes("full"), p.model_bytes("out"));
    assert_eq!(run.stderr.matches("cannot write to standard output").count(), 1, "{}", run.stderr);
}

#[test]
fn job_whose_output_nobody_reads_trains_recovers_and_ends() {
    let p = Project::new();
    let two = ["--dp_replicate_size", "2", "--logging_steps", "1", "--max_steps", "600", "--save_steps", "none"];
    let [(out, to_out), (err, to_err)] = [unread_pipe(), unread_pipe()];
    let mut job = train(&p, &two).stdout(to_out).stderr(to_err).spawn().unwrap();

    // A line has more than 80 bytes, so the pipe is full by now.
    until_step(&p, 100);
    signal(ranks_of(job.id())[0], libc::SIGKILL);
    let code = ends(&mut job);

    assert_eq!((code, n_steps(&p)), (Some(0), 600));
    let mut begin = String::new();
    BufReader::new(out).take(4096).read_to_string(&mut begin).unwrap();
    assert!(begin.contains("step     1 "), "{begin}");
    drop(err);
}

#[test]
fn job_on_a_stopped_terminal_trains_to_its_end() {
    let p = Project::new();
    let (ours, theirs) = terminal();
    let handle = || Stdio::from(theirs.try_clone().unwrap());

    let long = ["--logging_steps", "1", "--max_steps", "1500", "--save_steps", "none"];
    let mut job = train(&p, &long).stdout(handle()).stderr(handle()).spawn().unwrap();
    let code = ends(&mut job);

    assert_eq!((code, n_steps(&p)), (Some(0), 1500));
    drop(ours);
}

#[test]
fn closed_terminal_saves_the_job_unless_it_runs_under_nohup() {
    let p = Project::new();
    let mut job = train(&p, &LONG);
    let mut job = hears(libc::SIGHUP, &mut job).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until_step(&p, 5);

    // The kernel and the shell of a terminal both send one.
    (0..2).for_each(|_| signal(job.id(), libc::SIGHUP));

    assert_eq!(ends(&mut job), Some(0));
    let n_steps = n_steps(&p);
    assert!(!p.checkpoints("out").is_empty() && n_steps < 1_000_000);

    let last = (n_steps + 200).to_string();
    let (program, long) = (env!("CARGO_BIN_EXE_phalanx"), LONG.join(" "));
    // As under `nohup`, and in the background of a script, which Ctrl-C ends.
    let script = format!("trap '' HUP INT; exec {program} train job.yaml {long} --max_steps {last}");
    let mut nohup = Command::new("bash");
    nohup.args(["-c", &script]).current_dir(p.dir.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut nohup = nohup.spawn().unwrap();
    until_step(&p, n_steps + 5);
    [libc::SIGHUP, libc::SIGINT].iter().for_each(|ignored| signal(nohup.id(), *ignored));

    assert_eq!((ends(&mut nohup), self::n_steps(&p)), (Some(0), n_steps + 200));
}

#[test]
fn coordinator_and_nodes_whose_readers_have_died_keep_the_job_alive() {
    let p = Project::new();
    let job = ["--dp_replicate_size", "2", "--max_steps", "400", "--save_steps", "none"];
    let mut coordinator = p.command(&[&["coordinator", "job.yaml"], &job[..]].concat());
    let mut coordinator = coordinator.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(coordinator.stdout.take().unwrap()).lines();
    let join = lines.find_map(|line| Some(line.unwrap().split_once("--join ")?.1.to_owned())).unwrap();
    drop(lines);
    let mut nodes: Vec<Child> = (0..2)
        .map(|i| {
            let mut node = p.command(&["node", "--join", &join, "--dir", &format!("node{i}")]);
            let mut node = node.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            drop((node.stdout.take(), node.stderr.take()));
            node
        })
        .collect();

    until_step(&p, 50);
    signal(ranks_of(nodes[1].id())[0], libc::SIGKILL);
    let code = ends(&mut coordinator);

    assert_eq!((code, n_steps(&p)), (Some(0), 400));
    nodes.iter_mut().for_each(|node| assert_eq!(ends(node), Some(0)));
}

#[test]
fn full_disk_for_measurements_is_a_fault_in_the_status_and_no_measurement_is_lost() {
    let p = Project::new();
    let yaml = p.path("job.yaml");
    let text = std::fs::read_to_string(&yaml).unwrap();
    std::fs::write(
        &yaml,
        text.replace("max_steps: 20", "max_steps: 4000").replace("save_steps: 5", "save_steps: none"),
    )
    .unwrap();
    // A write beyond the limit is then an error instead of a signal.
    let script = format!("trap '' XFSZ; exec {} train job.yaml", env!("CARGO_BIN_EXE_phalanx"));
    let mut job = Command::new("bash");
    job.args(["-c", &script]).current_dir(p.dir.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut job = job.spawn().unwrap();
    until_step(&p, 20);
    let rank = ranks_of(job.id())[0];
    let faults = || {
        let status = p.run(&["status", "job.yaml", "--json"]).succeeds();
        let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
        status["faults"].as_array().unwrap().iter().map(|f| f.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };

    assert_eq!(faults(), Vec::<String>::new());
    limit_file_size(rank, 4096);
    let found = until("a fault", || Some(faults()).filter(|faults| !faults.is_empty()));
    let shown = p.run(&["status", "job.yaml"]).succeeds();
    let during = n_steps(&p);
    limit_file_size(rank, libc::RLIM_INFINITY);
    until("no fault", || faults().is_empty().then_some(()));
    let code = ends(&mut job);

    assert!(found[0].contains("cannot write") && found[0].contains("metrics.jsonl"), "{found:?}");
    assert!(shown.stdout.contains("fault: ") && shown.stdout.contains("metrics.jsonl"), "{}", shown.stdout);
    let steps: Vec<u64> = p.metrics("out").iter().map(|(step, ..)| *step).collect();
    assert_eq!((code, steps), (Some(0), (1..=4000).collect()));
    assert!(during < 4000, "the disk was full while the job trained");
}

/// Limits the size of files that a process writes, until it gets another limit.
#[allow(unsafe_code)] // the standard library sets no limits
fn limit_file_size(pid: u32, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` lives until the call returns; the null pointer means that the old limit is not returned.
    let set = unsafe { libc::prlimit(pid as i32, libc::RLIMIT_FSIZE, &limit, std::ptr::null_mut()) };
    assert_eq!(set, 0, "process {pid} exists");
}

#[test]
fn command_that_only_prints_ends_quietly_without_a_reader_and_fails_on_a_full_device() {
    let p = Project::new();
    p.train(&["--max_steps", "2"]).succeeds();
    let printing: [&[&str]; 5] = [
        &["env"],
        &["estimate", "job.yaml", "--json"],
        &["inspect", "out/model"],
        &["init", "--reference"],
        &["generate", "out/model", "--max-new-tokens", "3"],
    ];
    for args in printing {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let quiet = Run::of(p.command(args).stdout(writer).output().unwrap());

        assert_eq!((quiet.code, &*quiet.stderr), (Some(0), ""), "{args:?}");
        fails_on_a_full_device(&p, args);
    }
}

#[track_caller]
fn fails_on_a_full_device(p: &Project, args: &[&str]) {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let run = Run::of(p.command(args).stdout(full).output().unwrap());

    assert_eq!(run.code, Some(1), "{args:?}: {}", run.stderr);
    assert!(run.stderr.contains("error: cannot write to standard output: No space left"), "{}", run.stderr);
}

#[test]
fn command_whose_result_cannot_be_written_after_its_work_fails() {
    let p = Project::new();
    p.train(&["--max_steps", "2"]).succeeds();

    fails_on_a_full_device(&p, &["prepare", "job.yaml", "--json"]);
    fails_on_a_full_device(&p, &["prepare", "job.yaml", "--show", "1"]);
    fails_on_a_full_device(&p, &["eval", "job.yaml"]);
    fails_on_a_full_device(&p, &["eval", "job.yaml", "--json"]);
    fails_on_a_full_device(&p, &["export", "out", "copy", "--json"]);
}

#[test]
fn file_that_init_cannot_write_is_not_there_afterwards() {
    let p = Project::new();
    let script = format!("ulimit -f 0; exec {} init -y my.yaml", env!("CARGO_BIN_EXE_phalanx"));
    let full = Command::new("bash").args(["-c", &script]).current_dir(p.dir.path()).output().unwrap();

    assert!(!full.status.success() && !p.path("my.yaml").exists());
    p.run(&["init", "-y", "my.yaml"]).succeeds();
}

#[test]
fn export_without_a_reader_exports() {
    let p = Project::new();
    p.train(&["--save_total_limit", "none"]).succeeds();
    std::fs::remove_file(p.checkpoints("out").last().unwrap().join("COMMIT")).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);

    Run::of(p.command(&["export", "out", "copy"]).stdout(writer).output().unwrap()).succeeds();

    assert!(p.path("copy/model.safetensors").exists());
}
