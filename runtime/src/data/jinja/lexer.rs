//! Splits a template into tokens as Jinja2 3.1 does with `trim_blocks` and `lstrip_blocks`, which transformers sets.
//!
//! Source: `jinja2/lexer.py`. Line breaks of every kind are line feeds; the last one of the file is dropped.

use super::error::Error;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    Data(String),
    /// `{%`
    BlockBegin,
    BlockEnd,
    /// `{{`
    PrintBegin,
    PrintEnd,
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    Sign(&'static str),
    End,
}

impl Token {
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Data(_) => "text of the template".to_owned(),
            Self::BlockBegin => "{%".to_owned(),
            Self::BlockEnd => "%}".to_owned(),
            Self::PrintBegin => "{{".to_owned(),
            Self::PrintEnd => "}}".to_owned(),
            Self::Name(name) => name.clone(),
            Self::Str(_) => "a text in quotes".to_owned(),
            Self::Int(number) => number.to_string(),
            Self::Float(number) => number.to_string(),
            Self::Sign(sign) => (*sign).to_owned(),
            Self::End => "the end of the template".to_owned(),
        }
    }
}

/// Longer ones first.
const SIGNS: [&str; 25] = [
    "**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">", "=", "(", ")", "[", "]", "{", "}", ".",
    ":", "|", ",",
];

/// The tokens with their lines; the last one is `End`.
pub(super) fn tokens(source: &str) -> Result<Vec<(u32, Token)>, Error> {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source.ends_with('\n') {
        source.pop();
    }
    let mut lexer = Lexer { rest: &source, line: 1, at_line_start: true, tokens: Vec::new() };
    while !lexer.rest.is_empty() {
        lexer.text_and_tag().map_err(|error| error.at(lexer.line))?;
    }
    lexer.push(Token::End);
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    rest: &'s str,
    line: u32,
    /// Whether what was read ends with a line break.
    at_line_start: bool,
    tokens: Vec<(u32, Token)>,
}

impl<'s> Lexer<'s> {
    fn push(&mut self, token: Token) {
        self.tokens.push((self.line, token));
    }

