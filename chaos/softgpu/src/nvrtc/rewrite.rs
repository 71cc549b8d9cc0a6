//! What the headers cannot do with macros: shared variables, and the list of kernels.
//!
//! The source is preprocessed. Each `__shared__` declaration becomes a reference into the block's shared memory, and behind
//! each `extern "C"` kernel stands an entry for the library. Lines keep their numbers.

/// A piece of the source that means something here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Word,
    Text,
    Other,
}

#[derive(Clone, Copy, Debug)]
struct Token {
    kind: Kind,
    start: usize,
    end: usize,
}

/// The rewritten source.
pub fn rewrite(source: &str) -> String {
    let tokens = tokens(source);
    let mut edits = Vec::new();
    let mut depth = 0usize;
    // Depths at which an `extern "C" {` was opened.
    let mut linkage: Vec<usize> = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        match &source[tokens[i].start..tokens[i].end] {
            "{" => {
                if i >= 2 && is_extern_c(source, &tokens, i - 2) {
                    linkage.push(depth);
                }
                depth += 1;
            }
            "}" => {
                depth = depth.saturating_sub(1);
                linkage.pop_if(|d| *d == depth);
            }
            "__shared__" => {
                let is_global = depth == linkage.len();
                if let Some((edit, next)) = shared(source, &tokens, i, is_global) {
                    edits.push(edit);
                    i = next;
                    continue;
                }
            }
            "__global__" => edits.extend(kernel(source, &tokens, i, !linkage.is_empty())),
            _ => {}
        }
        i += 1;
    }
    apply(source, edits)
}

struct Edit {
    start: usize,
    end: usize,
    text: String,
}

/// Replaces, and keeps the line breaks of what is replaced.
fn apply(source: &str, mut edits: Vec<Edit>) -> String {
    edits.sort_by_key(|e| e.start);
    let (mut out, mut at) = (String::with_capacity(source.len() + 1024), 0);
    for edit in edits {
        out.push_str(&source[at..edit.start]);
        out.push_str(&edit.text);
        out.extend(source[edit.start..edit.end].matches('\n'));
        at = edit.end;
    }
    out.push_str(&source[at..]);
    out
}

fn tokens(source: &str) -> Vec<Token> {
    let bytes = source.as_bytes();
    let (mut tokens, mut i, mut starts_line) = (Vec::new(), 0, true);
    while i < bytes.len() {
        let (start, c) = (i, bytes[i]);
        i += 1;
        match c {
            b'\n' => starts_line = true,
            b' ' | b'\t' | b'\r' => {}
            // Marks of lines and pragmas.
            b'#' if starts_line => i += source[i..].find('\n').unwrap_or(source.len() - i),
            b'/' if bytes.get(i) == Some(&b'/') => i += source[i..].find('\n').unwrap_or(source.len() - i),
            b'/' if bytes.get(i) == Some(&b'*') => i += source[i..].find("*/").map_or(source.len() - i, |n| n + 2),
            b'"' | b'\'' => {
                while i < bytes.len() && bytes[i] != c {
                    i += if bytes[i] == b'\\' { 2 } else { 1 };
                }
                i = (i + 1).min(bytes.len());
                tokens.push(Token { kind: Kind::Text, start, end: i });
            }
            _ if is_word(c) => {
                // A quote between digits separates them.
                while i < bytes.len() && (is_word(bytes[i]) || (c.is_ascii_digit() && bytes[i] == b'\'')) {
                    i += 1;
                }
                tokens.push(Token { kind: Kind::Word, start, end: i });
            }
            _ => tokens.push(Token { kind: Kind::Other, start, end: i }),
        }
        if !c.is_ascii_whitespace() {
            starts_line = false;
        }
    }
    tokens
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || c == b'_' || c >= 0x80
}

fn is_extern_c(source: &str, tokens: &[Token], i: usize) -> bool {
    let text = |t: Option<&Token>| t.map_or("", |t| &source[t.start..t.end]);
    text(tokens.get(i)) == "extern" && text(tokens.get(i + 1)) == "\"C\""
}

