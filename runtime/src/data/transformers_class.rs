//! The classes of transformers that take only the vocabulary from `tokenizer.json`.
//!
//! transformers 5 reads most folders by `tokenizer.json` as it is. Some classes build a tokenizer of their own instead: from the
//! file they take the vocabulary, the merges and what surrounds a text; how texts are cleaned, split and decoded, which tokens
//! are added and what is unknown are rules of the class. [`Reading::of`] finds the class as `AutoTokenizer` does, and
//! [`TransformersClass::rebuilt`] writes its rules into `tokenizer.json`, so that every reader, here and of exports, has the ids
//! of transformers.
//!
//! Source: transformers 5.24, `models/auto/tokenization_auto.py`, `tokenization_utils_tokenizers.py` (`convert_to_native_format`)
//! and the file of each class.

use serde_json::{Map, Value, json};

/// Who decides how texts become tokens.
#[derive(Debug, Clone)]
pub(super) enum Reading {
    /// `tokenizer.json`.
    File,
    /// A class with rules of its own.
    Class(&'static TransformersClass),
    /// A class with this name, which is not known here.
    Unknown(String),
}

/// Classes that read `tokenizer.json` as it is.
const CLASSES_OF_FILE: [&str; 6] = [
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
    "PreTrainedTokenizer",
    "PythonBackend",
    "BloomTokenizer",
    "BloomTokenizerFast",
];

/// Families of models with a class, by `model_type`. Other classes can be named for some of them; see [`Reading::of`].
const FAMILIES: [(&str, &str); 29] = [
    ("code_llama", "CodeLlamaTokenizer"),
    ("codegen", "GPT2Tokenizer"),
    ("cohere", "CohereTokenizer"),
    ("cohere2", "CohereTokenizer"),
    ("gemma", "GemmaTokenizer"),
    ("gemma2", "GemmaTokenizer"),
    ("gemma3", "GemmaTokenizer"),
    ("gemma3_text", "GemmaTokenizer"),
    ("gpt2", "GPT2Tokenizer"),
    ("gpt_neo", "GPT2Tokenizer"),
    ("gpt_neox", "GPTNeoXTokenizer"),
    ("gptj", "GPT2Tokenizer"),
    ("granite", "TokenizersBackend"),
    ("granitemoe", "TokenizersBackend"),
    ("mistral", "TokenizersBackend"),
    ("mixtral", "TokenizersBackend"),
    ("ministral", "TokenizersBackend"),
    ("olmo", "GPTNeoXTokenizer"),
    ("olmo2", "TokenizersBackend"),
    ("olmo3", "TokenizersBackend"),
    ("opt", "GPT2Tokenizer"),
    ("phi", "GPT2Tokenizer"),
    ("phi3", "TokenizersBackend"),
    ("qwen2", "Qwen2Tokenizer"),
    ("qwen2_moe", "Qwen2Tokenizer"),
    ("qwen3", "Qwen2Tokenizer"),
    ("qwen3_moe", "Qwen2Tokenizer"),
    ("stablelm", "TokenizersBackend"),
    ("starcoder2", "GPT2Tokenizer"),
];

/// Families whose class is used whatever class the files name.
const FORCED: [&str; 3] = ["qwen2", "phi3", "phimoe"];

impl Reading {
    /// How `AutoTokenizer` reads a folder with this `tokenizer_config.json`, `config.json` and `tokenizer.json`.
    pub(super) fn of(config: &Value, model_config: &Value, tokenizer: &[u8]) -> Self {
        let family = model_config["model_type"].as_str().unwrap_or_default();
        let of_family = FAMILIES.iter().find(|(name, _)| *name == family).map(|(_, class)| *class);
        let is_forced = FORCED.contains(&family);
        let named = config["tokenizer_class"].as_str().or_else(|| model_config["tokenizer_class"].as_str());
        let Some(named) = named else {
            return of_family.map_or(Self::File, Self::named);
        };
        // With a class of remote code, which does not run here, the files' own class counts.
        let is_remote = config["auto_map"].is_array() || config["auto_map"]["AutoTokenizer"].is_array();
        let class = without_fast(named);
        // Folders of Llama 3 name the class of Llama 2.
        if class == "LlamaTokenizer" && !is_remote && !is_forced && contains(tokenizer, br#""ByteLevel""#) {
            return Self::File;
        }
        match of_family {
            Some(of_family) if !is_remote && of_family != class => match CLASSES_OF_FILE.contains(&of_family) {
                true => Self::File,
                false if is_forced => Self::named(of_family),
                false => Self::named(named),
            },
            _ => Self::named(named),
        }
    }

