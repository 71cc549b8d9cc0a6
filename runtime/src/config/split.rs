//! Which records of a data set are read: `train`, `train[:10%]`, `train[100:200]`, `train+validation[:500]`.
//!
//! The notation and its meaning are those of the `split` argument of `datasets.load_dataset`.

use std::ops::Range;

use thiserror::Error;

/// Why a text is no split.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a split such as train, train[:10%], train[100:200] or train+validation")]
pub struct NoSplit;

/// One or several slices of splits, read one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// As it was written.
    text: String,
    slices: Vec<Slice>,
}

/// A part of a split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slice {
    /// The name of the split.
    pub(crate) split: String,
    from: Option<i64>,
    to: Option<i64>,
    unit: Unit,
}

/// The unit of the ends of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Records,
    /// Percent, rounded to the nearest record.
    Percent,
    /// Percent, each of the same number of records; those that remain are left out.
    EqualPercent,
}

impl Split {
    /// All of the split with this name.
    pub fn whole(name: &str) -> Self {
        let slice = Slice { split: name.to_owned(), from: None, to: None, unit: Unit::Records };
        Self { text: name.to_owned(), slices: vec![slice] }
    }

    /// Reads the notation.
    ///
    /// # Errors
    /// When the text is something else.
    pub fn parse(text: &str) -> Result<Self, NoSplit> {
        let slices = text.split('+').map(|part| Slice::parse(part.trim())).collect::<Result<_, _>>()?;
        Ok(Self { text: text.to_owned(), slices })
    }

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn slices(&self) -> &[Slice] {
        &self.slices
    }
}

impl Slice {
    fn parse(text: &str) -> Result<Self, NoSplit> {
        let (text, equal) = match text.strip_suffix("(pct1_dropremainder)") {
            Some(rest) => (rest, true),
            None => (text.strip_suffix("(closest)").unwrap_or(text), false),
        };
        let (name, ends) = match text.split_once('[') {
            Some((name, ends)) => (name, Some(ends.strip_suffix(']').ok_or(NoSplit)?)),
            None => (text, None),
        };
        let is_word = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || !name.chars().all(is_word) || name.starts_with('.') {
            return Err(NoSplit);
        }
        let (from, to) = match ends {
            Some(ends) => ends.split_once(':').ok_or(NoSplit)?,
            None => ("", ""),
        };
        let is_percent = from.ends_with('%') || to.ends_with('%');
        if [from, to].iter().any(|end| !end.is_empty() && end.ends_with('%') != is_percent) || (equal && !is_percent) {
            return Err(NoSplit);
        }
        let unit = match (is_percent, equal) {
            (true, true) => Unit::EqualPercent,
            (true, false) => Unit::Percent,
            (false, _) => Unit::Records,
        };
        let (from, to) = (end_of(from)?, end_of(to)?);
        if is_percent && [from, to].iter().flatten().any(|percent| !(-100..=100).contains(percent)) {
            return Err(NoSplit);
        }
        Ok(Self { split: name.to_owned(), from, to, unit })
    }

    /// Whether the slice has all records of its split.
    pub(crate) fn is_whole(&self) -> bool {
        self.from.is_none() && self.to.is_none()
    }

    /// The records of the slice, if that needs no count of the split's records.
    pub(crate) fn without_count(&self) -> Option<Range<u64>> {
        let from = u64::try_from(self.from.unwrap_or(0)).ok()?;
        let to = self.to.map_or(Some(u64::MAX), |to| u64::try_from(to).ok())?;
        (self.unit == Unit::Records).then_some(from..to.max(from))
    }

    /// The records of the slice in a split of `n` records.
    pub(crate) fn of(&self, n: u64) -> Range<u64> {
        let absolute = |end: i64| match self.unit {
            Unit::Records => i128::from(end),
            Unit::Percent => nearest(i128::from(end) * i128::from(n)),
            Unit::EqualPercent => i128::from(end) * i128::from(n / 100),
        };
        let end = |end: Option<i64>, absent: u64| {
            let end = end.map_or(i128::from(absent), absolute);
            let from_start = if end < 0 { end + i128::from(n) } else { end };
            from_start.clamp(0, i128::from(n)) as u64
        };
        let (from, to) = (end(self.from, 0), end(self.to, n));
        from..to.max(from)
    }
}

/// A hundredth, rounded to the nearest whole number; halves to the even one, as in Python.
fn nearest(hundredths: i128) -> i128 {
    let (whole, rest) = (hundredths.div_euclid(100), hundredths.rem_euclid(100));
    match rest.cmp(&50) {
        std::cmp::Ordering::Less => whole,
        std::cmp::Ordering::Equal => whole + whole.rem_euclid(2),
        std::cmp::Ordering::Greater => whole + 1,
    }
}

/// The number of an end, which may be absent.
fn end_of(text: &str) -> Result<Option<i64>, NoSplit> {
    let digits = text.trim_end_matches('%');
    if digits.is_empty() {
        return if text.is_empty() { Ok(None) } else { Err(NoSplit) };
    }
    let is_number = digits.trim_start_matches('-').starts_with(|c: char| c.is_ascii_digit());
    digits.replace('_', "").parse().map(Some).ok().filter(|_| is_number).ok_or(NoSplit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str, n: u64) -> (u64, u64) {
        let range = Split::parse(text).unwrap().slices()[0].of(n);
        (range.start, range.end)
    }

    // Made with `datasets` 4.x: ReadInstruction.from_spec(text).to_absolute({"train": n})
    #[test]
    fn slices_have_the_records_that_datasets_gives_them() {
        for (text, n, expected) in [
            ("train", 10, (0, 10)),
            ("train[:10%]", 999, (0, 100)),
            ("train[10%:20%]", 999, (100, 200)),
            ("train[:1%]", 50, (0, 0)),
            ("train[:3%]", 50, (0, 2)),
            ("train[:5%]", 50, (0, 2)),
            ("train[:50%]", 5, (0, 2)),
            ("train[:50%]", 7, (0, 4)),
            ("train[-10%:]", 999, (899, 999)),
            ("train[100:200]", 150, (100, 150)),
            ("train[100:200]", 50, (50, 50)),
            ("train[-3:]", 10, (7, 10)),
            ("train[:-3]", 10, (0, 7)),
            ("train[-30:]", 10, (0, 10)),
            ("train[:1_000]", 5000, (0, 1000)),
            ("train[10%:20%](pct1_dropremainder)", 999, (90, 180)),
        ] {
            assert_eq!(range(text, n), expected, "{text} of {n}");
        }
    }

    #[test]
    fn slices_of_several_splits_are_read_in_their_order() {
        let split = Split::parse("train+validation[:500]").unwrap();

        let names: Vec<&str> = split.slices().iter().map(|slice| &slice.split[..]).collect();
        assert_eq!(names, ["train", "validation"]);
        assert!(split.slices()[0].is_whole());
        assert_eq!(split.slices()[1].without_count(), Some(0..500));
    }

    #[test]
    fn text_that_is_no_split_is_refused() {
        for text in [
            "",
            "train[",
            "train[10]",
            "train[:ten]",
            "train[:1%:2]",
            "train[1:2%]",
            "train[:101%]",
            "../x",
            "a/b",
            "train[:%]",
            "train[:_1]",
            "train+",
            "train[:5](pct1_dropremainder)",
            "train[:99999999999999999999]",
        ] {
            assert_eq!(Split::parse(text), Err(NoSplit), "{text}");
        }
    }
}
