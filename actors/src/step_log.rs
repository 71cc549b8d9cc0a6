//! The step log: a bounded queue from the device thread of a rank to its rank actor. It has one writer and one reader, and the
//! reader can close it.
//!
//! A device may vote for a step and commit it only while its world has not ended, and the actor must have all votes and commits
//! when it reports the end of the world; otherwise two members could decide differently about a step. One atomic word ensures
//! this: it holds the number of records and whether the log is closed, so each record is either before the end of the world or
//! rejected. A record costs a few stores and one compare-exchange; neither side locks or allocates.
//!
//! Invariants:
//! - `STEP-LOG-1` The actor reads every accepted record; a closed log accepts no record.
//! - `STEP-LOG-2` Records are read in the order in which they were written.

use phalanx_strategies::elastic::identity::{Generation, Stale, Step};
use phalanx_strategies::elastic::message::Requests;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A device's progress in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// The device has everything for the update to this step and is about to vote for the step.
    Computed(Step),
    /// All members have voted for this step, with these requests in their votes.
    Committed(Step, Requests),
    /// All members have agreed to stop after this step, which is committed, although no vote for it said so.
    Stopped(Step),
    /// While catching up: the device has received all state, as of this step.
    CaughtUp(Step),
    /// While catching up: the device has the gradients of this step.
    Followed(Step),
    /// While catching up: this step is committed.
    Outcome(Step),
}

/// The device's end. It has one writing thread at a time.
#[derive(Debug)]
pub struct StepWriter(Arc<Log>);

/// The actor's end.
#[derive(Debug)]
pub struct StepReader {
    log: Arc<Log>,
    n_read: u64,
}

/// Most unread records. A step writes two, and the actor reads many times a second.
const CAPACITY: usize = 2048;
/// Set in `tail` once the log is closed.
const CLOSED: u64 = 1 << 63;
/// Pause of a writer before another try at a full log.
const FULL_PAUSE: Duration = Duration::from_micros(200);

#[derive(Debug)]
struct Log {
    generation: Generation,
    /// The generation that closed the log; the log's own while open.
    newer: AtomicU64,
    /// Records written, and [`CLOSED`].
    tail: AtomicU64,
    /// Records read.
    head: AtomicU64,
    slots: Box<[[AtomicU64; WORDS]]>,
}

/// Kind and stop request, step, saves, pause.
const WORDS: usize = 4;

/// Creates a log for the world of this generation.
pub fn step_log(generation: Generation) -> (StepWriter, StepReader) {
    let slots = (0..CAPACITY).map(|_| [const { AtomicU64::new(0) }; WORDS]).collect();
    let (newer, tail, head) = (AtomicU64::new(generation.0), AtomicU64::new(0), AtomicU64::new(0));
    let log = Arc::new(Log { generation, newer, tail, head, slots });
    (StepWriter(log.clone()), StepReader { log, n_read: 0 })
}

impl StepWriter {
    /// Generation of the log's world.
    pub fn generation(&self) -> Generation {
        self.0.generation
    }

    /// Adds a record; waits while the log is full.
    ///
    /// # Errors
    /// When the world has ended: the actor never reads the record, so its step must not take effect.
    pub fn write(&mut self, record: Record) -> Result<(), Stale> {
        let log = &*self.0;
        let n_written = loop {
            let tail = log.tail.load(Ordering::Acquire);
            if tail & CLOSED != 0 {
                return Err(log.stale());
            }
            if tail - log.head.load(Ordering::Acquire) < CAPACITY as u64 {
                break tail;
            }
            std::thread::sleep(FULL_PAUSE);
        };
        let slot = &log.slots[n_written as usize % CAPACITY];
        for (word, value) in slot.iter().zip(encode(record)) {
            word.store(value, Ordering::Relaxed);
        }
        // STEP-LOG-1: publishes the words above, unless the log was closed meanwhile.
        let published = log.tail.compare_exchange(n_written, n_written + 1, Ordering::AcqRel, Ordering::Relaxed);
        published.map(drop).map_err(|_| log.stale())
    }
}

impl StepReader {
    /// Generation of the log's world.
    pub fn generation(&self) -> Generation {
        self.log.generation
    }

