//! The methods of Python's `str`. Texts that come out of a text keep their origins.

use std::rc::Rc;

use super::arguments::{Args, Bound};
use super::budget::Budget;
use super::error::Error;
use super::percent::{item_of_field, str_format};
use super::printed::is_printable;
use super::text::{Text, concat};
use super::value::Value;

/// All but `encode`, `maketrans` and `translate`, which need types that templates cannot make.
pub(super) const NAMES: [&str; 44] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

pub(super) fn call(budget: &Budget, text: &Text, name: &'static str, args: &Args) -> Result<Value, Error> {
    budget.step(text.as_str().len() / 256)?;
    if text.is_markup() && !matches!(name, "strip" | "lstrip" | "rstrip" | "startswith" | "endswith") {
        return Err(Error::new(format!("the method {name} of a text that the filter safe or escape marked")));
    }
    match name {
        "capitalize" | "casefold" | "lower" | "swapcase" | "title" | "upper" => {
            args.bind::<0>(name, [])?;
            cased(budget, text, name).map(Value::Str)
        }
        "strip" | "lstrip" | "rstrip" => stripped(text, name, args.bind(name, ["chars"])?.text(0)?),
        "split" | "rsplit" => split(budget, text, name == "rsplit", &args.bind(name, ["sep", "maxsplit"])?),
        "splitlines" => {
            let keeps = args.bind(name, ["keepends"])?.flag(0);
            let lines = lines(text.as_str())
                .map(|(line, end)| Value::Str(text.slice(line.start..if keeps { end } else { line.end })));
            Ok(Value::list(lines.collect()))
        }
        "partition" | "rpartition" => partition(text, name, &args.bind(name, ["sep"])?),
        "startswith" | "endswith" => affix(budget, text, name, args),
        "removeprefix" | "removesuffix" => {
            let bound = args.bind(name, ["affix"])?;
            let (all, affix) = (text.as_str(), bound.required_text(0)?.as_str());
            let rest = if name == "removeprefix" { all.strip_prefix(affix) } else { all.strip_suffix(affix) };
            Ok(Value::Str(text.part(rest.unwrap_or(all))))
        }
        "replace" => {
            let bound = args.bind(name, ["old", "new", "count"])?;
            replace(budget, text, bound.required_text(0)?, bound.required_text(1)?, bound.int(2, -1)?).map(Value::Str)
        }
        "join" => join(budget, text, args.bind(name, ["iterable"])?.required(0)?),
        "count" | "find" | "index" | "rfind" | "rindex" => {
            search(text, name, &args.bind(name, ["sub", "start", "end"])?)
        }
        "center" | "ljust" | "rjust" => {
            let bound = args.bind(name, ["width", "fillchar"])?;
            bound.required(0)?;
            let fill = bound.text(1)?.map_or(" ", |fill| fill.as_str());
            justified(budget, text, name, bound.count(0, 0)?, fill).map(Value::Str)
        }
        "zfill" => zero_filled(budget, text, &args.bind(name, ["width"])?),
        "expandtabs" => expanded(budget, text, args.bind(name, ["tabsize"])?.count(0, 8)?),
        "format" => formatted(budget, text, &args.positional, &args.named),
        "format_map" => match args.bind(name, ["mapping"])?.required(0)? {
            Value::Dict(fields) => {
                let named = |(key, value): &(Value, Value)| match key {
                    Value::Str(key) => Some((key.as_str().to_owned(), value.clone())),
                    _ => None,
                };
                formatted(budget, text, &[], &fields.entries().iter().filter_map(named).collect::<Vec<_>>())
            }
            other => Err(Error::new(format!("the mapping of format_map must be an object, not a {}", other.kind()))),
        },
        _ => {
            args.bind::<0>(name, [])?;
            Ok(Value::Bool(is_of_class(text.as_str(), name)))
        }
    }
}

fn formatted(budget: &Budget, text: &Text, positional: &[Value], named: &[(String, Value)]) -> Result<Value, Error> {
    let get = |value: &Value, key: &str, _: bool| {
        item_of_field(value, key).ok_or_else(|| Error::new(format!("a format asks for {key:?}, which is not there")))
    };
    str_format(budget, text, positional, named, &get).map(Value::Str)
}

