//! JSON as Python reads it: whole numbers of any length, NaN and infinities keep their value.
//!
//! `serde_json` rounds whole numbers beyond 64 bits and refuses numbers that are not finite. Its feature for numbers of any
//! precision would change how every other crate of the program reads numbers, so such a number is kept as its text here, in an
//! object with one reserved key. It is no text and no list, so whoever expects those refuses it; [`number`] tells it from an object.

use std::borrow::Cow;

use serde_json::{Map, Value};

/// The key of a number that is kept as text: a character that Unicode reserves for the inside of programs.
const NUMBER: &str = "\u{fdd2}";

/// Parses one JSON value.
pub(crate) fn from_slice(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let kept = replaced(bytes, |token| format!("{{\"{NUMBER}\":\"{token}\"}}"));
    serde_json::from_slice(&kept).map_err(|error| {
        // The message names a position, so it is that of a text of the same length.
        let of_same_length = replaced(bytes, |token| format!("{:0<1$}", "1.", token.len()));
        serde_json::from_slice::<Value>(&of_same_length).err().unwrap_or(error)
    })
}

/// The value of a text that is valid JSON.
pub(crate) fn value(text: &str) -> Option<Value> {
    from_slice(text.as_bytes()).ok()
}

/// The fields of a text that is one JSON object.
pub(crate) fn object(text: &str) -> Option<Map<String, Value>> {
    match value(text) {
        Some(value) if number(&value).is_some() => None,
        Some(Value::Object(fields)) => Some(fields),
        _ => None,
    }
}

/// The items of a text that is one JSON list.
pub(crate) fn list(text: &str) -> Option<Vec<Value>> {
    match value(text) {
        Some(Value::Array(items)) => Some(items),
        _ => None,
    }
}

/// The text of a number that `serde_json` cannot represent.
pub(crate) fn number(value: &Value) -> Option<&str> {
    let fields = value.as_object().filter(|fields| fields.len() == 1)?;
    fields.get(NUMBER)?.as_str().filter(|text| is_kept_as_text(text.as_bytes()))
}

/// A number as a float, however it is kept.
pub(crate) fn as_f64(value: &Value) -> Option<f64> {
    let of_text = |text: &str| match text {
        "NaN" => Some(f64::NAN),
        "Infinity" => Some(f64::INFINITY),
        "-Infinity" => Some(f64::NEG_INFINITY),
        text => text.parse().ok(),
    };
    value.as_f64().or_else(|| number(value).and_then(of_text))
}

/// A value as JSON in one line.
pub(crate) fn shown(value: &Value) -> String {
    with_numbers(&value.to_string())
}

/// A value as an indented text of JSON.
pub(crate) fn pretty(value: &Value) -> String {
    with_numbers(&format!("{value:#}\n"))
}

/// Puts the numbers that are kept as text into a text of JSON.
fn with_numbers(json: &str) -> String {
    let key = format!("\"{NUMBER}\":");
    let (mut out, mut rest) = (String::new(), json);
    while let Some((before, after)) = rest.split_once(&key) {
        out.push_str(before.trim_end().strip_suffix('{').unwrap_or(before));
        let (number, behind) = after.trim_start().trim_start_matches('"').split_once('"').unwrap_or((after, ""));
        out.push_str(number);
        rest = behind.trim_start().strip_prefix('}').unwrap_or(behind);
    }
    out + rest
}

/// `bytes` with every number that is kept as text written by `write`.
fn replaced(bytes: &[u8], write: impl Fn(&str) -> String) -> Cow<'_, [u8]> {
    let (mut out, mut n_copied, mut at) = (Vec::new(), 0, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = end_of_string(bytes, at),
            b'-' | b'0'..=b'9' | b'N' | b'I' => {
                let is_of_number = |byte: &&u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
                let end = at + bytes[at..].iter().take_while(is_of_number).count();
                let token = &bytes[at..end];
                if is_kept_as_text(token) {
                    out.extend_from_slice(&bytes[n_copied..at]);
                    out.extend_from_slice(write(&String::from_utf8_lossy(token)).as_bytes());
                    n_copied = end;
                }
                at = end;
            }
            _ => at += 1,
        }
    }
    if n_copied == 0 {
        return Cow::Borrowed(bytes);
    }
    out.extend_from_slice(&bytes[n_copied..]);
    Cow::Owned(out)
}

