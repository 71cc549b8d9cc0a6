//! Numbers and truth values in the spelling of YAML 1.1, which other trainers' parsers read and ours, of YAML 1.2, takes for
//! text: `500_000`, `0b101`, `off`. A quoted number counts as a number too, since files quote `1e-4` for such parsers.
//!
//! Source: the types bool, int and float of YAML 1.1 (yaml.org/type). Deliberately absent: numbers of base 60 (`1:30`), which
//! nobody means, and whole numbers with a leading 0, which are of base 8 in YAML 1.1 and of base 10 elsewhere.

use serde_yaml_ng::Value;

/// From here on, not every whole number is a float.
const WHOLE_FLOATS_END: f64 = 9_007_199_254_740_992.0;

/// The truth value that a value is in YAML 1.1, but for `y` and `n`: the usual parser of YAML 1.1 reads them as texts, and a text such
/// as a path may be a letter.
pub(crate) fn truth(value: &Value) -> Option<bool> {
    const PAIRS: [(&str, &str); 3] = [("true", "false"), ("yes", "no"), ("on", "off")];
    match value {
        Value::Bool(x) => Some(*x),
        Value::String(word) => {
            // Lower case, upper case, or a capital first: nothing between.
            let lower = word.to_ascii_lowercase();
            let rest = word.get(1..).unwrap_or_default();
            let is_spelled = *word == lower || *word == lower.to_ascii_uppercase() || lower.get(1..) == Some(rest);
            let (yes, _) = PAIRS.iter().find(|(yes, no)| is_spelled && (lower == *yes || lower == *no))?;
            Some(lower == *yes)
        }
        _ => None,
    }
}

/// The truth value of a key that has no other values: `y` and `n` too.
pub(crate) fn only_truth(value: &Value) -> Option<bool> {
    let letter = || match value.as_str()? {
        "y" | "Y" => Some(true),
        "n" | "N" => Some(false),
        _ => None,
    };
    truth(value).or_else(letter)
}

/// The whole number that a value is; also one that is written as a float, such as `1e3`.
pub(crate) fn whole(value: &Value) -> Option<u64> {
    let of_float = |x: f64| (x >= 0.0 && x.fract() == 0.0 && x < WHOLE_FLOATS_END).then_some(x as u64);
    match value {
        Value::Number(number) => number.as_u64().or_else(|| number.as_f64().and_then(of_float)),
        Value::String(text) => whole_text(text).or_else(|| number_text(text).and_then(of_float)),
        _ => None,
    }
}

/// The finite number that a value is.
pub(crate) fn number(value: &Value) -> Option<f64> {
    let number = match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => whole_text(text).map(|x| x as f64).or_else(|| number_text(text)),
        _ => None,
    };
    number.filter(|x| x.is_finite())
}

/// Whether a float is a whole number that has no 64 bits, so that it may have been rounded from another one.
pub(crate) fn is_beyond_64_bits(x: f64) -> bool {
    // The whole numbers at these limits are read as whole numbers if they have 64 bits.
    x.fract() == 0.0 && (x >= u64::MAX as f64 || x <= i64::MIN as f64)
}

/// The value as a parser of YAML 1.1 reads it, with all values in it.
pub(crate) fn resolved(value: &Value) -> Value {
    match value {
        Value::String(_) => match (truth(value), whole(value), number(value)) {
            (Some(truth), ..) => truth.into(),
            (_, Some(whole), _) => whole.into(),
            (.., Some(number)) if !is_beyond_64_bits(number) => number.into(),
            _ => value.clone(),
        },
        Value::Sequence(items) => Value::Sequence(items.iter().map(resolved).collect()),
        Value::Mapping(keys) => Value::Mapping(keys.iter().map(|(key, x)| (key.clone(), resolved(x))).collect()),
        other => other.clone(),
    }
}

