//! Kernels of the CUDA machine, compiled to PTX as the machine compiles them to machine code.

use phalanx_cuda::work::KernelLaunch;
use phalanx_cuda::{PRELUDE, Source};
use phalanx_needs::{Need, skip};
use phalanx_ptxsim::nvrtc::{Nvrtc, VARIABLE};
use phalanx_ptxsim::{Kernel, Module, Options};
use std::collections::BTreeMap;
use std::path::Path;

/// A source with macros.
type Unit = (&'static str, Vec<String>);

/// The compiler; skips the calling test where there is none.
#[track_caller]
pub fn nvrtc() -> Option<Nvrtc> {
    let Some(folder) = std::env::var_os(VARIABLE) else {
        skip(Need::Nvrtc, format_args!("{VARIABLE} does not name the folder of libnvrtc"));
        return None;
    };
    Some(Nvrtc::load(Path::new(&folder)).expect("PHALANX_NVRTC names the folder of libnvrtc"))
}

/// The compiler, and what it compiled so far.
pub struct Compiler {
    nvrtc: Nvrtc,
    /// Virtual architecture.
    architecture: &'static str,
    options: Options,
    modules: BTreeMap<Unit, Module>,
    kernels: BTreeMap<(Unit, &'static str), Kernel>,
}

impl Compiler {
    /// The compiler for an architecture such as `compute_80`; kernels run with `options`. Skips the calling test where there
    /// is no NVRTC.
    #[track_caller]
    pub fn new(architecture: &'static str, options: Options) -> Option<Compiler> {
        Some(Compiler { nvrtc: nvrtc()?, architecture, options, modules: BTreeMap::new(), kernels: BTreeMap::new() })
    }

    /// The kernel of a launch.
    pub fn kernel(&mut self, launch: &KernelLaunch) -> &Kernel {
        let Compiler { nvrtc, architecture, options, modules, kernels } = self;
        let unit = (launch.source.name, launch.macros.clone());
        kernels.entry((unit.clone(), launch.kernel)).or_insert_with(|| {
            let module =
                modules.entry(unit).or_insert_with(|| compile(nvrtc, architecture, launch.source, &launch.macros));
            let kernel = module.kernel(launch.kernel);
            kernel.unwrap_or_else(|e| panic!("{} {:?}: {e}", launch.source.name, launch.macros)).with(*options)
        })
    }

    /// Number of compilations so far.
    pub fn n_compiled(&self) -> usize {
        self.modules.len()
    }
}

fn compile(nvrtc: &Nvrtc, architecture: &str, source: Source, macros: &[String]) -> Module {
    let text = format!("#line 1 \"prelude.cuh\"\n{PRELUDE}\n#line 1 \"{}\"\n{}", source.name, source.text);
    let target = format!("--gpu-architecture={architecture}");
    let macros: Vec<String> = macros.iter().map(|m| format!("-D{m}")).collect();
    // Those of the CUDA machine, and lines for findings.
    let mut options = vec![target.as_str(), "--std=c++17", "--fmad=false", "-lineinfo"];
    options.extend(macros.iter().map(String::as_str));
    let compiled = nvrtc.compile(source.name, &text, &options);
    let compiled = compiled.unwrap_or_else(|e| panic!("{} {macros:?}: {e}", source.name));
    Module::parse(&compiled.ptx).unwrap_or_else(|e| panic!("{} {macros:?}: {e}", source.name))
}
