//! How a `tokenizer.json` cleans a text and splits it into words, with regular expressions that cannot fail silently.
//!
//! The `tokenizers` library takes an error of its regular expressions for the end of the text: after a run of a million blanks,
//! which exceeds the stack of fancy-regex, the rest of the text is one word. Here such an error is one of the text, and the usual
//! rule for blanks, which is what fails in practice, has a second form without look-around that has no limits.
//!
//! Everything but the patterns is the library's.

use std::fmt;

use fancy_regex::Regex;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokenizers::pattern::{Invert, Pattern};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, Offsets, PostProcessorWrapper,
    PreTokenizedString, PreTokenizer, PreTokenizerWrapper, SplitDelimiterBehavior, TokenizerImpl,
};

/// A tokenizer of the library with our patterns.
pub(super) type Library = TokenizerImpl<ModelWrapper, Cleaning, Splitting, PostProcessorWrapper, DecoderWrapper>;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The rule for blanks of GPT-2 and its successors: all of a run, except the one that belongs to the next word.
const BLANKS: &str = r"\s+(?!\S)";
/// The same run with the blank that belongs to the next word, which is then given back.
const BLANKS_AND_ONE: &str = r"(?P<blanks>\s+(?:\s|\z))";
const BLANKS_GROUP: &str = "blanks";

/// The expression of `ByteLevel`. Source: Radford et al. 2019 (GPT-2), `encoder.py`.
const BYTE_LEVEL: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// A regular expression of a `tokenizer.json`.
#[derive(Debug, Clone)]
pub(super) struct WordPattern {
    regex: Regex,
    /// The form without look-around, if there is one.
    without_limits: Option<Regex>,
}

impl WordPattern {
    fn new(text: &str) -> Result<Self, Box<fancy_regex::Error>> {
        // An expression that has other look-around cannot be read in this form, or has limits in it as well.
        let without_limits = with_blanks_and_one(text).and_then(|text| Regex::new(&text).ok());
        Ok(Self { regex: Regex::new(text)?, without_limits })
    }

    /// The next match from `from` on by the form without limits.
    fn unlimited(&self, inside: &str, from: usize) -> Result<Option<Offsets>, Failure> {
        let exceeded = |error: fancy_regex::Error| {
            let pattern: String = self.regex.as_str().chars().take(80).collect();
            format!(
                "the pattern {pattern:?} of tokenizer.json, which splits texts into words, exceeds the limits of regular expressions at byte {from} \
                 of {} ({error}); a very long run of one kind of characters does this",
                inside.len()
            )
        };
        let regex = self.without_limits.as_ref().unwrap_or(&self.regex);
        let Some(found) = regex.captures_from_pos(inside, from).map_err(exceeded)? else { return Ok(None) };
        let whole = found.get(0).map_or(from..from, |whole| whole.range());
        let given_back = match found.name(BLANKS_GROUP) {
            Some(blanks) if blanks.end() < inside.len() => {
                blanks.as_str().chars().next_back().map_or(0, |blank| blank.len_utf8())
            }
            _ => 0,
        };
        Ok(Some((whole.start, whole.end - given_back)))
    }

    /// The matches in a text.
    fn matches(&self, inside: &str) -> Result<Vec<Offsets>, Failure> {
        let mut found = Vec::new();
        for next in self.regex.find_iter(inside) {
            match next {
                Ok(next) => found.push((next.start(), next.end())),
                Err(_) => return self.rest(inside, found),
            }
        }
        Ok(found)
    }

    /// Continues matches that exceeded a limit.
    fn rest(&self, inside: &str, mut found: Vec<Offsets>) -> Result<Vec<Offsets>, Failure> {
        let mut from = found.last().map_or(0, |(_, end)| *end);
        while from <= inside.len() {
            let Some((start, end)) = self.unlimited(inside, from)? else { break };
            from = match start == end {
                false => end,
                // As the library's iterator, which never stays in its place.
                true => end + inside[end..].chars().next().map_or(1, char::len_utf8),
            };
            found.push((start, end));
        }
        Ok(found)
    }
}

impl Pattern for &WordPattern {
    fn find_matches(&self, inside: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let (mut parts, mut at) = (Vec::new(), 0);
        for (start, end) in self.matches(inside)? {
            if at != start {
                parts.push(((at, start), false));
            }
            parts.push(((start, end), true));
            at = end;
        }
        if at != inside.len() {
            parts.push(((at, inside.len()), false));
        }
        Ok(parts)
    }
}

