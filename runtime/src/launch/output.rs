//! The last lines that a rank wrote to its standard error.

use std::collections::VecDeque;

/// Lines that are kept.
const LINES_MAX: usize = 40;
/// Bytes of a line that are kept; the rest of a longer one is dropped.
const LINE_BYTES_MAX: usize = 2000;

/// Cuts output into lines and keeps the last.
#[derive(Debug, Default)]
pub(super) struct Output {
    lines: VecDeque<String>,
    begun: Vec<u8>,
}

impl Output {
    /// Adds what was read; gives the lines that it completes.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut complete = Vec::new();
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            let room = LINE_BYTES_MAX - self.begun.len();
            self.begun.extend_from_slice(&text[..text.len().min(room)]);
            if part.ends_with(b"\n") {
                complete.push(self.end_line());
            }
        }
        complete
    }

    /// The line that was begun and will not be completed, if any.
    pub(super) fn finish(&mut self) -> Option<String> {
        (!self.begun.is_empty()).then(|| self.end_line())
    }

    /// The last lines.
    pub(super) fn lines(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().map(String::as_str)
    }

    fn end_line(&mut self) -> String {
        // Escape sequences of a rank must not reach a terminal by way of an error message.
        let text: String =
            String::from_utf8_lossy(&self.begun).chars().filter(|c| !c.is_control() || *c == '\t').collect();
        self.begun.clear();
        if self.lines.len() == LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(text.clone());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_and_long_ones_are_cut() {
        let mut output = Output::default();
        for i in 0..100 {
            assert_eq!(output.push(format!("line {i}\n").as_bytes()), [format!("line {i}")]);
        }
        output.push(&[b'x'; 5000]);
        output.push(&[b'x'; 5000]);

        let last = output.finish().unwrap();

        assert_eq!(last.len(), LINE_BYTES_MAX);
        let lines: Vec<&str> = output.lines().collect();
        assert_eq!((lines.len(), lines[0], lines[39]), (LINES_MAX, "line 61", last.as_str()));
        assert_eq!(output.finish(), None);
    }

    #[test]
    fn lines_in_pieces_are_joined_and_control_characters_are_left_out() {
        let mut output = Output::default();

        assert_eq!(output.push(b"a\x1b[31m\xff"), Vec::<String>::new());
        assert_eq!(output.push(b"b\n\nc"), ["a[31m\u{fffd}b", ""]);
        assert_eq!(output.finish().as_deref(), Some("c"));
    }
}
