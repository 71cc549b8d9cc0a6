//! The commands of a block, as the program's own parser sees them.

use crate::page::Block;
use phalanx::config::reference;

/// Commands behind `--`, of a program that `cargo run` builds.
const CARGO_RUN: [&str; 4] = ["cargo", "run", "--release", "--"];

/// The lines of a block that a person would type.
pub fn typed(block: &Block) -> String {
    match block.language.as_str() {
        "console" => {
            let lines = block.text.lines().filter_map(|line| line.strip_prefix("$ "));
            lines.map(|line| format!("{line}\n")).collect()
        }
        "sh" => block.text.clone(),
        _ => String::new(),
    }
}

/// The calls of `phalanx` in a block, as words.
pub fn of_phalanx(block: &Block) -> Vec<Vec<String>> {
    let calls = simple_commands(&typed(block)).into_iter();
    calls.filter_map(|words| call(&words).map(<[String]>::to_vec)).collect()
}

/// The words after `phalanx`, or after a launcher and `phalanx`.
fn call(words: &[String]) -> Option<&[String]> {
    if words.iter().zip(CARGO_RUN).all(|(word, of)| word == of) && words.len() > CARGO_RUN.len() {
        return Some(&words[CARGO_RUN.len()..]);
    }
    let at = words.iter().position(|word| word == "phalanx")?;
    (at == 0 || words[at - 1] != "-p").then(|| &words[at + 1..])
}

/// Whether the parser takes the words, and the keys that they override exist.
pub fn check(words: &[String]) -> Result<(), String> {
    let all = ["phalanx".to_owned()].into_iter().chain(words.iter().cloned());
    let command = phalanx::cli::command();
    let found = match command.clone().try_get_matches_from(all) {
        Ok(found) => found,
        Err(error) if error.exit_code() == 0 => return Ok(()),
        Err(error) => return Err(error.to_string()),
    };
    let Some((name, of)) = found.subcommand() else { return Ok(()) };
    let overrides = of.try_get_many::<String>("overrides").ok().flatten();
    let mut overrides = overrides.into_iter().flatten();
    while let Some(word) = overrides.next() {
        let word = word.strip_prefix("--").ok_or_else(|| format!("{word} is no key"))?;
        let key = word.split(['=', '.']).next().unwrap_or_default();
        // Flags may follow the file, too.
        let flags = command.find_subcommand(name).into_iter().flat_map(|of| of.get_arguments());
        let flag = flags.into_iter().find(|flag| flag.get_long() == Some(key));
        let is_key = reference().iter().any(|doc| doc.key == key || doc.aliases.contains(&key));
        if flag.is_none() && !is_key {
            return Err(format!("there is no key {key}"));
        }
        if !word.contains('=') && flag.is_none_or(|flag| flag.get_action().takes_values()) {
            overrides.next().ok_or_else(|| format!("--{word} has no value"))?;
        }
    }
    Ok(())
}

/// The commands of a script without its control words: as much of a shell's grammar as the pages use.
fn simple_commands(script: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word, mut quote) = (Vec::new(), Vec::new(), None::<String>, None);
    let mut chars = script.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(q), _) if c == q => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '\\') if chars.peek() == Some(&'\n') => _ = chars.next(),
            (None, '#') if word.is_none() => while chars.next_if(|c| *c != '\n').is_some() {},
            (None, '\n' | ';' | '|' | '&' | '(' | ')') => {
                words.extend(word.take());
                commands.push(std::mem::take(&mut words));
            }
            (None, '>' | '<') => {
                // A redirection ends what the command gets; a number before it is a stream.
                word = word.filter(|word| word.parse::<u8>().is_err());
                words.extend(word.take());
                words.push(">".into());
            }
            (None, _) if c.is_whitespace() => words.extend(word.take()),
            (None, _) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    commands.push(words);
    let is_control = |word: &String| ["until", "while", "if", "then", "do", "done", "!"].contains(&word.as_str());
    let without = |words: Vec<String>| {
        let end = words.iter().position(|word| word == ">").unwrap_or(words.len());
        words[..end].iter().skip_while(|word| is_control(word)).cloned().collect()
    };
    commands.into_iter().map(without).filter(|words: &Vec<String>| !words.is_empty()).collect()
}