    /// Takes `bytes` of the source.
    fn take(&mut self, bytes: usize) -> &'s str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.line += taken.matches('\n').count() as u32;
        self.at_line_start = taken.ends_with('\n');
        self.rest = rest;
        taken
    }

    fn take_blanks(&mut self) {
        let blanks = self.rest.len() - self.rest.trim_start_matches(is_blank).len();
        if blanks > 0 {
            self.take(blanks);
        }
    }

    /// Text up to the next tag, and that tag.
    fn text_and_tag(&mut self) -> Result<(), Error> {
        let tag =
            self.rest.match_indices('{').map(|(at, _)| at).find(|&at| self.rest[at + 1..].starts_with(['%', '{', '#']));
        let Some(at) = tag else {
            let data = self.take(self.rest.len()).to_owned();
            self.push(Token::Data(data));
            return Ok(());
        };
        let kind = self.rest.as_bytes()[at + 1];
        let control = self.rest[at + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
        let text = &self.rest[..at];
        let kept = kept_before(text, control, kind == b'{', self.at_line_start);
        if !kept.is_empty() {
            self.push(Token::Data(kept.to_owned()));
        }
        self.take(at + 2 + control.map_or(0, char::len_utf8));
        match kind {
            b'#' => self.comment(),
            b'{' => {
                self.push(Token::PrintBegin);
                self.inside(true)
            }
            _ if self.begins_raw() => self.raw(),
            _ => {
                self.push(Token::BlockBegin);
                self.inside(false)
            }
        }
    }

    fn comment(&mut self) -> Result<(), Error> {
        let end = self.rest.find("#}").ok_or_else(|| Error::new("a comment has no end"))?;
        let control = self.rest[..end].chars().next_back();
        self.take(end + 2);
        self.after_tag(control);
        Ok(())
    }

    /// Blanks that the end of a block or comment removes.
    fn after_tag(&mut self, control: Option<char>) {
        match control {
            Some('-') => self.take_blanks(),
            Some('+') => {}
            _ if self.rest.starts_with('\n') => {
                self.take(1);
            }
            _ => {}
        }
    }

    fn begins_raw(&self) -> bool {
        let after = self.rest.trim_start_matches(is_blank).strip_prefix("raw").unwrap_or_default();
        let after = after.trim_start_matches(is_blank);
        after.starts_with("%}") || after.starts_with("-%}")
    }

    /// The text up to `endraw` as it is.
    fn raw(&mut self) -> Result<(), Error> {
        let end = self.rest.find("%}").unwrap_or_default();
        let strips = self.rest[..end].ends_with('-');
        self.take(end + 2);
        if strips {
            self.take_blanks();
        }
        for (at, _) in self.rest.match_indices("{%") {
            let tag = &self.rest[at + 2..];
            let control = tag.chars().next().filter(|c| matches!(c, '-' | '+'));
            let name = tag[control.map_or(0, char::len_utf8)..].trim_start_matches(is_blank);
            let Some(after) = name.strip_prefix("endraw") else { continue };
            let after = after.trim_start_matches(is_blank);
            let closing = after.chars().next().filter(|c| matches!(c, '-' | '+'));
            let Some(after) = after[closing.map_or(0, char::len_utf8)..].strip_prefix("%}") else { continue };
            let kept = kept_before(&self.rest[..at], control, false, self.at_line_start).to_owned();
            if !kept.is_empty() {
                self.push(Token::Data(kept));
            }
            self.take(self.rest.len() - after.len());
            self.after_tag(closing);
            return Ok(());
        }
        Err(Error::new("a raw block has no end"))
    }

    /// The tokens of a tag and its end.
    fn inside(&mut self, is_print: bool) -> Result<(), Error> {
        let mut open: Vec<&str> = Vec::new();
        loop {
            self.take_blanks();
            if open.is_empty() && self.tag_end(is_print) {
                return Ok(());
            }
            match self.rest.chars().next() {
                None => return Err(Error::new("a tag has no end")),
                Some('\'' | '"') => self.string()?,
                Some(c) if c.is_ascii_digit() => self.number()?,
                Some(c) if c.is_alphabetic() || c == '_' => {
                    let end = self.rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
                    let line = self.line;
                    let name = self.take(end.unwrap_or(self.rest.len())).to_owned();
                    self.tokens.push((line, Token::Name(name)));
                }
                Some(c) => {
                    let sign = SIGNS.into_iter().find(|sign| self.rest.starts_with(sign));
                    let sign = sign.ok_or_else(|| Error::new(format!("unexpected character {c:?}")))?;
                    balance(&mut open, sign)?;
                    self.push(Token::Sign(sign));
                    self.take(sign.len());
                }
            }
        }
    }

    fn tag_end(&mut self, is_print: bool) -> bool {
        let (end, token) = if is_print { ("}}", Token::PrintEnd) } else { ("%}", Token::BlockEnd) };
        let control = self.rest.chars().next().filter(|c| *c == '-' || *c == '+' && !is_print);
        if !self.rest[control.map_or(0, char::len_utf8)..].starts_with(end) {
            return false;
        }
        self.push(token);
        self.take(control.map_or(0, char::len_utf8) + end.len());
        match (is_print, control) {
            (true, Some(_)) => self.take_blanks(),
            (true, None) => {}
            (false, control) => self.after_tag(control),
        }
        true
    }

    fn string(&mut self) -> Result<(), Error> {
        let quote = self.rest.as_bytes()[0];
        let (mut at, bytes) = (1, self.rest.as_bytes());
        while at < bytes.len() && bytes[at] != quote {
            at += if bytes[at] == b'\\' { 2 } else { 1 };
        }
        if at >= bytes.len() {
            return Err(Error::new("a text in quotes has no end"));
        }
        let line = self.line;
        let text = unescaped(&self.take(at + 1)[1..at])?;
        self.tokens.push((line, Token::Str(text)));
        Ok(())
    }

    fn number(&mut self) -> Result<(), Error> {
        let invalid = |text: &str| Error::new(format!("the number {text:?} is invalid or too large"));
        let digits = |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_').len();
        let radix = match self.rest.get(..2).unwrap_or_default() {
            "0x" | "0X" => 16,
            "0o" | "0O" => 8,
            "0b" | "0B" => 2,
            _ => 10,
        };
        if radix != 10 {
            let end = self.rest[2..].find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let text = self.take(end.map_or(self.rest.len(), |end| end + 2));
            let number = i128::from_str_radix(&text[2..].replace('_', ""), radix).map_err(|_| invalid(text))?;
            self.push(Token::Int(number));
            return Ok(());
        }
        let mut end = digits(self.rest);
        let mut is_float = false;
        let fraction = self.rest[end..].strip_prefix('.').map_or(0, digits);
        if fraction > 0 {
            (end, is_float) = (end + 1 + fraction, true);
        }
        if let Some(exponent) = self.rest[end..].strip_prefix(['e', 'E']) {
            let sign = usize::from(exponent.starts_with(['+', '-']));
            let n = digits(&exponent[sign..]);
            if n > 0 {
                (end, is_float) = (end + 1 + sign + n, true);
            }
        }
        let text = self.take(end);
        let plain = text.replace('_', "");
        let token = match is_float {
            true => Token::Float(plain.parse().map_err(|_| invalid(text))?),
            false => Token::Int(plain.parse().map_err(|_| invalid(text))?),
        };
        self.push(token);
        Ok(())
    }
}

