//! Durable names of files.

use std::fs::File;
use std::io;
use std::path::Path;

/// Makes the names of the files in a folder durable, where its file system can do that. Mounts of other systems (SMB, exFAT, object
/// stores) refuse it for folders; PostgreSQL (`fsync_fname_ext`) and SQLite go on there, too.
///
/// # Errors
/// When the folder cannot be opened, or the disk fails.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    const REFUSALS: [i32; 4] = [libc::EINVAL, libc::EBADF, libc::ENOTSUP, libc::ENOSYS];
    match File::open(dir)?.sync_all() {
        Err(error) if error.raw_os_error().is_some_and(|number| REFUSALS.contains(&number)) => Ok(()),
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

        assert!(sync_dir(&folder.join("absent")).is_err());
    }
}