/// The expression with the other form of the rule for blanks, if that rule is a whole alternative of it.
fn with_blanks_and_one(text: &str) -> Option<String> {
    let (mut depth, mut in_class, mut escaped) = (0usize, false, false);
    for (at, c) in text.char_indices() {
        let (before, rest) = text.split_at(at);
        if depth == 0
            && !in_class
            && !escaped
            && (before.is_empty() || before.ends_with('|'))
            && let Some(after) = rest.strip_prefix(BLANKS)
            && (after.is_empty() || after.starts_with('|'))
        {
            return Some(format!("{before}{BLANKS_AND_ONE}{after}"));
        }
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ']' => in_class = false,
            _ if in_class => {}
            '[' => in_class = true,
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

/// The pattern of a `Split` or `Replace` that is a regular expression.
fn pattern_of(step: &Value) -> Result<Option<WordPattern>, Box<fancy_regex::Error>> {
    step["pattern"]["Regex"].as_str().map(WordPattern::new).transpose()
}

/// The steps of a sequence, if the step is one.
fn steps_of<'a>(step: &'a Value, key: &str) -> Option<&'a Vec<Value>> {
    step[key].as_array().filter(|_| step["type"] == "Sequence")
}

/// How texts are split before the model reads them.
#[derive(Debug, Clone)]
pub(super) enum Splitting {
    Sequence(Vec<Splitting>),
    Split {
        pattern: WordPattern,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
    /// GPT-2's words, then its characters for bytes.
    Bytes {
        pattern: WordPattern,
        adds_blank: bool,
        rest: ByteLevel,
    },
    Other(PreTokenizerWrapper),
}

impl Splitting {
    fn of(step: &Value) -> Result<Self, Box<dyn fmt::Display>> {
        fn displayed<E: fmt::Display + 'static>(error: E) -> Box<dyn fmt::Display> {
            Box::new(error)
        }
        if let Some(steps) = steps_of(step, "pretokenizers") {
            return steps.iter().map(Self::of).collect::<Result<_, _>>().map(Self::Sequence);
        }
        // The library refuses what it cannot read.
        let library = || serde_json::from_value::<PreTokenizerWrapper>(step.clone()).map_err(displayed);
        match (step["type"].as_str(), library()?) {
            (Some("Split"), PreTokenizerWrapper::Split(split)) => match pattern_of(step).map_err(displayed)? {
                Some(pattern) => Ok(Self::Split { pattern, behavior: split.behavior, invert: split.invert }),
                None => Ok(Self::Other(PreTokenizerWrapper::Split(split))),
            },
            (_, PreTokenizerWrapper::ByteLevel(level)) if level.use_regex => Ok(Self::Bytes {
                pattern: WordPattern::new(BYTE_LEVEL).map_err(displayed)?,
                adds_blank: level.add_prefix_space,
                rest: level.add_prefix_space(false).use_regex(false),
            }),
            (_, other) => Ok(Self::Other(other)),
        }
    }
}

impl<'de> Deserialize<'de> for Splitting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::of(&Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

impl PreTokenizer for Splitting {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        match self {
            Self::Sequence(steps) => steps.iter().try_for_each(|step| step.pre_tokenize(text)),
            Self::Split { pattern, behavior, invert: false } => text.split(|_, part| part.split(pattern, *behavior)),
            Self::Split { pattern, behavior, invert: true } => {
                text.split(|_, part| part.split(Invert(pattern), *behavior))
            }
            Self::Bytes { pattern, adds_blank, rest } => {
                text.split(|_, mut part| {
                    if *adds_blank && !part.get().starts_with(' ') {
                        part.prepend(" ");
                    }
                    part.split(pattern, SplitDelimiterBehavior::Isolated)
                })?;
                rest.pre_tokenize(text)
            }
            Self::Other(step) => step.pre_tokenize(text),
        }
    }
}

/// How texts are cleaned before they are split.
#[derive(Debug, Clone)]
pub(super) enum Cleaning {
    Sequence(Vec<Cleaning>),
    Replace { pattern: WordPattern, content: String },
    Other(NormalizerWrapper),
}

impl Cleaning {
    fn of(step: &Value) -> Result<Self, Box<dyn fmt::Display>> {
        fn displayed<E: fmt::Display + 'static>(error: E) -> Box<dyn fmt::Display> {
            Box::new(error)
        }
        if let Some(steps) = steps_of(step, "normalizers") {
            return steps.iter().map(Self::of).collect::<Result<_, _>>().map(Self::Sequence);
        }
        let library: NormalizerWrapper = serde_json::from_value(step.clone()).map_err(displayed)?;
        match (library, pattern_of(step).map_err(displayed)?) {
            (NormalizerWrapper::Replace(replace), Some(pattern)) => {
                Ok(Self::Replace { pattern, content: replace.content })
            }
            (other, _) => Ok(Self::Other(other)),
        }
    }
}

impl<'de> Deserialize<'de> for Cleaning {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::of(&Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

impl Normalizer for Cleaning {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        match self {
            Self::Sequence(steps) => steps.iter().try_for_each(|step| step.normalize(text)),
            Self::Replace { pattern, content } => text.replace(pattern, content),
            Self::Other(step) => step.normalize(text),
        }
    }
}

#[cfg(test)]
#[path = "splitting_tests.rs"]
mod tests;
