//! Model directories: the header of a safetensors file, `config.json`, `tokenizer.json` and `tokenizer_config.json`.

use super::{Target, as_piece, piece};
use phalanx::data::tokenizer::Tokenizer;
use phalanx::fuzzing::architecture;
use phalanx_storage::hf::dtype::Dtype;
use phalanx_storage::hf::layout::{encode_header, read_header};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

pub(super) const TARGET: Target = Target { name: "model", run, seeds };

const HEADER: u8 = 0;
const CONFIG: u8 = 1;
const N_KINDS: u8 = 3;
/// Limit of the file length that the input claims.
const FILE_BYTES_MAX: u64 = 1 << 40;

/// A header is refused, or its tensors fill the file without gaps; a tokenizer encodes and decodes without failure.
fn run(bytes: &[u8]) {
    let Some((&kind, mut rest)) = bytes.split_first() else { return };
    match kind % N_KINDS {
        HEADER => header(rest),
        CONFIG => {
            if let Some(vocab_size) = json_of(rest).as_ref().and_then(architecture) {
                assert!(vocab_size > 0);
            }
        }
        _ => tokenizer(piece(&mut rest), rest),
    }
}

/// Reads the header of a sparse file: the input has its length and first bytes.
fn header(bytes: &[u8]) {
    let Some((len, content)) = bytes.split_first_chunk::<8>() else { return };
    let len = u64::from_le_bytes(*len) % FILE_BYTES_MAX;
    let mut file = tempfile::tempfile().expect("a temporary file");
    file.write_all(content).and_then(|()| file.set_len(len)).expect("room for a sparse file");
    let Ok(header) = read_header(|out, at| file.read_exact_at(out, at), len) else { return };
    let end = header.entries.iter().try_fold(None, |end, entry| match end {
        Some(end) if end != entry.start => Err(entry),
        _ => Ok(Some(entry.start + entry.len)),
    });
    assert!(end.expect("no gap").is_none_or(|end| end == len), "the last tensor does not end with its file");
}

fn tokenizer(tokenizer_json: &[u8], config: &[u8]) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, content: &[u8]| {
        File::create(dir.path().join(name)).and_then(|mut file| file.write_all(content)).expect("room for a file")
    };
    write("tokenizer.json", tokenizer_json);
    if !config.is_empty() {
        write("tokenizer_config.json", config);
    }
    let Ok(tokenizer) = Tokenizer::from_dir(dir.path()) else { return };
    let Ok(ids) = tokenizer.encode("Hello, Welt! 你好") else { return };
    assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()), "an id beyond the vocabulary");
    let _ = tokenizer.decode(&ids, true);
}

fn json_of(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice(bytes).ok()
}

fn seeds() -> Vec<Vec<u8>> {
    let tensors: [(&str, Dtype, &[usize]); 2] = [("a", Dtype::F32, &[2, 3]), ("b", Dtype::BF16, &[4])];
    let head = encode_header(&tensors, &BTreeMap::from([("format", "pt")]), 8);
    let file = [&[HEADER][..], &(head.len() as u64 + 32).to_le_bytes(), &head].concat();
    let llama = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}
    });
    let qwen = json!({
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "use_sliding_window": true, "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": true
    });
    let gpt2 =
        json!({"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32});
    let user = json!({"model_type": "user_defined", "vocab_size": 9, "tensors": [{"name": "w", "shape": [2], "trainable": true}]});
    let configs = [llama, qwen, gpt2, user].map(|config| [&[CONFIG], config.to_string().as_bytes()].concat());
    let bpe = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [
            {"id": 4, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true}],
        "normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
        "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"H": 0, "e": 1, "l": 2, "He": 3}, "merges": [["H", "e"]]}
    });
    let config = json!({"bos_token": "<s>", "eos_token": {"content": "<s>"}, "chat_template": "{{ messages }}"});
    let tokenizer = [&[2][..], &as_piece(bpe.to_string().as_bytes()), config.to_string().as_bytes()].concat();
    configs.into_iter().chain([file, tokenizer]).collect()
}
