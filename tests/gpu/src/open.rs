//! The GPU to check: a real one, or the software GPU.

use anyhow::{Context, Result};
use phalanx_cuda::{CudaDevice, Search};
use phalanx_softgpu::Installation;

/// The GPU of this machine, with the libraries that `PHALANX_CUDA_LIBS` names or that are found.
///
/// # Errors
/// When there is none.
pub fn gpu() -> Result<CudaDevice> {
    let variable = |name| std::env::var_os(name);
    let search = Search::new(variable("PHALANX_CUDA_LIBS").as_deref(), None, variable("PATH").as_deref());
    CudaDevice::find(search, None, None).context("opening the GPU")
}

/// Changes a setting of the software GPU of this process, such as `SOFTGPU_SEED`.
///
/// # Errors
/// When the software GPU is not built, or refuses the setting.
pub fn set(name: &str, value: &str) -> Result<()> {
    let installation = Installation::new().context("installing the software GPU")?;
    Ok(installation.set(name, value)?)
}

/// A counter of the software GPU of this process, such as `kernels`.
///
/// # Errors
/// When the software GPU is not built.
#[allow(unsafe_code)] // A C function of the software GPU.
pub fn stat(name: &str) -> Result<u64> {
    let installation = Installation::new().context("installing the software GPU")?;
    let name = std::ffi::CString::new(name).context("a name without zero bytes")?;
    // SAFETY: the library is the one that is already loaded; the function has this signature.
    Ok(unsafe {
        let library = libloading::Library::new(installation.library("libcuda.so.1"))?;
        let stat = library.get::<unsafe extern "C" fn(*const std::ffi::c_char) -> u64>(b"softgpu_stat")?;
        stat(name.as_ptr())
    })
}

/// The software GPU. All tests of a process share it.
///
/// # Errors
/// When it is not built, or there is no C++ compiler.
pub fn software_gpu() -> Result<CudaDevice> {
    let installation = Installation::new().context("installing the software GPU")?;
    let search = Search::only(vec![installation.dir().to_owned()]);
    CudaDevice::find(search, None, None).context("opening the software GPU")
}
