//! Files for locks of the kernel. Whoever can open a file can lock it and keep its owner out, so only the owner may open them.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Read and written by the owner.
const PRIVATE: u32 = 0o600;

/// Opens a file to lock it, and creates it if it is missing. An existing one of this user is made private, too.
///
/// # Errors
/// When the file cannot be opened.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let file = File::options().append(true).create(true).mode(PRIVATE).open(path)?;
    if file.metadata()?.mode() & 0o077 != 0 {
        // Only its owner may do this.
        let _ = file.set_permissions(Permissions::from_mode(PRIVATE));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_file_is_private_even_if_it_was_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let [new, old] = ["new", "old"].map(|name| dir.path().join(name));
        std::fs::write(&old, "").unwrap();
        std::fs::set_permissions(&old, Permissions::from_mode(0o644)).unwrap();

        for path in [&new, &old] {
            let file = open(path).unwrap();

            assert_eq!(file.metadata().unwrap().mode() & 0o777, PRIVATE, "{}", path.display());
        }
    }
}
