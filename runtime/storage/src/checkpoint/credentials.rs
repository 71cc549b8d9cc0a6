//! Keys, region and server for S3 from the files that AWS's own tools share. A process cannot replace its environment, but its user
//! can replace these files: keys that expire while a job runs are replaced without ending it.

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

/// Variables and settings of a server of one's own, and of the region.
const ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// Adds what the environment does not name and AWS's own tools take from their shared files: of the profile `AWS_PROFILE`, by
/// default `default`, the keys in `~/.aws/credentials`, and `region` and `endpoint_url` in `~/.aws/config`. Without files or
/// profile, the machine's role remains. As for those tools, an address `http://…` that somebody wrote is used.
///
/// # Errors
/// A sentence, if `AWS_PROFILE` names a profile without keys there: the machine's role is not what its user has chosen.
pub(super) fn with_shared_files(builder: AmazonS3Builder) -> Result<AmazonS3Builder, String> {
    let profile = var("AWS_PROFILE");
    let config = shared_file("AWS_CONFIG_FILE", "config").map(|path| text_of(&path)).unwrap_or_default();
    let section = match profile.as_deref() {
        None | Some("default") => "default".to_owned(),
        Some(profile) => format!("profile {profile}"),
    };
    let setting = |name: &str| value_of(&config, &section, name);
    let region = setting("region").filter(|_| REGIONS.iter().all(|name| var(name).is_none()));
    let endpoint = ENDPOINTS.iter().find_map(|name| var(name)).or_else(|| setting("endpoint_url"));
    let mut builder = with_shared_keys(builder, profile)?;
    if let Some(region) = region {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = endpoint {
        if endpoint.starts_with("http://") && var("AWS_ALLOW_HTTP").is_none() {
            builder = builder.with_allow_http(true);
        }
        builder = builder.with_endpoint(endpoint);
    }
    Ok(builder)
}

/// A variable; an empty one counts as none, as for the vendor's tools.
fn var(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// The file that a variable names, or that of this name in the user's folder.
fn shared_file(variable: &str, name: &str) -> Option<PathBuf> {
    let of_user = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".aws").join(name));
    env::var_os(variable).map(PathBuf::from).or_else(of_user)
}

/// Adds the keys of a profile, unless the environment names others.
fn with_shared_keys(builder: AmazonS3Builder, profile: Option<String>) -> Result<AmazonS3Builder, String> {
    if STRONGER.iter().any(|name| var(name).is_some()) {
        return Ok(builder);
    }
    let path = shared_file("AWS_SHARED_CREDENTIALS_FILE", "credentials");
    let text = path.as_deref().map(text_of).unwrap_or_default();
    let Some(Keys { id, secret, token }) = keys_of(&text, profile.as_deref().unwrap_or("default")) else {
        return profile.map_or(Ok(builder), |profile| Err(without_keys(&profile, path.as_deref())));
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

/// The keys of a profile.
fn keys_of(text: &str, profile: &str) -> Option<Keys> {
    let value = |name: &str| value_of(text, profile, name);
    Some(Keys {
        id: value("aws_access_key_id")?,
        secret: value("aws_secret_access_key")?,
        token: value("aws_session_token"),
    })
}

/// The value of a line `name = value` below `[section]`. Indented lines belong to a setting with several.
fn value_of(text: &str, section: &str, name: &str) -> Option<String> {
    let header = format!("[{section}]");
    let lines = text.lines().skip_while(|line| line.trim() != header).skip(1);
    let own = lines.take_while(|line| !line.starts_with('[')).filter(|line| !line.starts_with([' ', '\t']));
    let mut pairs = own.filter_map(|line| line.split_once('='));
    pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
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
    fn setting_is_that_of_its_section_and_not_of_a_group_below_another_setting() {
        let text = "[default]\nregion = eu-central-1\ns3 =\n  endpoint_url = http://group\n\
                    [profile lab]\nendpoint_url=http://lab:9000\n";
        let value = |section, name| value_of(text, section, name);

        assert_eq!(value("default", "region").as_deref(), Some("eu-central-1"));
        assert_eq!(value("default", "endpoint_url"), None);
        assert_eq!(value("profile lab", "endpoint_url").as_deref(), Some("http://lab:9000"));
        assert_eq!(value("profile lab", "region"), None);
    }

    #[test]
    fn profile_has_the_keys_below_its_name_only() {
        let keys = |profile| keys_of(FILE, profile).map(|keys| (keys.id, keys.secret, keys.token));

        assert_eq!(keys("default"), Some(("A".into(), "s=1".into(), None)));
        assert_eq!(keys("other"), Some(("B".into(), "t".into(), Some("u".into()))));
        assert_eq!((keys("empty"), keys("half"), keys("absent")), (None, None, None));
    }
}
