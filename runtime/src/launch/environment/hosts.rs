//! Slurm's short form of a list of machines: `login,node[01-03,07],rack[1-2]n[1-4]`.

/// Maximum number of machines in a list.
const HOSTS_MAX: usize = 1 << 16;
/// Maximum digits of a number, including leading zeros. Every name has that many digits, so they multiply the memory of a
/// list.
const DIGITS_MAX: usize = 20;
/// Maximum bytes of a name, which multiply time and memory too. Source: RFC 1035, §2.3.4.
const NAME_MAX: usize = 255;

/// Why a list of machines cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostsError {
    /// An unmatched or nested bracket.
    #[error("`{0}` has an unmatched bracket")]
    Bracket(String),
    /// A comma with nothing before or after it.
    #[error("`{0}` has an empty name")]
    Empty(String),
    /// The text between brackets is not a list of numbers and ranges, such as `01-03,07`.
    #[error("`{0}` is neither a number nor a range such as 01-03")]
    Range(String),
    /// A name is too long for a machine.
    #[error("`{0}`... expands to names of more than {NAME_MAX} bytes")]
    Long(String),
    /// The list has too many names.
    #[error("the list has more than {HOSTS_MAX} names")]
    TooMany,
}

/// Expands a list into its names, in order.
///
/// # Errors
/// When the list is invalid.
pub fn expand(list: &str) -> Result<Vec<String>, HostsError> {
    let mut hosts = Vec::new();
    for name in split(list)? {
        hosts.extend(names(name)?);
        if hosts.len() > HOSTS_MAX {
            return Err(HostsError::TooMany);
        }
    }
    Ok(hosts)
}

/// Splits a list at the commas outside brackets.
fn split(list: &str) -> Result<Vec<&str>, HostsError> {
    let unmatched = || HostsError::Bracket(shown(list));
    let (mut parts, mut start, mut is_inside) = (Vec::new(), 0, false);
    for (at, letter) in list.char_indices() {
        match letter {
            '[' | ']' if is_inside == (letter == '[') => return Err(unmatched()),
            '[' | ']' => is_inside = !is_inside,
            ',' if !is_inside => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if is_inside {
        return Err(unmatched());
    }
    parts.push(&list[start..]);
    let parts: Vec<&str> = parts.into_iter().map(str::trim).collect();
    if parts.iter().any(|part| part.is_empty()) { Err(HostsError::Empty(shown(list))) } else { Ok(parts) }
}

/// Expands one entry into its names; the last bracket varies fastest.
fn names(entry: &str) -> Result<Vec<String>, HostsError> {
    let (mut parts, mut rest, mut n_names, mut longest) = (Vec::new(), entry, 1, 0);
    while let Some((before, inside)) = rest.split_once('[') {
        let (inside, after) = inside.split_once(']').expect("every bracket is matched");
        let numbers = numbers(inside)?;
        n_names *= numbers.len();
        if n_names > HOSTS_MAX {
            return Err(HostsError::TooMany);
        }
        longest += before.len() + numbers.iter().map(String::len).max().unwrap_or(0);
        parts.push((before, numbers));
        rest = after;
    }
    if longest + rest.len() > NAME_MAX {
        return Err(HostsError::Long(shown(entry)));
    }
    let name = |mut nth: usize| {
        let (mut name, mut n_left) = (String::with_capacity(longest + rest.len()), n_names);
        for (before, numbers) in &parts {
            n_left /= numbers.len();
            name.push_str(before);
            name.push_str(&numbers[nth / n_left]);
            nth %= n_left;
        }
        name + rest
    };
    Ok((0..n_names).map(name).collect())
}

/// The numbers between two brackets, with the width of the first number of each range.
fn numbers(text: &str) -> Result<Vec<String>, HostsError> {
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let wrong = || HostsError::Range(shown(part));
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |digits: &str| {
            let is_number =
                (1..=DIGITS_MAX).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| digits.parse::<u64>().ok()).flatten().ok_or_else(wrong)
        };
        let (from, to) = (number(first)?, number(last)?);
        if from > to {
            return Err(wrong());
        }
        if to - from >= (HOSTS_MAX - numbers.len()) as u64 {
            return Err(HostsError::TooMany);
        }
        let width = first.len();
        numbers.extend((from..=to).map(|n| format!("{n:0width$}")));
    }
    Ok(numbers)
}

