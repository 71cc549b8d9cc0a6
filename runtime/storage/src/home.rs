//! Paths that begin with `~`, as shells and Python's `expanduser` read them.

use std::env;
use std::path::{Component, Path, PathBuf};

use crate::foreign_file;

const USERS: &str = "/etc/passwd";
const USERS_BYTES_MAX: u64 = 16 << 20;

/// A path with the home folder of this user for `~`, and that of another user for `~name`. A name that nobody has stays as it is.
pub fn expanded(path: impl AsRef<Path>) -> PathBuf {
    expanded_with(path.as_ref(), env::home_dir)
}

/// As [`expanded`], with another home folder of this user.
pub(crate) fn expanded_with(path: &Path, own: impl FnOnce() -> Option<PathBuf>) -> PathBuf {
    let mut parts = path.components();
    let user = match parts.next() {
        Some(Component::Normal(first)) => first.to_str().and_then(|first| first.strip_prefix('~')),
        _ => None,
    };
    let home = match user {
        None => None,
        Some("") => own().filter(|home| !home.as_os_str().is_empty()),
        Some(name) => {
            foreign_file::read_text(Path::new(USERS), USERS_BYTES_MAX).ok().and_then(|users| home_of(name, &users))
        }
    };
    home.map_or_else(|| path.to_owned(), |home| home.join(parts))
}

/// The home folder of a user in the lines of `/etc/passwd`.
fn home_of(name: &str, users: &str) -> Option<PathBuf> {
    let fields = |line: &str| line.split(':').map(str::to_owned).collect::<Vec<_>>();
    let of_user = users.lines().map(fields).find(|fields| fields[0] == name)?;
    of_user.get(5).filter(|home| !home.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tilde_at_the_beginning_stands_for_a_home_folder() {
        let expanded = |path: &str| expanded_with(Path::new(path), || Some("/home/me".into()));

        assert_eq!(expanded("~/runs/a"), Path::new("/home/me/runs/a"));
        assert_eq!(expanded("~"), Path::new("/home/me"));
        assert_eq!(expanded("~root/a"), Path::new("/root/a"));
        for path in ["a/~", "./~/a", "/~", "~nobody-has-this-name/a", "s3://bucket/~/a", "a", ""] {
            assert_eq!(expanded(path), Path::new(path));
        }
        assert_eq!(expanded_with(Path::new("~/a"), || None), Path::new("~/a"));
        assert_eq!(home_of("b", "a:x:1:1::/home/a:/bin/sh\nb:x:2:2:B:/srv/b:/bin/sh\n"), Some("/srv/b".into()));
    }
}
