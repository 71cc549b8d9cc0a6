use super::*;
use std::process::{Command, Output};

/// Set in child processes of the tests below: the needs that [`skips_in_a_child_process`] reports.
const CHILD: &str = "PHALANX_NEEDS_CHILD";

/// Not a test by itself: the body of the child processes.
#[test]
fn skips_in_a_child_process() {
    let Ok(needs) = std::env::var(CHILD) else { return };
    for need in parse(&needs).unwrap() {
        for _ in 0..3 {
            skip(need, "reasons");
        }
    }
}

fn child(needs: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "tests::skips_in_a_child_process", "--test-threads=2"]).env(CHILD, needs);
    command.env_remove(NO_SKIP).env_remove(SKIPPED).envs(variables.iter().copied()).output().unwrap()
}

#[test]
fn skip_is_visible_and_recorded_once_per_test_and_need() {
    let file = std::env::temp_dir().join(format!("phalanx-needs-{}", std::process::id()));

    let output = child("amx,shared", &[(SKIPPED, file.to_str().unwrap())]);

    let recorded = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{output:?}");
    let reports = "skipped: tests::skips_in_a_child_process: reasons\n".repeat(2);
    assert_eq!(String::from_utf8_lossy(&output.stderr), reports);
    let fields: Vec<Vec<&str>> = recorded.lines().map(|line| line.split('\t').skip(1).collect()).collect();
    let row = |need| vec!["tests::skips_in_a_child_process", need, "reasons"];
    assert_eq!(fields, [row("shared"), row("amx")]);
}

#[test]
fn skip_fails_the_test_where_the_machine_must_have_the_need() {
    let with = |list: &str| child("amx", &[(NO_SKIP, list)]);

    for list in ["amx", "shared, amx", "1"] {
        let output = with(list);
        assert!(!output.status.success(), "{list:?} allowed a skip");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(printed.contains("PHALANX_NO_SKIP requires amx"), "{printed}");
    }
    for list in ["", "shared,netns"] {
        assert!(with(list).status.success(), "{list:?} allowed no skip of amx");
    }
}

#[test]
fn misspelt_need_fails_the_test_and_is_named() {
    let output = child("amx", &[(NO_SKIP, "avx-512")]);

    assert!(!output.status.success());
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        printed.contains("\"avx-512\" is not one of shared, python, transformers, torchrun, avx2, avx512"),
        "{printed}"
    );
}
