//! Whether a node sees the job's output folder, or its folder of checkpoints: otherwise its ranks would write their parts of a checkpoint where no other rank
//! finds them, and the first save would fail.

use crate::checkpoint_claim::ClaimedPlace;
use crate::config::output::{OutputSection, is_url};
use crate::control_place::{CONTROL, JOB};
use crate::error::JobError;
use phalanx_strategies::elastic::identity::JobId;

/// Checks that the output folder of this node is that of the job, by the job's number in it; or the folder of checkpoints elsewhere, by
/// the job's claim on it. Checkpoints in an object store need neither.
///
/// # Errors
/// When the number, or the claim, is absent or another one.
pub(crate) fn check(output: &OutputSection, job: JobId, claim: Option<u64>) -> Result<(), JobError> {
    let checkpoints = output.checkpoints();
    let claimed = claim.filter(|_| !is_url(&checkpoints)).map(|token| ClaimedPlace::of(output, token));
    if claimed.is_some_and(|place| !place.is_here()) {
        return Err(JobError::CheckpointsNotShared { path: checkpoints });
    }
    if output.checkpoint_dir.is_some() || output.is_remote() {
        return Ok(());
    }
    let mark = output.output_dir.join(CONTROL).join(JOB);
    let found = match std::fs::read_to_string(&mark) {
        Ok(text) if text.trim() == job.0.to_string() => return Ok(()),
        Ok(text) => format!("{:?}", text.trim().chars().take(40).collect::<String>()),
        Err(error) => format!("none ({error})"),
    };
    Err(JobError::NotShared { path: output.output_dir.clone(), expected: job.0, mark, found })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint_claim::CheckpointClaim;
    use crate::control_place::ControlPlace;

    #[test]
    fn folder_with_the_number_of_another_job_or_none_is_refused_unless_checkpoints_are_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let output = OutputSection { output_dir: dir.path().to_owned(), ..OutputSection::default() };
        let remote = OutputSection { output_dir: "s3://bucket/run".into(), ..output.clone() };
        let elsewhere = OutputSection { checkpoint_dir: Some("s3://bucket/run".into()), ..output.clone() };

        let absent = check(&output, JobId(7), None).unwrap_err().to_string();
        std::fs::create_dir(dir.path().join(CONTROL)).unwrap();
        std::fs::write(dir.path().join(CONTROL).join(JOB), "8\n").unwrap();
        let other = check(&output, JobId(7), None).unwrap_err().to_string();

        assert!(absent.contains("job 7") && absent.contains("none"), "{absent}");
        assert!(other.contains("job 7") && other.contains("\"8\""), "{other}");
        assert!(check(&output, JobId(8), None).is_ok() && check(&elsewhere, JobId(7), Some(3)).is_ok());
        assert!(check(&remote, JobId(7), None).is_ok());
    }

    #[test]
    fn folder_of_checkpoints_without_the_claim_of_the_job_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let on = |machine: &str| OutputSection {
            output_dir: dir.path().to_owned(),
            checkpoint_dir: Some(dir.path().join(machine)),
            ..OutputSection::default()
        };
        let control = ControlPlace::Folder(dir.path().to_owned());
        let claim = CheckpointClaim::take(&on("first"), &control, &|| false).unwrap().unwrap();

        let refused = check(&on("second"), JobId(7), Some(claim.token())).unwrap_err().to_string();

        assert!(refused.contains("second") && refused.contains("share it"), "{refused}");
        assert!(check(&on("first"), JobId(7), Some(claim.token())).is_ok());
        assert!(check(&on("second"), JobId(7), None).is_ok(), "the place keeps no claims");
    }
}
