//! Data sets as LLaMA-Factory describes them in `dataset_info.json`.

use std::io::ErrorKind;
use std::path::Path;

use serde_yaml_ng::{Mapping, Value};

use super::convert::{Converted, at};
use super::hugging_face_preference::Method;
use super::{ReadFile, axolotl, shown};
use crate::config::described::asks_for_nothing;
use crate::config::prompts;
use crate::config::yaml_1_1::whole;

/// Keys of a description that are read, or that change nothing.
const KNOWN: [&str; 19] = [
    "file_name",
    "hf_hub_url",
    "ms_hub_url",
    "om_hub_url",
    "file_sha1",
    "split",
    "subset",
    "num_samples",
    "formatting",
    "columns.messages",
    "columns.prompt",
    "columns.query",
    "columns.response",
    "columns.system",
    "columns.tools",
    "ranking",
    "columns.chosen",
    "columns.rejected",
    "columns.kto_tag",
];
/// Keys of a description that only pairs and labelled answers have.
const OF_ANSWERS: [&str; 4] = ["ranking", "columns.chosen", "columns.rejected", "columns.kto_tag"];
/// Keys of a description that cannot be met, and why.
const NOT_MET: [(&str, &str); 7] = [
    ("folder", "name the files of the folder in `data_files` of its entry in the result"),
    ("script_url", "no code of data sets is run"),
    ("cloud_file_name", "copy the file to this machine"),
    ("columns.images", "only text is trained on"),
    ("columns.videos", "only text is trained on"),
    ("columns.audios", "only text is trained on"),
    ("columns.history", "store the records as messages"),
];
/// Keys of conversations only.
const TAGS: [&str; 7] =
    ["role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag", "observation_tag", "function_tag"];

/// A description, and how its data set is called.
struct Description<'a> {
    name: &'a str,
    keys: &'a Mapping,
    /// The key of the job that names it.
    key: &'a str,
    /// What is trained, if not the likelihood of texts.
    method: Option<Method>,
}

/// The entry of `datasets` for a data set that `key` of the file names.
pub(super) fn entry(
    name: &str,
    key: &str,
    method: Option<Method>,
    file: &Mapping,
    read: &ReadFile<'_>,
    to: &mut Converted,
) -> Value {
    let dir = at(file, "dataset_dir").map_or("data".into(), shown);
    let info = Path::new(&dir).join("dataset_info.json");
    let known = read(&info).ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
    let Some(keys) = known.as_ref().and_then(|known| known.get(name)).and_then(Value::as_mapping) else {
        to.notes.push(format!(
            "`{key}`: {} does not describe {name}; set the `path` and the `type` of its entry in the result",
            info.display()
        ));
        let ours = [("path", name), ("type", if method.is_some() { "preference" } else { "alpaca" })];
        return limited(ours.into_iter().map(|(key, value)| (key.into(), value.into())).collect(), None, file);
    };
    let description = Description { name, keys, key, method };
    description.refuse_others(to);
    let text = |key: &str| at(keys, key).map(shown);
    let path = text("hf_hub_url")
        .or_else(|| text("file_name").map(|file| Path::new(&dir).join(file).to_string_lossy().into_owned()));
    let mut ours = Mapping::from_iter([("path".into(), path.unwrap_or_else(|| name.to_owned()).into())]);
    // Of a folder, every file is trained on, whatever it is called.
    let folder = ours.get("path").map(shown).filter(|path| Path::new(path).extension().is_none());
    let is_folder = |path: String| read(path.as_ref()).is_err_and(|error| error.kind() == ErrorKind::IsADirectory);
    ours.extend(folder.is_some_and(is_folder).then(|| ("data_files".into(), "*".into())));
    let plain = ours.get("path").map(shown).filter(|path| axolotl::is_plain_text(path));
    to.notes.extend(plain.map(|path| axolotl::LINES.replace("FILE", &path)));
    ours.extend(text("split").map(|split| ("split".into(), split.into())));
    ours.extend(text("subset").map(|subset| ("name".into(), subset.into())));
    description.type_of_records(&mut ours, file, read, to);
    let n_samples = at(keys, "num_samples").and_then(whole);
    if let Some(n) = n_samples {
        to.notes.push(format!("`{key}`: of {name}, the first {n} records are read, instead of {n} random ones; if it has fewer, LLaMA-Factory repeats some of them: set `weight` for that"));
    }
    limited(ours, n_samples, file)
}

