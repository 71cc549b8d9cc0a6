//! Which rules a tokenizer has when its files and transformers do not agree, and what the user is told about it.
//!
//! Token ids are those of transformers 5. Where one of its classes has rules of its own
//! ([`transformers_class`](super::transformers_class)), these hold, unless they lose characters of a text that `tokenizer.json`
//! keeps: transformers uses the class of Qwen 2 for every model of this family, also with a vocabulary of another kind.

use serde_json::Value;

use super::byte_vocabulary;
use super::splitting::Library;
use super::tokenizer::Tokenizer;
use super::tokenizer_error::TokenizerError;
use super::tokenizer_files::{CONFIG, Settings, TOKENIZER, TokenizerFiles};
use super::transformers_class::{Reading, TransformersClass, have_same_rules};

/// The class that reads `tokenizer.json` as it is.
const CLASS_OF_FILE: &str = "PreTrainedTokenizerFast";

/// Texts that every vocabulary can spell.
const PLAIN: [&str; 3] = ["a b", "a\nb", "a, b"];

/// Who decides, and what the user should know of it.
pub(super) struct Decision {
    pub(super) class: Option<&'static TransformersClass>,
    /// `tokenizer.json` as it was read, if a class decides.
    before: Value,
    notes: Vec<String>,
}

impl Decision {
    /// Decides for the files; they name the class of `tokenizer.json` if another one is not followed.
    ///
    /// # Errors
    /// When a file is malformed.
    pub(super) fn of(files: &mut TokenizerFiles) -> Result<Self, TokenizerError> {
        let config = files.json(CONFIG)?.unwrap_or_default();
        let as_file = |notes| Self { class: None, before: Value::Null, notes };
        let note = match Reading::of(&config, files.model_config(), files.tokenizer().1) {
            Reading::File => return Ok(as_file(Vec::new())),
            Reading::Class(class) => {
                let before = files.json(TOKENIZER)?.unwrap_or_default();
                // The tokens of bytes are what this crate says they are.
                if before == byte_vocabulary::tokenizer_json() {
                    return Ok(as_file(Vec::new()));
                }
                let unknown = config["unk_token"].as_str().or_else(|| class.role("unk_token")).map(str::to_owned);
                let rebuilt = class.rebuilt(&before, &config, unknown);
                if have_same_rules(&before, &rebuilt) || keeps_texts(&rebuilt, &before) {
                    return Ok(Self { class: Some(class), before, notes: Vec::new() });
                }
                format!(
                    "transformers 5 reads this tokenizer with its class {}, whose rules lose characters with this vocabulary; \
                     tokens here are those of tokenizer.json, and transformers has others",
                    class.name
                )
            }
            Reading::Unknown(name) => format!(
                "the files name the class {name} of transformers, whose rules, if it has any, are not known here; tokens are \
                 those of tokenizer.json, and exports name the class {CLASS_OF_FILE}, which follows it"
            ),
        };
        files.set_class(CLASS_OF_FILE)?;
        Ok(as_file(vec![note]))
    }

    /// What a user may not expect of a tokenizer with its merged files.
    pub(super) fn notes(
        self,
        settings: &Settings,
        tokenizer: &Tokenizer,
        side_tokens: &[(String, u32)],
    ) -> Vec<String> {
        let mut notes = self.notes;
        if !side_tokens.is_empty() {
            let mut listed: Vec<String> =
                side_tokens.iter().take(4).map(|(text, id)| format!("{text:?} (id {id})")).collect();
            if side_tokens.len() > listed.len() {
                listed.push(format!("{} more", side_tokens.len() - listed.len()));
            }
            notes.push(format!(
                "tokenizer.json lacks tokens that the files beside it or their class add: {}; they have the ids that \
                 transformers gives them",
                listed.join(", ")
            ));
        }
        if let Some(class) = self.class
            && let Some(text) = differing_text(&self.before, tokenizer)
        {
            notes.push(format!(
                "tokens are those of transformers 5, which reads this tokenizer with its class {} and ignores rules of \
                 tokenizer.json: for {text:?} the file alone gives others, as transformers 4 does. Exports have the rules of \
                 the class in tokenizer.json",
                class.name
            ));
        }
        if let Some(adds_bos) = settings.adds_bos().filter(|_| tokenizer.bos_id().is_some())
            && adds_bos != tokenizer.document_start().is_some()
        {
            notes.push(format!(
                "tokenizer_config.json has add_bos_token: {adds_bos}, which has no effect, as in transformers 5: tokenizer.json \
                 says otherwise"
            ));
        }
        notes
    }
}

/// Whether the rules of a class keep the characters of texts that `tokenizer.json` keeps.
fn keeps_texts(rebuilt: &Value, tokenizer: &Value) -> bool {
    let kept = |tokenizer: &Value| {
        let library = tokenizers::Tokenizer::from_bytes(tokenizer.to_string()).ok()?;
        let spelled = |text: &str| library.decode(library.encode_fast(text, false).ok()?.get_ids(), true).ok();
        Some(PLAIN.map(|text| spelled(text).as_deref() == Some(text)))
    };
    match (kept(rebuilt), kept(tokenizer)) {
        (Some(by_class), Some(by_file)) => {
            by_class.iter().zip(by_file).all(|(by_class, by_file)| *by_class || !by_file)
        }
        // A file that cannot be read is refused later.
        (by_class, by_file) => by_class.is_some() || by_file.is_none(),
    }
}

/// A short text for which the tokenizer has other tokens than a `tokenizer.json`.
fn differing_text(before: &Value, tokenizer: &Tokenizer) -> Option<String> {
    if *before == tokenizer.json() {
        return None;
    }
    let library: Library = serde_json::from_value(before.clone()).ok()?;
    let added = before["added_tokens"].as_array().into_iter().flatten().filter_map(|token| token["content"].as_str());
    let texts = ["a", " a", "  a", "a\n\nb", "a 12", "a's", "e\u{301}", "\u{1f600}"].map(str::to_owned);
    let behind = added.take(64).flat_map(|token| [token.to_owned(), format!("{token}a"), format!("{token} a")]);
    texts.into_iter().chain(behind).find(|text| {
        let ids = library.encode_fast(text.as_str(), false).ok().map(|found| found.get_ids().to_vec());
        ids != tokenizer.encode(text).ok()
    })
}

#[cfg(test)]
#[path = "reader_differences_tests.rs"]
mod tests;
