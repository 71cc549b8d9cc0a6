//! What ends a process that touches what it may not: one line on stderr and an exit code.

use super::{arena, describe};
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering::Relaxed};
use std::sync::{Mutex, Once};

/// Exit code when a thread of the host touched device memory, or pinned memory that is freed.
const HOST_TOUCHED: i32 = 86;
/// Exit code when a kernel or copy left its memory.
const DEVICE_LEFT: i32 = 87;

const WORKERS_MAX: usize = 256;
static WORKERS: [AtomicI32; WORKERS_MAX] = [const { AtomicI32::new(0) }; WORKERS_MAX];
/// What the engine is at.
static WORK: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());
static PREVIOUS: Mutex<Vec<(i32, libc::sigaction)>> = Mutex::new(Vec::new());

/// The calling thread works for the device, until its end.
pub fn register_worker() {
    let free = WORKERS.iter().find(|w| w.compare_exchange(0, thread_id(), Relaxed, Relaxed).is_ok());
    assert!(free.is_some(), "more than {WORKERS_MAX} threads work for the device");
}

fn thread_id() -> i32 {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

/// Names what the engine is at, as long as it lives.
#[must_use]
pub struct Working;

impl Working {
    /// `name` must live as long as the result; the engine keeps kernels while they run.
    pub fn on(name: &CStr) -> Working {
        WORK.store(name.as_ptr().cast_mut(), Relaxed);
        Working
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        WORK.store(std::ptr::null_mut(), Relaxed);
    }
}

/// Ends the process because the running work wrote behind an allocation.
pub fn end_for_overrun(bytes: usize) -> ! {
    let message =
        format!("softgpu: {} wrote behind the end of an allocation of {bytes} (byte {bytes} or later)\n", work());
    end(&message, DEVICE_LEFT)
}

/// Ends the process because the running work reaches outside of an allocation.
pub fn end_for_range(at: usize, bytes: usize) -> ! {
    let what = describe(at).unwrap_or_else(|| "no memory of the device".into());
    end(&format!("softgpu: {} reaches {bytes} bytes from {at:#x}: {what}\n", work()), DEVICE_LEFT)
}

fn work() -> String {
    let name = WORK.load(Relaxed);
    if name.is_null() {
        return "the device".into();
    }
    // SAFETY: `Working` names only what outlives it.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

fn end(message: &str, code: i32) -> ! {
    // SAFETY: both calls may be made in a signal handler.
    unsafe {
        libc::write(2, message.as_ptr().cast(), message.len());
        libc::_exit(code)
    }
}

/// Installs the handlers; handlers of the program still get signals that no device memory caused.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let mut previous = PREVIOUS.lock().expect("nothing panics here");
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL] {
            // SAFETY: `on_fault` has the signature that SA_SIGINFO asks for.
            unsafe {
                let (mut action, mut old): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
                action.sa_sigaction = on_fault as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
                libc::sigaction(signal, &raw const action, &raw mut old);
                previous.push((signal, old));
            }
        }
    });
}

unsafe extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid `info`.
    let address = unsafe { (*info).si_addr() } as usize;
    let me = thread_id();
    let is_worker = WORKERS.iter().any(|w| w.load(Relaxed) == me);
    let found = describe(address);
    if is_worker && signal == libc::SIGILL {
        end(&format!("softgpu: {} made an access that is not aligned to its size\n", work()), DEVICE_LEFT);
    }
    if is_worker {
        let outside = if arena::contains(address) {
            "outside of a block's shared memory and stacks"
        } else {
            "no memory of the device"
        };
        let what = found.unwrap_or_else(|| outside.into());
        end(&format!("softgpu: {} touched {address:#x}: {what}\n", work()), DEVICE_LEFT);
    }
    if let Some(what) = found {
        end(&format!("softgpu: the host touched {address:#x}: {what}\n"), HOST_TOUCHED);
    }
    // Not the device's: the instruction is repeated under the program's own handler.
    let previous = PREVIOUS.try_lock().ok().and_then(|p| p.iter().find(|(s, _)| *s == signal).map(|(_, old)| *old));
    // SAFETY: what `sigaction` gave; a zeroed action is the default one.
    unsafe {
        let action = previous.unwrap_or_else(|| std::mem::zeroed());
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}
