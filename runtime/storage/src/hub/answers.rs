//! What the Hub answers to an upload. Nothing of it is trusted as a path.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// Where files belong.
#[derive(Debug, Deserialize)]
pub(super) struct Modes {
    pub(super) files: Vec<Mode>,
}

/// Where a file belongs.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Mode {
    pub(super) path: String,
    /// `lfs` for large file storage, `regular` for git.
    pub(super) upload_mode: String,
    #[serde(default)]
    pub(super) should_ignore: bool,
}

/// What the large file storage has of files.
#[derive(Debug, Deserialize)]
pub(super) struct Batch {
    pub(super) objects: Vec<Stored>,
}

/// What it has of a file.
#[derive(Debug, Deserialize)]
pub(super) struct Stored {
    pub(super) oid: String,
    /// What is to be done; nothing if it has the file.
    #[serde(default)]
    pub(super) actions: Option<Actions>,
    #[serde(default)]
    pub(super) error: Option<Refusal>,
}

/// Why it does not take a file.
#[derive(Debug, Deserialize)]
pub(super) struct Refusal {
    pub(super) code: i64,
    pub(super) message: String,
}

/// What is to be done with a file.
#[derive(Debug, Deserialize)]
pub(super) struct Actions {
    pub(super) upload: Option<Upload>,
    pub(super) verify: Option<Upload>,
}

/// An address, and headers of requests to it, or the addresses of parts.
#[derive(Debug, Deserialize)]
pub(super) struct Upload {
    pub(super) href: String,
    #[serde(default)]
    pub(super) header: BTreeMap<String, Value>,
}

impl Upload {
    /// The length of a part and the addresses of all parts, if a file is uploaded in parts.
    pub(super) fn parts<'a>(&'a self) -> Result<Option<(u64, Vec<&'a str>)>, &'static str> {
        let Some(chunk) = self.header.get("chunk_size") else { return Ok(None) };
        let number = chunk.as_u64().or_else(|| chunk.as_str()?.parse().ok()).filter(|bytes| *bytes > 0);
        let chunk_bytes = number.ok_or("the length of the parts of a file is no number")?;
        let part = |(name, url): (&'a String, &'a Value)| Some((name.parse::<u64>().ok()?, url.as_str()?));
        let mut numbered: Vec<(u64, &str)> = self.header.iter().filter_map(part).collect();
        numbered.sort_by_key(|(number, _)| *number);
        Ok(Some((chunk_bytes, numbered.into_iter().map(|(_, url)| url).collect())))
    }

    /// The headers of a request to this address.
    pub(super) fn own_headers(&self) -> impl Iterator<Item = (&str, &str)> {
        self.header.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)))
    }
}

/// A commit.
#[derive(Debug, Deserialize)]
pub(super) struct Committed {
    #[serde(default, rename = "commitUrl")]
    pub(super) url: Option<String>,
    #[serde(default, rename = "commitOid")]
    pub(super) oid: Option<String>,
}
