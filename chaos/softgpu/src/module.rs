//! Kernels: images, modules, functions, launches.
//!
//! An image is what NVRTC gives: a "cubin" is the shared library itself, a "PTX" is text that names its file.

use crate::codes::{Code, INVALID_IMAGE, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND, UNSUPPORTED_PTX_VERSION, refuse};
use crate::engine::pool;
use crate::memory::arena;
use crate::{device, environment};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

/// First line of an image that is not for one architecture only.
pub const PTX_PREFIX: &str = "// softgpu PTX for compute_";
/// Symbol with the architecture that a cubin is for.
pub const ARCH_SYMBOL: &CStr = c"softgpu_arch";

/// A loaded image.
pub struct Module {
    library: *mut c_void,
    /// The loader knows libraries by their path, so the descriptor's number may not be used again while this is loaded.
    _file: OwnedFd,
    pub device: u32,
}

/// A function of a module.
pub struct Kernel {
    module: Arc<Module>,
    pub device: u32,
    name: Arc<str>,
    label: CString,
    raw: *const RawKernel,
    /// Bytes of dynamic shared memory that may be asked for.
    pub dynamic_most: AtomicI32,
    /// Most bytes of static shared memory that a launch has used.
    pub static_seen: AtomicI32,
}

/// A kernel with its arguments.
pub struct Launch {
    kernel: Arc<Kernel>,
    /// Values, one behind the other, each at a multiple of 128 bytes.
    arguments: Box<[Line]>,
    places: Vec<usize>,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic: u32,
}

#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Line([u8; 128]);

/// `softgpu::Kernel` of shim/launch.h.
#[repr(C)]
struct RawKernel {
    n_args: usize,
    sizes: *const usize,
    threads_most: u32,
    run: unsafe extern "C" fn(*mut RawLaunch) -> c_int,
}

/// `softgpu::Launch` of shim/launch.h.
#[repr(C)]
struct RawLaunch {
    args: *mut *mut c_void,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic: usize,
    seed: u64,
    n_os: u32,
    arena: extern "C" fn() -> *mut c_void,
    parallel: extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, u32),
    message: *mut c_char,
    static_shared: usize,
}

// SAFETY: libraries and the constants in them may be used by any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

static MODULES: AtomicU64 = AtomicU64::new(0);

impl Module {
    /// Loads an image for a device.
    ///
    /// # Safety
    /// `image` is the start of an ELF file or of a text that ends in NUL.
    pub unsafe fn load(image: *const u8, device: u32) -> Result<Arc<Module>, Code> {
        // SAFETY: by the caller.
        let (library, file) = unsafe {
            if std::slice::from_raw_parts(image, 4) == b"\x7fELF" {
                let (library, file) = open_elf(std::slice::from_raw_parts(image, elf_bytes(image)))?;
                check_cubin(library).inspect_err(|_| {
                    libc::dlclose(library);
                })?;
                (library, file)
            } else {
                open_ptx(CStr::from_ptr(image.cast()).to_str().map_err(|_| INVALID_IMAGE)?)?
            }
        };
        MODULES.fetch_add(1, Relaxed);
        Ok(Arc::new(Module { library, _file: file, device }))
    }

    pub fn function(self: &Arc<Module>, name: &str) -> Result<Arc<Kernel>, Code> {
        let symbol = CString::new(format!("softgpu_kernel_{name}")).map_err(|_| NOT_FOUND)?;
        // SAFETY: the library is loaded as long as the module lives.
        let raw = unsafe { libc::dlsym(self.library, symbol.as_ptr()) } as *const RawKernel;
        if raw.is_null() {
            return Err(refuse(NOT_FOUND, format_args!("the module has no kernel `{name}` (is it extern \"C\"?)")));
        }
        Ok(Arc::new(Kernel {
            module: self.clone(),
            device: self.device,
            name: name.into(),
            label: CString::new(format!("kernel {name}")).expect("the name has no NUL"),
            raw,
            dynamic_most: AtomicI32::new(NOT_SET),
            static_seen: AtomicI32::new(0),
        }))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        MODULES.fetch_sub(1, Relaxed);
        // SAFETY: all kernels of it are gone; each keeps its module.
        unsafe { libc::dlclose(self.library) };
    }
}

/// Bytes of an ELF file whose section headers come last, as linkers write it.
unsafe fn elf_bytes(image: *const u8) -> usize {
    // SAFETY: an ELF header has 64 bytes; the image is one, by the caller of `load`.
    unsafe {
        let sections_at = image.add(40).cast::<u64>().read_unaligned() as usize;
        let (bytes, n) = (image.add(58).cast::<u16>().read_unaligned(), image.add(60).cast::<u16>().read_unaligned());
        sections_at + usize::from(bytes) * usize::from(n)
    }
}

