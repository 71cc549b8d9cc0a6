//! Writes the measurements of each step to files: `metrics.jsonl` and TensorBoard events.

use super::tensorboard::EventWriter;
use crate::events::{EvalMetrics, StepMetrics};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::Path;

/// Longer than any line, so that a step allocates nothing for its line.
const LINE_BYTES: usize = 1 << 10;

/// Writes measurements to the files of a run.
#[derive(Debug)]
pub struct MetricsFiles {
    jsonl: File,
    /// The last line, whose memory the next one reuses.
    line: Vec<u8>,
    events: EventWriter,
    /// The last step with a line.
    last_step: u64,
}

impl MetricsFiles {
    /// Opens `metrics.jsonl` and a new event file in `dir`. Drops lines of steps after `resumed_step`, which are about to
    /// run again.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn open(dir: &Path, resumed_step: u64) -> io::Result<MetricsFiles> {
        let path = dir.join("metrics.jsonl");
        let mut jsonl = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)?;
        let (keep, last_step) = kept(&jsonl, resumed_step)?;
        jsonl.set_len(keep)?;
        jsonl.seek(SeekFrom::End(0))?;
        Ok(MetricsFiles { jsonl, line: Vec::with_capacity(LINE_BYTES), events: EventWriter::create(dir)?, last_step })
    }

    /// The last step with a line.
    pub const fn last_step(&self) -> u64 {
        self.last_step
    }

    /// Appends a step.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn step(&mut self, m: &StepMetrics) -> io::Result<()> {
        self.line(m)?;
        self.last_step = m.step;
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
        self.events.scalars(m.step, &scalars)?;
        m.collective_pct.map_or(Ok(()), |pct| self.events.scalars(m.step, &[("throughput/collective_pct", pct)]))
    }

    /// Appends an evaluation.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn eval(&mut self, m: &EvalMetrics) -> io::Result<()> {
        self.line(m)?;
        self.events.scalars(m.step, &[("eval/loss", m.eval_loss), ("eval/perplexity", m.eval_perplexity)])
    }

    fn line(&mut self, m: &impl Serialize) -> io::Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, m)?;
        self.line.push(b'\n');
        self.jsonl.write_all(&self.line)
    }
}

/// Length of the leading lines whose step is at most `last_step`, and the last step among them. A torn last line is not
/// kept.
pub(crate) fn kept(file: &File, last_step: u64) -> io::Result<(u64, u64)> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
    }
    let mut reader = BufReader::new(file);
    let (mut kept, mut last, mut line) = (0, 0, String::new());
    loop {
        line.clear();
        let n = reader.read_line(&mut line)?;
        let parsed = serde_json::from_str::<Line>(&line).ok().filter(|_| line.ends_with('\n'));
        match parsed {
            Some(l) if l.step <= last_step => (kept, last) = (kept + n as u64, l.step),
            _ => return Ok((kept, last)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> StepMetrics {
        StepMetrics {
            step,
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
            loss_scale: None,
            collective_pct: None,
            slowest_rank: None,
        }
    }

    #[test]
    fn lines_after_the_resumed_step_and_a_torn_line_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = MetricsFiles::open(dir.path(), 0).unwrap();
        (1..=3).for_each(|s| files.step(&step(s)).unwrap());
        files.jsonl.write_all(b"{\"step\": 2, \"lo").unwrap();
        drop(files);

        let mut files = MetricsFiles::open(dir.path(), 2).unwrap();
        assert_eq!(files.last_step(), 2);
        files.step(&step(3)).unwrap();

        let text = std::fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
        let steps: Vec<u64> = text.lines().map(|l| serde_json::from_str::<StepMetrics>(l).unwrap().step).collect();
        assert_eq!(steps, [1, 2, 3]);
    }
}
