//! Text to token ids and back: a Hugging Face `tokenizer.json`, or plain bytes.

use std::path::Path;

use serde_json::Value;

use super::byte_vocabulary;
use super::chat_template::{CHATML, ChatTemplate, ChatTemplateError};
use super::mistral_regex;
use super::reader_differences::Decision;
use super::side_tokens;
use super::splitting::Library;
use super::token_changes::TokenChanges;
use super::token_span::Piece;
use super::tokenizer_error::TokenizerError;
use super::tokenizer_files::{ChatTemplates, Settings, TokenizerFiles, invalid};

#[derive(Debug, Clone)]
enum Vocabulary {
    Bytes,
    HuggingFace(Box<Library>),
}

/// A vocabulary with its special tokens and chat template.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    vocab_size: usize,
    bos_id: Option<u32>,
    eos_id: Option<u32>,
    pad_id: Option<u32>,
    stop_ids: Vec<u32>,
    document_start: Option<u32>,
    chat_templates: ChatTemplates,
    files: TokenizerFiles,
    /// What a user may not expect of the files.
    notes: Vec<String>,
    new_tokens: Vec<String>,
}

impl Tokenizer {
    /// Loads the tokenizer of a model directory.
    ///
    /// `tokenizer.json` must exist. Ids are those of transformers: tokens that only the files beside it add, and rules of the class
    /// that reads them, count. The special tokens come from `tokenizer_config.json` or, if not set there, from `config.json` and
    /// `generation_config.json`; the chat template from `chat_template.jinja` or `tokenizer_config.json`.
    /// A directory that [`Tokenizer::write_files`] wrote for [`Tokenizer::bytes`] loads as the byte tokenizer.
    ///
    /// # Errors
    /// When a file is missing or malformed, or a special token is not in the vocabulary.
    pub fn from_dir(dir: &Path) -> Result<Self, TokenizerError> {
        Self::from_files(TokenizerFiles::read(dir)?)
    }

    /// The tokenizer of a directory for a model of another family, by `model_type`: transformers chooses rules by the family too.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`].
    pub fn for_family(dir: &Path, model_type: &str) -> Result<Self, TokenizerError> {
        let mut files = TokenizerFiles::read(dir)?;
        files.set_family(model_type);
        Self::from_files(files)
    }

    /// The tokenizer of files with these names, such as those of a checkpoint; others are ignored. `dir` is for messages.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`].
    pub(crate) fn from_named_files(dir: &Path, files: Vec<(String, Vec<u8>)>) -> Result<Self, TokenizerError> {
        Self::from_files(TokenizerFiles::named(dir, files)?)
    }

    /// The tokenizer with other tokens, roles of tokens or chat template; its files describe it.
    ///
    /// # Errors
    /// When a change does not fit the tokenizer.
    pub fn changed(&self, changes: &TokenChanges) -> Result<Self, TokenizerError> {
        if changes.is_empty() {
            return Ok(self.clone());
        }
        let mut files = self.files.clone();
        changes.apply(&mut files)?;
        let mut changed = Self::from_files(files)?;
        let texts = changes.texts_of_tokens().filter(|text| self.token_id(text).is_none());
        changed.new_tokens = texts.cloned().collect();
        Ok(changed)
    }

    /// The texts of the tokens that a job adds to the vocabulary of the files.
    pub(crate) fn new_tokens(&self) -> &[String] {
        &self.new_tokens
    }

