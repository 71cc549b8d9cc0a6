//! The files of a directory that describe a tokenizer, and what the small ones say.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx_storage::foreign_file;
use serde_json::{Value, json};

use super::exact_json;
use super::tokenizer_error::TokenizerError;

pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const CONFIG: &str = "tokenizer_config.json";
pub(super) const SPECIAL: &str = "special_tokens_map.json";
pub(super) const TEMPLATE: &str = "chat_template.jinja";
/// Tokens of old tokenizers; they are written into `tokenizer.json`, and the file is not exported.
pub(super) const ADDED: &str = "added_tokens.json";

/// The names of the files.
const FILES: [&str; 5] = [TOKENIZER, CONFIG, SPECIAL, TEMPLATE, ADDED];

/// The folder of templates with names, each in a file of its own.
const TEMPLATE_DIR: &str = "additional_chat_templates";
/// The template that renders conversations for which no other one is named.
const DEFAULT: &str = "default";

/// The longest file that is read; the largest tokenizers have some 40 MB.
const BYTES_MAX: u64 = 256 << 20;

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
        let json = foreign_file::read(&path, BYTES_MAX).map_err(|error| read_error(&path, &error))?;
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
        let mut files = Self { dir: dir.to_owned(), files, model_configs };
        files.add_named_templates(&dir.join(TEMPLATE_DIR))?;
        Ok(files)
    }

    /// Puts the templates of a folder into the list of `tokenizer_config.json`, the other place for them. Templates in files
    /// take the place of those that the list has, as in transformers.
    fn add_named_templates(&mut self, folder: &Path) -> Result<(), TokenizerError> {
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(read_error(folder, &error)),
        };
        let mut templates = BTreeMap::new();
        for entry in entries {
            let path = entry.map_err(|error| read_error(folder, &error))?.path();
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja"));
            if let Some(name) = name {
                let content = foreign_file::read(&path, BYTES_MAX).map_err(|error| read_error(&path, &error))?;
                templates.insert(name.to_owned(), text_of(content, &path)?);
            }
        }
        if templates.is_empty() {
            return Ok(());
        }
        if let Some(template) = self.text(TEMPLATE)? {
            templates.insert(DEFAULT.to_owned(), template);
        }
        let mut config = self.json(CONFIG)?.unwrap_or_else(|| json!({}));
        config["chat_template"] =
            templates.iter().map(|(name, template)| json!({ "name": name, "template": template })).collect();
        self.remove(TEMPLATE);
        self.put(CONFIG, &config);
        Ok(())
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

    /// Makes them files of a model of this family.
    pub(super) fn set_family(&mut self, model_type: &str) {
        match &mut self.model_configs[0] {
            Value::Object(config) => drop(config.insert("model_type".to_owned(), model_type.into())),
            absent => *absent = json!({ "model_type": model_type }),
        }
    }

    /// The `config.json` of the model; null where absent.
    pub(super) fn model_config(&self) -> &Value {
        &self.model_configs[0]
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
        // The library reads the numbers of a vocabulary, and others only copy those of the small files, which may be longer.
        let parse =
            |content| if name == TOKENIZER { serde_json::from_slice(content) } else { exact_json::from_slice(content) };
        content.map(|content| parse(content).map_err(|error| invalid(&self.path(name), &error))).transpose()
    }

    /// The content of a text file, if there is one.
    pub(super) fn text(&self, name: &str) -> Result<Option<String>, TokenizerError> {
        let content = self.iter().find(|(found, _)| *found == name).map(|(_, content)| content.to_vec());
        content.map(|content| text_of(content, &self.path(name))).transpose()
    }

    /// Replaces a JSON file, or adds it.
    pub(super) fn put(&mut self, name: &'static str, json: &Value) {
        let content = exact_json::pretty(json).into_bytes();
        match self.files.iter_mut().find(|(found, _)| *found == name) {
            Some((_, old)) => *old = content,
            None => self.files.push((name, content)),
        }
    }

    /// Sets the class of transformers that reads the files.
    pub(super) fn set_class(&mut self, class: &str) -> Result<(), TokenizerError> {
        let mut config = self.json(CONFIG)?.unwrap_or_else(|| json!({}));
        config["tokenizer_class"] = class.into();
        self.put(CONFIG, &config);
        Ok(())
    }

    /// Removes a file.
    pub(super) fn remove(&mut self, name: &str) {
        self.files.retain(|(found, _)| *found != name);
    }
}

