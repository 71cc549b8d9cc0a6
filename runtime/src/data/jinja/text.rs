//! A text whose bytes remember which message of the conversation they come from.
//!
//! Slices and joins of texts keep the origins, so the rendered conversation tells where each message is, whatever the template
//! did to it; nothing is searched for.

use std::ops::Range;
use std::sync::Arc;

use super::budget::Budget;
use super::error::Error;

/// A text in a field of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::data) struct Field {
    /// The message's position in the conversation.
    pub(in crate::data) message: usize,
    /// The field's position in the message.
    pub(in crate::data) field: usize,
    /// The position of the text in a field that has several.
    pub(in crate::data) text: usize,
}

/// Bytes of a text that come from a field of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::data) struct Origin {
    pub(in crate::data) bytes: Range<usize>,
    pub(in crate::data) of: Field,
    /// The same bytes in the field, if there are as many; else those that became the bytes.
    pub(in crate::data) source: Range<usize>,
}

impl Origin {
    fn is_unchanged(&self) -> bool {
        self.bytes.len() == self.source.len()
    }

    /// The bytes that come from `range` of the field, if any.
    pub(in crate::data) fn of_source(&self, range: &Range<usize>) -> Option<Range<usize>> {
        let source = self.source.start.max(range.start)..self.source.end.min(range.end);
        if source.is_empty() {
            return None;
        }
        if !self.is_unchanged() {
            return Some(self.bytes.clone());
        }
        let start = self.bytes.start + source.start - self.source.start;
        Some(start..start + source.len())
    }

    /// The part of the origin within `range`, if any.
    pub(in crate::data) fn within(&self, range: &Range<usize>) -> Option<Self> {
        let bytes = self.bytes.start.max(range.start)..self.bytes.end.min(range.end);
        if bytes.is_empty() {
            return None;
        }
        let source = match self.is_unchanged() {
            true => {
                let start = self.source.start + bytes.start - self.bytes.start;
                start..start + bytes.len()
            }
            false => self.source.clone(),
        };
        Some(Self { bytes, of: self.of, source })
    }
}

/// An immutable text. Two texts are equal if their letters are.
#[derive(Debug, Clone)]
pub(super) struct Text {
    text: Arc<str>,
    /// In order and apart.
    origins: Option<Arc<[Origin]>>,
    /// Marked by `safe` or `escape`: joined by `+`, it escapes the other side.
    is_markup: bool,
}

impl Text {
    pub(super) fn new(text: impl Into<Arc<str>>) -> Self {
        Self { text: text.into(), origins: None, is_markup: false }
    }

    /// A text that is in a message.
    pub(super) fn of_field(text: &str, of: Field) -> Self {
        let all = 0..text.len();
        let origins = (!text.is_empty()).then(|| Arc::from([Origin { bytes: all.clone(), of, source: all }]));
        Self { text: text.into(), origins, is_markup: false }
    }

    /// A text that was made of this one and whose letters cannot be told apart: all of it comes from the field that the first
    /// letter of this one comes from.
    pub(super) fn all_from(&self, made: &str) -> Self {
        self.origins().first().map_or_else(|| Self::new(made), |origin| Self::of_field(made, origin.of))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    pub(super) fn is_markup(&self) -> bool {
        self.is_markup
    }

    #[must_use]
    pub(super) fn with_markup(mut self, is_markup: bool) -> Self {
        self.is_markup = is_markup;
        self
    }

    /// Whether both are the same text in memory, as equal short texts of Python usually are.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.text, &other.text)
    }

    pub(super) fn origins(&self) -> &[Origin] {
        self.origins.as_deref().unwrap_or_default()
    }

    /// The bytes of `range`, with their origins.
    pub(super) fn slice(&self, range: Range<usize>) -> Self {
        if range == (0..self.text.len()) {
            return self.clone().with_markup(false);
        }
        let mut builder = Builder::default();
        builder.push_part(self, range);
        builder.finish()
    }

