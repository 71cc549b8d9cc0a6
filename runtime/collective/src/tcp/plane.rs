//! The connections of one rank and their threads: one reader and one writer per connection.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::commands::{WriterCommand, WriterQueue};
use super::connect::Sockets;
use super::frame::{CHUNK_BYTES, FrameKind, Header, REASON_BYTES};
use super::group::SharedGroup;
use super::job::Job;
use crate::engine::HasWakeup;
use crate::shm::control::Control;
use phalanx_device::CollectiveError;
use phalanx_device::parts::part;
use phalanx_device::world::World;

/// Longest wait for the first connection to explain why another connection broke.
const EXPLAIN_MAX: Duration = Duration::from_millis(100);

/// The connections to one peer.
#[derive(Debug)]
struct Link {
    sockets: Vec<TcpStream>,
    /// Queues of the writers, in the same order. The first connection is for announcements.
    commands: Vec<Arc<WriterQueue>>,
    has_left: AtomicBool,
}

/// One rank's side of all connections.
pub(super) struct TcpPlane {
    world: World,
    rank: u32,
    wakeup: Arc<dyn HasWakeup>,
    /// Control memory that is aborted together with this world.
    control: Option<Arc<Control>>,
    /// See [`TcpConfig::damages_next`](super::connect::TcpConfig::damages_next).
    pub(super) damages_next: Arc<AtomicBool>,
    /// The reason, and the lost rank, if a lost rank is the reason.
    aborted: OnceLock<(String, Option<u32>)>,
    links: BTreeMap<u32, Link>,
    groups: BTreeMap<usize, Arc<SharedGroup>>,
}

impl std::fmt::Debug for TcpPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpPlane").field("rank", &self.rank).field("aborted", &self.aborted).finish_non_exhaustive()
    }
}

impl TcpPlane {
    /// Starts the threads that serve the connections of `rank`.
    ///
    /// # Errors
    /// [`CollectiveError::System`] if a thread is refused.
    pub(super) fn start(
        world: World,
        rank: u32,
        sockets: Sockets,
        wakeup: Arc<dyn HasWakeup>,
        control: Option<Arc<Control>>,
        damages_next: Arc<AtomicBool>,
    ) -> Result<Arc<TcpPlane>, CollectiveError> {
        let io = |call| move |error: std::io::Error| CollectiveError::io(call, &error);
        let groups = (0..world.groups().len()).filter_map(|group| {
            let (members, position) = world.membership(group, rank).ok()?;
            Some((group, Arc::new(SharedGroup::new(group, members, position))))
        });
        let groups = groups.collect();
        let (mut links, mut served) = (BTreeMap::new(), Vec::new());
        for (peer, sockets) in sockets {
            let mut commands = Vec::new();
            for (number, socket) in sockets.iter().enumerate() {
                let of_writer = Arc::new(WriterQueue::default());
                commands.push(of_writer.clone());
                let clone = || socket.try_clone().map_err(io("dup"));
                served.push((peer, number, clone()?, clone()?, of_writer));
            }
            links.insert(peer, Link { sockets, commands, has_left: AtomicBool::new(false) });
        }
        let aborted = OnceLock::new();
        let plane = Arc::new(TcpPlane { world, rank, wakeup, control, damages_next, aborted, links, groups });
        for (peer, number, reading, writing, commands) in served {
            let (reader, writer) = (plane.clone(), plane.clone());
            let spawn = |what: &str| std::thread::Builder::new().name(format!("tcp-{what}-{rank}-{peer}.{number}"));
            spawn("read").spawn(move || reader.read(peer, number == 0, reading)).map_err(io("clone"))?;
            spawn("write").spawn(move || writer.write(peer, writing, &commands)).map_err(io("clone"))?;
        }
        Ok(plane)
    }

    pub(super) fn world(&self) -> &World {
        &self.world
    }

    /// The name of this rank in errors.
    pub(super) fn name(&self) -> u32 {
        self.world.name_of(self.rank)
    }

    /// A group of this rank.
    ///
    /// # Errors
    /// [`CollectiveError::NotAMember`].
    pub(super) fn group(&self, group: usize) -> Result<&Arc<SharedGroup>, CollectiveError> {
        let n_groups = self.world.groups().len();
        self.groups.get(&group).ok_or(CollectiveError::NotAMember { rank: self.rank, group, n_groups })
    }

    /// The members of a group of this rank, and its position.
    ///
    /// # Errors
    /// [`CollectiveError::NotAMember`].
    pub(super) fn membership(&self, group: usize) -> Result<(Vec<u32>, u32), CollectiveError> {
        self.world.membership(group, self.rank).map(|(members, position)| (members.to_vec(), position))
    }

    /// The error that every call returns once the world is aborted.
    pub(super) fn aborted(&self) -> Option<CollectiveError> {
        if let Some(error) = self.control.as_ref().and_then(|control| control.aborted())
            && self.aborted.get().is_none()
        {
            let CollectiveError::Aborted { reason, .. } = &error else { return Some(error) };
            self.abort(reason);
        }
        self.aborted.get().map(|(reason, lost)| CollectiveError::Aborted { reason: reason.clone(), lost: *lost })
    }

    /// Aborts the world here and at all peers, which forward the abort to theirs. The first reason stands. Never waits.
    pub(super) fn abort(&self, reason: &str) {
        self.abort_since(reason, None);
    }

