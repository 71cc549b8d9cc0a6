//! A vocabulary that needs no file: the 256 bytes and a few special tokens.
//!
//! The id of a byte is its value. [`tokenizer_json`] states the same vocabulary in the format of the `tokenizers` library,
//! so that other programs can load an exported model directory.

use crate::data::token_span::Piece;
use serde_json::{Value, json};

/// Special tokens; the first has id 256. The reserved ones round the vocabulary up to a multiple of eight, which suits
/// matrix kernels.
pub(crate) const SPECIALS: [&str; 8] = [
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
];
pub(crate) const BOS: u32 = 256;
pub(crate) const EOS: u32 = 257;
pub(crate) const PAD: u32 = 258;
pub(crate) const IM_END: u32 = 260;
pub(crate) const SIZE: usize = 256 + SPECIALS.len();

/// The tokens of `bytes`, which need not be UTF-8; the text of a special token becomes that token, as in the exported file.
pub(crate) fn encode(bytes: &[u8]) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let special = if rest[0] == b'<' { SPECIALS.iter().position(|s| rest.starts_with(s.as_bytes())) } else { None };
        let (id, len) = match special {
            Some(nth) => (256 + nth as u32, SPECIALS[nth].len()),
            None => (u32::from(rest[0]), 1),
        };
        pieces.push(Piece { id, start: at, end: at + len });
        at += len;
    }
    pieces
}

/// The exact bytes of `ids`; special tokens are left out or written as their text, and ids without a token have none.
pub(crate) fn decode(ids: &[u32], skip_specials: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ids.len());
    for &id in ids {
        match u8::try_from(id) {
            Ok(byte) => bytes.push(byte),
            Err(_) if skip_specials => {}
            Err(_) => {
                bytes.extend_from_slice(SPECIALS.get(id as usize - 256).map_or(&[], |special| special.as_bytes()))
            }
        }
    }
    bytes
}

/// The vocabulary as the `tokenizer.json` of a byte-pair model without merges.
pub(crate) fn tokenizer_json() -> Value {
    let vocab: serde_json::Map<String, Value> =
        (0..=255u8).map(|byte| (printable(byte).to_string(), json!(byte))).collect();
    let added: Vec<Value> = SPECIALS
        .iter()
        .enumerate()
        .map(|(nth, content)| {
            json!({ "id": 256 + nth, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        })
        .collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let bos = SPECIALS[0];
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": bos, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [
                { "SpecialToken": { "id": bos, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                { "SpecialToken": { "id": bos, "type_id": 1 } }, { "Sequence": { "id": "B", "type_id": 1 } }
            ],
            "special_tokens": { bos: { "id": bos, "ids": [BOS], "tokens": [bos] } }
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    })
}

/// The `tokenizer_config.json` that goes with [`tokenizer_json`].
pub(crate) fn tokenizer_config_json(chat_template: &str) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2],
        "add_bos_token": true,
        "clean_up_tokenization_spaces": false,
        "chat_template": chat_template,
    })
}

/// The printable character that byte-level vocabularies write for a byte: itself where it is printable Latin-1, otherwise
/// the next unused character from U+0100 on. Source: Radford et al. 2019 (GPT-2), byte-level byte-pair encoding, §2.2.
pub(crate) fn printable(byte: u8) -> char {
    let is_printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        char::from(byte)
    } else {
        let nth = (0..byte).filter(|&b| !is_printable(b)).count() as u32;
        char::from_u32(0x100 + nth).expect("U+0100 to U+0143 are characters")
    }
}
