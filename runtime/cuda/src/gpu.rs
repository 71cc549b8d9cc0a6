//! One GPU: its context, its streams, its memory, and copies between it and the host.

use crate::error::{CudaError, OpenError};
use crate::estimate::Rates;
use crate::gpu_info::GpuInfo;
use crate::health;
use crate::library::{Driver, Libraries, Search};
use cudarc::driver::sys::{CUcontext, CUevent, CUstream};
use phalanx_device::{Activity, RawBuffer};
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// `CU_STREAM_NON_BLOCKING`: no implicit order with the legacy stream.
const NON_BLOCKING: u32 = 1;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;
/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: u32 = 600;
/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: u32 = 801;
/// How long memory may take to become free after the end of the process that had it, and the pause between two looks.
const RELEASE_MAX: Duration = Duration::from_secs(5);
const RELEASE_PAUSE: Duration = Duration::from_millis(10);
/// The oldest driver whose loader accepts cubins of NVRTC 12, as CUDA numbers it.
const DRIVER_MIN: i32 = 12_000;

/// Attributes of a device, by their numbers in `cuda.h`.
#[derive(Clone, Copy)]
enum Attribute {
    ClockRate = 13,
    MultiprocessorCount = 16,
    MemoryClockRate = 36,
    MemoryBusWidth = 37,
    ComputeCapabilityMajor = 75,
    ComputeCapabilityMinor = 76,
    MaxSharedMemoryPerBlockOptin = 97,
}

/// A GPU that is in use by this process. Its context stays until the process ends.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) libraries: Libraries,
    context: CUcontext,
    /// The stream on which programs run.
    pub(crate) compute: Stream,
    pub(crate) ordinal: u32,
    /// Its name and number, for errors.
    pub(crate) name: String,
    /// Its model: product name and number of multiprocessors, which parts of one GPU may have fewer of.
    pub(crate) model: String,
    /// Its compute capability.
    pub(crate) capability: (i32, i32),
    /// Most bytes of shared memory that a block may have.
    pub(crate) shared_bytes_max: usize,
    /// For estimates of the time that work takes.
    pub(crate) rates: Rates,
    /// Who else uses it is found with these.
    search: Search,
    uuid: Option<String>,
    /// Its address on the PCI bus.
    pub(crate) pci_address: String,
    /// Streams without work, for reuse: streams are never destroyed.
    idle_streams: Mutex<Vec<Stream>>,
    /// The same, of the highest priority.
    idle_urgent_streams: Mutex<Vec<Stream>>,
    /// The end of what [`Gpu::end_ordered`] was called for last.
    ordered: OnceLock<Ordered>,
    /// Whether a reason for copies through host memory was given.
    tells_staging: AtomicBool,
    /// Pinned memory of rings that were dropped, for reuse: allocating it takes milliseconds.
    idle_pinned: Mutex<Vec<PinnedPiece>>,
    marks: Marks,
    /// Whether a library has got stuck in this process.
    is_given_up: AtomicBool,
}

/// Pinned memory of the host that a ring uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinnedPiece {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
}

/// Marks in the work of the compute stream, so that any thread sees how far the GPU is without a call of the driver, which
/// could block.
#[derive(Debug)]
struct Marks {
    /// Marks that were enqueued. Locked while one is, so that the stream has them in order.
    enqueued: Mutex<u32>,
    /// The same number, to be read without the lock.
    last: AtomicU32,
    /// Address of two words in pinned memory that lives as long as the process: the last mark that the stream has reached, and
    /// the last place inside of a segment.
    words: usize,
    /// The longest estimated time between two marks, in microseconds.
    expected_us: AtomicU64,
    /// Whether streams write words by an operation of their own. Drivers of WSL and of some virtual GPUs have none; memory of one word
    /// is filled there. No attribute of a device tells: the one in the driver's interface is that of an older function.
    has_writes: bool,
}

