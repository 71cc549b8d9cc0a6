//! `kernelcheck`: compiles kernels for all architectures and exits with 1 if one spills or lost its tensor instructions.

use anyhow::{Context, Result};
use clap::Parser;
use phalanx_kernelcheck::{ARCHITECTURES, Options, Report, Source, check, table};
use phalanx_ptxsim::nvrtc::{Nvrtc, VARIABLE};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Compiles CUDA kernels with the real NVRTC and fails on register spills
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// `.cu` files, or folders of them
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// File that precedes every source; by default `prelude.cuh` beside the source, if there is one
    #[arg(long)]
    prelude: Option<PathBuf>,
    /// Set of macros, separated by commas; once for each compilation, for example `--define HEAD_DIM=64 --define HEAD_DIM=128`
    #[arg(long = "define")]
    define_sets: Vec<String>,
    /// Architecture; may be repeated
    #[arg(long = "arch", default_values = ARCHITECTURES)]
    architectures: Vec<String>,
    /// Further option of NVRTC; may be repeated
    #[arg(long = "option", allow_hyphen_values = true)]
    compiler_options: Vec<String>,
    /// Folder of libnvrtc; by default the value of PHALANX_NVRTC
    #[arg(long)]
    nvrtc: Option<PathBuf>,
    /// The program nvdisasm, which finds lost tensor instructions; by default the value of PHALANX_NVDISASM
    #[arg(long)]
    nvdisasm: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let from_environment = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let folder = arguments.nvrtc.or_else(|| from_environment(VARIABLE));
    let folder = folder.with_context(|| format!("neither --nvrtc nor {VARIABLE} names the folder of libnvrtc"))?;
    let nvrtc = Nvrtc::load(&folder).context("cannot load the compiler")?;
    let sets = arguments.define_sets.iter().map(|set| set.split(',').map(str::to_owned).collect());
    let mut define_sets: Vec<Vec<String>> = sets.collect();
    if define_sets.is_empty() {
        define_sets.push(Vec::new());
    }
    let options = Options {
        architectures: arguments.architectures,
        define_sets,
        compiler_options: arguments.compiler_options,
        nvdisasm: arguments.nvdisasm.or_else(|| from_environment("PHALANX_NVDISASM")),
    };
    let mut report = Report::default();
    for path in sources(&arguments.paths)? {
        let source = read(&path, arguments.prelude.as_deref())?;
        report.kernels.extend(check(&nvrtc, &source, &options)?.kernels);
    }
    let text = if arguments.json { serde_json::to_string_pretty(&report)? + "\n" } else { table(&report) };
    std::io::stdout().write_all(text.as_bytes())?;
    let failures = report.failures();
    for failure in &failures {
        std::io::stderr().write_all(format!("{failure}\n").as_bytes())?;
    }
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The files, and the `.cu` files of the folders, sorted.
fn sources(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let list = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut found: Vec<PathBuf> = list.flatten().map(|entry| entry.path()).collect();
        found.retain(|file| file.extension().is_some_and(|e| e == "cu"));
        found.sort();
        files.extend(found);
    }
    anyhow::ensure!(!files.is_empty(), "no `.cu` files in the given folders");
    Ok(files)
}

fn read(path: &Path, prelude: Option<&Path>) -> Result<Source> {
    let load = |path: &Path| std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    let beside = path.with_file_name("prelude.cuh");
    let prelude = prelude.or_else(|| Some(beside.as_path()).filter(|p| p.exists()));
    let mut text = prelude.map(load).transpose()?.unwrap_or_default();
    if prelude.is_some() {
        // The compiler then names lines of the file itself.
        text += "\n#line 1\n";
    }
    text += &load(path)?;
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Ok(Source { name, text })
}
