//! Connecting: the members of a group agree on NCCL over the host communicator, and initialise it.
//!
//! All members do the same operations on the host communicator, so that a failure of one is known to all, and an abort of
//! the host communicator ends the initialisation.

use super::NcclCommunicator;
use super::member::Member;
use crate::gpu::Gpu;
use crate::library::nccl::{Comm, Config, IN_PROGRESS, INVALID_USAGE, UNHANDLED_CUDA_ERROR, UniqueId};
use crate::library::{LibraryError, Nccl};
use crate::staged::{Staged, failed};
use phalanx_device::descriptor::digest;
use phalanx_device::{Collective, CollectiveError, SliceOperations};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Which communicator of device operands to use; equal at all members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// NCCL where all members have the same version of it and GPUs of their own, else copies in host memory.
    #[default]
    Best,
    /// The same, but members that share a GPU try NCCL too, because its settings may permit that. One such member suffices.
    BestOfAny,
    /// NCCL, or an error.
    Nccl,
    /// Copies in host memory.
    Staged,
}

/// The first and the longest pause between two looks at the state of the initialisation.
const PAUSE: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(10)];

/// A communicator for device operands of `gpu`, for the group of `host`.
///
/// # Errors
/// Those of the host communicator; [`CollectiveError::Library`] where NCCL is required, or fails at one member only.
pub(crate) fn connect(
    gpu: &Arc<Gpu>,
    library: impl FnOnce() -> Result<&'static Nccl, LibraryError>,
    mut host: Box<dyn Collective>,
    choice: Choice,
) -> Result<Box<dyn Collective>, CollectiveError> {
    if choice == Choice::Staged {
        return Ok(Box::new(Staged::new(gpu.clone(), host)));
    }
    let is_required = choice == Choice::Nccl;
    let (sharing, is_tried) = sharing(gpu, &mut *host, choice != Choice::Best)?;
    if let Some(pair) = sharing.filter(|_| !is_tried) {
        // NCCL would refuse it only after all members have loaded it and met.
        return Ok(staged_for(gpu, host, pair));
    }
    let library = library();
    let versions = gathered(&mut *host, library.as_ref().map_or(0, |nccl| nccl.version()))?;
    let nccl = match of_all(library, &versions) {
        Ok(nccl) => nccl,
        Err(reason) if is_required => return Err(CollectiveError::Library { call: "NCCL", reason }),
        Err(reason) => {
            if host.position() == 0 && gpu.tells_staging() {
                tracing::warn!(%reason, "ranks exchange tensors through host memory, which is slower than NCCL");
            }
            return Ok(Box::new(Staged::new(gpu.clone(), host)));
        }
    };
    let codes = match initialize(gpu, nccl, &mut *host)? {
        Ok(member) => {
            tracing::debug!(version = nccl.version(), size = host.size(), "collectives over NCCL");
            return Ok(Box::new(NcclCommunicator::new(gpu.clone(), host, member).map_err(|e| failed(&e))?));
        }
        Err(codes) => codes,
    };
    // Members with a GPU of their own may still wait for those that share one, or have lost their connection to them.
    match sharing.filter(|_| codes.contains(&(INVALID_USAGE as i32))) {
        Some([a, b]) if is_required => {
            let reason = format!("positions {a} and {b} share a GPU, which NCCL refuses");
            Err(CollectiveError::Library { call: "ncclCommInitRankConfig", reason })
        }
        Some(pair) => Ok(staged_for(gpu, host, pair)),
        None => Err(failure(gpu, nccl, &*host, &codes)),
    }
}

/// Makes a communicator; two of its members share a GPU.
fn staged_for(gpu: &Arc<Gpu>, host: Box<dyn Collective>, [a, b]: [usize; 2]) -> Box<dyn Collective> {
    tracing::info!(a, b, "ranks share a GPU, which NCCL refuses: collectives are copied through host memory");
    Box::new(Staged::new(gpu.clone(), host))
}

