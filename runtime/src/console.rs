//! The output of commands that run a job: lines for standard output and standard error, written by threads of their own.
//!
//! A job must not depend on the reader of its output. A terminal stopped with Ctrl-S, a pipe whose reader has died and a
//! full disk are faults of the output: the job trains on, and the lines that could not be written are counted.
//!
//! Invariants:
//! - CONSOLE-1 No caller waits for a destination: [`Stream::say`] adds to a queue of at most `QUEUE_BYTES_MAX`, and drops
//!   a line that does not fit.
//! - CONSOLE-2 Lines appear in the order of the calls; those of both streams too, if both have one destination.
//! - CONSOLE-3 A gap in the output is followed by a line with the number of missing lines, once the destination accepts it.
//! - CONSOLE-4 Names in files of others, such as those of fields, models and paths, cannot control the terminal: every line goes
//!   through [`printable`].

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Limit of a queue: an hour of steps, so that a reader may pause.
const QUEUE_BYTES_MAX: usize = 1 << 20;
/// Queued bytes above which frames of a progress bar are skipped; the next frame replaces them.
const FRAME_BYTES_MAX: usize = 4 << 10;
/// Interval of attempts to write to a non-blocking destination that is full.
const FULL_PAUSE: Duration = Duration::from_millis(10);

/// Standard output and standard error of this process.
#[derive(Clone, Debug)]
pub struct Console {
    out: Stream,
    err: Stream,
}

/// One of the two streams.
#[derive(Clone, Debug)]
pub struct Stream {
    queue: Arc<Queue>,
    /// Its position among the destinations of the queue's thread.
    destination: usize,
    /// The terminal to which the stream leads, if it is one.
    terminal: Option<Arc<OwnedFd>>,
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<(usize, Vec<u8>)>,
    n_bytes: usize,
    /// Lines that did not fit into the queue since the last one that did, and their stream.
    n_dropped: u64,
    dropped_of: usize,
    /// Whether the thread is writing.
    writes: bool,
    /// Grows with every successful write.
    n_writes: u64,
}

/// Text without characters that control a terminal, which names and data of others may contain.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c.escape_default().collect())
}

/// As [`printable`], for JSON text, which has escapes of its own: its value stays the same.
pub fn printable_json(text: &str) -> Cow<'_, str> {
    // Such characters are parts of strings, where JSON takes most of them as they are; none is beyond 16 bits.
    escaped(text, |c| format!("\\u{:04x}", u32::from(c)))
}

