//! NVIDIA's libraries: where they are, and the functions that this crate calls.
//!
//! Every library is loaded once, by absolute path, and never unloaded. Every function is looked up when its library is
//! loaded, so a missing function is an error with a name, not a crash at its first use.

mod binding;
mod blas;
mod cudnn;
mod driver;
pub(crate) mod nccl;
pub(crate) mod nvml;
mod nvrtc;
mod search;

pub(crate) use blas::Blas;
pub(crate) use cudnn::{Dnn, Handle, RawDescriptor, Status};
pub(crate) use driver::Driver;
pub(crate) use nccl::Nccl;
pub(crate) use nvml::Nvml;
pub(crate) use nvrtc::Nvrtc;
pub use search::{CudaVersion, Search};

use std::path::PathBuf;

/// A library that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// No such file in any of the folders.
    #[error("{library} ({names}) was not found in {}; install it, or name its folder in PHALANX_CUDA_LIBS", folders(.searched))]
    Missing {
        /// What it is.
        library: &'static str,
        /// File names that were tried.
        names: String,
        /// Folders that were searched.
        searched: Vec<PathBuf>,
    },
    /// The library is newer than the driver.
    #[error(
        "{library} is there for CUDA {major} only ({}), and the NVIDIA driver supports CUDA {driver}: install the library for CUDA {}, or update the driver",
        path.display(),
        driver.major()
    )]
    TooNew {
        /// What it is.
        library: &'static str,
        /// The file.
        path: PathBuf,
        /// Its major version of CUDA.
        major: i32,
        /// The newest version that the driver supports.
        driver: CudaVersion,
    },
    /// This program is a static executable, without a loader of shared libraries.
    #[error(
        "this phalanx is a static program, which cannot load NVIDIA's libraries; use one that is linked with glibc"
    )]
    Static,
    /// The system's loader refuses the file.
    #[error("cannot load {}: {reason}", path.display())]
    Unloadable {
        /// The file.
        path: PathBuf,
        /// The loader's reason.
        reason: String,
    },
    /// The library cannot be initialised.
    #[error("cannot initialise {}: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The library's reason.
        reason: String,
    },
    /// The library lacks a function.
    #[error("{} has no function {symbol}: it is too old", path.display())]
    Symbol {
        /// The file.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
}

fn folders(all: &[PathBuf]) -> String {
    let names: Vec<String> = all.iter().map(|folder| folder.display().to_string()).collect();
    if names.is_empty() { "any folder".to_owned() } else { names.join(", ") }
}

/// The oldest major version of CUDA whose libraries are used.
const MAJOR_MIN: i32 = 12;

/// The libraries that every GPU rank needs.
#[derive(Debug)]
pub(crate) struct Libraries {
    pub(crate) driver: &'static Driver,
    pub(crate) nvrtc: &'static Nvrtc,
    pub(crate) blas: &'static Blas,
}

impl Driver {
    /// Loads the driver.
    ///
    /// # Errors
    /// See [`LibraryError`].
    pub(crate) fn find(search: &Search) -> Result<&'static Driver, LibraryError> {
        Driver::load(search.driver()?)
    }
}

impl Nccl {
    /// Its file.
    ///
    /// # Errors
    /// [`LibraryError::Missing`].
    pub(crate) fn locate(search: &Search) -> Result<PathBuf, LibraryError> {
        search.nccl()
    }

    /// Loads NCCL, which is large and not needed by a rank alone.
    ///
    /// # Errors
    /// See [`LibraryError`].
    pub(crate) fn find(search: &Search) -> Result<&'static Nccl, LibraryError> {
        Nccl::load(search.nccl()?)
    }
}

impl Nvml {
    /// Loads and initialises NVML, which comes with the driver.
    ///
    /// # Errors
    /// See [`LibraryError`].
    pub(crate) fn find(search: &Search) -> Result<&'static Nvml, LibraryError> {
        let nvml = Nvml::load(search.nvml()?)?;
        // SAFETY: no preconditions; the library stays initialised until the process ends.
        match unsafe { (nvml.nvmlInit_v2)() } {
            0 => Ok(nvml),
            code => Err(LibraryError::Unusable { path: nvml.path.clone(), reason: nvml.text(code) }),
        }
    }
}

impl Dnn {
    /// Loads cuDNN, which is large and optional.
    ///
    /// # Errors
    /// See [`LibraryError`].
    pub(crate) fn find(search: &Search) -> Result<&'static Dnn, LibraryError> {
        let path = search.cudnn()?;
        // cuDNN loads its parts by name; they are found if they are already loaded.
        for part in search.cudnn_parts() {
            binding::preload(&part)?;
        }
        Dnn::load(path)
    }
}

impl Libraries {
    /// What they are, and their files.
    pub(crate) fn files(&self) -> Vec<(&'static str, PathBuf)> {
        let (driver, nvrtc, blas) = (self.driver, self.nvrtc, self.blas);
        vec![("driver", driver.path.clone()), ("NVRTC", nvrtc.path.clone()), ("cuBLASLt", blas.path.clone())]
    }

    /// Loads the libraries beside this driver.
    ///
    /// # Errors
    /// See [`LibraryError`].
    pub(crate) fn load(search: &Search, driver: &'static Driver) -> Result<Libraries, LibraryError> {
        // Drivers that are too old for all of them are refused later, by name.
        let version =
            Some(driver.version()).filter(|version| version.major() >= MAJOR_MIN).unwrap_or(CudaVersion::NEWEST);
        let (nvrtc, blas) = (search.nvrtc(version)?, search.cublas_lt(version)?);
        // NVRTC loads its built-in functions by name; they are found if they are already loaded.
        for path in Search::nvrtc_builtins(&nvrtc) {
            binding::preload(&path)?;
        }
        let (nvrtc, blas) = (Nvrtc::load(nvrtc)?, Blas::load(blas)?);
        Ok(Libraries { driver, nvrtc, blas })
    }
}
