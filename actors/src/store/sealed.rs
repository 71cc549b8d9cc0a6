//! The text of a stored value: a line with version and checksum above its JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// First word of each text.
const MAGIC: &str = "phalanx-store-2";

pub(crate) fn encode<T: Serialize>(value: &T) -> String {
    sealed(&serde_json::to_string_pretty(value).expect("leases and records have string keys only"))
}

/// The text of a file with this body.
pub(crate) fn sealed(body: &str) -> String {
    format!("{MAGIC} crc32c={:08x}\n{body}\n", crc_fast::crc32_iscsi(body.as_bytes()))
}

pub(crate) fn decode<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let (head, body) = text.split_once('\n').ok_or("expected a header line, found none")?;
    let body = body.strip_suffix('\n').ok_or("the end of the file is missing")?;
    let expected = format!("{MAGIC} crc32c={:08x}", crc_fast::crc32_iscsi(body.as_bytes()));
    if head != expected {
        return Err(format!("expected the header \"{expected}\", found \"{head}\""));
    }
    serde_json::from_str(body).map_err(|error| error.to_string())
}
