//! Opens the port of a coordinator, again at its earlier address if possible.

use crate::config::JobConfig;
use crate::control_place;
use crate::control_place::CONTROL;
use crate::coordinate::advertised::{advertised, outward};
use crate::coordinate::patience::patiently;
use crate::coordinate::serving::{PORT, Serve, last_address, write_address};
use crate::coordinate::term::Term;
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::node::bootstrap::JobBootstrap;
use crate::train::fit::{fits, fits_here};
use crate::train::plan::ModelPlan;
use phalanx_actors::coordinator_handle::Admission;
use phalanx_actors::operator::Request;
use phalanx_actors::quic::QuicError;
use phalanx_actors::quic::listener::Listener;
use phalanx_actors::quic::listener_config::ListenerConfig;
use phalanx_actors::transport::Inbox;
use phalanx_actors::trust::authority::Authority;
use phalanx_actors::trust::join::{Address, JoinString};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};

/// Listens, publishes the address, and creates a join string.
pub(super) fn open(config: &JobConfig, serve: &Serve, term: &Term) -> Result<(Listener, Inbox, JoinString), JobError> {
    let (listener, inbox) = listen_again(config, serve.listen, term)?;
    let addresses = advertised(listener.address(), &serve.advertise, outward)?;
    write_address(&term.place, &addresses)?;
    let invitation =
        listener.invite(addresses, serve.token_lifetime, serve.n_machines).map_err(ControlPlaneError::from)?;
    // A join string is one word for every shell.
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "/:.,-_".contains(letter);
    let published = term.place.root().filter(|root| root.chars().all(plain));
    Ok((listener, inbox, JoinString { published, ..invitation }))
}

/// Listens at an address. Without a port of its own, a coordinator listens at the port of its predecessor, where the nodes look
/// for it, unless another program has that port now.
pub(super) fn listen_again(config: &JobConfig, at: SocketAddr, term: &Term) -> Result<(Listener, Inbox), JobError> {
    let path = config.output.folder().join(CONTROL).join(PORT);
    let before = last_address(config, at);
    let listened = match listen(config, before, term) {
        Err(JobError::ControlPlane(ControlPlaneError::Transport(QuicError::Bind { .. }))) if before != at => {
            let port = before.port();
            tracing::warn!(port, "the port of the last coordinator is in use; nodes need the new address");
            listen(config, at, term)
        }
        listened => listened,
    }?;
    let port = listened.0.address().port().to_string();
    let written = fs::create_dir_all(config.output.folder().join(CONTROL))
        .and_then(|()| control_place::write(&path, port.as_bytes()));
    written.map_err(|source| JobError::Io { action: "write", path, source })?;
    Ok(listened)
}

/// Listens for operators of a job on this machine alone. No node can join, because no token is issued.
pub(super) fn listen_alone(config: &JobConfig, term: &mut Term) -> Result<(Listener, Inbox), JobError> {
    let goes_on = || false;
    let at = (Ipv4Addr::LOCALHOST, 0).into();
    let (listener, inbox) = patiently(&term.place, &goes_on, || listen(config, at, term))?;
    term.addresses = vec![Address::from(listener.address())];
    patiently(&term.place, &goes_on, || write_address(&term.place, &term.addresses))?;
    Ok((listener, inbox))
}

/// Checks requests to a job: a mesh must fit the model. On one machine, a mesh may not exceed the number of ranks, and the
/// node cannot be drained.
pub(super) fn admission(config: &JobConfig, model: &ModelPlan, n_slots_alone: Option<u32>) -> Admission {
    let (model, evaluates) = (model.clone(), config.data.evaluates());
    let kept_tp = config.parallel.mesh().ok().filter(|_| config.parallel.reproducible).map(|mesh| mesh.tp);
    Admission::new(move |request| match (request, n_slots_alone) {
        (Request::Resize(mesh), _) if kept_tp.is_some_and(|tp| tp != mesh.tp) => Err(format!(
            "tensor_parallel_size {} gives other bits than {}, which a run with `reproducible` keeps",
            mesh.tp,
            kept_tp.unwrap_or_default()
        )),
        (Request::Resize(mesh), None) => fits(&model, *mesh, evaluates).map(drop).map_err(|error| error.to_string()),
        (Request::Resize(mesh), Some(n_slots)) => {
            fits_here(&model, *mesh, evaluates, n_slots).map_err(|error| error.to_string())
        }
        (Request::Drain(_) | Request::DeclareGone(_), Some(_)) => {
            Err("the job runs on one machine, so no other node can take its state; stopping the job saves it".into())
        }
        _ => Ok(()),
    })
}

/// Listens for nodes and operators.
pub(super) fn listen(config: &JobConfig, at: SocketAddr, term: &Term) -> Result<(Listener, Inbox), JobError> {
    let secrets = term.place.secrets();
    let authority = Authority::open(&secrets, term.job).map_err(ControlPlaneError::from)?;
    let secret = authority.secret("tensors between ranks").to_vec();
    drop(authority);
    let (start_from, claim) = (term.start_from.clone(), term.claim());
    let bootstrap = JobBootstrap { yaml: config.to_yaml(), secret, start_from, claim };
    let settings = ListenerConfig {
        listen: at,
        timing: config.elastic.timing(),
        bootstrap: serde_json::to_vec(&bootstrap).map_err(ControlPlaneError::Encode)?,
        ..ListenerConfig::new(&secrets, term.job)
    };
    Ok(Listener::start(settings).map_err(ControlPlaneError::from)?)
}
