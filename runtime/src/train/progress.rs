//! Output for people while a job runs: a progress bar with ETA on a terminal, plain lines otherwise.

use crate::console::{Console, Stream, printable};
use crate::events::{EvalMetrics, Event, StepMetrics};
use crate::train::step_line::{COLUMNS, Pace, beside_bar, of_pairs, step_line};
use crate::units::human_duration;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};
use phalanx_storage::hub::fetch::Progress as Download;
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shows steps, evaluations and messages.
#[derive(Debug)]
pub struct Progress {
    console: Console,
    bar: Option<ProgressBar>,
    logging_steps: u64,
    total_steps: u64,
    n_shown: u64,
    pace: Pace,
    /// When the log-probabilities of a reference began to be computed.
    reference_since: Option<Instant>,
}

impl Progress {
    /// Shows a bar if standard error is a terminal, and a line for every `logging_steps`-th step.
    pub fn new(total_steps: u64, first_step: u64, logging_steps: u64, console: &Console) -> Progress {
        let bar = bar(console, total_steps, "{wide_bar} {msg}").map(|bar| bar.with_position(first_step));
        let (console, logging_steps) = (console.clone(), logging_steps.max(1));
        Progress { console, bar, logging_steps, total_steps, n_shown: 0, pace: Pace::default(), reference_since: None }
    }

    /// Shows a finished step.
    pub fn step(&mut self, m: &StepMetrics) {
        self.pace.see(m);
        let last = m.step == self.total_steps;
        if self.n_shown == 0 || last || m.step.is_multiple_of(self.logging_steps) {
            self.line(&step_line(m, &self.pace, columns(self.console.out())));
        }
        self.n_shown += 1;
        if let Some(bar) = &self.bar {
            bar.set_position(m.step);
            let beside = columns(self.console.err()).saturating_sub(BAR_COLUMNS);
            bar.set_message(beside_bar(m, &self.pace, beside));
        }
    }

    /// Says that the log-probabilities of a reference are being computed, and shows on a terminal how far they are.
    pub fn reference(&mut self, done: usize, total: usize) {
        if done == 0 {
            self.line(&format!("computing the log-probabilities of the reference for {total} samples"));
        }
        let seconds = self.reference_since.get_or_insert_with(Instant::now).elapsed().as_secs_f64();
        let left = if done > 0 { seconds * (total - done) as f64 / done as f64 } else { 0.0 };
        let eta = if done > 0 { human_duration(Duration::from_secs_f64(left)) } else { "?".to_owned() };
        if let Some(bar) = &self.bar {
            bar.set_message(format!("reference: {done} of {total} samples, {eta} left"));
        }
    }

    /// Shows a finished evaluation.
    pub fn eval(&self, m: &EvalMetrics) {
        let perplexity = m.eval_perplexity.map(|perplexity| format!("  perplexity {perplexity:.2}"));
        let of_objective = of_pairs(&m.scalars).map(|text| format!("  {text}"));
        let told = perplexity.or(of_objective).unwrap_or_default();
        let took = human_duration(Duration::from_secs_f64(m.eval_ms / 1e3));
        self.line(&format!("eval  {:5}  loss {:8.5}{told}  ({took})", m.step, m.eval_loss));
    }

    /// Shows a message about the run.
    pub fn note(&self, text: &str) {
        self.line(text);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| self.console.say(text)),
            None => self.console.say(text),
        }
    }
}

/// A bar while files are tokenised, on a terminal; small files finish before it would appear.
#[derive(Debug)]
pub struct Tokenising {
    console: Console,
    bar: Option<(PathBuf, ProgressBar)>,
}

/// Size from which a file gets a bar.
const WATCHED_BYTES: u64 = 1 << 20;

impl Tokenising {
    /// Shows bars if standard error is a terminal.
    pub fn new(console: &Console) -> Tokenising {
        Tokenising { console: console.clone(), bar: None }
    }

    /// Handles an event: progress moves the bar, any other event removes it.
    pub fn see(&mut self, event: &Event) {
        let Event::Preparing { path, done_bytes, total_bytes } = event else {
            if let Some((_, bar)) = self.bar.take() {
                bar.finish_and_clear();
            }
            return;
        };
        if *total_bytes < WATCHED_BYTES {
            return;
        }
        if self.bar.as_ref().is_none_or(|(shown, _)| shown != path) {
            let style = "tokenising {msg} {wide_bar} {bytes}/{total_bytes} [{eta} left]";
            let bar = bar(&self.console, *total_bytes, style);
            let name = file_name(path, columns(self.console.err()));
            self.bar = bar.map(|bar| (path.clone(), bar.with_message(name)));
        }
        if let Some((_, bar)) = &self.bar {
            bar.set_position(*done_bytes);
        }
    }
}