/// A whole number in base 2, 8, 10 or 16.
fn whole_text(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.strip_prefix('+').unwrap_or(text);
    for (prefix, base) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(digits) = digits.strip_prefix(prefix) {
            return u64::from_str_radix(&without_gaps(digits, base)?, base).ok();
        }
    }
    let digits = without_gaps(digits, 10)?;
    let has_leading_zero = digits.len() > 1 && digits.starts_with('0');
    digits.parse().ok().filter(|_| !has_leading_zero)
}

/// A number in base 10, perhaps with a sign, a fraction and an exponent.
fn number_text(text: &str) -> Option<f64> {
    let text = text.trim();
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (before, after) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let before = if before.is_empty() { String::new() } else { without_gaps(before, 10)? };
    let is_after = after.chars().all(|c| c.is_ascii_digit() || c == '_');
    let is_base_8 = before.len() > 1 && before.starts_with('0');
    if !is_after || is_base_8 || (before.is_empty() && !after.starts_with(|c: char| c.is_ascii_digit())) {
        return None;
    }
    let sign = if text.starts_with('-') { "-" } else { "" };
    format!("{sign}{before}.{}e{exponent}", after.replace('_', "")).parse().ok()
}

/// Digits without the `_` between and behind them.
fn without_gaps(digits: &str, base: u32) -> Option<String> {
    let is_digit = |c: char| c.is_digit(base);
    let is_number = digits.starts_with(is_digit) && digits.chars().all(|c| is_digit(c) || c == '_');
    is_number.then(|| digits.replace('_', ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Value {
        serde_yaml_ng::from_str(text).unwrap()
    }

    #[test]
    fn whole_numbers_are_read_in_every_spelling() {
        for (text, number) in [
            ("500_000", 500_000),
            ("'500_000'", 500_000),
            ("+7", 7),
            ("1__0_", 10),
            ("0x1F", 31),
            ("0x_1f", 0),
            ("0x1_f", 31),
            ("0o17", 15),
            ("0b101", 5),
            ("0b1_01", 5),
            ("1e3", 1000),
            ("1.5e3", 1500),
            ("'1e3'", 1000),
            ("500.0", 500),
            ("0", 0),
        ] {
            let read = whole(&parsed(text));
            assert_eq!(read, (text != "0x_1f").then_some(number), "{text}");
        }
    }

    #[test]
    fn numbers_are_read_in_every_spelling() {
        for (text, x) in [
            ("1e-4", 1e-4),
            ("'1e-4'", 1e-4),
            ("1E-4", 1e-4),
            ("1.e+3", 1e3),
            (".5", 0.5),
            ("-.5", -0.5),
            ("+.5e1", 5.0),
            ("1_0.5", 10.5),
            ("1_000.5_0", 1000.5),
            ("1_0e2", 1e3),
            ("0x10", 16.0),
            ("0.1", 0.1),
            ("-3", -3.0),
        ] {
            assert_eq!(number(&parsed(text)), Some(x), "{text}");
        }
    }

    #[test]
    fn words_are_truth_values_in_three_cases_of_letters() {
        for (yes, no) in [("yes", "no"), ("Yes", "No"), ("YES", "NO"), ("on", "off"), ("True", "FALSE")] {
            assert_eq!((truth(&parsed(yes)), truth(&parsed(no))), (Some(true), Some(false)), "{yes}, {no}");
        }
        assert_eq!((only_truth(&parsed("y")), only_truth(&parsed("N"))), (Some(true), Some(false)));
        for word in ["y", "N", "oN", "yEs", "none", "maybe", "''", "1", "2.0"] {
            assert_eq!(truth(&parsed(word)), None, "{word}");
        }
    }

    #[test]
    fn text_that_is_no_number_or_means_two_is_not_read() {
        for text in [
            "1:30", "012", "'012'", "'08.5'", "_1", "1e", "e5", "'.'", "._5", "0x", "1_000_a", ".inf", ".nan",
            "infinity", "nan", "''",
        ] {
            assert_eq!((whole(&parsed(text)), number(&parsed(text))), (None, None), "{text}");
        }
        assert_eq!((whole(&parsed("1.5")), whole(&parsed("-3"))), (None, None));
    }
}
