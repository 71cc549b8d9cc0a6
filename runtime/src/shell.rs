//! Words of a command that a person may paste into a shell.

use std::path::Path;

/// A word as a shell reads it back.
pub(crate) fn quoted(word: impl AsRef<Path>) -> String {
    let word = word.as_ref().to_string_lossy();
    let is_plain = |c: char| c.is_alphanumeric() || "-_./=:,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_with_blanks_and_quotes_are_quoted_and_plain_ones_are_not() {
        assert_eq!(quoted("runs/first.yaml"), "runs/first.yaml");
        assert_eq!(quoted("My Drive/it's"), r"'My Drive/it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