    fn named(name: &str) -> Self {
        let class = without_fast(name);
        match CLASSES.iter().find(|known| known.name == class) {
            Some(known) => Self::Class(known),
            None if CLASSES_OF_FILE.contains(&name) => Self::File,
            None => Self::Unknown(name.to_owned()),
        }
    }
}

fn without_fast(class: &str) -> &str {
    class.strip_suffix("Fast").unwrap_or(class)
}

fn contains(content: &[u8], text: &[u8]) -> bool {
    content.windows(text.len()).any(|window| window == text)
}

/// What a class puts around a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Frame {
    /// What the file says.
    OfFile,
    /// Nothing.
    Empty,
    /// BOS before it.
    Bos,
}

/// A class that builds its tokenizer from the vocabulary.
#[derive(Debug)]
pub(super) struct TransformersClass {
    pub(super) name: &'static str,
    /// The tokens of roles that no file sets.
    pub(super) roles: &'static [(&'static str, &'static str)],
    /// Whether flags of special tokens, such as `lstrip`, are lost.
    pub(super) loses_flags: bool,
    frame: Frame,
    rules: fn(&Keys<'_>) -> Rules,
}

/// What the rules of a class depend on.
struct Keys<'a> {
    config: &'a Value,
    unknown: Option<String>,
}

impl Keys<'_> {
    fn flag(&self, key: &str) -> Option<bool> {
        self.config[key].as_bool()
    }
}

/// The parts of `tokenizer.json` that a class replaces.
struct Rules {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    unknown: Option<String>,
    /// Whether characters that the vocabulary lacks become bytes, and neighbours that are unknown one token.
    falls_back_to_bytes: bool,
}

const END_OF_TEXT: &str = "<|endoftext|>";

static CLASSES: [TransformersClass; 8] = [
    TransformersClass {
        name: "LlamaTokenizer",
        roles: &[("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")],
        loses_flags: false,
        frame: Frame::OfFile,
        rules: |keys| {
            let scheme = match (keys.flag("add_prefix_space"), keys.flag("legacy")) {
                (Some(false), _) => "never",
                (_, Some(true)) => "always",
                _ => "first",
            };
            Rules { decoder: pieces_decoder(scheme != "never"), ..of_pieces(scheme, None) }
        },
    },
    TransformersClass {
        name: "CodeLlamaTokenizer",
        roles: &[
            ("unk_token", "<unk>"),
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("prefix_token", "\u{2581}<PRE>"),
            ("middle_token", "\u{2581}<MID>"),
            ("suffix_token", "\u{2581}<SUF>"),
            ("eot_token", "\u{2581}<EOT>"),
            ("fill_token", "<FILL_ME>"),
        ],
        loses_flags: false,
        frame: Frame::Bos,
        rules: |keys| {
            let scheme = if keys.flag("add_prefix_space") == Some(false) { "never" } else { "first" };
            Rules { decoder: pieces_decoder(true), ..of_pieces(scheme, keys.unknown.clone()) }
        },
    },
    TransformersClass {
        name: "GemmaTokenizer",
        roles: &[
            ("unk_token", "<unk>"),
            ("bos_token", "<bos>"),
            ("eos_token", "<eos>"),
            ("pad_token", "<pad>"),
            ("mask_token", "<mask>"),
        ],
        loses_flags: false,
        frame: Frame::OfFile,
        rules: |keys| Rules {
            normalizer: json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" }),
            pre_tokenizer: json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious", "invert": false }),
            decoder: pieces_decoder(false),
            ..of_pieces("never", keys.unknown.clone())
        },
    },
    TransformersClass {
        name: "GPT2Tokenizer",
        roles: &[("unk_token", END_OF_TEXT), ("bos_token", END_OF_TEXT), ("eos_token", END_OF_TEXT)],
        loses_flags: false,
        frame: Frame::OfFile,
        rules: |keys| of_bytes(Value::Null, byte_level(keys, true)),
    },
    TransformersClass {
        name: "GPTNeoXTokenizer",
        roles: &[
            ("unk_token", END_OF_TEXT),
            ("bos_token", END_OF_TEXT),
            ("eos_token", END_OF_TEXT),
            ("pad_token", "<|padding|>"),
        ],
        loses_flags: false,
        frame: Frame::Empty,
        rules: |keys| of_bytes(json!({ "type": "NFC" }), byte_level(keys, true)),
    },
    TransformersClass {
        name: "Qwen2Tokenizer",
        roles: &[("unk_token", END_OF_TEXT), ("eos_token", END_OF_TEXT), ("pad_token", END_OF_TEXT)],
        loses_flags: true,
        frame: Frame::OfFile,
        rules: |keys| of_bytes(json!({ "type": "NFC" }), sequence(&[split(QWEN2), byte_level(keys, false)])),
    },
    TransformersClass {
        name: "Qwen3_5Tokenizer",
        roles: &[("unk_token", END_OF_TEXT), ("eos_token", END_OF_TEXT), ("pad_token", END_OF_TEXT)],
        loses_flags: false,
        frame: Frame::OfFile,
        rules: |keys| of_bytes(json!({ "type": "NFC" }), sequence(&[split(QWEN3_5), byte_level(keys, false)])),
    },
    TransformersClass {
        name: "CohereTokenizer",
        roles: &[
            ("unk_token", "<UNK>"),
            ("bos_token", "<BOS_TOKEN>"),
            ("eos_token", "<|END_OF_TURN_TOKEN|>"),
            ("pad_token", "<PAD>"),
            ("cls_token", "<CLS>"),
            ("sep_token", "<SEP>"),
            ("mask_token", "<MASK_TOKEN>"),
        ],
        loses_flags: false,
        frame: Frame::OfFile,
        rules: |keys| {
            let digits = json!({ "type": "Digits", "individual_digits": true });
            of_bytes(json!({ "type": "NFC" }), sequence(&[digits, byte_level(keys, true)]))
        },
    },
];

