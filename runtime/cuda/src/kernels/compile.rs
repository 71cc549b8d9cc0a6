//! Compilation by NVRTC, and the folder of compiled kernels.

use super::{Instance, PRELUDE, Source};
use crate::error::CudaError;
use crate::gpu::Gpu;
use cudarc::driver::sys::{CUfunction, CUmodule};
use cudarc::nvrtc::sys::nvrtcProgram;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED_BYTES: u32 = 8;
/// A kernel that cannot be compiled or loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CompileError {
    /// NVRTC refuses the source.
    #[error("NVRTC cannot compile {source_name} with {macros:?} for {architecture}:\n{log}")]
    Refused { source_name: &'static str, macros: Vec<String>, architecture: String, log: String },
    /// The driver refuses the compiled module.
    #[error(transparent)]
    Driver(#[from] CudaError),
}

/// A kernel that can be launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loaded(pub(crate) CUfunction);

// SAFETY: a handle of the driver, usable from any thread to which the context is bound.
unsafe impl Send for Loaded {}

/// The kernels of one GPU that have been loaded. Modules stay loaded until the process ends.
#[derive(Debug)]
pub(crate) struct Kernels {
    /// Folder of compiled kernels.
    cache: Option<PathBuf>,
    modules: Mutex<BTreeMap<(&'static str, Vec<String>), Module>>,
    /// Most dynamic shared memory that a function may use: launches of one function may differ, and the limit is the
    /// function's.
    shared_bytes: Mutex<BTreeMap<usize, u32>>,
}

#[derive(Clone, Copy, Debug)]
struct Module(CUmodule);

// SAFETY: as `Loaded`.
unsafe impl Send for Module {}

impl Kernels {
    /// No kernels yet. Compiled kernels are kept in `cache`, if it is given; its owner must be able to trust its contents.
    pub(crate) fn new(cache: Option<PathBuf>) -> Kernels {
        Kernels { cache, modules: Mutex::default(), shared_bytes: Mutex::default() }
    }

    /// Loads a kernel, and compiles it if no process has done so before.
    ///
    /// # Errors
    /// See [`CompileError`].
    pub(crate) fn load(&self, gpu: &Gpu, instance: &Instance, shared_bytes: u32) -> Result<Loaded, CompileError> {
        let module = self.module(gpu, instance)?;
        let driver = gpu.libraries.driver;
        let name = CString::new(instance.kernel).expect("names of kernels have no zero bytes");
        let mut function: CUfunction = std::ptr::null_mut();
        // SAFETY: the module is loaded; pointers to locals.
        unsafe {
            let code = (driver.cuModuleGetFunction)(&raw mut function, module.0, name.as_ptr());
            gpu.check("cuModuleGetFunction", code)?;
            let mut limits = self.shared_bytes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let limit = limits.entry(function.addr()).or_default();
            if shared_bytes > *limit {
                *limit = shared_bytes;
                let code = (driver.cuFuncSetAttribute)(function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes as c_int);
                gpu.check("cuFuncSetAttribute", code)?;
            }
        }
        Ok(Loaded(function))
    }

    fn module(&self, gpu: &Gpu, instance: &Instance) -> Result<Module, CompileError> {
        let mut modules = self.modules.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let key = (instance.source.name, instance.macros.clone());
        if let Some(module) = modules.get(&key) {
            return Ok(*module);
        }
        let cubin = self.cubin(gpu, &instance.source, &instance.macros)?;
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is complete, and the driver copies it.
        let code = unsafe { (gpu.libraries.driver.cuModuleLoadData)(&raw mut module, cubin.as_ptr().cast()) };
        gpu.check("cuModuleLoadData", code)?;
        modules.insert(key, Module(module));
        Ok(Module(module))
    }

    fn cubin(&self, gpu: &Gpu, source: &Source, macros: &[String]) -> Result<Vec<u8>, CompileError> {
        let architecture = architecture(gpu.capability);
        let path = self.cache.as_ref().map(|dir| dir.join(file_name(gpu, source, macros, &architecture)));
        if let Some(cubin) = path.as_ref().and_then(|path| std::fs::read(path).ok()).filter(|cubin| !cubin.is_empty()) {
            return Ok(cubin);
        }
        let cubin = compile(gpu, source, macros, &architecture)?;
        if let Some(path) = path
            && let Err(error) = keep(&path, &cubin)
        {
            tracing::warn!(%error, path = %path.display(), "cannot keep a compiled kernel");
        }
        Ok(cubin)
    }
}

/// Architecture-specific features exist only under the name with an `a`.
fn architecture((major, minor): (i32, i32)) -> String {
    format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
}

fn file_name(gpu: &Gpu, source: &Source, macros: &[String], architecture: &str) -> String {
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: pointers to locals.
    unsafe { (gpu.libraries.nvrtc.nvrtcVersion)(&raw mut major, &raw mut minor) };
    let mut hasher = DefaultHasher::new();
    (PRELUDE, source.text, macros, architecture, major, minor).hash(&mut hasher);
    format!("{}-{architecture}-{:016x}.cubin", source.name, hasher.finish())
}

/// Writes the file whole or not at all: other ranks of the machine read and write the same folder.
pub(crate) fn keep(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let dir = path.parent().expect("a file in the cache folder");
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let own = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&own, bytes)?;
    std::fs::rename(&own, path)
}

fn compile(gpu: &Gpu, source: &Source, macros: &[String], architecture: &str) -> Result<Vec<u8>, CompileError> {
    let nvrtc = gpu.libraries.nvrtc;
    let text = CString::new(format!("{PRELUDE}\n#line 1 \"{}\"\n{}", source.name, source.text)).expect("text");
    let name = CString::new(source.name).expect("a file name");
    // `--fmad=false`: results have the bits of the same formula on the CPU; hot loops use tensor cores or `fmaf`.
    let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".into(), "--fmad=false".into()];
    let options = options.into_iter().chain(macros.iter().map(|m| format!("-D{m}")));
    let options: Vec<CString> = options.map(|o| CString::new(o).expect("an option")).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let refused = |log: String| CompileError::Refused {
        source_name: source.name,
        macros: macros.to_vec(),
        architecture: architecture.to_owned(),
        log,
    };
    let mut program: nvrtcProgram = std::ptr::null_mut();
    // SAFETY: strings live to the end of the function; buffers have the sizes that NVRTC reports.
    unsafe {
        let none = std::ptr::null();
        let code = (nvrtc.nvrtcCreateProgram)(&raw mut program, text.as_ptr(), name.as_ptr(), 0, none, none);
        if code != 0 {
            return Err(refused(format!("nvrtcCreateProgram returns {code}")));
        }
        let code = (nvrtc.nvrtcCompileProgram)(program, pointers.len() as c_int, pointers.as_ptr());
        let result = if code == 0 { Ok(image(nvrtc, program)) } else { Err(refused(log(nvrtc, program))) };
        (nvrtc.nvrtcDestroyProgram)(&raw mut program);
        result
    }
}

/// # Safety
/// The program is compiled.
unsafe fn image(nvrtc: &crate::library::Nvrtc, program: nvrtcProgram) -> Vec<u8> {
    let mut n = 0;
    // SAFETY: the buffer has the size that NVRTC reports.
    unsafe {
        (nvrtc.nvrtcGetCUBINSize)(program, &raw mut n);
        let mut image = vec![0u8; n];
        (nvrtc.nvrtcGetCUBIN)(program, image.as_mut_ptr().cast());
        image
    }
}

/// # Safety
/// The program exists.
unsafe fn log(nvrtc: &crate::library::Nvrtc, program: nvrtcProgram) -> String {
    let mut n = 0;
    // SAFETY: as above.
    unsafe {
        (nvrtc.nvrtcGetProgramLogSize)(program, &raw mut n);
        let mut log = vec![0u8; n];
        (nvrtc.nvrtcGetProgramLog)(program, log.as_mut_ptr().cast());
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }
}