/// The beginning of a text, for an error message.
fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hosts(list: &str) -> String {
        expand(list).unwrap().join(" ")
    }

    #[test]
    fn lists_in_slurm_notation_are_expanded() {
        assert_eq!(hosts("node1"), "node1");
        assert_eq!(hosts("node[01-03,07]"), "node01 node02 node03 node07");
        assert_eq!(hosts("a,b[9-11],c-1.example.org"), "a b9 b10 b11 c-1.example.org");
        assert_eq!(hosts("rack[1-2]n[1-2]-ib"), "rack1n1-ib rack1n2-ib rack2n1-ib rack2n2-ib");
    }

    #[test]
    fn invalid_host_list_is_named() {
        assert_eq!(expand("n[1-3"), Err(HostsError::Bracket("n[1-3".into())));
        assert_eq!(expand("n]1["), Err(HostsError::Bracket("n]1[".into())));
        assert_eq!(expand("a,,b"), Err(HostsError::Empty("a,,b".into())));
        assert_eq!(expand("n[3-1]"), Err(HostsError::Range("3-1".into())));
        assert_eq!(expand("n[1,x]"), Err(HostsError::Range("x".into())));
        assert_eq!(expand("n[0-99999999999]"), Err(HostsError::TooMany));
        assert_eq!(expand("n[1-999][1-999]"), Err(HostsError::TooMany));
    }

    #[test]
    fn number_with_too_many_digits_is_rejected() {
        let zeros = "0".repeat(70_000);

        assert!(matches!(expand(&format!("n[{zeros}1-{zeros}2]")), Err(HostsError::Range(_))));
        assert_eq!(expand(&format!("n[{}1]", "0".repeat(19))).unwrap()[0].len(), 21);
    }

    #[test]
    fn entry_with_names_that_are_too_long_is_rejected() {
        let many = format!("n[0-60000]{}", "[1]".repeat(5000));
        assert!(matches!(expand(&many), Err(HostsError::Long(_))));
        assert!(matches!(expand(&format!("n[0-60000]{}", "x".repeat(NAME_MAX))), Err(HostsError::Long(_))));
        assert!(matches!(expand(&"x".repeat(NAME_MAX + 1)), Err(HostsError::Long(_))));
        assert_eq!(expand(&format!("{}[1-2]", "x".repeat(NAME_MAX - 1))).unwrap().len(), 2);
    }

    /// A list and its names, generated independently of each other.
    fn entries() -> impl Strategy<Value = (String, Vec<String>)> {
        let range = (0..500u64, 0..20u64, 1..5usize);
        let entry = ("[a-z][a-z0-9-]{0,5}", proptest::collection::vec(range, 0..4), "(-ib|\\.x)?");
        proptest::collection::vec(entry, 1..5).prop_map(|entries| {
            let (mut words, mut names) = (Vec::new(), Vec::new());
            for (prefix, ranges, suffix) in entries {
                if ranges.is_empty() {
                    words.push(format!("{prefix}{suffix}"));
                    names.push(format!("{prefix}{suffix}"));
                    continue;
                }
                let mut parts = Vec::new();
                for (from, more, width) in ranges {
                    let numbers = (from..=from + more).map(|n| format!("{n:0width$}"));
                    names.extend(numbers.map(|n| format!("{prefix}{n}{suffix}")));
                    let (first, last) = (format!("{from:0width$}"), format!("{:0width$}", from + more));
                    parts.push(if more == 0 { first } else { format!("{first}-{last}") });
                }
                words.push(format!("{prefix}[{}]{suffix}", parts.join(",")));
            }
            (words.join(","), names)
        })
    }

    proptest! {
        #[test]
        fn list_expands_to_its_names_in_order((list, names) in entries()) {
            prop_assert_eq!(expand(&list), Ok(names));
        }

        #[test]
        fn any_text_is_expanded_or_rejected(text in "[a-c0-9\\[\\],-]{0,24}") {
            if let Ok(hosts) = expand(&text) {
                prop_assert!(!hosts.is_empty() && hosts.len() <= HOSTS_MAX);
                prop_assert!(hosts.iter().all(|host| !host.is_empty() && !host.contains(['[', ']', ','])));
            }
        }
    }
}
