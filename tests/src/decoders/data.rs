//! Training data and resumption: records of data files, the token cache, the metrics of a resumed run, changed keys and chat
//! templates.

use super::Target;
use phalanx::data::chat_template::ChatTemplate;
use phalanx::data::tokenizer::Tokenizer;
use phalanx::fuzzing::{changed_keys, documents, kept_metrics, token_file, token_file_of};
use serde_json::json;
use std::io::Write;

pub(super) const TARGET: Target = Target { name: "data", run, seeds };

const RECORD: u8 = 0;
const CACHE: u8 = 1;
const CACHE_OF: u8 = 2;
const METRICS: u8 = 3;
const N_KINDS: u8 = 5;
const KEY: [u8; 32] = [9; 32];

/// Trained ranges lie within the text and do not split a character; documents of a cache lie within its tokens; only whole
/// lines of metrics are kept.
fn run(bytes: &[u8]) {
    let Some((&kind, rest)) = bytes.split_first() else { return };
    match kind % N_KINDS {
        RECORD => record(rest),
        CACHE => check_cache(rest),
        CACHE_OF => {
            let numbers: Vec<u64> =
                rest.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect();
            let (tokens, ends) = numbers.split_at(numbers.len() / 2);
            let tokens: Vec<u32> = tokens.iter().map(|token| *token as u32).collect();
            check_cache(&token_file_of(&KEY, &tokens, ends));
        }
        METRICS => {
            let mut file = tempfile::tempfile().expect("a temporary file");
            file.write_all(rest).expect("room for a file");
            std::io::Seek::rewind(&mut file).expect("a file has a beginning");
            if let Ok((kept, _)) = kept_metrics(&file, 5) {
                let kept = rest.get(..kept as usize).expect("a prefix of the file");
                assert!(kept.is_empty() || kept.ends_with(b"\n"));
            }
        }
        _ => {
            let (then, now) = rest.split_at(rest.len() / 2);
            assert!(changed_keys(then, then).is_empty());
            let _ = changed_keys(then, now);
            let _ = ChatTemplate::parse(&String::from_utf8_lossy(rest), "<s>", "</s>");
        }
    }
}

fn record(bytes: &[u8]) {
    let Ok(record) = serde_json::from_slice(bytes) else { return };
    let tokenizer = Tokenizer::bytes();
    for (text, trained) in documents(&record) {
        assert!(trained.iter().all(|range| text.get(range.clone()).is_some()), "{trained:?} of {text:?}");
        assert!(tokenizer.encode(&text).is_ok());
    }
}

fn check_cache(file: &[u8]) {
    if let Some((n_tokens, _, n_in_documents)) = token_file(file, &KEY) {
        assert!(n_in_documents <= n_tokens, "{n_in_documents} of {n_tokens} tokens are in documents");
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let input = |kind: u8, rest: &[u8]| [&[kind], rest].concat();
    let turns = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho ßé"}]);
    let records = [
        json!({"text": "Once ßé."}),
        json!({"instruction": "Add", "input": "1", "output": "2", "instances": [{"input": "", "output": "x"}]}),
        json!({"instruction": "Add", "input": null, "output": "2"}),
        json!({ "messages": turns }),
    ];
    let words: Vec<u8> = [1u64, 2, 3, 1, 2, 3].iter().flat_map(|n| n.to_le_bytes()).collect();
    let metrics = b"{\"step\":1,\"loss\":2.5}\n{\"step\":4}\n{\"step\":6}\n{\"st";
    let template = "seed: 1\n{% for m in messages %}{{ m.content | trim }}{% endfor %}\nseed: 2\n";
    let records = records.iter().map(|record| input(RECORD, record.to_string().as_bytes()));
    let caches = [input(CACHE, &token_file_of(&KEY, &[1, 2, 3], &[1, 3])), input(CACHE_OF, &words)];
    records.chain(caches).chain([input(METRICS, metrics), input(4, template.as_bytes())]).collect()
}
