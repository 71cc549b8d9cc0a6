//! A job with a user-defined model survives the death of a rank process.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs the example in a folder and returns its output; `on_line` sees each line at once and may kill rank processes.
fn run(dir: &Path, mut on_line: impl FnMut(&str)) -> Vec<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dfdx_elastic"));
    command.arg(dir).arg("300").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let lines = lines.inspect(|line| on_line(line)).collect();
    assert!(child.wait().unwrap().success(), "{lines:?}");
    lines
}

#[test]
fn dfdx_model_ends_with_the_same_weights_when_a_rank_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let [undisturbed, faulted] = ["undisturbed", "faulted"].map(|name| dir.path().join(name));
    run(&undisturbed, |_| {});
    let (mut pids, mut n_kills) = (Vec::new(), 0);

    let lines = run(&faulted, |line| {
        if let Some(all) = line.strip_prefix("ranks are the processes ") {
            pids = all.split(' ').map(str::to_owned).collect();
        }
        // Kills each of the two first processes once.
        if n_kills < 2 && (line.starts_with("step  50") || line.starts_with("step 150")) {
            assert!(Command::new("kill").args(["-9", &pids[n_kills]]).status().unwrap().success());
            n_kills += 1;
        }
    });

    assert_eq!(n_kills, 2);
    assert_eq!(lines.iter().filter(|line| line.contains(" died ")).count(), 2, "{lines:?}");
    let steps = |lines: &[String]| lines.iter().filter(|line| line.starts_with("step")).cloned().collect::<Vec<_>>();
    assert_eq!(steps(&lines).len(), 7, "no step is lost: {lines:?}");
    let weights = |dir: &Path| std::fs::read(dir.join("model/model.safetensors")).unwrap();
    assert!(weights(&undisturbed) == weights(&faulted), "the weights differ");
}
