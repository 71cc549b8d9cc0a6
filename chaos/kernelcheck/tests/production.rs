//! The kernels of the CUDA machine with the real NVRTC.

use phalanx_cuda::{PRELUDE, SOURCES};
use phalanx_kernelcheck::{ARCHITECTURES, Options, Source, check};
use phalanx_needs::{Need, skip};
use phalanx_ptxsim::nvrtc::{Nvrtc, VARIABLE};
use std::path::{Path, PathBuf};

#[test]
fn no_kernel_of_the_cuda_machine_spills_on_any_architecture() {
    let Some(folder) = std::env::var_os(VARIABLE) else {
        return skip(Need::Nvrtc, format_args!("{VARIABLE} does not name the folder of libnvrtc"));
    };
    let nvrtc = Nvrtc::load(Path::new(&folder)).expect("PHALANX_NVRTC names the folder of libnvrtc");
    let mut failures = Vec::new();
    for source in SOURCES {
        let text = format!("{PRELUDE}\n#line 1 \"{}\"\n{}", source.name, source.text);
        let sets = source.checked.iter().map(|set| set.split_whitespace().map(str::to_owned).collect());
        let options = Options {
            define_sets: sets.collect(),
            // Those of the CUDA machine.
            compiler_options: ["--std=c++17", "--fmad=false"].map(str::to_owned).to_vec(),
            nvdisasm: std::env::var_os("PHALANX_NVDISASM").map(PathBuf::from),
            ..Options::default()
        };

        let report = check(&nvrtc, &Source { name: source.name.into(), text }, &options).unwrap();

        assert!(
            report.kernels.len() >= source.checked.len() * ARCHITECTURES.len(),
            "{}: kernels are missing",
            source.name
        );
        failures.extend(report.failures().iter().map(ToString::to_string));
    }

    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
