//! The number of a job, which tells its members from those of an earlier run in the same folder.

use crate::control_place::{ControlPlace, JOB};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use phalanx_strategies::elastic::identity::JobId;

/// The job number, kept in a file so that a restarted coordinator continues the same job. Without the file, the job is new.
pub(super) fn job_of(place: &ControlPlace) -> Result<JobId, JobError> {
    match place.read(JOB)? {
        Some(text) => {
            text.trim().parse().map(JobId).map_err(|_| ControlPlaneError::JobFile { path: place.path(JOB) }.into())
        }
        None => {
            let job = job_id();
            place.write(JOB, &job.0.to_string())?;
            Ok(job)
        }
    }
}

/// Removes the job number, so that the next run in this folder is a new job.
pub(super) fn forget_job(place: &ControlPlace) -> Result<(), JobError> {
    place.remove(JOB)
}

/// A number for a new job.
pub(super) fn job_id() -> JobId {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    JobId(now.as_nanos() as u64 ^ u64::from(std::process::id()) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn restarted_coordinator_reads_the_job_number_that_the_first_one_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let place = ControlPlace::Folder(dir.path().to_owned());

        let (first, again) = (job_of(&place).unwrap(), job_of(&place).unwrap());
        forget_job(&place).unwrap();
        forget_job(&place).unwrap();

        assert_eq!(first, again);
        assert_ne!(job_of(&place).unwrap(), first, "a new job gets another number");
    }

    #[test]
    fn unusable_job_file_is_an_error_and_starts_no_new_job() {
        for content in [&b"17 and more"[..], b"", b"\xff"] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(JOB);
            fs::write(&path, content).unwrap();

            let refused = job_of(&ControlPlace::Folder(dir.path().to_owned())).unwrap_err().to_string();

            assert!(refused.contains(path.to_str().unwrap()), "{refused}");
            assert_eq!(fs::read(&path).unwrap(), content, "the file is unchanged");
        }
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(JOB)).unwrap();

        let place = ControlPlace::Folder(dir.path().to_owned());
        assert!(matches!(job_of(&place), Err(JobError::Io { action: "read", .. })));
        assert!(matches!(forget_job(&place), Err(JobError::Io { action: "remove", .. })));
    }
}
