//! A launch: the operations of one group, or a single one, as the engine runs them.

use super::collective::Collective;
use super::communicator::Communicator;
use super::host::{self, Code};
use super::order::Ticket;
use super::transfer::Transfer;
use super::{INVALID_ARGUMENT, refuse};
use crate::engine::Poll;
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a launch consists of.
#[derive(Clone, Default)]
pub struct Work {
    pub collectives: Vec<Collective>,
    pub transfers: Vec<Transfer>,
}

/// A launch under way.
struct Batch {
    communicator: Arc<Communicator>,
    ticket: Arc<Ticket>,
    is_running: bool,
    work: Work,
}

/// Microseconds by which a late launch is late.
const LATE_US: u64 = 300;

/// Adds work to a stream. On a communicator that does not block, it may happen after the return.
pub fn launch(communicator: &Arc<Communicator>, stream: u64, work: Work) -> Result<(), super::Code> {
    let failed = |code: Code| refuse(INVALID_ARGUMENT, &format!("the stream gives CUDA error {code}"));
    let is_captured = host::is_capturing(stream).map_err(failed)?;
    count_launch(communicator);
    let number = communicator.count_launch()?;
    let n_collectives = work.collectives.len() as u64;
    let begin: Arc<dyn Fn() -> Poll + Send + Sync> = if is_captured {
        // Each launch of the graph is a launch of its own, which begins when it is this operation's turn.
        let (c, graph) = (communicator.clone(), communicator.captured.clone());
        Arc::new(move || {
            let _ = &graph;
            poll(Batch {
                communicator: c.clone(),
                ticket: Arc::new(Ticket::new(&c, n_collectives)),
                is_running: false,
                work: work.clone(),
            })
        })
    } else {
        let (c, ticket) = (communicator.clone(), Arc::new(Ticket::new(communicator, n_collectives)));
        Arc::new(move || {
            poll(Batch { communicator: c.clone(), ticket: ticket.clone(), is_running: false, work: work.clone() })
        })
    };
    let every = host::setting("SOFTGPU_NCCL_LATE", 16);
    if communicator.is_blocking || is_captured || every == 0 || !number.is_multiple_of(every) {
        return host::submit(stream, begin).map_err(failed);
    }
    communicator.is_late.store(true, SeqCst);
    let communicator = communicator.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_micros(LATE_US));
        if let Err(code) = host::submit(stream, begin) {
            failed(code);
            communicator.fail();
        }
        communicator.is_late.store(false, SeqCst);
    });
    Ok(())
}

/// Launches of this process since the planted failure was set.
static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// Counts from now on.
pub fn restart_count() {
    LAUNCHES.store(0, SeqCst);
}

/// Plants the failure that the settings ask for.
fn count_launch(communicator: &Communicator) {
    crate::settings::take_changes();
    if LAUNCHES.fetch_add(1, SeqCst) + 1 == host::setting("SOFTGPU_NCCL_FAULT", 0) {
        communicator.fail();
    }
}

fn poll(mut batch: Batch) -> Poll {
    Arc::new(Mutex::new(move || batch.advance()))
}

impl Batch {
    /// Whether it is done.
    fn advance(&mut self) -> Result<bool, Code> {
        let c = &self.communicator;
        if c.has_stopped(&self.ticket) {
            return Ok(true);
        }
        if !self.is_running && !self.ticket.may_run(c.device) {
            return Ok(false);
        }
        self.is_running = true;
        while let Some(first) = self.work.collectives.first_mut() {
            if !first.advance(c, &self.ticket)? {
                return Ok(false);
            }
            self.work.collectives.remove(0);
        }
        // Messages of one channel go one after the other, all channels at once.
        loop {
            let (mut busy, before) = (BTreeSet::new(), self.work.transfers.len());
            let mut waiting = Vec::new();
            for mut transfer in std::mem::take(&mut self.work.transfers) {
                let is_first = busy.insert((transfer.is_send, transfer.peer));
                if !is_first || !transfer.advance(c)? {
                    waiting.push(transfer);
                }
            }
            self.work.transfers = waiting;
            if self.work.transfers.is_empty() || self.work.transfers.len() == before {
                return Ok(self.work.transfers.is_empty());
            }
        }
    }
}
