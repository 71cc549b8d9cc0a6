//! Words of long and of odd texts.

use super::*;
use crate::data::tokenizer::Tokenizer;
use proptest::prelude::*;

/// Patterns of GPT-2, Llama 3 and Qwen 2.
const PATTERNS: [&str; 3] = [
    BYTE_LEVEL,
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

proptest! {
    #[test]
    fn form_without_limits_finds_the_matches_of_the_pattern(text in "[ \\t\\r\\n\u{3000}ab1'é.]{0,40}") {
        for pattern in PATTERNS {
            let pattern = WordPattern::new(pattern).unwrap();
            prop_assert!(pattern.without_limits.is_some());

            let found = pattern.matches(&text).unwrap();

            prop_assert_eq!(pattern.rest(&text, Vec::new()).unwrap(), found);
        }
    }
}

#[test]
fn run_of_a_million_blanks_does_not_change_the_words_behind_it() {
    let tail = "one two, three\n\n 4 five";
    for model in ["tiny-gpt2", "tiny-llama3", "tiny-qwen2"] {
        let tokenizer = Tokenizer::from_dir(&phalanx_needs::reference("models").join(model)).unwrap();
        let ids = |n_blanks: usize| tokenizer.encode(&format!("a{}{tail}", " ".repeat(n_blanks))).unwrap();
        let behind = tokenizer.encode(&format!(" {tail}")).unwrap();

        let (few, many) = (ids(100), ids(1_100_000));

        assert!(few.ends_with(&behind) && many.ends_with(&behind), "{model}: {:?}", &many[many.len() - 40..]);
    }
}

#[test]
fn pattern_beyond_the_limits_is_an_error_of_the_text() {
    let mut json: Value = Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama3")).unwrap().json();
    json["pre_tokenizer"] = serde_json::json!({"type": "Split", "pattern": {"Regex": r"(?:a|a)+b(?!c)|."}, "behavior": "Isolated", "invert": false});
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();

    let error = tokenizer.encode(&"a".repeat(40)).unwrap_err().to_string();

    assert!(error.contains("exceeds the limits") && error.contains("(?:a|a)+b(?!c)|."), "{error}");
    assert!(tokenizer.encode("aab a").is_ok());
}

#[test]
fn rule_for_blanks_is_replaced_only_where_it_is_a_whole_alternative() {
    assert_eq!(with_blanks_and_one(r"a|\s+(?!\S)|\s+").as_deref(), Some(r"a|(?P<blanks>\s+(?:\s|\z))|\s+"));
    for other in [r"(a|\s+(?!\S))b", r"\s+(?!\S)b", r"[|\s+(?!\S)]", r"a\|\s+(?!\S)b", r"\s+"] {
        assert_eq!(with_blanks_and_one(other), None, "{other}");
    }
}
