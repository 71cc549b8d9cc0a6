//! The configurations in `examples/` train, here for fewer steps and into a temporary folder.

use anyhow::{Context, Result, ensure};
use phalanx::config::JobConfig;
use phalanx::{Control, Event, Job};
use std::path::Path;

/// Losses of two steps of an example with overrides.
fn losses(example: &str, keys: &[(&str, &str)]) -> Result<Vec<f64>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace is above this crate")?;
    let dir = tempfile::tempdir()?;
    let mut overrides: Vec<(String, String)> = vec![
        ("max_steps".into(), "2".into()),
        ("warmup_steps".into(), "1".into()),
        ("output_dir".into(), dir.path().display().to_string()),
        ("datasets.0.path".into(), root.join("strategies/src/**/*.rs").display().to_string()),
    ];
    overrides.extend(keys.iter().map(|(k, v)| ((*k).to_string(), (*v).to_string())));
    let config = JobConfig::load(&root.join("examples").join(example), &overrides)?;
    let mut losses = Vec::new();
    Job::from_config(config).run_with(&Control::default(), |event| {
        if let Event::Step(m) = event {
            losses.push(m.loss);
        }
    })?;
    Ok(losses)
}

#[test]
fn example_of_four_ranks_has_the_losses_of_one_rank() -> Result<()> {
    let four = losses("four-ranks.yaml", &[])?;

    let alone = [
        ("nproc_per_node", "1"),
        ("dp_shard_size", "1"),
        ("tensor_parallel_size", "1"),
        ("gradient_accumulation_steps", "2"),
    ];
    let one = losses("four-ranks.yaml", &alone)?;
    let worst = four.iter().zip(&one).fold(0f64, |w, (a, b)| w.max((a - b).abs()));
    println!("{four:?} {one:?}: {worst:.1e}");
    ensure!(four.len() == 2 && one.len() == 2 && worst < 2e-5, "{four:?} {one:?}");
    Ok(())
}

#[test]
fn example_of_one_rank_trains() -> Result<()> {
    let losses = losses("own-source.yaml", &[("eval_steps", "2")])?;

    ensure!(losses.len() == 2 && losses[1] < losses[0], "{losses:?}");
    Ok(())
}

/// The files of the Docker example name what is in this repository; the images themselves are not built here.
#[test]
fn dockerfile_builds_the_binary_with_the_compiler_of_the_workspace() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace is above this crate")?;
    let file = std::fs::read_to_string(root.join("examples/docker/Dockerfile"))?;
    let manifest = std::fs::read_to_string(root.join("Cargo.toml"))?;
    let version = manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).context("no rust-version")?;
    let stages: Vec<&str> =
        file.lines().filter(|line| line.starts_with("FROM ")).filter_map(|line| line.split(" AS ").nth(1)).collect();

    ensure!(
        file.contains(&format!("FROM rust:{}-", version.trim_matches('"'))),
        "the image's compiler is not {version}"
    );
    ensure!(stages == ["build", "runtime", "cpu", "cuda"], "{stages:?}");
    let install =
        file.lines().find_map(|line| line.strip_prefix("RUN cargo install ")).context("nothing is installed")?;
    let path = install.split_whitespace().skip_while(|word| *word != "--path").nth(1).context("no path")?;
    ensure!(root.join(path).join("src/main.rs").is_file() && install.contains("--locked"), "{install}");
    // What is copied must not depend on earlier builds, and users are not root.
    let ignored = std::fs::read_to_string(root.join("examples/docker/Dockerfile.dockerignore"))?;
    ensure!(ignored.lines().any(|line| line == "target"), "{ignored}");
    let last_user = file.lines().rfind(|line| line.starts_with("USER "));
    ensure!(last_user == Some("USER phalanx"), "{last_user:?}");
    // Libraries are where the binary looks for them: as packages of a Python in PATH.
    for package in ["nvidia-cuda-nvrtc", "nvidia-cublas", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"] {
        ensure!(file.contains(package), "{package}");
    }
    Ok(())
}

/// The workflow runs on a public forge only.
#[test]
fn release_has_one_version_the_compiler_of_the_workspace_and_the_scripts_that_it_runs() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace is above this crate")?;
    let manifest = std::fs::read_to_string(root.join("Cargo.toml"))?;
    let workflow = std::fs::read_to_string(root.join(".github/workflows/release.yml"))?;
    let of_workspace = |key: &str| manifest.lines().find_map(|line| line.strip_prefix(key)).context("no such key");
    let (version, compiler) = (of_workspace("version = ")?, of_workspace("rust-version = ")?);

    let published: Vec<&str> =
        manifest.lines().filter(|line| line.starts_with("phalanx") && line.contains("version = ")).collect();
    let scripts: Vec<&str> =
        workflow.split_whitespace().filter(|word| word.starts_with("runtime/packaging/")).collect();

    ensure!(published.len() == 8, "{published:#?}");
    for line in published {
        ensure!(line.ends_with(&format!("version = {version} }}")), "{line} is not of version {version}");
    }
    ensure!(workflow.contains(&format!("RUST: {compiler}\n")), "the workflow's compiler is not {compiler}");
    ensure!(scripts.len() == 3, "{scripts:?}");
    for script in scripts {
        ensure!(root.join(script).is_file(), "{script} is not there");
    }
    Ok(())
}

/// The build itself takes minutes, so it is no test.
#[test]
fn static_build_without_the_compiler_of_musl_names_the_package_that_has_it() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace is above this crate")?;
    let tools = tempfile::tempdir()?;
    for tool in ["dirname", "uname"] {
        let found =
            ["/usr/bin", "/bin"].map(|folder| Path::new(folder).join(tool)).into_iter().find(|path| path.exists());
        std::os::unix::fs::symlink(found.context(tool)?, tools.path().join(tool))?;
    }
    let script = root.join("examples/static/build");
    let output = std::process::Command::new("/bin/bash").arg(script).env("PATH", tools.path()).output()?;

    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(2), "{said}");
    ensure!(said == "musl-gcc was not found; install it with: apt-get install musl-tools\n", "{said}");
    Ok(())
}