pub(super) fn cased(budget: &Budget, text: &Text, name: &str) -> Result<Text, Error> {
    let mut after_letter = false;
    let all = text.as_str();
    text.map_chars(budget, |at, c| {
        let upper = || c.to_uppercase().collect::<Vec<_>>();
        // A sigma at the end of a word has a form of its own.
        let lower = || match c {
            'Σ' if ends_word(all, at) => vec!['ς'],
            _ => c.to_lowercase().collect(),
        };
        let titled = || if c == 'ß' { vec!['S', 's'] } else { upper() };
        let mapped = match name {
            "upper" => upper(),
            "lower" => lower(),
            "casefold" if c == 'ß' => vec!['s', 's'],
            "casefold" => c.to_lowercase().collect(),
            "swapcase" if c.is_uppercase() => lower(),
            "swapcase" if c.is_lowercase() => upper(),
            "swapcase" => vec![c],
            "capitalize" if at == 0 => titled(),
            "title" if !after_letter => titled(),
            _ => lower(),
        };
        after_letter = c.is_uppercase() || c.is_lowercase();
        mapped
    })
}

fn ends_word(text: &str, at: usize) -> bool {
    let is_letter = |c: char| c.is_alphabetic();
    text[..at].ends_with(is_letter) && !text[at..].chars().nth(1).is_some_and(is_letter)
}

/// What `str.isspace` takes for a blank.
pub(super) fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

pub(super) fn stripped(text: &Text, name: &str, chars: Option<&Text>) -> Result<Value, Error> {
    let is_removed = |c: char| chars.map_or_else(|| is_blank(c), |chars| chars.as_str().contains(c));
    let mut rest = text.as_str();
    if name != "rstrip" {
        rest = rest.trim_start_matches(is_removed);
    }
    if name != "lstrip" {
        rest = rest.trim_end_matches(is_removed);
    }
    Ok(Value::Str(text.part(rest).with_markup(text.is_markup())))
}

fn split(budget: &Budget, text: &Text, from_end: bool, bound: &Bound<2>) -> Result<Value, Error> {
    let most = usize::try_from(bound.int(1, -1)?).unwrap_or(usize::MAX);
    let all = text.as_str();
    let mut parts: Vec<&str> = match bound.text(0)?.map(Text::as_str) {
        Some("") => return Err(Error::new("the separator of split is empty")),
        Some(sep) if from_end => all.rsplitn(most.saturating_add(1), sep).collect(),
        Some(sep) => all.splitn(most.saturating_add(1), sep).collect(),
        None => words(all, most, from_end),
    };
    if from_end {
        parts.reverse();
    }
    budget.items(parts.len())?;
    Ok(Value::list(parts.into_iter().map(|part| Value::Str(text.part(part))).collect()))
}

/// Words between blanks, at most `most` and the rest; from the end in reverse.
fn words(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let (mut words, mut rest) = (Vec::new(), text);
    let trimmed = |rest: &'_ str| -> usize { rest.len() - rest.trim_start_matches(is_blank).len() };
    loop {
        rest = if from_end { rest.trim_end_matches(is_blank) } else { &rest[trimmed(rest)..] };
        if rest.is_empty() {
            return words;
        }
        if words.len() >= most {
            words.push(rest);
            return words;
        }
        let found = if from_end { rest.rfind(is_blank) } else { rest.find(is_blank) };
        let Some(at) = found else {
            words.push(rest);
            return words;
        };
        if from_end {
            let blank = rest[at..].chars().next().map_or(1, char::len_utf8);
            words.push(&rest[at + blank..]);
            rest = &rest[..at];
        } else {
            words.push(&rest[..at]);
            rest = &rest[at..];
        }
    }
}

/// The lines of a text without their ends, and where each end stops.
pub(super) fn lines(text: &str) -> impl Iterator<Item = (std::ops::Range<usize>, usize)> + '_ {
    let is_end = |c: char| "\n\r\u{b}\u{c}\u{1c}\u{1d}\u{1e}\u{85}\u{2028}\u{2029}".contains(c);
    let mut start = 0;
    std::iter::from_fn(move || {
        if start >= text.len() {
            return None;
        }
        let from = start;
        let Some(at) = text[from..].find(is_end).map(|at| from + at) else {
            start = text.len();
            return Some((from..text.len(), text.len()));
        };
        let end = if text[at..].starts_with("\r\n") { 2 } else { text[at..].chars().next().map_or(1, char::len_utf8) };
        start = at + end;
        Some((from..at, at + end))
    })
}

