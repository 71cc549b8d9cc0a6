//! The file that shows whose the folder of a job is.

use phalanx_strategies::elastic::identity::JobId;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

/// The file with the job's number in its folder. Locks on files that were removed exclude nobody, so the name counts.
#[derive(Debug)]
pub(super) struct FolderMark {
    pub(super) path: PathBuf,
    pub(super) job: JobId,
}

impl FolderMark {
    /// How the job has lost its folder, if it has. A folder that cannot be read now may return.
    pub(super) fn loss(&self) -> Option<String> {
        let control = self.path.parent().unwrap_or(&self.path).display();
        match fs::read_to_string(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Some(format!("its folder {control} was removed while it ran, and with it what a successor would need"))
            }
            Ok(text) if text.trim() != self.job.0.to_string() => {
                Some(format!("its folder {control} belongs to another job now, which began while this one ran"))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control_place::JOB;

    #[test]
    fn job_whose_folder_is_removed_or_taken_by_another_job_knows_it() {
        let dir = tempfile::tempdir().unwrap();
        let mark = FolderMark { path: dir.path().join(JOB), job: JobId(17) };
        let removed = mark.loss().unwrap();
        fs::write(&mark.path, "17\n").unwrap();
        let own = mark.loss();
        fs::write(&mark.path, "18").unwrap();
        let taken = mark.loss().unwrap();

        assert!(removed.contains("was removed while it ran"), "{removed}");
        assert_eq!(own, None);
        assert!(taken.contains("belongs to another job now"), "{taken}");
    }
}
