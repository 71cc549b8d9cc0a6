//! Runs the fuzz targets of `tests/fuzz/` without the fuzzer, over their seeds and over randomly damaged seeds, so that the
//! targets keep working between fuzzing sessions.

use phalanx_tests::decoders::TARGETS;

/// Damaged seeds per target; longer searches are `cargo fuzz`'s.
const CASES: u64 = 20_000;

#[test]
fn every_target_has_a_unique_name_and_a_file_that_calls_it() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();

    for target in TARGETS {
        let text = std::fs::read_to_string(folder.join(format!("fuzz_targets/{}.rs", target.name))).unwrap();
        assert!(text.contains(&format!("run(\"{}\", bytes)", target.name)), "{}: {text}", target.name);
        assert!(manifest.contains(&format!("fuzz_targets/{}.rs", target.name)), "{}", target.name);
    }
    assert_eq!(std::fs::read_dir(folder.join("fuzz_targets")).unwrap().count(), TARGETS.len());
}

#[test]
fn every_target_accepts_its_seeds() {
    for target in TARGETS {
        let seeds = (target.seeds)();

        assert!(seeds.len() > 2, "{} has {} seeds", target.name, seeds.len());
        seeds.iter().for_each(|seed| (target.run)(seed));
    }
}

#[test]
fn every_target_keeps_its_guarantees_over_damaged_seeds() {
    for target in TARGETS {
        let seeds = (target.seeds)();
        let mut n_decoded = 0;

        // The targets assert; every decoder result is fine.
        let decode = |case: (u64, u64), bytes: &[u8]| {
            n_decoded += 1;
            let outcome = std::panic::catch_unwind(|| (target.run)(bytes));
            outcome.unwrap_or_else(|_| panic!("{} fails in {case:?} (PHALANX_FUZZ_SEED, number)", target.name));
            true
        };
        phalanx_actors::fuzzing::cases(CASES, &seeds, decode);

        assert_eq!(n_decoded, CASES, "{}", target.name);
    }
}

#[test]
fn workspace_build_exposes_no_private_decoders() {
    let cargo = std::process::Command::new(env!("CARGO"))
        .args([
            "tree",
            "--offline",
            "--workspace",
            "--edges",
            "normal,build",
            "--prefix",
            "none",
            "--format",
            "{p}|{f}",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(cargo.status.success(), "{}", String::from_utf8_lossy(&cargo.stderr));
    let tree = String::from_utf8(cargo.stdout).unwrap();

    let ours: Vec<&str> = tree.lines().filter(|line| line.starts_with("phalanx")).collect();

    assert!(ours.iter().any(|line| line.starts_with("phalanx v")), "{tree}");
    assert!(!ours.iter().any(|line| line.contains("fuzzing")), "{ours:?}");
}