// SAFETY: the context and its streams may be used from any thread to which the context is bound; see `Gpu::bind`. The
// driver's functions are safe to call concurrently.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// Loads the libraries and initialises the driver, without a context on any GPU; returns the GPUs that this process may use.
///
/// # Errors
/// See [`OpenError`].
pub(crate) fn find(search: &Search) -> Result<(Libraries, Vec<GpuInfo>), OpenError> {
    let driver = Driver::find(search)?;
    let (mut version, mut n_gpus): (c_int, c_int) = (0, 0);
    let call = Call { driver, device: "this machine" };
    // Both take time: the driver looks for GPUs while the loader maps the other libraries.
    let (libraries, code) = std::thread::scope(|scope| {
        let libraries = scope.spawn(|| Libraries::load(search, driver));
        // SAFETY: a plain call, before all others.
        let code = unsafe { (driver.cuInit)(0) };
        (libraries.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), code)
    });
    let libraries = libraries?;
    if code != 0 {
        return Err(OpenError::NoGpu { code, text: driver.text(code) });
    }
    // SAFETY: plain calls with pointers to locals.
    unsafe {
        call.check("cuDriverGetVersion", (driver.cuDriverGetVersion)(&raw mut version)).map_err(OpenError::Driver)?;
        call.check("cuDeviceGetCount", (driver.cuDeviceGetCount)(&raw mut n_gpus)).map_err(OpenError::Driver)?;
    }
    if version < DRIVER_MIN {
        let text = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        return Err(OpenError::OldDriver { found: text(version), needed: text(DRIVER_MIN) });
    }
    if n_gpus == 0 {
        return Err(OpenError::NoGpu { code: 0, text: "no device".to_owned() });
    }
    let gpus: Result<Vec<GpuInfo>, CudaError> = (0..n_gpus).map(|ordinal| info(&call, ordinal)).collect();
    Ok((libraries, gpus.map_err(OpenError::Driver)?))
}

fn info(call: &Call<'_>, ordinal: c_int) -> Result<GpuInfo, CudaError> {
    let (driver, mut device, mut memory_bytes) = (call.driver, 0, 0usize);
    let mut name = [0 as std::ffi::c_char; 128];
    let mut address = [0 as std::ffi::c_char; 32];
    let (mut uuid, mut part) = ([0u8; 16], [0u8; 16]);
    // SAFETY: pointers to locals of the types in the driver's signatures; the driver writes a null-terminated string.
    unsafe {
        call.check("cuDeviceGet", (driver.cuDeviceGet)(&raw mut device, ordinal))?;
        call.check("cuDeviceGetName", (driver.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int, device))?;
        call.check("cuDeviceTotalMem", (driver.cuDeviceTotalMem_v2)(&raw mut memory_bytes, device))?;
        call.check("cuDeviceGetUuid", (driver.cuDeviceGetUuid)(&raw mut uuid, device))?;
        let is_whole = match driver.cuDeviceGetUuid_v2 {
            // A part of a GPU has a UUID of its own.
            Some(of_part) => of_part(&raw mut part, device) != 0 || part == uuid,
            None => true,
        };
        let code = (driver.cuDeviceGetPCIBusId)(address.as_mut_ptr(), address.len() as c_int, device);
        call.check("cuDeviceGetPCIBusId", code)?;
        let attribute = |which: Attribute| -> Result<i32, CudaError> {
            let mut value: c_int = 0;
            call.check("cuDeviceGetAttribute", (driver.cuDeviceGetAttribute)(&raw mut value, which as u32, device))?;
            Ok(value)
        };
        // The clock of the memory in kHz, with two transfers in a cycle; drivers may know neither.
        let memory_clock_khz = attribute(Attribute::MemoryClockRate).unwrap_or(0);
        let memory_bits = attribute(Attribute::MemoryBusWidth).unwrap_or(0);
        let memory_bytes_per_s = 2000 * i64::from(memory_clock_khz) * i64::from(memory_bits) / 8;
        Ok(GpuInfo {
            name: CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(),
            uuid: is_whole.then(|| uuid_name(&uuid)),
            pci_address: CStr::from_ptr(address.as_ptr()).to_string_lossy().to_lowercase(),
            memory_bytes,
            capability: (attribute(Attribute::ComputeCapabilityMajor)?, attribute(Attribute::ComputeCapabilityMinor)?),
            n_multiprocessors: attribute(Attribute::MultiprocessorCount)? as u32,
            clock_khz: attribute(Attribute::ClockRate)? as u32,
            shared_bytes_max: attribute(Attribute::MaxSharedMemoryPerBlockOptin)? as usize,
            memory_bytes_per_s: u64::try_from(memory_bytes_per_s).ok().filter(|rate| *rate > 0),
        })
    }
}

