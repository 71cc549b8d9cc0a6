//! `phalanx-gpu` on the software GPU.

use phalanx_softgpu::Installation;
use std::process::Command;

#[test]
fn all_stages_pass_on_the_software_gpu_and_leave_their_tables() {
    let (gpu, out) = (Installation::new().unwrap(), tempfile::tempdir().unwrap());
    let mut all = Command::new(env!("CARGO_BIN_EXE_phalanx-gpu"));
    all.args(["all", "--sample", "--minutes", "20", "--out"]).arg(out.path()).env("PHALANX_CUDA_LIBS", gpu.dir());

    let ended = all.output().unwrap();

    let text = format!("{}\n{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{text}");
    assert!(text.contains("PyTorch: not measured: it cannot use the software GPU"), "{text}");
    let summary = std::fs::read_to_string(out.path().join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    for stage in
        ["libraries", "nccl", "compile", "driver", "operations", "steps", "faults", "ceilings", "rates", "peers"]
    {
        let report = &summary[stage]["report"];
        assert!(report["rows"].as_array().is_some_and(|rows| !rows.is_empty()), "{stage}: {text}");
        assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{stage}: {text}");
    }
}
