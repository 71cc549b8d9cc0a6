//! The tokens of Rust source, without comments and without what only tests compile.

/// A token. Lifetimes are left out, numbers are words, and `::` is one symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token {
    Word(String),
    Text(String),
    Symbol(char),
    PathSeparator,
}

impl Token {
    pub fn word(&self) -> Option<&str> {
        match self {
            Self::Word(word) => Some(word),
            _ => None,
        }
    }

    pub fn is_word(&self, word: &str) -> bool {
        self.word() == Some(word)
    }

    pub fn is(&self, symbol: char) -> bool {
        *self == Self::Symbol(symbol)
    }
}

/// The tokens of a file.
pub fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let (mut at, mut found) = (0, Vec::new());
    while at < chars.len() {
        let rest = &chars[at..];
        let is_part = |c: &char| c.is_alphanumeric() || *c == '_';
        let n_hashes = |from: usize| rest[from..].iter().take_while(|c| **c == '#').count();
        at += match rest[0] {
            '/' if rest.get(1) == Some(&'/') => rest.iter().take_while(|c| **c != '\n').count(),
            '/' if rest.get(1) == Some(&'*') => block_comment(rest),
            '"' => text(rest, &mut found),
            'b' | 'c' if rest.get(1) == Some(&'"') => 1 + text(&rest[1..], &mut found),
            'r' if rest.get(1 + n_hashes(1)) == Some(&'"') => raw_text(rest, 1, n_hashes(1), &mut found),
            'b' | 'c' if rest.get(1) == Some(&'r') && rest.get(2 + n_hashes(2)) == Some(&'"') => {
                raw_text(rest, 2, n_hashes(2), &mut found)
            }
            '\'' => character_or_lifetime(rest),
            c if c.is_whitespace() => 1,
            c if is_part(&c) => {
                let word: String = rest.iter().take_while(|c| is_part(c)).collect();
                let n = word.chars().count();
                found.push(Token::Word(word));
                n
            }
            ':' if rest.get(1) == Some(&':') => {
                found.push(Token::PathSeparator);
                2
            }
            symbol => {
                found.push(Token::Symbol(symbol));
                1
            }
        };
    }
    found
}

fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at + 1 < rest.len() {
        match (rest[at], rest[at + 1]) {
            ('/', '*') => (depth, at) = (depth + 1, at + 2),
            ('*', '/') => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

fn text(rest: &[char], found: &mut Vec<Token>) -> usize {
    let mut end = 1;
    while end < rest.len() && rest[end] != '"' {
        end += 1 + usize::from(rest[end] == '\\');
    }
    found.push(Token::Text(rest[1..end.min(rest.len())].iter().collect()));
    end + 1
}

fn raw_text(rest: &[char], prefix: usize, n_hashes: usize, found: &mut Vec<Token>) -> usize {
    let begin = prefix + n_hashes + 1;
    let ends = |at: &usize| {
        rest[*at] == '"' && rest[at + 1..].iter().take(n_hashes).filter(|c| **c == '#').count() == n_hashes
    };
    let end = (begin..rest.len()).find(ends).unwrap_or(rest.len());
    found.push(Token::Text(rest[begin..end].iter().collect()));
    end + 1 + n_hashes
}

fn character_or_lifetime(rest: &[char]) -> usize {
    if rest.get(1) == Some(&'\\') {
        return 4 + rest[3..].iter().take_while(|c| **c != '\'').count();
    }
    if rest.get(2) == Some(&'\'') {
        return 3;
    }
    1 + rest[1..].iter().take_while(|c| c.is_alphanumeric() || **c == '_').count()
}

/// The tokens without items, fields and statements that only tests, documentation tests or fuzz targets compile.
pub fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        if tokens[at].is('#') && tokens.get(at + 1).is_some_and(|next| next.is('[')) {
            let end = at + 1 + group(&tokens[at + 1..]);
            if is_of_tests(&tokens[at + 2..end - 1]) {
                at = end + item(&tokens[end..]);
                continue;
            }
        }
        kept.push(tokens[at].clone());
        at += 1;
    }
    kept
}

fn is_of_tests(attribute: &[Token]) -> bool {
    let has = |word: &str| attribute.iter().any(|token| token.is_word(word));
    let fuzzing = attribute.iter().any(|token| matches!(token, Token::Text(text) if text == "fuzzing"));
    attribute[0].is_word("cfg") && (has("test") || has("doctest") || fuzzing) && !has("not")
}

/// Number of tokens of the group that begins here with an opening bracket.
pub fn group(tokens: &[Token]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Symbol('(' | '[' | '{') => depth += 1,
            Token::Symbol(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// Number of tokens of the item, field or statement that begins here, with the attributes after the first.
fn item(tokens: &[Token]) -> usize {
    let mut at = 0;
    while tokens.get(at).is_some_and(|token| token.is('#')) {
        at += 1 + group(&tokens[at + 1..]);
    }
    let is_keyword = |token: &Token| {
        let words =
            ["use", "mod", "fn", "struct", "enum", "impl", "trait", "const", "static", "type", "macro_rules", "let"];
        token.word().is_some_and(|word| words.contains(&word))
    };
    let is_field = !tokens[at..].iter().take(6).any(is_keyword);
    let is_use = tokens[at..].iter().take(6).any(|token| token.is_word("use") || token.is_word("let"));
    while at < tokens.len() {
        match &tokens[at] {
            Token::Symbol(';') => return at + 1,
            Token::Symbol(',') if is_field => return at + 1,
            Token::Symbol('}' | ')' | ']') => return at,
            Token::Symbol('{') if !is_use => return at + group(&tokens[at..]),
            Token::Symbol('(' | '[' | '{') => at += group(&tokens[at..]),
            _ => at += 1,
        }
    }
    at
}
