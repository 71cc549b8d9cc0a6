//! The claim of a job on a place for checkpoints outside its `output_dir`: an object store, or a folder of its own.
//!
//! Two launches with an `output_dir` each would otherwise save into one place: each would remove the other's checkpoints, and a later
//! run would continue from a mixture of both. The lease in `output_dir` excludes only launches that share it.
//!
//! Invariants:
//! - CLAIM-1 A job begins only with the claim. It takes one that is free, its own, or one that nobody has renewed for [`Pace::lapse`];
//!   a job that renews its claim is named, and its place refused. No clocks are compared.
//! - CLAIM-2 A job that has lost its claim ends, and its ranks neither commit nor remove checkpoints ([`ClaimedPlace::is_lost`]).
//!
//! A place that does not answer while a job trains changes nothing: the next renewal tries again.

use crate::config::output::OutputSection;
use crate::control_place::{ControlPlace, documents_at};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::units::utc;
use phalanx_actors::store::conditional::Conditional;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The times of a claim.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Between two renewals: requests of a few hundred bytes.
    renewal: Duration,
    /// A claim that was not renewed for this long is free.
    lapse: Duration,
    /// Between two looks at a claim that may have lapsed.
    look: Duration,
}

/// An interruption of some seconds, which is usual for object stores, costs no claim.
const PACE: Pace =
    Pace { renewal: Duration::from_secs(5), lapse: Duration::from_secs(20), look: Duration::from_millis(500) };
/// The longest wait for one answer of the place.
const ANSWER: Duration = Duration::from_secs(5);
/// Attempts to claim a place that does not answer, or refuses.
const ATTEMPTS: usize = 4;
/// Folder of the claim below the checkpoints, and its document.
const CLAIM: &str = "claim";
/// File in the control folder of a job with the token of its claims.
const TOKEN: &str = "claim";

/// What is in the place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Claim {
    /// The job: a random number, which its `output_dir` keeps.
    token: u64,
    holder: Holder,
    /// Counts renewals.
    beat: u64,
    /// Whether its job has ended.
    released: bool,
}

/// The process that holds a claim, for users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    host: String,
    pid: u32,
    since_unix_ms: u64,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on {}, since {}", self.pid, self.host, utc(self.since_unix_ms))
    }
}

impl Holder {
    fn here() -> Holder {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let host = sysinfo::System::host_name().unwrap_or_else(|_| "an unnamed machine".into());
        Holder { host, pid: std::process::id(), since_unix_ms: since.as_millis() as u64 }
    }
}

/// A held claim, which a thread renews. A drop releases it.
#[derive(Debug)]
#[must_use = "a drop releases the claim"]
pub(crate) struct CheckpointClaim {
    root: PathBuf,
    token: u64,
    lost: Arc<OnceLock<Holder>>,
    end: Option<Sender<()>>,
    renewing: Option<JoinHandle<()>>,
}

/// The root of the checkpoints, if they are outside the output of their job.
fn claimed_root(output: &OutputSection) -> Option<PathBuf> {
    Some(output.checkpoints()).filter(|root| *root != output.output_dir.join("checkpoints"))
}

impl CheckpointClaim {
    /// Claims the place of the checkpoints of a job that leads in `control`; `None` if they are in its output, `stops` while it
    /// waits, or the place keeps no claims.
    ///
    /// # Errors
    /// When another job renews its claim, or this one may not write there: a run would lose all its steps.
    pub(crate) fn take(
        output: &OutputSection,
        control: &ControlPlace,
        stops: &dyn Fn() -> bool,
    ) -> Result<Option<CheckpointClaim>, JobError> {
        let Some(root) = claimed_root(output) else { return Ok(None) };
        for _ in 1..ATTEMPTS {
            match CheckpointClaim::take_at(&root, control, stops, PACE) {
                Err(error) if !matches!(error, JobError::CheckpointsInUse { .. }) => std::thread::sleep(PACE.look),
                done => return done,
            }
        }
        match CheckpointClaim::take_at(&root, control, stops, PACE) {
            Err(error) if is_refusal(&error) => Err(JobError::CheckpointsRefused { root, reason: error.to_string() }),
            Err(error) if !matches!(error, JobError::CheckpointsInUse { .. }) => {
                // Not every object store replaces objects conditionally, and a run needs its checkpoints only later.
                tracing::warn!(%error, "the checkpoints cannot be claimed: a second job with the same place would not be refused");
                Ok(None)
            }
            done => done,
        }
    }