/// The token behind the bracket that closes the one at `open`.
fn behind_brackets(source: &str, tokens: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for i in open..tokens.len() {
        match &source[tokens[i].start..tokens[i].end] {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i + 1;
        }
    }
    tokens.len()
}

/// `extern "C"` goes, so that kernels are functions of the module alone; behind the body comes the entry.
fn kernel(source: &str, tokens: &[Token], at: usize, in_linkage: bool) -> Vec<Edit> {
    let text = |i: usize| tokens.get(i).map_or("", |t| &source[t.start..t.end]);
    let is_c = at >= 2 && is_extern_c(source, tokens, at - 2);
    let mut edits = Vec::new();
    if is_c {
        edits.push(Edit { start: tokens[at - 2].start, end: tokens[at - 1].end, text: String::new() });
    }
    let (mut name, mut bounds, mut i) = (None, String::new(), at + 1);
    while i < tokens.len() {
        match text(i) {
            "(" => {
                let behind = behind_brackets(source, tokens, i);
                match text(i - 1) {
                    "__launch_bounds__" => {
                        bounds = format!(", {}", &source[tokens[i].end..tokens[behind - 1].start]);
                    }
                    "__attribute__" | "alignas" | "__maxnreg__" => {}
                    _ if name.is_none() => name = Some(text(i - 1)),
                    _ => {}
                }
                i = behind;
            }
            "{" => break,
            // A declaration.
            ";" => return edits,
            _ => i += 1,
        }
    }
    if let Some(name) = name.filter(|_| is_c || in_linkage) {
        let end = tokens.get(behind_brackets(source, tokens, i) - 1).map_or(source.len(), |t| t.end);
        let entry = format!(" extern \"C++\" {{ SOFTGPU_KERNEL({name}, {name}{bounds}) }} ");
        edits.push(Edit { start: end, end, text: entry });
    }
    edits
}

/// A declaration of shared variables, and the token behind it.
fn shared(source: &str, tokens: &[Token], at: usize, is_global: bool) -> Option<(Edit, usize)> {
    let text = |i: usize| &source[tokens[i].start..tokens[i].end];
    let mut first = at;
    let mut is_extern = false;
    while first > 0 && ["extern", "static"].contains(&text(first - 1)) {
        first -= 1;
        is_extern |= text(first) == "extern";
    }
    let (mut i, mut align) = (at + 1, String::new());
    while matches!(tokens.get(i).map(|_| text(i)), Some("alignas" | "__align__" | "extern" | "static")) {
        if text(i).contains("align") {
            let behind = behind_brackets(source, tokens, i + 1);
            align = format!(", {}", &source[tokens[i + 1].start..tokens[behind - 1].end]);
            i = behind;
        } else {
            is_extern |= text(i) == "extern";
            i += 1;
        }
    }
    let (declarators, end) = declarators(source, tokens, i)?;
    let (mut ty, mut out) = (String::new(), String::new());
    for (n, (from, to)) in declarators.into_iter().enumerate() {
        // The name is the last word before the brackets of an array.
        let brackets = (from..to).find(|i| text(*i) == "[" && n_angles(source, tokens, from, *i) == 0).unwrap_or(to);
        let name = brackets.checked_sub(1).filter(|i| *i >= from && tokens[*i].kind == Kind::Word)?;
        if n == 0 {
            ty = source[tokens[i].start..tokens[name].start].trim().to_owned();
        }
        let array = if brackets < to { &source[tokens[brackets].start..tokens[to - 1].end] } else { "" };
        let name = text(name);
        out += &match (is_extern, is_global) {
            (true, true) => format!("static const softgpu::DynamicShared<{ty}> {name}; "),
            (true, false) => format!("{ty}* const {name} = ({ty}*)softgpu::dynamic_shared(); "),
            (false, _) => {
                let align = if align.is_empty() { String::new() } else { align.clone() };
                format!("auto& {name} = softgpu::shared<{ty} {array}{align}>([]{{}}); ")
            }
        };
    }
    Some((Edit { start: tokens[first].start, end: tokens[end].end, text: out }, end + 1))
}

