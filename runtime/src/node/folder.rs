//! The folder with the key and certificate of a node.
//!
//! The key is the identity of the node. A second process with the same key would count as a later start of the same node and
//! would displace the first one, so only one process at a time may use the folder. The kernel holds the lock, so a crash
//! releases it.

use crate::error::control_plane::ControlPlaneError;
use phalanx_actors::trust::file;
use phalanx_storage::foreign_file;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

/// The parent of the folders of nodes that are not given one.
const NODES: &str = ".phalanx-node";
/// The name of a node's folder on a machine without a host name.
const NAMELESS: &str = "localhost";

/// A node's folder, locked while this value lives.
#[derive(Debug)]
#[must_use = "a drop releases the lock"]
pub(crate) struct NodeFolder {
    path: PathBuf,
    _lock: Option<File>,
}

impl NodeFolder {
    /// Creates the folder if it is missing, and locks it.
    ///
    /// # Errors
    /// When another running node uses the folder, or the folder cannot be used.
    pub(crate) fn lock(path: &Path) -> Result<NodeFolder, ControlPlaneError> {
        file::create_dir(path)?;
        let lock = path.join("lock");
        let opened = foreign_file::open_lock(&lock);
        let opened = opened.map_err(|source| ControlPlaneError::NodeFolder { path: lock, source })?;
        let lock = match opened.try_lock() {
            Ok(()) => Some(opened),
            Err(TryLockError::WouldBlock) => {
                return Err(ControlPlaneError::NodeFolderInUse { path: path.to_owned() });
            }
            // Some network file systems have no locks. The coordinator then rejects the earlier of two nodes with one key.
            Err(TryLockError::Error(error)) => {
                tracing::warn!(%error, folder = %path.display(), "the folder of the node cannot be locked");
                None
            }
        };
        Ok(NodeFolder { path: path.to_owned(), _lock: lock })
    }

    /// The path of the folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// The folder of a node that is not given one: machines that share a working folder have different host names.
pub(crate) fn default_path(host: Option<&str>) -> PathBuf {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || "-._".contains(letter) { letter } else { '_' };
    let host: String = host.unwrap_or_default().chars().map(plain).collect();
    let is_name = !host.trim_matches('.').is_empty();
    Path::new(NODES).join(if is_name { &host } else { NAMELESS })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_is_refused_while_another_node_uses_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/node");

        let first = NodeFolder::lock(&path).unwrap();
        let second = NodeFolder::lock(&path).unwrap_err();
        drop(first);

        assert!(matches!(&second, ControlPlaneError::NodeFolderInUse { path: of } if *of == path), "{second}");
        assert_eq!(NodeFolder::lock(&path).unwrap().path(), path);
    }

    #[test]
    fn machines_with_different_host_names_have_different_folders() {
        let paths = [Some("a"), Some("b.cluster"), Some("../c"), Some(".."), Some(""), None];

        let paths = paths.map(|host| default_path(host).to_str().unwrap().to_owned());

        let (a, b, c, none) =
            (".phalanx-node/a", ".phalanx-node/b.cluster", ".phalanx-node/.._c", ".phalanx-node/localhost");
        assert_eq!(paths, [a, b, c, none, none, none]);
    }
}
