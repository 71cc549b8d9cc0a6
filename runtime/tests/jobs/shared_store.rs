//! Jobs whose machines share an object store and no file system: each process has a folder of its own.

use crate::support::job::{JOB, signal, until};
use crate::support::s3::{Fault, S3};
use crate::support::{Project, Run, ranks_of};
use std::process::{Child, Command};

const URL: &str = "s3://bucket/run";
/// Where a machine keeps what is not in the bucket.
const LOCAL: &str = "outputs/bucket/run";

/// Leases that a busy machine renews in time.
const PATIENT: [&str; 2] = ["--elastic.detection_time", "3"];

/// Machines of a job, each with a folder as its disk. Killed when dropped.
struct Cluster<'a> {
    p: &'a Project,
    s3: &'a S3,
    overrides: &'a [&'a str],
    processes: Vec<(String, Child)>,
}

impl<'a> Cluster<'a> {
    fn new(p: &'a Project, s3: &'a S3, overrides: &'a [&'a str]) -> Cluster<'a> {
        Cluster { p, s3, overrides, processes: vec![] }
    }

    fn command(&self, machine: &str, args: &[&str]) -> Command {
        let disk = self.p.path(machine);
        std::fs::create_dir_all(&disk).unwrap();
        let mut command = self.p.command(args);
        self.s3.open_to(&mut command).current_dir(disk);
        command
    }

    fn start(&mut self, machine: &str, args: &[&str]) {
        let mut command = self.command(machine, args);
        let log = std::fs::File::create(self.p.path(machine).join("log")).unwrap();
        let child = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        self.processes.push((machine.to_owned(), child));
    }

    fn coordinator(&mut self, machine: &str) {
        let job = self.p.path("job.yaml").display().to_string();
        // A free port: nodes know the address of the first coordinator only.
        let args = ["coordinator", "--listen", "127.0.0.1:0", &job, "--output_dir", URL];
        self.start(machine, &[&args[..], &JOB, &PATIENT, self.overrides].concat());
    }

    fn node(&mut self, machine: &str, join: &str) {
        self.start(machine, &["node", "--join", join, "--dir", "key"]);
    }

    fn log(&self, machine: &str) -> String {
        std::fs::read_to_string(self.p.path(machine).join("log")).unwrap_or_default()
    }

    /// The join string of a coordinator, once it leads.
    fn join(&self, machine: &str) -> String {
        until("a join string", || {
            self.log(machine).lines().find_map(|line| Some(line.split_once("--join ")?.1.to_owned()))
        })
    }

    fn until(&self, machine: &str, text: &str) {
        until(text, || self.log(machine).contains(text).then_some(()));
    }

    /// The machine goes, and its ranks with it.
    fn kill(&mut self, machine: &str) {
        let (_, child) = self.processes.iter_mut().find(|(name, _)| name == machine).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// All metrics lines, of any machine whose rank wrote them: `(step, loss bits, grad_norm bits)`.
    fn metrics(&self) -> Vec<(u64, u64, u64)> {
        let written = |(name, _): &(String, Child)| {
            let out = format!("{name}/{LOCAL}");
            if self.p.path(&out).join("metrics.jsonl").exists() { self.p.metrics(&out) } else { vec![] }
        };
        let mut lines: Vec<_> = self.processes.iter().flat_map(written).collect();
        lines.sort_unstable();
        lines
    }

    /// The number of steps that any machine has reported so far. The last line of a file may be incomplete.
    fn last_step(&self) -> u64 {
        let last = |(name, _): &(String, Child)| {
            let text = std::fs::read_to_string(self.p.path(&format!("{name}/{LOCAL}/metrics.jsonl"))).ok()?;
            let line = text.split_inclusive('\n').rfind(|line| line.ends_with('\n'))?;
            serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64()
        };
        self.processes.iter().filter_map(last).max().unwrap_or(0)
    }

    fn until_step(&self, n: u64) {
        until("a step", || (self.last_step() >= n).then_some(()));
    }

    /// Waits for the end of the job under this coordinator; returns the exported weights.
    fn finish(mut self, coordinator: &str) -> (Vec<u8>, Vec<(u64, u64, u64)>) {
        let at = self.processes.iter().position(|(name, _)| name == coordinator).unwrap();
        let ended = until("the end of the job", || self.processes[at].1.try_wait().unwrap());
        assert!(ended.success(), "{}", self.log(coordinator));
        let has_model = |(name, _): &&(String, Child)| self.p.path(&format!("{name}/{LOCAL}/model")).exists();
        let machine = self.processes.iter().find(has_model).unwrap().0.clone();
        (self.p.model_bytes(&format!("{machine}/{LOCAL}")), self.metrics())
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        for (_, child) in &mut self.processes {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The same job on one machine: its weights, and its metrics lines.
fn straight(p: &Project) -> (Vec<u8>, Vec<(u64, u64, u64)>) {
    p.train(&[&JOB[..], &["--output_dir", "straight"]].concat()).succeeds();
    (p.model_bytes("straight"), p.metrics("straight"))
}

/// Every step was done, and always with the same result.
fn assert_each_step_is_done_as_undisturbed(found: &[(u64, u64, u64)], expected: &[(u64, u64, u64)]) {
    let distinct: std::collections::BTreeSet<_> = found.iter().copied().collect();
    assert_eq!(Vec::from_iter(distinct), expected);
}

#[test]
fn standby_on_another_machine_takes_over_when_the_coordinator_and_a_node_die() {
    let (p, s3) = (Project::new(), S3::start());
    let (weights, metrics) = straight(&p);
    let mut cluster = Cluster::new(&p, &s3, &[]);
    cluster.coordinator("head");
    let join = cluster.join("head");
    cluster.coordinator("standby");
    cluster.until("standby", "standing by");
    ["one", "two"].iter().for_each(|machine| cluster.node(machine, &join));
    cluster.until_step(5);

    cluster.kill("head");
    cluster.kill("one");
    // A node that starts now has the join string of the dead coordinator only.
    cluster.node("three", &join);
    cluster.until("standby", "coordinating");

    let (found, lines) = cluster.finish("standby");
    assert_eq!(found, weights);
    assert_each_step_is_done_as_undisturbed(&lines, &metrics);
}

#[test]
fn ranks_train_on_while_the_store_is_away_and_the_coordinator_leads_again() {
    let (p, s3) = (Project::new(), S3::start());
    let overrides = ["--max_steps", "100000000"];
    let mut cluster = Cluster::new(&p, &s3, &overrides);
    cluster.coordinator("head");
    let join = cluster.join("head");
    ["one", "two"].iter().for_each(|machine| cluster.node(machine, &join));
    cluster.until_step(5);

    for fault in [Fault::Fails("503 Service Unavailable"), Fault::Forbids("PUT"), Fault::Hangs] {
        let n_times = |text: &str| cluster.log("head").matches(text).count();
        let (n_silent, n_led) = (n_times("does not answer; ranks train on"), n_times("coordinating (term"));
        s3.set(fault);
        until("the fault", || (n_times("does not answer; ranks train on") > n_silent).then_some(()));
        cluster.until_step(cluster.last_step() + 20);
        // Its users learn since when nothing is durable.
        let status = cluster.command("operator", &["status", URL]).output().unwrap();
        s3.set(Fault::Nothing);
        assert!(!status.status.success(), "{fault:?}");
        until("a leader", || (n_times("coordinating (term") > n_led).then_some(()));

        // The next checkpoint after the outage commits.
        until("a checkpoint", || {
            // The nodes report to the new leader a moment later.
            let saved = cluster.command("operator", &["save", URL]).output().unwrap();
            String::from_utf8_lossy(&saved.stdout).contains("saved at step ").then_some(())
        });
    }
    Run::of(cluster.command("operator", &["stop", URL]).output().unwrap()).succeeds();
    let head = &mut cluster.processes[0].1;
    assert!(until("the end of the job", || head.try_wait().unwrap()).success(), "{}", cluster.log("head"));
}

/// Stops the processes of these machines, ranks included, or lets them go on.
fn signal_all(cluster: &Cluster<'_>, machines: &[&str], number: i32) {
    let is_meant = |(name, _): &&(String, Child)| machines.contains(&name.as_str());
    for (_, child) in cluster.processes.iter().filter(is_meant) {
        [child.id()].into_iter().chain(ranks_of(child.id())).for_each(|pid| signal(pid, number));
    }
}

#[test]
fn nodes_that_were_suspended_with_their_coordinator_train_on_under_its_successor() {
    let (p, s3) = (Project::new(), S3::start());
    let mut cluster = Cluster::new(&p, &s3, &["--max_steps", "100000000"]);
    cluster.coordinator("head");
    let join = cluster.join("head");
    ["one", "two"].iter().for_each(|machine| cluster.node(machine, &join));
    cluster.until_step(5);
    cluster.coordinator("standby");
    cluster.until("standby", "another coordinator");

    signal_all(&cluster, &["head", "one", "two"], libc::SIGSTOP);
    cluster.until("standby", "coordinating (term");
    signal_all(&cluster, &["head", "one", "two"], libc::SIGCONT);

    cluster.until("head", "the lease is lost");
    until("a checkpoint under the successor", || {
        let saved = cluster.command("operator", &["save", URL]).output().unwrap();
        String::from_utf8_lossy(&saved.stdout).contains("saved at step ").then_some(())
    });
    cluster.until_step(cluster.last_step() + 20);
}

#[test]
fn job_on_one_machine_asks_a_busy_store_again_at_its_start() {
    let (p, s3) = (Project::new(), S3::start());
    let (job, names) = (p.path("job.yaml").display().to_string(), ["lease.json", "record.json", "control/job"]);
    for name in names.into_iter().chain(["authority.key", "operator.key", "register", "control/address"]) {
        s3.delete(|_| true);
        s3.set(Fault::IsBusyOnceAt(name));
        let cluster = Cluster::new(&p, &s3, &[]);

        let args = ["train", &job, "--output_dir", URL, "--max_steps", "2", "--dp_shard_size", "2"];
        let run = Run::of(cluster.command(&name.replace('/', "-"), &args).output().unwrap());

        assert!(s3.has_recovered(), "no request for {name}");
        run.succeeds();
    }
    let cluster = Cluster::new(&p, &s3, &[]);
    let run = |machine: &str, args: &[&str]| Run::of(cluster.command(machine, args).output().unwrap());
    let generate = ["generate", URL, "--prompt", "The", "--max-new-tokens", "1"];
    run("lease.json", &generate).succeeds();
    run("another", &generate).refuses(&["outputs/bucket/run/model", "phalanx export s3://bucket/run DIR"]);
    run("another", &["eval", URL]).succeeds();
}

#[test]
fn job_over_a_store_that_loses_answers_has_the_same_weights() {
    let (p, s3) = (Project::new(), S3::start());
    let (weights, metrics) = straight(&p);
    s3.set(Fault::LosesAnswers);
    let mut cluster = Cluster::new(&p, &s3, &["--save_steps", "50"]);
    cluster.coordinator("head");
    let join = cluster.join("head");
    ["one", "two"].iter().for_each(|machine| cluster.node(machine, &join));

    let (found, lines) = cluster.finish("head");

    assert_eq!(found, weights);
    assert_each_step_is_done_as_undisturbed(&lines, &metrics);
}

#[test]
fn bucket_of_a_running_job_is_refused_to_jobs_of_every_kind() {
    let two_ranks = ["--dp_shard_size", "2"];
    for kind in [&[][..], &two_ranks] {
        let (p, s3) = (Project::new(), S3::start());
        let job = p.path("job.yaml").display().to_string();
        let train = [&["train", &job, "--output_dir", URL, "--max_steps", "100000000"], &PATIENT[..]].concat();
        let other = [&["train", &job, "--output_dir", URL], &PATIENT[..]].concat();
        let coordinate = [&["coordinator", &job, "--output_dir", URL], &PATIENT[..]].concat();
        let mut cluster = Cluster::new(&p, &s3, &[]);
        cluster.start("first", &[&train[..], kind].concat());
        cluster.until_step(2);

        for args in [&other[..], &coordinate] {
            let refused = Run::of(cluster.command("second", args).output().unwrap());
            refused.refuses(&[URL, "in use by another running job"]);
        }
    }
}
