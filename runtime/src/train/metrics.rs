//! Writes the measurements of each step to files: `metrics.jsonl` and TensorBoard events.

use super::taken_over::{LinesFromEnd, take_over};
use super::tensorboard::EventWriter;
use crate::events::{EvalMetrics, StepMetrics};
use crate::journal::Journal;
use crate::train::step_line::Pace;
use phalanx_storage::checkpoint::fence::Fence;
use phalanx_storage::foreign_file;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

/// Longer than any line, so that a step allocates nothing for its line.
const LINE_BYTES: usize = 1 << 10;

/// Writes measurements to the files of a run.
#[derive(Debug)]
pub struct MetricsFiles {
    jsonl: Journal,
    /// The last line, whose memory the next one reuses.
    line: Vec<u8>,
    events: EventWriter,
    last: LastLines,
}

/// The last step with a line, and the last evaluation after it, or 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LastLines {
    pub(crate) step: u64,
    pub(crate) evaluation: u64,
}

impl MetricsFiles {
    /// Takes over `metrics.jsonl` in `dir` for the world of `fence`, and opens a new event file. Drops lines of steps after
    /// `resumed_step`, which are about to run again. A file that cannot be opened or written is written later; see
    /// [`MetricsFiles::fault`].
    pub fn open(dir: &Path, resumed_step: u64, fence: Option<Fence>) -> MetricsFiles {
        let path = dir.join("metrics.jsonl");
        let generation = fence.as_ref().map_or(0, Fence::generation);
        let first = open_kept(&path, resumed_step, fence.as_ref());
        let unknown = LastLines { step: resumed_step, evaluation: resumed_step };
        let last = first.as_ref().map_or(unknown, |(_, last)| *last);
        let mut first = first.ok();
        let mut last_kept = resumed_step;
        let jsonl = Journal::new(path, move |path| {
            let file = match first.take() {
                Some((file, _)) => file,
                None => open_kept(path, last_kept, fence.as_ref())?.0,
            };
            // A file that somebody puts in place of this one has lines of this world, which stay.
            last_kept = u64::MAX;
            Ok(Box::new(file))
        });
        let events = EventWriter::create(dir, generation, resumed_step);
        MetricsFiles { jsonl, line: Vec::with_capacity(LINE_BYTES), events, last }
    }

    /// Why a file lacks measurements, as a sentence; `None` while all are written.
    pub fn fault(&self) -> Option<String> {
        self.jsonl.fault().or_else(|| self.events.fault())
    }

    /// The measurements that did not fit into memory while a file could not be written.
    pub fn n_dropped(&self) -> u64 {
        self.jsonl.n_dropped().max(self.events.n_dropped())
    }

    /// The last step with a line.
    pub const fn last_step(&self) -> u64 {
        self.last.step
    }

    /// The last evaluation with a line, by its step; 0 if the last step follows it.
    pub const fn last_evaluation(&self) -> u64 {
        self.last.evaluation
    }

    /// Appends a step.
    pub fn step(&mut self, m: &StepMetrics) {
        self.line(m);
        self.last.step = m.step;
        let scalars = [
            ("train/loss", m.loss),
            ("train/grad_norm", m.grad_norm),
            ("train/learning_rate", m.lr),
            ("train/epoch", m.epoch),
            ("throughput/tokens_per_s", m.tokens_per_s),
            ("throughput/step_ms", m.step_ms),
            ("throughput/mfu_pct", m.mfu_pct),
            ("throughput/data_wait_pct", m.data_wait_pct),
            ("memory/resident_bytes", m.memory_bytes as f64),
        ];
        self.events.scalars(m.step, &scalars);
        self.of_objective("train", m.step, &m.scalars);
        if let Some(pct) = m.collective_pct {
            self.events.scalars(m.step, &[("throughput/collective_pct", pct)]);
        }
        if let Some(pct) = m.verify_pct {
            self.events.scalars(m.step, &[("throughput/verify_pct", pct)]);
        }
    }

    /// Appends an evaluation.
    pub fn eval(&mut self, m: &EvalMetrics) {
        self.line(m);
        self.last.evaluation = m.step;
        self.events.scalars(m.step, &[("eval/loss", m.eval_loss)]);
        if let Some(perplexity) = m.eval_perplexity {
            self.events.scalars(m.step, &[("eval/perplexity", perplexity)]);
        }
        self.of_objective("eval", m.step, &m.scalars);
    }