/// `GPU-` and the UUID in hexadecimal, in groups.
fn uuid_name(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

impl Gpu {
    /// Opens a GPU of this machine: makes a context.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub(crate) fn open(search: &Search, ordinal: u32) -> Result<Gpu, OpenError> {
        let (libraries, gpus) = find(search)?;
        let n_gpus = gpus.len() as u32;
        let info = gpus.into_iter().nth(ordinal as usize).ok_or(OpenError::NoSuchGpu { ordinal, n_gpus })?;
        let name = format!("GPU {ordinal} ({})", info.name);
        let (major, minor) = info.capability;
        if major < 8 {
            return Err(OpenError::OldGpu { device: name, found: format!("{major}.{minor}") });
        }
        let driver = libraries.driver;
        let call = Call { driver, device: &name };
        let mut device = 0;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: pointers to locals.
        let opened = unsafe {
            call.check("cuDeviceGet", (driver.cuDeviceGet)(&raw mut device, ordinal as c_int))
                .and_then(|()| {
                    let code = (driver.cuDevicePrimaryCtxRetain)(&raw mut context, device);
                    call.check("cuDevicePrimaryCtxRetain", code)
                })
                .and_then(|()| call.check("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(context)))
        };
        let taken = |error: CudaError| match error.code {
            CudaError::DEVICE_UNAVAILABLE => {
                OpenError::Taken { device: name.clone(), users: health::users(search, info.uuid.as_deref()) }
            }
            _ => OpenError::Context(error),
        };
        let compute = opened.and_then(|()| Stream::new(&call)).map_err(taken)?;
        let marks = Marks::new(&call, compute).map_err(OpenError::Context)?;
        let (capability, rates) = (info.capability, Rates::of(&info));
        let model = format!("{} with {} multiprocessors", info.name, info.n_multiprocessors);
        let (idle_streams, idle_urgent_streams, idle_pinned) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (is_given_up, tells_staging, ordered) = (AtomicBool::default(), AtomicBool::default(), OnceLock::new());
        Ok(Gpu {
            libraries,
            context,
            compute,
            ordinal,
            name,
            model,
            capability,
            shared_bytes_max: info.shared_bytes_max,
            rates,
            search: search.clone(),
            uuid: info.uuid,
            pci_address: info.pci_address,
            idle_streams,
            idle_urgent_streams,
            ordered,
            tells_staging,
            idle_pinned,
            marks,
            is_given_up,
        })
    }

    /// Makes the GPU current on the calling thread. Every other call of the driver requires it.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives until the process ends.
        self.check("cuCtxSetCurrent", unsafe { (self.libraries.driver.cuCtxSetCurrent)(self.context) })
    }

    /// Checks the code that a function of the driver has returned.
    ///
    /// # Errors
    /// If it is not success.
    pub(crate) fn check(&self, call: &'static str, code: u32) -> Result<(), CudaError> {
        Call { driver: self.libraries.driver, device: &self.name }.check(call, code)
    }

    /// Waits until everything that was enqueued on the compute stream is complete.
    ///
    /// # Errors
    /// Errors of the device in earlier work.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        self.mark()?;
        // SAFETY: the stream is alive.
        self.check("cuStreamSynchronize", unsafe { (self.libraries.driver.cuStreamSynchronize)(self.compute.0) })
    }

    /// Enqueues a mark on the compute stream; see [`Gpu::activity`].
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn mark(&self) -> Result<(), CudaError> {
        let mut enqueued = self.marks.enqueued.lock().unwrap_or_else(PoisonError::into_inner);
        *enqueued = enqueued.wrapping_add(1);
        self.marks.last.store(*enqueued, Release);
        // SAFETY: the word lives as long as the process.
        unsafe { self.write_word(self.marks.words as u64, *enqueued, self.compute) }
    }

    /// The address of the word in which commands leave signs of progress between marks.
    pub(crate) fn place_word(&self) -> u64 {
        self.marks.words as u64 + size_of::<u32>() as u64
    }

    /// Work may come whose marks are as far apart as this.
    pub(crate) fn expect(&self, between_marks: Duration) {
        self.marks.expected_us.fetch_max(between_marks.as_micros() as u64, Release);
    }

    /// How far the compute stream is, by its marks.
    pub(crate) fn activity(&self) -> Activity {
        let [reached, place] = [0, 1].map(|i| {
            let at = std::ptr::with_exposed_provenance_mut::<u32>(self.marks.words + i * size_of::<u32>());
            // SAFETY: an aligned word of pinned memory that lives as long as the process and is written as a whole.
            unsafe { AtomicU32::from_ptr(at) }.load(Acquire)
        });
        let expected = Duration::from_micros(self.marks.expected_us.load(Acquire));
        let completed = reached.rotate_left(16).wrapping_add(place);
        Activity { completed, is_busy: reached != self.marks.last.load(Acquire), expected }
    }

    /// A library has got stuck: this process cannot use the GPU with others any more.
    pub(crate) fn give_up(&self) {
        self.is_given_up.store(true, Release);
    }

    /// Whether an error of earlier work has made the context useless, or a library has got stuck.
    pub(crate) fn has_failed(&self) -> bool {
        if self.is_given_up.load(Acquire) {
            return true;
        }
        // SAFETY: the stream is alive.
        let state = |()| unsafe { (self.libraries.driver.cuStreamQuery)(self.compute.0) };
        self.bind().map(state).map_or(true, |code| code != 0 && code != NOT_READY)
    }

    /// Free and all bytes of its memory; zeros if the driver does not tell.
    pub(crate) fn memory_bytes(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        if self.bind().is_ok() {
            // SAFETY: pointers to locals.
            unsafe { (self.libraries.driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        }
        (free, total)
    }

    /// The other processes that use it, as a clause; empty if unknown.
    pub(crate) fn users(&self) -> String {
        health::users(&self.search, self.uuid.as_deref())
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// When there is too little.
    pub(crate) fn allocate(self: &Arc<Gpu>, bytes: usize) -> Result<DeviceMemory, CudaError> {
        self.bind()?;
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: a pointer to a local.
            self.check("cuMemAlloc", unsafe { (self.libraries.driver.cuMemAlloc_v2)(&raw mut address, bytes) })?;
        }
        Ok(DeviceMemory { gpu: self.clone(), address, bytes, is_pinned_host: false })
    }

    /// As [`Gpu::allocate`], but waits for memory, if `waits`: the driver frees the memory of a process some time after its end,
    /// when its successor may have started.
    ///
    /// # Errors
    /// As [`Gpu::allocate`].
    pub(crate) fn allocate_patiently(self: &Arc<Gpu>, bytes: usize, waits: bool) -> Result<DeviceMemory, CudaError> {
        let give_up = Instant::now() + RELEASE_MAX;
        loop {
            match self.allocate(bytes) {
                Err(error) if waits && error.code == CudaError::OUT_OF_MEMORY && Instant::now() < give_up => {
                    std::thread::sleep(RELEASE_PAUSE);
                }
                allocated => return allocated,
            }
        }
    }

    /// Allocates pinned host memory that kernels access directly, filled with zeros.
    ///
    /// # Errors
    /// When there is too little.
    pub(crate) fn allocate_pinned(self: &Arc<Gpu>, bytes: usize) -> Result<DeviceMemory, CudaError> {
        self.bind()?;
        let mut start: *mut c_void = std::ptr::null_mut();
        if bytes > 0 {
            // SAFETY: a pointer to a local.
            let code = unsafe { (self.libraries.driver.cuMemHostAlloc)(&raw mut start, bytes, PORTABLE_AND_MAPPED) };
            self.check("cuMemHostAlloc", code)?;
            // SAFETY: just allocated.
            unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        }
        Ok(DeviceMemory { gpu: self.clone(), address: start as u64, bytes, is_pinned_host: true })
    }

    /// Enqueues filling memory with zeros.
    ///
    /// # Errors
    /// When the GPU has failed.
    ///
    /// # Safety
    /// The memory is this GPU's, and nothing else accesses it meanwhile.
    pub(crate) unsafe fn zero(&self, address: u64, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        let code = unsafe { (self.libraries.driver.cuMemsetD8Async)(address, 0, bytes, stream.0) };
        self.check("cuMemsetD8Async", code)
    }

    /// Copies device memory to the host, after all earlier work of the compute stream; waits for it.
    ///
    /// # Errors
    /// Errors of the device in earlier work.
    ///
    /// # Safety
    /// The memory is this GPU's.
    pub(crate) unsafe fn read(&self, address: u64, to: &mut [u8]) -> Result<(), CudaError> {
        if to.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let driver = self.libraries.driver;
        // SAFETY: the caller's contract; `to` is borrowed until the stream is synchronized.
        unsafe {
            let code = (driver.cuMemcpyAsync)(to.as_mut_ptr() as u64, address, to.len(), self.compute.0);
            self.check("cuMemcpyAsync", code)?;
        }
        self.synchronize()
    }

    /// Enqueues a copy from the host, after all earlier work of the compute stream. `from` may be reused at once.
    ///
    /// # Errors
    /// When the GPU has failed.
    ///
    /// # Safety
    /// The memory is this GPU's; `from` is not pinned, so that the driver copies it before it returns.
    pub(crate) unsafe fn write(&self, address: u64, from: &[u8]) -> Result<(), CudaError> {
        if from.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let driver = self.libraries.driver;
        // SAFETY: the caller's contract.
        let code = unsafe { (driver.cuMemcpyAsync)(address, from.as_ptr() as u64, from.len(), self.compute.0) };
        self.check("cuMemcpyAsync", code)
    }
}

impl Gpu {
    /// A stream without work. The GPU is current on the calling thread afterwards, also for a stream that another thread returned.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn take_stream(&self) -> Result<Stream, CudaError> {
        self.bind()?;
        let idle = self.idle_streams.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(stream) = idle {
            return Ok(stream);
        }
        Stream::new(&Call { driver: self.libraries.driver, device: &self.name })
    }

    /// A stream without work whose kernels come before those of other streams: for collectives, which wait for few
    /// multiprocessors and which peers wait for. The GPU is current afterwards.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn take_urgent_stream(&self) -> Result<Stream, CudaError> {
        self.bind()?;
        let idle = self.idle_urgent_streams.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(stream) = idle {
            return Ok(stream);
        }
        let mut stream: CUstream = std::ptr::null_mut();
        // SAFETY: a pointer to a local; the context is current. The driver takes the highest priority that it has.
        let code =
            unsafe { (self.libraries.driver.cuStreamCreateWithPriority)(&raw mut stream, NON_BLOCKING, c_int::MIN) };
        self.check("cuStreamCreateWithPriority", code)?;
        Ok(Stream(stream))
    }

    /// Returns an urgent stream that has done its work.
    pub(crate) fn return_urgent_stream(&self, stream: Stream) {
        self.idle_urgent_streams.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
    }

    /// Makes a stream wait for all earlier work that was ordered.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn begin_ordered(&self, stream: Stream) -> Result<(), CudaError> {
        let Some(Ordered(end)) = self.ordered.get() else { return Ok(()) };
        // SAFETY: both are alive.
        self.check("cuStreamWaitEvent", unsafe { (self.libraries.driver.cuStreamWaitEvent)(stream.0, *end, 0) })
    }

    /// Orders the stream's work so far before what begins in order later. One thread orders work.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn end_ordered(&self, stream: Stream) -> Result<(), CudaError> {
        if self.ordered.get().is_none() {
            let mut end: CUevent = std::ptr::null_mut();
            // SAFETY: a pointer to a local. Like streams, the event lives as long as the process.
            self.check("cuEventCreate", unsafe { (self.libraries.driver.cuEventCreate)(&raw mut end, NO_TIMING) })?;
            self.ordered.get_or_init(|| Ordered(end));
        }
        let Ordered(end) = self.ordered.get().expect("there is one now");
        // SAFETY: both are alive.
        self.check("cuEventRecord", unsafe { (self.libraries.driver.cuEventRecord)(*end, stream.0) })
    }

    /// Whether this process tells why tensors go through host memory: once.
    pub(crate) fn tells_staging(&self) -> bool {
        !self.tells_staging.swap(true, Release)
    }

    /// Returns a stream that has done its work.
    pub(crate) fn return_stream(&self, stream: Stream) {
        self.idle_streams.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
    }

    /// Pinned memory of `bytes` bytes, whose contents are undefined. It lives as long as the process; there is as much of it as
    /// was in use at once.
    ///
    /// # Errors
    /// When the host has too little memory.
    pub(crate) fn take_pinned(&self, bytes: usize) -> Result<PinnedPiece, CudaError> {
        let mut idle = self.idle_pinned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = idle.iter().position(|piece| piece.bytes == bytes) {
            return Ok(idle.swap_remove(at));
        }
        drop(idle);
        self.bind()?;
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: a pointer to a local.
        let code = unsafe { (self.libraries.driver.cuMemHostAlloc)(&raw mut start, bytes, PORTABLE_AND_MAPPED) };
        self.check("cuMemHostAlloc", code)?;
        Ok(PinnedPiece { address: start.expose_provenance(), bytes })
    }

    /// Returns pinned memory that nothing accesses any more.
    pub(crate) fn return_pinned(&self, piece: PinnedPiece) {
        self.idle_pinned.lock().unwrap_or_else(PoisonError::into_inner).push(piece);
    }

    /// Enqueues a copy to a place of this GPU from another one, or from pinned host memory.
    ///
    /// # Errors
    /// When the GPU has failed.
    ///
    /// # Safety
    /// Both places have `bytes` bytes, and nothing else accesses them until the stream has done the copy.
    pub(crate) unsafe fn copy(&self, from: u64, to: u64, bytes: usize, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: the caller's contract.
        let code = unsafe { (self.libraries.driver.cuMemcpyAsync)(to, from, bytes, stream.0) };
        self.check("cuMemcpyAsync", code)
    }

    /// Enqueues writing a word of pinned memory, which the host reads meanwhile.
    ///
    /// # Errors
    /// When the GPU has failed.
    ///
    /// # Safety
    /// The word is aligned, and lives until the stream has written it.
    pub(crate) unsafe fn write_word(&self, at: u64, value: u32, stream: Stream) -> Result<(), CudaError> {
        let driver = self.libraries.driver;
        if self.marks.has_writes {
            // SAFETY: the caller's contract.
            return self.check("cuStreamWriteValue32", unsafe { write_value(driver, at, value, stream) });
        }
        // SAFETY: the caller's contract.
        self.check("cuMemsetD32Async", unsafe { (driver.cuMemsetD32Async)(at, value, 1, stream.0) })
    }

    /// Enqueues a copy of device memory to pinned host memory, after all earlier work of the stream.
    ///
    /// # Errors
    /// When the GPU has failed.
    ///
    /// # Safety
    /// Both are valid and not otherwise accessed until the stream was waited for, and `to` is pinned.
    pub(crate) unsafe fn enqueue_read(&self, from: u64, to: RawBuffer, stream: Stream) -> Result<(), CudaError> {
        let driver = self.libraries.driver;
        // SAFETY: the caller's contract.
        let code = unsafe { (driver.cuMemcpyAsync)(to.address() as u64, from, to.bytes(), stream.0) };
        self.check("cuMemcpyAsync", code)
    }

    /// Enqueues a copy of pinned host memory to the device, after all earlier work of the stream.
    ///
    /// # Errors
    /// When the GPU has failed.
    ///
    /// # Safety
    /// As [`Gpu::enqueue_read`], for `from`; the memory at `to` is for the stream alone.
    pub(crate) unsafe fn enqueue_write(&self, to: u64, from: RawBuffer, stream: Stream) -> Result<(), CudaError> {
        let driver = self.libraries.driver;
        // SAFETY: the caller's contract.
        let code = unsafe { (driver.cuMemcpyAsync)(to, from.address() as u64, from.bytes(), stream.0) };
        self.check("cuMemcpyAsync", code)
    }
}