    fn take_at(
        root: &Path,
        control: &ControlPlace,
        stops: &dyn Fn() -> bool,
        pace: Pace,
    ) -> Result<Option<CheckpointClaim>, JobError> {
        let root = root.to_owned();
        let store = documents_at(&root.join(CLAIM), ANSWER)?;
        let token = token_of(control)?;
        let is_free = |claim: &Option<Claim>| claim.as_ref().is_none_or(|claim| claim.released || claim.token == token);
        let (first, since) = (read(&store)?, Instant::now());
        if let Some(other) = first.as_ref().filter(|_| !is_free(&first)) {
            tracing::info!(root = %root.display(), holder = %other.holder, "waiting for the claim of another job to lapse");
        }
        let mut seen = first.clone();
        while !is_free(&seen) && since.elapsed() < pace.lapse {
            if stops() {
                return Ok(None);
            }
            std::thread::sleep(pace.look);
            seen = read(&store)?;
            if let Some(other) = seen.as_ref().filter(|_| seen != first && !is_free(&seen)) {
                return Err(JobError::CheckpointsInUse { root, holder: other.holder.to_string() });
            }
        }
        let claim = Claim { token, holder: Holder::here(), beat: 0, released: false };
        // Only the version that was read last is replaced.
        if let Err(error) = write(&store, &claim) {
            return Err(match read(&store)? {
                Some(other) if other.token != token => {
                    JobError::CheckpointsInUse { root, holder: other.holder.to_string() }
                }
                _ => error,
            });
        }
        let (lost, (end, ended)) = (Arc::default(), channel());
        let found = Arc::clone(&lost);
        let renewing =
            Builder::new().name("claim".into()).spawn(move || renew(&store, claim, pace.renewal, &found, &ended));
        let renewing = renewing.map_err(ControlPlaneError::cannot("start a thread that renews the claim"))?;
        Ok(Some(CheckpointClaim { root, token, lost, end: Some(end), renewing: Some(renewing) }))
    }

    /// The token of the job, for its ranks.
    pub(crate) const fn token(&self) -> u64 {
        self.token
    }

    /// How the job has lost its claim, if it has (`CLAIM-2`).
    pub(crate) fn loss(&self) -> Option<String> {
        let holder = self.lost.get()?;
        Some(format!(
            "another job ({holder}) has taken over the checkpoints in {}: this one had not renewed its claim for {} s",
            self.root.display(),
            PACE.lapse.as_secs()
        ))
    }
}

impl Drop for CheckpointClaim {
    fn drop(&mut self) {
        drop(self.end.take());
        // Its panic was reported.
        let _ = self.renewing.take().map(JoinHandle::join);
    }
}

/// The place of a job's checkpoints, for its ranks.
#[derive(Clone, Debug)]
pub(crate) struct ClaimedPlace {
    root: PathBuf,
    token: u64,
    store: Arc<OnceLock<Option<Arc<Conditional>>>>,
}

impl ClaimedPlace {
    /// The place that the job with this output has claimed with this token.
    pub(crate) fn of(output: &OutputSection, token: u64) -> ClaimedPlace {
        ClaimedPlace { root: output.checkpoints(), token, store: Arc::default() }
    }

    /// Whether this machine sees the claim of the job.
    pub(crate) fn is_here(&self) -> bool {
        let store = self.store.get_or_init(|| documents_at(&self.root.join(CLAIM), ANSWER).ok());
        let found = store.as_ref().and_then(|store| read(store).ok()?);
        found.is_some_and(|claim| claim.token == self.token)
    }

    /// Whether another job has the claim now. A place that does not answer has taken no other claim from this machine.
    pub(crate) fn is_lost(&self) -> bool {
        let store = self.store.get_or_init(|| documents_at(&self.root.join(CLAIM), ANSWER).ok());
        let found = store.as_ref().and_then(|store| read(store).ok()?);
        found.is_some_and(|claim| claim.token != self.token)
    }
}

/// Renews a claim until the sender is dropped, and then releases it; ends early when another job has it.
fn renew(store: &Conditional, mut claim: Claim, interval: Duration, lost: &OnceLock<Holder>, ended: &Receiver<()>) {
    loop {
        let ends = ended.recv_timeout(interval) != Err(RecvTimeoutError::Timeout);
        (claim.beat, claim.released) = (claim.beat + 1, ends);
        match read(store) {
            Ok(Some(other)) if other.token != claim.token => {
                // It is set once.
                let _ = lost.set(other.holder);
                return;
            }
            // A successor of this process in the same job renews it.
            Ok(Some(other)) if other.holder != claim.holder => return,
            Ok(_) => {
                if let Err(error) = write(store, &claim) {
                    tracing::debug!(%error, "cannot renew the claim on the checkpoints; retrying");
                }
            }
            Err(error) => tracing::debug!(%error, "cannot read the claim on the checkpoints; retrying"),
        }
        if ends {
            return;
        }
    }
}

/// The token of the job that leads in `control`, which its restarts share, but no run in a copy of its folder.
fn token_of(control: &ControlPlace) -> Result<u64, JobError> {
    let is_copy = control.copied_from().is_some();
    if let Some(token) = control.read(TOKEN)?.filter(|_| !is_copy).and_then(|text| text.trim().parse().ok()) {
        return Ok(token);
    }
    // The standard library seeds each hasher at random.
    let token = RandomState::new().hash_one(std::process::id());
    control.write(TOKEN, &token.to_string())?;
    control.settle()?;
    Ok(token)
}

/// The claim in a place. A damaged one, as of an interrupted copy, is none.
fn read(store: &Conditional) -> Result<Option<Claim>, JobError> {
    let bytes = store.read_document(CLAIM).map_err(ControlPlaneError::from)?;
    Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
}

