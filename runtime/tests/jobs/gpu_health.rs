//! The node supervisor's view of GPUs: what `phalanx status` shows, and what happens when a GPU fails. On the software GPU.

use crate::support::job::until;
use crate::support::{Project, Run, ranks_of};
use phalanx_softgpu::Installation;
use serde_json::Value;
use std::io::Write;
use std::process::{Child, Stdio};

/// UUIDs of the software GPUs, which end with their numbers.
fn uuid(device: u32) -> String {
    format!("GPU-736f6674-6770-752d-6465-766963652d{device:02x}")
}

/// A job on software GPUs, with a file that plants Xid events.
struct GpuJob<'a> {
    p: &'a Project,
    out: &'a str,
    process: Child,
}

impl<'a> GpuJob<'a> {
    fn start(p: &'a Project, out: &'a str, n_gpus: &str, keys: &[&str]) -> GpuJob<'a> {
        let gpu = Installation::new().expect("the software GPU is built with the tests");
        std::fs::write(p.path("xids"), "").unwrap();
        let keys = [&["train", "job.yaml", "--device", "cuda", "--output_dir", out], keys].concat();
        let mut command = p.command(&keys);
        command.env("PHALANX_CUDA_LIBS", gpu.dir()).env("XDG_CACHE_HOME", p.path("cache"));
        command.env("SOFTGPU_DEVICES", n_gpus).env("SOFTGPU_NVML_XID_FILE", p.path("xids"));
        command.env("SOFTGPU_NVML_CLOCKS", "64");
        let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary is built");
        GpuJob { p, out, process }
    }

    fn until_step(&self, n: usize) {
        until("a step", || {
            let text = std::fs::read_to_string(self.p.path(self.out).join("metrics.jsonl")).unwrap_or_default();
            (text.lines().filter(|line| line.contains("\"loss\"")).count() >= n).then_some(())
        });
    }

    /// Reports an event of a GPU's driver.
    fn plant(&self, xid: u32, device: u32) {
        let mut file = std::fs::File::options().append(true).open(self.p.path("xids")).unwrap();
        writeln!(file, "{xid} {device}").unwrap();
    }

    fn status(&self) -> Option<Value> {
        serde_json::from_str(&self.p.run(&["status", self.out, "--json"]).stdout).ok()
    }

    fn finish(self) -> Run {
        Run::of(self.process.wait_with_output().unwrap())
    }
}

/// The GPU that the environment of a rank process names.
fn gpu_of(pid: u32) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    variables.find_map(|variable| Some(variable.strip_prefix("CUDA_VISIBLE_DEVICES=")?.to_owned()))
}

#[test]
fn status_shows_the_gpu_of_each_rank_and_its_health() {
    let p = Project::new();
    let job = GpuJob::start(&p, "out", "3", &["--max_steps", "200", "--dp_replicate_size", "2"]);
    job.until_step(3);

    let status = until("a status with health", || {
        job.status().filter(|status| status["nodes"][0]["devices"][0]["slowed_by"].is_string())
    });
    let table = p.run(&["status", "out"]).stdout;
    let ranks = ranks_of(job.process.id());

    let node = &status["nodes"][0];
    assert_eq!(node["devices"].as_array().unwrap().len(), 3, "{node}");
    for (slot, pid) in (0u32..).zip(ranks) {
        let device = &node["devices"][slot as usize];
        assert_eq!(node["ranks"][slot as usize]["device"], slot);
        assert_eq!((device["id"].as_str(), gpu_of(pid)), (Some(&*uuid(slot)), Some(uuid(slot))));
        assert_eq!((device["celsius"].as_u64(), device["name"].as_str()), (Some(41), Some("softgpu sm_90")));
        assert!(device["used_bytes"].as_u64() > Some(0) && device["total_bytes"].as_u64() > Some(4 << 30));
    }
    for part in [&*uuid(2), "softgpu sm_90", "41 °C", "slowed by heat"] {
        assert!(table.contains(part), "`{part}` in: {table}");
    }
    assert!(p.run(&["stop", "out"]).code == Some(0));
    job.finish().succeeds();
}

#[test]
fn rank_of_a_failing_gpu_moves_to_a_free_one_and_the_weights_are_those_of_an_undisturbed_run() {
    let p = Project::new();
    let keys = ["--max_steps", "40", "--save_steps", "40", "--dp_replicate_size", "2"];
    GpuJob::start(&p, "undisturbed", "3", &keys).finish().succeeds();
    let job = GpuJob::start(&p, "faulted", "3", &keys);

    job.until_step(5);
    // A mistake of a program is no failure of the GPU.
    job.plant(31, 1);
    // Nor is an error of a switch, which all GPUs report.
    (0..3).for_each(|device| job.plant(155, device));
    job.until_step(10);
    job.plant(79, 0);
    until("the replacement", || {
        let gpus: Vec<String> = ranks_of(job.process.id()).into_iter().filter_map(gpu_of).collect();
        (gpus == [uuid(2), uuid(1)]).then_some(())
    });
    let ended = job.finish().succeeds();

    let incident = format!("has a failing device: softgpu sm_90 {}: Xid 79, the GPU has fallen off the bus", uuid(0));
    assert_eq!(ended.stdout.matches(&incident).count(), 1, "{}", ended.stdout);
    assert!(!ended.stdout.contains(" died"), "{}", ended.stdout);
    assert_eq!(p.metrics("faulted"), p.metrics("undisturbed"));
    assert!(p.model_bytes("faulted") == p.model_bytes("undisturbed"), "the weights differ");
}

#[test]
fn world_shrinks_when_no_gpu_is_free() {
    let p = Project::new();
    let keys = ["--max_steps", "30", "--dp_replicate_size", "2", "--elastic.replace_patience", "0"];
    let job = GpuJob::start(&p, "out", "2", &keys);

    job.until_step(5);
    job.plant(48, 1);
    let ended = job.finish().succeeds();

    assert!(ended.stdout.contains("Xid 48, an uncorrectable memory error"), "{}", ended.stdout);
    assert!(ended.stdout.contains("with 1 ranks"), "{}", ended.stdout);
    assert_eq!(p.metrics("out").len(), 30);
}

#[test]
fn job_ends_with_the_fault_when_its_only_gpu_fails() {
    let p = Project::new();
    let job = GpuJob::start(&p, "out", "1", &["--max_steps", "4000"]);

    job.until_step(5);
    job.plant(79, 0);
    let ended = job.finish();

    assert_eq!(ended.code, Some(1), "{ended:?}");
    let sentence = format!("too few GPUs of this machine are left: softgpu sm_90 {}: Xid 79", uuid(0));
    assert!(ended.stderr.contains(&sentence), "{}", ended.stderr);
}
