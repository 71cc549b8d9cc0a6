//! No kernel spills registers, and none loses its tensor instructions: with the macros that [`SOURCES`] list and those of steps of
//! usual models, on every architecture.
//!
//! What NVRTC makes of a text with macros never changes, but compiling all of them takes minutes. So `accepted.txt` lists the digests
//! of those that have passed, and the test compiles only what is not listed. Without NVRTC, a kernel that is not listed fails the test:
//! whoever changes a kernel runs `tests/cuda/spills`, which compiles the rest and writes the list.

use crate::{compiler, programs};
use phalanx_cuda::{PRELUDE, SOURCES, Source};
use phalanx_kernelcheck as kernelcheck;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Has the list written.
const WRITE: &str = "PHALANX_WRITE_ACCEPTED";
/// Those of the CUDA machine.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// A source with macros.
struct Unit {
    source: Source,
    macros: BTreeSet<String>,
}

impl Unit {
    fn text(&self) -> String {
        format!("{PRELUDE}\n#line 1 \"{}\"\n{}", self.source.name, self.source.text)
    }

    /// Its line of the list: the digest of all that the compiler is given, and what it is.
    fn line(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let options = OPTIONS.into_iter().chain(kernelcheck::ARCHITECTURES);
        for part in options.chain(self.macros.iter().map(String::as_str)).chain([self.text().as_str()]) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        let digest = &hasher.finalize().to_hex()[..16];
        let macros: Vec<&str> = self.macros.iter().map(String::as_str).collect();
        format!("{digest} {} {}", self.source.name, macros.join(" ")).trim_end().to_owned()
    }

    /// What is wrong with its kernels.
    fn failures(&self, nvrtc: &phalanx_ptxsim::nvrtc::Nvrtc) -> Vec<String> {
        let options = kernelcheck::Options {
            define_sets: vec![self.macros.iter().cloned().collect()],
            compiler_options: OPTIONS.map(str::to_owned).to_vec(),
            nvdisasm: std::env::var_os("PHALANX_NVDISASM").map(PathBuf::from),
            ..kernelcheck::Options::default()
        };
        let source = kernelcheck::Source { name: self.source.name.into(), text: self.text() };
        let report = kernelcheck::check(nvrtc, &source, &options).unwrap_or_else(|e| panic!("{e}"));
        assert!(report.kernels.len() >= kernelcheck::ARCHITECTURES.len(), "{}: kernels are missing", source.name);
        report.failures().iter().map(ToString::to_string).collect()
    }
}

/// Every source with the macros that checks list and those of usual steps.
fn units() -> Vec<Unit> {
    let mut sets: BTreeMap<&str, (Source, BTreeSet<BTreeSet<String>>)> = BTreeMap::new();
    let words = |set: &&str| set.split_whitespace().map(str::to_owned).collect();
    for source in SOURCES {
        sets.insert(source.name, (*source, source.checked.iter().map(words).collect()));
    }
    for launch in programs::launches_of_steps() {
        let (_, sets) = sets.get_mut(launch.source.name).expect("a source of a launch is listed");
        sets.insert(launch.macros.into_iter().collect());
    }
    let unit = |source: Source| move |macros| Unit { source, macros };
    sets.into_values().flat_map(|(source, sets)| sets.into_iter().map(unit(source))).collect()
}

#[test]
fn no_kernel_spills_and_what_has_not_been_compiled_before_is_compiled() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ptx/accepted.txt");
    let accepted = std::fs::read_to_string(&path).unwrap_or_default();
    let accepted: BTreeSet<&str> = accepted.lines().collect();
    let units = units();
    let left: Vec<&Unit> = units.iter().filter(|unit| !accepted.contains(unit.line().as_str())).collect();

    if !left.is_empty() {
        let names: BTreeSet<&str> = left.iter().map(|unit| unit.source.name).collect();
        assert!(
            std::env::var_os(phalanx_ptxsim::nvrtc::VARIABLE).is_some(),
            "{names:?} have changed since they were compiled: run tests/cuda/spills, and commit the list that it writes"
        );
    }
    let failures = failures_of(&left);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    if std::env::var_os(WRITE).is_some() {
        let lines: BTreeSet<String> = units.iter().map(Unit::line).collect();
        let mut lines: Vec<String> = lines.into_iter().collect();
        lines.sort_by(|a, b| a[17..].cmp(&b[17..]));
        std::fs::write(&path, lines.join("\n") + "\n").expect("the list can be written");
    }
}

/// Of all units, on every core.
fn failures_of(units: &[&Unit]) -> Vec<String> {
    let Some(nvrtc) = (!units.is_empty()).then(compiler::nvrtc).flatten() else { return Vec::new() };
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = unit.failures(&nvrtc);
                    failures.lock().unwrap_or_else(PoisonError::into_inner).extend(found);
                }
            });
        }
    });
    failures.into_inner().unwrap_or_else(PoisonError::into_inner)
}