    /// A part of this text that a method of its `str` returned.
    pub(super) fn part(&self, part: &str) -> Self {
        let start = part.as_ptr() as usize - self.text.as_ptr() as usize;
        self.slice(start..start + part.len())
    }

    /// Each letter replaced by the letters of `map`, which have the origin of the replaced one.
    pub(super) fn map_chars<I: IntoIterator<Item = char>>(
        &self,
        budget: &Budget,
        mut map: impl FnMut(usize, char) -> I,
    ) -> Result<Self, Error> {
        budget.text(self.text.len() * 2)?;
        let mut builder = Builder::default();
        let mut origins = self.origins().iter().peekable();
        for (at, c) in self.text.char_indices() {
            while origins.next_if(|origin| origin.bytes.end <= at).is_some() {}
            let start = builder.text.len();
            builder.text.extend(map(at, c));
            let bytes = start..builder.text.len();
            if let Some(origin) = origins.peek().and_then(|origin| origin.within(&(at..at + c.len_utf8()))) {
                builder.mark(Origin { bytes, ..origin });
            }
        }
        Ok(builder.finish())
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

/// Joins texts.
#[derive(Debug, Default)]
pub(super) struct Builder {
    text: String,
    origins: Vec<Origin>,
}

impl Builder {
    pub(super) fn len(&self) -> usize {
        self.text.len()
    }

    pub(super) fn push_str(&mut self, text: &str) {
        self.text += text;
    }

    pub(super) fn push(&mut self, text: &Text) {
        self.push_part(text, 0..text.text.len());
    }

    /// Appends the bytes of `range`.
    fn push_part(&mut self, text: &Text, range: Range<usize>) {
        let shift = self.text.len();
        self.text += &text.text[range.clone()];
        let origins = text.origins();
        let first = origins.partition_point(|origin| origin.bytes.end <= range.start);
        for origin in origins[first..].iter().map_while(|origin| origin.within(&range)) {
            let bytes = origin.bytes.start - range.start + shift..origin.bytes.end - range.start + shift;
            self.mark(Origin { bytes, ..origin });
        }
    }

    fn mark(&mut self, origin: Origin) {
        if origin.bytes.is_empty() {
            return;
        }
        match self.origins.last_mut() {
            Some(last)
                if last.of == origin.of
                    && last.bytes.end == origin.bytes.start
                    && last.source.end == origin.source.start
                    && last.is_unchanged()
                    && origin.is_unchanged() =>
            {
                last.bytes.end = origin.bytes.end;
                last.source.end = origin.source.end;
            }
            _ => self.origins.push(origin),
        }
    }

    pub(super) fn finish(self) -> Text {
        let origins = (!self.origins.is_empty()).then(|| self.origins.into());
        Text { text: self.text.into(), origins, is_markup: false }
    }

    /// The text and its origins.
    pub(super) fn into_parts(self) -> (String, Vec<Origin>) {
        (self.text, self.origins)
    }
}

/// The texts one after another.
pub(super) fn concat(budget: &Budget, texts: &[Text]) -> Result<Text, Error> {
    budget.text(texts.iter().map(|text| text.text.len()).sum())?;
    let mut builder = Builder::default();
    for text in texts {
        builder.push(text);
    }
    Ok(builder.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_follow_slices_joins_and_changed_letters() {
        let budget = Budget::default();
        let of = Field { message: 3, field: 1, text: 0 };
        let answer = Text::of_field("Grö\"ße", of);

        let joined = concat(&budget, &[Text::new("<"), answer.slice(1..5), Text::new(">")]).unwrap();
        let escaped = joined
            .map_chars(&budget, |_, c| if c == '"' { vec!['\\', c] } else { c.to_uppercase().collect() })
            .unwrap();

        assert_eq!(escaped.as_str(), "<RÖ\\\">");
        let origin = |bytes, source| Origin { bytes, of, source };
        assert_eq!(escaped.origins(), [origin(1..4, 1..4), origin(4..6, 4..5)]);
    }
}