    fn from_files(mut files: TokenizerFiles) -> Result<Self, TokenizerError> {
        let decision = Decision::of(&mut files)?;
        let side_tokens = side_tokens::merge(&mut files, decision.class)?;
        let other_rule = mistral_regex::correct(&mut files)?;
        let (path, json) = files.tokenizer();
        let parsed: Value = serde_json::from_slice(json).map_err(|error| invalid(&path, &error))?;
        let settings = Settings::of(&files)?;
        let (vocabulary, vocab_size) = if parsed == byte_vocabulary::tokenizer_json() {
            (Vocabulary::Bytes, byte_vocabulary::SIZE)
        } else {
            let mut model: Library = serde_json::from_slice(json).map_err(|error| invalid(&path, &error))?;
            // Both may be left over from training; rows are truncated and padded by this crate.
            model.with_truncation(None).map_err(|error| invalid(&path, &*error))?;
            model.with_padding(None);
            model.set_encode_special_tokens(settings.splits_special_tokens());
            let size = size_of(model.get_vocab(true));
            (Vocabulary::HuggingFace(Box::new(model)), size)
        };
        let chat_templates = settings.chat_templates(&files)?;
        let mut tokenizer = Self {
            vocabulary,
            vocab_size,
            bos_id: None,
            eos_id: None,
            pad_id: None,
            stop_ids: Vec::new(),
            document_start: None,
            chat_templates,
            files,
            notes: Vec::new(),
            new_tokens: Vec::new(),
        };
        let special_id = |role| settings.special_id(vocab_size, |text| tokenizer.token_id(text), role);
        let ids = ["bos_token", "eos_token", "pad_token"].map(special_id);
        [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id] = ids;
        tokenizer.stop_ids = settings.stop_ids(tokenizer.eos_id);
        tokenizer.document_start = tokenizer.probe_of_start()?;
        tokenizer.notes = decision.notes(&settings, &tokenizer, &side_tokens);
        tokenizer.notes.extend(other_rule.map(str::to_owned));
        Ok(tokenizer)
    }

    /// The token that the library puts before a text, if it is one.
    fn probe_of_start(&self) -> Result<Option<u32>, TokenizerError> {
        let Vocabulary::HuggingFace(model) = &self.vocabulary else { return Ok(Some(byte_vocabulary::BOS)) };
        let probe = |framed| model.encode_fast("a", framed).map_err(|error| encode_error(&*error));
        let (framed, bare) = (probe(true)?, probe(false)?);
        let first = framed.get_ids().split_first().filter(|(_, rest)| rest.starts_with(bare.get_ids()));
        // Without tokens for the text, what is in front cannot be told from what is behind.
        Ok(first.filter(|_| !bare.is_empty()).map(|(first, _)| *first))
    }

    /// The tokenizer whose tokens are bytes; it needs no file, loses nothing and suits small experiments.
    pub fn bytes() -> Self {
        let json = format!("{:#}\n", byte_vocabulary::tokenizer_json());
        let config = format!("{:#}\n", byte_vocabulary::tokenizer_config_json(CHATML));
        Self {
            vocabulary: Vocabulary::Bytes,
            vocab_size: byte_vocabulary::SIZE,
            bos_id: Some(byte_vocabulary::BOS),
            eos_id: Some(byte_vocabulary::EOS),
            pad_id: Some(byte_vocabulary::PAD),
            stop_ids: vec![byte_vocabulary::EOS, byte_vocabulary::IM_END],
            document_start: Some(byte_vocabulary::BOS),
            chat_templates: ChatTemplates::of_default(CHATML),
            notes: Vec::new(),
            new_tokens: Vec::new(),
            files: TokenizerFiles::new(vec![
                ("tokenizer.json", json.into_bytes()),
                ("tokenizer_config.json", config.into_bytes()),
            ]),
        }
    }

