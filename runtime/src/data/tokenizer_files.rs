//! The files of a directory that describe a tokenizer, and what the small ones say.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::tokenizer::{Tokenizer, TokenizerError};

/// The names of the files; an exported model includes them.
const FILES: [&str; 4] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];

/// The files of a tokenizer, and the configurations of the model beside them.
#[derive(Debug, Clone)]
pub(super) struct TokenizerFiles {
    dir: PathBuf,
    /// Name and content; the first is `tokenizer.json`.
    files: Vec<(&'static str, Vec<u8>)>,
    /// `config.json` and `generation_config.json`, in order of precedence; null where absent.
    model_configs: [Value; 2],
}

impl TokenizerFiles {
    /// Files without a directory; the first is `tokenizer.json`.
    pub(super) fn new(files: Vec<(&'static str, Vec<u8>)>) -> Self {
        Self { dir: PathBuf::new(), files, model_configs: [Value::Null, Value::Null] }
    }

    /// The files of a directory, which must have `tokenizer.json`.
    pub(super) fn read(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join(FILES[0]);
        let json = std::fs::read(&path).map_err(|error| read_error(&path, &error))?;
        let mut files = vec![(FILES[0], json)];
        for name in &FILES[1..] {
            if let Some(content) = read_if_present(&dir.join(name))? {
                files.push((name, content));
            }
        }
        let config = |name: &str| -> Result<Value, TokenizerError> {
            let path = dir.join(name);
            match read_if_present(&path)? {
                Some(content) => serde_json::from_slice(&content).map_err(|error| invalid(&path, &error)),
                None => Ok(Value::Null),
            }
        };
        let model_configs = [config("config.json")?, config("generation_config.json")?];
        Ok(Self { dir: dir.to_owned(), files, model_configs })
    }

    /// The files with these names, as if they were in `dir`; there must be a `tokenizer.json`.
    pub(super) fn named(dir: &Path, mut all: Vec<(String, Vec<u8>)>) -> Result<Self, TokenizerError> {
        let mut take = |name: &str| {
            let at = all.iter().position(|(found, _)| found == name);
            at.map(|at| all.swap_remove(at).1)
        };
        let path = dir.join(FILES[0]);
        let json = take(FILES[0]).ok_or_else(|| read_error(&path, &std::io::ErrorKind::NotFound.into()))?;
        let mut files = vec![(FILES[0], json)];
        files.extend(FILES[1..].iter().filter_map(|name| Some((*name, take(name)?))));
        let mut config = |name: &str| match take(name) {
            Some(content) => serde_json::from_slice(&content).map_err(|error| invalid(&dir.join(name), &error)),
            None => Ok(Value::Null),
        };
        let model_configs = [config("config.json")?, config("generation_config.json")?];
        Ok(Self { dir: dir.to_owned(), files, model_configs })
    }

    /// Path and content of `tokenizer.json`.
    pub(super) fn tokenizer(&self) -> (PathBuf, &[u8]) {
        (self.path(self.files[0].0), &self.files[0].1)
    }

    /// All files.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.files.iter().map(|(name, content)| (*name, &content[..]))
    }

    /// Where a file is or would be, for messages.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The content of a JSON file, if there is one.
    pub(super) fn json(&self, name: &str) -> Result<Option<Value>, TokenizerError> {
        let content = self.iter().find(|(found, _)| *found == name).map(|(_, content)| content);
        content
            .map(|content| serde_json::from_slice(content).map_err(|error| invalid(&self.path(name), &error)))
            .transpose()
    }

    /// Replaces a file, or adds it.
    pub(super) fn put(&mut self, name: &'static str, content: Vec<u8>) {
        match self.files.iter_mut().find(|(found, _)| *found == name) {
            Some((_, old)) => *old = content,
            None => self.files.push((name, content)),
        }
    }

    /// Removes a file.
    pub(super) fn remove(&mut self, name: &str) {
        self.files.retain(|(found, _)| *found != name);
    }
}

/// The small JSON files beside `tokenizer.json`; null where absent.
pub(super) struct Settings {
    path: PathBuf,
    tokenizer_config: Value,
    special_tokens: Value,
    /// `config.json` and `generation_config.json`, in order of precedence.
    model_configs: [Value; 2],
}

impl Settings {
    pub(super) fn of(files: &TokenizerFiles) -> Result<Self, TokenizerError> {
        Ok(Self {
            path: files.path("tokenizer_config.json"),
            tokenizer_config: files.json("tokenizer_config.json")?.unwrap_or_default(),
            special_tokens: files.json("special_tokens_map.json")?.unwrap_or_default(),
            model_configs: files.model_configs.clone(),
        })
    }

    /// A file that sets the token takes precedence, even with `null`; the ids of the model's configs come second, because
    /// they often belong to the model from which it was derived.
    pub(super) fn special_id(&self, tokenizer: &Tokenizer, role: &'static str) -> Result<Option<u32>, TokenizerError> {
        for source in [&self.tokenizer_config, &self.special_tokens] {
            let Some(value) = source.get(role) else { continue };
            let Some(token) = value.as_str().or_else(|| value["content"].as_str()) else { return Ok(None) };
            return tokenizer.token_id(token).map(Some).ok_or_else(|| TokenizerError::UnknownSpecial {
                path: self.path.clone(),
                role,
                token: token.to_owned(),
            });
        }
        let key = format!("{role}_id");
        let ids = self.model_configs.iter().flat_map(|config| ids_of(&config[&key]));
        Ok(ids.into_iter().find(|&id| (id as usize) < tokenizer.vocab_size()))
    }

    pub(super) fn stop_ids(&self, eos: Option<u32>) -> Vec<u32> {
        let mut ids: Vec<u32> = eos.into_iter().collect();
        ids.extend(self.model_configs.iter().flat_map(|config| ids_of(&config["eos_token_id"])));
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Whether texts begin with BOS, where a file says so.
    pub(super) fn adds_bos(&self) -> Option<bool> {
        self.tokenizer_config["add_bos_token"].as_bool()
    }

    pub(super) fn chat_template(&self, files: &TokenizerFiles) -> Result<Option<String>, TokenizerError> {
        if let Some((name, content)) = files.iter().find(|(name, _)| name.ends_with(".jinja")) {
            let path = self.path.with_file_name(name);
            return String::from_utf8(content.to_vec()).map(Some).map_err(|error| invalid(&path, &error));
        }
        let template = &self.tokenizer_config["chat_template"];
        // Some models have several named templates; the one for plain conversations is called "default".
        let named = template.as_array().and_then(|list| list.iter().find(|entry| entry["name"] == "default"));
        Ok(template.as_str().or_else(|| named?["template"].as_str()).map(str::to_owned))
    }
}

/// Ids are written as one number or as a list.
fn ids_of(value: &Value) -> Vec<u32> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

fn read_if_present(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    match std::fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(read_error(path, &error)),
    }
}

fn read_error(path: &Path, error: &std::io::Error) -> TokenizerError {
    TokenizerError::Read { path: path.to_owned(), reason: error.to_string() }
}

pub(super) fn invalid(path: &Path, error: &dyn std::fmt::Display) -> TokenizerError {
    TokenizerError::Invalid { path: path.to_owned(), reason: error.to_string() }
}
