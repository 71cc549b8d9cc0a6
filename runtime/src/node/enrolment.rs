//! Enrolment of a node with a coordinator, or the end of the job that it would join.

use crate::control_place::{ADDRESS, ControlPlace};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::node::folder::NodeFolder;
use phalanx_actors::control::block_on;
use phalanx_actors::quic::QuicError;
use phalanx_actors::quic::enrol::enrol;
use phalanx_actors::trust::credential::Credential;
use phalanx_actors::trust::join::{JoinString, parse_addresses};
use phalanx_strategies::elastic::message::Ending;
use phalanx_strategies::elastic::timing::Timing;
use std::path::Path;

/// Enrols as a node of a job, with its key and certificate in `folder`.
///
/// # Errors
/// When no coordinator answers, or the coordinator refuses. [`ControlPlaneError::JobOver`] when nobody answers because the job has
/// ended, as far as this machine can read its record.
pub(crate) fn enter(join: &JoinString, folder: &NodeFolder) -> Result<Credential, JobError> {
    let enrolled = block_on(enrol(&with_published(join), folder.path(), &Timing::default()))
        .map_err(ControlPlaneError::cannot("start an event loop"))?;
    let ended = match &enrolled {
        Err(QuicError::Unreachable { .. }) => ending_of(join),
        _ => None,
    };
    match ended {
        Some(JobEnd { place, ending, .. }) => Err(ControlPlaneError::JobOver { place, ending }.into()),
        None => Ok(enrolled.map_err(ControlPlaneError::from)?),
    }
}

/// The end of a job.
pub(crate) struct JobEnd {
    /// The place of its record.
    place: String,
    pub(crate) ending: Ending,
    /// Somebody has stopped it.
    pub(crate) is_stopped: bool,
}

/// The end of the job of a join string, if it has ended and this machine can read its record.
pub(crate) fn ending_of(join: &JoinString) -> Option<JobEnd> {
    let place = join.published.clone()?;
    let store = ControlPlace::at(Path::new(&place), &Timing::default()).ok()?;
    let record = store.store_as_it_is().read_record().ok()?;
    Some(JobEnd { place, ending: record.ending?, is_stopped: record.requests.stop })
}

/// The join string with the addresses that the active coordinator has published, if this machine can read them: a join string
/// may be older than the coordinator.
fn with_published(join: &JoinString) -> JoinString {
    let read = |root: &String| ControlPlace::at(Path::new(root), &Timing::default()).ok()?.read(ADDRESS).ok()?;
    let text = join.published.as_ref().and_then(read);
    let published = text.and_then(|text| parse_addresses(text.trim()).ok()).unwrap_or_default();
    let mut addresses = join.addresses.clone();
    addresses.extend(published.into_iter().filter(|address| !join.addresses.contains(address)));
    JoinString { addresses, ..join.clone() }
}
