//! What is launched and not done, and in which order a device runs it.

use super::communicator::{Communicator, place};
use super::host;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// A launch. It lasts until its operations are done, or given up with the stream.
pub struct Ticket {
    number: u64,
}

/// What is known of a launch while it lasts.
pub struct Launch {
    communicator: Weak<Communicator>,
    id: u64,
    device: u32,
    number: u64,
    /// Number of its first collective in the communicator, if it has one.
    first: Option<u64>,
    has_begun: bool,
}

#[derive(Default)]
struct Launches {
    last: u64,
    by_number: BTreeMap<u64, Launch>,
    /// By device: the launch that it runs, if it runs one at a time.
    running: BTreeMap<u32, u64>,
}

static LAUNCHES: Mutex<Launches> =
    Mutex::new(Launches { last: 0, by_number: BTreeMap::new(), running: BTreeMap::new() });

fn launches() -> MutexGuard<'static, Launches> {
    LAUNCHES.lock().expect("nothing panics here")
}

/// Whether devices run one operation at a time.
fn is_strict() -> bool {
    host::setting("SOFTGPU_NCCL_ORDER", 0) == 1
}

fn is_by_launch() -> bool {
    // The variable exists since 2.26.
    host::version() >= 22_600 && std::env::var("NCCL_LAUNCH_ORDER_IMPLICIT").is_ok_and(|v| v == "1")
}

impl Launch {
    pub fn is_of(&self, communicator: u64) -> bool {
        self.id == communicator
    }

    pub fn is_on(&self, device: u32) -> bool {
        self.device == device
    }

    pub fn is_before(&self, number: u64) -> bool {
        self.number < number
    }
}

impl Ticket {
    /// A new launch with this many collectives.
    pub fn new(communicator: &Arc<Communicator>, n_collectives: u64) -> Ticket {
        let launched = &communicator.shared.rank(communicator.rank).launched;
        let first = launched.fetch_add(n_collectives, SeqCst);
        let mut launches = launches();
        launches.last += 1;
        let number = launches.last;
        let launch = Launch {
            communicator: Arc::downgrade(communicator),
            id: communicator.id,
            device: communicator.device,
            number,
            first: (n_collectives > 0).then_some(first),
            has_begun: false,
        };
        launches.by_number.insert(number, launch);
        Ticket { number }
    }

    pub fn is_before(&self, number: u64) -> bool {
        self.number < number
    }

    /// The number of the next launch.
    pub fn next() -> u64 {
        launches().last + 1
    }

    /// Whether there is such a launch.
    pub fn exists(is_it: impl Fn(&Launch) -> bool) -> bool {
        launches().by_number.values().any(is_it)
    }

    /// Whether the device may run it now. From the first success on it runs.
    pub fn may_run(&self, device: u32) -> bool {
        let mut launches = launches();
        if is_strict() {
            let is_free = launches.running.get(&device).is_none_or(|number| *number == self.number);
            let is_earlier = |launch: &Launch| launch.is_on(device) && launch.number < self.number;
            let is_next = !is_by_launch() || !launches.by_number.values().any(is_earlier);
            if !is_free || !is_next {
                return false;
            }
            launches.running.insert(device, self.number);
        }
        if let Some(launch) = launches.by_number.get_mut(&self.number) {
            launch.has_begun = true;
        }
        true
    }

    /// Looks for a peer that waits for this device in another communicator, while this launch, whose collective number
    /// `seq` has begun, waits for the peer.
    pub fn violation(&self, communicator: &Communicator, seq: u64) -> Option<String> {
        if !is_strict() {
            return None;
        }
        let own = place(communicator.device);
        let waits =
            |launch: &&Launch| launch.is_on(communicator.device) && !launch.has_begun && !launch.is_of(communicator.id);
        let behind: Vec<(Arc<Communicator>, u64)> =
            launches().by_number.values().filter(waits).filter_map(|l| l.communicator.upgrade().zip(l.first)).collect();
        for rank in communicator.ranks() {
            let peer = communicator.shared.rank(rank);
            let (launched, begun, there) =
                (peer.launched.load(SeqCst), peer.begun.load(SeqCst), peer.place.load(SeqCst));
            if there == own || launched <= seq || begun > seq {
                continue;
            }
            for (other, first) in &behind {
                let is_it = |r: &usize| {
                    let words = other.shared.rank(*r);
                    words.place.load(SeqCst) == there && words.begun.load(SeqCst) > *first
                };
                if let Some(theirs) = other.ranks().find(is_it) {
                    let (a, x) = (communicator.rank, other.rank);
                    return Some(format!(
                        "operations in different orders: rank {a} of communicator {} runs its collective {seq} before \
                         collective {first} of communicator {}, where it is rank {x}; rank {rank} of the former, rank \
                         {theirs} of the latter, runs them the other way round",
                        communicator.id, other.id
                    ));
                }
            }
        }
        None
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut launches = launches();
        launches.running.retain(|_, number| *number != self.number);
        launches.by_number.remove(&self.number);
    }
}
