//! The software GPU, for tests.

use phalanx_cuda::{CudaDevice, Search};
use phalanx_softgpu::Installation;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The software GPU of this process, which one test uses at a time: settings are those of the process.
pub(crate) struct SoftwareGpu {
    libraries: Installation,
    #[allow(dead_code)] // Ends with this.
    one: MutexGuard<'static, ()>,
}

impl SoftwareGpu {
    pub(crate) fn take() -> SoftwareGpu {
        static ONE: Mutex<()> = Mutex::new(());
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let gpu = SoftwareGpu { libraries: Installation::new().expect("it is built with the tests"), one };
        // Tests make thousands of small copies, and each would change the protection of all pages twice.
        gpu.set("SOFTGPU_GUARD", "fast");
        gpu.set("SOFTGPU_HOLD_US", "200");
        gpu
    }

    /// The GPU, with streams of its own.
    pub(crate) fn open(&self) -> CudaDevice {
        let search = Search::only(vec![self.libraries.dir().to_owned()]);
        CudaDevice::find(search, None, None).expect("it has all libraries")
    }

    /// Changes a setting until the test ends.
    pub(crate) fn set(&self, name: &str, value: &str) {
        self.libraries.set(name, value).expect("a setting of the software GPU");
    }
}

impl Drop for SoftwareGpu {
    fn drop(&mut self) {
        self.set("SOFTGPU_COPY_US", "0");
        self.set("SOFTGPU_SEED", "0");
    }
}
