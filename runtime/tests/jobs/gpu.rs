//! GPU ranks through the front door, on the software GPU.

use crate::support::{Project, Run};
use phalanx_softgpu::Installation;
use std::path::Path;
use std::process::Command;

pub(crate) fn software_gpu() -> Installation {
    Installation::new().expect("the software GPU is built with the tests")
}

/// `phalanx train job.yaml` on the libraries of this folder.
pub(crate) fn train(p: &Project, libraries: &Path, overrides: &[&str]) -> Command {
    let mut command = p.command(&[&["train", "job.yaml"], overrides].concat());
    command.env("PHALANX_CUDA_LIBS", libraries).env("XDG_CACHE_HOME", p.path("cache"));
    command
}

pub(crate) fn run(command: &mut Command) -> Run {
    Run::of(command.output().expect("the binary is built"))
}

/// The losses of a run.
pub(crate) fn losses(p: &Project, out: &str) -> Vec<f64> {
    p.metrics(out).into_iter().map(|(_, loss, _)| f64::from_bits(loss)).collect()
}

#[test]
fn rank_on_a_gpu_trains_with_the_losses_of_the_cpu() {
    let (p, gpu) = (Project::new(), software_gpu());
    let out = p.path("gpu").display().to_string();
    let on_gpu = ["--device", "cuda", "--max_steps", "4", "--save_steps", "4", "--output_dir", &out];

    run(&mut train(&p, gpu.dir(), &on_gpu)).succeeds();
    p.train(&["--device", "cpu", "--max_steps", "4"]).succeeds();

    let (expected, found) = (losses(&p, "out"), losses(&p, "gpu"));
    assert_eq!((expected.len(), found.len()), (4, 4));
    for (y, x) in expected.iter().zip(&found) {
        assert!((x - y).abs() < 2e-5 * y, "{found:?} on the GPU, {expected:?} on the CPU");
    }
}

/// Every axis with two ranks, on one GPU through host memory and on two over NCCL.
#[test]
fn two_gpu_ranks_on_any_axis_train_with_the_losses_of_two_cpu_ranks() {
    let (p, gpu) = (Project::new(), software_gpu());
    for (axis, size) in [
        ("dp_replicate_size", "2"),
        ("dp_shard_size", "2"),
        ("tensor_parallel_size", "2"),
        ("context_parallel_size", "2"),
        ("pipeline_parallel_size", "2"),
    ] {
        let train_on = |device: &str, collectives: &str, n_gpus: &str| {
            let out = p.path(&format!("{axis}-{device}-{collectives}")).display().to_string();
            let axis = format!("--{axis}");
            let keys = ["--device", device, "--max_steps", "3", "--save_steps", "3", "--output_dir", &out, &axis, size];
            let keys = [&keys[..], &["--gpu_collectives", collectives]].concat();
            run(train(&p, gpu.dir(), &keys).env("SOFTGPU_DEVICES", n_gpus)).succeeds();
            losses(&p, &out)
        };

        let expected = train_on("cpu", "auto", "1");
        assert_eq!(expected.len(), 3);
        for (collectives, n_gpus) in [("staged", "1"), ("nccl", "2")] {
            let found = train_on("cuda", collectives, n_gpus);
            for (y, x) in expected.iter().zip(&found) {
                assert!((x - y).abs() < 2e-5 * y, "{axis}, {collectives}: {found:?} on GPUs, {expected:?} on CPUs");
            }
        }
    }
}

/// The estimate needs no libraries. Runs print the buffers of the fullest rank: below 1 MiB to less than the alignment of a buffer.
#[test]
fn gpu_ranks_allocate_what_an_estimate_without_a_gpu_tells() {
    let (p, gpu) = (Project::new(), software_gpu());
    for keys in [
        "--bf16 true",
        "--dp_shard_size 2 --bf16 true",
        "--dp_shard_size 2 --zero_stage 2 --bf16 true",
        "--adapter lora --lora_r 4 --lora_target_linear true --bf16 true",
        "--adapter lora --lora_r 4 --lora_target_linear true --bf16 true --fp8 true",
        "--dp_shard_size 2 --bf16 true --fp8 true",
        "--tensor_parallel_size 2",
        "--context_parallel_size 2",
        "--pipeline_parallel_size 2",
    ] {
        let keys: Vec<&str> = keys.split(' ').collect();
        let mut estimate = p.command(&[&["estimate", "job.yaml", "--json", "--device", "cuda"], &keys[..]].concat());
        let estimate = run(estimate.env("PHALANX_CUDA_LIBS", p.path("nothing"))).succeeds();
        let estimate: serde_json::Value = serde_json::from_str(&estimate.stdout).unwrap();
        let bytes = estimate["peak_memory_bytes"].as_f64().unwrap();

        let once = ["--device", "cuda", "--max_steps", "1", "--warmup_steps", "0", "--resume_from_checkpoint", "none"];
        let peaks = tempfile::tempdir().unwrap();
        let mut trained = train(&p, gpu.dir(), &[&once, &keys[..]].concat());
        // A GPU for each rank, so that NCCL is used, whose scratch memory would count.
        let trained = run(trained.env("SOFTGPU_DEVICES", "2").env("SOFTGPU_PEAKS", peaks.path())).succeeds();

        let (kib, mib) = (bytes / 1024.0, bytes / f64::from(1 << 20));
        let printed = if mib < 1.0 { format!("buffers {kib:.2} KiB;") } else { format!("buffers {mib:.2} MiB;") };
        assert!(trained.stdout.contains(&printed), "{keys:?}: {printed} in {}", trained.stdout);
        // What the driver has given to the fullest rank, whoever asked for it.
        let files = std::fs::read_dir(peaks.path()).unwrap().map(|file| file.unwrap().path());
        let taken: Vec<u64> = files.map(|file| std::fs::read_to_string(file).unwrap().parse().unwrap()).collect();
        assert_eq!(taken.iter().max().map(|bytes| *bytes as f64), Some(bytes), "{keys:?}: {taken:?}");
    }
}