impl Description<'_> {
    /// How records become samples.
    fn type_of_records(&self, ours: &mut Mapping, file: &Mapping, read: &ReadFile<'_>, to: &mut Converted) {
        let is_text = at(file, "stage").is_some_and(|stage| stage == "pt");
        match at(self.keys, "formatting").map(shown).as_deref().unwrap_or("alpaca") {
            "sharegpt" | "openai" => {
                self.conversation(ours, to);
                if self.method.is_some() {
                    self.answers_to_messages(ours, to);
                }
            }
            "alpaca" if self.method.is_some() => self.answers_to_texts(ours, read, to),
            "alpaca" if is_text => {
                ours.insert("type".into(), "completion".into());
                let field = self.column("prompt", "instruction").unwrap_or_else(|| "text".into());
                ours.extend((field != "text").then(|| ("field".into(), field.into())));
            }
            "alpaca" => {
                if let Some(template) = at(file, "template").map(shown) {
                    to.notes.push(format!(
                        "`template`: the instructions of {} get Alpaca's prompt here instead of the turns of {template}; for those \
                         turns, store the records as messages",
                        self.name
                    ));
                }
                self.instruction(ours, to);
            }
            other => self.refuse("formatting", &format!("{other} is none of alpaca, sharegpt and openai"), to),
        }
    }

    fn refuse(&self, key: &str, why: &str, to: &mut Converted) {
        to.leave_out(self.key, format!("`{key}` of {} in dataset_info.json cannot be met: {why}", self.name));
    }

    /// Refuses every key that is not converted.
    fn refuse_others(&self, to: &mut Converted) {
        let sections = [("columns", at(self.keys, "columns")), ("tags", at(self.keys, "tags"))];
        let nested = sections.iter().flat_map(|(section, keys)| {
            let keys = keys.and_then(Value::as_mapping).into_iter().flatten();
            keys.map(move |(key, value)| (format!("{section}.{}", shown(key)), value))
        });
        let top = self.keys.iter().map(|(key, value)| (shown(key), value));
        let all = top.filter(|(key, _)| !["columns", "tags"].contains(&key.as_str())).chain(nested);
        let is_tag = |key: &str| key.strip_prefix("tags.").is_some_and(|tag| TAGS.contains(&tag));
        for (key, _) in all.filter(|(_, value)| !asks_for_nothing(value)) {
            match NOT_MET.iter().find(|(name, _)| *name == key) {
                Some((key, why)) => self.refuse(key, why, to),
                None if OF_ANSWERS.contains(&key.as_str()) && self.method.is_none() => {
                    self.refuse(&key, "only `stage: dpo`, `kto` and `rm` train on such answers", to);
                }
                None if KNOWN.contains(&key.as_str()) || is_tag(&key) => {}
                None => self.refuse(&key, "there is no such key", to),
            }
        }
    }

    /// The name of a column; a section `columns` says that there are no others.
    fn column(&self, key: &str, default: &str) -> Option<String> {
        self.in_section("columns", key, default)
    }

    fn in_section(&self, section: &str, key: &str, default: &str) -> Option<String> {
        match self.keys.get(section).and_then(Value::as_mapping) {
            Some(given) => at(given, key).map(shown),
            None => Some(default.to_owned()),
        }
    }

    /// Conversations in front of two answers, or with a label.
    fn answers_to_messages(&self, ours: &mut Mapping, to: &mut Converted) {
        if at(self.keys, "columns.system").is_some() {
            self.refuse("columns.system", "store the system text as the first message", to);
        }
        self.answers(ours, to);
    }

    /// A prompt as text, in front of two answers: a turn of the chat template, as there.
    fn answers_to_texts(&self, ours: &mut Mapping, read: &ReadFile<'_>, to: &mut Converted) {
        for column in ["system", "tools"] {
            if at(self.keys, &format!("columns.{column}")).is_some() {
                self.refuse(&format!("columns.{column}"), "store the records as messages", to);
            }
        }
        if self.method == Some(Method::Kto) {
            return self.refuse("columns.kto_tag", "store the records as messages", to);
        }
        let prompt = self.column("prompt", "instruction").unwrap_or_else(|| "instruction".into());
        ours.insert("field_messages".into(), prompt.clone().into());
        if let Some(query) = self.column("query", "input") {
            let path = ours.get("path").map(shown).unwrap_or_default();
            match has_text(&path, &query, read) {
                Some(false) => {}
                Some(true) => {
                    self.refuse("columns.query", &format!("append the texts of {query} to those of {prompt}"), to);
                }
                None => to.notes.push(format!(
                    "`{}`: if records of {} have a text in {query}, append it to {prompt}: it is not read here",
                    self.key, self.name
                )),
            }
        }
        self.answers(ours, to);
    }

    /// The columns of answers.
    fn answers(&self, ours: &mut Mapping, to: &mut Converted) {
        ours.insert("type".into(), "chat_template.default".into());
        if self.method == Some(Method::Kto) {
            match self.column("kto_tag", "kto_tag") {
                Some(tag) if tag == "label" => {}
                _ => self.refuse("columns.kto_tag", "rename the column to label", to),
            }
            return;
        }
        for (key, field) in [("chosen", "field_chosen"), ("rejected", "field_rejected")] {
            match self.column(key, key) {
                Some(name) => ours.extend((name != key).then(|| (field.into(), name.into()))),
                None => self.refuse("columns", "it must name `chosen` and `rejected`", to),
            }
        }
    }

    fn conversation(&self, ours: &mut Mapping, to: &mut Converted) {
        let tag = |key: &str, default: &str| self.in_section("tags", key, default);
        ours.insert("type".into(), "chat_template".into());
        ours.insert("field_messages".into(), self.column("messages", "conversations").unwrap_or_default().into());
        let names = [("role", tag("role_tag", "from")), ("content", tag("content_tag", "value"))];
        let names: Mapping =
            names.into_iter().filter_map(|(ours, theirs)| Some((ours.into(), theirs?.into()))).collect();
        ours.insert("message_property_mappings".into(), Value::Mapping(names));
        let roles = [
            ("user", tag("user_tag", "human")),
            ("assistant", tag("assistant_tag", "gpt")),
            ("system", tag("system_tag", "system")),
            ("tool", tag("observation_tag", "observation")),
            ("function_call", tag("function_tag", "function_call")),
        ];
        let roles: Mapping = roles
            .into_iter()
            .filter_map(|(ours, theirs)| Some((ours.into(), vec![Value::from(theirs?)].into())))
            .collect();
        ours.insert("roles".into(), Value::Mapping(roles));
        let tools = self.column("tools", "tools").filter(|name| name != "tools");
        ours.extend(tools.map(|name| ("field_tools".into(), name.into())));
        // Here a system text beside the messages has this name, and so have tools.
        for (column, field) in [("columns.system", "system"), ("columns.tools", "tools")] {
            let is_read = field == "tools" || self.method.is_none();
            if is_read && at(self.keys, column).is_none() {
                to.notes.push(format!(
                    "`{}`: if records of {} have a field `{field}`, it is part of the conversation here; LLaMA-Factory reads it only if \
                     `{column}` names it",
                    self.key, self.name
                ));
            }
        }
        if let Some(other) = self.column("system", "system").filter(|name| name != "system") {
            self.refuse("columns.system", &format!("rename the column {other} to system"), to);
        }
    }

    fn instruction(&self, ours: &mut Mapping, to: &mut Converted) {
        let columns = [("prompt", "instruction"), ("query", "input"), ("response", "output")];
        let [prompt, query, response] = columns.map(|(key, default)| self.column(key, default));
        let system = at(self.keys, "columns.system").map(shown);
        if at(self.keys, "columns.tools").is_some() {
            self.refuse("columns.tools", "store the records as messages", to);
        }
        let is = |name: &Option<String>, default: &str| name.as_deref() == Some(default);
        let is_alpaca = is(&prompt, "instruction") && is(&query, "input") && is(&response, "output");
        if is_alpaca && system.is_none() {
            ours.insert("type".into(), "alpaca".into());
            return;
        }
        let (Some(prompt), Some(response)) = (prompt, response) else {
            return self.refuse("columns", "it must name `prompt` and `response`", to);
        };
        let [preamble, with_input, without_input] = prompts::alpaca_texts(system.is_none());
        let with_input = if query.is_some() { with_input } else { without_input.clone() };
        let texts = [
            ("field_instruction", Some(prompt)),
            ("field_input", query),
            ("field_output", Some(response)),
            ("field_system", system),
            ("system_format", Some(preamble)),
            ("format", Some(with_input)),
            ("no_input_format", Some(without_input)),
        ];
        let section: Mapping = texts.into_iter().filter_map(|(key, text)| Some((key.into(), text?.into()))).collect();
        ours.insert("type".into(), Value::Mapping(section));
    }
}

/// Whether a record of a file of JSON has a text in this column; `None` if that cannot be told.
fn has_text(path: &str, column: &str, read: &ReadFile<'_>) -> Option<bool> {
    let text = read(Path::new(path)).ok()?;
    let lines = || text.lines().filter(|line| !line.trim().is_empty()).map(serde_json::from_str).collect();
    let records: Vec<serde_json::Value> = serde_json::from_str(&text).or_else(|_| lines()).ok()?;
    let is_text = |record: &serde_json::Value| record[column].as_str().is_some_and(|text| !text.is_empty());
    Some(records.iter().any(is_text))
}

/// Only the first records, if the file or the description limits them.
fn limited(mut entry: Mapping, n_samples: Option<u64>, file: &Mapping) -> Value {
    let of_file = at(file, "max_samples").and_then(whole);
    if let Some(n) = of_file.into_iter().chain(n_samples).min() {
        let split = at(&entry, "split").map_or("train".into(), shown);
        entry.insert("split".into(), format!("{split}[:{n}]").into());
    }
    Value::Mapping(entry)
}
