//! The handle of one member, shared by the thread that launches, the control end, and the thread that frees it.

use crate::error::CudaError;
use crate::gpu::{DeviceMemory, Event, Gpu, Stream as GpuStream};
use crate::library::Nccl;
use crate::library::nccl::{Code, Comm, IN_PROGRESS};
use phalanx_device::communicator::Behind;
use phalanx_device::{CollectiveControl, CollectiveError, Progress, Stream};
use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// After this time an end that has not come is an error: NCCL waits without a limit, and only the end of the process helps.
const END_MAX: Duration = Duration::from_secs(30);

/// An NCCL communicator. Any thread may use it, one at a time.
struct Handle(Comm);

// SAFETY: NCCL binds communicators to no thread.
unsafe impl Send for Handle {}

pub(super) struct Member {
    gpu: Arc<Gpu>,
    nccl: &'static Nccl,
    /// None once a thread frees it.
    handle: Mutex<Option<Handle>>,
    /// Why it was aborted.
    aborted: OnceLock<String>,
    /// Two words that the GPU writes: operations begun, and done. They stay when the member goes: nobody knows whether a
    /// stream that was aborted has written them.
    words: ManuallyDrop<DeviceMemory>,
    /// Operations that were given to the GPU.
    n_given: AtomicU32,
    /// When its end began.
    ends_since: Mutex<Option<Instant>>,
    has_ended: AtomicBool,
}

impl Member {
    pub(super) fn new(gpu: &Arc<Gpu>, nccl: &'static Nccl, comm: Comm) -> Result<Arc<Member>, CudaError> {
        let words = gpu.allocate_pinned(8)?;
        for i in 0..2 {
            word(&words, i).store(0, Release);
        }
        Ok(Arc::new(Member {
            gpu: gpu.clone(),
            nccl,
            handle: Mutex::new(Some(Handle(comm))),
            aborted: OnceLock::new(),
            words: ManuallyDrop::new(words),
            n_given: AtomicU32::new(0),
            ends_since: Mutex::default(),
            has_ended: AtomicBool::new(false),
        }))
    }

    /// The library's version, as it numbers it.
    pub(super) fn version(&self) -> i32 {
        self.nccl.version()
    }

    /// Address of the count of operations that the GPU has begun.
    pub(super) fn begun_word(&self) -> u64 {
        self.words.address
    }

    /// Address of the count of operations that the GPU has done.
    pub(super) fn done_word(&self) -> u64 {
        self.words.address + 4
    }

    /// Fails once the communicator is aborted.
    ///
    /// # Errors
    /// [`CollectiveError::Aborted`].
    pub(super) fn check(&self) -> Result<(), CollectiveError> {
        self.aborted.get().map_or(Ok(()), |reason| Err(CollectiveError::aborted(reason.clone())))
    }

    /// Launches the calls that `calls` makes as one group, and waits until NCCL has put them on the stream. The first
    /// operation with a peer may wait here for the peer: NCCL connects them then.
    ///
    /// # Errors
    /// [`CollectiveError::Library`]; [`CollectiveError::Aborted`], also during the wait.
    pub(super) fn launch(
        &self,
        calls: impl FnOnce(&Nccl, Comm) -> Result<(), (&'static str, Code)>,
    ) -> Result<(), CollectiveError> {
        let state = self.with(|comm| {
            // SAFETY: the handle is alive, because it is locked and not taken.
            let started = unsafe { (self.nccl.ncclGroupStart)() };
            let called = if started == 0 { calls(self.nccl, comm) } else { Err(("ncclGroupStart", started)) };
            // SAFETY: as above; a group that was started must be ended.
            let ended = unsafe { (self.nccl.ncclGroupEnd)() };
            let (call, code) = called.err().unwrap_or(("ncclGroupEnd", ended));
            self.outcome(call, code)
        })??;
        let mut is_pending = state == IN_PROGRESS;
        while is_pending {
            is_pending = self.state()?? == IN_PROGRESS;
            std::thread::yield_now();
        }
        Ok(())
    }

    /// The state of the communicator: success, or in progress.
    ///
    /// # Errors
    /// The outer one if it is aborted, the inner one if it has failed.
    pub(super) fn state(&self) -> Result<Result<Code, CollectiveError>, CollectiveError> {
        self.with(|comm| {
            let mut state = 0;
            // SAFETY: the handle is alive, because it is locked and not taken.
            let code = unsafe { (self.nccl.ncclCommGetAsyncError)(comm, &raw mut state) };
            self.outcome("ncclCommGetAsyncError", code).and_then(|_| self.outcome("NCCL", state))
        })
    }

    /// Success and "in progress", or the library's error.
    fn outcome(&self, call: &'static str, code: Code) -> Result<Code, CollectiveError> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(code);
        }
        Err(CollectiveError::Library { call, reason: self.nccl.text(code) })
    }

    /// Calls `with` while no thread frees the communicator. Since it does not block, no call of NCCL lasts.
    fn with<R>(&self, with: impl FnOnce(Comm) -> R) -> Result<R, CollectiveError> {
        let handle = lock(&self.handle);
        self.check()?;
        let gone = || CollectiveError::aborted("the communicator was left");
        handle.as_ref().map(|handle| with(handle.0)).ok_or_else(gone)
    }