/// A bar while files are downloaded or uploaded, on a terminal; else a line for each file.
#[derive(Debug)]
pub struct Transferring {
    console: Console,
    name: String,
    bar: Option<ProgressBar>,
    file: PathBuf,
}

impl Transferring {
    /// For the repository with this name.
    pub fn new(console: &Console, name: &str) -> Transferring {
        Transferring { console: console.clone(), name: name.to_owned(), bar: None, file: PathBuf::new() }
    }

    /// Shows how far the transfer is.
    pub fn see(&mut self, progress: Download<'_>) {
        if self.file != progress.file {
            self.file = progress.file.to_owned();
            if self.bar.is_none() {
                let style = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} [{eta} left]";
                self.bar = bar(&self.console, progress.total_bytes, style);
            }
            match &self.bar {
                Some(bar) => bar.set_message(file_name(progress.file, columns(self.console.err()))),
                None => self.console.err().say(format_args!("{}: {}", self.name, progress.file.display())),
            }
        }
        if let Some(bar) = &self.bar {
            bar.set_position(progress.done_bytes);
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}

/// A bar while rows are evaluated, on a terminal.
#[derive(Debug)]
pub struct Evaluating(Option<ProgressBar>);

impl Evaluating {
    /// For this number of rows.
    pub fn new(console: &Console, n_rows: usize) -> Evaluating {
        Evaluating(bar(console, n_rows as u64, "evaluating {wide_bar} {pos}/{len} rows [{eta} left]"))
    }

    /// Shows the number of rows so far.
    pub fn see(&self, n_rows: usize) {
        self.0.iter().for_each(|bar| bar.set_position(n_rows as u64));
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.0.iter().for_each(ProgressBar::finish_and_clear);
    }
}

/// Columns of the bar beside its text, with the blank between them.
const BAR_COLUMNS: usize = 20;
/// Columns of the numbers beside the name of a file.
const NUMBERS_COLUMNS: usize = 64;

fn columns(stream: &Stream) -> usize {
    stream.width().map_or(COLUMNS, usize::from)
}

/// The end of a path: what fits beside a bar, but never less than some letters of the name.
fn file_name(path: &Path, columns: usize) -> String {
    let (text, fits) =
        (printable(&path.display().to_string()).into_owned(), columns.saturating_sub(NUMBERS_COLUMNS).max(12));
    match text.chars().count() {
        n if n > fits => text
            .chars()
            .skip(n - fits + 1)
            .fold("…".to_owned(), |text, letter| text + letter.encode_utf8(&mut [0; 4])),
        _ => text,
    }
}

/// A bar on standard error, if that is a terminal.
fn bar(console: &Console, length: u64, style: &str) -> Option<ProgressBar> {
    let target =
        console.err().is_terminal().then(|| BarTerminal { stream: console.err().clone(), frame: Mutex::default() })?;
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::term_like(Box::new(target)));
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    Some(bar)
}

/// The terminal as a bar sees it: a frame is drawn as a whole, without waiting for the terminal.
#[derive(Debug)]
struct BarTerminal {
    stream: Stream,
    frame: Mutex<String>,
}

impl BarTerminal {
    fn frame(&self) -> MutexGuard<'_, String> {
        // A frame that was begun before a panic is drawn with the next one.
        self.frame.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an ANSI sequence (ECMA-48, CUU to CUB) that moves the cursor.
    fn move_cursor(&self, n: usize, direction: char) -> io::Result<()> {
        if n > 0 {
            write!(self.frame(), "\x1b[{n}{direction}").map_err(io::Error::other)?;
        }
        Ok(())
    }
}

impl TermLike for BarTerminal {
    fn width(&self) -> u16 {
        self.stream.width().unwrap_or(COLUMNS as u16)
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        *self.frame() += text;
        self.frame().push('\n');
        Ok(())
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        *self.frame() += text;
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        // The beginning of the line, and erase in line (EL 2).
        self.write_str("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let frame = std::mem::take(&mut *self.frame());
        if !frame.is_empty() {
            self.stream.frame(frame);
        }
        Ok(())
    }
}
