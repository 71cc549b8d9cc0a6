//! The ends of a communicator.

use super::communicator::{Communicator, remove};
use super::job::Job;
use super::order::Ticket;
use super::{Code, INVALID_USAGE, SUCCESS, refuse};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const POLL: Duration = Duration::from_micros(100);

/// Frees communicators whose operations were told to end. Returns when no graph has captured them and their devices have
/// done everything that was launched before: freeing memory waits for the device, so a hanging operation of another
/// communicator holds this up.
pub fn abort(communicators: &[Arc<Communicator>]) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().expect("nothing panics here");
    let now = Ticket::next();
    for c in communicators {
        while c.is_late.load(SeqCst)
            || is_captured(c)
            || Ticket::exists(|launch| launch.is_on(c.device) && launch.is_before(now))
        {
            std::thread::sleep(POLL);
        }
        c.shared.unlink();
        remove(c);
    }
}

fn is_captured(communicator: &Communicator) -> bool {
    Arc::strong_count(&communicator.captured) > 1
}

/// Ends what is under way, and refuses what comes.
pub fn revoke(communicator: &Arc<Communicator>) -> Result<(), Code> {
    if communicator.is_finalized.load(SeqCst) || communicator.is_aborted.load(SeqCst) {
        return Err(refuse(INVALID_USAGE, "ncclCommRevoke of a communicator that was finalized or aborted"));
    }
    communicator.revoked_before.fetch_max(Ticket::next(), SeqCst);
    communicator.pending.abort();
    Job::start([communicator].into_iter());
    Ok(())
}

/// Tells the peers that this rank launches nothing more.
pub fn finalize(communicator: &Arc<Communicator>) -> Result<(), Code> {
    let is_revoked = communicator.revoked_before.load(SeqCst) > 0;
    if is_revoked || communicator.is_finalized.swap(true, SeqCst) {
        return Err(refuse(INVALID_USAGE, "ncclCommFinalize of a communicator that was finalized or revoked"));
    }
    communicator.ensure_ready();
    communicator.shared.rank(communicator.rank).finalized.store(1, SeqCst);
    Job::start([communicator].into_iter());
    Ok(())
}

/// Frees a communicator; waits until all its ranks have come so far, unless it was revoked.
pub fn destroy(communicator: &Arc<Communicator>) -> Code {
    communicator.ensure_ready();
    if communicator.revoked_before.load(SeqCst) == 0 {
        if !communicator.is_finalized.load(SeqCst) {
            let _ = finalize(communicator);
        }
        communicator.settle();
    }
    while is_captured(communicator) {
        std::thread::sleep(POLL);
    }
    communicator.shared.unlink();
    remove(communicator);
    SUCCESS
}