/// The position after a string that begins at `start`; the end of `bytes` if it is not closed.
fn end_of_string(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Whether `serde_json` refuses or changes a number: it is not finite, whole and beyond 64 bits, minus zero without a fraction, or a
/// fraction that it rounds to another than the nearest float.
fn is_kept_as_text(token: &[u8]) -> bool {
    const DIGITS_THAT_FIT: usize = 18;
    if matches!(token, b"NaN" | b"Infinity" | b"-Infinity" | b"-0") {
        return true;
    }
    let text = String::from_utf8_lossy(token);
    if token.iter().any(|byte| matches!(byte, b'.' | b'e' | b'E')) {
        let nearest = text.parse::<f64>().ok().filter(|nearest| nearest.is_finite() && is_fraction(token));
        return nearest.is_some() && serde_json::from_slice::<f64>(token).ok() != nearest;
    }
    let digits = token.strip_prefix(b"-").unwrap_or(token);
    if digits.len() <= DIGITS_THAT_FIT || digits[0] == b'0' || !digits.iter().all(u8::is_ascii_digit) {
        return false;
    }
    text.parse::<i64>().is_err() && text.parse::<u64>().is_err()
}

/// Whether a number with a point or an exponent is written as JSON has it.
fn is_fraction(token: &[u8]) -> bool {
    fn after_digits(bytes: &[u8]) -> Option<&[u8]> {
        let n = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
        (n > 0).then(|| &bytes[n..])
    }
    let unsigned = token.strip_prefix(b"-").unwrap_or(token);
    let Some(mut rest) = after_digits(unsigned) else { return false };
    if unsigned[0] == b'0' && unsigned.len() - rest.len() > 1 {
        return false;
    }
    if let Some(fraction) = rest.strip_prefix(b".") {
        let Some(after) = after_digits(fraction) else { return false };
        rest = after;
    }
    if let Some(exponent) = rest.strip_prefix(b"e").or_else(|| rest.strip_prefix(b"E")) {
        let digits = exponent.strip_prefix(b"+").or_else(|| exponent.strip_prefix(b"-")).unwrap_or(exponent);
        return after_digits(digits).is_some_and(<[u8]>::is_empty);
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_they_were_read() {
        let text = r#"{"a":1000000000000000019884624838656,"b":[-0,{"c":"1"}],"d":NaN}"#;
        let value = from_slice(text.as_bytes()).unwrap();

        assert_eq!(shown(&value), text);
        let indented = pretty(&value);
        assert_eq!(from_slice(indented.as_bytes()).unwrap(), value);
        assert!(indented.contains("\n  \"a\": 1000000000000000019884624838656,\n"), "{indented}");
        assert_eq!(as_f64(&value["a"]), Some(1e30));
    }

    use serde_json::json;

    #[test]
    fn numbers_that_serde_json_would_change_keep_their_text() {
        let text = r#"{"a": [1000000000000000000001, -9223372036854775809, 1], "b": NaN, "-Infinity 99999999999999999999": -Infinity, "c\"NaN": -0}"#;

        let value = value(text).unwrap();

        let found =
            [&value["a"][0], &value["a"][1], &value["b"], &value["-Infinity 99999999999999999999"], &value["c\"NaN"]];
        let expected = ["1000000000000000000001", "-9223372036854775809", "NaN", "-Infinity", "-0"];
        assert_eq!(found.map(number), expected.map(Some));
        assert_eq!((number(&value["a"][2]), &value["a"][2]), (None, &json!(1)));
    }

    #[test]
    fn fractions_are_the_nearest_floats() {
        let texts =
            ["1e-07", "0.30000000000000004", "179769313486231570000000000000000000000e270", "2.2250738585072011e-308"];
        for text in texts {
            let exact = value(text).unwrap();

            let nearest = number(&exact).map_or(exact.as_f64(), |kept| kept.parse().ok());
            assert_eq!(nearest, text.parse().ok(), "{text}");
        }
        for invalid in ["1e400", "1.e5", "01.5", "1e", "-.5", "1.5.5", "1e+", "1.5x"] {
            assert!(value(invalid).is_none(), "{invalid}");
        }
    }

    #[test]
    fn numbers_that_fit_are_numbers() {
        let text = "[18446744073709551615, -9223372036854775808, 1.5, 1e-7]";

        assert_eq!(list(text).unwrap().iter().find(|value| !value.is_number()), None);
        assert_eq!(object("99999999999999999999"), None);
        assert_eq!(object(r#"{"a": 1}"#).map(|fields| fields.len()), Some(1));
    }

    #[test]
    fn invalid_text_is_refused_at_its_own_position() {
        for text in [
            "[NaN, 99999999999999999999, x]",
            "[Infinity,\n -Infinity,, 1]",
            "[1, nan]",
            "{\"a\": NaN",
            "[NaN1]",
            "[\"a\\",
        ] {
            let error = from_slice(text.as_bytes()).unwrap_err();

            let column_of = |line: &str, mark: &str| line.find(mark).map(|at| at + 1);
            match text {
                "[NaN, 99999999999999999999, x]" => assert_eq!(Some(error.column()), column_of(text, "x")),
                "[Infinity,\n -Infinity,, 1]" => assert_eq!((error.line(), error.column()), (2, 12)),
                _ => {}
            }
        }
    }
}
