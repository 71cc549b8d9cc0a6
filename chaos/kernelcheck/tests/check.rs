//! With the real NVRTC.

use phalanx_kernelcheck::{ARCHITECTURES, CheckError, Options, Source, check, table};
use phalanx_needs::{Need, skip};
use phalanx_ptxsim::nvrtc::{Nvrtc, VARIABLE};
use std::path::Path;

#[track_caller]
fn nvrtc() -> Option<Nvrtc> {
    let Some(folder) = std::env::var_os(VARIABLE) else {
        skip(Need::Nvrtc, format_args!("{VARIABLE} does not name the folder of libnvrtc"));
        return None;
    };
    Some(Nvrtc::load(Path::new(&folder)).expect("PHALANX_NVRTC names the folder of libnvrtc"))
}

fn source(name: &str, text: &str) -> Source {
    Source { name: name.into(), text: text.into() }
}

/// A thread may have 32 registers, but needs 64 numbers at once.
const SPILLER: &str = r#"extern "C" __global__ void __launch_bounds__(1024, 2) spiller(float* x) {
    float a[64];
    for (int i = 0; i < 64; i++) a[i] = x[i * 1024 + threadIdx.x];
    for (int k = 0; k < 3; k++) for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i + 7) % 64] + a[(i + 13) % 64];
    for (int i = 0; i < 64; i++) x[i * 1024 + threadIdx.x] = a[i];
}"#;
const FINE: &str = r#"extern "C" __global__ void fine(float* x) { x[threadIdx.x] *= SCALE; }"#;

#[test]
fn kernel_that_spills_fails_with_one_line_per_architecture() {
    let Some(nvrtc) = nvrtc() else { return };
    let report = check(&nvrtc, &source("spill.cu", SPILLER), &Options::default()).unwrap();

    let lines: Vec<String> = report.failures().iter().map(ToString::to_string).collect();
    assert_eq!(lines.len(), ARCHITECTURES.len());
    assert!(lines[0].starts_with("spill.cu: kernel `spiller` for sm_80 spills: "), "{}", lines[0]);
    assert_eq!(report.kernels[0].registers, Some(32));
}

#[test]
fn kernel_within_its_registers_passes_for_every_set_of_macros() {
    let Some(nvrtc) = nvrtc() else { return };
    let define_sets = vec![vec!["SCALE=2.0f".to_owned()], vec!["SCALE=3.0f".to_owned()]];
    let options = Options { define_sets, ..Options::default() };

    let report = check(&nvrtc, &source("fine.cu", FINE), &options).unwrap();

    assert!(report.failures().is_empty());
    assert_eq!(report.kernels.len(), 2 * ARCHITECTURES.len());
    assert!(table(&report).lines().nth(1).unwrap().starts_with("fine.cu  SCALE=2.0f  sm_80 "), "{}", table(&report));
}

#[test]
fn source_that_does_not_compile_is_an_error_with_the_message_of_the_compiler() {
    let Some(nvrtc) = nvrtc() else { return };

    let error = check(&nvrtc, &source("fine.cu", FINE), &Options::default()).unwrap_err();

    assert!(matches!(&error, CheckError::Compile { architecture, .. } if architecture == "sm_80"));
    assert!(error.to_string().contains("SCALE"), "{error}");
}

#[test]
fn tensor_instructions_survive_on_every_architecture() {
    let Some(nvrtc) = nvrtc() else { return };
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ptxsim/tests/kernels");
    let text = |file: &str| std::fs::read_to_string(kernels.join(file)).unwrap();
    let nvdisasm = std::env::var_os("PHALANX_NVDISASM").map(Into::into);
    let options = Options { nvdisasm, ..Options::default() };

    let report = check(&nvrtc, &source("train.cu", &(text("prelude.cuh") + &text("train.cu"))), &options).unwrap();

    assert!(report.failures().is_empty());
    let product = report.kernels.iter().filter(|k| k.kernel == "product_nt");
    assert!(product.clone().count() == ARCHITECTURES.len() && product.clone().all(|k| k.tensor_wanted >= 8));
    assert!(product.clone().all(|k| k.tensor_found.is_none_or(|n| n >= 8)));
}

#[test]
fn kernel_that_lost_its_tensor_instructions_fails() {
    let Some(nvrtc) = nvrtc() else { return };
    let mut report = check(&nvrtc, &source("spill.cu", SPILLER), &Options::default()).unwrap();
    report.kernels.truncate(1);
    let kernel = &mut report.kernels[0];
    (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.tensor_wanted, kernel.tensor_found) = (0, 0, 4, Some(0));

    let lines: Vec<String> = report.failures().iter().map(ToString::to_string).collect();

    assert_eq!(
        lines,
        ["spill.cu: kernel `spiller` for sm_80 has no tensor instruction in its machine code, but 4 in its PTX"]
    );
}
