//! Flags of a command that stand among the overrides behind the job's file.

use std::ffi::OsString;

/// The words of a command line, with the flags of its command in front of the file. Behind it, clap takes every word for a part of an
/// override.
pub(super) fn in_front(words: impl IntoIterator<Item = OsString>, commands: &clap::Command) -> Vec<OsString> {
    let words: Vec<OsString> = words.into_iter().collect();
    let command = words.get(1).and_then(|name| commands.find_subcommand(name));
    let command = command.filter(|command| command.get_arguments().any(|arg| arg.get_id() == OVERRIDES));
    let Some((command, file)) = command.and_then(|command| Some((command, file_of(&words, command)?))) else {
        return words;
    };
    let (mut front, mut behind) = (words[..file].to_vec(), vec![words[file].clone()]);
    let mut rest = words[file + 1..].iter();
    while let Some(word) = rest.next() {
        let takes_next = match flag(word, command) {
            Some(Flag::Alone) => false,
            // Without a value it stays, and is named as what lacks one.
            Some(Flag::WithNext) if !rest.as_slice().is_empty() => true,
            _ => {
                behind.push(word.clone());
                // A value may look like a flag.
                behind.extend(rest.next().filter(|_| !word.to_string_lossy().contains('=')).cloned());
                continue;
            }
        };
        front.push(word.clone());
        front.extend(takes_next.then(|| rest.next().cloned()).flatten());
    }
    front.append(&mut behind);
    front
}

/// The argument of commands that takes all words behind the file.
const OVERRIDES: &str = "overrides";

/// How many words a flag is.
enum Flag {
    Alone,
    WithNext,
}

/// Whether a word is a flag of the command.
fn flag(word: &OsString, command: &clap::Command) -> Option<Flag> {
    let name = word.to_str()?.strip_prefix("--")?;
    let (name, has_value) = name.split_once('=').map_or((name, false), |(name, _)| (name, true));
    let is_named = |arg: &&clap::Arg| arg.get_long_and_visible_aliases().is_some_and(|names| names.contains(&name));
    let arg = command.get_arguments().find(is_named)?;
    match (arg.get_action().takes_values(), has_value) {
        (true, false) => Some(Flag::WithNext),
        (true, true) | (false, false) => Some(Flag::Alone),
        (false, true) => None,
    }
}

/// The place of the file: the first word behind the command that is neither a flag nor the value of one.
fn file_of(words: &[OsString], command: &clap::Command) -> Option<usize> {
    let mut at = 2;
    while words.get(at)?.to_str().is_some_and(|word| word.starts_with('-')) {
        at += if matches!(flag(&words[at], command), Some(Flag::WithNext)) { 2 } else { 1 };
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command;
    use crate::config::JobConfig;
    use crate::config::reference;

    fn moved(words: &str) -> String {
        let words = in_front(words.split(' ').map(OsString::from), &command());
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn flags_of_the_command_move_in_front_of_the_file_and_keys_stay() {
        for (words, expected) in [
            ("p prepare j --sequence_len 64 --show 2", "p prepare --show 2 j --sequence_len 64"),
            ("p prepare --json j --show=2 --seed=7", "p prepare --json --show=2 j --seed=7"),
            ("p eval j --model.hidden_size 64 --model m --json", "p eval --model m --json j --model.hidden_size 64"),
            ("p plan --gpu h100 j --top 3 --seed 1", "p plan --gpu h100 --top 3 j --seed 1"),
            ("p train j --output_dir --json --slurm", "p train --slurm j --output_dir --json"),
            ("p eval j --model", "p eval j --model"),
            ("p eval j --json=1", "p eval j --json=1"),
            ("p generate m --prompt --json", "p generate m --prompt --json"),
            ("p train --json", "p train --json"),
            ("p", "p"),
        ] {
            assert_eq!(moved(words), expected, "{words}");
        }
    }

    /// `trace` writes what the command has simulated, as the key does for a run.
    #[test]
    fn no_flag_hides_a_key() {
        let keys: Vec<&str> = reference().iter().map(|doc| doc.key).collect();
        for command in command().get_subcommands().filter(|c| c.get_arguments().any(|arg| arg.get_id() == OVERRIDES)) {
            let flags = command.get_arguments().filter_map(clap::Arg::get_long);
            let hidden: Vec<&str> =
                flags.filter(|flag| keys.contains(flag) && !["trace", "model"].contains(flag)).collect();

            assert!(hidden.is_empty(), "{}: {hidden:?}", command.get_name());
        }
        assert!(JobConfig::from_yaml_str("model: {}", &[]).is_err(), "`model` is a section, which no word can be");
    }
}
