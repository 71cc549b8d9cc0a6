//! Data that is prepared while a job trains: file after file, in the background.
//!
//! A stream is visited in the order of its files and, within each file, of its rows; both orders are random if the job shuffles.
//! The row at a position is therefore known as soon as the files up to it are prepared, whatever files follow.
//!
//! Invariants:
//! - `STREAM-1` Each pass visits each row of each file exactly once.
//! - `STREAM-2` The row at a position depends on seed, files and position only, not on when files became ready, so that a resumed
//!   or rescaled job sees the same data.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use phalanx_strategies::sampler::Permutation;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::prepare_error::PrepareError;
use super::preparer::{LoadedFile, Preparer};
use super::rows::RowStore;
use super::summary::Summary;
use super::tokenize::OnProgress;

/// The order of files among the orders of a seed: beyond any epoch, and any choice of rows by weight.
const FILES: u64 = u64::MAX - (1 << 33);

/// What is known of the files of a stream before they are read: digests of their names and of their lengths, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamFiles {
    pub(crate) names: [u8; 32],
    pub(crate) lengths: [u8; 32],
}

/// Files whose rows are drawn from while further ones are prepared.
#[derive(Debug)]
pub(crate) struct Stream {
    store: Arc<RowStore>,
    /// Of the order of rows, if it is random.
    seed: Option<u64>,
    /// Rows that the job trains on.
    n_needed: u64,
    files: StreamFiles,
    /// Files after the first one that had records left out.
    with_skipped: Mutex<Vec<Summary>>,
    /// What is not prepared yet, until somebody prepares it.
    rest: Mutex<Option<Preparer<'static>>>,
    /// Set when nothing more is prepared: all that is needed is there, or a file cannot be used.
    ended: OnceLock<Result<(), PrepareError>>,
}

impl Stream {
    /// A stream whose first part is in the store; the preparer has the others.
    pub(crate) fn new(
        store: Arc<RowStore>,
        seed: Option<u64>,
        n_needed: u64,
        files: StreamFiles,
        rest: Preparer<'static>,
    ) -> Arc<Self> {
        let (with_skipped, rest) = (Mutex::default(), Mutex::new(Some(rest)));
        Arc::new(Self { store, seed, n_needed, files, with_skipped, rest, ended: OnceLock::new() })
    }

    pub(crate) const fn store(&self) -> &Arc<RowStore> {
        &self.store
    }

    /// Rows that the job trains on.
    pub(super) const fn n_needed(&self) -> u64 {
        self.n_needed
    }

    pub(crate) const fn files(&self) -> &StreamFiles {
        &self.files
    }

    /// The prepared files after the first one that had records left out.
    pub(crate) fn with_skipped(&self) -> Vec<Summary> {
        self.with_skipped.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn push(&self, file: LoadedFile) {
        let LoadedFile { part, summary, .. } = file;
        if summary.n_skipped > 0 {
            if !summary.from_cache {
                tracing::warn!(
                    dataset = %summary.path.display(),
                    n_records = summary.n_records,
                    n_skipped = summary.n_skipped,
                    "records that cannot be used are left out"
                );
            }
            self.with_skipped.lock().unwrap_or_else(PoisonError::into_inner).push(summary);
        }
        self.store.push(part);
    }

    /// Whether the row at this position and those before it are there.
    pub(super) fn has(&self, position: u64) -> Result<bool, PrepareError> {
        // The end first: it is set after the last part was added.
        let ended = self.ended.get();
        match ended {
            _ if position < self.store.len() as u64 => Ok(true),
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(error)) => Err(error.clone()),
        }
    }

    /// The row of the store at a position.
    ///
    /// # Panics
    /// When the position is not ready.
    pub(super) fn row_at(&self, position: u64) -> usize {
        let is_whole = matches!(self.ended.get(), Some(Ok(())));
        let n_rows = self.store.len() as u64;
        assert!(is_whole || position < n_rows, "position {position} is beyond the {n_rows} rows that are ready");
        let (pass, position) = (position / n_rows, (position % n_rows) as usize);
        let (part, rows) = self.store.part_of(position);
        let Some(seed) = self.seed else { return position };
        let order = Permutation::new(rows.len() as u64, seed, (pass << 32) | part as u64);
        rows.start + order.apply((position - rows.start) as u64) as usize
    }

    /// Prepares the rest on a thread of its own, at the lowest priority, until the job needs no more or has ended. Does nothing the
    /// second time.
    pub(crate) fn prepare_in_background(self: &Arc<Self>) -> std::io::Result<()> {
        let Some(rest) = self.take_rest() else { return Ok(()) };
        let stream = Arc::downgrade(self);
        let pool = background_pool()?;
        let work = move || pool.install(|| prepare_rest(&stream, rest, &|_| Ok(())));
        std::thread::Builder::new().name("data-stream".into()).spawn(work).map(drop)
    }

    /// Prepares the rest now.
    pub(crate) fn prepare_now(self: &Arc<Self>, progress: OnProgress<'_>) -> Result<(), PrepareError> {
        if let Some(rest) = self.take_rest() {
            prepare_rest(&Arc::downgrade(self), rest, progress);
        }
        self.ended.get().cloned().unwrap_or(Ok(()))
    }

    fn take_rest(&self) -> Option<Preparer<'static>> {
        self.rest.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Adds part after part, until there are enough rows, no file is left, one cannot be used, or the stream is dropped.
fn prepare_rest(stream: &Weak<Stream>, mut rest: Preparer<'static>, progress: OnProgress<'_>) {
    loop {
        let Some(held) = stream.upgrade() else { return };
        let is_enough = held.store.len() as u64 >= held.n_needed;
        drop(held);
        let next = if is_enough { None } else { rest.next_file(progress) };
        let Some(stream) = stream.upgrade() else { return };
        let ended = match next {
            Some(Ok(file)) => {
                stream.push(file);
                continue;
            }
            Some(Err(error)) if error.is_of_nothing() => continue,
            Some(Err(error)) => Err(error),
            None => Ok(()),
        };
        // Nobody else ends it.
        let _ = stream.ended.set(ended);
        return;
    }
}

/// The order in which the files are read.
pub(super) fn in_order_of_stream<T>(files: Vec<T>, seed: Option<u64>) -> Vec<T> {
    let Some(seed) = seed else { return files };
    let order = Permutation::new(files.len() as u64, seed, FILES);
    let mut files: Vec<Option<T>> = files.into_iter().map(Some).collect();
    (0..files.len() as u64).filter_map(|nth| files[order.apply(nth) as usize].take()).collect()
}

/// Threads that get the time that a training thread leaves.
fn background_pool() -> std::io::Result<ThreadPool> {
    let pool = ThreadPoolBuilder::new()
        .num_threads(std::thread::available_parallelism()?.get())
        .thread_name(|nth| format!("data-stream-{nth}"))
        .start_handler(|_| have_lowest_priority());
    pool.build().map_err(std::io::Error::other)
}

#[allow(unsafe_code)] // A call of the C library.
fn have_lowest_priority() {
    const LOWEST: i32 = 19;
    // SAFETY: no memory is passed. 0 means the calling thread: on Linux, threads have priorities of their own.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, LOWEST) } != 0 {
        tracing::debug!(error = %std::io::Error::last_os_error(), "data is prepared at the priority of training");
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
