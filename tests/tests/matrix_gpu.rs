//! Rank processes on GPUs train as one rank on the CPU: every pair of axes, on the software GPU, with NCCL. `tests/MATRIX.md` has the
//! command for all combinations.

use anyhow::{Context, Result, ensure};
use phalanx_softgpu::Installation;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than the test takes on a busy machine. Ranks whose collectives wait for each other would wait forever.
const PATIENCE: Duration = Duration::from_secs(900);

/// Each cell runs from scratch, and from the checkpoint of another mesh. Each rank has a GPU of its own, so NCCL carries the tensors.
#[test]
fn gpu_ranks_train_as_one_cpu_rank_under_every_pair_of_axes() -> Result<()> {
    let gpu = Installation::new().map_err(anyhow::Error::msg)?;
    let dir = tempfile::tempdir()?;
    let (out, err) = (dir.path().join("out"), dir.path().join("err"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_matrix"));
    command.args(["4", "--device", "cuda", "--select", "axes", "--jobs", "1", "--json"]);
    // The tests of `tests/gpu` find accesses of the host, also where the processor makes that slow.
    command.env("PHALANX_CUDA_LIBS", gpu.dir()).env("SOFTGPU_DEVICES", "4").env("SOFTGPU_GUARD", "fast");
    command.stdin(Stdio::null()).stdout(std::fs::File::create(&out)?).stderr(std::fs::File::create(&err)?);

    let (begin, mut child) = (Instant::now(), command.spawn()?);
    let ended = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if begin.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(50));
    };

    let (out, err) = (std::fs::read_to_string(&out)?, std::fs::read_to_string(&err)?);
    let status = ended.with_context(|| format!("the ranks did not end in time: {out}{err}"))?;
    println!("{out}");
    ensure!(status.success(), "{out}{err}");
    let n_passed = out.lines().filter(|line| line.contains("\"passed\":true")).count();
    ensure!(n_passed == 10 && out.lines().count() == 10, "{out}{err}");
    Ok(())
}