    pub(super) fn abort_since(&self, reason: &str, lost: Option<u32>) {
        if self.aborted.set((reason.to_owned(), lost)).is_err() {
            return;
        }
        if let Some(control) = &self.control {
            control.abort(reason);
        }
        let body = reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES)].to_vec();
        for link in self.links.values() {
            let header = Header { len: body.len() as u32, ..Header::bare(FrameKind::Abort, self.world.id()) };
            // A writer that has ended needs no command.
            link.commands[0].push(WriterCommand::Last(header, body.clone()));
            for (socket, commands) in link.sockets.iter().zip(&link.commands).skip(1) {
                commands.push(WriterCommand::Stop);
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
        self.wakeup.wakeup().wake_always();
    }

    /// Aborts one group here and at its other members. The first reason stands. Never waits for a member.
    pub(super) fn abort_group(&self, group: usize, reason: &str) {
        let Some(shared) = self.groups.get(&group) else { return };
        let mut state = shared.lock();
        if !state.abort() {
            return;
        }
        let body = &reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES)];
        let header = Header { group: group as u32, ..Header::bare(FrameKind::AbortGroup, self.world.id()) };
        for rank in self.world.groups()[group].iter().filter(|rank| **rank != self.rank) {
            self.announce(*rank, header, |to| to.extend_from_slice(body));
        }
        state.fail(CollectiveError::aborted(reason));
        drop(state);
        shared.gate.pass();
        self.wakeup.wakeup().wake_always();
    }

    /// Releases the memory of all operations: no thread touches it after this, so callers may free operands of a failed
    /// operation.
    pub(super) fn release_operands(&self, error: &CollectiveError) {
        self.groups.values().for_each(|group| group.fail(error.clone()));
    }

    /// Tells all peers that this rank has finished all operations. Never waits.
    pub(super) fn leave(&self) {
        for link in self.links.values() {
            link.commands[0].push(WriterCommand::Last(Header::bare(FrameKind::Leave, self.world.id()), Vec::new()));
            for commands in &link.commands[1..] {
                commands.push(WriterCommand::Stop);
            }
        }
    }

    /// Sends an announcement; `write` fills its empty body.
    pub(super) fn announce(&self, rank: u32, header: Header, write: impl FnOnce(&mut Vec<u8>)) {
        let commands = &self.link(rank).commands[0];
        let mut body = commands.body();
        write(&mut body);
        // A queue without a writer follows an abort, which ends all waits.
        commands.push(WriterCommand::Frame(Header { len: body.len() as u32, ..header }, body));
    }

    /// Divides a job among the tensor connections, whose writers fetch and send it; returns the number of resulting
    /// jobs. Jobs of one chunk take turns.
    pub(super) fn send(&self, rank: u32, job: &Job) -> usize {
        let commands = &self.link(rank).commands[1..];
        let n = commands.len() as u32;
        let push = |commands: &WriterQueue, range: Range<usize>| {
            usize::from(!range.is_empty() && commands.push(WriterCommand::Fetch(Job { range, ..job.clone() })))
        };
        if job.range.len() <= CHUNK_BYTES {
            return push(&commands[job.range.start / CHUNK_BYTES % commands.len()], job.range.clone());
        }
        let share = |i: u32| part(job.range.len(), CHUNK_BYTES, n, i);
        (0..).zip(commands).map(|(i, commands)| push(commands, share(i))).sum()
    }

    /// Whether a peer has left after finishing all operations.
    pub(super) fn has_left(&self, rank: u32) -> bool {
        self.link(rank).has_left.load(Ordering::Acquire)
    }

    /// Takes note that a peer has left, and aborts the world if an operation waits for it.
    pub(super) fn on_leave(&self, rank: u32) {
        self.link(rank).has_left.store(true, Ordering::Release);
        if self.groups.values().any(|group| group.lock().waits_for(rank)) {
            self.abort(&self.left(rank));
        }
    }

    /// Ends one group, which a member has aborted and told all others.
    pub(super) fn on_abort_group(&self, group: &SharedGroup, reason: &str) {
        group.lock().abort();
        group.fail(CollectiveError::aborted(reason));
        self.wakeup.wakeup().wake_always();
    }

    /// Wakes the rank if it sleeps.
    pub(super) fn wake(&self) {
        self.wakeup.wakeup().wake();
    }

    fn link(&self, rank: u32) -> &Link {
        self.links.get(&rank).expect("ranks that share a group are connected")
    }

    /// Aborts the world because a connection broke, unless the peer has explained it by an abort or by leaving.
    pub(super) fn lost(&self, peer: u32, is_first: bool, kind: std::io::ErrorKind) {
        let is_explained = || self.has_left(peer) || self.aborted.get().is_some();
        // An aborting peer sends the abort on the first connection while it closes the others.
        let start = Instant::now();
        while !is_first && !is_explained() && start.elapsed() < EXPLAIN_MAX {
            std::thread::sleep(EXPLAIN_MAX / 20);
        }
        if !is_explained() {
            let name = self.world.name_of(peer);
            let lost = (kind == std::io::ErrorKind::TimedOut).then_some(name);
            self.abort_since(&format!("rank {}: connection with rank {name} lost: {kind}", self.name()), lost);
        }
    }

    /// The abort reason when a peer has left too early.
    pub(super) fn left(&self, peer: u32) -> String {
        format!("rank {} waits for rank {}, which has left", self.name(), self.world.name_of(peer))
    }
}
