//! Checkpoints of GPU ranks that are copied out while the next step computes, on the software GPU, whose copies are slow.

use crate::support::job::{signal, until};
use crate::support::{Project, Run, ranks_of};
use phalanx_softgpu::Installation;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// `phalanx train job.yaml` on the software GPU, into a folder of its own.
fn train(p: &Project, out: &str, overrides: &[&str]) -> Command {
    let gpu = Installation::new().expect("the software GPU is built with the tests");
    let out = p.path(out).display().to_string();
    // A learning rate that does not depend on the number of steps, and no hang where other tests delay this one.
    let schedule = ["--lr_scheduler", "constant", "--warmup_steps", "0"];
    let of_all = ["--device", "cuda", "--elastic.detection_time", "10", "--output_dir", &out];
    // In bf16 weights are split on a GPU, and attention of cuDNN sums in any order.
    let precision = ["--bf16", "true", "--attention", "own"];
    let mut command = p.command(&[&["train", "job.yaml"], &schedule[..], &of_all, &precision, overrides].concat());
    command.env("PHALANX_CUDA_LIBS", gpu.dir()).env("XDG_CACHE_HOME", p.path("cache"));
    command
}

fn run(command: &mut Command) -> Run {
    Run::of(command.output().expect("the binary is built"))
}

/// The committed checkpoint of a step.
fn checkpoint(p: &Project, out: &str, step: u64) -> Option<PathBuf> {
    let name = format!("step-{step:010}.g");
    let is_of_step = |path: &&PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(&name);
    let found = p.checkpoints(out).into_iter().filter(|path| path.join("COMMIT").exists());
    found.collect::<Vec<_>>().iter().find(is_of_step).cloned()
}

/// Names and bytes of the files with tensors.
fn tensors(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(path).unwrap())).collect()
}

/// The state after some steps, of a run that ends there: its last checkpoint is saved while nothing trains.
fn state_after(p: &Project, steps: u64, keys: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let (out, steps_text) = (format!("ends-{steps}"), steps.to_string());
    run(train(p, &out, &["--max_steps", &steps_text, "--save_steps", "none"]).args(keys)).succeeds();
    tensors(&checkpoint(p, &out, steps).expect("the last step is saved"))
}

#[test]
fn checkpoint_beside_training_has_the_state_of_its_step_under_every_order() {
    let p = Project::new();
    let expected: Vec<_> = [2, 4].into_iter().map(|step| (step, state_after(&p, step, &[]))).collect();
    assert!(!expected[0].1.is_empty() && expected[0].1 != expected[1].1);

    for seed in 0..8 {
        let out = format!("seed-{seed}");
        let mut command = train(&p, &out, &["--max_steps", "6", "--save_steps", "2", "--save_total_limit", "9"]);
        command.env("SOFTGPU_SEED", seed.to_string()).env("SOFTGPU_COPY_US", "300");
        run(&mut command).succeeds();

        for (step, state) in &expected {
            let found = checkpoint(&p, &out, *step).expect("saved");
            assert!(tensors(&found) == *state, "seed {seed}: the checkpoint of step {step} differs");
        }
    }
}

#[test]
fn offloaded_state_is_saved_beside_training_too() {
    let p = Project::new();
    let keys = ["--offload_optimizer", "true"];
    let expected = state_after(&p, 2, &keys);

    let save = ["--max_steps", "4", "--save_steps", "2"];
    run(train(&p, "out", &save).args(keys).env("SOFTGPU_COPY_US", "300")).succeeds();

    assert!(tensors(&checkpoint(&p, "out", 2).expect("saved")) == expected, "the checkpoint differs");
}

/// A job of two ranks, which save while each of their copies takes some time.
struct Job {
    p: Project,
    child: Child,
}

const N_STEPS: u64 = 24;
const SAVE_STEPS: u64 = 6;

impl Job {
    fn start(p: Project, out: &str, copy_us: &str) -> Job {
        let (n_steps, save_steps) = (N_STEPS.to_string(), SAVE_STEPS.to_string());
        let keys = ["--max_steps", &n_steps, "--save_steps", &save_steps, "--dp_replicate_size", "2"];
        let mut command = train(&p, out, &keys);
        std::fs::create_dir_all(p.path("control")).unwrap();
        command.env("SOFTGPU_CONTROL", p.path("control"));
        command.env("SOFTGPU_COPY_US", copy_us).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().expect("the binary is built");
        Job { p, child }
    }

    /// The process of the rank in a slot, once the step is done after which a checkpoint is copied out.
    fn rank_that_copies(&self, slot: usize) -> u32 {
        until("a checkpoint", || {
            let text = std::fs::read_to_string(self.p.path("out/metrics.jsonl")).unwrap_or_default();
            (text.lines().filter(|line| line.contains("\"loss\"")).count() >= SAVE_STEPS as usize).then_some(())
        });
        until("two ranks", || Some(ranks_of(self.child.id())).filter(|ranks| ranks.len() == 2))[slot]
    }

    /// Waits for the end of the job, whose metrics and weights are those of an undisturbed run, and whose checkpoints are whole.
    fn ends_undisturbed(self) {
        let Job { p, child } = self;
        let run = Run::of(child.wait_with_output().unwrap()).succeeds();
        let straight = Job::start(p, "straight", "0");
        let p = straight.p;
        Run::of(straight.child.wait_with_output().unwrap()).succeeds();
        assert_eq!(p.metrics("out"), p.metrics("straight"), "{}", run.stdout);
        assert!(p.model_bytes("out") == p.model_bytes("straight"), "the weights differ");
        for step in (1..=N_STEPS / SAVE_STEPS).map(|i| i * SAVE_STEPS) {
            let (found, expected) = (checkpoint(&p, "out", step), checkpoint(&p, "straight", step));
            let (Some(found), Some(expected)) = (found, expected) else { continue };
            assert!(tensors(&found) == tensors(&expected), "the checkpoint of step {step} differs");
        }
        assert!(checkpoint(&p, "out", N_STEPS).is_some(), "the last step is saved");
    }
}

#[test]
fn rank_that_is_killed_while_its_state_is_copied_out_loses_no_step() {
    let job = Job::start(Project::new(), "out", "5000");
    signal(job.rank_that_copies(1), libc::SIGKILL);
    job.ends_undisturbed();
}

#[test]
fn gpu_that_fails_while_its_state_is_copied_out_loses_no_step() {
    let job = Job::start(Project::new(), "out", "5000");
    let pid = job.rank_that_copies(0);
    let unfinished = job.p.path("unfinished");
    std::fs::write(&unfinished, "SOFTGPU_FAULT=3:700").unwrap();
    std::fs::rename(unfinished, job.p.path("control").join(pid.to_string())).unwrap();
    job.ends_undisturbed();
}
