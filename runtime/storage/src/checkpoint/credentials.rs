//! Keys for S3 from the file that AWS's own tools share. A process cannot replace its environment, but its user can replace this
//! file: keys that expire while a job runs are replaced without ending it.

use std::env;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use object_store::aws::AmazonS3Builder;

use crate::foreign_file;

/// The longest file that is read.
const BYTES_MAX: u64 = 1 << 20;

/// Variables that name keys of a higher rank than those of the file.
const STRONGER: [&str; 4] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];

/// A key, its secret, and the token of a key that expires.
#[derive(Clone, PartialEq, Eq)]
struct Keys {
    id: String,
    secret: String,
    token: Option<String>,
}

/// Adds the keys of the profile `AWS_PROFILE`, by default `default`, in the file `AWS_SHARED_CREDENTIALS_FILE`, by default
/// `~/.aws/credentials`, unless the environment names others. Without file or profile, the machine's role remains.
///
/// # Errors
/// A sentence, if `AWS_PROFILE` names a profile without keys there: the machine's role is not what its user has chosen.
pub(super) fn with_shared_keys(builder: AmazonS3Builder) -> Result<AmazonS3Builder, String> {
    // An empty variable counts as none, as for the vendor's tools.
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    if STRONGER.iter().any(|name| set(name).is_some()) {
        return Ok(builder);
    }
    let of_user = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".aws/credentials"));
    let path = env::var_os("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from).or_else(of_user);
    let text = path.as_deref().map(text_of).unwrap_or_default();
    let named = env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty());
    let Some(Keys { id, secret, token }) = keys_of(&text, named.as_deref().unwrap_or("default")) else {
        return named.map_or(Ok(builder), |profile| Err(without_keys(&profile, path.as_deref())));
    };
    let builder = builder.with_access_key_id(id).with_secret_access_key(secret);
    Ok(match token {
        Some(token) => builder.with_token(token),
        None => builder,
    })
}

fn without_keys(profile: &str, path: Option<&Path>) -> String {
    let place = path.map_or_else(|| "the shared file of credentials".into(), |path| path.display().to_string());
    format!(
        "AWS_PROFILE names the profile `{profile}`, for which {place} has no keys; roles and single sign-on of ~/.aws/config are not \
         followed: set the keys that `aws configure export-credentials --profile {profile} --format env` prints"
    )
}

/// The text of the file, which is read again and again: a pipe would have it once, and is not waited for.
fn text_of(path: &Path) -> String {
    let read = foreign_file::read(path, BYTES_MAX);
    let text =
        read.and_then(|bytes| String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::InvalidData, error)));
    text.unwrap_or_else(|error| {
        if error.kind() != ErrorKind::NotFound {
            tracing::warn!(path = %path.display(), %error, "cannot read the shared file of credentials");
        }
        String::new()
    })
}

/// The keys of a profile: lines `name = value` below `[profile]`.
fn keys_of(text: &str, profile: &str) -> Option<Keys> {
    let lines = text.lines().map(str::trim);
    let header = format!("[{profile}]");
    let section = lines.skip_while(|line| *line != header).skip(1).take_while(|line| !line.starts_with('['));
    let pairs: Vec<(&str, &str)> = section.filter_map(|line| line.split_once('=')).collect();
    let value = |name: &str| pairs.iter().find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned());
    Some(Keys {
        id: value("aws_access_key_id")?,
        secret: value("aws_secret_access_key")?,
        token: value("aws_session_token"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "[default]\naws_access_key_id = A\naws_secret_access_key=s=1\n\n\
                        [other]\n# of the night shift\naws_access_key_id=B\naws_secret_access_key=t\naws_session_token = u\n\
                        [empty]\n[half]\naws_access_key_id=C\n";

    #[test]
    fn pipe_in_the_place_of_the_file_has_no_keys_and_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, file) = (dir.path().join("pipe"), dir.path().join("credentials"));
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        std::fs::write(&file, FILE).unwrap();

        assert!(made.success());
        assert_eq!((text_of(&pipe), text_of(&dir.path().join("absent"))), (String::new(), String::new()));
        assert_eq!(text_of(&file), FILE);
    }

    #[test]
    fn named_profile_without_keys_is_told_with_a_way_out() {
        let told = without_keys("prod", Some(Path::new("/home/u/.aws/credentials")));

        assert!(told.contains("`prod`") && told.contains("/home/u/.aws/credentials"), "{told}");
        assert!(told.contains("export-credentials --profile prod"), "{told}");
    }

    #[test]
    fn profile_has_the_keys_below_its_name_only() {
        let keys = |profile| keys_of(FILE, profile).map(|keys| (keys.id, keys.secret, keys.token));

        assert_eq!(keys("default"), Some(("A".into(), "s=1".into(), None)));
        assert_eq!(keys("other"), Some(("B".into(), "t".into(), Some("u".into()))));
        assert_eq!((keys("empty"), keys("half"), keys("absent")), (None, None, None));
    }
}