#[test]
fn estimate_counts_the_contexts_of_spares_on_the_gpu_of_a_rank() {
    let p = Project::new();
    let bytes = |n_spares| {
        let keys = ["--device", "cuda", "--dp_shard_size", "2", "--elastic.spare_ranks", n_spares];
        let mut estimate = p.command(&[&["estimate", "job.yaml", "--json"], &keys[..]].concat());
        let estimate = run(estimate.env("PHALANX_CUDA_LIBS", p.path("nothing"))).succeeds();
        let estimate: serde_json::Value = serde_json::from_str(&estimate.stdout).unwrap();
        ["device", "context"].map(|what| estimate[format!("{what}_memory_bytes")].as_u64().unwrap())
    };

    let [[without, context], [one, _], [three, _]] = ["0", "1", "3"].map(bytes);

    assert_eq!([one - without, three - without], [context, 2 * context]);
}

#[test]
fn checkpoint_of_cpu_ranks_is_resumed_by_gpu_ranks_and_back() {
    let (p, gpu) = (Project::new(), software_gpu());
    let resumed = |devices: [&str; 2], out: &str| {
        let dir = p.path(out).display().to_string();
        let parts = [("--tensor_parallel_size", "4"), ("--pipeline_parallel_size", "8")];
        for (device, (axis, steps)) in devices.into_iter().zip(parts) {
            let keys = ["--device", device, axis, "2", "--max_steps", steps, "--save_steps", "4", "--output_dir", &dir];
            let keys = [&keys[..], &["--resume_from_checkpoint", "auto", "--lr_scheduler", "constant"]].concat();
            run(&mut train(&p, gpu.dir(), &keys)).succeeds();
        }
        losses(&p, out)
    };

    let expected = resumed(["cpu", "cpu"], "on-cpus");
    for (devices, out) in [(["cpu", "cuda"], "to-gpus"), (["cuda", "cpu"], "to-cpus")] {
        let found = resumed(devices, out);

        assert_eq!((expected.len(), found.len()), (8, 8));
        for (y, x) in expected.iter().zip(&found) {
            assert!((x - y).abs() < 2e-4 * y, "{found:?} on {devices:?}, {expected:?} on CPUs");
        }
    }
}

#[test]
fn missing_library_is_named_and_auto_uses_the_cpu() {
    let (p, gpu) = (Project::new(), software_gpu());
    for library in ["libnvrtc.so.13", "libcublasLt.so.13"] {
        let incomplete = gpu.without(library).unwrap();

        run(&mut train(&p, incomplete.dir(), &["--device", "cuda"])).refuses(&["no GPU can be used", library]);

        assert!(!p.path("out").exists(), "nothing was written");
    }
    let incomplete = gpu.without("libnvrtc.so.13").unwrap();
    run(&mut train(&p, incomplete.dir(), &["--device", "auto", "--max_steps", "2"])).succeeds();
}

#[test]
fn missing_cudnn_is_refused_only_if_it_is_requested() {
    let (p, gpu) = (Project::new(), software_gpu());
    let incomplete = gpu.without("libcudnn.so.9").unwrap();

    let refused = run(&mut train(&p, incomplete.dir(), &["--device", "cuda", "--attention", "cudnn"]));
    refused.refuses(&["attention through cuDNN is requested", "cuDNN (libcudnn.so.9) was not found in"]);
    assert!(!p.path("out").exists(), "nothing was written");

    run(&mut train(&p, incomplete.dir(), &["--device", "cuda", "--bf16", "true", "--max_steps", "2"])).succeeds();
}

#[test]
fn job_that_does_not_fit_the_gpu_is_refused_with_both_sizes() {
    let (p, gpu) = (Project::new(), software_gpu());

    let refused = run(train(&p, gpu.dir(), &["--device", "cuda"]).env("SOFTGPU_MEMORY", "1M"));

    refused.refuses(&["GPU 0", "of 1 MiB free, and the job needs", "micro_batch_size"]);
}

#[test]
fn machine_without_a_usable_gpu_is_refused_in_one_sentence() {
    let (p, gpu) = (Project::new(), software_gpu());
    for (variable, value, parts) in [
        ("SOFTGPU_DEVICES", "0", &["no GPU can be used", "this machine has no GPU"][..]),
        ("SOFTGPU_INIT_CODE", "999", &["no GPU can be used", "CUDA_ERROR_UNKNOWN (999)"]),
        ("SOFTGPU_DRIVER_VERSION", "11040", &["the driver supports CUDA 11.4; at least 12.0 is required"]),
    ] {
        run(train(&p, gpu.dir(), &["--device", "cuda"]).env(variable, value)).refuses(parts);

        assert!(!p.path("out").exists(), "nothing was written");
    }
}