fn escaped(text: &str, escape: impl Fn(char) -> String) -> Cow<'_, str> {
    // Marks of direction reorder what is shown around them.
    let marks = |c: char| ('\u{202a}'..='\u{202e}').contains(&c) || ('\u{2066}'..='\u{2069}').contains(&c);
    let controls = |c: char| !matches!(c, '\n' | '\t') && (c.is_control() || marks(c));
    if !text.contains(controls) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match controls(c) {
            true => shown += &escape(c),
            false => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

impl Console {
    /// Starts the threads that write.
    ///
    /// # Errors
    /// When the system gives no thread or no descriptor.
    pub fn start() -> io::Result<Console> {
        let out = io::stdout().as_fd().try_clone_to_owned()?;
        let err = io::stderr().as_fd().try_clone_to_owned()?;
        let terminal = |fd: &OwnedFd| fd.is_terminal().then(|| fd.try_clone().map(Arc::new)).transpose();
        let terminals = [terminal(&out)?, terminal(&err)?];
        let (out, err) = (File::from(out), File::from(err));
        let share = out.metadata().and_then(|a| Ok((a.dev(), a.ino()) == err.metadata().map(|b| (b.dev(), b.ino()))?));
        Console::over(Box::new(out), Box::new(err), share.unwrap_or(false), terminals)
    }

    /// A console over these destinations; `share` tells whether both are the same.
    fn over(out: Sink, err: Sink, share: bool, terminals: [Option<Arc<OwnedFd>>; 2]) -> io::Result<Console> {
        let [to_out, to_err] = terminals;
        let stream =
            |queue: &Arc<Queue>, destination, terminal| Stream { queue: Arc::clone(queue), destination, terminal };
        if share {
            let both = start(vec![("standard output", out), ("standard error", err)])?;
            return Ok(Console { out: stream(&both, 0, to_out), err: stream(&both, 1, to_err) });
        }
        let (out, err) = (start(vec![("standard output", out)])?, start(vec![("standard error", err)])?);
        Ok(Console { out: stream(&out, 0, to_out), err: stream(&err, 0, to_err) })
    }

    /// Writes a line to standard output.
    pub fn say(&self, text: impl Display) {
        self.out.say(text);
    }

    /// The same with standard error for both streams, for commands whose standard output is for programs.
    #[must_use]
    pub fn of_errors(&self) -> Console {
        Console { out: self.err.clone(), err: self.err.clone() }
    }

    /// Standard output.
    pub const fn out(&self) -> &Stream {
        &self.out
    }

    /// Standard error.
    pub const fn err(&self) -> &Stream {
        &self.err
    }

    /// Waits until all lines are written, but not longer than `patience` for a destination that accepts nothing.
    pub fn finish(&self, patience: Duration) {
        self.out.queue.drain(patience);
        self.err.queue.drain(patience);
    }
}

impl Stream {
    /// Writes a line (CONSOLE-1), without characters that control a terminal (CONSOLE-4).
    pub fn say(&self, text: impl Display) {
        self.say_styled(printable(&text.to_string()));
    }

    /// As [`Stream::say`], for a text with colours whose foreign parts went through [`printable`].
    pub(crate) fn say_styled(&self, text: impl Display) {
        self.push(format!("{text}\n").into_bytes(), QUEUE_BYTES_MAX);
    }

    /// Draws a frame of a progress bar, unless the destination is behind.
    pub(crate) fn frame(&self, frame: String) {
        self.push_if(frame.into_bytes(), FRAME_BYTES_MAX);
    }

    /// Whether a person may be watching.
    pub fn is_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    /// Columns of the terminal; `None` if it is none.
    #[allow(unsafe_code)] // The standard library does not ask for the size of a terminal.
    pub(crate) fn width(&self) -> Option<u16> {
        let terminal = self.terminal.as_ref()?;
        let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the descriptor is open, and the kernel writes one `winsize`, which outlives the call.
        let asked = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
        (asked == 0 && size.ws_col > 0).then_some(size.ws_col)
    }

    fn push(&self, bytes: Vec<u8>, bytes_max: usize) {
        if !self.push_if(bytes, bytes_max) {
            let mut state = self.queue.state();
            (state.n_dropped, state.dropped_of) = (state.n_dropped + 1, self.destination);
        }
    }

    /// Adds to the queue if it then holds at most `bytes_max`; returns whether it did.
    fn push_if(&self, bytes: Vec<u8>, bytes_max: usize) -> bool {
        let mut state = self.queue.state();
        let fits = state.n_bytes + bytes.len() <= bytes_max;
        if fits {
            state.mark_gap();
            state.push(self.destination, bytes);
            self.queue.changed.notify_all();
        }
        fits
    }
}

/// For the log: a write is one or more whole lines.
impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes.to_vec(), QUEUE_BYTES_MAX);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl State {
    fn push(&mut self, destination: usize, bytes: Vec<u8>) {
        self.n_bytes += bytes.len();
        self.waiting.push_back((destination, bytes));
    }

    /// Puts a note in the place of dropped lines (CONSOLE-3).
    fn mark_gap(&mut self) {
        if self.n_dropped > 0 {
            let note = format!("({} lines are missing here: nobody read the output)\n", self.n_dropped);
            self.n_dropped = 0;
            self.push(self.dropped_of, note.into_bytes());
        }
    }
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next bytes to write, once there are some.
    fn next(&self) -> (usize, Vec<u8>) {
        let mut state = self.state();
        loop {
            if state.waiting.is_empty() {
                state.mark_gap();
            }
            if let Some((destination, bytes)) = state.waiting.pop_front() {
                state.n_bytes -= bytes.len();
                state.writes = true;
                return (destination, bytes);
            }
            state.writes = false;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn has_written(&self) {
        self.state().n_writes += 1;
        self.changed.notify_all();
    }

    /// Waits until the queue is empty, while something is written every `patience`.
    fn drain(&self, patience: Duration) {
        let mut state = self.state();
        while state.writes || !state.waiting.is_empty() || state.n_dropped > 0 {
            let n_writes = state.n_writes;
            let is_stuck = |state: &mut State| {
                state.n_writes == n_writes && (state.writes || !state.waiting.is_empty() || state.n_dropped > 0)
            };
            let waited = self.changed.wait_timeout_while(state, patience, is_stuck);
            let (after, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return;
            }
            state = after;
        }
    }
}

type Sink = Box<dyn Write + Send>;

/// A destination, and the lines that it has lost.
struct Destination {
    name: &'static str,
    sink: Sink,
    n_lost: u64,
}

/// Starts a thread that writes to these destinations in the order of one queue.
fn start(sinks: Vec<(&'static str, Sink)>) -> io::Result<Arc<Queue>> {
    let queue = Arc::new(Queue::default());
    let mut destinations: Vec<Destination> =
        sinks.into_iter().map(|(name, sink)| Destination { name, sink, n_lost: 0 }).collect();
    let of_thread = Arc::clone(&queue);
    let serve = move || {
        loop {
            let (destination, bytes) = of_thread.next();
            destinations[destination].write(&bytes, &of_thread);
        }
    };
    std::thread::Builder::new().name("output".into()).spawn(serve)?;
    Ok(queue)
}

impl Destination {
    /// Writes bytes; what cannot be written is lost and counted (CONSOLE-3).
    fn write(&mut self, bytes: &[u8], queue: &Queue) {
        let note = match self.n_lost {
            0 => String::new(),
            n => format!("({n} lines are missing here: they could not be written)\n"),
        };
        match self.write_all(note.as_bytes(), queue).and_then(|()| self.write_all(bytes, queue)) {
            Ok(()) => self.n_lost = 0,
            Err(error) => {
                self.n_lost += 1;
                if self.n_lost == 1 {
                    tracing::warn!(%error, "cannot write to {}; the command goes on", self.name);
                }
            }
        }
    }

    fn write_all(&mut self, mut bytes: &[u8], queue: &Queue) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.sink.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => {
                    bytes = &bytes[n..];
                    queue.has_written();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another process has made the destination non-blocking.
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(FULL_PAUSE),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(60);

    /// A destination that takes each write when it gets a token, and fails it if the token tells so.
    struct Gate {
        tokens: Receiver<Result<(), ErrorKind>>,
        written: Written,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // After the last token everything is accepted.
            self.tokens.recv().unwrap_or(Ok(()))?;
            self.written.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    type Opens = Sender<Result<(), ErrorKind>>;
    type Written = Arc<Mutex<Vec<u8>>>;

    fn gate() -> (Sink, Opens, Written) {
        let ((opens, tokens), written) = (channel(), Arc::new(Mutex::new(Vec::new())));
        (Box::new(Gate { tokens, written: Arc::clone(&written) }), opens, written)
    }

    fn text(written: &Mutex<Vec<u8>>) -> String {
        String::from_utf8(written.lock().unwrap().clone()).unwrap()
    }

    fn console() -> (Console, [Opens; 2], [Written; 2]) {
        let ((out, opens_out, written_out), (err, opens_err, written_err)) = (gate(), gate());
        let console = Console::over(out, err, false, [None, None]).unwrap();
        (console, [opens_out, opens_err], [written_out, written_err])
    }

    // CONSOLE-1, CONSOLE-3
    // CONSOLE-4
    #[test]
    fn text_that_controls_a_terminal_is_escaped() {
        assert_eq!(printable("a\u{1b}[2Jb\r\u{202e}c\n\té"), "a\\u{1b}[2Jb\\r\\u{202e}c\n\té");
        assert_eq!(printable("\u{9b}31m\u{7}\u{8}\u{7f}"), "\\u{9b}31m\\u{7}\\u{8}\\u{7f}");
        assert!(matches!(printable("näme\n"), Cow::Borrowed("näme\n")));
    }

    // CONSOLE-4
    #[test]
    fn json_text_controls_no_terminal_and_has_its_value() {
        let value = serde_json::json!({"a\u{7f}": "\u{9b}31m\u{1b}[2J\u{202e}\u{2069}é\n\t\"\\"});

        for text in [value.to_string(), format!("{value:#}")] {
            let shown = printable_json(&text);
            assert_eq!(printable(&shown), shown);
            assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value, "{shown}");
        }
    }

    #[test]
    fn nobody_waits_for_an_unread_output_and_the_missing_lines_are_counted() {
        let (console, opens, written) = console();
        let line = "x".repeat(1023);
        let begin = Instant::now();

        (0..5000).for_each(|_| console.say(&line));
        console.finish(Duration::from_millis(1));
        assert!(begin.elapsed() < LONG, "nothing has been read");
        drop(opens);
        console.finish(LONG);
        console.say("again");
        console.finish(LONG);

        let text = text(&written[0]);
        // There may be two gaps: the thread may take its first line when lines have been dropped.
        let notes = text.lines().filter(|line| line.starts_with('('));
        let n_missing: usize = notes.map(|note| note[1..].split(' ').next().unwrap().parse::<usize>().unwrap()).sum();
        assert_eq!(text.lines().filter(|l| *l == line).count() + n_missing, 5000);
        // The queue, and the line with the thread.
        assert!((1024..=1025).contains(&(5000 - n_missing)), "{n_missing}");
        assert_eq!(text.lines().last(), Some("again"));
    }

    // CONSOLE-1
    #[test]
    fn unread_output_does_not_delay_the_other_stream() {
        let (console, [_blocks, opens], [_, written]) = console();
        drop(opens);

        console.say("unread");
        console.err().say("read");
        console.err().queue.drain(LONG);

        assert_eq!(text(&written), "read\n");
    }

    // CONSOLE-3
    #[test]
    fn full_disk_and_dead_reader_end_nothing_and_lost_lines_are_counted() {
        for why in [ErrorKind::StorageFull, ErrorKind::BrokenPipe] {
            let (console, [opens, _], [written, _]) = console();
            let outcomes = [Ok(()), Err(why), Err(why)];
            outcomes.into_iter().for_each(|outcome| opens.send(outcome).unwrap());
            drop(opens);

            ["a", "b", "c", "d"].into_iter().for_each(|line| console.say(line));
            console.finish(LONG);

            assert_eq!(text(&written), "a\n(2 lines are missing here: they could not be written)\nd\n");
        }
    }

    // CONSOLE-2
    #[test]
    fn streams_to_one_destination_keep_the_order_of_their_lines() {
        let (out, opens, written) = gate();
        let err = Gate { tokens: channel().1, written: Arc::clone(&written) };
        drop(opens);
        let console = Console::over(out, Box::new(err), true, [None, None]).unwrap();

        (0..100).for_each(|i| if i % 3 == 0 { console.say(i) } else { console.err().say(i) });
        console.finish(LONG);

        let lines: Vec<usize> = text(&written).lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(lines, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn frames_are_skipped_while_the_output_is_behind() {
        let (console, [opens, _], [written, _]) = console();

        (0..100).for_each(|_| console.out().frame("f".repeat(100)));
        drop(opens);
        console.finish(LONG);

        let n_bytes = text(&written).len();
        assert!(n_bytes <= FRAME_BYTES_MAX + 100, "{n_bytes}");
        assert!(!text(&written).contains('('), "skipped frames are no missing lines");
    }
}
