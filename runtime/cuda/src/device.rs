//! A GPU as a device.

use crate::error::OpenError;
use crate::gpu::{self, Gpu, GpuInfo};
use crate::kernels::Kernels;
use crate::library::{Nccl, Search};
use crate::lower::{ALIGN_BYTES, scratch_bytes};
use crate::machine::{self, CudaMachine};
use crate::nccl::{Choice, connect};
use crate::product::Products;
use crate::shared::Shared;
use phalanx_device::shared_memory::Arena;
use phalanx_device::{Activity, AllocError, Backing, Collective, CollectiveError, Device, Machine, ThreadError};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Instr, Program};
use phalanx_strategies::target::Target;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// The first GPU that this process may use. It is opened when a device thread starts, so that a process which only plans or
/// supervises holds no context.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    search: Search,
    /// Folder of compiled kernels.
    cache: Option<PathBuf>,
    gpus: Vec<GpuInfo>,
    /// Their names for `CUDA_VISIBLE_DEVICES`.
    visible: Vec<String>,
    /// Which communicators its ranks use.
    collectives: Choice,
    shared: Arc<OnceLock<Result<Arc<Shared>, OpenError>>>,
}

impl CudaDevice {
    /// Finds the libraries and a GPU. Compiled kernels are kept in the folder `cache`, which only this user may write. `visible` is
    /// the value of `CUDA_VISIBLE_DEVICES`, if it is set.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn find(search: Search, cache: Option<PathBuf>, visible: Option<&str>) -> Result<CudaDevice, OpenError> {
        let (_, gpus) = gpu::find(&search)?;
        let all = (0..gpus.len()).map(|i| i.to_string()).collect();
        let visible = visible.map_or(all, |names| names.split(',').map(|name| name.trim().to_owned()).collect());
        Ok(CudaDevice { search, cache, gpus, visible, collectives: Choice::default(), shared: Arc::default() })
    }

    /// The same GPU with another choice of communicators.
    #[must_use]
    pub fn with_collectives(self, collectives: Choice) -> CudaDevice {
        CudaDevice { collectives, ..self }
    }

    /// GPUs that this process may use.
    pub fn gpus(&self) -> &[GpuInfo] {
        &self.gpus
    }

    /// The libraries that were found: what they are, and their files.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn libraries(&self) -> Result<Vec<(&'static str, PathBuf)>, OpenError> {
        let (libraries, _) = gpu::find(&self.search)?;
        Ok(libraries.files())
    }

    /// Opens the GPU, unless it is open.
    ///
    /// # Errors
    /// See [`OpenError`]; the same error every time.
    pub fn open(&self) -> Result<(), OpenError> {
        self.shared().map(drop)
    }

    fn shared(&self) -> Result<&Arc<Shared>, OpenError> {
        let open = || {
            let gpu = Arc::new(Gpu::open(&self.search, 0)?);
            let products = Products::open(&gpu).map_err(OpenError::Context)?;
            let kernels = Kernels::new(self.cache.clone());
            Ok(Arc::new(Shared { gpu, kernels, products, nccl: OnceLock::new() }))
        };
        self.shared.get_or_init(open).as_ref().map_err(OpenError::clone)
    }
}

impl CudaDevice {
    /// What its machines share, if a device thread has opened the GPU.
    fn opened(&self) -> Option<&Arc<Shared>> {
        self.shared.get().and_then(|shared| shared.as_ref().ok())
    }
}

impl Target for CudaDevice {
    fn scratch_bytes(&self, program: &Program, instr: &Instr) -> usize {
        scratch_bytes(program, instr)
    }

    fn align(&self) -> usize {
        ALIGN_BYTES
    }

    fn half_copies(&self) -> bool {
        true
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn target(&self) -> &dyn Target {
        self
    }

    fn machine(&self, programs: &[&Compiled], _: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError> {
        let unopened = |e| AllocError { bytes: self.bytes_for(programs), source: std::io::Error::other(e) };
        Ok(Box::new(CudaMachine::new(self.shared().map_err(unopened)?, programs, BTreeMap::new())?))
    }

    /// Opens the GPU and loads the kernels, without buffers: a spare may share the GPU with the rank that it will replace.
    fn warm(&self, programs: &[&Compiled], _: &Arena) -> Result<Box<dyn Machine>, AllocError> {
        let unopened = |e| AllocError { bytes: 0, source: std::io::Error::other(e) };
        Ok(Box::new(CudaMachine::without_buffers(self.shared().map_err(unopened)?, programs)))
    }

    fn shadow(&self, programs: &[&Compiled], _: &Arena, _: usize) -> Box<dyn Machine> {
        unreachable!("shadows of {} programs live in host memory", programs.len())
    }

    fn bytes_for(&self, programs: &[&Compiled]) -> usize {
        machine::bytes_for(programs)
    }

    fn shared_bytes(&self, _: &[&Compiled]) -> usize {
        0
    }

    fn shadow_bytes(&self, _: &[&Compiled]) -> usize {
        0
    }

    fn lasting_regions(&self, programs: &[&Compiled]) -> [(usize, bool); 3] {
        machine::lasting_regions(programs)
    }

    fn communicator(&self, host: Box<dyn Collective>) -> Result<Box<dyn Collective>, CollectiveError> {
        let shared = self.shared().map_err(|e| CollectiveError::Device { reason: e.to_string() })?;
        let nccl = || shared.nccl.get_or_init(|| Nccl::find(&self.search)).clone();
        connect(&shared.gpu, nccl, host, self.collectives)
    }

    fn activity(&self) -> Option<Activity> {
        self.opened().map(|shared| shared.gpu.activity())
    }

    fn has_failed(&self) -> bool {
        self.opened().is_some_and(|shared| shared.gpu.has_failed())
    }

    fn peak_flops(&self, bf16: bool) -> f64 {
        self.gpus[0].peak_flops(bf16)
    }

    fn has_fast_bf16(&self) -> bool {
        true
    }

    fn engine(&self, bf16: bool) -> &'static str {
        if bf16 { "tensor cores" } else { "CUDA cores" }
    }

    fn available_threads(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    /// The GPU of the rank, and settings of NCCL. Ranks share GPUs if there are more ranks than GPUs.
    fn environment(&self, slot: u32) -> Vec<(&'static str, String)> {
        let n_gpus = self.gpus.len().min(self.visible.len());
        // Ranks start operations of several communicators in one order, which NCCL has to keep on the GPU.
        let launch_order = ("NCCL_LAUNCH_ORDER_IMPLICIT", "1".to_owned());
        vec![("CUDA_VISIBLE_DEVICES", self.visible[slot as usize % n_gpus].clone()), launch_order]
    }

    fn lead(&self, _: usize, work: Box<dyn FnOnce() + Send + '_>) -> Result<(), ThreadError> {
        self.open().map_err(|e| ThreadError::Device { reason: e.to_string() })?;
        std::thread::scope(|scope| {
            let spawned = std::thread::Builder::new().name("device".into()).spawn_scoped(scope, work);
            let thread = spawned.map_err(ThreadError::Spawn)?;
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
            Ok(())
        })
    }
}