    /// The tokens of `text`, with no special token added; the text of a special token inside it becomes that token.
    ///
    /// # Errors
    /// When the tokenizer has no token for part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        match &self.vocabulary {
            Vocabulary::Bytes => Ok(byte_vocabulary::encode(text.as_bytes()).iter().map(|piece| piece.id).collect()),
            Vocabulary::HuggingFace(model) => {
                let encoding = model.encode_fast(text, false).map_err(|error| encode_error(&*error))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Like [`Tokenizer::encode`], with the position of each token in the text.
    ///
    /// # Errors
    /// When the tokenizer has no token for part of the text.
    pub fn encode_pieces(&self, text: &str) -> Result<Vec<Piece>, TokenizerError> {
        match &self.vocabulary {
            Vocabulary::Bytes => Ok(byte_vocabulary::encode(text.as_bytes())),
            Vocabulary::HuggingFace(model) => {
                let encoding = model.encode(text, false).map_err(|error| encode_error(&*error))?;
                let pieces = encoding.get_ids().iter().zip(encoding.get_offsets());
                Ok(pieces.map(|(&id, &(start, end))| Piece { id, start, end }).collect())
            }
        }
    }

    /// The tokens of any bytes if this is the byte tokenizer; `None` for a tokenizer of text.
    pub fn encode_bytes(&self, bytes: &[u8]) -> Option<Vec<Piece>> {
        match &self.vocabulary {
            Vocabulary::Bytes => Some(byte_vocabulary::encode(bytes)),
            Vocabulary::HuggingFace(_) => None,
        }
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids outside the vocabulary have no text: models whose embedding has
    /// more rows may write them. Use [`super::text_stream::TextStream`] for ids that arrive one by one.
    ///
    /// # Errors
    /// When the tokenizer refuses the sequence.
    pub fn decode(&self, ids: &[u32], skip_specials: bool) -> Result<String, TokenizerError> {
        match &self.vocabulary {
            Vocabulary::Bytes => Ok(String::from_utf8_lossy(&self.decode_bytes(ids, skip_specials)?).into_owned()),
            Vocabulary::HuggingFace(model) => {
                model.decode(ids, skip_specials).map_err(|error| TokenizerError::Decode { reason: error.to_string() })
            }
        }
    }

    /// The exact bytes of `ids`; for a tokenizer of text, the bytes of that text.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_bytes(&self, ids: &[u32], skip_specials: bool) -> Result<Vec<u8>, TokenizerError> {
        match &self.vocabulary {
            Vocabulary::Bytes => Ok(byte_vocabulary::decode(ids, skip_specials)),
            Vocabulary::HuggingFace(_) => self.decode(ids, skip_specials).map(String::into_bytes),
        }
    }

    /// Whether the text of `ids`, which is `text`, may change its last character when more tokens come.
    pub(crate) fn ends_inside_character(&self, ids: &[u32], text: &str) -> bool {
        if !text.ends_with(char::REPLACEMENT_CHARACTER) {
            return false;
        }
        match &self.vocabulary {
            Vocabulary::Bytes => byte_vocabulary::decode(ids, true).utf8_chunks().last().is_some_and(|chunk| {
                std::str::from_utf8(chunk.invalid()).is_err_and(|error| error.error_len().is_none())
            }),
            // The library returns only text, in which half a character and a replacement character are the same.
            Vocabulary::HuggingFace(_) => true,
        }
    }

    /// One more than the largest id; a model needs at least this many rows in its embedding.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// One more than the largest id of the vocabulary without the tokens that were added to it later, for which a model may have
    /// no rows as long as they are not used.
    pub(crate) fn base_vocab_size(&self) -> usize {
        match &self.vocabulary {
            Vocabulary::Bytes => self.vocab_size,
            Vocabulary::HuggingFace(model) => size_of(model.get_vocab(false)),
        }
    }

    /// The token that begins a document.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    /// The token that ends a document.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// The token that pads rows; it is never trained on.
    pub fn pad_id(&self) -> Option<u32> {
        self.pad_id
    }

    /// The token that fills rows of a model with this many tokens, if there is one.
    pub(crate) fn padding(&self, vocab_size: usize) -> Option<u32> {
        [self.pad_id, self.eos_id].into_iter().flatten().find(|&id| (id as usize) < vocab_size)
    }

    /// Every token that ends generation, including the end of a document.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The token to put before every document: the one that the model's own tokenizer puts before each text, which is BOS for
    /// Llama. GPT-2 and Qwen have none.
    pub fn document_start(&self) -> Option<u32> {
        self.document_start
    }

    /// The Jinja chat template of the tokenizer.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_templates.plain()
    }

    /// The template for conversations with tools, if it is another one.
    pub fn tool_template(&self) -> Option<&str> {
        self.named_template("tool_use")
    }

    /// A template that the tokenizer has beside its usual one, such as `rag`.
    pub fn named_template(&self, name: &str) -> Option<&str> {
        self.chat_templates.named(name)
    }

    /// Parses a chat template, which may print the tokens that begin and end a text.
    ///
    /// # Errors
    /// When the template is not valid Jinja.
    pub fn parse_template(&self, source: &str) -> Result<ChatTemplate, ChatTemplateError> {
        let text = |id: Option<u32>| id.and_then(|id| self.token_text(id)).unwrap_or_default();
        ChatTemplate::parse(source, &text(self.bos_id), &text(self.eos_id))
    }

