//! The operator's client: sends one request to a job's coordinator, with the credential from the job's folder or object store.

use crate::control_place::{ADDRESS, ControlPlace};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use phalanx_actors::control::block_on;
use phalanx_actors::operator::{Answer, Request};
use phalanx_actors::quic::ask::Operator;
use phalanx_actors::quic::shared::OPERATOR;
use phalanx_actors::trust::TrustError;
use phalanx_actors::trust::credential::Credential;
use phalanx_actors::trust::join::parse_addresses;
use phalanx_actors::wire;
use phalanx_strategies::elastic::timing::Timing;
use std::path::Path;

/// Sends a request to the coordinator of the job with this `output_dir`.
///
/// # Errors
/// When it has no coordinated job, or its coordinator cannot be reached.
pub(crate) fn ask(output_dir: &Path, request: &Request) -> Result<Answer, JobError> {
    let place = ControlPlace::of(output_dir, &Timing::default())?;
    let no_job = || ControlPlaneError::NoJob { output_dir: output_dir.to_owned() };
    if let Some(original) = place.copied_from() {
        // The coordinator of that folder would take the request for one from its own.
        let original = original.parent().unwrap_or(&original).to_owned();
        return Err(ControlPlaneError::Copied { output_dir: output_dir.to_owned(), original }.into());
    }
    let addresses = place.read(ADDRESS)?.ok_or_else(no_job)?;
    let addresses = parse_addresses(addresses.trim());
    let addresses =
        addresses.map_err(|why| ControlPlaneError::DamagedEntry { path: place.path(ADDRESS), why: why.to_string() })?;
    let credential = Credential::load(place.secrets(), OPERATOR).map_err(|error| match error {
        TrustError::Damaged { path, why } => ControlPlaneError::DamagedEntry { path, why },
        error => error.into(),
    })?;
    let credential = credential.ok_or_else(no_job)?;
    let frame = wire::encode(request).map_err(ControlPlaneError::from)?;
    let asking = async {
        let operator = Operator::connect(&addresses, &credential, &Timing::default()).await?;
        let answer = operator.ask(frame).await;
        operator.close().await;
        answer
    };
    let no_answer = |source| ControlPlaneError::NoAnswer { output_dir: output_dir.to_owned(), source };
    let answer = block_on(asking).map_err(ControlPlaneError::cannot("start an event loop"))?.map_err(no_answer)?;
    Ok(wire::decode(&answer).map_err(ControlPlaneError::from)?)
}
