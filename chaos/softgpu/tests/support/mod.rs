//! The software GPU as tests use it: through the C functions of an installation.
#![allow(unsafe_code, dead_code, unused_macros, unused_imports)]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use phalanx_softgpu::Installation;
use std::ffi::{CString, c_void};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard};

pub type P = *mut c_void;

/// Calls a C function that returns a code: `cu!(gpu, cuMemFree_v2(at => u64))`.
macro_rules! cu {
    ($gpu:expr, $name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        type Function = unsafe extern "C" fn($($ty),*) -> u32;
        // SAFETY: tests give the types of the headers.
        unsafe { (*$gpu.symbol::<Function>(stringify!($name)))($($value),*) }
    }};
}
pub(crate) use cu;

/// One test's view of the GPU; tests of a process run one after another.
pub struct Gpu {
    libraries: Vec<Library>,
    pub context: P,
    pub stream: P,
    _serial: MutexGuard<'static, ()>,
}

/// A kernel's argument.
pub fn arg<T>(value: &T) -> P {
    std::ptr::from_ref(value) as P
}

static SERIAL: Mutex<()> = Mutex::new(());

impl Gpu {
    /// With default settings, a current context and a stream.
    pub fn new() -> Gpu {
        Gpu::with(&[])
    }

    /// With settings that are read before the first call.
    pub fn with(settings: &[(&str, &str)]) -> Gpu {
        let mut gpu = Gpu::uninitialized();
        for name in ["SOFTGPU_SEED", "SOFTGPU_ALLOC_FAIL", "SOFTGPU_SLOW_US", "SOFTGPU_COPY_US"] {
            gpu.set(name, "0");
        }
        for (name, value) in
            [("FAULT", ""), ("HANG", ""), ("SLOW_PERCENT", "100"), ("HOLD_US", "2000"), ("THREADS", "2")]
        {
            gpu.set(&format!("SOFTGPU_{name}"), value);
        }
        for (name, value) in settings {
            gpu.set(name, value);
        }
        assert_eq!(cu!(gpu, cuInit(0 => u32)), 0);
        gpu.context = gpu.retain(0);
        assert_eq!(cu!(gpu, cuCtxSetCurrent(gpu.context => P)), 0);
        // Work that an earlier test left would take part in this test's order.
        assert_eq!(cu!(gpu, cuCtxSynchronize()), 0);
        gpu.stream = gpu.new_stream();
        gpu
    }

    pub fn uninitialized() -> Gpu {
        let serial = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let installation = Installation::new().unwrap();
        let open = |name: &str| {
            // SAFETY: the libraries' constructors do nothing.
            unsafe { Library::open(Some(installation.library(name)), RTLD_NOW | RTLD_LOCAL) }.unwrap()
        };
        let libraries = ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13"].map(open).into();
        Gpu { libraries, context: std::ptr::null_mut(), stream: std::ptr::null_mut(), _serial: serial }
    }

    pub fn symbol<T>(&self, name: &str) -> libloading::os::unix::Symbol<T> {
        // SAFETY: tests give the types of the headers.
        self.libraries
            .iter()
            .find_map(|l| unsafe { l.get(name.as_bytes()) }.ok())
            .unwrap_or_else(|| panic!("no {name}"))
    }

    pub fn set(&self, name: &str, value: &str) {
        let (name, value) = (CString::new(name).unwrap(), CString::new(value).unwrap());
        assert_eq!(
            cu!(self, softgpu_set(name.as_ptr().cast_mut().cast() => P, value.as_ptr().cast_mut().cast() => P)),
            0
        );
    }

    pub fn stat(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: the function's type.
        unsafe { (*self.symbol::<unsafe extern "C" fn(*const i8) -> u64>("softgpu_stat"))(name.as_ptr().cast()) }
    }

    pub fn retain(&self, device: i32) -> P {
        let mut context = std::ptr::null_mut();
        assert_eq!(cu!(self, cuDevicePrimaryCtxRetain(&raw mut context => *mut P, device => i32)), 0);
        context
    }

    pub fn new_stream(&self) -> P {
        let mut stream = std::ptr::null_mut();
        assert_eq!(cu!(self, cuStreamCreate(&raw mut stream => *mut P, 1 => u32)), 0);
        stream
    }

    pub fn new_event(&self) -> P {
        let mut event = std::ptr::null_mut();
        assert_eq!(cu!(self, cuEventCreate(&raw mut event => *mut P, 0 => u32)), 0);
        event
    }

    /// `then` waits for what `first` has now.
    pub fn after(&self, first: P, then: P) {
        let event = self.new_event();
        assert_eq!(cu!(self, cuEventRecord(event => P, first => P)), 0);
        assert_eq!(cu!(self, cuStreamWaitEvent(then => P, event => P, 0 => u32)), 0);
        assert_eq!(cu!(self, cuEventDestroy_v2(event => P)), 0);
    }

    pub fn alloc(&self, bytes: usize) -> u64 {
        let mut at = 0;
        assert_eq!(cu!(self, cuMemAlloc_v2(&raw mut at => *mut u64, bytes => usize)), 0);
        at
    }

    pub fn pinned<T>(&self, n: usize) -> *mut T {
        let mut at = std::ptr::null_mut();
        assert_eq!(cu!(self, cuMemHostAlloc(&raw mut at => *mut P, n * size_of::<T>() => usize, 2 => u32)), 0);
        at.cast()
    }