/// The library, if all members have the same version of it.
///
/// # Errors
/// Why they cannot use it, as a sentence.
fn of_all(library: Result<&'static Nccl, LibraryError>, versions: &[i32]) -> Result<&'static Nccl, String> {
    if let Some(without) = versions.iter().position(|version| *version <= 0) {
        return Err(match library {
            Err(error) => error.to_string(),
            Ok(_) => format!("position {without} has no NCCL"),
        });
    }
    if let Some(other) = versions.iter().position(|version| *version != versions[0]) {
        let [first, other_version] = [versions[0], versions[other]].map(version_text);
        return Err(format!("position 0 has NCCL {first} and position {other} has NCCL {other_version}"));
    }
    library.map_err(|error| error.to_string())
}

/// A version as users write it: 22809 is 2.28.9.
fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Two members whose processes use the same GPU, or parts of it, and whether a member tries NCCL all the same. Every member calls it.
fn sharing(gpu: &Gpu, host: &mut dyn Collective, tries: bool) -> Result<(Option<[usize; 2]>, bool), CollectiveError> {
    let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let own = digest(machine.bytes().chain(gpu.pci_address.bytes()).map(u64::from));
    let mut all = vec![0; 3 * host.size() as usize];
    host.all_gather(&[own as i32, (own >> 32) as i32, i32::from(tries)], &mut all, 3)?;
    let all: Vec<(&[i32], bool)> = all.chunks(3).map(|of_one| (&of_one[..2], of_one[2] != 0)).collect();
    let pair = |(a, of_a): (usize, &(&[i32], bool))| all[..a].iter().position(|of_b| of_b.0 == of_a.0).map(|b| [b, a]);
    Ok((all.iter().enumerate().find_map(pair), all.iter().any(|(_, tries)| *tries)))
}

/// The error of an initialisation that ended with these codes.
fn failure(gpu: &Gpu, nccl: &Nccl, host: &dyn Collective, codes: &[i32]) -> CollectiveError {
    let found = codes.iter().enumerate().find(|(_, code)| **code != 0 && **code != IN_PROGRESS as i32);
    let (position, code) = found.expect("one has failed");
    let own = host.position() as usize;
    let text = match *code {
        TOO_LONG => format!("not done after {} s", init_max(host.size()).as_secs()),
        NO_MEMORY => "the GPU is out of memory for NCCL's buffers".to_owned(),
        // What the library tells about its last error is about this member's.
        code if code == codes[own] => nccl.text(code as u32),
        code => nccl.meaning(code as u32),
    };
    if codes[own] == TOO_LONG {
        gpu.give_up();
    }
    let reason = format!("position {position}: {text}");
    CollectiveError::Library { call: "ncclCommInitRankConfig", reason }
}

/// Longest time for the initialisation of a communicator of this many members. A member whose NCCL is not done by then ends its
/// process. Members meet one after the other at the first of them.
fn init_max(size: u32) -> Duration {
    Duration::from_secs(20) + size * Duration::from_millis(500)
}

/// Rounds in which members wait for the outcome at others after one has failed: half a second.
const FAILED_ROUNDS_MAX: u32 = 50;

/// What a member reports whose initialisation has taken too long.
const TOO_LONG: i32 = -1;

/// What a member reports whose GPU has too little memory for the buffers of NCCL, which tells it only as text.
const NO_MEMORY: i32 = -2;

/// Initialises an NCCL communicator, or gives the codes of all members if one of them fails.
fn initialize(
    gpu: &Arc<Gpu>,
    nccl: &'static Nccl,
    host: &mut dyn Collective,
) -> Result<Result<Arc<Member>, Vec<i32>>, CollectiveError> {
    gpu.bind().map_err(|e| failed(&e))?;
    let (position, size) = (host.position(), host.size());
    let mut id = UniqueId([0; 128]);
    if position == 0 {
        // A failure leaves an invalid id, which every member's initialisation refuses.
        // SAFETY: a pointer to a local.
        unsafe { (nccl.ncclGetUniqueId)(&raw mut id) };
    }
    let mut words: [i32; 32] = std::array::from_fn(|i| i32::from_le_bytes(std::array::from_fn(|b| id.0[4 * i + b])));
    host.broadcast(&mut words, 0)?;
    id.0.iter_mut().zip(words.iter().flat_map(|word| word.to_le_bytes())).for_each(|(to, from)| *to = from);
    let (mut comm, config): (Comm, Config) = (std::ptr::null_mut(), Config::not_blocking());
    // SAFETY: pointers to locals; the GPU is current.
    let code =
        unsafe { (nccl.ncclCommInitRankConfig)(&raw mut comm, size as i32, id, position as i32, &raw const config) };
    let member = if comm.is_null() { None } else { Some(Member::new(gpu, nccl, comm).map_err(|e| failed(&e))?) };
    let outcome = agreed(nccl, comm, code, host);
    if !matches!(outcome, Ok(Ok(())))
        && let Some(member) = &member
    {
        member.abort("the communicator could not be initialised");
    }
    let absent = || CollectiveError::Library { call: "ncclCommInitRankConfig", reason: "no communicator".to_owned() };
    match outcome? {
        Ok(()) => member.ok_or_else(absent).map(Ok),
        Err(codes) => Ok(Err(codes)),
    }
}

/// Waits until the initialisation has succeeded at all members, or failed at one.
fn agreed(
    nccl: &Nccl,
    comm: Comm,
    first: u32,
    host: &mut dyn Collective,
) -> Result<Result<(), Vec<i32>>, CollectiveError> {
    let (mut pause, give_up, mut n_failed) = (PAUSE[0], Instant::now() + init_max(host.size()), 0);
    loop {
        // The call returns success also for what has not happened yet.
        let state = if first == 0 || first == IN_PROGRESS { async_error(nccl, comm) } else { first };
        let own = match state {
            IN_PROGRESS if Instant::now() > give_up => TOO_LONG,
            UNHANDLED_CUDA_ERROR if nccl.last_error().contains("out of memory") => NO_MEMORY,
            state => state as i32,
        };
        let codes = gathered(host, own)?;
        if codes.iter().all(|code| *code == 0) {
            return Ok(Ok(()));
        }
        // Members count rounds, not time, so that all return in the same one.
        n_failed += u32::from(codes.iter().any(|code| *code != 0 && *code != IN_PROGRESS as i32));
        let is_known = codes.iter().all(|code| *code != IN_PROGRESS as i32);
        if n_failed > 0 && is_known || n_failed > FAILED_ROUNDS_MAX {
            return Ok(Err(codes));
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSE[1]);
    }
}

/// The state of a communicator whose initialisation has begun.
fn async_error(nccl: &Nccl, comm: Comm) -> u32 {
    let mut state = 0;
    // SAFETY: the communicator exists, and the pointer is to a local.
    let code = unsafe { (nccl.ncclCommGetAsyncError)(comm, &raw mut state) };
    if code == 0 { state } else { code }
}

/// The numbers of all members.
fn gathered(host: &mut dyn Collective, own: i32) -> Result<Vec<i32>, CollectiveError> {
    let mut all = vec![0; host.size() as usize];
    host.all_gather(&[own], &mut all, 1)?;
    Ok(all)
}