/// The small JSON files beside `tokenizer.json`; null where absent.
pub(super) struct Settings {
    tokenizer_config: Value,
    special_tokens: Value,
    /// `config.json` and `generation_config.json`, in order of precedence.
    model_configs: [Value; 2],
}

impl Settings {
    pub(super) fn of(files: &TokenizerFiles) -> Result<Self, TokenizerError> {
        Ok(Self {
            tokenizer_config: files.json(CONFIG)?.unwrap_or_default(),
            special_tokens: files.json(SPECIAL)?.unwrap_or_default(),
            model_configs: files.model_configs.clone(),
        })
    }

    /// A file that sets the token takes precedence, even with `null`; the ids of the model's configs come second, because
    /// they often belong to the model from which it was derived. Every token that a file names is in the vocabulary by then.
    pub(super) fn special_id(&self, vocab_size: usize, id_of: impl Fn(&str) -> Option<u32>, role: &str) -> Option<u32> {
        let files = [&self.tokenizer_config, &self.special_tokens];
        // As transformers, to which the list of added tokens says that the other file is old.
        let order = if self.tokenizer_config["added_tokens_decoder"].is_object() { [0, 1] } else { [1, 0] };
        for source in order.map(|at| files[at]) {
            let Some(value) = source.get(role) else { continue };
            return value.as_str().or_else(|| value["content"].as_str()).and_then(id_of);
        }
        let key = format!("{role}_id");
        let ids = self.model_configs.iter().flat_map(|config| ids_of(&config[&key]));
        ids.into_iter().find(|&id| (id as usize) < vocab_size)
    }

    pub(super) fn stop_ids(&self, eos: Option<u32>) -> Vec<u32> {
        let mut ids: Vec<u32> = eos.into_iter().collect();
        ids.extend(self.model_configs.iter().flat_map(|config| ids_of(&config["eos_token_id"])));
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Whether special tokens in texts are split like other texts.
    pub(super) fn splits_special_tokens(&self) -> bool {
        self.tokenizer_config["split_special_tokens"] == true
    }

    /// Whether `tokenizer_config.json` says that texts begin with BOS, which transformers 5 ignores beside a `tokenizer.json`.
    pub(super) fn adds_bos(&self) -> Option<bool> {
        self.tokenizer_config["add_bos_token"].as_bool()
    }

    pub(super) fn chat_templates(&self, files: &TokenizerFiles) -> Result<ChatTemplates, TokenizerError> {
        let of_default = |template: String| BTreeMap::from([(DEFAULT.to_owned(), template)]);
        if let Some(template) = files.text(TEMPLATE)? {
            return Ok(ChatTemplates(of_default(template)));
        }
        let template = &self.tokenizer_config["chat_template"];
        if let Some(template) = template.as_str() {
            return Ok(ChatTemplates(of_default(template.to_owned())));
        }
        let named = |entry: &Value| Some((entry["name"].as_str()?.to_owned(), entry["template"].as_str()?.to_owned()));
        Ok(ChatTemplates(template.as_array().into_iter().flatten().filter_map(named).collect()))
    }
}

/// The chat templates of a tokenizer by name; most have one, called "default".
#[derive(Debug, Clone, Default)]
pub(super) struct ChatTemplates(BTreeMap<String, String>);

impl ChatTemplates {
    /// The template without a name of its own.
    pub(super) fn of_default(template: &str) -> Self {
        Self(BTreeMap::from([(DEFAULT.to_owned(), template.to_owned())]))
    }

    /// The template for conversations without tools.
    pub(super) fn plain(&self) -> Option<&str> {
        self.named(DEFAULT)
    }

    /// The template of a name.
    pub(super) fn named(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

fn text_of(content: Vec<u8>, path: &Path) -> Result<String, TokenizerError> {
    String::from_utf8(content).map_err(|error| invalid(path, &error))
}

/// Ids are written as one number or as a list.
fn ids_of(value: &Value) -> Vec<u32> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

fn read_if_present(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    let read = || match foreign_file::is_there(path)? {
        true => foreign_file::read(path, BYTES_MAX).map(Some),
        false => Ok(None),
    };
    read().map_err(|error| read_error(path, &error))
}

fn read_error(path: &Path, error: &std::io::Error) -> TokenizerError {
    TokenizerError::Read { path: path.to_owned(), reason: error.to_string() }
}

pub(super) fn invalid(path: &Path, error: &dyn std::fmt::Display) -> TokenizerError {
    TokenizerError::Invalid { path: path.to_owned(), reason: error.to_string() }
}
