//! Finds the line of a key in a block-style YAML text, for error messages.
//!
//! The parser's tree has no positions. The scan handles only the YAML of typical configurations (indentation, `key:`, `- `);
//! for other YAML, the message has no line.

use std::collections::BTreeMap;
use std::fmt;

/// One step down the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    /// Into the value of this key.
    Key(String),
    /// Into the item at this position.
    Item(usize),
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => f.write_str(key),
            Self::Item(index) => write!(f, "{index}"),
        }
    }
}

/// A line with content: its number, the column of its first character, and the text from that column.
struct Line<'a> {
    number: usize,
    column: usize,
    text: &'a str,
}

/// The line of the value at `path`, counted from 1.
pub(crate) fn line_of(text: &str, path: &[Segment]) -> Option<usize> {
    let lines = content(text);
    let mut block: &[Line<'_>] = &lines;
    let mut found = None;
    for segment in path {
        let column = block.first()?.column;
        let is_item = |line: &Line<'_>| line.column == column && line.text.starts_with('-');
        let at = match segment {
            Segment::Key(key) => block.iter().position(|line| line.column == column && key_of(line.text) == Some(key)),
            Segment::Item(index) => (0..block.len()).filter(|&i| is_item(&block[i])).nth(*index),
        }?;
        let found_in = &block[at..];
        found = Some(found_in[0].number);
        // `content` splits a dash line into dash and content, so everything below has a greater column. The exception is
        // a list, which YAML allows at the column of its own key.
        let list_at_key = matches!(segment, Segment::Key(_))
            && found_in.get(1).is_some_and(|line| line.column == column && line.text.starts_with('-'));
        let ends = |line: &Line<'_>| {
            line.column < column || (line.column == column && !(list_at_key && line.text.starts_with('-')))
        };
        let end = found_in.iter().skip(1).position(ends).map_or(found_in.len(), |n| n + 1);
        block = &found_in[1..end];
    }
    found
}

/// The first top-level key that occurs twice in the text, with the line of its second occurrence.
pub(crate) fn repeated_key(text: &str) -> Option<(String, usize)> {
    let lines = content(text);
    let column = lines.first()?.column;
    let mut seen = BTreeMap::new();
    for line in lines.iter().filter(|line| line.column == column) {
        if let Some(key) = key_of(line.text)
            && seen.insert(key, line.number).is_some()
        {
            return Some((key.to_owned(), line.number));
        }
    }
    None
}

/// Lines that are not blank, comment or document marker; `- key: v` becomes two lines, the dash and the rest.
fn content(text: &str) -> Vec<Line<'_>> {
    let mut lines = Vec::new();
    for (index, whole) in text.lines().enumerate() {
        let mut text = whole.trim_start();
        let mut column = whole.len() - text.len();
        if text.is_empty() || text.starts_with('#') || text.starts_with("---") || text.starts_with('%') {
            continue;
        }
        while let Some(rest) = text.strip_prefix("- ") {
            lines.push(Line { number: index + 1, column, text: "-" });
            let content = rest.trim_start();
            column += 2 + rest.len() - content.len();
            text = content;
        }
        lines.push(Line { number: index + 1, column, text });
    }
    lines
}

/// The key that a line sets, without quotes.
fn key_of(text: &str) -> Option<&str> {
    let quote = text.chars().next().filter(|c| matches!(c, '"' | '\''));
    let (key, rest) = match quote {
        Some(quote) => text[1..].split_once(quote)?,
        None => text.split_once(':').map(|(key, _)| (key, &text[key.len()..]))?,
    };
    let after = rest.trim_start().strip_prefix(':')?;
    (after.is_empty() || after.starts_with(char::is_whitespace)).then_some(key.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# a comment\nseed: 1\nmodel:\n  model_type: llama\n  \"hidden_size\": 64\ndatasets:\n- path: a\n  type: completion\n-   path: b\n    field: body\nlora_r: 2\n";

    fn key(key: &str) -> Segment {
        Segment::Key(key.into())
    }

    #[test]
    fn keys_of_sections_and_of_list_items_are_found() {
        assert_eq!(line_of(TEXT, &[key("seed")]), Some(2));
        assert_eq!(line_of(TEXT, &[key("model"), key("hidden_size")]), Some(5));
        assert_eq!(line_of(TEXT, &[key("datasets"), Segment::Item(0), key("type")]), Some(8));
        assert_eq!(line_of(TEXT, &[key("datasets"), Segment::Item(1), key("field")]), Some(10));
        assert_eq!(line_of(TEXT, &[key("lora_r")]), Some(11));
    }

    #[test]
    fn key_of_one_section_is_not_found_in_another() {
        assert_eq!(line_of(TEXT, &[key("hidden_size")]), None);
        assert_eq!(line_of(TEXT, &[key("datasets"), Segment::Item(0), key("field")]), None);
    }

    #[test]
    fn repeated_key_is_named_with_its_second_line() {
        assert_eq!(repeated_key("a: 1\nb: 2\na: 3\n"), Some(("a".into(), 3)));
        assert_eq!(repeated_key(TEXT), None);
    }
}
