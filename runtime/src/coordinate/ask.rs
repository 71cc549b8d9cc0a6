//! The operator's client: sends one request to a job's coordinator, with the credential from the job's folder.

use crate::error::control_plane::ControlPlaneError;
use crate::node::shared_folder::{ADDRESS, CONTROL};
use phalanx_actors::control::block_on;
use phalanx_actors::operator::{Answer, Request};
use phalanx_actors::quic::ask::Operator;
use phalanx_actors::quic::listener::OPERATOR;
use phalanx_actors::trust::credential::Credential;
use phalanx_actors::trust::join::parse_addresses;
use phalanx_actors::wire;
use phalanx_strategies::elastic::timing::Timing;
use std::path::Path;

/// Sends a request to the coordinator of the job in this folder.
///
/// # Errors
/// When the folder has no coordinated job, or its coordinator cannot be reached.
pub(crate) fn ask(output_dir: &Path, request: &Request) -> Result<Answer, ControlPlaneError> {
    let control = output_dir.join(CONTROL);
    let no_job = || ControlPlaneError::NoJob { output_dir: output_dir.to_owned() };
    let addresses = std::fs::read_to_string(control.join(ADDRESS)).map_err(|_| no_job())?;
    let addresses = parse_addresses(addresses.trim())?;
    let credential = Credential::load(&control, OPERATOR)?.ok_or_else(no_job)?;
    let frame = wire::encode(request)?;
    let asking = async {
        let operator = Operator::connect(&addresses, &credential, &Timing::default()).await?;
        let answer = operator.ask(frame).await;
        operator.close().await;
        answer
    };
    let no_answer = |source| ControlPlaneError::NoAnswer { output_dir: output_dir.to_owned(), source };
    let answer = block_on(asking).map_err(ControlPlaneError::cannot("start an event loop"))?.map_err(no_answer)?;
    Ok(wire::decode(&answer)?)
}
