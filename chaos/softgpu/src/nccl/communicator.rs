//! Communicators: one rank's view of a group, and its initialisation.

use super::job::Pending;
use super::order::Ticket;
use super::shared::{RANKS_MAX, Shared};
use super::{
    Code, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS, SYSTEM_ERROR, UNHANDLED_CUDA_ERROR,
    host, refuse,
};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// One rank of a communicator.
pub struct Communicator {
    pub id: u64,
    pub shared: Shared,
    pub rank: usize,
    pub n_ranks: usize,
    pub device: u32,
    pub is_blocking: bool,
    pub is_aborted: AtomicBool,
    pub is_finalized: AtomicBool,
    /// Operations with a smaller ticket end at once; 0: not revoked.
    pub revoked_before: AtomicU64,
    /// Chunks of collectives done.
    pub turn: AtomicU64,
    /// Collectives begun.
    pub n_collectives: AtomicU64,
    /// Messages begun, to and from each rank.
    pub n_sends: [AtomicU64; RANKS_MAX],
    pub n_receives: [AtomicU64; RANKS_MAX],
    /// Launches, and whether one of them is late.
    pub n_launches: AtomicU64,
    pub is_late: AtomicBool,
    /// The job of its last group of calls.
    pub pending: Pending,
    /// Held by every graph that captured the communicator.
    pub captured: Arc<()>,
    /// The result of the initialisation: success, an error, or `ncclInProgress`.
    initialized: AtomicU32,
    failed: AtomicU32,
    created: Instant,
}

/// All communicators, by handle.
static ALL: Mutex<BTreeMap<usize, Arc<Communicator>>> = Mutex::new(BTreeMap::new());

fn all() -> MutexGuard<'static, BTreeMap<usize, Arc<Communicator>>> {
    ALL.lock().expect("nothing panics here")
}

/// Handles are recognisable, and not used twice.
const FIRST_HANDLE: usize = 0xcc1_0000_0000;

/// The communicator of a handle.
pub fn find(handle: usize) -> Result<Arc<Communicator>, Code> {
    let found = all().get(&handle).cloned();
    found.ok_or_else(|| refuse(INVALID_ARGUMENT, &format!("{handle:#x} is not a communicator, or is one no more")))
}

/// Forgets a communicator; its handle is invalid from now on.
pub fn remove(communicator: &Communicator) {
    all().remove(&communicator.handle());
}

/// Allocations of this process since the planted failure was set.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Counts from now on.
pub fn restart_count() {
    ALLOCATIONS.store(0, SeqCst);
}

/// Allocates buffers of a communicator, which fails if the settings say so.
fn allocate() -> Result<(), Code> {
    if ALLOCATIONS.fetch_add(1, SeqCst) + 1 == host::setting("SOFTGPU_NCCL_ALLOC_FAIL", 0) {
        return Err(refuse(UNHANDLED_CUDA_ERROR, "Cuda failure 2 'out of memory'"));
    }
    Ok(())
}

impl Communicator {
    /// Joins the communicator of a unique id. Returns at once.
    pub fn join(name: CString, n_ranks: i32, rank: i32, is_blocking: bool) -> Result<Arc<Communicator>, Code> {
        let device = host::current_device().map_err(|_| refuse(INVALID_USAGE, "no current device"))?;
        let valid = 1..=RANKS_MAX as i32;
        if !valid.contains(&n_ranks) || !(0..n_ranks).contains(&rank) {
            return Err(refuse(INVALID_ARGUMENT, &format!("rank {rank} of {n_ranks}; at most {RANKS_MAX} ranks")));
        }
        let cannot = || refuse(SYSTEM_ERROR, "cannot open shared memory");
        let shared = Shared::open(name).ok_or_else(cannot)?;
        let words = shared.rank(rank as usize);
        words.host.store(host_hash(), SeqCst);
        words.device.store(host::physical(device), SeqCst);
        words.place.store(place(device), SeqCst);
        let allocated = allocate();
        // Peers wait for a rank without memory.
        if allocated.is_ok() && words.joined.swap(n_ranks as u64, SeqCst) != 0 {
            return Err(refuse(INVALID_USAGE, &format!("rank {rank} has joined twice with one unique id")));
        }
        static IDS: AtomicU64 = AtomicU64::new(0);
        let communicator = Arc::new(Communicator {
            id: IDS.fetch_add(1, SeqCst),
            shared,
            rank: rank as usize,
            n_ranks: n_ranks as usize,
            device,
            is_blocking,
            is_aborted: AtomicBool::new(false),
            is_finalized: AtomicBool::new(false),
            revoked_before: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            n_collectives: AtomicU64::new(0),
            n_sends: [const { AtomicU64::new(0) }; RANKS_MAX],
            n_receives: [const { AtomicU64::new(0) }; RANKS_MAX],
            n_launches: AtomicU64::new(0),
            is_late: AtomicBool::new(false),
            pending: Pending::default(),
            captured: Arc::new(()),
            initialized: AtomicU32::new(IN_PROGRESS),
            failed: AtomicU32::new(allocated.err().unwrap_or(SUCCESS)),
            created: Instant::now(),
        });
        all().insert(communicator.handle(), communicator.clone());
        Ok(communicator)
    }

    pub fn handle(&self) -> usize {
        FIRST_HANDLE + 0x40 * self.id as usize
    }

    pub fn ranks(&self) -> std::ops::Range<usize> {
        0..self.n_ranks
    }