/// Checks return codes.
struct Call<'a> {
    driver: &'static crate::library::Driver,
    device: &'a str,
}

impl Call<'_> {
    fn check(&self, call: &'static str, code: u32) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        Err(CudaError { call, device: self.device.to_owned(), code, text: self.driver.text(code) })
    }
}

/// A stream. It lives as long as the process: destroying the stream of a failed GPU could block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream(pub(crate) CUstream);

// SAFETY: streams may be used from any thread to which the context is bound.
unsafe impl Send for Stream {}

impl Stream {
    fn new(call: &Call<'_>) -> Result<Stream, CudaError> {
        let mut stream: CUstream = std::ptr::null_mut();
        // SAFETY: a pointer to a local; the context is current.
        call.check("cuStreamCreate", unsafe { (call.driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING) })?;
        Ok(Stream(stream))
    }
}

/// # Safety
/// As [`Gpu::write_word`].
unsafe fn write_value(driver: &crate::library::Driver, at: u64, value: u32, stream: Stream) -> u32 {
    // SAFETY: the caller's contract.
    unsafe { (driver.cuStreamWriteValue32_v2)(stream.0, at, value, 0) }
}

impl Marks {
    fn new(call: &Call<'_>, compute: Stream) -> Result<Marks, CudaError> {
        let mut words: *mut c_void = std::ptr::null_mut();
        // SAFETY: a pointer to a local; the context is current.
        let code = unsafe { (call.driver.cuMemHostAlloc)(&raw mut words, size_of::<[u32; 2]>(), PORTABLE_AND_MAPPED) };
        call.check("cuMemHostAlloc", code)?;
        // SAFETY: just allocated.
        unsafe { words.cast::<[u32; 2]>().write([0; 2]) };
        // SAFETY: the word lives as long as the process.
        let has_writes = match unsafe { write_value(call.driver, words as u64, 0, compute) } {
            NOT_SUPPORTED => false,
            code => call.check("cuStreamWriteValue32", code).map(|()| true)?,
        };
        let (enqueued, last, expected_us) = (Mutex::default(), AtomicU32::default(), AtomicU64::default());
        Ok(Marks { enqueued, last, words: words.expose_provenance(), expected_us, has_writes })
    }
}