fn partition(text: &Text, name: &str, bound: &Bound<1>) -> Result<Value, Error> {
    let (all, sep) = (text.as_str(), bound.required_text(0)?.as_str());
    if sep.is_empty() {
        return Err(Error::new(format!("the separator of {name} is empty")));
    }
    let found = if name == "partition" { all.find(sep) } else { all.rfind(sep) };
    let cuts = match found {
        Some(at) => [0..at, at..at + sep.len(), at + sep.len()..all.len()],
        None if name == "partition" => [0..all.len(), 0..0, 0..0],
        None => [0..0, 0..0, 0..all.len()],
    };
    Ok(Value::Tuple(Rc::new(cuts.map(|cut| Value::Str(text.slice(cut))).to_vec())))
}

/// The bytes between two positions that count letters, as the arguments `start` and `end` give them.
fn window<const N: usize>(text: &str, bound: &Bound<N>) -> Result<Option<std::ops::Range<usize>>, Error> {
    if bound.given(1).is_none() && bound.given(2).is_none() {
        return Ok(Some(0..text.len()));
    }
    let len = text.chars().count() as i128;
    let at = |bound: i128| (if bound < 0 { (bound + len).max(0) } else { bound }).min(len + 1);
    let (start, end) = (at(bound.int(1, 0)?), at(bound.int(2, len)?).min(len));
    let byte = |nth: i128| text.char_indices().nth(nth as usize).map_or(text.len(), |(at, _)| at);
    Ok((start <= end).then(|| byte(start)..byte(end)))
}

fn affix(budget: &Budget, text: &Text, name: &str, args: &Args) -> Result<Value, Error> {
    let bound = args.bind(name, ["affix", "start", "end"])?;
    let Some(window) = window(text.as_str(), &bound)? else { return Ok(Value::Bool(false)) };
    let within = &text.as_str()[window];
    let matches = |affix: &Value| match affix {
        Value::Str(affix) if name == "startswith" => Ok(within.starts_with(affix.as_str())),
        Value::Str(affix) => Ok(within.ends_with(affix.as_str())),
        Value::Undefined(sentence) => Err(Error::new(&**sentence)),
        other => Err(Error::new(format!("{name} needs a text or a tuple of texts, not a {}", other.kind()))),
    };
    match bound.required(0)? {
        Value::Tuple(affixes) => {
            budget.items(affixes.len())?;
            for affix in affixes.iter() {
                if matches(affix)? {
                    return Ok(Value::Bool(true));
                }
            }
            Ok(Value::Bool(false))
        }
        single => matches(single).map(Value::Bool),
    }
}

fn search(text: &Text, name: &str, bound: &Bound<3>) -> Result<Value, Error> {
    let sub = bound.required_text(0)?.as_str();
    let all = text.as_str();
    let letters = |text: &str| Value::Int(text.chars().count() as i128);
    let found = match window(all, bound)? {
        None => None,
        Some(window) if name == "count" => {
            let within = &all[window];
            return Ok(if sub.is_empty() {
                Value::Int(within.chars().count() as i128 + 1)
            } else {
                Value::Int(within.matches(sub).count() as i128)
            });
        }
        Some(window) if name.starts_with('r') => all[window.clone()].rfind(sub).map(|at| window.start + at),
        Some(window) => all[window.clone()].find(sub).map(|at| window.start + at),
    };
    match found {
        Some(at) => Ok(letters(&all[..at])),
        None if name == "count" => Ok(Value::Int(0)),
        None if name.ends_with("find") => Ok(Value::Int(-1)),
        None => Err(Error::new(format!("{name} does not find the text"))),
    }
}

pub(super) fn replace(budget: &Budget, text: &Text, old: &Text, new: &Text, count: i128) -> Result<Text, Error> {
    let most = usize::try_from(count).unwrap_or(usize::MAX);
    let n = text.as_str().matches(old.as_str()).take(most).count();
    budget.text(text.as_str().len().saturating_add(n.saturating_mul(new.as_str().len())))?;
    budget.step(n)?;
    let (mut pieces, mut from) = (Vec::with_capacity(2 * n + 1), 0);
    for (at, found) in text.as_str().match_indices(old.as_str()).take(most) {
        pieces.push(text.slice(from..at));
        pieces.push(new.clone());
        from = at + found.len();
    }
    pieces.push(text.slice(from..text.as_str().len()));
    concat(budget, &pieces)
}