    fn of_objective(&mut self, stage: &str, step: u64, scalars: &BTreeMap<String, f64>) {
        for (name, value) in scalars {
            self.events.scalars(step, &[(&format!("{stage}/{name}"), *value)]);
        }
    }

    fn line(&mut self, m: &impl Serialize) {
        self.line.clear();
        serde_json::to_writer(&mut self.line, m).expect("numbers under names always have a JSON form");
        self.line.push(b'\n');
        self.jsonl.append(&self.line);
    }
}

/// The last step of a run and its pace, as its file tells.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) last: StepMetrics,
    pub(crate) pace: Pace,
}

/// Bytes at the end of `metrics.jsonl` from which the pace is taken: some hundred steps.
const TAIL_BYTES: u64 = 64 << 10;

impl Measured {
    /// Reads the end of the file in this folder; `None` if it has no step.
    pub(crate) fn latest(dir: &Path) -> Option<Measured> {
        let mut file = foreign_file::open(&dir.join("metrics.jsonl")).ok()?;
        let length = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES))).ok()?;
        let mut tail = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut tail).ok()?;
        let (mut last, mut pace) = (None, Pace::default());
        // The first line may have lost its beginning, and the last one may not be complete.
        for step in
            tail.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice::<StepMetrics>(line).ok())
        {
            pace.see(&step);
            last = Some(step);
        }
        last.map(|last| Measured { last, pace })
    }

    /// The time that is left after `step`, if the length of the run is known.
    pub(crate) fn left(&self, step: u64) -> Option<(u64, Duration)> {
        let n_steps = self.last.total_steps.checked_sub(step.max(self.last.step))?;
        Some((n_steps, self.pace.of(n_steps)?))
    }
}

/// Takes over `metrics.jsonl` with the lines that stay; also returns the last steps among them.
fn open_kept(path: &Path, resumed_step: u64, fence: Option<&Fence>) -> io::Result<(File, LastLines)> {
    let last = Cell::default();
    let file = take_over(path, fence, |file| {
        let (n_bytes, found) = kept(file, resumed_step)?;
        last.set(found);
        Ok(n_bytes)
    })?;
    Ok((file, last.get()))
}

