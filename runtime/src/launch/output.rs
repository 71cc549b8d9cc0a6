//! The lines that a rank writes to its standard error.

/// Maximum bytes of a line; the rest of a longer line is dropped.
const LINE_BYTES_MAX: usize = 2000;

/// Cuts output into lines.
#[derive(Debug, Default)]
pub(super) struct Output {
    begun: Vec<u8>,
}

impl Output {
    /// Adds received bytes; returns the lines that they complete.
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

    /// The last line without a line break, if any.
    pub(super) fn finish(&mut self) -> Option<String> {
        (!self.begun.is_empty()).then(|| self.end_line())
    }

    fn end_line(&mut self) -> String {
        // Escape sequences of a rank must not reach a terminal through an error message.
        let text: String =
            String::from_utf8_lossy(&self.begun).chars().filter(|c| !c.is_control() || *c == '\t').collect();
        self.begun.clear();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_cut() {
        let mut output = Output::default();
        output.push(&[b'x'; 5000]);
        output.push(&[b'x'; 5000]);

        let last = output.finish().unwrap();

        assert_eq!(last.len(), LINE_BYTES_MAX);
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