    /// How far the initialisation is.
    pub fn initialization(&self) -> Code {
        let known = self.initialized.load(SeqCst);
        if known != IN_PROGRESS
            || self.created.elapsed() < Duration::from_millis(host::setting("SOFTGPU_NCCL_INIT_MS", 0))
        {
            return known;
        }
        let joined: Vec<u64> = self.ranks().map(|rank| self.shared.rank(rank).joined.load(SeqCst)).collect();
        let other = joined.iter().position(|n| *n != 0 && *n != self.n_ranks as u64);
        let outcome = if let Some(other) = other {
            let (rank, n, theirs) = (self.rank, self.n_ranks, joined[other]);
            refuse(INVALID_USAGE, &format!("rank {rank} was told of {n} ranks, rank {other} of {theirs}"))
        } else if joined.contains(&0) {
            return IN_PROGRESS;
        } else {
            self.shared.unlink();
            self.check_devices()
        };
        // Several threads may come here; the first outcome stands, and all are equal.
        self.initialized.store(outcome, SeqCst);
        outcome
    }

    /// As NCCL, refuses two ranks on one device. Before 2.30 a rank compares others with itself only: a rank with a device of
    /// its own waits for those that have left.
    fn check_devices(&self) -> Code {
        if std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|v| v == "1") {
            return SUCCESS;
        }
        let of = |rank: usize| {
            let words = self.shared.rank(rank);
            (words.host.load(SeqCst), words.device.load(SeqCst))
        };
        let mut outcome = SUCCESS;
        for a in self.ranks() {
            if let Some(b) = (a + 1..self.n_ranks).find(|b| of(a) == of(*b)) {
                let device = of(a).1;
                if host::version() < 23_000 && of(self.rank) != of(a) {
                    outcome = IN_PROGRESS;
                    continue;
                }
                return refuse(
                    INVALID_USAGE,
                    &format!("duplicate GPU detected: rank {a} and rank {b} both on device {device}"),
                );
            }
        }
        outcome
    }

    /// The state that `ncclCommGetAsyncError` reports.
    pub fn state(&self) -> Code {
        let failed = self.failed.load(SeqCst);
        let initialization = self.initialization();
        if failed != SUCCESS {
            return failed;
        }
        if initialization == SUCCESS && host::setting("SOFTGPU_NCCL_FAIL", 0) == 1 {
            return REMOTE_ERROR;
        }
        if initialization != SUCCESS {
            return initialization;
        }
        let is_finalizing = || {
            let is_final = |rank| self.shared.rank(rank).finalized.load(SeqCst) != 0;
            self.is_finalized.load(SeqCst) && (!self.ranks().all(is_final) || Ticket::exists(|t| t.is_of(self.id)))
        };
        if self.is_late.load(SeqCst) || is_finalizing() || self.is_revoking() { IN_PROGRESS } else { SUCCESS }
    }

    /// The state, as `ncclCommGetAsyncError` looks at it: success completes the pending job.
    pub fn look(&self) -> Code {
        let state = self.state();
        if state == SUCCESS {
            self.pending.complete();
        }
        state
    }

    /// Ends the pending job if the communicator is aborted or being revoked, and else looks at the state.
    pub fn ensure_ready(&self) -> Code {
        if self.is_aborted.load(SeqCst) || self.is_revoking() {
            self.pending.abort();
            return SUCCESS;
        }
        self.look()
    }

    /// Whether operations are under way that a revoke has told to end.
    fn is_revoking(&self) -> bool {
        let before = self.revoked_before.load(SeqCst);
        before > 0 && Ticket::exists(|t| t.is_of(self.id) && t.is_before(before))
    }

    /// Connects to its peers with the first launch, which needs memory; returns the number of this launch, from 0.
    pub fn count_launch(&self) -> Result<u64, Code> {
        let number = self.n_launches.fetch_add(1, SeqCst);
        if number == 0 {
            allocate().inspect_err(|code| self.failed.store(*code, SeqCst))?;
        }
        Ok(number)
    }

    /// A planted failure of the network.
    pub fn fail(&self) {
        self.failed.store(REMOTE_ERROR, SeqCst);
    }

    /// Waits until the state is no longer `ncclInProgress`, or the communicator is aborted.
    pub fn settle(&self) -> Code {
        loop {
            let state = if self.is_aborted.load(SeqCst) { REMOTE_ERROR } else { self.state() };
            if state != IN_PROGRESS {
                return state;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Whether operations of this ticket end at once.
    pub fn has_stopped(&self, ticket: &Ticket) -> bool {
        self.is_aborted.load(SeqCst) || ticket.is_before(self.revoked_before.load(SeqCst))
    }

    /// Refuses operations that NCCL refuses.
    pub fn check_usable(&self) -> Result<(), Code> {
        if self.is_aborted.load(SeqCst) || self.is_finalized.load(SeqCst) || self.revoked_before.load(SeqCst) > 0 {
            return Err(refuse(INVALID_USAGE, "an operation of a communicator that was revoked, finalized or aborted"));
        }
        match self.ensure_ready() {
            SUCCESS => Ok(()),
            IN_PROGRESS => {
                let text = "attempt to use a communicator before the previous operation returned ncclSuccess";
                Err(refuse(INVALID_ARGUMENT, text))
            }
            code => Err(code),
        }
    }
}

/// Identifies the machine, as NCCL does: `NCCL_HOSTID` stands for another one.
fn host_hash() -> u64 {
    let id = std::env::var("NCCL_HOSTID").or_else(|_| std::fs::read_to_string("/proc/sys/kernel/random/boot_id"));
    BuildHasherDefault::<DefaultHasher>::new().hash_one(id.unwrap_or_default())
}

/// Identifies a device of this process among those of all processes of the machine.
pub fn place(device: u32) -> u64 {
    (u64::from(std::process::id()) << 8) | u64::from(device)
}