/// Each module is a library of its own, also when the image was loaded before.
fn open_elf(image: &[u8]) -> Result<(*mut c_void, OwnedFd), Code> {
    // SAFETY: the file is new; its descriptor is owned here.
    let file = unsafe {
        let file = libc::memfd_create(c"softgpu".as_ptr(), libc::MFD_CLOEXEC);
        if file < 0 {
            return Err(INVALID_IMAGE);
        }
        OwnedFd::from_raw_fd(file)
    };
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::write(&path, image).map_err(|_| INVALID_IMAGE)?;
    Ok((open(&path)?, file))
}

fn open(path: &str) -> Result<*mut c_void, Code> {
    let c_path = CString::new(path).map_err(|_| INVALID_IMAGE)?;
    // SAFETY: a library that NVRTC built; its constructors only count shared variables.
    let library = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: the message of the call above.
        let why = unsafe { CStr::from_ptr(libc::dlerror()) };
        return Err(refuse(INVALID_IMAGE, format_args!("cannot load a module: {}", why.to_string_lossy())));
    }
    Ok(library)
}

/// NVRTC is that of CUDA 13: older drivers load neither its cubins nor its PTX, and have a code for each.
fn is_older_driver() -> bool {
    environment::number("SOFTGPU_DRIVER_VERSION") < 13_000
}

/// A cubin runs on devices of the same major version and at least its minor version; with a letter, on that one only.
fn check_cubin(library: *mut c_void) -> Result<(), Code> {
    if is_older_driver() {
        return Err(refuse(INVALID_IMAGE, format_args!("a cubin of CUDA 13.0 with an older driver")));
    }
    // SAFETY: the symbol is a string in libraries that NVRTC built.
    let arch = unsafe {
        let symbol = libc::dlsym(library, ARCH_SYMBOL.as_ptr()) as *const c_char;
        if symbol.is_null() {
            return Err(INVALID_IMAGE);
        }
        CStr::from_ptr(symbol).to_string_lossy().into_owned()
    };
    let number: u32 = arch.trim_end_matches(char::is_alphabetic).parse().map_err(|_| INVALID_IMAGE)?;
    let of_device = device::capability();
    let is_exact = arch.ends_with('a');
    if number == of_device || (!is_exact && number / 10 == of_device / 10 && number < of_device) {
        return Ok(());
    }
    Err(refuse(NO_BINARY_FOR_GPU, format_args!("a cubin for sm_{arch} on a device of sm_{of_device}")))
}

fn open_ptx(text: &str) -> Result<(*mut c_void, OwnedFd), Code> {
    let (first, rest) = text.split_once('\n').ok_or(INVALID_IMAGE)?;
    let arch: u32 = first
        .strip_prefix(PTX_PREFIX)
        .and_then(|a| a.trim_end_matches(char::is_alphabetic).parse().ok())
        .ok_or(INVALID_IMAGE)?;
    if is_older_driver() {
        return Err(refuse(UNSUPPORTED_PTX_VERSION, format_args!("PTX of CUDA 13.0 with an older driver")));
    }
    if arch > device::capability() {
        return Err(refuse(NO_BINARY_FOR_GPU, format_args!("PTX for compute_{arch} on sm_{}", device::capability())));
    }
    let image = std::fs::read(rest.trim_start_matches("// ").trim_end()).map_err(|_| INVALID_IMAGE)?;
    open_elf(&image)
}

impl Kernel {
    /// Most bytes of dynamic shared memory of a launch.
    pub fn dynamic_most(&self) -> i32 {
        match self.dynamic_most.load(Relaxed) {
            NOT_SET => 48 << 10,
            bytes => bytes,
        }
    }

    pub fn threads_most(&self) -> u32 {
        // SAFETY: a constant of the loaded module.
        unsafe { (*self.raw).threads_most }
    }

    pub fn is_of(&self, module: &Arc<Module>) -> bool {
        Arc::ptr_eq(&self.module, module)
    }

    /// Sizes of the parameters.
    pub fn sizes(&self) -> &[usize] {
        // SAFETY: constants of the loaded module.
        unsafe { std::slice::from_raw_parts((*self.raw).sizes, (*self.raw).n_args) }
    }

