//! The cache folder that the Hub's own client fills: `models--owner--name/snapshots/COMMIT`, whose files are links to
//! `blobs/HASH`; `refs/main` has the commit of a branch.

use std::env;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use super::error::HubError;
use super::name::{Kind, MAIN, RepoName};
use crate::foreign_file;
use crate::home::expanded_with;

/// Bytes of a file of `refs`; a commit has 40.
const REF_BYTES_MAX: u64 = 1024;

/// A cache folder, which need not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubCache {
    root: PathBuf,
}

impl HubCache {
    /// The cache at `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The cache of this user, where the Hub's own client has it: `HF_HUB_CACHE`, or `hub` in `HF_HOME`, or
    /// `~/.cache/huggingface/hub`.
    pub fn of_user() -> Self {
        Self::from_variables(&|name| env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from_variables(var: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let direct = path(var, "HF_HUB_CACHE").or_else(|| path(var, "HUGGINGFACE_HUB_CACHE"));
        Self { root: direct.unwrap_or_else(|| home(var).join("hub")) }
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of a repository in the cache.
    pub(super) fn repository(&self, kind: Kind, name: &RepoName) -> PathBuf {
        self.root.join(name.folder(kind))
    }

    /// The folder with the files of a revision (a branch, tag or commit), if it is there.
    pub fn snapshot(&self, kind: Kind, name: &RepoName, revision: &str) -> Option<PathBuf> {
        if !is_inside(Path::new(revision)) {
            return None;
        }
        let folder = self.repository(kind, name);
        let file = folder.join("refs").join(revision);
        let named = foreign_file::read_text(&file, REF_BYTES_MAX).ok();
        let commit = named.as_deref().map_or(revision, str::trim);
        let is_commit = !commit.is_empty() && commit.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let snapshot = folder.join("snapshots").join(commit);
        (is_commit && snapshot.is_dir()).then_some(snapshot)
    }

    /// The folder for what a configuration calls `path`: the path itself if it exists or is no name of the Hub, else the
    /// snapshot of the repository with this name.
    ///
    /// # Errors
    /// [`HubError::NotCached`] if there is neither.
    pub fn resolve(&self, kind: Kind, path: &Path, revision: Option<&str>) -> Result<PathBuf, HubError> {
        let name = path.to_str().and_then(RepoName::parse);
        let Some(name) = name.filter(|_| !path.exists()) else { return Ok(path.to_owned()) };
        let revision = revision.unwrap_or(MAIN);
        self.snapshot(kind, &name, revision).ok_or_else(|| HubError::NotCached {
            kind,
            name,
            revision: revision.to_owned(),
            cache: self.root.clone(),
        })
    }
}

/// The folder of the Hub's client: `HF_HOME`, or `huggingface` in the user's cache folder.
pub(super) fn home(var: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    let of_user = || {
        let cache = path(var, "XDG_CACHE_HOME").or_else(|| path(var, "HOME").map(|home| home.join(".cache")));
        cache.unwrap_or_else(|| PathBuf::from(".cache")).join("huggingface")
    };
    path(var, "HF_HOME").unwrap_or_else(of_user)
}

/// The path in a variable, in which the Hub's client expands `~` and then other variables.
pub(super) fn path(var: &dyn Fn(&str) -> Option<OsString>, name: &str) -> Option<PathBuf> {
    let given = PathBuf::from(var(name)?);
    let own = || var("HOME").map(PathBuf::from).or_else(env::home_dir);
    let path = expanded_with(&given, own);
    Some(path.to_str().map(|text| with_variables(text, var)).unwrap_or(path))
}

/// The text with the values of `$NAME` and `${NAME}`; those that are not set stay as they are.
fn with_variables(text: &str, var: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let (mut found, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('$') {
        found.push_str(before);
        let (name, behind) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some(braced) => braced,
            None => after.split_at(after.find(|c| !is_part(c)).unwrap_or(after.len())),
        };
        match var(name).and_then(|value| value.into_string().ok()).filter(|_| !name.is_empty()) {
            Some(value) => found.push_str(&value),
            None => {
                found.push('$');
                found.push_str(&after[..after.len() - behind.len()]);
            }
        }
        rest = behind;
    }
    found.push_str(rest);
    PathBuf::from(found)
}

/// Whether a relative path stays in its folder.
pub(super) fn is_inside(path: &Path) -> bool {
    path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> RepoName {
        RepoName::parse("owner/set").unwrap()
    }

    fn cache() -> (tempfile::TempDir, HubCache) {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("datasets--owner--set");
        for commit in ["aa11", "bb22"] {
            std::fs::create_dir_all(folder.join("snapshots").join(commit)).unwrap();
        }
        std::fs::create_dir_all(folder.join("refs/refs/pr")).unwrap();
        std::fs::write(folder.join("refs/main"), "aa11\n").unwrap();
        std::fs::write(folder.join("refs/refs/pr/1"), "bb22").unwrap();
        std::fs::write(folder.join("refs/evil"), "../../..").unwrap();
        let cache = HubCache::at(dir.path());
        (dir, cache)
    }

    #[test]
    fn revision_is_a_branch_or_a_commit() {
        let (dir, cache) = cache();
        let snapshot = |commit: &str| Some(dir.path().join("datasets--owner--set/snapshots").join(commit));

        assert_eq!(cache.snapshot(Kind::Dataset, &name(), MAIN), snapshot("aa11"));
        assert_eq!(cache.snapshot(Kind::Dataset, &name(), "refs/pr/1"), snapshot("bb22"));
        assert_eq!(cache.snapshot(Kind::Dataset, &name(), "bb22"), snapshot("bb22"));
        assert_eq!(cache.snapshot(Kind::Model, &name(), MAIN), None);
    }

    #[test]
    fn file_of_the_cache_is_never_trusted_as_a_path() {
        let (_dir, cache) = cache();

        for revision in ["evil", "../main", "/etc", "", "main/..", "cc33"] {
            assert_eq!(cache.snapshot(Kind::Dataset, &name(), revision), None, "{revision}");
        }
    }

    #[test]
    fn cache_is_where_the_variables_of_the_hubs_client_say() {
        let with = |set: &[(&str, &str)]| {
            let var = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
            HubCache::from_variables(&var).root
        };

        assert_eq!(with(&[("HOME", "/h")]), Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(with(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(with(&[("HOME", "/h"), ("HF_HOME", "/f")]), Path::new("/f/hub"));
        assert_eq!(with(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), Path::new("/c"));
        assert_eq!(with(&[("HOME", "/h"), ("HF_HOME", "~/f")]), Path::new("/h/f/hub"));
        assert_eq!(with(&[("HOME", "/h"), ("XDG_CACHE_HOME", "~")]), Path::new("/h/huggingface/hub"));
        assert_eq!(with(&[("HOME", "/h"), ("HF_HUB_CACHE", "~/c")]), Path::new("/h/c"));
        assert_eq!(with(&[("HF_HOME", "$A/${B}/$NONE"), ("A", "/a"), ("B", "b")]), Path::new("/a/b/$NONE/hub"));
    }

    #[test]
    fn path_that_exists_is_not_looked_for_in_the_cache() {
        let (dir, cache) = cache();

        let resolved = |path: &Path| cache.resolve(Kind::Dataset, path, None);

        assert_eq!(resolved(dir.path()).unwrap(), dir.path());
        assert!(resolved(Path::new("owner/set")).unwrap().ends_with("snapshots/aa11"));
        assert_eq!(resolved(Path::new("./no/such/file")).unwrap(), Path::new("./no/such/file"));
        let error = resolved(Path::new("owner/other")).unwrap_err().to_string();
        assert!(error.contains("`phalanx fetch --dataset owner/other`"), "{error}");
    }
}
