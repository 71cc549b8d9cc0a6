//! What tests need of their machine, and how they skip without it.
//!
//! A test that cannot run calls [`skip`] and returns. The test harness counts it as passed, so `skip` reports it in three
//! ways:
//!
//! - It writes `skipped: TEST: REASON` to the standard error of the process, which the harness does not capture.
//! - It appends a line to the file that `PHALANX_SKIPPED` names; `.ci/run` counts the skipped tests there.
//! - It panics where `PHALANX_NO_SKIP` lists the missing capability: `PHALANX_NO_SKIP=shared,avx512` fails the tests that
//!   skip for one of these two, `PHALANX_NO_SKIP=1` fails every test that skips. It is a list because no machine has
//!   everything, and a machine with AMX must not silently stop running its AMX tests.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Environment variable with the capabilities that this machine has: names separated by commas, or `1` for all.
pub const NO_SKIP: &str = "PHALANX_NO_SKIP";
/// Environment variable with the file to which skipped tests are appended.
pub const SKIPPED: &str = "PHALANX_SKIPPED";

/// A capability that a test may need and a machine may not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// The folder `shared` beside the checkout, with real models and texts.
    Shared,
    /// A Python from 3.10 on.
    Python,
    /// A Python with PyTorch and transformers.
    Transformers,
    /// `torchrun`, the launcher of PyTorch.
    Torchrun,
    /// AVX2 with fused multiply-adds and conversions of half precision.
    Avx2,
    /// AVX-512 with the subsets F, BW, VL and DQ.
    Avx512,
    /// AVX-512 with products of bf16 pairs.
    Avx512Bf16,
    /// AMX tiles of bf16, and a kernel that lets a process use them.
    Amx,
    /// The right to create network namespaces, bridges and virtual links.
    NetworkNamespaces,
    /// A kernel that places memory by NUMA node and shows where it is.
    Numa,
    /// The right to create a control group with a quota of processor time.
    CpuQuota,
    /// NVIDIA's runtime compiler, in the folder that `PHALANX_NVRTC` names.
    Nvrtc,
    /// cuDNN, in the folder that `PHALANX_CUDNN` names.
    Cudnn,
}

impl Need {
    const ALL: [Need; 13] = [
        Need::Shared,
        Need::Python,
        Need::Transformers,
        Need::Torchrun,
        Need::Avx2,
        Need::Avx512,
        Need::Avx512Bf16,
        Need::Amx,
        Need::NetworkNamespaces,
        Need::Numa,
        Need::CpuQuota,
        Need::Nvrtc,
        Need::Cudnn,
    ];

    /// Its name in [`NO_SKIP`].
    pub const fn name(self) -> &'static str {
        match self {
            Need::Shared => "shared",
            Need::Python => "python",
            Need::Transformers => "transformers",
            Need::Torchrun => "torchrun",
            Need::Avx2 => "avx2",
            Need::Avx512 => "avx512",
            Need::Avx512Bf16 => "avx512_bf16",
            Need::Amx => "amx",
            Need::NetworkNamespaces => "netns",
            Need::Numa => "numa",
            Need::CpuQuota => "cpu_quota",
            Need::Nvrtc => "nvrtc",
            Need::Cudnn => "cudnn",
        }
    }
}

/// Reports that the calling test, or a part of it, does not run here; the caller returns or skips that part.
///
/// Repeated calls of a test for the same need report once.
///
/// # Panics
/// When [`NO_SKIP`] lists the need or an unknown word, or when the report cannot be written.
#[track_caller]
pub fn skip(need: Need, reason: impl Display) {
    let required = std::env::var(NO_SKIP).unwrap_or_default();
    let required = parse(&required).unwrap_or_else(|word| panic!("{NO_SKIP}: {word:?} is not one of {}", names()));
    assert!(!required.contains(&need), "{NO_SKIP} requires {}, but this test would be skipped: {reason}", need.name());
    let test = test_name();
    if !is_first(&test, need) {
        return;
    }
    // Not `eprintln!`: the test harness captures its output and drops it when the test passes.
    let report = format!("skipped: {test}: {reason}\n");
    std::io::stderr().write_all(report.as_bytes()).expect("standard error can be written");
    if let Some(path) = std::env::var_os(SKIPPED) {
        let binary = std::env::current_exe().ok().and_then(|path| Some(path.file_stem()?.display().to_string()));
        let line = format!("{}\t{test}\t{}\t{reason}\n", binary.unwrap_or_default(), need.name());
        // Several processes append at once; in append mode a line written by one `write` stays whole.
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("{SKIPPED}: cannot append to {}: {error}", path.display()));
    }
}

/// A file or folder of `shared` beside the checkout; skips the calling test where it is absent.
///
/// # Panics
/// As [`skip`].
#[track_caller]
pub fn shared(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(name);
    if path.exists() {
        return Some(path);
    }
    skip(Need::Shared, format_args!("{name} is not in the folder `shared` beside the checkout"));
    None
}

/// A file or folder of the committed reference models.
///
/// # Panics
/// When it is absent.
pub fn reference(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../reference").join(name);
    assert!(path.exists(), "{} is missing in the checkout", path.display());
    path
}

/// The needs of a list, or the first unknown word as the error.
fn parse(list: &str) -> Result<BTreeSet<Need>, String> {
    if list.trim() == "1" {
        return Ok(Need::ALL.into());
    }
    let words = list.split(',').map(str::trim).filter(|word| !word.is_empty());
    words.map(|word| Need::ALL.into_iter().find(|need| need.name() == word).ok_or_else(|| word.to_owned())).collect()
}

fn names() -> String {
    Need::ALL.map(Need::name).join(", ")
}

/// The harness names the thread of a test after the test. A single test thread is the main thread, so the name is then the place
/// of the call.
#[track_caller]
fn test_name() -> String {
    match std::thread::current().name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => Location::caller().to_string(),
    }
}

fn is_first(test: &str, need: Need) -> bool {
    static REPORTED: Mutex<BTreeSet<(String, Need)>> = Mutex::new(BTreeSet::new());
    REPORTED.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert((test.to_owned(), need))
}

#[cfg(test)]
mod tests;