    /// Ends all its operations here, and frees it. Does not wait. The first reason stands.
    pub(super) fn abort(self: &Arc<Member>, reason: &str) {
        self.aborted.get_or_init(|| reason.to_owned());
        let Some(handle) = lock(&self.handle).take() else { return };
        // An abort tells its operations to end before it waits for anything, so no other abort waits for them. A revoke before
        // it would free the job of a pending call, which the abort frees too.
        self.end("nccl-abort", move |member| member.free(&handle));
    }

    /// Frees it after its last operation, once all members have come so far; after an abort, `abort` frees it. Does not
    /// wait.
    pub(super) fn leave(self: &Arc<Member>, stream: GpuStream, last: Option<Event>, scratch: Vec<DeviceMemory>) {
        let Some(handle) = lock(&self.handle).take() else {
            // Freeing memory waits for the GPU, which may still wait for other communicators.
            self.end("nccl-scratch", move |_| drop((last, scratch)));
            return;
        };
        self.end("nccl-leave", move |member| {
            if member.finalize(&handle, last.as_ref()) {
                member.gpu.return_urgent_stream(stream);
            }
            drop((last, scratch));
        });
    }

    /// Runs one of the last steps on a thread of its own, since it may wait without a limit.
    fn end(self: &Arc<Member>, name: &str, end: impl FnOnce(&Member) + Send + 'static) {
        lock(&self.ends_since).get_or_insert_with(Instant::now);
        let member = self.clone();
        let spawned = std::thread::Builder::new().name(name.into()).spawn(move || {
            if member.gpu.bind().is_ok() {
                end(&member);
            }
            member.has_ended.store(true, Release);
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "cannot start a thread that frees an NCCL communicator");
        }
    }

    /// Ends operations under way and frees the communicator.
    fn free(&self, handle: &Handle) {
        // SAFETY: the handle was taken, so it is alive and this thread's, and this is its last use.
        unsafe { (self.nccl.ncclCommAbort)(handle.0) };
    }

    /// Frees the communicator when all members have run their last operation; on a failure, at once. Whether there was none.
    fn finalize(&self, handle: &Handle, last: Option<&Event>) -> bool {
        let give_up = Instant::now() + END_MAX;
        let is_due = || Instant::now() > give_up || self.aborted.get().is_some();
        let pause = || std::thread::sleep(Duration::from_millis(2));
        while last.is_some_and(|last| matches!(last.is_reached(), Ok(false))) && !is_due() {
            pause();
        }
        let (mut state, nccl) = (IN_PROGRESS, self.nccl);
        // SAFETY: the handle was taken, so it is alive and this thread's.
        let mut code = unsafe { (nccl.ncclCommFinalize)(handle.0) };
        while (code == 0 || code == IN_PROGRESS) && state == IN_PROGRESS && !is_due() {
            // SAFETY: as above.
            code = unsafe { (nccl.ncclCommGetAsyncError)(handle.0, &raw mut state) };
            pause();
        }
        let is_clean = code == 0 && state == 0;
        // After a finalize, an abort frees what a destroy frees, and waits for no peer: one may end just now.
        self.free(handle);
        is_clean
    }

    /// Counts an operation that the GPU is about to get; returns its number, from 1.
    pub(super) fn give(&self) -> u32 {
        // One thread launches: no read-modify-write is needed.
        let n = self.n_given.load(Acquire).wrapping_add(1);
        self.n_given.store(n, Release);
        n
    }

    fn progress(&self) -> Progress {
        let at = |i| u64::from(word(&self.words, i).load(Acquire));
        let finished = at(1);
        Progress { entered: at(0), finished }
    }

    /// # Errors
    /// An error that NCCL has noticed by itself, or an end that does not come.
    fn health(&self) -> Result<(), CollectiveError> {
        let since = *lock(&self.ends_since);
        if let Some(since) = since {
            if !self.has_ended.load(Acquire) && since.elapsed() > 2 * END_MAX {
                let reason =
                    format!("has not returned for {} s; only the end of the process helps", since.elapsed().as_secs());
                return Err(CollectiveError::Library { call: "ncclCommAbort", reason });
            }
            return Ok(());
        }
        match self.state() {
            Ok(state) => state.map(|_| ()),
            Err(_) => Ok(()),
        }
    }
}

/// The control end of a communicator.
pub(super) struct Control {
    pub(super) host: Arc<dyn CollectiveControl>,
    pub(super) member: Arc<Member>,
    /// Position of the member in the group.
    pub(super) position: u32,
}

impl CollectiveControl for Control {
    /// The others by their announcements on the host communicator, this member by the words that its GPU writes.
    fn behind(&self) -> Vec<Behind> {
        let mut behind = self.host.behind();
        let Progress { entered, finished } = self.member.progress();
        // While its GPU is in a collective, later ones come after it: others are behind.
        if entered == finished && u64::from(self.member.n_given.load(Acquire)) > entered {
            behind.push(Behind { stream: Stream::Group, index: entered, positions: vec![self.position] });
        }
        behind
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
        self.member.abort(reason);
    }

    fn check(&self) -> Result<(), CollectiveError> {
        self.member.health()
    }

    fn device_progress(&self) -> Option<Progress> {
        Some(self.member.progress())
    }
}

/// One of the words that the GPU writes.
fn word(words: &DeviceMemory, i: usize) -> &AtomicU32 {
    let at = std::ptr::with_exposed_provenance_mut::<u32>(words.address as usize + 4 * i);
    // SAFETY: pinned memory of 8 bytes that lives as long as `words`, aligned, and written as whole words only.
    unsafe { AtomicU32::from_ptr(at) }
}

/// Single assignments change the state, so it stays consistent if a thread panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
