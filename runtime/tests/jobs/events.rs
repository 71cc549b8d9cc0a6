//! A run as programs follow it: `phalanx train --events`, and the Python module.

use crate::support::Project;
use phalanx_needs::{Need, skip};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

#[test]
fn run_with_events_prints_each_of_them_by_name_and_last_how_it_ended() {
    let p = Project::new();
    let keys = ["--events", "--max_steps", "3", "--val_set_size", "0.1", "--eval_steps", "3", "--sample_prompt", "The"];

    let run = p.train(&keys).succeeds();

    let lines: Vec<Value> = run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let count = |name| lines.iter().filter(|line| line["event"] == name).count();
    assert_eq!(["started", "step", "eval", "saved", "ended"].map(count), [1, 3, 1, 1, 1], "{}", run.stdout);
    let end = lines.last().unwrap();
    assert_eq!((&end["event"], &end["finished"], &end["steps"]), (&"ended".into(), &true.into(), &3.into()));
    assert!(Path::new(end["model_dir"].as_str().unwrap()).join("config.json").is_file(), "{end}");
}

#[test]
fn python_module_runs_jobs_and_reads_their_measurements() {
    let python = std::env::var("PHALANX_PYTHON").unwrap_or_else(|_| "python3".into());
    let is_new = Command::new(&python).args(["-c", "import sys; sys.exit(sys.version_info < (3, 10))"]).output();
    if !is_new.is_ok_and(|output| output.status.success()) {
        return skip(Need::Python, format_args!("{python} is no Python from 3.10 on"));
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let environment = tempfile::tempdir().unwrap();
    let packages = installed(&sources, environment.path());

    let mut tests = Command::new(&python);
    tests.args(["-m", "unittest", "discover", "--start-directory"]).arg(sources.join("tests"));
    tests.env("PYTHONPATH", packages).env("PYTHONDONTWRITEBYTECODE", "1").current_dir(environment.path());
    // A run that is stopped in a batch job has another exit code.
    ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"].iter().for_each(|name| _ = tests.env_remove(name));
    let output = tests.output().unwrap();

    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("Ran 10 tests"), "{said}");
}

/// The files of the wheel where `pip` puts them below an environment's folder; the folder of its packages.
fn installed(sources: &Path, environment: &Path) -> std::path::PathBuf {
    let packages = environment.join("lib/python3/site-packages");
    let (module, facts) = (packages.join("phalanx"), packages.join("phalanx.dist-info"));
    [&module, &facts, &environment.join("bin")].into_iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
    for file in fs::read_dir(sources.join("phalanx")).unwrap().map(|entry| entry.unwrap().path()) {
        // Not what Python has compiled.
        if file.is_file() {
            fs::copy(&file, module.join(file.file_name().unwrap())).unwrap();
        }
    }
    let version = env!("CARGO_PKG_VERSION");
    fs::write(facts.join("METADATA"), format!("Metadata-Version: 2.1\nName: phalanx\nVersion: {version}\n")).unwrap();
    symlink(env!("CARGO_BIN_EXE_phalanx"), environment.join("bin/phalanx")).unwrap();
    packages
}
