//! Durable names of files.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

/// Makes the names of the files in a folder durable, where its file system can do that. Mounts of other systems (SMB, exFAT, object
/// stores) refuse it for folders; PostgreSQL and SQLite go on there, too.
///
/// # Errors
/// When the folder cannot be opened, or the disk fails.
pub(crate) fn sync_dir(dir: &Path) -> std::io::Result<()> {
    /// A descriptor that cannot be synced.
    const EBADF: i32 = 9;
    match File::open(dir)?.sync_all() {
        Err(error)
            if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
                || error.raw_os_error() == Some(EBADF) =>
        {
            Ok(())
        }
        synced => synced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_whose_file_system_cannot_sync_it_counts_as_synced() {
        let folder = Path::new("/proc");
        assert!(File::open(folder).unwrap().sync_all().is_err(), "the kernel keeps no such names");

        sync_dir(folder).unwrap();
    }
}
