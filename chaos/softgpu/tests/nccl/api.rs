//! The C functions of an installation, and processes that run a test again with other settings.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use phalanx_softgpu::Installation;
use std::ffi::c_void;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub type P = *mut c_void;
pub const F32: i32 = 7;
pub const SUM: i32 = 0;
pub const IN_PROGRESS: u32 = 7;

macro_rules! api {
    ($( fn $name:ident( $($arg:ty),* $(,)? ) -> $library:literal; )*) => {
        /// The functions.
        #[allow(non_snake_case)]
        pub struct Api { $( pub $name: unsafe extern "C" fn($($arg),*) -> u32, )* }

        /// Loads the libraries once.
        pub fn api() -> &'static Api {
            static API: OnceLock<Api> = OnceLock::new();
            API.get_or_init(|| {
                let installation = Installation::new().unwrap();
                // SAFETY: the libraries' constructors do nothing; signatures are those of the headers.
                unsafe {
                    let open = |name| &*Box::leak(Box::new(Library::open(Some(installation.library(name)), RTLD_NOW | RTLD_LOCAL).unwrap()));
                    Api { $( $name: *open($library).get(concat!(stringify!($name), "\0").as_bytes()).unwrap(), )* }
                }
            })
        }
    };
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// An `ncclConfig_t` of 2.28.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    rest: [usize; 8],
}

impl Config {
    pub fn new(blocking: i32) -> Config {
        Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 22809, blocking, rest: [0; 8] }
    }
}

api! {
    fn cuInit(u32) -> "libcuda.so.1";
    fn cuDevicePrimaryCtxRetain(*mut P, i32) -> "libcuda.so.1";
    fn cuCtxSetCurrent(P) -> "libcuda.so.1";
    fn cuMemAlloc_v2(*mut u64, usize) -> "libcuda.so.1";
    fn cuMemcpyHtoDAsync_v2(u64, *const u8, usize, P) -> "libcuda.so.1";
    fn cuMemcpyDtoHAsync_v2(*mut u8, u64, usize, P) -> "libcuda.so.1";
    fn cuStreamCreate(*mut P, u32) -> "libcuda.so.1";
    fn cuStreamSynchronize(P) -> "libcuda.so.1";
    fn cuStreamQuery(P) -> "libcuda.so.1";
    fn cuStreamBeginCapture_v2(P, u32) -> "libcuda.so.1";
    fn cuStreamEndCapture(P, *mut P) -> "libcuda.so.1";
    fn cuGraphInstantiateWithFlags(*mut P, P, u64) -> "libcuda.so.1";
    fn cuGraphLaunch(P, P) -> "libcuda.so.1";
    fn cuGraphDestroy(P) -> "libcuda.so.1";
    fn cuGraphExecDestroy(P) -> "libcuda.so.1";
    fn ncclGetUniqueId(*mut UniqueId) -> "libnccl.so.2";
    fn ncclCommInitRank(*mut P, i32, UniqueId, i32) -> "libnccl.so.2";
    fn ncclCommInitRankConfig(*mut P, i32, UniqueId, i32, *const Config) -> "libnccl.so.2";
    fn ncclCommGetAsyncError(P, *mut u32) -> "libnccl.so.2";
    fn ncclCommFinalize(P) -> "libnccl.so.2";
    fn ncclCommDestroy(P) -> "libnccl.so.2";
    fn ncclCommAbort(P) -> "libnccl.so.2";
    fn ncclCommRevoke(P, i32) -> "libnccl.so.2";
    fn ncclGroupStart() -> "libnccl.so.2";
    fn ncclGroupEnd() -> "libnccl.so.2";
    fn ncclAllReduce(u64, u64, usize, i32, i32, P, P) -> "libnccl.so.2";
    fn ncclReduceScatter(u64, u64, usize, i32, i32, P, P) -> "libnccl.so.2";
    fn ncclReduce(u64, u64, usize, i32, i32, i32, P, P) -> "libnccl.so.2";
    fn ncclAllGather(u64, u64, usize, i32, P, P) -> "libnccl.so.2";
    fn ncclAlltoAll(u64, u64, usize, i32, P, P) -> "libnccl.so.2";
    fn ncclBroadcast(u64, u64, usize, i32, i32, P, P) -> "libnccl.so.2";
    fn ncclSend(u64, usize, i32, i32, P, P) -> "libnccl.so.2";
    fn ncclRecv(u64, usize, i32, i32, P, P) -> "libnccl.so.2";
}

