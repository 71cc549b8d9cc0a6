//! What keeps a job from GPUs: each obstacle is one sentence and exit code 2, and `device: auto` continues on the CPU and says
//! so. On the software GPU.

use crate::support::job::{Job, until};
use crate::support::{Project, Run};
use phalanx_softgpu::Installation;
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn software_gpu() -> Installation {
    Installation::new().expect("the software GPU is built with the tests")
}

/// `phalanx train job.yaml` for a few steps, on the libraries of this folder.
fn train(p: &Project, libraries: &Path, overrides: &[&str]) -> Command {
    let mut command =
        p.command(&[&["train", "job.yaml", "--max_steps", "2", "--warmup_steps", "1"], overrides].concat());
    command.env("PHALANX_CUDA_LIBS", libraries).env("XDG_CACHE_HOME", p.path("cache"));
    command
}

fn run(command: &mut Command) -> Run {
    Run::of(command.output().expect("the binary is built"))
}

/// Settings of the software GPU, and parts of the sentence about them.
type Obstacle<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str]);

#[test]
fn obstacle_is_one_sentence_and_auto_continues_on_the_cpu_and_says_so() {
    let (p, gpu) = (Project::new(), software_gpu());
    let bytes_taken = ((4u64 << 30) - (1 << 20)).to_string();
    let obstacles: [Obstacle<'_>; 7] = [
        (&[("SOFTGPU_DEVICES", "0")], &["this machine has no GPU"]),
        (&[("SOFTGPU_DRIVER_VERSION", "11040")], &["the driver supports CUDA 11.4; at least 12.0 is required"]),
        // The driver cannot make a context.
        (&[("SOFTGPU_CONTEXT_CODE", "999")], &["cuDevicePrimaryCtxRetain failed", "CUDA_ERROR_UNKNOWN (999)"]),
        // The libraries are newer than the driver.
        (&[("SOFTGPU_DRIVER_VERSION", "12040")], &["CUDA 13 only", "the NVIDIA driver supports CUDA 12.4"]),
        // Another process has the GPU to itself.
        (
            &[
                ("SOFTGPU_CONTEXT_CODE", "46"),
                ("SOFTGPU_NVML_COMPUTE_MODE", "3"),
                ("SOFTGPU_NVML_PROCESSES", "4242:1073741824"),
            ],
            &["GPU 0 (softgpu sm_90) is taken", "process 4242 uses 1024 MiB"],
        ),
        // Another process has taken its memory.
        (
            &[("SOFTGPU_TAKEN", &bytes_taken), ("SOFTGPU_NVML_PROCESSES", "4242:4293918720")],
            &["has 1 of 4096 MiB free (process 4242 uses 4095 MiB), and the job needs"],
        ),
        (&[("SOFTGPU_MEMORY", "1M")], &["has 1 of 1 MiB free, and the job needs"]),
    ];
    for (settings, parts) in obstacles {
        run(train(&p, gpu.dir(), &["--device", "cuda"]).envs(settings.iter().copied())).refuses(parts);
        let on_cpu = run(train(&p, gpu.dir(), &["--device", "auto"]).envs(settings.iter().copied())).succeeds();

        assert!(on_cpu.stdout.contains("training on the CPU, because no GPU can be used"), "{}", on_cpu.stdout);
        for part in parts {
            assert!(on_cpu.stdout.contains(part), "`{part}` in: {}", on_cpu.stdout);
        }
    }
}

#[test]
fn missing_library_keeps_auto_on_the_cpu_and_is_named() {
    let (p, gpu) = (Project::new(), software_gpu());
    for library in ["libnvrtc.so.13", "libcublasLt.so.13"] {
        let incomplete = gpu.without(library).unwrap();

        let on_cpu = run(&mut train(&p, incomplete.dir(), &["--device", "auto"])).succeeds();

        assert!(on_cpu.stdout.contains("training on the CPU") && on_cpu.stdout.contains(library), "{}", on_cpu.stdout);
    }
}

#[test]
fn gpu_that_works_is_used_by_auto_without_a_word() {
    let (p, gpu) = (Project::new(), software_gpu());

    let run = run(&mut train(&p, gpu.dir(), &["--device", "auto"])).succeeds();

    assert!(!run.stdout.contains("CPU") && !run.stdout.contains("NCCL"), "{}", run.stdout);
}

