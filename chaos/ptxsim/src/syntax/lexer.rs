//! Words and punctuation of a PTX text, with their lines.

use crate::error::PtxError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Token<'a> {
    /// An identifier, an opcode with its modifiers, a directive or a number.
    Word(&'a str),
    Text(&'a str),
    Punct(char),
    End,
}

/// All tokens and the line of each; the last one is [`Token::End`].
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, PtxError> {
    let bytes = text.as_bytes();
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1u32);
    while let Some(&byte) = bytes.get(at) {
        let start = at;
        match byte {
            b'\n' => line += 1,
            _ if byte.is_ascii_whitespace() => {}
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at += text[at..].find('\n').unwrap_or(text.len() - at);
                continue;
            }
            b'/' if bytes.get(at + 1) == Some(&b'*') => {
                let n = text[at..].find("*/").ok_or_else(|| unexpected(line, "`*/`", "the end of the text"))?;
                line += newlines(&text[at..at + n]);
                at += n + 2;
                continue;
            }
            b'"' => {
                let n = text[at + 1..].find('"').ok_or_else(|| unexpected(line, "`\"`", "the end of the text"))?;
                tokens.push((Token::Text(&text[at + 1..at + 1 + n]), line));
                line += newlines(&text[at..at + 1 + n]);
                at += n + 2;
                continue;
            }
            _ if is_word(byte) => {
                while at < bytes.len() && (is_word(bytes[at]) || is_path(&bytes[start..], at - start)) {
                    // Neither of the two colons of a path separator ends a label.
                    at += if bytes[at] == b':' { 2 } else { 1 };
                }
                tokens.push((Token::Word(&text[start..at]), line));
                continue;
            }
            b',' | b';' | b'{' | b'}' | b'[' | b']' | b'(' | b')' | b'@' | b'!' | b'|' | b'+' | b'-' | b'<' | b'>'
            | b'=' | b':' => tokens.push((Token::Punct(char::from(byte)), line)),
            _ => {
                return Err(unexpected(
                    line,
                    "a PTX token",
                    &format!("`{}`", text[at..].chars().next().unwrap_or(' ')),
                ));
            }
        }
        at += 1;
    }
    tokens.push((Token::End, line));
    Ok(tokens)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// `::` followed by a word, as in `shared::cta`.
fn is_path(bytes: &[u8], at: usize) -> bool {
    bytes[at..].starts_with(b"::") && bytes.get(at + 2).is_some_and(|b| b.is_ascii_alphanumeric())
}

fn newlines(text: &str) -> u32 {
    text.bytes().filter(|b| *b == b'\n').count() as u32
}

fn unexpected(line: u32, expected: &str, found: &str) -> PtxError {
    PtxError::Syntax { line, expected: expected.into(), found: found.into() }
}