/// Bytes up to the last line whose step is at most `last_step`, and the last steps up to it. A torn last line is not kept.
pub(crate) fn kept(file: &File, last_step: u64) -> io::Result<(u64, LastLines)> {
    #[derive(Deserialize)]
    struct Measurement {
        step: u64,
        /// Of evaluations only.
        eval_ms: Option<f64>,
    }
    let (mut n_bytes, mut last) = (0, LastLines::default());
    let mut lines = LinesFromEnd::of(file)?;
    while let Some(line) = lines.next()? {
        let parsed = serde_json::from_slice::<Measurement>(&line.bytes).ok().filter(|_| line.bytes.ends_with(b"\n"));
        let Some(measured) = parsed.filter(|measured| measured.step <= last_step) else { continue };
        n_bytes = line.end.max(n_bytes);
        if measured.eval_ms.is_none() {
            last.step = measured.step;
            break;
        }
        last.evaluation = measured.step.max(last.evaluation);
    }
    Ok((n_bytes, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            total_steps: 10,
            loss: 1.5,
            grad_norm: 0.5,
            lr: 1e-3,
            tokens_per_s: 100.0,
            step_ms: 10.0,
            epoch: 0.5,
            predicted_tokens: 64,
            mfu_pct: 30.0,
            memory_bytes: 1 << 20,
            data_wait_pct: 0.1,
            scalars: BTreeMap::new(),
            loss_scale: None,
            collective_pct: None,
            verify_pct: None,
            stalled_steps: None,
            slowest_rank: None,
        }
    }

    #[test]
    fn lines_after_the_resumed_step_and_a_torn_line_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = MetricsFiles::open(dir.path(), 0, None);
        (1..=3).for_each(|s| files.step(&step(s)));
        files.jsonl.append(b"{\"step\": 2, \"lo");
        drop(files);

        let mut files = MetricsFiles::open(dir.path(), 2, None);
        assert_eq!(files.last_step(), 2);
        files.step(&step(3));

        let text = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        let steps: Vec<u64> = text.lines().map(|l| serde_json::from_str::<StepMetrics>(l).unwrap().step).collect();
        assert_eq!(steps, [1, 2, 3]);
    }

    #[test]
    fn leader_that_was_replaced_leaves_no_line_in_the_file_of_its_successor() {
        let dir = tempfile::tempdir().unwrap();
        let mut replaced = MetricsFiles::open(dir.path(), 0, None);
        (1..=3).for_each(|s| replaced.step(&step(s)));

        let mut successor = MetricsFiles::open(dir.path(), 1, None);
        replaced.step(&step(4));
        successor.step(&step(2));

        let text = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        let steps: Vec<u64> = text.lines().map(|l| serde_json::from_str::<StepMetrics>(l).unwrap().step).collect();
        assert_eq!(steps, [1, 2]);
    }

    // JOURNAL-3
    #[test]
    fn lines_of_this_world_stay_in_a_file_that_replaces_another() {
        let dir = tempfile::tempdir().unwrap();
        let (path, edited) = (dir.path().join("metrics.jsonl"), dir.path().join("edited"));
        let mut files = MetricsFiles::open(dir.path(), 0, None);
        (1..=2).for_each(|s| files.step(&step(s)));
        std::fs::copy(&path, &edited).unwrap();
        std::fs::rename(&edited, &path).unwrap();

        files.jsonl.look();
        files.step(&step(3));

        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<u64> = text.lines().map(|l| serde_json::from_str::<StepMetrics>(l).unwrap().step).collect();
        assert_eq!(steps, [1, 2, 3]);
    }

    #[test]
    fn pace_and_last_step_are_read_from_the_end_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Measured::latest(dir.path()).is_none());
        let mut files = MetricsFiles::open(dir.path(), 0, None);
        (1..=2000).for_each(|s| files.step(&StepMetrics { step_ms: 250.0, total_steps: 2004, ..step(s) }));
        files.eval(&EvalMetrics {
            step: 2000,
            eval_loss: 1.5,
            eval_perplexity: Some(4.5),
            scalars: BTreeMap::new(),
            eval_ms: 2.0,
        });
        files.jsonl.append(b"{\"step\": 2001, \"lo");

        let measured = Measured::latest(dir.path()).unwrap();

        assert!(std::fs::metadata(dir.path().join("metrics.jsonl")).unwrap().len() > TAIL_BYTES);
        assert_eq!((measured.last.step, measured.left(0)), (2000, Some((4, Duration::from_secs(1)))));
        assert_eq!(measured.left(2002), Some((2, Duration::from_millis(500))));
        assert_eq!(measured.left(3000), None);
    }

    #[test]
    fn evaluation_after_the_last_step_is_read_from_the_lines_that_stay() {
        let dir = tempfile::tempdir().unwrap();
        let eval = |step| EvalMetrics {
            step,
            eval_loss: 1.5,
            eval_perplexity: Some(4.5),
            scalars: BTreeMap::new(),
            eval_ms: 2.0,
        };
        let mut files = MetricsFiles::open(dir.path(), 0, None);
        for s in 1..=4 {
            files.step(&step(s));
            if s % 2 == 0 {
                files.eval(&eval(s));
            }
        }
        assert_eq!(files.last, LastLines { step: 4, evaluation: 4 });
        drop(files);

        assert_eq!(MetricsFiles::open(dir.path(), 3, None).last, LastLines { step: 3, evaluation: 0 });
        let mut files = MetricsFiles::open(dir.path(), 2, None);
        assert_eq!(files.last, LastLines { step: 2, evaluation: 2 });
        files.step(&step(3));
        assert_eq!((files.last_step(), files.last_evaluation()), (3, 2));
    }

    #[test]
    fn event_files_of_two_worlds_in_one_second_are_two() {
        let dir = tempfile::tempdir().unwrap();
        let world = |generation| Some(Fence::new(generation, || None));

        let worlds = [1, 2].map(|generation| MetricsFiles::open(dir.path(), 0, world(generation)));

        let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let is_event_file = |name: &std::ffi::OsString| name.to_string_lossy().contains("tfevents");
        assert_eq!((worlds.len(), names.filter(is_event_file).count()), (2, 2));
    }
}