/// The end of ordered work: an event.
#[derive(Debug)]
struct Ordered(CUevent);

// SAFETY: events may be used from any thread to which the context is bound.
unsafe impl Send for Ordered {}
// SAFETY: as above; the driver's functions are safe to call concurrently.
unsafe impl Sync for Ordered {}

/// A point in a stream's work, for waiting and for measuring time.
#[derive(Debug)]
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    event: CUevent,
}

// SAFETY: events may be used from any thread to which the context is bound.
unsafe impl Send for Event {}
// SAFETY: as above; the driver's functions are safe to call concurrently.
unsafe impl Sync for Event {}

impl Event {
    /// An event that measures time.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Event, CudaError> {
        gpu.bind()?;
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: a pointer to a local.
        gpu.check("cuEventCreate", unsafe { (gpu.libraries.driver.cuEventCreate)(&raw mut event, 0) })?;
        Ok(Event { gpu: gpu.clone(), event })
    }

    /// An event that does not measure time, which is cheaper.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn for_order(gpu: &Arc<Gpu>) -> Result<Event, CudaError> {
        gpu.bind()?;
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: a pointer to a local.
        gpu.check("cuEventCreate", unsafe { (gpu.libraries.driver.cuEventCreate)(&raw mut event, NO_TIMING) })?;
        Ok(Event { gpu: gpu.clone(), event })
    }

    /// Makes a stream wait for the work that the event marks now; the event may be recorded again at once.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn hold(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        let code = unsafe { (self.gpu.libraries.driver.cuStreamWaitEvent)(stream.0, self.event, 0) };
        self.gpu.check("cuStreamWaitEvent", code)
    }

    /// Waits until the work that the event marks is complete.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: alive.
        self.gpu.check("cuEventSynchronize", unsafe { (self.gpu.libraries.driver.cuEventSynchronize)(self.event) })
    }

    /// Whether the work that the event marks is complete.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn is_reached(&self) -> Result<bool, CudaError> {
        // SAFETY: alive.
        match unsafe { (self.gpu.libraries.driver.cuEventQuery)(self.event) } {
            NOT_READY => Ok(false),
            code => self.gpu.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Marks the current end of the stream's work.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        let code = unsafe { (self.gpu.libraries.driver.cuEventRecord)(self.event, stream.0) };
        self.gpu.check("cuEventRecord", code)
    }

    /// Time from an earlier event to this one; both are complete.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn since(&self, earlier: &Event) -> Result<Duration, CudaError> {
        let mut milliseconds = 0.0;
        let driver = self.gpu.libraries.driver;
        // SAFETY: both are alive.
        let code = unsafe { (driver.cuEventElapsedTime)(&raw mut milliseconds, earlier.event, self.event) };
        self.gpu.check("cuEventElapsedTime", code)?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by this driver and destroyed once. A failure leaks it.
        let _ = self.gpu.bind().map(|()| unsafe { (self.gpu.libraries.driver.cuEventDestroy_v2)(self.event) });
    }
}

/// Memory that kernels of a GPU access: its own, or pinned host memory.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    gpu: Arc<Gpu>,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    is_pinned_host: bool,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let driver = self.gpu.libraries.driver;
        // SAFETY: allocated by this driver and freed once; the driver waits for work that uses it. A failure leaks it:
        // the GPU has failed then, and the process is about to end.
        let _ = self.gpu.synchronize().map(|()| unsafe {
            if self.is_pinned_host {
                (driver.cuMemFreeHost)(self.address as *mut c_void)
            } else {
                (driver.cuMemFree_v2)(self.address)
            }
        });
    }
}