    /// The tokens that were added to the vocabulary: their texts, ids, and whether they are special.
    pub(crate) fn added_tokens(&self) -> Vec<(String, u32, bool)> {
        let json = self.json();
        let tokens = json["added_tokens"].as_array().into_iter().flatten();
        tokens
            .filter_map(|token| {
                let id = u32::try_from(token["id"].as_u64()?).ok()?;
                Some((token["content"].as_str()?.to_owned(), id, token["special"] == true))
            })
            .collect()
    }

    /// What a user may not expect: tokens that `tokenizer.json` lacks, and other readers that get other ids from these files.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// How the vocabulary writes `id`, for messages.
    pub fn token_text(&self, id: u32) -> Option<String> {
        match &self.vocabulary {
            Vocabulary::Bytes => {
                let bytes = byte_vocabulary::decode(&[id], false);
                (!bytes.is_empty()).then(|| String::from_utf8_lossy(&bytes).into_owned())
            }
            Vocabulary::HuggingFace(model) => model.id_to_token(id),
        }
    }

    /// The exact bytes of one token if this is the byte tokenizer; `None` for a tokenizer of text.
    pub(crate) fn byte_token(&self, id: u32) -> Option<Vec<u8>> {
        match &self.vocabulary {
            Vocabulary::Bytes => Some(byte_vocabulary::decode(&[id], false)),
            Vocabulary::HuggingFace(_) => None,
        }
    }

    /// The id of the token that the vocabulary writes as `token`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        match &self.vocabulary {
            Vocabulary::Bytes => match byte_vocabulary::encode(token.as_bytes())[..] {
                [piece] => Some(piece.id),
                _ => None,
            },
            Vocabulary::HuggingFace(model) => model.token_to_id(token),
        }
    }

    /// Writes the tokenizer's files into an exported model directory, byte for byte as they were read.
    ///
    /// # Errors
    /// When a file cannot be written; earlier ones stay.
    pub fn write_files(&self, dir: &Path) -> Result<(), TokenizerError> {
        for (name, content) in self.files.iter() {
            let path = dir.join(name);
            std::fs::write(&path, content)
                .map_err(|error| TokenizerError::Write { path: path.clone(), reason: error.to_string() })?;
        }
        Ok(())
    }

    /// The content of its `tokenizer.json`.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(self.files.tokenizer().1).unwrap_or_default()
    }

    /// The tokenizer's files by name, byte for byte as they were read.
    pub fn files(&self) -> impl Iterator<Item = (String, Vec<u8>)> + '_ {
        self.files.iter().map(|(name, content)| (name.to_owned(), content.to_vec()))
    }

    /// A hash of everything that determines the ids of a text: tokenizers with equal fingerprints are interchangeable.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        match &self.vocabulary {
            Vocabulary::Bytes => hasher.update(b"phalanx bytes 1"),
            Vocabulary::HuggingFace(_) => hasher.update(self.files.tokenizer().1),
        };
        if let Vocabulary::HuggingFace(model) = &self.vocabulary
            && model.get_encode_special_tokens()
        {
            hasher.update(b"special tokens are split");
        }
        for id in [self.document_start(), self.eos_id] {
            hasher.update(&id.map_or(u64::MAX, u64::from).to_le_bytes());
        }
        *hasher.finalize().as_bytes()
    }
}

fn size_of(vocabulary: impl IntoIterator<Item = (String, u32)>) -> usize {
    vocabulary.into_iter().map(|(_, id)| id as usize + 1).max().unwrap_or(0)
}

