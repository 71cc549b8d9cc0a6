//! The driver and NCCL as C libraries, to check what the CUDA machine takes for granted.
#![allow(unsafe_code)] // C functions of NVIDIA's libraries.

use anyhow::{Context, Result, ensure};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use phalanx_cuda::CudaDevice;
use std::ffi::c_void;
use std::path::PathBuf;

/// A pointer of C.
pub type P = *mut c_void;

/// Calls a C function that returns a code: `call!(driver, cuMemFree_v2(at => u64))`.
macro_rules! call {
    ($driver:expr, $name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        type Function = unsafe extern "C" fn($($ty),*) -> u32;
        let function = $driver.symbol::<Function>(stringify!($name))?;
        // SAFETY: the types are those of the headers, and all pointers are valid for the call.
        unsafe { (*function)($($value),*) }
    }};
}
pub(crate) use call;

/// The libraries, with a current context of the first GPU.
#[derive(Debug)]
pub struct Driver {
    libraries: Vec<Library>,
}

impl Driver {
    /// Loads the libraries that this device uses.
    ///
    /// # Errors
    /// When they cannot be loaded, or the GPU has no context.
    pub fn open(gpu: &CudaDevice) -> Result<Driver> {
        let files: Vec<PathBuf> = gpu.libraries()?.into_iter().map(|(_, file)| file).collect();
        let is = |file: &&PathBuf, name: &str| file.file_name().is_some_and(|f| f.to_string_lossy().starts_with(name));
        let mut libraries = Vec::new();
        for file in ["libcuda.so", "libnccl.so"].iter().filter_map(|name| files.iter().find(|file| is(file, name))) {
            // SAFETY: NVIDIA's libraries, which this process uses anyway.
            let library = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_GLOBAL) };
            libraries.push(library.with_context(|| format!("loading {}", file.display()))?);
        }
        let driver = Driver { libraries };
        let mut context: P = std::ptr::null_mut();
        let codes = [
            call!(driver, cuInit(0 => u32)),
            call!(driver, cuDevicePrimaryCtxRetain(&raw mut context => *mut P, 0 => i32)),
            call!(driver, cuCtxSetCurrent(context => P)),
        ];
        ensure!(codes == [0; 3], "opening a context: codes {codes:?}");
        Ok(driver)
    }

    /// A C function.
    ///
    /// # Errors
    /// When no library has it.
    pub fn symbol<T>(&self, name: &str) -> Result<libloading::os::unix::Symbol<T>> {
        // SAFETY: `call` gives the types of the headers.
        let found = self.libraries.iter().find_map(|library| unsafe { library.get(name.as_bytes()) }.ok());
        found.with_context(|| format!("no library has {name}"))
    }

    /// A new stream that does not wait for the legacy stream.
    ///
    /// # Errors
    /// When the driver makes none.
    pub fn stream(&self) -> Result<P> {
        let mut stream: P = std::ptr::null_mut();
        let code = call!(self, cuStreamCreate(&raw mut stream => *mut P, 1 => u32));
        ensure!(code == 0, "cuStreamCreate gives {code}");
        Ok(stream)
    }

    /// A new event, without timing or with it.
    ///
    /// # Errors
    /// When the driver makes none.
    pub fn event(&self, has_timing: bool) -> Result<P> {
        let mut event: P = std::ptr::null_mut();
        let flags = if has_timing { 0 } else { 2 };
        let code = call!(self, cuEventCreate(&raw mut event => *mut P, flags => u32));
        ensure!(code == 0, "cuEventCreate gives {code}");
        Ok(event)
    }

    /// Memory for `n` words.
    ///
    /// # Errors
    /// When there is too little.
    pub fn words(&self, n: usize) -> Result<u64> {
        let mut at = 0u64;
        let code = call!(self, cuMemAlloc_v2(&raw mut at => *mut u64, 4 * n => usize));
        ensure!(code == 0, "cuMemAlloc gives {code}");
        Ok(at)
    }

    /// Enqueues setting `n` words.
    ///
    /// # Errors
    /// When the function is missing.
    pub fn set(&self, at: u64, word: u32, n: usize, stream: P) -> Result<u32> {
        Ok(call!(self, cuMemsetD32Async(at => u64, word => u32, n => usize, stream => P)))
    }

    /// Enqueues a copy of `n` words.
    ///
    /// # Errors
    /// When the function is missing.
    pub fn copy(&self, to: u64, from: u64, n: usize, stream: P) -> Result<u32> {
        Ok(call!(self, cuMemcpyDtoDAsync_v2(to => u64, from => u64, 4 * n => usize, stream => P)))
    }

    /// `then` waits for what `first` has now.
    ///
    /// # Errors
    /// When the driver refuses it.
    pub fn after(&self, first: P, then: P) -> Result<()> {
        let event = self.event(false)?;
        let codes = [
            call!(self, cuEventRecord(event => P, first => P)),
            call!(self, cuStreamWaitEvent(then => P, event => P, 0 => u32)),
        ];
        ensure!(codes == [0; 2], "ordering two streams: codes {codes:?}");
        Ok(())
    }

    /// Waits for a stream.
    ///
    /// # Errors
    /// When the function is missing.
    pub fn wait(&self, stream: P) -> Result<u32> {
        Ok(call!(self, cuStreamSynchronize(stream => P)))
    }

    /// Writes bytes once everything that was enqueued is done.
    ///
    /// # Errors
    /// When the driver refuses it.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let codes = [
            call!(self, cuCtxSynchronize()),
            call!(self, cuMemcpyHtoD_v2(at => u64, bytes.as_ptr() => *const u8, bytes.len() => usize)),
            call!(self, cuCtxSynchronize()),
        ];
        ensure!(codes == [0; 3], "writing {} bytes: codes {codes:?}", bytes.len());
        Ok(())
    }

    /// Reads words once everything that was enqueued is done.
    ///
    /// # Errors
    /// When the driver refuses it.
    pub fn read(&self, at: u64, n: usize) -> Result<Vec<u32>> {
        let mut words = vec![0u32; n];
        let codes = [
            call!(self, cuCtxSynchronize()),
            call!(self, cuMemcpyDtoH_v2(words.as_mut_ptr().cast() => P, at => u64, 4 * n => usize)),
        ];
        ensure!(codes == [0; 2], "reading {n} words: codes {codes:?}");
        Ok(words)
    }
}
