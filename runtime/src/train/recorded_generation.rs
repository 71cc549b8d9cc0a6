//! What the ranks of a job find out about later worlds, and about other jobs in the place of their checkpoints.

use crate::checkpoint_claim::ClaimedPlace;
use crate::config::output::{OutputSection, is_url};
use crate::control_place::ControlPlace;
use phalanx_actors::store::SharedStore;
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::timing::Timing;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// The generation on the record of a job, for its ranks. The record is opened once it is asked for.
#[derive(Clone, Debug)]
pub(crate) struct RecordedGeneration {
    output_dir: PathBuf,
    timing: Timing,
    record: Arc<OnceLock<Option<SharedStore>>>,
    /// The place of the checkpoints, if the job has claimed one.
    claimed: Option<ClaimedPlace>,
}

impl RecordedGeneration {
    /// The generation of the job with this output, and with this token of its claim on the checkpoints.
    pub(crate) fn of(output: &OutputSection, timing: &Timing, claim: Option<u64>) -> RecordedGeneration {
        let claimed = claim.map(|token| ClaimedPlace::of(output, token));
        let output_dir = output.output_dir.clone();
        RecordedGeneration { output_dir, timing: *timing, record: Arc::default(), claimed }
    }

    /// Reads it where that takes no request over the network; `None` elsewhere.
    pub(crate) fn read_here(&self) -> Option<u64> {
        if is_url(&self.output_dir) { None } else { self.read() }
    }

    /// Reads it; `None` if the record cannot be read now.
    pub(crate) fn read(&self) -> Option<u64> {
        self.record().map(|record| record.generation.0)
    }

    /// The latest generation before this run; `None` if the record cannot be read now.
    pub(crate) fn before_this_run(&self) -> Option<u64> {
        self.record().map(|record| record.began.0)
    }

    /// `None` if it cannot be read now.
    fn record(&self) -> Option<Record> {
        let open = || ControlPlace::of(&self.output_dir, &self.timing).ok().map(|place| place.store_as_it_is());
        let record = self.record.get_or_init(open).as_ref()?;
        record.read_record().ok()
    }

    /// As [`RecordedGeneration::read`], for those who change checkpoints: later than all others once another job has the place of the
    /// checkpoints.
    pub(crate) fn read_for_checkpoints(&self) -> Option<u64> {
        if self.claimed.as_ref().is_some_and(ClaimedPlace::is_lost) { Some(u64::MAX) } else { self.read() }
    }
}
