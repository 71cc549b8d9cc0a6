//! The C functions, by the names and signatures of nccl.h.

use super::arithmetic::{DType, Reduction};
use super::collective::{Collective, Descriptor, Kind};
use super::communicator::{Communicator, find};
use super::group::{self, Operation};
use super::transfer::Transfer;
use super::{Code, IN_PROGRESS, INVALID_ARGUMENT, LAST, SUCCESS, abort, host, refuse};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{SystemTime, UNIX_EPOCH};

type P = *mut c_void;

/// An `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// The first fields of an `ncclConfig_t`.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

const MAGIC: u32 = 0xcafe_beef;
fn put<T>(at: *mut T, value: T) -> Result<(), Code> {
    if at.is_null() {
        return Err(refuse(INVALID_ARGUMENT, "a result has no place: null pointer"));
    }
    // SAFETY: the caller gives a place for a result of this type.
    unsafe { at.write(value) };
    Ok(())
}

fn code(outcome: Result<(), Code>) -> Code {
    outcome.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetVersion(version: *mut c_int) -> Code {
    code(put(version, host::version() as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(at: *mut UniqueId) -> Code {
    static IDS: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64);
    let name = format!("/softgpu-nccl-{}-{}-{now:x}", std::process::id(), IDS.fetch_add(1, SeqCst));
    let mut id = [0; 128];
    id[..name.len()].copy_from_slice(name.as_bytes());
    code(put(at, UniqueId(id)))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRank(at: *mut P, n_ranks: c_int, id: UniqueId, rank: c_int) -> Code {
    init(at, n_ranks, id, rank, true)
}

/// # Safety
/// `config` is null or a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    at: *mut P,
    n_ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> Code {
    // SAFETY: the caller's contract.
    let config = unsafe { config.as_ref() };
    if config.is_some_and(|c| c.magic != MAGIC || c.size < size_of::<Config>()) {
        return refuse(INVALID_ARGUMENT, "the configuration is not initialised with NCCL_CONFIG_INITIALIZER");
    }
    init(at, n_ranks, id, rank, config.is_none_or(|c| c.blocking != 0))
}

fn init(at: *mut P, n_ranks: c_int, id: UniqueId, rank: c_int, is_blocking: bool) -> Code {
    crate::settings::take_changes();
    crate::settings::reach("connect");
    group::within(|| {
        let name = CStr::from_bytes_until_nul(&id.0).ok().filter(|name| name.to_bytes().starts_with(b"/softgpu-nccl-"));
        let name = name.ok_or_else(|| refuse(INVALID_ARGUMENT, "not a unique id"))?;
        put(at, std::ptr::null_mut())?;
        let communicator = Communicator::join(CString::from(name), n_ranks, rank, is_blocking)?;
        put(at, communicator.handle() as P)?;
        group::add_new(communicator);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(comm: P, at: *mut Code) -> Code {
    code(find(comm as usize).and_then(|c| put(at, c.look())))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(comm: P, at: *mut c_int) -> Code {
    code(find(comm as usize).and_then(|c| put(at, c.n_ranks as c_int)))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(comm: P, at: *mut c_int) -> Code {
    code(find(comm as usize).and_then(|c| put(at, c.rank as c_int)))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCuDevice(comm: P, at: *mut c_int) -> Code {
    code(find(comm as usize).and_then(|c| put(at, c.device as c_int)))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: P) -> Code {
    let finalize = |c: std::sync::Arc<Communicator>| {
        abort::finalize(&c)?;
        match if c.is_blocking { c.settle() } else { c.look() } {
            SUCCESS => Ok(()),
            other => Err(other),
        }
    };
    code(find(comm as usize).and_then(finalize))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: P) -> Code {
    if comm.is_null() {
        return SUCCESS;
    }
    find(comm as usize).map_or_else(|code| code, |c| abort::destroy(&c))
}

/// Its operations end at once; the rest waits for the end of the group.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: P) -> Code {
    if comm.is_null() {
        return SUCCESS;
    }
    group::within(|| {
        let communicator = find(comm as usize)?;
        communicator.is_aborted.store(true, SeqCst);
        communicator.ensure_ready();
        group::add_abort(communicator);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommRevoke(comm: P, flags: c_int) -> Code {
    if flags != 0 {
        return refuse(INVALID_ARGUMENT, "flags of ncclCommRevoke must be 0");
    }
    let revoke = |c: std::sync::Arc<Communicator>| {
        abort::revoke(&c)?;
        match if c.is_blocking { c.settle() } else { c.look() } {
            IN_PROGRESS => Err(IN_PROGRESS),
            _ => Ok(()),
        }
    };
    code(find(comm as usize).and_then(revoke))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    let text = match code {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_: P) -> *const c_char {
    LAST.lock().expect("nothing panics here").as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> Code {
    group::start();
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> Code {
    group::end()
}

/// What all operations have: type, root or peer, reduction, count.
struct Call {
    kind: Kind,
    dtype: c_int,
    reduction: c_int,
    root: c_int,
    count: usize,
}

impl Call {
    fn new(kind: Kind, dtype: c_int, count: usize) -> Call {
        Call { kind, dtype, reduction: 0, root: 0, count }
    }

    fn descriptor(&self, n_ranks: usize) -> Result<Descriptor, Code> {
        let invalid = |what: &str, value: c_int| refuse(INVALID_ARGUMENT, &format!("{what} {value} is not valid here"));
        let dtype = DType::of(self.dtype).ok_or_else(|| invalid("data type", self.dtype))?;
        let reduction = Reduction::of(self.reduction).ok_or_else(|| invalid("reduction", self.reduction))?;
        let root =
            usize::try_from(self.root).ok().filter(|r| *r < n_ranks).ok_or_else(|| invalid("rank", self.root))?;
        Ok(Descriptor { kind: self.kind, dtype, reduction, root, count: self.count })
    }

    /// Adds a collective whose operands have `sent` and `received` times `count` elements, or no operand for 0.
    fn collective(&self, send: P, recv: P, comm: P, stream: P) -> Code {
        group::within(|| {
            let c = find(comm as usize)?;
            let what = self.descriptor(c.n_ranks)?;
            let is_root = !group::has_root(self.kind) || what.root == c.rank;
            let (sent, received) = match self.kind {
                Kind::AllReduce | Kind::Message => (1, 1),
                Kind::ReduceScatter => (c.n_ranks, 1),
                Kind::AllGather => (1, c.n_ranks),
                Kind::AlltoAll => (c.n_ranks, c.n_ranks),
                Kind::Broadcast => (usize::from(is_root), 1),
                Kind::Reduce => (1, usize::from(is_root)),
            };
            let width = what.dtype.bytes();
            check(send as usize, sent * self.count * width)?;
            check(recv as usize, received * self.count * width)?;
            let collective = Collective::new(what, send as usize, recv as usize);
            group::add(&c, stream as u64, Operation::Collective(collective))
        })
    }

    fn transfer(&self, memory: P, is_send: bool, peer: c_int, comm: P, stream: P) -> Code {
        group::within(|| {
            let c = find(comm as usize)?;
            let checked = Call { root: peer, ..*self }.descriptor(c.n_ranks)?;
            check(memory as usize, self.count * checked.dtype.bytes())?;
            let what = Descriptor { root: 0, ..checked };
            let transfer = Transfer::new(what, checked.root, is_send, memory as usize);
            group::add(&c, stream as u64, Operation::Transfer(transfer))
        })
    }
}

fn check(address: usize, bytes: usize) -> Result<(), Code> {
    if host::is_accessible(address, bytes) {
        return Ok(());
    }
    Err(refuse(INVALID_ARGUMENT, &format!("{bytes} bytes at {address:#x} are not memory of a device")))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(send: P, recv: P, count: usize, dtype: c_int, op: c_int, comm: P, stream: P) -> Code {
    Call { reduction: op, ..Call::new(Kind::AllReduce, dtype, count) }.collective(send, recv, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    send: P,
    recv: P,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: P,
    stream: P,
) -> Code {
    Call { reduction: op, ..Call::new(Kind::ReduceScatter, dtype, count) }.collective(send, recv, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    send: P,
    recv: P,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    comm: P,
    stream: P,
) -> Code {
    Call { reduction: op, root, ..Call::new(Kind::Reduce, dtype, count) }.collective(send, recv, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(send: P, recv: P, count: usize, dtype: c_int, comm: P, stream: P) -> Code {
    Call::new(Kind::AllGather, dtype, count).collective(send, recv, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAlltoAll(send: P, recv: P, count: usize, dtype: c_int, comm: P, stream: P) -> Code {
    Call::new(Kind::AlltoAll, dtype, count).collective(send, recv, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(send: P, recv: P, count: usize, dtype: c_int, root: c_int, comm: P, stream: P) -> Code {
    Call { root, ..Call::new(Kind::Broadcast, dtype, count) }.collective(send, recv, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(send: P, count: usize, dtype: c_int, peer: c_int, comm: P, stream: P) -> Code {
    Call::new(Kind::Message, dtype, count).transfer(send, true, peer, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(recv: P, count: usize, dtype: c_int, peer: c_int, comm: P, stream: P) -> Code {
    Call::new(Kind::Message, dtype, count).transfer(recv, false, peer, comm, stream)
}
