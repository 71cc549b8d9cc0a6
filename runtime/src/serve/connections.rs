//! The open connections of a server. A stranger can open as many as it likes, so no connection keeps its place for nothing: when
//! all places are taken, a new one takes that of the oldest connection without an accepted request, of the address that has most of
//! them, or else that of a client that has stopped reading its answer.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep};

/// How long a client may read nothing of its answer.
const WRITE_PATIENCE: Duration = Duration::from_secs(20);
/// How long a client may read nothing before a new connection may take its place.
const STALL_PATIENCE: Duration = Duration::from_secs(1);

/// What a connection does.
#[derive(Debug)]
pub(super) struct Activity {
    /// Whether a request was accepted and its answer is not sent yet.
    is_answered: AtomicBool,
    /// Whether the answer is complete, so that it is sent with the next bytes.
    is_complete: AtomicBool,
    /// Room in memory for the answer.
    room: Mutex<Option<OwnedSemaphorePermit>>,
    /// Milliseconds from `began` until the client stopped reading, plus one; 0 while it reads.
    stalled: AtomicU64,
    began: Instant,
}

impl Activity {
    fn new() -> Arc<Activity> {
        Arc::new(Activity {
            is_answered: AtomicBool::new(false),
            is_complete: AtomicBool::new(false),
            room: Mutex::new(None),
            stalled: AtomicU64::new(0),
            began: Instant::now(),
        })
    }

    /// An answer begins. It is complete when the guard is dropped, and has its room until its last byte is sent.
    pub(super) fn answering(self: &Arc<Self>, room: OwnedSemaphorePermit) -> Answering {
        *self.room.lock().unwrap_or_else(PoisonError::into_inner) = Some(room);
        self.is_answered.store(true, Ordering::Relaxed);
        self.is_complete.store(false, Ordering::Relaxed);
        Answering(Arc::clone(self))
    }