fn encode_error(error: &dyn std::fmt::Display) -> TokenizerError {
    TokenizerError::Encode { reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_of_rows_that_pad_an_embedding_have_no_text() {
        let library = Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama2")).unwrap();
        for tokenizer in [Tokenizer::bytes(), library] {
            let mut ids = tokenizer.encode("Once").unwrap();
            ids.extend([tokenizer.vocab_size() as u32, 1 << 20]);

            assert_eq!(tokenizer.decode(&ids, true).unwrap(), "Once");
            assert_eq!(tokenizer.token_text(1 << 20), None);
        }
    }

    proptest! {
        #[test]
        fn byte_tokenizer_round_trips_any_text(text: String) {
            let tokenizer = Tokenizer::bytes();

            let ids = tokenizer.encode(&text).unwrap();

            prop_assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }

        #[test]
        fn byte_tokenizer_round_trips_bytes_that_are_not_text(bytes: Vec<u8>) {
            let tokenizer = Tokenizer::bytes();

            let ids: Vec<u32> = tokenizer.encode_bytes(&bytes).unwrap().iter().map(|piece| piece.id).collect();

            prop_assert_eq!(tokenizer.decode_bytes(&ids, false).unwrap(), bytes);
        }

        #[test]
        fn exported_byte_tokenizer_gives_the_same_ids_in_the_tokenizers_library(
            parts in prop::collection::vec(prop_oneof!["\\PC{0,12}", prop::sample::select(&byte_vocabulary::SPECIALS[..]).prop_map(str::to_owned), Just("<|".to_owned()), Just("\r\n\0".to_owned())], 0..6)
        ) {
            let text = parts.concat();
            let exported = byte_vocabulary::tokenizer_json().to_string();
            let library = tokenizers::Tokenizer::from_bytes(exported).unwrap();
            let tokenizer = Tokenizer::bytes();

            let theirs = library.encode(text.as_str(), false).unwrap();

            let ours = tokenizer.encode(&text).unwrap();
            prop_assert_eq!(theirs.get_ids(), &ours[..]);
            prop_assert_eq!(library.decode(&ours, true).unwrap(), tokenizer.decode(&ours, true).unwrap());
        }
    }

    #[test]
    fn exported_byte_tokenizer_is_recognised_and_starts_texts_with_bos() {
        let dir = tempfile::tempdir().unwrap();
        Tokenizer::bytes().write_files(dir.path()).unwrap();

        let loaded = Tokenizer::from_dir(dir.path()).unwrap();

        assert!(matches!(loaded.vocabulary, Vocabulary::Bytes));
        assert_eq!(loaded.fingerprint(), Tokenizer::bytes().fingerprint());
        assert_eq!(loaded.document_start(), Some(byte_vocabulary::BOS));
        assert_eq!(loaded.eos_id(), Some(byte_vocabulary::EOS));
        assert_eq!(loaded.chat_template(), Some(CHATML));
        let library = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
        assert_eq!(library.encode("a", true).unwrap().get_ids(), [byte_vocabulary::BOS, u32::from(b'a')]);
    }

    #[test]
    fn tokenizer_of_a_model_directory_has_its_special_tokens_and_round_trips_text() {
        // Llama 2 and Llama 3 begin a document with BOS, Qwen does not.
        for (name, bos, eos, start) in
            [("tiny-llama2", 1, 2, Some(1)), ("tiny-llama3", 0, 1, Some(0)), ("tiny-qwen2", 0, 1, None)]
        {
            let tokenizer = Tokenizer::from_dir(&phalanx_needs::reference("models").join(name)).unwrap();

            assert_eq!((tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.vocab_size()), (Some(bos), Some(eos), 352));
            assert_eq!(tokenizer.document_start(), start, "{name}");
            let ids = tokenizer.encode("Once upon a time, é").unwrap();
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), "Once upon a time, é");
        }
    }

    #[test]
    fn null_in_the_tokenizer_config_overrides_the_id_in_the_model_config() {
        let dir = tempfile::tempdir().unwrap();
        Tokenizer::bytes().write_files(dir.path()).unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"bos_token": null}"#).unwrap();
        std::fs::write(dir.path().join("config.json"), r#"{"bos_token_id": 5, "eos_token_id": [7, 9]}"#).unwrap();

        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();

        assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (None, Some(7)));
        assert_eq!(tokenizer.stop_ids(), [7, 9]);
    }

    #[test]
    fn missing_tokenizer_file_is_named() {
        let dir = tempfile::tempdir().unwrap();

        let error = Tokenizer::from_dir(dir.path()).unwrap_err();

        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }
}