/// Ranges of tokens between the commas of a declaration, and the place of its semicolon.
fn declarators(source: &str, tokens: &[Token], first: usize) -> Option<(Vec<(usize, usize)>, usize)> {
    let (mut ranges, mut from, mut i, mut angles) = (Vec::new(), first, first, 0i32);
    while i < tokens.len() {
        match &source[tokens[i].start..tokens[i].end] {
            "(" | "[" | "{" => {
                i = behind_brackets(source, tokens, i);
                continue;
            }
            "<" => angles += 1,
            ">" => angles -= 1,
            "," if angles == 0 => {
                ranges.push((from, i));
                from = i + 1;
            }
            ";" => {
                ranges.push((from, i));
                return Some((ranges, i));
            }
            _ => {}
        }
        i += 1;
    }
    None
}

fn n_angles(source: &str, tokens: &[Token], from: usize, to: usize) -> i32 {
    let angle = |t: &Token| match &source[t.start..t.end] {
        "<" => 1,
        ">" => -1,
        _ => 0,
    };
    tokens[from..to].iter().map(angle).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(source: &str) -> String {
        rewrite(source).split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn shared_variables_become_references() {
        assert_eq!(
            flat("void f() { __shared__ float a[32], b[N][4]; g(a); }"),
            "void f() { auto& a = softgpu::shared<float [32]>([]{}); auto& b = softgpu::shared<float [N][4]>([]{}); g(a); }"
        );
        assert_eq!(
            flat("{ __shared__ __align__(16) unsigned char x; }"),
            "{ auto& x = softgpu::shared<unsigned char , (16)>([]{}); }"
        );
        assert_eq!(flat("{ __shared__ A<1, 2> x[3]; }"), "{ auto& x = softgpu::shared<A<1, 2> [3]>([]{}); }");
    }

    #[test]
    fn dynamic_shared_memory_becomes_a_pointer() {
        assert_eq!(flat("{ extern __shared__ float x[]; }"), "{ float* const x = (float*)softgpu::dynamic_shared(); }");
        assert_eq!(flat("extern __shared__ int x[];"), "static const softgpu::DynamicShared<int> x;");
    }

    #[test]
    fn entry_follows_each_kernel_with_c_linkage() {
        let entry = |name: &str, bounds: &str| format!("extern \"C++\" {{ SOFTGPU_KERNEL({name}, {name}{bounds}) }}");

        let one = flat("extern \"C\" __global__ void __launch_bounds__(128, 2) f(int x) { if (x) { } } int y;");
        let block = flat("extern \"C\" { __global__ void f(int x) { } } __global__ void g() { }");
        let declared = flat("extern \"C\" __global__ void f(int x);");

        assert_eq!(
            one,
            format!(
                "__global__ void __launch_bounds__(128, 2) f(int x) {{ if (x) {{ }} }} {} int y;",
                entry("f", ", 128, 2")
            )
        );
        assert_eq!(
            block,
            format!("extern \"C\" {{ __global__ void f(int x) {{ }} {} }} __global__ void g() {{ }}", entry("f", ""))
        );
        assert_eq!(declared, "__global__ void f(int x);");
    }

    #[test]
    fn comments_texts_and_line_marks_are_left_alone() {
        let source = "# 1 \"__global__\"\n// __shared__ int x;\nconst char* s = \"__shared__ \\\" int y;\"; /* extern \"C\" __global__ */\nint n = 1'000;\n";

        assert_eq!(rewrite(source), source);
    }

    #[test]
    fn lines_keep_their_numbers() {
        let source = "{\n__shared__\nfloat\nx;\n}\n";

        assert_eq!(rewrite(source).matches('\n').count(), source.matches('\n').count());
    }
}