    /// Checks a launch and copies its arguments.
    ///
    /// # Safety
    /// `params` has an address of a value for each parameter.
    pub unsafe fn launch(
        self: &Arc<Kernel>,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic: u32,
        params: *const *const u8,
    ) -> Result<Launch, Code> {
        self.check(grid, block, dynamic)?;
        let sizes = self.sizes();
        if params.is_null() && !sizes.is_empty() {
            return Err(refuse(INVALID_VALUE, format_args!("kernel {} without its parameters", self.name)));
        }
        let n_lines = sizes.iter().map(|bytes| bytes.div_ceil(128)).sum();
        let mut arguments = vec![Line([0; 128]); n_lines].into_boxed_slice();
        let (mut at, mut places) = (0, Vec::new());
        for (i, bytes) in sizes.iter().enumerate() {
            places.push(at);
            // SAFETY: the parameter's address is the caller's; the lines have room for all of them.
            unsafe {
                let to = arguments.as_mut_ptr().add(at).cast::<u8>();
                std::ptr::copy_nonoverlapping(*params.add(i), to, *bytes);
            }
            at += bytes.div_ceil(128);
        }
        Ok(Launch { kernel: self.clone(), arguments, places, grid, block, dynamic })
    }

    fn check(&self, grid: [u32; 3], block: [u32; 3], dynamic: u32) -> Result<(), Code> {
        let wrong =
            |what: std::fmt::Arguments<'_>| Err(refuse(INVALID_VALUE, format_args!("kernel {}: {what}", self.name)));
        let threads: u64 = block.iter().map(|n| u64::from(*n)).product();
        if grid.contains(&0) || grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
            return wrong(format_args!("a grid of {grid:?}"));
        }
        if threads == 0 || threads > 1024 || block[2] > 64 {
            return wrong(format_args!("a block of {block:?}"));
        }
        if threads > u64::from(self.threads_most()) {
            return wrong(format_args!("{threads} threads, but __launch_bounds__({})", self.threads_most()));
        }
        let most = self.dynamic_most();
        if i64::from(dynamic) > i64::from(most) {
            return wrong(format_args!(
                "{dynamic} bytes of dynamic shared memory, {most} are allowed (cuFuncSetAttribute)"
            ));
        }
        Ok(())
    }
}

impl Launch {
    pub fn kernel_name(&self) -> &Arc<str> {
        &self.kernel.name
    }

    pub fn label(&self) -> &CStr {
        &self.kernel.label
    }

    /// Runs the grid on the calling thread and the pool's.
    pub fn run(&self, seed: u64) -> Result<(), Code> {
        // A block may change its parameters, so each launch of a graph has values of its own.
        let mut values = self.arguments.clone();
        // SAFETY: each place lies in the lines.
        let at = |place: &usize| unsafe { values.as_mut_ptr().add(*place) }.cast::<c_void>();
        let mut args: Vec<*mut c_void> = self.places.iter().map(at).collect();
        let mut message = [0 as c_char; 256];
        let mut raw = RawLaunch {
            args: args.as_mut_ptr(),
            grid: self.grid,
            block: self.block,
            dynamic: self.dynamic as usize,
            seed: seed >> 8,
            n_os: environment::number("SOFTGPU_THREADS").clamp(1, 64) as u32,
            arena: arena::of_this_thread,
            parallel: pool::parallel,
            message: message.as_mut_ptr(),
            static_shared: 0,
        };
        // SAFETY: the structure is what the module's header declares; the kernel's accesses are its author's.
        let code = unsafe { ((*self.kernel.raw).run)(&raw mut raw) };
        self.kernel.static_seen.fetch_max(raw.static_shared as i32, Relaxed);
        if code == 0 {
            return self.check_shared(raw.static_shared);
        }
        // SAFETY: the module writes a string that ends in NUL.
        let message = unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy();
        Err(refuse(code as Code, format_args!("kernel {}: {message}", self.kernel.name)))
    }

    fn check_shared(&self, static_bytes: usize) -> Result<(), Code> {
        let (dynamic, most) = (self.dynamic as usize, self.kernel.dynamic_most.load(Relaxed));
        let limit = if most == NOT_SET { 48 << 10 } else { device::shared_bytes_optin() };
        if static_bytes + dynamic <= limit {
            return Ok(());
        }
        let what = format_args!(
            "kernel {}: {static_bytes} bytes of static and {dynamic} of dynamic shared memory are more than {limit}",
            self.kernel.name
        );
        Err(refuse(INVALID_VALUE, what))
    }
}

/// The attribute for dynamic shared memory was not set: static and dynamic memory together are at most 48 KiB.
pub const NOT_SET: i32 = -1;

/// Counters of what exists.
pub fn stat(name: &str) -> Option<u64> {
    (name == "modules").then(|| MODULES.load(Relaxed))
}
