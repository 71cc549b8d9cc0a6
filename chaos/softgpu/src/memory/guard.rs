//! How accesses of the host's threads to device memory are found.

use super::{Pieces, pieces};
use crate::environment;
use std::sync::OnceLock;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Guard {
    /// A protection key that only the engine's threads have.
    Keys(i32),
    /// Pages are closed while the device has no work.
    Idle,
    Off,
}

fn guard() -> Guard {
    static GUARD: OnceLock<Guard> = OnceLock::new();
    *GUARD.get_or_init(|| match environment::text("SOFTGPU_GUARD").as_str() {
        "off" => Guard::Off,
        "idle" => Guard::Idle,
        "fast" => key().map_or(Guard::Off, Guard::Keys),
        wanted => key().map_or_else(
            || {
                assert_ne!(wanted, "keys", "SOFTGPU_GUARD=keys: the processor or kernel has no protection keys");
                Guard::Idle
            },
            Guard::Keys,
        ),
    })
}

/// A new protection key, closed to the calling thread.
fn key() -> Option<i32> {
    if cfg!(not(target_arch = "x86_64")) {
        return None;
    }
    // SAFETY: the call only makes a key.
    let key = unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 1) } as i32;
    (key > 0).then_some(key)
}

/// Opens device memory to the calling thread and those that it starts.
pub fn open_to_this_thread() {
    set_key_rights(0);
}

/// Closes it again, while a function of the host runs on a thread of the engine.
pub fn close_to_this_thread() {
    set_key_rights(1);
}

fn set_key_rights(denied: u32) {
    let Guard::Keys(key) = guard() else { return };
    // SAFETY: a processor that gave a key has these instructions; only the bits of that key change.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        let mut rights: u32;
        std::arch::asm!("rdpkru", out("eax") rights, in("ecx") 0, out("edx") _);
        rights = (rights & !(3 << (2 * key))) | denied << (2 * key);
        std::arch::asm!("wrpkru", in("eax") rights, in("ecx") 0, in("edx") 0);
    }
}

/// Protects new pages, before anyone knows their address.
pub fn protect_new(at: usize, bytes: usize, is_open: bool) {
    // SAFETY: the pages are a mapping of the caller.
    unsafe {
        match guard() {
            Guard::Keys(key) => {
                libc::syscall(libc::SYS_pkey_mprotect, at, bytes, libc::PROT_READ | libc::PROT_WRITE, key);
            }
            Guard::Idle if !is_open => {
                libc::mprotect(at as _, bytes, libc::PROT_NONE);
            }
            _ => {}
        }
    }
}

/// Before the engine works.
pub fn open() {
    set_open(true);
}

/// When the engine has nothing to do.
pub fn close() {
    set_open(false);
}

fn set_open(open: bool) {
    if guard() != Guard::Idle {
        return;
    }
    let mut pieces = pieces();
    if pieces.is_open != open {
        pieces.is_open = open;
        set_all(&pieces, if open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE });
    }
}

fn set_all(pieces: &Pieces, protection: i32) {
    for p in pieces.by_start.values().filter(|p| p.is_live_device()) {
        let (at, bytes) = (p.map + super::GUARD, p.mapped_bytes - 2 * super::GUARD);
        // SAFETY: pages of a live allocation of this library.
        unsafe { libc::mprotect(at as _, bytes, protection) };
    }
}