fn join(budget: &Budget, separator: &Text, over: &Value) -> Result<Value, Error> {
    let mut pieces = Vec::new();
    for (idx, item) in over.items(budget)?.iter().enumerate() {
        let Value::Str(text) = item else {
            return Err(Error::new(format!("join needs texts; item {idx} is a {}", item.kind())));
        };
        if idx > 0 {
            pieces.push(separator.clone());
        }
        pieces.push(text.clone());
    }
    concat(budget, &pieces).map(Value::Str)
}

pub(super) fn justified(budget: &Budget, text: &Text, name: &str, width: usize, fill: &str) -> Result<Text, Error> {
    if fill.chars().count() != 1 {
        return Err(Error::new(format!("{name} fills with one letter, not {fill:?}")));
    }
    let len = text.as_str().chars().count();
    let missing = width.saturating_sub(len);
    budget.text(missing.saturating_mul(fill.len()))?;
    let before = match name {
        "ljust" => 0,
        "rjust" => missing,
        // As CPython divides an odd rest.
        _ => missing / 2 + (missing & width & 1),
    };
    let filling = |n: usize| Text::new(fill.repeat(n));
    concat(budget, &[filling(before), text.clone(), filling(missing - before)])
}

fn zero_filled(budget: &Budget, text: &Text, bound: &Bound<1>) -> Result<Value, Error> {
    bound.required(0)?;
    let all = text.as_str();
    let missing = bound.count(0, 0)?.saturating_sub(all.chars().count());
    budget.text(missing)?;
    let sign = usize::from(all.starts_with(['+', '-']));
    let zeros = Text::new("0".repeat(missing));
    concat(budget, &[text.slice(0..sign), zeros, text.slice(sign..all.len())]).map(Value::Str)
}

fn expanded(budget: &Budget, text: &Text, width: usize) -> Result<Value, Error> {
    let tabs = text.as_str().matches('\t').count();
    budget.text(text.as_str().len() + tabs.saturating_mul(width))?;
    let mut column = 0;
    let expanded = text.map_chars(budget, |_, c| match c {
        '\t' => {
            let n = if width == 0 { 0 } else { width - column % width };
            column += n;
            vec![' '; n]
        }
        '\n' | '\r' => {
            column = 0;
            vec![c]
        }
        _ => {
            column += 1;
            vec![c]
        }
    })?;
    Ok(Value::Str(expanded))
}

fn is_of_class(text: &str, name: &str) -> bool {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    let cased = |is_other: fn(char) -> bool, is: fn(char) -> bool| text.chars().any(is) && !text.chars().any(is_other);
    match name {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" => all(|c| c.is_ascii_digit() || is_decimal(c)),
        "isdigit" => all(|c| c.is_ascii_digit() || is_decimal(c) || "²³¹⁰⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉".contains(c)),
        "isnumeric" => all(char::is_numeric),
        "isspace" => all(is_blank),
        "islower" => cased(char::is_uppercase, char::is_lowercase),
        "isupper" => cased(char::is_lowercase, char::is_uppercase),
        "istitle" => is_title(text),
        "isprintable" => text.chars().all(is_printable),
        _ => {
            let is_start = |c: char| c.is_alphabetic() || c == '_';
            text.starts_with(is_start) && text.chars().all(|c| is_start(c) || c.is_numeric())
        }
    }
}

/// Decimal digits of the scripts in use beside ASCII's.
fn is_decimal(c: char) -> bool {
    const ZEROS: [u32; 16] = [
        0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xe50, 0xed0, 0xf20, 0xff10,
    ];
    ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&(c as u32)))
}

fn is_title(text: &str) -> bool {
    let (mut after_letter, mut any) = (false, false);
    for c in text.chars() {
        if c.is_uppercase() && after_letter || c.is_lowercase() && !after_letter {
            return false;
        }
        after_letter = c.is_uppercase() || c.is_lowercase();
        any |= after_letter;
    }
    any
}
