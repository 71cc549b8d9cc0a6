//! A GPU as a device.

use crate::alike::{arithmetic_of, check_alike};
use crate::command::Launch;
use crate::cudnn::Cudnn;
use crate::error::{DnnError, OpenError};
use crate::gpu::{self, Gpu};
use crate::gpu_info::GpuInfo;
use crate::health::{self, Monitor};
use crate::kernels::{CompileError, Kernels};
use crate::library::{Dnn, LibraryError, Nccl, Search};
use crate::lower::{ALIGN_BYTES, scratch_bytes};
use crate::machine::{self, CudaMachine};
use crate::nccl::{Choice, connect};
use crate::product::Products;
use crate::ring::GpuMemory;
use crate::shared::Shared;
use phalanx_device::shared_memory::Arena;
use phalanx_device::{
    Activity, AllocError, Backing, Collective, CollectiveError, Device, HealthWatch, Machine, ThreadError,
};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::devices::DeviceHealth;
use phalanx_strategies::plan::CONTEXT_BYTES;
use phalanx_strategies::program::{Instr, Program};
use phalanx_strategies::target::Target;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// Tokens whose logits exist at once. With the 128,256 ids of Llama 3 they take 0.5 GB in half width. Each chunk also reads and writes the
/// gradient of the head once, 2 GB at a width of 2,048, which takes a GPU as long as a sixth of the chunk's products; fewer
/// tokens would save less memory than that costs in time.
const HEAD_CHUNK_TOKENS: usize = 2048;

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
    /// The names in `CUDA_VISIBLE_DEVICES` of this process, or numbers: they name parts of GPUs (MIG).
    visible: Vec<String>,
    /// Which communicators its ranks use.
    collectives: Choice,
    /// Whether machines run commands as CUDA graphs.
    graphs: bool,
    /// Whether weights are split.
    split_weights: bool,
    /// Whether kernels are launched early.
    early_launches: bool,
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
        let has_cudnn = search.cudnn().is_ok();
        Ok(CudaDevice { search, cache, gpus, visible, has_cudnn, ..CudaDevice::planned() })
    }

    /// A GPU for plans on machines without one: programs are compiled for it and their memory is known, but it cannot be
    /// opened.
    pub fn planned() -> CudaDevice {
        let (search, shared) = (Search::new(None, None, None), Arc::new(OnceLock::new()));
        let (gpus, visible, collectives) = (Vec::new(), Vec::new(), Choice::default());
        let (graphs, split_weights, early_launches) = (true, true, false);
        let (attention, has_cudnn) = (AttentionChoice::default(), false);
        CudaDevice {
            search,
            cache: None,
            gpus,
            visible,
            collectives,
            graphs,
            split_weights,
            early_launches,
            attention,
            has_cudnn,
            shared,
        }
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

    /// The same GPU, with weights that are split where only products in bf16 read them, or with copies of f32 weights: to measure both.
    #[must_use]
    pub fn with_split_weights(self, split_weights: bool) -> CudaDevice {
        CudaDevice { split_weights, ..self }
    }

    /// The same GPU, whose kernels may start before the ones before them have ended, where it can: to measure both. A GPU that is open
    /// is opened again.
    #[must_use]
    pub fn with_early_launches(self, early_launches: bool) -> CudaDevice {
        CudaDevice { early_launches, shared: Arc::default(), ..self }
    }

    /// The same GPUs without those that other processes have to themselves, as far as NVML knows.
    ///
    /// # Errors
    /// [`OpenError::Taken`] if all are taken.
    pub fn free(self) -> Result<CudaDevice, OpenError> {
        let is_taken = |gpu: &GpuInfo| health::is_taken(&self.search, gpu.uuid.as_deref());
        let kept: Vec<bool> = self.gpus.iter().map(|gpu| !is_taken(gpu)).collect();
        if !kept.contains(&true) {
            let users = health::users(&self.search, self.gpus[0].uuid.as_deref());
            return Err(OpenError::Taken { device: format!("GPU 0 ({})", self.gpus[0].name), users });
        }
        let gpus = self.gpus.into_iter().zip(&kept).filter(|(_, kept)| **kept).map(|(gpu, _)| gpu).collect();
        let visible = self.visible.into_iter().zip(kept).filter(|(_, kept)| *kept).map(|(name, _)| name).collect();
        Ok(CudaDevice { gpus, visible, ..self })
    }

    /// The position of the GPU with a [`DeviceHealth::id`].
    fn position(&self, id: &str) -> Option<usize> {
        let is_it = |(i, gpu): (usize, &GpuInfo)| gpu.uuid.as_deref().map_or(id == i.to_string(), |uuid| uuid == id);
        (0..self.gpus.len()).find(|i| is_it((*i, &self.gpus[*i])))
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

    /// The libraries that were found: what they are, and their files; NCCL, which several ranks need, only if it is there.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn libraries(&self) -> Result<Vec<(&'static str, PathBuf)>, OpenError> {
        let (libraries, _) = gpu::find(&self.search)?;
        let nccl = self.search.nccl().ok().map(|file| ("NCCL", file));
        Ok(libraries.files().into_iter().chain(nccl).collect())
    }

    /// Opens the GPU, unless it is open.
    ///
    /// # Errors
    /// See [`OpenError`]; the same error every time.
    pub fn open(&self) -> Result<(), OpenError> {
        self.shared().map(drop)
    }

    /// Opens the GPU and loads a kernel that is compiled for it.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn probe(&self) -> Result<(), OpenError> {
        let shared = self.shared()?;
        let (gpu, launch) = (&shared.gpu, Launch::of_place(&shared.gpu, 0));
        let refused = |error: CompileError| OpenError::Kernel {
            device: gpu.name.clone(),
            compiler: gpu.libraries.nvrtc.path.display().to_string(),
            reason: error.to_string(),
        };
        shared.kernels.load(gpu, &launch.kernel, launch.shared_bytes).map(drop).map_err(refused)
    }

    fn shared(&self) -> Result<&Arc<Shared>, OpenError> {
        let open = || {
            // The loader maps cuDNN, which is large, while the driver makes a context.
            let (gpu, dnn) = std::thread::scope(|scope| {
                let wants_cudnn = self.attention != AttentionChoice::Own;
                let dnn = wants_cudnn.then(|| scope.spawn(|| Dnn::find(&self.search)));
                let gpu = Gpu::open(&self.search, 0);
                (gpu, dnn.map(|dnn| dnn.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))))
            });
            let gpu = Arc::new(gpu?);
            let products = Products::open(&gpu, self.cache.clone()).map_err(OpenError::Context)?;
            let kernels = Kernels::new(self.cache.clone());
            let cudnn = dnn.map_or(Ok(None), |dnn| self.open_cudnn(&gpu, dnn))?;
            let (memory, nccl) = (Arc::new(GpuMemory::new(gpu.clone())), OnceLock::new());
            // Earlier GPUs have no such launches.
            let launches_early = self.early_launches && gpu.capability.0 >= 9;
            Ok(Arc::new(Shared { gpu, memory, kernels, products, launches_early, cudnn, nccl }))
        };
        self.shared.get_or_init(open).as_ref().map_err(OpenError::clone)
    }

    fn open_cudnn(&self, gpu: &Gpu, dnn: Result<&'static Dnn, LibraryError>) -> Result<Option<Cudnn>, OpenError> {
        match dnn.map_err(DnnError::from).and_then(|dnn| Cudnn::open(gpu, dnn)) {
            Ok(cudnn) => Ok(Some(cudnn)),
            Err(reason) if self.attention == AttentionChoice::Cudnn => Err(OpenError::Cudnn(reason)),
            Err(reason) => {
                tracing::info!(%reason, "attention without cuDNN");
                Ok(None)
            }
        }
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
        scratch_bytes(program, instr, self.has_cudnn && self.attention != AttentionChoice::Own)
    }

    fn align(&self) -> usize {
        ALIGN_BYTES
    }

    fn half_copies(&self) -> bool {
        true
    }

    fn split_weights(&self) -> bool {
        self.split_weights
    }

    fn head_chunk_tokens(&self) -> Option<usize> {
        Some(HEAD_CHUNK_TOKENS)
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

    /// Opens the GPU and loads the kernels, without buffers: a spare may share the GPU with the rank that it will replace.
    fn warm(&self, programs: &[&Compiled], _: &Arena) -> Result<Box<dyn Machine>, AllocError> {
        let unopened = |e| AllocError { bytes: 0, source: std::io::Error::other(e) };
        Ok(Box::new(CudaMachine::without_buffers(self.shared().map_err(unopened)?, programs, self.graphs)?))
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

    fn open_ahead(&self) {
        // Whoever needs it is told why it cannot be opened.
        let Ok(shared) = self.shared() else { return };
        if self.collectives != Choice::Staged {
            let _ = shared.nccl.get_or_init(|| Nccl::find(&self.search));
        }
    }

    fn activity(&self) -> Option<Activity> {
        self.opened().map(|shared| shared.gpu.activity())
    }

    fn has_failed(&self) -> bool {
        self.opened().is_some_and(|shared| shared.gpu.has_failed())
    }

    fn peak_flops(&self, bf16: bool) -> f64 {
        self.gpus.first().map_or(0.0, |gpu| gpu.peak_flops(bf16))
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

    fn health(&self) -> Vec<DeviceHealth> {
        Monitor::new(&self.search, &self.gpus).sample()
    }

    fn watch(&self) -> Option<HealthWatch> {
        let mut monitor = Monitor::new(&self.search, &self.gpus);
        Some(Box::new(move |timeout| monitor.wait(timeout)))
    }

    /// The GPU by its UUID, which names the same GPU after others have failed; and settings of NCCL.
    fn environment(&self, id: &str) -> Vec<(&'static str, String)> {
        let part = || self.position(id).and_then(|i| self.visible.get(i)).cloned();
        let is_uuid = self.gpus.iter().any(|gpu| gpu.uuid.as_deref() == Some(id));
        let name = if is_uuid { Some(id.to_owned()) } else { part() };
        // Ranks start operations of several communicators in one order, which NCCL has to keep on the GPU.
        let launch_order = ("NCCL_LAUNCH_ORDER_IMPLICIT", "1".to_owned());
        name.map(|name| ("CUDA_VISIBLE_DEVICES", name)).into_iter().chain([launch_order]).collect()
    }

    fn pci_address(&self, id: &str) -> Option<String> {
        Some(self.gpus[self.position(id)?].pci_address.clone())
    }

    fn exchange(&self, n_ranks: u32) -> Result<Option<String>, String> {
        if n_ranks < 2 || self.collectives == Choice::Staged {
            return Ok(None);
        }
        let n_gpus = self.gpus.len();
        let obstacle = match Nccl::locate(&self.search) {
            Err(error) => error.to_string(),
            Ok(_) if n_ranks as usize > n_gpus => {
                format!("NCCL needs a GPU for each of {n_ranks} ranks, found {n_gpus}")
            }
            Ok(_) => return Ok(None),
        };
        match self.collectives {
            Choice::Nccl => Err(obstacle),
            _ => Ok(Some(format!("ranks exchange tensors through host memory, which is slower than NCCL: {obstacle}"))),
        }
    }

    /// Other GPUs are taken to be like the first.
    fn fits(&self, bytes: u64, n_ranks: u32, n_spares: u32) -> Option<Result<(), String>> {
        let gpu = self.gpus.first()?;
        if let Err(taken) = self.clone().free() {
            return Some(Err(taken.to_string()));
        }
        // A spare has a context, and buffers only once the rank of its GPU has lost its own (`device_share` of the coordinator).
        let n_gpus = self.gpus.len() as u32;
        let n_on = |n: u32, i: u32| u64::from(n.saturating_sub(i).div_ceil(n_gpus));
        let on = |i| bytes * n_on(n_ranks, i) + CONTEXT_BYTES * (n_on(n_ranks + n_spares, i) - n_on(n_ranks, i));
        let bytes = (0..n_gpus).map(on).max().unwrap_or(0);
        let free = health::free_bytes(&self.search, gpu.uuid.as_deref()).unwrap_or(gpu.memory_bytes as u64);
        if bytes <= free {
            return Some(Ok(()));
        }
        let (total, users) = (gpu.memory_bytes >> 20, health::users(&self.search, gpu.uuid.as_deref()));
        let (free, needed) = (free >> 20, bytes.div_ceil(1 << 20));
        Some(Err(format!(
            "GPU 0 ({}) has {free} of {total} MiB free{users}, and the job needs {needed} MiB: use a smaller \
             micro_batch_size or sequence_len, gradient_checkpointing, more ranks, or end other processes on the GPU",
            gpu.name
        )))
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
