//! The bytes that each token of a vocabulary stands for by itself.
//!
//! A decoder gives the text of a sequence: it leaves out the blank before a first word, and joins the bytes of a character. For
//! one token its entry in the vocabulary tells more: byte-level vocabularies write each byte as a printable character, others
//! write a blank as U+2581 and a single byte as `<0x0A>`.

use super::byte_vocabulary;
use super::tokenizer::Tokenizer;
use serde_json::Value;
use std::collections::BTreeMap;

/// The bytes of tokens.
#[derive(Debug)]
pub(crate) struct TokenPieces {
    tokenizer: Tokenizer,
    /// Tokens whose entry in the vocabulary is their text.
    verbatim: Vec<u32>,
    /// The bytes that a byte-level vocabulary writes as other characters; empty if it is of another kind.
    byte_of: BTreeMap<char, u8>,
}

impl TokenPieces {
    pub(crate) fn of(tokenizer: &Tokenizer) -> TokenPieces {
        let json = tokenizer.json();
        let added = json["added_tokens"].as_array().into_iter().flatten();
        let mut verbatim: Vec<u32> =
            added.filter_map(|token| token["id"].as_u64().and_then(|id| u32::try_from(id).ok())).collect();
        verbatim.sort_unstable();
        let byte_of = match is_byte_level(&json["decoder"]) {
            true => (0..=255).map(|byte| (byte_vocabulary::printable(byte), byte)).collect(),
            false => BTreeMap::new(),
        };
        TokenPieces { tokenizer: tokenizer.clone(), verbatim, byte_of }
    }

    /// The bytes of a token; empty for an id without a token.
    pub(crate) fn bytes(&self, id: u32) -> Vec<u8> {
        // The byte tokenizer itself knows the bytes that are no text.
        if let Some(bytes) = self.tokenizer.byte_token(id) {
            return bytes;
        }
        let Some(entry) = self.tokenizer.token_text(id) else { return Vec::new() };
        if self.verbatim.binary_search(&id).is_ok() {
            return entry.into_bytes();
        }
        if !self.byte_of.is_empty() {
            return match entry.chars().map(|c| self.byte_of.get(&c).copied()).collect() {
                Some(bytes) => bytes,
                None => entry.into_bytes(),
            };
        }
        let byte = entry.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        match byte.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => vec![byte],
            None => entry.replace('\u{2581}', " ").into_bytes(),
        }
    }
}

fn is_byte_level(decoder: &Value) -> bool {
    match decoder["type"].as_str() {
        Some("ByteLevel") => true,
        Some("Sequence") => decoder["decoders"].as_array().into_iter().flatten().any(is_byte_level),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn pieces(model: &str) -> (Tokenizer, TokenPieces) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/models").join(model);
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        let pieces = TokenPieces::of(&tokenizer);
        (tokenizer, pieces)
    }

    #[test]
    fn bytes_of_the_tokens_of_a_text_are_the_bytes_of_the_text() {
        let text = "Die Würde des Menschen, \u{1f600}!\n  two  blanks";
        for model in ["tiny-llama2", "tiny-llama3", "tiny-gpt2", "tiny-qwen3"] {
            let (tokenizer, pieces) = pieces(model);

            let ids = tokenizer.encode(text).unwrap();

            let bytes: Vec<u8> = ids.iter().flat_map(|id| pieces.bytes(*id)).collect();
            // Tokenizers of the kind of SentencePiece put a blank before a text.
            let found = String::from_utf8(bytes).unwrap();
            assert_eq!(found.strip_prefix(' ').unwrap_or(&found), text, "{model}");
        }
    }

    #[test]
    fn special_tokens_and_bytes_that_are_no_text_are_themselves() {
        let pieces_of_bytes = TokenPieces::of(&Tokenizer::bytes());
        let (tokenizer, pieces) = pieces("tiny-llama3");

        assert_eq!(pieces_of_bytes.bytes(0xff), [0xff]);
        assert_eq!(pieces_of_bytes.bytes(256), b"<|bos|>");
        let bos = tokenizer.bos_id().unwrap();
        assert_eq!(pieces.bytes(bos), tokenizer.token_text(bos).unwrap().as_bytes());
        assert!(pieces.bytes(u32::MAX).is_empty());
    }
}