    /// The next record, if any.
    pub fn read(&mut self) -> Option<Record> {
        if self.n_read == self.log.tail.load(Ordering::Acquire) & !CLOSED {
            return None;
        }
        let words = self.log.slots[self.n_read as usize % CAPACITY].each_ref().map(|word| word.load(Ordering::Relaxed));
        self.n_read += 1;
        self.log.head.store(self.n_read, Ordering::Release);
        Some(decode(words))
    }

    /// Rejects all further records, because the world of generation `newer` has begun (`STEP-LOG-1`).
    pub fn close(&self, newer: Generation) {
        self.log.newer.fetch_max(newer.0, Ordering::AcqRel);
        self.log.tail.fetch_or(CLOSED, Ordering::AcqRel);
    }
}

impl Log {
    fn stale(&self) -> Stale {
        Stale::Generation { found: self.generation, have: Generation(self.newer.load(Ordering::Acquire)) }
    }
}

fn encode(record: Record) -> [u64; WORDS] {
    match record {
        Record::Computed(step) => [0, step.0, 0, 0],
        Record::Committed(step, Requests { stop, save, pause }) => [1 | u64::from(stop) << 8, step.0, save, pause.0],
        Record::CaughtUp(step) => [2, step.0, 0, 0],
        Record::Followed(step) => [3, step.0, 0, 0],
        Record::Outcome(step) => [4, step.0, 0, 0],
        Record::Stopped(step) => [5, step.0, 0, 0],
    }
}

fn decode([kind, step, save, pause]: [u64; WORDS]) -> Record {
    let step = Step(step);
    match kind & 0xff {
        0 => Record::Computed(step),
        1 => Record::Committed(step, Requests { stop: kind >> 8 != 0, save, pause: Generation(pause) }),
        2 => Record::CaughtUp(step),
        3 => Record::Followed(step),
        4 => Record::Outcome(step),
        _ => Record::Stopped(step),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // STEP-LOG-2
    #[test]
    fn records_are_read_in_the_order_of_writing() {
        let (mut writer, mut reader) = step_log(Generation(3));
        let requests = Requests { stop: true, save: u64::MAX, pause: Generation(3) };
        let all = [
            Record::Computed(Step(1)),
            Record::Committed(Step(1), requests),
            Record::Committed(Step(2), Requests { stop: false, ..requests }),
            Record::CaughtUp(Step(2)),
            Record::Followed(Step(3)),
            Record::Outcome(Step(3)),
            Record::Stopped(Step(3)),
        ];

        all.iter().for_each(|record| writer.write(*record).unwrap());

        assert_eq!(std::iter::from_fn(|| reader.read()).collect::<Vec<Record>>(), all);
    }

    // STEP-LOG-1
    #[test]
    fn closed_log_keeps_earlier_records_and_refuses_later_ones() {
        let (mut writer, mut reader) = step_log(Generation(3));
        writer.write(Record::Computed(Step(7))).unwrap();

        reader.close(Generation(5));

        let stale = Stale::Generation { found: Generation(3), have: Generation(5) };
        assert_eq!(writer.write(Record::Committed(Step(7), Requests::default())), Err(stale));
        assert_eq!((reader.read(), reader.read()), (Some(Record::Computed(Step(7))), None));
    }

    // STEP-LOG-1
    #[test]
    fn every_accepted_record_is_read_when_the_log_closes_during_a_write() {
        for round in 0..200 {
            let (mut writer, mut reader) = step_log(Generation(1));
            let n_accepted = std::thread::scope(|scope| {
                let writes = scope
                    .spawn(move || (1u64..).take_while(|i| writer.write(Record::Computed(Step(*i))).is_ok()).count());
                let mut n_read = 0;
                while n_read < round * 10 {
                    n_read += usize::from(reader.read().is_some());
                }
                reader.close(Generation(2));
                n_read += std::iter::from_fn(|| reader.read()).count();
                (writes.join().unwrap(), n_read)
            });
            assert_eq!(n_accepted.0, n_accepted.1, "round {round}");
        }
    }

    #[test]
    fn writer_waits_while_the_log_is_full() {
        let (mut writer, mut reader) = step_log(Generation(1));
        let n = 3 * CAPACITY as u64;

        let writes = std::thread::spawn(move || (1..=n).try_for_each(|i| writer.write(Record::Followed(Step(i)))));
        let mut steps = Vec::new();
        while steps.len() < n as usize {
            steps.extend(reader.read());
        }

        writes.join().unwrap().unwrap();
        assert!(steps.into_iter().eq((1..=n).map(|i| Record::Followed(Step(i)))));
    }
}