/// What `str.isspace` of Python takes for a blank, within templates.
fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// The text before a tag without what the tag removes.
fn kept_before(text: &str, control: Option<char>, is_print: bool, at_line_start: bool) -> &str {
    match control {
        Some('-') => text.trim_end_matches(is_blank),
        None if !is_print => {
            let line = text.rfind('\n').map_or(0, |at| at + 1);
            let only_blanks = text[line..].chars().all(is_blank);
            // Jinja2 asks for one blank at least; without any, both are the same.
            if (line > 0 || at_line_start) && only_blanks { &text[..line] } else { text }
        }
        _ => text,
    }
}

fn balance<'s>(open: &mut Vec<&'s str>, sign: &'s str) -> Result<(), Error> {
    let opening = match sign {
        "(" | "[" | "{" => {
            open.push(sign);
            return Ok(());
        }
        ")" => "(",
        "]" => "[",
        "}" => "{",
        _ => return Ok(()),
    };
    match open.pop() {
        Some(last) if last == opening => Ok(()),
        _ => Err(Error::new(format!("unexpected {sign:?}"))),
    }
}

/// A text in quotes with Python's escapes; an unknown one stays as it is.
fn unescaped(text: &str) -> Result<String, Error> {
    let (mut plain, mut chars) = (String::with_capacity(text.len()), text.chars());
    while let Some(c) = chars.next() {
        if c != '\\' {
            plain.push(c);
            continue;
        }
        let Some(escape) = chars.next() else { break };
        let digits = |n: usize, radix: u32, chars: &str| -> Option<(char, usize)> {
            let digits: String = chars.chars().take(n).take_while(|c| c.is_digit(radix)).collect();
            Some((char::from_u32(u32::from_str_radix(&digits, radix).ok()?)?, digits.len()))
        };
        let wanted = match escape {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        match escape {
            '\n' => {}
            '\\' | '\'' | '"' => plain.push(escape),
            'n' => plain.push('\n'),
            't' => plain.push('\t'),
            'r' => plain.push('\r'),
            'a' => plain.push('\u{7}'),
            'b' => plain.push('\u{8}'),
            'f' => plain.push('\u{c}'),
            'v' => plain.push('\u{b}'),
            'x' | 'u' | 'U' => {
                let found = digits(wanted, 16, chars.as_str()).filter(|(_, n)| *n == wanted);
                let (c, n) = found.ok_or_else(|| Error::new(format!("the escape \\{escape} is incomplete")))?;
                plain.push(c);
                chars = chars.as_str()[n..].chars();
            }
            'N' => return Err(Error::new("the escape \\N is not known")),
            '0'..='7' => {
                let (c, n) = digits(2, 8, chars.as_str()).map_or((0, 0), |(c, n)| (c as u32, n));
                let first = escape.to_digit(8).unwrap_or_default() << (3 * n as u32);
                plain.extend(char::from_u32(first + c));
                chars = chars.as_str()[n..].chars();
            }
            _ => plain.extend(['\\', escape]),
        }
    }
    Ok(plain)
}
