//! A GPU as a device.

use crate::alike::{arithmetic_of, check_alike};
use crate::cudnn::Cudnn;
use crate::error::OpenError;
use crate::gpu::{self, Gpu, GpuInfo};
use crate::kernels::Kernels;
use crate::library::{LibraryError, Nccl, Search};
use crate::lower::{ALIGN_BYTES, scratch_bytes};
use crate::machine::{self, CudaMachine};
use crate::nccl::{Choice, connect};
use crate::product::Products;
use crate::shared::Shared;
use phalanx_device::shared_memory::Arena;
use phalanx_device::{AllocError, Backing, Collective, CollectiveError, Device, Machine, ThreadError};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Instr, Program};
use phalanx_strategies::target::Target;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// What attention runs through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionChoice {
    /// cuDNN, where it is present and has a plan; otherwise the kernels of this crate.
    #[default]
    Auto,
    /// The same, but a GPU without cuDNN cannot be opened.
    Cudnn,
    /// The kernels of this crate.
    Own,
}

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
    /// Whether machines run commands as CUDA graphs.
    graphs: bool,
    /// Which attention it uses.
    attention: AttentionChoice,
    has_cudnn: bool,
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
        let (collectives, attention) = (Choice::default(), AttentionChoice::default());
        let has_cudnn = search.cudnn().is_ok();
        let (graphs, shared) = (true, Arc::default());
        Ok(CudaDevice { search, cache, gpus, visible, collectives, graphs, attention, has_cudnn, shared })
    }

    /// The same GPU with another choice of communicators.
    #[must_use]
    pub fn with_collectives(self, collectives: Choice) -> CudaDevice {
        CudaDevice { collectives, ..self }
    }

    /// The same GPU, with or without CUDA graphs: without them, each command is a call of its own, which debuggers show.
    #[must_use]
    pub fn with_graphs(self, graphs: bool) -> CudaDevice {
        CudaDevice { graphs, ..self }
    }

    /// The same GPU with another choice of attention; a GPU that is open is opened again.
    ///
    /// # Errors
    /// [`OpenError::Cudnn`] if cuDNN is required and missing. Whether it works is seen when the GPU is opened.
    pub fn with_attention(self, attention: AttentionChoice) -> Result<CudaDevice, OpenError> {
        if attention == AttentionChoice::Cudnn {
            self.cudnn().map_err(|missing| OpenError::Cudnn(missing.into()))?;
        }
        Ok(CudaDevice { attention, shared: Arc::default(), ..self })
    }

    /// The file of cuDNN, through which attention runs if the GPU and the version have a plan for it.
    ///
    /// # Errors
    /// When it is missing: attention runs through the kernels of this crate.
    pub fn cudnn(&self) -> Result<PathBuf, LibraryError> {
        self.search.cudnn()
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
            let cudnn = self.open_cudnn(&gpu)?;
            Ok(Arc::new(Shared { gpu, kernels, products, cudnn, nccl: OnceLock::new() }))
        };
        self.shared.get_or_init(open).as_ref().map_err(OpenError::clone)
    }

    fn open_cudnn(&self, gpu: &Gpu) -> Result<Option<Cudnn>, OpenError> {
        if self.attention == AttentionChoice::Own {
            return Ok(None);
        }
        match Cudnn::open(gpu, &self.search) {
            Ok(cudnn) => Ok(Some(cudnn)),
            Err(reason) if self.attention == AttentionChoice::Cudnn => Err(OpenError::Cudnn(reason)),
            Err(reason) => {
                tracing::info!(%reason, "attention without cuDNN");
                Ok(None)
            }
        }
    }
}

impl Target for CudaDevice {
    fn scratch_bytes(&self, program: &Program, instr: &Instr) -> usize {
        scratch_bytes(program, instr, self.has_cudnn && self.attention != AttentionChoice::Own)
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
        Ok(Box::new(CudaMachine::new(self.shared().map_err(unopened)?, programs, BTreeMap::new(), self.graphs)?))
    }

    fn warm(&self, programs: &[&Compiled], _: &Arena) -> Result<Box<dyn Machine>, AllocError> {
        self.machine(programs, &Backing::default())
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

    fn communicator(&self, mut host: Box<dyn Collective>) -> Result<Box<dyn Collective>, CollectiveError> {
        let shared = self.shared().map_err(|e| CollectiveError::Device { reason: e.to_string() })?;
        check_alike(&arithmetic_of(&shared.gpu, shared.cudnn.as_ref()), &mut *host)?;
        let nccl = || shared.nccl.get_or_init(|| Nccl::find(&self.search)).clone();
        connect(&shared.gpu, nccl, host, self.collectives)
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
