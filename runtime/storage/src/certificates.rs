//! Servers whose certificate is not trusted: behind the proxies of firms, an authority of their own has signed it.

use std::error::Error;

/// What the cause of such a failure says.
pub(crate) const UNTRUSTED: &str = "invalid peer certificate";

/// What helps.
pub(crate) const WAY_OUT: &str =
    "if your network's own authority has signed its certificate, name the file of that authority in SSL_CERT_FILE";

/// An error with its causes. Some clients tell only in a cause what has happened.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