    /// Everything that there is to send is sent.
    fn flushed(&self) {
        if self.is_complete.swap(false, Ordering::Relaxed) {
            self.is_answered.store(false, Ordering::Relaxed);
            self.room.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    fn set_stalled(&self, stalls: bool) {
        let since = if stalls { self.began.elapsed().as_millis() as u64 + 1 } else { 0 };
        if !stalls || self.stalled.load(Ordering::Relaxed) == 0 {
            self.stalled.store(since, Ordering::Relaxed);
        }
    }

    /// How long the client has read nothing, although there is something to read.
    fn stalled_for(&self) -> Option<Duration> {
        let since = self.stalled.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.began.elapsed().saturating_sub(Duration::from_millis(since)))
    }

    /// How easily the connection loses its place; `None` if it keeps it.
    fn loses_place(&self) -> Option<Loss> {
        match self.stalled_for() {
            _ if !self.is_answered.load(Ordering::Relaxed) => Some(Loss::First),
            Some(stalled) if stalled >= STALL_PATIENCE => Some(Loss::Then),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Loss {
    /// It has no request under way.
    First,
    /// Its client does not read.
    Then,
}

/// An answer under way.
#[derive(Debug)]
pub(super) struct Answering(Arc<Activity>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.is_complete.store(true, Ordering::Relaxed);
    }
}

/// The open connections, by age.
#[derive(Debug, Default)]
pub(super) struct Connections {
    open: Mutex<BTreeMap<u64, Open>>,
    n_entered: AtomicU64,
}

#[derive(Debug)]
struct Open {
    peer: IpAddr,
    activity: Arc<Activity>,
    /// Ends the connection; missing until its task has started.
    task: Option<AbortHandle>,
}

impl Connections {
    /// Takes a place for a connection of `peer`, which another one may lose; `None` if all are busy.
    pub(super) fn enter(self: &Arc<Self>, peer: IpAddr, n_max: usize) -> Option<Place> {
        let mut open = self.open();
        if open.len() >= n_max {
            let lost = loser(&open)?;
            if let Some(task) = open.remove(&lost).and_then(|lost| lost.task) {
                task.abort();
            }
        }
        let number = self.n_entered.fetch_add(1, Ordering::Relaxed);
        let activity = Activity::new();
        open.insert(number, Open { peer, activity: Arc::clone(&activity), task: None });
        Some(Place { connections: Arc::clone(self), number, activity })
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The connection that loses its place.
fn loser(open: &BTreeMap<u64, Open>) -> Option<u64> {
    let candidates =
        || open.iter().filter_map(|(number, open)| Some((open.activity.loses_place()?, *number, open.peer)));
    let kind = candidates().map(|(loss, ..)| loss).min()?;
    let of_kind = || candidates().filter(|(loss, ..)| *loss == kind);
    let mut n_of_peer: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for (.., peer) in of_kind() {
        *n_of_peer.entry(peer).or_default() += 1;
    }
    of_kind().max_by_key(|(_, number, peer)| (n_of_peer[peer], std::cmp::Reverse(*number))).map(|(_, number, _)| number)
}

/// The place of a connection, which is free when this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    connections: Arc<Connections>,
    number: u64,
    activity: Arc<Activity>,
}

impl Place {
    pub(super) fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    /// The task that ends with the connection.
    pub(super) fn ends_with(connections: &Connections, number: u64, task: AbortHandle) {
        if let Some(open) = connections.open().get_mut(&number) {
            open.task = Some(task);
        }
    }

    pub(super) const fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.open().remove(&self.number);
    }
}

/// A socket whose client must read.
#[derive(Debug)]
pub(super) struct Watched {
    socket: TcpStream,
    activity: Arc<Activity>,
    /// Runs while the client reads nothing.
    patience: Option<Pin<Box<Sleep>>>,
}

impl Watched {
    pub(super) fn new(socket: TcpStream, activity: Arc<Activity>) -> Watched {
        Watched { socket, activity, patience: None }
    }

    /// Ends the connection if a write has waited too long.
    fn waited<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        self.activity.set_stalled(written.is_pending());
        if written.is_ready() {
            self.patience = None;
            return written;
        }
        let patience = self.patience.get_or_insert_with(|| Box::pin(sleep(WRITE_PATIENCE)));
        ready!(patience.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buf)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, buf);
        self.waited(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, bufs);
        self.waited(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = ready!(Pin::new(&mut self.socket).poll_flush(cx));
        self.activity.flushed();
        Poll::Ready(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

    fn numbers(connections: &Connections) -> Vec<u64> {
        connections.open().keys().copied().collect()
    }

    // SERVE-4
    #[test]
    fn oldest_idle_connection_of_the_busiest_address_loses_its_place() {
        let connections = Arc::new(Connections::default());
        let places: Vec<Place> = [B, A, A, A].map(|peer| connections.enter(peer, 4).unwrap()).into();
        let busy = places[1].activity().answering(room());

        let fifth = connections.enter(B, 4).unwrap();

        assert_eq!((numbers(&connections), fifth.number()), (vec![0, 1, 3, 4], 4));
        drop(busy);
        assert_eq!(places[1].activity().loses_place(), None, "the end of the answer is not sent yet");
        places[1].activity().flushed();
        let _sixth = connections.enter(B, 4).unwrap();
        assert_eq!(numbers(&connections), [1, 3, 4, 5], "of addresses with as many, the oldest");
    }

    // SERVE-4
    #[test]
    fn connections_with_an_answer_keep_their_places_while_their_clients_read() {
        let connections = Arc::new(Connections::default());
        let places: Vec<Place> = [A, A].map(|peer| connections.enter(peer, 2).unwrap()).into();
        let _busy: Vec<Answering> = places.iter().map(|place| place.activity().answering(room())).collect();

        let refused = connections.enter(B, 2);
        let stalled = Activity {
            is_answered: AtomicBool::new(true),
            is_complete: AtomicBool::new(false),
            room: Mutex::new(None),
            stalled: AtomicU64::new(1),
            began: Instant::now() - 2 * STALL_PATIENCE,
        };

        assert!(refused.is_none());
        assert_eq!(stalled.loses_place(), Some(Loss::Then));
        stalled.set_stalled(false);
        assert_eq!(stalled.loses_place(), None);
    }

    fn room() -> OwnedSemaphorePermit {
        Arc::new(tokio::sync::Semaphore::new(1)).try_acquire_owned().unwrap()
    }
}