/// Calls a function, which must succeed.
macro_rules! ok {
    ($name:ident( $($arg:expr),* $(,)? )) => {
        // SAFETY: arguments are valid for the test's duration.
        assert_eq!(unsafe { (api().$name)($($arg),*) }, 0, stringify!($name))
    };
}
pub(crate) use ok;

/// A place on the device for a thread: a stream.
pub struct Thread {
    pub stream: P,
}

impl Thread {
    pub fn new(device: i32) -> Thread {
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        ok!(cuInit(0));
        ok!(cuDevicePrimaryCtxRetain(&raw mut context, device));
        ok!(cuCtxSetCurrent(context));
        ok!(cuStreamCreate(&raw mut stream, 1));
        Thread { stream }
    }

    /// Device memory with these elements.
    pub fn put(&self, elements: &[f32]) -> u64 {
        let (mut at, bytes) = (0, size_of_val(elements));
        ok!(cuMemAlloc_v2(&raw mut at, bytes.max(4)));
        if bytes > 0 {
            ok!(cuMemcpyHtoDAsync_v2(at, elements.as_ptr().cast(), bytes, self.stream));
        }
        self.wait();
        at
    }

    /// Elements of device memory, after the stream's work.
    pub fn get(&self, at: u64, n: usize) -> Vec<f32> {
        let mut elements = vec![0.0f32; n];
        if n > 0 {
            ok!(cuMemcpyDtoHAsync_v2(elements.as_mut_ptr().cast(), at, 4 * n, self.stream));
        }
        self.wait();
        elements
    }

    pub fn wait(&self) {
        ok!(cuStreamSynchronize(self.stream));
    }

    /// Whether the stream's work is done after `time`.
    pub fn is_idle_within(&self, time: Duration) -> bool {
        // SAFETY: the stream is alive.
        until(time, || unsafe { (api().cuStreamQuery)(self.stream) } != 600)
    }
}

/// Waits for a condition; whether it came in time.
pub fn until(time: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > time {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// A blocking communicator.
pub fn join(id: UniqueId, n: usize, rank: usize) -> P {
    let mut comm = std::ptr::null_mut();
    ok!(ncclCommInitRank(&raw mut comm, n as i32, id, rank as i32));
    comm
}

pub fn unique_id() -> UniqueId {
    let mut id = UniqueId([0; 128]);
    ok!(ncclGetUniqueId(&raw mut id));
    id
}

/// The state of a communicator.
pub fn state(comm: P) -> u32 {
    let mut state = 0;
    ok!(ncclCommGetAsyncError(comm, &raw mut state));
    state
}

/// Runs `body` in a process of its own with these settings, in which ranks may share a device. Returns its output, or none
/// in that process.
pub fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
    const CHILD: &str = "PHALANX_TEST_CHILD";
    if std::env::var(CHILD).is_ok() {
        body();
        return None;
    }
    let mut command = again(test);
    command.env(CHILD, "1").env("NCCL_MULTI_RANK_GPU_ENABLE", "1").envs(settings.iter().copied());
    Some(ran(command.output().unwrap()))
}

/// As [`alone`]; the process must succeed.
pub fn passes(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    if let Some(output) = alone(test, settings, body) {
        assert!(output.status.success(), "{}", text(&output));
    }
}

/// Runs `body` in a process for each rank, each as if on a machine of its own, with a unique id for each communicator.
/// Returns their outputs, or none in those processes.
pub fn processes(
    test: &str,
    n: usize,
    settings: &[(&str, &str)],
    body: impl FnOnce(usize, &[UniqueId]),
) -> Option<Vec<Output>> {
    const RANK: &str = "PHALANX_TEST_RANK";
    const IDS: &str = "PHALANX_TEST_IDS";
    if let Ok(rank) = std::env::var(RANK) {
        let ids = std::fs::read(std::env::var(IDS).unwrap()).unwrap();
        let ids: Vec<UniqueId> = ids.chunks_exact(128).map(|id| UniqueId(id.try_into().unwrap())).collect();
        body(rank.parse().unwrap(), &ids);
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<u8> = (0..4).flat_map(|_| unique_id().0).collect();
    std::fs::write(folder.path().join("ids"), ids).unwrap();
    let start = |rank: usize| {
        let mut command = again(test);
        command.env(RANK, rank.to_string()).env(IDS, folder.path().join("ids"));
        command.env("NCCL_HOSTID", rank.to_string()).envs(settings.iter().copied());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..n).map(start).collect();
    Some(children.into_iter().map(|child| ran(child.wait_with_output().unwrap())).collect())
}

/// Checks that the process had the test.
fn ran(output: Output) -> Output {
    assert!(text(&output).contains("running 1 test"), "{}", text(&output));
    output
}

fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command
}

pub fn text(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}