/// How Qwen 2 splits texts into words.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with marks as parts of words.
const QWEN3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Rules for pieces of SentencePiece, which write a blank as U+2581; the decoder is left open.
fn of_pieces(scheme: &str, unknown: Option<String>) -> Rules {
    Rules {
        normalizer: Value::Null,
        pre_tokenizer: json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false }),
        decoder: Value::Null,
        unknown,
        falls_back_to_bytes: true,
    }
}

fn pieces_decoder(strips_blank: bool) -> Value {
    let mut steps = vec![
        json!({ "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if strips_blank {
        steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    json!({ "type": "Sequence", "decoders": steps })
}

/// Rules for characters that stand for bytes.
fn of_bytes(normalizer: Value, pre_tokenizer: Value) -> Rules {
    let decoder = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    Rules { normalizer, pre_tokenizer, decoder, unknown: None, falls_back_to_bytes: false }
}

fn byte_level(keys: &Keys<'_>, uses_regex: bool) -> Value {
    let adds_blank = keys.flag("add_prefix_space").unwrap_or(false);
    json!({ "type": "ByteLevel", "add_prefix_space": adds_blank, "trim_offsets": true, "use_regex": uses_regex })
}

fn split(pattern: &str) -> Value {
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
}

fn sequence(steps: &[Value]) -> Value {
    json!({ "type": "Sequence", "pretokenizers": steps })
}

impl TransformersClass {
    /// The token of a role that no file sets.
    pub(super) fn role(&self, role: &str) -> Option<&'static str> {
        self.roles.iter().find(|(name, _)| *name == role).map(|(_, token)| *token)
    }

    /// `tokenizer.json` with the rules of the class, without added tokens. `unknown` is the token for what the vocabulary lacks.
    pub(super) fn rebuilt(&self, tokenizer: &Value, config: &Value, unknown: Option<String>) -> Value {
        let rules = (self.rules)(&Keys { config, unknown });
        let old = &tokenizer["model"];
        let vocabulary = match &old["vocab"] {
            Value::Array(pieces) => {
                let text = |piece: &Value| piece.as_str().or_else(|| piece[0].as_str()).unwrap_or_default().to_owned();
                let by_id = pieces.iter().enumerate().map(|(id, piece)| (text(piece), Value::from(id)));
                Value::Object(by_id.collect::<Map<_, _>>())
            }
            vocabulary => vocabulary.clone(),
        };
        let merges = old.get("merges").cloned().unwrap_or_else(|| json!([]));
        json!({
            "version": tokenizer["version"],
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": rules.normalizer,
            "pre_tokenizer": rules.pre_tokenizer,
            "post_processor": if self.frame == Frame::OfFile { &tokenizer["post_processor"] } else { &Value::Null },
            "decoder": rules.decoder,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": rules.unknown,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": rules.falls_back_to_bytes,
                "byte_fallback": rules.falls_back_to_bytes,
                "ignore_merges": false,
                "vocab": vocabulary,
                "merges": merges,
            },
        })
    }

    /// Puts around texts what the class puts there, where the file has no say.
    pub(super) fn frame(&self, tokenizer: &mut Value, bos: Option<(&str, u32)>) {
        if let (Frame::Bos, Some((text, id))) = (self.frame, bos) {
            let token = |kind: u8| json!({ "SpecialToken": { "id": text, "type_id": kind } });
            let part = |name: &str, kind: u8| json!({ "Sequence": { "id": name, "type_id": kind } });
            tokenizer["post_processor"] = json!({
                "type": "TemplateProcessing",
                "single": [token(0), part("A", 0)],
                "pair": [token(0), part("A", 0), token(1), part("B", 1)],
                "special_tokens": { text: { "id": text, "ids": [id], "tokens": [text] } },
            });
        }
    }
}

/// Whether two `tokenizer.json` have the same rules, whatever their vocabularies and added tokens are.
pub(super) fn have_same_rules(tokenizer: &Value, other: &Value) -> bool {
    let rules = |tokenizer: &Value| {
        let mut rules: Map<String, Value> = tokenizer.as_object().cloned().unwrap_or_default();
        let model = rules.get("model").and_then(Value::as_object).cloned().unwrap_or_default();
        let is_set = |(key, value): &(String, Value)| key != "vocab" && key != "merges" && value != "";
        let mut model: Map<String, Value> = model.into_iter().filter(is_set).collect();
        model.insert("vocab".into(), json!({}));
        model.insert("merges".into(), json!([]));
        model.insert("unk_token".into(), Value::Null);
        rules.insert("model".into(), model.into());
        for (key, empty) in [("added_tokens", json!([])), ("truncation", Value::Null), ("padding", Value::Null)] {
            rules.insert(key.into(), empty);
        }
        // The library fills in what a file leaves out.
        let library = tokenizers::Tokenizer::from_bytes(Value::from(rules).to_string()).ok()?;
        serde_json::from_str::<Value>(&library.to_string(false).ok()?).ok()
    };
    let unknown = |tokenizer: &Value| tokenizer["model"]["unk_token"].clone();
    unknown(tokenizer) == unknown(other) && rules(tokenizer).is_some_and(|found| Some(found) == rules(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_is_the_one_that_auto_tokenizer_chooses() {
        let of = |class: Option<&str>, family: &str, tokenizer: &str| {
            let config = class.map_or(json!({}), |class| json!({ "tokenizer_class": class }));
            match Reading::of(&config, &json!({ "model_type": family }), tokenizer.as_bytes()) {
                Reading::File => "file".to_owned(),
                Reading::Class(class) => class.name.to_owned(),
                Reading::Unknown(name) => format!("unknown {name}"),
            }
        };
        let bytes = r#"{"pre_tokenizer": {"type": "ByteLevel"}}"#;
        let (llama, file) = (Some("LlamaTokenizerFast"), Some("PreTrainedTokenizerFast"));

        for (class, family, tokenizer, wanted) in [
            (llama, "llama", "{}", "LlamaTokenizer"),
            (llama, "", "{}", "LlamaTokenizer"),
            (llama, "llama", bytes, "file"),
            (llama, "mistral", "{}", "file"),
            (llama, "qwen3", "{}", "LlamaTokenizer"),
            (llama, "qwen2", bytes, "Qwen2Tokenizer"),
            (file, "qwen2", bytes, "Qwen2Tokenizer"),
            (file, "qwen3", bytes, "file"),
            (None, "qwen3", bytes, "Qwen2Tokenizer"),
            (None, "gpt2", bytes, "GPT2Tokenizer"),
            (file, "gpt2", bytes, "file"),
            (Some("GPT2Tokenizer"), "granite", bytes, "file"),
            (Some("GemmaTokenizer"), "llama", "{}", "GemmaTokenizer"),
            (Some("T5Tokenizer"), "llama", "{}", "unknown T5Tokenizer"),
            (None, "llama", "{}", "file"),
        ] {
            assert_eq!(of(class, family, tokenizer), wanted, "{class:?} {family}");
        }
    }
}