    pub fn put<T>(&self, values: &[T]) -> u64 {
        let at = self.alloc(size_of_val(values));
        let from = values.as_ptr().cast_mut().cast();
        assert_eq!(
            cu!(self, cuMemcpyHtoDAsync_v2(at => u64, from => P, size_of_val(values) => usize, self.stream => P)),
            0
        );
        at
    }

    pub fn get<T: Copy + Default>(&self, at: u64, n: usize) -> Vec<T> {
        let mut out = vec![T::default(); n];
        let to = out.as_mut_ptr().cast();
        assert_eq!(
            cu!(self, cuMemcpyDtoHAsync_v2(to => P, at => u64, n * size_of::<T>() => usize, self.stream => P)),
            0
        );
        self.sync();
        out
    }

    pub fn synchronize(&self, stream: P) -> u32 {
        cu!(self, cuStreamSynchronize(stream => P))
    }

    pub fn sync(&self) {
        assert_eq!(self.synchronize(self.stream), 0);
    }

    pub fn compile(&self, source: &str, options: &[&str]) -> Result<Vec<u8>, String> {
        let source = CString::new(source).unwrap();
        let options: Vec<CString> = options.iter().map(|o| CString::new(*o).unwrap()).collect();
        let options: Vec<*const i8> = options.iter().map(|o| o.as_ptr().cast()).collect();
        let null = std::ptr::null_mut::<c_void>();
        let mut program: P = null;
        let created = cu!(self, nvrtcCreateProgram(&raw mut program => *mut P, source.as_ptr().cast_mut().cast() => P,
            c"test.cu".as_ptr().cast_mut().cast() => P, 0 => i32, null => P, null => P));
        assert_eq!(created, 0);
        let n = options.len() as i32;
        let code = cu!(self, nvrtcCompileProgram(program => P, n => i32, options.as_ptr() => *const *const i8));
        let mut bytes = 0;
        cu!(self, nvrtcGetProgramLogSize(program => P, &raw mut bytes => *mut usize));
        let mut log = vec![0u8; bytes];
        cu!(self, nvrtcGetProgramLog(program => P, log.as_mut_ptr() => *mut u8));
        let mut image = Vec::new();
        if code == 0 {
            cu!(self, nvrtcGetCUBINSize(program => P, &raw mut bytes => *mut usize));
            image = vec![0u8; bytes];
            assert_eq!(cu!(self, nvrtcGetCUBIN(program => P, image.as_mut_ptr() => *mut u8)), 0);
        }
        cu!(self, nvrtcDestroyProgram(&raw mut program => *mut P));
        if code == 0 { Ok(image) } else { Err(format!("{code}: {}", String::from_utf8_lossy(&log))) }
    }

    pub fn load(&self, image: &[u8]) -> P {
        let mut module = std::ptr::null_mut();
        assert_eq!(cu!(self, cuModuleLoadData(&raw mut module => *mut P, image.as_ptr().cast_mut().cast() => P)), 0);
        module
    }

    pub fn module(&self, source: &str) -> P {
        let image = self.compile(source, &["--gpu-architecture=sm_90", "--std=c++17", "--fmad=false"]);
        self.load(&image.unwrap_or_else(|log| panic!("{log}")))
    }

    pub fn function(&self, module: P, name: &str) -> P {
        let (name, mut function) = (CString::new(name).unwrap(), std::ptr::null_mut());
        let code = cu!(self, cuModuleGetFunction(&raw mut function => *mut P, module => P, name.as_ptr().cast_mut().cast() => P));
        assert_eq!(code, 0);
        function
    }

    /// The only kernel of a source.
    pub fn kernel(&self, source: &str, name: &str) -> P {
        self.function(self.module(source), name)
    }

    pub fn launch(&self, f: P, stream: P, grid: [u32; 3], block: u32, dynamic: u32, args: &[P]) -> u32 {
        self.launch_block(f, stream, grid, [block, 1, 1], dynamic, args)
    }

    pub fn launch_block(&self, f: P, stream: P, grid: [u32; 3], block: [u32; 3], dynamic: u32, args: &[P]) -> u32 {
        let (args, none) = (args.as_ptr().cast_mut(), std::ptr::null_mut());
        cu!(self, cuLaunchKernel(f => P, grid[0] => u32, grid[1] => u32, grid[2] => u32, block[0] => u32, block[1] => u32,
            block[2] => u32, dynamic => u32, stream => P, args => *mut P, none => *mut P))
    }

    /// Runs a kernel over one array on this test's stream, and gives the array back.
    pub fn run<T: Copy + Default>(&self, source: &str, name: &str, grid: u32, block: u32, values: &[T]) -> Vec<T> {
        let at = self.put(values);
        assert_eq!(self.launch(self.kernel(source, name), self.stream, [grid, 1, 1], block, 0, &[arg(&at)]), 0);
        self.get(at, values.len())
    }
}

/// Runs `body` in a process of its own, which is this test once more, and gives what it wrote and how it ended.
/// If `body` returns, the process ends with 0.
pub fn in_child(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) -> Output {
    if std::env::var("CHILD_OF_TEST").as_deref() == Ok(test) {
        body();
        std::process::exit(0);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env("CHILD_OF_TEST", test);
    command.envs(environment.iter().copied()).output().unwrap()
}

/// Asserts how a child ended, and gives its stderr.
#[track_caller]
pub fn assert_ends_with(output: &Output, code: i32) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{stderr}\n{}", String::from_utf8_lossy(&output.stdout));
    stderr
}