#[test]
fn missing_nccl_matters_only_to_several_ranks_and_only_if_it_is_required() {
    let (p, gpu) = (Project::new(), software_gpu());
    let without = gpu.without("libnccl.so.2").unwrap();
    let two = ["--device", "cuda", "--dp_replicate_size", "2"];
    let anew = ["--resume_from_checkpoint", "none"];
    let of = |keys: &[&str]| run(train(&p, without.dir(), &[keys, &anew].concat()).env("SOFTGPU_DEVICES", "2"));

    let alone = of(&["--device", "cuda", "--gpu_collectives", "nccl"]).succeeds();
    let staged = of(&two).succeeds();
    let silent = of(&[&two[..], &["--gpu_collectives", "staged"]].concat()).succeeds();
    let required = of(&[&two[..], &["--gpu_collectives", "nccl"]].concat());

    let sentence =
        "ranks exchange tensors through host memory, which is slower than NCCL: NCCL (libnccl.so.2) was not found";
    assert!(!alone.stdout.contains("NCCL"), "{}", alone.stdout);
    assert!(staged.stdout.contains(sentence), "{}", staged.stdout);
    assert!(!silent.stdout.contains("NCCL"), "{}", silent.stdout);
    required.refuses(&["`gpu_collectives: nccl` cannot be met", "libnccl.so.2"]);
}

#[test]
fn ranks_that_share_a_gpu_say_why_they_do_not_use_nccl() {
    let (p, gpu) = (Project::new(), software_gpu());
    let two = ["--device", "cuda", "--dp_replicate_size", "2"];

    let staged = run(&mut train(&p, gpu.dir(), &two)).succeeds();
    let required = run(&mut train(&p, gpu.dir(), &[&two[..], &["--gpu_collectives", "nccl"]].concat()));

    assert!(staged.stdout.contains("NCCL needs a GPU for each of 2 ranks, found 1"), "{}", staged.stdout);
    required.refuses(&["`gpu_collectives: nccl` cannot be met: NCCL needs a GPU for each of 2 ranks, found 1"]);
}

/// A node of a job with these settings of the software GPU.
fn node(job: &Job, gpu: &Installation, name: &str, settings: &[(&str, &str)]) -> Child {
    let mut command = job.p.command(&["node", "--join", &job.join, "--dir", name]);
    command.env("PHALANX_CUDA_LIBS", gpu.dir()).env("XDG_CACHE_HOME", job.p.path("cache"));
    command.envs(settings.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The second node is refused, in one sentence on both sides.
#[track_caller]
fn second_node_is_refused(settings: [&[(&str, &str)]; 2], sentence: &str) {
    let (p, gpu) = (Project::new(), software_gpu());
    let job = Job::start_with(&p, 0, &["--device", "auto", "--elastic.replace_patience", "120"]);
    let mut first = node(&job, &gpu, "first", settings[0]);
    until("the first node", || {
        let status = p.run(&["status", "out", "--json"]);
        let status: serde_json::Value = serde_json::from_str(&status.stdout).ok()?;
        (status["nodes"].as_array()?.len() == 1).then_some(())
    });

    let second = Run::of(node(&job, &gpu, "second", settings[1]).wait_with_output().unwrap());

    second.refuses(&["the coordinator refuses this node: ", sentence]);
    let log = std::fs::read_to_string(p.path("coordinator.log")).unwrap();
    assert!(log.lines().any(|line| line.starts_with("refused a node: ") && line.contains(sentence)), "{log}");
    assert!(!log.contains("generation 1:"), "the refusal does not wait for a world: {log}");
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn node_with_processors_only_is_refused_by_a_job_on_gpus() {
    let sentence = "computes on its processors and the ranks of this job on GPUs (softgpu sm_90)";
    second_node_is_refused([&[], &[("SOFTGPU_DEVICES", "0")]], sentence);
}

#[test]
fn node_with_gpus_is_refused_by_a_job_on_processors() {
    let sentence = "computes on GPUs (softgpu sm_90) and the ranks of this job on processors";
    second_node_is_refused([&[("SOFTGPU_DEVICES", "0")], &[]], sentence);
}

#[test]
fn node_with_another_model_of_gpus_is_refused_by_a_reproducible_job() {
    second_node_is_refused([&[], &[("SOFTGPU_ARCH", "80")]], "has a GPU of another model (softgpu sm_80) than the job");
}