/// Replaces the claim that was read last.
fn write(store: &Conditional, claim: &Claim) -> Result<(), JobError> {
    let bytes = serde_json::to_vec(claim).map_err(ControlPlaneError::Encode)?;
    Ok(store.write_document(CLAIM, &bytes).map_err(ControlPlaneError::from)?)
}

/// Whether a place refuses to be written, now and later. The errors of stores keep the text of the system's or the client's error.
fn is_refusal(error: &JobError) -> bool {
    const REFUSALS: [i32; 4] = [libc::EACCES, libc::EPERM, libc::EROFS, libc::ENOTDIR];
    let text = error.to_string();
    let is_of_system = REFUSALS.iter().any(|number| text.contains(&format!("(os error {number})")));
    is_of_system || text.contains("status code: 403")
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Pace = Pace {
        renewal: Duration::from_millis(50),
        lapse: Duration::from_millis(1_000),
        look: Duration::from_millis(20),
    };

    /// Two launches, each with a folder of its own, and one folder for the checkpoints of both.
    struct Launches {
        dir: tempfile::TempDir,
    }

    impl Launches {
        fn new() -> Launches {
            Launches { dir: tempfile::tempdir().unwrap() }
        }

        fn output(&self, name: &str) -> (OutputSection, ControlPlace) {
            let output_dir = self.dir.path().join(name);
            std::fs::create_dir_all(&output_dir).unwrap();
            let checkpoint_dir = Some(self.dir.path().join("checkpoints"));
            let control = ControlPlace::Folder(output_dir.clone());
            (OutputSection { output_dir, checkpoint_dir, ..OutputSection::default() }, control)
        }

        fn take(&self, name: &str) -> Result<Option<CheckpointClaim>, JobError> {
            let (output, control) = self.output(name);
            CheckpointClaim::take_at(&output.checkpoints(), &control, &|| false, FAST)
        }

        fn is_lost(&self, name: &str) -> bool {
            let (output, control) = self.output(name);
            ClaimedPlace::of(&output, token_of(&control).unwrap()).is_lost()
        }

        /// As if the process of the holder had died.
        fn leave(&self, claim: Option<CheckpointClaim>) {
            let store = documents_at(&self.dir.path().join("checkpoints").join(CLAIM), ANSWER).unwrap();
            drop(claim);
            let released = read(&store).unwrap().unwrap();
            write(&store, &Claim { released: false, ..released }).unwrap();
        }
    }

    // CLAIM-1
    #[test]
    fn second_launch_is_refused_as_long_as_the_first_one_lives() {
        let launches = Launches::new();
        let first = launches.take("one").unwrap();

        let refused = launches.take("two");
        drop(first);
        let later = launches.take("two");

        let text = refused.unwrap_err().to_string();
        assert!(text.contains(&format!("process {}", std::process::id())) && text.contains("checkpoint_dir"), "{text}");
        assert!(later.unwrap().is_some() && launches.is_lost("one"));
    }

    // CLAIM-1
    #[test]
    fn launch_that_restarts_does_not_wait_for_its_own_claim_and_others_wait_for_it_to_lapse() {
        let launches = Launches::new();
        launches.leave(launches.take("one").unwrap());
        let begin = Instant::now();

        let again = launches.take("one").unwrap();
        let restarted = begin.elapsed();
        launches.leave(again);
        let begin = Instant::now();
        let other = launches.take("two").unwrap();

        assert!(restarted < FAST.lapse, "{restarted:?}");
        assert!(other.is_some() && begin.elapsed() >= FAST.lapse);
    }

    #[test]
    fn place_that_may_not_be_written_is_refused_before_the_run() {
        let launches = Launches::new();
        let (output, control) = launches.output("one");
        std::fs::write(launches.dir.path().join("file"), "").unwrap();
        let output = OutputSection { checkpoint_dir: Some(launches.dir.path().join("file/checkpoints")), ..output };

        let refused = CheckpointClaim::take(&output, &control, &|| false).unwrap_err();

        assert!(matches!(refused, JobError::CheckpointsRefused { .. }), "{refused}");
    }

    // CLAIM-2
    #[test]
    fn job_finds_out_that_another_one_has_taken_its_claim() {
        let launches = Launches::new();
        let first = launches.take("one").unwrap().unwrap();
        let (before, store) = (launches.is_lost("one"), launches.dir.path().join("checkpoints").join(CLAIM));
        let store = documents_at(&store, ANSWER).unwrap();
        let other = Claim { token: 7, holder: Holder::here(), beat: 0, released: false };

        // Its thread may renew the claim in between.
        while read(&store).is_ok_and(|_| write(&store, &other).is_err()) {}
        let after = launches.is_lost("one");
        while first.loss().is_none() {
            std::thread::sleep(FAST.look);
        }

        assert_eq!((before, after), (false, true));
    }

    #[test]
    fn checkpoints_in_the_output_of_a_job_need_no_claim() {
        let launches = Launches::new();
        let (output, control) = launches.output("one");
        let output = OutputSection { checkpoint_dir: None, ..output };

        let claim = CheckpointClaim::take(&output, &control, &|| false).unwrap();

        assert!(claim.is_none());
    }
}
