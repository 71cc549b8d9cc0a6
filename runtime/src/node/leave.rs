//! Whether a node stays in its job.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Whether a node stays in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// Stay.
    Stay,
    /// Leave once other nodes have its state.
    Drain,
    /// Leave at once: the coordinator is gone.
    Now,
}

/// How long a node waits after a signal before it drains. What ends a whole job, such as a preemption or the end of a session,
/// signals all its processes at about the same time; then the coordinator ends the job with a checkpoint, and no node needs to move
/// its state.
const TOGETHER: Duration = Duration::from_secs(2);

impl Leave {
    /// What a node does that may have been asked to leave. `since` is when that was first seen.
    pub(crate) fn after_signal(is_asked: bool, since: &Cell<Option<Instant>>) -> Leave {
        if !is_asked {
            return Leave::Stay;
        }
        let begin = since.get().unwrap_or_else(Instant::now);
        since.set(Some(begin));
        if begin.elapsed() < TOGETHER { Leave::Stay } else { Leave::Drain }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signalled_node_drains_only_if_the_job_does_not_end_soon() {
        let asked = Cell::new(None);

        let before = Leave::after_signal(false, &asked);
        let at_first = Leave::after_signal(true, &asked);
        asked.set(Instant::now().checked_sub(TOGETHER));
        let later = Leave::after_signal(true, &asked);

        assert_eq!((before, at_first, later), (Leave::Stay, Leave::Stay, Leave::Drain));
    }
}
